"""Matrix products in kernels for GPUs, by the precision of the products outside."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from relattn.kernels.precision import current_precision

# Least sizes of a product.
TILE = 16
# Widest heads.
MAX_HEAD_DIM = 128
# Products of float32 arrays.
ALGORITHMS = {
    "default": jax.lax.DotAlgorithmPreset.TF32_TF32_F32,
    "high": jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3,
    "highest": jax.lax.DotAlgorithmPreset.F32_F32_F32,
}
# The exponent of what has no weight; finite, so that no difference is NaN.
MIN_EXPONENT = -1e30


def precision_name(precision: jax.lax.PrecisionLike) -> str | None:
    """Returns a key of `ALGORITHMS`, or None for other precisions.

    Example:
        >>> precision_name("highest"), precision_name("BF16_BF16_F32")
        ('highest', None)
    """
    precision = current_precision(precision)
    if precision is None:
        return "default"
    try:
        return jax.lax.Precision(precision).name.lower()
    except ValueError:
        return None


def kernel_dtype(precision: str, *arrays: Array) -> type:
    """Returns the dtype of products: bfloat16 if all arrays are, or else float32.

    Half precision has no products that are more precise. float16 has too few exponents
    for scaled cotangents and small weights.
    """
    half = precision == "default" and all(x.dtype == jnp.bfloat16 for x in arrays)
    return jnp.bfloat16 if half else jnp.float32


def dot(
    a: Float[Array, "n k"], b: Float[Array, "k m"], precision: str
) -> Float[Array, "n m"]:
    """Multiplies two arrays of one dtype, with sums in float32."""
    algorithm = ALGORITHMS[precision] if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=algorithm, preferred_element_type=jnp.float32)


def power_of_2(size: int) -> int:
    """Returns the least power of two that is not below ``size`` and `TILE`.

    Example:
        >>> power_of_2(3), power_of_2(33)
        (16, 64)
    """
    return max(TILE, 2 ** (size - 1).bit_length())

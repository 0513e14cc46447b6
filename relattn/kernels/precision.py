"""The precision of exponentials, sums and denominators: float32 at least."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array


def compute_dtype(*arrays: Array | np.ndarray | np.dtype) -> np.dtype:
    """The dtype to compute in: that of the arrays, but float32 at least.

    Args:
        *arrays: What is computed with, or its dtypes.

    Returns:
        float32, or float64 where an array is.

    Example:
        >>> compute_dtype(jnp.ones(2, jnp.bfloat16), jnp.ones(3, jnp.float16))
        dtype('float32')
    """
    return jnp.result_type(jnp.float32, *arrays)


def widen(x: Array | np.ndarray) -> Array:
    """An array in the dtype to compute in."""
    return jnp.asarray(x, compute_dtype(x))


def wide_einsum(precision: jax.lax.PrecisionLike) -> Callable[..., Array]:
    """Einsum at a precision, whose sums and result are in `compute_dtype`."""

    def einsum(equation: str, *operands: Array) -> Array:
        return jnp.einsum(
            equation,
            *operands,
            precision=precision,
            preferred_element_type=compute_dtype(*operands),
        )

    return einsum

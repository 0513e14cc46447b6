"""Compute dtypes and the precision of matrix products.

Exponentials, sums and denominators are float32 or wider.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array


def compute_dtype(*arrays: Array | np.ndarray | np.dtype) -> np.dtype:
    """Returns the dtype to compute in: that of the arrays, at least float32.

    Args:
        *arrays: Arrays of the computation, or their dtypes.

    Returns:
        float32, or float64 if an array is float64.

    Example:
        >>> compute_dtype(jnp.ones(2, jnp.bfloat16), jnp.ones(3, jnp.float16))
        dtype('float32')
    """
    # Also under JAX's strict promotion.
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(jnp.float32, *arrays)


def widen(x: Array | np.ndarray) -> Array:
    """Converts an array to its `compute_dtype`."""
    return jnp.asarray(x, compute_dtype(x))


def current_precision(precision: jax.lax.PrecisionLike) -> jax.lax.PrecisionLike:
    """Returns a precision, or that of `jax.default_matmul_precision` for None.

    JAX traces the backward pass of a `jax.custom_vjp` outside of that context.

    Example:
        >>> with jax.default_matmul_precision("high"):
        ...     current_precision(None), current_precision("highest")
        ('high', 'highest')
    """
    if precision is not None:
        return precision
    # JAX adds the attributes of its configuration when it starts.
    return jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]


def wide_einsum(precision: jax.lax.PrecisionLike) -> Callable[..., Array]:
    """Returns an einsum whose sums and result are in the operands' `compute_dtype`."""

    def einsum(equation: str, *operands: Array) -> Array:
        dtype = compute_dtype(*operands)
        if len({x.dtype for x in operands}) > 1:
            operands = tuple(x.astype(dtype) for x in operands)
        return jnp.einsum(
            equation, *operands, precision=precision, preferred_element_type=dtype
        )

    return einsum

"""Queries and keys by their direction alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from relattn.kernels.checks import check_arguments
from relattn.kernels.precision import widen

# Below this squared norm a vector has no direction, and stays short.
_SMALLEST = 1e-6


@check_arguments
def unit_norm(x: Float[Array, "*batch n depth"]) -> Float[Array, "*batch n depth"]:
    """Scales vectors so that feature maps see unit vectors.

    x' = depth^(1/4) x / |x|, so that x' / depth^(1/4), which `positive_features` and
    `trigonometric_features` project, has the norm 1: their weights then estimate
    exp(cos(q, k)), and their variance is bounded.

    A vector shorter than 1e-3 has no direction: it is scaled as one of that length, so
    that zeros stay zeros, and it has no gradient, which would grow as 1 / |x|.

    Args:
        x: Queries or keys, shape ``[*batch, n, depth]``.

    Returns:
        The same shape and dtype.

    Raises:
        ValueError: If shapes or dtypes do not fit together.

    Example:
        >>> unit_norm(jnp.ones((1, 16))).round(3)[0, :3].tolist()
        [0.5, 0.5, 0.5]

    Source:
        Luo et al., Stable, Fast and Accurate: Kernelized Attention with Relative
        Positional Encoding, section 3.3.
    """
    wide = widen(x)
    squared = jnp.sum(jnp.square(wide), axis=-1, keepdims=True)
    wide = jnp.where(squared < _SMALLEST, jax.lax.stop_gradient(wide), wide)
    squared = jnp.sum(jnp.square(wide), axis=-1, keepdims=True)
    scale = x.shape[-1] ** 0.25 * jax.lax.rsqrt(jnp.maximum(squared, _SMALLEST))
    return (wide * scale).astype(x.dtype)

"""Masks of tokens: combines them, and keeps NaN in masked tokens from spreading."""

from __future__ import annotations

import functools
import operator

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from relattn.kernels.checks import check_arguments


def zero_masked(
    k: Float[Array, "*#batch m head_dim"],
    v: Float[Array, "*#batch m value_dim"],
    key_mask: Bool[Array, "*#batch m"] | None,
) -> tuple[
    Float[Array, "*#batch m head_dim"],
    Float[Array, "*#batch m value_dim"],
    Bool[Array, "*#batch m"] | None,
]:
    """Sets masked keys and values to zero, so that even a NaN there has no effect.

    The returned mask is broadcast to the shape ``[*batch, m]`` of the keys.
    """
    if key_mask is None:
        return k, v, None
    kept = key_mask[..., None]
    k, v = jnp.where(kept, k, 0), jnp.where(kept, v, 0)
    return k, v, jnp.broadcast_to(key_mask, k.shape[:-1])


def finite_masked(
    x: Float[Array, "*#batch n width"], mask: Bool[Array, "*#batch n"] | None
) -> Float[Array, "*batch n width"]:
    """Sets NaN and inf in masked tokens to zero; keeps what is finite.

    For queries, whose outputs exist even where the mask excludes their keys: a NaN
    would reach the gradients of all keys, even without cotangent.
    """
    if mask is None:
        return x
    return jnp.where(mask[..., None] | jnp.isfinite(x), x, 0)


@check_arguments
def finite_tokens(
    x: Float[Array, "*batch n width"], key_mask: Bool[Array, "*batch n"] | None
) -> Float[Array, "*batch n width"]:
    """Checks a mask of a layer's tokens; see `finite_masked`."""
    return finite_masked(x, key_mask)


def combine_masks(*masks: Bool[Array, "..."] | None) -> Bool[Array, "..."] | None:
    """Returns where all of the given masks allow attention; None if none is given.

    Example:
        >>> combine_masks(None, jnp.array([True, False]), jnp.array([True, True]))
        Array([ True, False], dtype=bool)
    """
    given = [mask for mask in masks if mask is not None]
    return functools.reduce(operator.and_, given) if given else None


def zero_prefix(
    x: Float[Array, "*batch n width"], num_prefix: int
) -> Float[Array, "*batch n width"]:
    """Sets the rows of prefix tokens to zero."""
    # jax2onnx makes float64 of an integer 0.
    return jnp.where(jnp.arange(x.shape[-2])[:, None] < num_prefix, 0.0, x)

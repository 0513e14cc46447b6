"""Packed sequences: segments of one row that do not attend to each other."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def segment_starts(segment_ids: Int[Array, "*batch n"]) -> Bool[Array, "*batch n"]:
    """Returns where the id differs from that of the token before.

    Example:
        >>> segment_starts(jnp.array([4, 4, 1, 4])).tolist()
        [False, False, True, True]
    """
    before = jnp.concatenate([segment_ids[..., :1], segment_ids[..., :-1]], axis=-1)
    return segment_ids != before


def segment_mask(segment_ids: Int[Array, "*batch n"]) -> Bool[Array, "*batch n n"]:
    """Returns which tokens of packed sequences may attend to each other.

    A segment is a run of equal ids. An id that comes back after another one starts a
    new segment, as in `relattn.kernels.causal_linear_attention`.

    Args:
        segment_ids: Ids, shape ``[*batch, n]``.

    Returns:
        True for two tokens of one segment, a ``mask`` of
        `relattn.kernels.softmax_attention` and `relattn.kernels.relative_attention`,
        shape ``[*batch, n, n]``.

    Example:
        >>> segment_mask(jnp.array([4, 4, 1, 4])).astype(int).tolist()
        [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    """
    # The number of each token's segment; tokens of one segment see each other.
    segments = jnp.cumsum(segment_starts(segment_ids), axis=-1)
    return segments[..., :, None] == segments[..., None, :]

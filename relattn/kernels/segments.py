"""Packed sequences: segments of one row that do not attend to each other."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from relattn.kernels.checks import check_arguments
from relattn.kernels.masks import combine_masks


def segment_starts(segment_ids: Int[Array, "*batch n"]) -> Bool[Array, "*batch n"]:
    """Returns where the id differs from that of the token before.

    Example:
        >>> segment_starts(jnp.array([4, 4, 1, 4])).tolist()
        [False, False, True, True]
    """
    before = jnp.concatenate([segment_ids[..., :1], segment_ids[..., :-1]], axis=-1)
    return segment_ids != before


@check_arguments
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

    Raises:
        ValueError: If the ids are not whole numbers.

    Example:
        >>> segment_mask(jnp.array([4, 4, 1, 4])).astype(int).tolist()
        [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]

    Source:
        Krell et al., Efficient Sequence Packing without Cross-contamination.
    """
    segments = segment_numbers(segment_ids)
    return segments[..., :, None] == segments[..., None, :]


def segment_numbers(segment_ids: Int[Array, "*batch n"]) -> Int[Array, "*batch n"]:
    """Numbers the segments: tokens of one segment, and no others, share a number.

    Example:
        >>> segment_numbers(jnp.array([4, 4, 1, 4])).tolist()
        [0, 0, 1, 2]
    """
    return jnp.cumsum(segment_starts(segment_ids), axis=-1)


def mask_segments(
    mask: Bool[Array, "..."] | None, segment_ids: Int[Array, "..."] | None
) -> Bool[Array, "..."] | None:
    """Returns which tokens may attend, by a mask and by `segment_mask`.

    Example:
        >>> mask_segments(jnp.eye(3, dtype=bool), None).sum()
        Array(3, dtype=int32)
    """
    within = None if segment_ids is None else segment_mask(segment_ids)
    return combine_masks(mask, within)

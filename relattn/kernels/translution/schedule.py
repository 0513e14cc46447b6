"""The order of the offsets: buckets of rectangles with equal sizes.

The pairs of grid tokens at one offset are a rectangle of queries and one of keys (on a
line a range, on a grid of three axes a box). Compiled loops need equal sizes, which
differ between offsets. A bucket is a set of offsets whose rectangles are padded to the
size of the largest. On a torus the rectangle of every offset is the whole grid, the
keys' rolled by the offset: there is one bucket.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import numpy as np

from relattn.offsets import Grid, Torus

# More buckets waste less work and take longer to compile.
_MAX_BUCKETS = 16


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Offsets that share the size of their rectangles.

    Attributes:
        shape: Size of a rectangle along each axis.
        rows: Row of each offset in tables of queries or values, and in tables of keys,
            int32 ``[offsets, 2]``.
        corners: Position where the rectangle of queries starts, then that of the keys,
            int32 ``[offsets, 2, axes]``.
    """

    shape: tuple[int, ...]
    rows: np.ndarray
    corners: np.ndarray


@dataclasses.dataclass(frozen=True)
class Plan:
    """All offsets of a grid, in buckets.

    A slot is a position in a rectangle of an offset. Slots are numbered in the order of
    the buckets, their offsets, and their rectangles row by row.

    Attributes:
        shape: Size of the grid along each axis.
        periodic: Whether the grid is a torus.
        padding: Number of tokens by which rectangles exceed the grid along each axis.
        buckets: The buckets.
        slot_of_pair: Slot of every (query, key), query-major; the number of slots for a
            pair without slot.
        pair_of_slot: Pair of every slot; the number of pairs for a slot without pair.
    """

    shape: tuple[int, ...]
    periodic: bool
    padding: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    slot_of_pair: np.ndarray
    pair_of_slot: np.ndarray


@functools.lru_cache(maxsize=64)
def plan(
    grid: Grid,
    *,
    causal: bool = False,
    clip: int | None = None,
) -> Plan:
    """Divides the offsets of a grid into buckets.

    Args:
        grid: Size of each axis, in tokens.
        causal: Whether to use the offsets 0, 1, ... of a line only.
        clip: Largest component of an offset to use, whose rows are then those of
            `relattn.kernels.expand_clipped_table`; None for all offsets.

    Returns:
        The plan.

    Example:
        >>> whole = plan((3, 5))
        >>> [bucket.shape for bucket in whole.buckets]
        [(3, 5), (3, 3), (3, 1)]
        >>> sum(len(bucket.rows) for bucket in whole.buckets)
        45
    """
    shape = tuple(grid)
    if isinstance(grid, Torus):
        return _torus_plan(shape, clip)
    # The number of magnitudes that the table has along each axis.
    sizes = shape if clip is None else (clip + 1,) * len(shape)
    buckets, padding = [], np.zeros(len(shape), int)
    for ranges in itertools.product(*_split_axes(shape)):
        ranges = [r[r < size] for r, size in zip(ranges, sizes, strict=True)]
        if not all(map(len, ranges)):
            continue
        offsets = np.array(
            [
                np.multiply(magnitudes, signs)
                for magnitudes in itertools.product(*ranges)
                for signs in itertools.product(
                    *((1, -1) if size and not causal else (1,) for size in magnitudes)
                )
            ]
        )
        first = np.array([sizes[0] for sizes in ranges])
        padding = np.maximum(padding, np.abs(offsets).max(axis=0) - first)
        corners = [np.maximum(offsets, 0), np.maximum(-offsets, 0)]
        buckets.append(
            Bucket(
                shape=tuple((np.array(shape) - first).tolist()),
                rows=_table_rows(offsets, sizes, causal).astype(np.int32),
                corners=np.stack(corners, axis=1).astype(np.int32),
            )
        )
    slot_of_pair, pair_of_slot = _number(buckets, shape)
    return Plan(
        shape=shape,
        periodic=False,
        padding=tuple(padding.tolist()),
        buckets=tuple(buckets),
        slot_of_pair=slot_of_pair,
        pair_of_slot=pair_of_slot,
    )


def _torus_plan(shape, clip):
    """Returns the plan of a torus: for offset d the keys start at position -d."""
    offsets = np.indices(shape).reshape(len(shape), -1).T
    if clip is not None:
        offsets = offsets[(np.abs(_shortest(offsets, shape)) <= clip).all(axis=1)]
    negatives = -offsets % shape
    if clip is None:
        rows = np.stack([o @ _strides(shape) for o in (offsets, negatives)], axis=1)
    else:
        strides = _strides([2 * clip + 1] * len(shape))
        rows = [(_shortest(o, shape) + clip) @ strides for o in (offsets, negatives)]
        rows = np.stack(rows, axis=1)
    corners = np.stack([np.zeros_like(offsets), negatives], axis=1)
    bucket = Bucket(shape, rows.astype(np.int32), corners.astype(np.int32))
    slot_of_pair, pair_of_slot = _number([bucket], shape, periodic=True)
    return Plan(
        shape=shape,
        periodic=True,
        padding=tuple(size - 1 for size in shape),
        buckets=(bucket,),
        slot_of_pair=slot_of_pair,
        pair_of_slot=pair_of_slot,
    )


def _shortest(offsets, shape):
    """Returns the shortest of equal offsets on a torus, the positive one of two."""
    return np.where(offsets > np.array(shape) // 2, offsets - np.array(shape), offsets)


def _strides(sizes):
    """Returns the steps of a row-major index, for a product with coordinates."""
    return np.cumprod([1, *sizes[:0:-1]])[::-1]


def _split_axes(shape):
    """Splits the magnitudes of all axes into the ranges that waste the least work.

    A range wastes about the square of its length, so equal ranges are best.
    """
    waste = {}
    # Shorter ranges take longer to compile and save almost nothing, as does a split of
    # an axis with few tokens.
    shortest = [max(2, math.isqrt(size)) for size in shape]
    most = [
        -(-size // least) if size > 3 else 1
        for size, least in zip(shape, shortest, strict=True)
    ]
    for parts in itertools.product(*(range(1, most_parts + 1) for most_parts in most)):
        if math.prod(parts) <= _MAX_BUCKETS:
            waste[parts] = math.prod(
                1 + 1 / part - 1 / size for part, size in zip(parts, shape, strict=True)
            )
    return [
        np.array_split(np.arange(size), parts)
        for size, parts in zip(shape, min(waste, key=waste.__getitem__), strict=True)
    ]


def _table_rows(offsets, sizes, causal):
    """Returns the rows of offsets and of their negatives in tables."""
    if causal:
        return np.concatenate([offsets, offsets], axis=1)
    sizes = np.array(sizes)
    strides = _strides(2 * sizes - 1)
    return np.stack([(o + sizes - 1) @ strides for o in (offsets, -offsets)], axis=1)


def _number(buckets, shape, *, periodic=False):
    """Numbers the slots: returns `Plan.slot_of_pair` and `Plan.pair_of_slot`."""
    pairs = []
    for bucket in buckets:
        # Positions of query and key of every slot: [offsets, slots, 2, axes].
        inner = np.indices(bucket.shape).reshape(len(shape), -1).T
        positions = bucket.corners[:, None] + inner[:, None]
        if periodic:
            positions %= shape
        inside = (positions < shape).all(axis=(-2, -1))
        num_tokens = math.prod(shape)
        pair = positions @ _strides(shape) @ np.array([num_tokens, 1])
        pairs.append(np.where(inside, pair, num_tokens**2).ravel())
    pair_of_slot = np.concatenate(pairs)
    slot_of_pair = np.full(num_tokens**2 + 1, len(pair_of_slot))
    slot_of_pair[pair_of_slot] = np.arange(len(pair_of_slot))
    return slot_of_pair[:-1].astype(np.int32), pair_of_slot.astype(np.int32)

"""The order of the offsets: buckets of rectangles with equal sizes.

The pairs of grid tokens at one offset are a rectangle of queries and one of keys.
Compiled loops need equal sizes, which differ between offsets. A bucket is a set of
offsets whose rectangles are padded to the size of the largest. On a torus the rectangle
of every offset is the whole grid, the keys' rolled by the offset: there is one bucket.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import numpy as np

from relattn.offsets import Grid, Torus


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Offsets that share the size of their rectangles.

    Attributes:
        shape: Height and width of a rectangle.
        rows: Row of each offset in tables of queries or values, and in tables of keys,
            int32 ``[offsets, 2]``.
        corners: Row and column where the rectangle of queries starts, then those of the
            keys, int32 ``[offsets, 4]``.
    """

    shape: tuple[int, int]
    rows: np.ndarray
    corners: np.ndarray


@dataclasses.dataclass(frozen=True)
class Plan:
    """All offsets of a grid, in buckets.

    A slot is a position in a rectangle of an offset. Slots are numbered in the order of
    the buckets, their offsets, and their rectangles row by row.

    Attributes:
        shape: Height and width of the grid; a line is one row.
        periodic: Whether the grid is a torus.
        padding: Rows and columns by which rectangles exceed the grid.
        buckets: The buckets.
        slot_of_pair: Slot of every (query, key), query-major; the number of slots for a
            pair without slot.
        pair_of_slot: Pair of every slot; the number of pairs for a slot without pair.
    """

    shape: tuple[int, int]
    periodic: bool
    padding: tuple[int, int]
    buckets: tuple[Bucket, ...]
    slot_of_pair: np.ndarray
    pair_of_slot: np.ndarray


@functools.lru_cache(maxsize=64)
def plan(grid: Grid, *, causal: bool = False, max_buckets: int = 16) -> Plan:
    """Divides the offsets of a grid into buckets.

    Args:
        grid: Height and width, or length.
        causal: Whether to use the offsets 0, 1, ... of a line only.
        max_buckets: Largest number of buckets; more buckets waste less work and take
            longer to compile.

    Returns:
        The plan.

    Example:
        >>> whole = plan((3, 5))
        >>> [bucket.shape for bucket in whole.buckets]
        [(3, 5), (3, 3), (3, 1)]
        >>> sum(len(bucket.rows) for bucket in whole.buckets)
        45
    """
    height, width = (1, *grid) if len(grid) == 1 else grid
    shape = (height, width)
    if isinstance(grid, Torus):
        return _torus_plan(shape)
    buckets, padding = [], np.zeros(2, int)
    for rows, columns in itertools.product(*_split_axes(shape, max_buckets)):
        offsets = np.array(
            [
                (sign_r * r, sign_c * c)
                for r, c in itertools.product(rows, columns)
                for sign_r in ((1, -1) if r else (1,))
                for sign_c in ((1, -1) if c and not causal else (1,))
            ]
        )
        first = np.array([rows[0], columns[0]])
        padding = np.maximum(padding, np.abs(offsets).max(axis=0) - first)
        corners = [np.maximum(offsets, 0), np.maximum(-offsets, 0)]
        buckets.append(
            Bucket(
                shape=tuple((np.array(shape) - first).tolist()),
                rows=_table_rows(offsets, shape, causal).astype(np.int32),
                corners=np.concatenate(corners, axis=1).astype(np.int32),
            )
        )
    rows, columns = padding.tolist()
    return Plan(shape, False, (rows, columns), tuple(buckets), *_number(buckets, shape))


def _torus_plan(shape):
    """Returns the plan of a torus: for offset d the keys start at row and column -d."""
    offsets = np.indices(shape).reshape(2, -1).T
    negatives = -offsets % shape
    rows = np.stack([o @ np.array([shape[1], 1]) for o in (offsets, negatives)], axis=1)
    corners = np.concatenate([np.zeros_like(offsets), negatives], axis=1)
    bucket = Bucket(shape, rows.astype(np.int32), corners.astype(np.int32))
    padding = tuple(size - 1 for size in shape)
    slots = _number([bucket], shape, periodic=True)
    return Plan(shape, True, padding, (bucket,), *slots)


def _split_axes(shape, max_buckets):
    """Splits the magnitudes of both axes into the ranges that waste the least work.

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
        if math.prod(parts) <= max_buckets:
            waste[parts] = math.prod(
                1 + 1 / part - 1 / size for part, size in zip(parts, shape, strict=True)
            )
    return [
        np.array_split(np.arange(size), parts)
        for size, parts in zip(shape, min(waste, key=waste.__getitem__), strict=True)
    ]


def _table_rows(offsets, shape, causal):
    """Returns the rows of offsets and of their negatives in tables."""
    if causal:
        return np.stack([offsets[:, 1]] * 2, axis=1)
    sizes = np.array(shape)
    strides = np.array([2 * shape[1] - 1, 1])
    return np.stack([(o + sizes - 1) @ strides for o in (offsets, -offsets)], axis=1)


def _number(buckets, shape, *, periodic=False):
    """Numbers the slots: returns `Plan.slot_of_pair` and `Plan.pair_of_slot`."""
    pairs = []
    for bucket in buckets:
        # Query row and column, key row and column of every slot.
        inner = np.indices(bucket.shape).reshape(2, -1).T
        coordinates = bucket.corners[:, None] + np.tile(inner, 2)
        if periodic:
            coordinates %= np.tile(shape, 2)
        inside = (coordinates < np.tile(shape, 2)).all(axis=-1)
        tokens = coordinates @ np.array([[shape[1], 0], [1, 0], [0, shape[1]], [0, 1]])
        num_tokens = math.prod(shape)
        pair = tokens @ np.array([num_tokens, 1])
        pairs.append(np.where(inside, pair, num_tokens**2).ravel())
    pair_of_slot = np.concatenate(pairs)
    slot_of_pair = np.full(num_tokens**2 + 1, len(pair_of_slot))
    slot_of_pair[pair_of_slot] = np.arange(len(pair_of_slot))
    return slot_of_pair[:-1].astype(np.int32), pair_of_slot.astype(np.int32)

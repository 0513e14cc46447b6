"""Tests the plan of buckets: every pair once, at its rows, with little waste."""

import math

import numpy as np
import pytest

from relattn import offsets
from relattn.kernels.translution.schedule import plan
from relattn.offsets import Torus

SMALL = [(1, 1), (1, 7), (7, 1), (3, 5), (5, 3), (7, 7), (11, 6), (2,), (13,), (29,)]
SMALL += [(2, 3, 5), (5, 1, 4), (2, 2, 3, 2)]
LARGE = [(4, 4), (7, 7), (12, 12), (14, 14), (11, 17), (160,), (8, 4, 4), (4, 7, 7)]


def with_causal_lines(grids):
    """Returns every grid, and each line also as a causal one."""
    pairs = [(grid, False) for grid in grids]
    return pairs + [(grid, True) for grid in grids if len(grid) == 1]


def _walk(grid, whole):
    """Yields slot, rows of both tables, query and key of every slot on the grid."""
    slot = 0
    for bucket in whole.buckets:
        for rows, corners in zip(bucket.rows, bucket.corners, strict=True):
            ends = corners + np.array(bucket.shape)
            assert (ends <= np.add(grid, whole.padding)).all()
            for step in np.ndindex(bucket.shape):
                cells = corners + step
                if (cells < grid).all():
                    query, key = (np.ravel_multi_index(c, grid) for c in cells)
                    yield slot, *rows, query, key
                slot += 1


@pytest.mark.parametrize(("grid", "causal"), with_causal_lines(SMALL))
def test_every_pair_has_one_slot_and_its_rows(grid, causal):
    whole, length = plan(grid, causal=causal), math.prod(grid)
    index = offsets.offset_index(grid)
    seen = set()
    for slot, row, negative_row, query, key in _walk(grid, whole):
        if causal:
            assert row == negative_row == query - key >= 0
        else:
            assert (row, negative_row) == (index[query, key], index[key, query])
        pair = query * length + key
        assert whole.slot_of_pair[pair] == slot and whole.pair_of_slot[slot] == pair
        assert pair not in seen
        seen.add(pair)
    assert len(seen) == (length * (length + 1) // 2 if causal else length**2)
    num_slots = len(whole.pair_of_slot)
    assert (whole.slot_of_pair == num_slots).sum() == length**2 - len(seen)
    assert (whole.pair_of_slot == length**2).sum() == num_slots - len(seen)


@pytest.mark.parametrize(
    "grid", [Torus((3, 4)), Torus((7,)), Torus((1, 1)), Torus((2, 3, 5))]
)
def test_offset_on_a_torus_rolls_the_whole_grid(grid):
    whole, length = plan(grid), math.prod(grid)
    index = offsets.offset_index(grid)
    (bucket,) = whole.buckets
    assert len(whole.pair_of_slot) == length**2
    pairs = whole.pair_of_slot.reshape(length, length)
    for rows, pairs_of_offset in zip(bucket.rows, pairs, strict=True):
        query, key = np.divmod(pairs_of_offset, length)
        assert sorted(query) == sorted(key) == list(range(length))
        assert (index[query, key] == rows[0]).all()
        assert (index[key, query] == rows[1]).all()
    np.testing.assert_array_equal(
        whole.pair_of_slot[whole.slot_of_pair], np.arange(length**2)
    )


@pytest.mark.parametrize(("grid", "causal"), with_causal_lines(LARGE))
def test_work_grows_like_the_number_of_pairs(grid, causal):
    whole, length = plan(grid, causal=causal), math.prod(grid)
    pairs = length * (length + 1) // 2 if causal else length**2
    # Padding wastes work along each axis.
    assert len(whole.pair_of_slot) < (1.6 if len(grid) < 3 else 2) * pairs
    assert len(whole.buckets) <= 16

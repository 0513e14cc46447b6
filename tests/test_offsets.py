"""Grids, offsets and distances."""

import itertools

import numpy as np
import pytest

from relattn import offsets

GRID = (3, 5)


def test_positions_run_row_by_row_after_the_prefix():
    positions = offsets.grid_positions(GRID, num_prefix=2)
    assert positions[:2].tolist() == [[0, 0], [0, 0]]
    expected = list(itertools.product(range(3), range(5)))
    np.testing.assert_array_equal(positions[2:], expected)
    assert offsets.is_prefix(GRID, 2).tolist() == [True] * 2 + [False] * 15


def test_offset_is_query_minus_key():
    table = offsets.offsets(GRID)
    query, key = 2 * 5 + 4, 0 * 5 + 1
    assert table[query, key].tolist() == [2, 3]
    np.testing.assert_array_equal(table, -table.swapaxes(0, 1))


@pytest.mark.parametrize("clip", [1, 4, 11])
def test_distance_is_clipped_manhattan_and_the_prefix_is_far(clip):
    table = offsets.distances(GRID, clip, num_prefix=1)
    assert (table[0] == clip).all() and (table[:, 0] == clip).all()
    tokens = list(itertools.product(range(3), range(5)))
    for (i, p), (j, q) in itertools.product(enumerate(tokens), repeat=2):
        expected = min(abs(p[0] - q[0]) + abs(p[1] - q[1]), clip)
        assert table[1 + i, 1 + j] == expected


def test_check_grid_names_what_it_expected():
    offsets.check_grid(16, GRID, num_prefix=1)
    with pytest.raises(ValueError, match="3x5 with num_prefix=1 holds 16 .* got 17"):
        offsets.check_grid(17, GRID, num_prefix=1)
    with pytest.raises(ValueError, match="positive height and width"):
        offsets.check_grid(0, (0, 5))

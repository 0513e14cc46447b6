"""Tests grids, offsets and distances."""

import copy
import functools
import itertools
import pickle

import flax.linen as nn
import jax
import numpy as np
import pytest

from relattn import kernels, offsets
from relattn.offsets import Torus
from tests.helpers.export import unchecked_annotations

GRID = (3, 5)


def test_positions_are_row_major_after_prefix():
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
def test_distance_is_clipped_manhattan_and_clip_for_prefix(clip):
    table = offsets.distances(GRID, clip, num_prefix=1)
    assert (table[0] == clip).all() and (table[:, 0] == clip).all()
    tokens = list(itertools.product(range(3), range(5)))
    for (i, p), (j, q) in itertools.product(enumerate(tokens), repeat=2):
        expected = min(abs(p[0] - q[0]) + abs(p[1] - q[1]), clip)
        assert table[1 + i, 1 + j] == expected


def test_check_grid_names_expected_tokens():
    offsets.check_grid(16, GRID, num_prefix=1)
    with pytest.raises(ValueError, match="3x5 with num_prefix=1 holds 16 .* got 17"):
        offsets.check_grid(17, GRID, num_prefix=1)
    with pytest.raises(ValueError, match="num_prefix must be a whole .* 0, got -1"):
        offsets.check_grid(14, GRID, num_prefix=-1)
    for grid in ((0, 5), ()):
        for check in (offsets.num_table_rows, functools.partial(offsets.check_grid, 0)):
            with pytest.raises(ValueError, match="grid must have sizes of at least 1"):
                check(grid)


@pytest.mark.parametrize("grid", [6, [3, 5], (3.0, 5.0), "35", None, np.array([3, 5])])
def test_what_is_no_tuple_of_sizes_raises(grid):
    checks = [
        lambda: offsets.check_grid(15, grid),
        lambda: offsets.num_table_rows(grid),
        lambda: kernels.Offsets(grid).check_length(15),
        lambda: offsets.num_table_rows(grid, clip=2),
    ]
    for check in checks:
        with (
            unchecked_annotations(),
            pytest.raises(ValueError, match="grid must be a "),
        ):
            check()


def test_line_is_grid_of_one_axis():
    assert offsets.grid_positions((3,), num_prefix=1).tolist() == [[0], [0], [1], [2]]
    assert offsets.offsets((3,))[2, 0].tolist() == [2]
    assert offsets.distances((3,), clip=1)[0].tolist() == [0, 1, 1]
    offsets.check_grid(4, (3,), num_prefix=1)
    with pytest.raises(ValueError, match="grid 3 with num_prefix=0 holds 3 tokens"):
        offsets.check_grid(4, (3,))


def test_grid_of_three_axes():
    grid = (2, 3, 5)
    offsets.check_grid(31, grid, num_prefix=1)
    with pytest.raises(ValueError, match="2x3x5 with num_prefix=0 holds 30 tokens"):
        offsets.check_grid(31, grid)
    tokens = np.array(list(itertools.product(*map(range, grid))))
    np.testing.assert_array_equal(offsets.grid_positions(grid, 1)[1:], tokens)
    apart = np.abs(tokens[:, None] - tokens).sum(axis=-1)
    np.testing.assert_array_equal(offsets.distances(grid, 5), np.minimum(apart, 5))
    assert offsets.max_distance(grid) == apart.max() == 7
    assert offsets.max_distance(Torus(grid)) == 1 + 1 + 2


@pytest.mark.parametrize(
    "grid",
    [
        (3, 5),
        (5, 2),
        (7,),
        (1, 1),
        (2, 3, 5),
        (2, 1, 3, 2),
        Torus((5, 2)),
        Torus((7,)),
        Torus((1, 1)),
        Torus((2, 3, 5)),
    ],
)
@pytest.mark.parametrize("num_prefix", [0, 2])
def test_every_kind_of_pair_has_its_row(grid, num_prefix):
    rows = {}
    index = offsets.offset_index(grid, num_prefix)
    tokens = [None] * num_prefix + list(itertools.product(*map(range, grid)))
    for (i, token), (j, partner) in itertools.product(enumerate(tokens), repeat=2):
        if token is None:
            kind = "self" if partner is None else "out"
        elif partner is None:
            kind = "in"
        else:
            kind = tuple(a - b for a, b in zip(token, partner, strict=True))
            if isinstance(grid, Torus):
                kind = tuple(d % size for d, size in zip(kind, grid, strict=True))
        assert rows.setdefault(kind, index[i, j]) == index[i, j]
    kinds = sorted(kind for kind in rows if not isinstance(kind, str))
    kinds += ["in", "self", "out"] if num_prefix else []
    assert [rows[kind] for kind in kinds] == list(
        range(offsets.num_table_rows(grid, num_prefix))
    )


def test_offset_on_a_torus_is_the_shortest():
    torus = Torus((4, 5))
    assert torus != (4, 5) and torus != (4, 5) and torus == Torus((4, 5))
    assert len({torus: 1, (4, 5): 2}) == 2
    table = offsets.offsets(torus)
    rolls = np.indices((3, 3)).reshape(2, -1).T - 1
    copies = offsets.offsets((4, 5))[..., None, :] + rolls * torus
    np.testing.assert_array_equal(
        np.abs(table).sum(-1), np.abs(copies).sum(-1).min(axis=-1)
    )
    assert ((table - offsets.offsets((4, 5))) % torus == 0).all()
    np.testing.assert_array_equal(
        offsets.table_offsets(torus)[offsets.offset_index(torus)], table
    )
    assert offsets.max_distance(torus) == np.abs(table).sum(-1).max()
    assert offsets.max_distance((4, 5)) == np.abs(offsets.offsets((4, 5))).sum(-1).max()


class _Holder(nn.Module):
    grid: tuple
    others: dict

    def setup(self):
        self.line = [Torus((self.grid[1],))]

    def __call__(self):
        return self.grid, self.others["a"], self.line[0]


def test_torus_stays_one_in_flax_modules_and_trees():
    torus, line = Torus((3, 4)), Torus((4,))
    holder = _Holder(torus, {"a": torus}).clone()
    assert holder.apply({}) == (torus, torus, line)
    for make in (copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        assert make(torus) == torus and make(line) == line
    assert jax.tree.map(lambda size: size + 1, torus) == Torus((4, 5))
    assert Torus(np.array([3, 4])) == Torus([3, 4]) == torus
    with pytest.raises(
        AttributeError, match=r"Torus\(\(4,\)\) has no attribute 'axis_1'"
    ):
        line.axis_1  # noqa: B018


def test_causal_table_needs_line_without_prefix():
    assert offsets.num_table_rows((7,), causal=True) == 7
    for grid, num_prefix in (((3, 5), 0), ((7,), 1), (Torus((7,)), 0)):
        with pytest.raises(ValueError, match=r"need a grid \(length,\) and no prefix"):
            offsets.num_table_rows(grid, num_prefix, causal=True)

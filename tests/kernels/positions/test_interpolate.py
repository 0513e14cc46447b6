"""Tests resizing of position tables."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from relattn.kernels.positions.interpolate import resize_table
from tests import reference
from tests.helpers.quick import run


@pytest.mark.quick("old0-new0")
@pytest.mark.parametrize(
    ("old", "new"),
    [((3, 5), (7, 11)), ((7, 11), (3, 5)), ((5, 3), (5, 7)), ((5,), (3,))],
)
def test_matches_reference_and_keeps_rows_without_position(old, new):
    rows = int(np.prod(old))
    table = np.random.default_rng(0).normal(size=(2, rows + 3, 2)).astype(np.float32)
    resize = functools.partial(resize_table, axis=1, num_others=3)
    out = run(lambda table: resize(table, old, new), table)
    np.testing.assert_array_equal(out[:, -3:], table[:, -3:])
    for layer in range(2):
        expected = reference.resize(
            np.float64(table[layer, :rows]).reshape(*old, 2), new
        )
        np.testing.assert_allclose(out[layer, :-3], expected.reshape(-1, 2), atol=1e-5)


def by_pytorch(table, new):
    """Interpolates bicubically by the formula of PyTorch, pixel by pixel."""

    def cubic(t):
        a, t = -0.75, abs(t)
        if t <= 1:
            return (a + 2) * t**3 - (a + 3) * t**2 + 1
        return a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a if t < 2 else 0.0

    for axis, size in enumerate(new):
        old = table.shape[axis]
        rows = []
        for i in range(size):
            at = (i + 0.5) * old / size - 0.5
            near = range(int(np.floor(at)) - 1, int(np.floor(at)) + 3)
            taken = [np.take(table, min(max(j, 0), old - 1), axis) for j in near]
            weights = [cubic(at - j) for j in near]
            rows.append(sum(w * x for w, x in zip(weights, taken, strict=True)))
        table = np.stack(rows, axis)
    return table


@pytest.mark.quick("old0-new0")
@pytest.mark.parametrize(
    ("old", "new"), [((7, 11), (3, 5)), ((3, 5), (7, 11)), ((5,), (2,)), ((2,), (5,))]
)
def test_without_antialias_a_smaller_grid_is_that_of_pytorch(old, new):
    table = np.random.default_rng(0).normal(size=(int(np.prod(old)), 2))
    resize = functools.partial(resize_table, old=old, new=new, antialias=False)
    found = run(resize, table.astype(np.float32))
    expected = by_pytorch(table.reshape(*old, 2), new).reshape(-1, 2)
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_half_precision_is_rounded_once():
    table = np.random.default_rng(0).normal(size=(77, 2))
    table = table.astype(jnp.bfloat16)

    def resize(table):
        return resize_table(table, (7, 11), (3, 5))

    single = run(resize, np.float32(table))
    np.testing.assert_array_equal(run(resize, table), single.astype(jnp.bfloat16))


def test_constant_tables_and_same_grid_are_unchanged():
    constant = run(lambda x: resize_table(x, (2, 3), (5, 2)), np.ones(6, np.float32))
    np.testing.assert_allclose(constant, 1, rtol=1e-6)
    table = np.float32(np.arange(12).reshape(6, 2))
    same = run(lambda x: resize_table(x, (2, 3), (2, 3)), table)
    np.testing.assert_array_equal(same, table)


def test_wrong_grid_raises():
    with pytest.raises(
        ValueError, match="of the grid 2x3 has 6 rows, got 7: pass the grid"
    ):
        resize_table(np.ones(7), (2, 3), (3, 3))
    with pytest.raises(ValueError, match="of 2 axes cannot be resized to 1"):
        resize_table(np.ones(6), (2, 3), (6,))

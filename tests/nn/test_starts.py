"""Tests that parameters of positions and attentions start as published."""

import functools

import jax
import numpy as np
import pytest

from relattn.nn.registry import build

DIM, HEADS, LAYERS, GRID = 48, 2, 5, (5, 7)
# Standard deviation of a normal distribution truncated at two standard deviations.
TRUNCATED = 0.8796


@pytest.mark.parametrize(
    "position, name, std",
    [
        ("constrained_sincos", "coefficients", 1.0),
        ("sincos_bias", "coefficients", 1.0),
        ("relative_key", "table", (DIM // HEADS) ** -0.5),
        ("relative_value", "table", (DIM // HEADS) ** -0.5),
        ("relative_bias", "table", 0.02 * TRUNCATED),
        ("t5_bias", "table", DIM**-0.5),
        ("fourier_bias", "coefficients", 0.02),
    ],
)
def test_initial_standard_deviations(position, name, std):
    sizes = {"dim": DIM, "num_heads": HEADS, "num_layers": LAYERS}
    _, make_position = build("softmax", position, **sizes)

    @jax.jit
    def init(key):
        return make_position().init(key, GRID, 1)["params"][name]

    values = np.asarray(init(jax.random.key(0)))
    # Within four standard errors.
    assert abs(values.mean()) < 4 * std / values.size**0.5
    assert abs(values.std() - std) < 4 * std / (2 * values.size) ** 0.5


def test_the_banded_table_starts_at_zero():
    make, _ = build("banded(clip=2)", "none", dim=8, num_heads=2, num_layers=1)
    init = functools.partial(make(layer=0).init, grid=(2, 3), num_prefix=1)
    params = jax.jit(init)(jax.random.key(0), np.ones((1, 7, 8), np.float32))["params"]
    np.testing.assert_array_equal(params["table"], np.zeros((3, 4)))

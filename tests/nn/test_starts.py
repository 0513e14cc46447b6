"""Tests that parameters of positions and attentions start as published."""

import functools

import jax
import numpy as np
import pytest

from relattn.models import MODELS, build_model
from relattn.nn.registry import ATTENTIONS, POSITIONS, build
from relattn.offsets import Torus
from tests.helpers.specs import small

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


def expect_float32(init, inputs):
    with jax.enable_x64(True):
        variables = jax.eval_shape(init, jax.random.key(0), inputs)
    wide = {
        jax.tree_util.keystr(path): leaf.dtype.name
        for path, leaf in jax.tree_util.tree_leaves_with_path(variables)
        if leaf.dtype != np.float32
    }
    assert not wide


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_attentions_have_float32_parameters_if_float64_is_enabled(attention):
    make, _ = build(small(attention), "none", dim=8, num_heads=2, num_layers=1)
    init = functools.partial(make(layer=0).init, grid=(2, 3), num_prefix=1)
    expect_float32(init, np.ones((1, 7, 8), np.float32))


WITH_OPTIONS = [
    "constrained_sincos(content_conditioned=True)",
    "constrained_sincos(content_modulated=True)",
    "fourier_values(rank=2)",
    "rotary_values(learned=True)",
]


@pytest.mark.parametrize("position", [*POSITIONS, *WITH_OPTIONS])
def test_positions_are_in_float32_if_float64_is_enabled(position):
    """A bias in float64 would widen the scores of all pairs."""
    _, make = build("softmax", position, dim=8, num_heads=2, num_layers=3)
    module, tokens = make(), np.ones((1, 6, 8), np.float32)
    grids = [(2, 3), *([] if module.needs_plane else [(6,)])]
    for grid in [*grids, *([Torus((2, 3))] if module.periodic else [])]:

        def call(module, tokens, grid=grid):
            layers = module.per_layer(grid, 0)
            # Types of arrays are checked where eval_shape makes a layer of shapes.
            return jax.tree.leaves((module.add_to_tokens(tokens, grid), layers))

        expect_float32(functools.partial(module.init_with_output, method=call), tokens)


@pytest.mark.parametrize("name", MODELS)
def test_models_have_float32_parameters_if_float64_is_enabled(name):
    given = {"num_classes": 3, "image_shape": (32, 32, 1)}
    inputs = np.ones((1, 32, 32, 1), np.float32)
    if MODELS[name].inputs == "points":
        given = {"num_classes": 3, "point_shape": (5, 2, 1)}
        inputs = np.ones((1, 5, 3), np.float32)
    if MODELS[name].inputs == "tokens":
        given = {"vocab_size": 11, "context_length": 7}
        inputs = np.ones((1, 7), np.int32)
    options = {"pool": "attention", "num_registers": 1} if name == "vit" else {}
    expect_float32(build_model({"name": name, **options}, **given).init, inputs)

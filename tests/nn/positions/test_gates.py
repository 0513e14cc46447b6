"""Tests gates in a layer: initial values, parameters, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn.nn.positions import gates
from tests import reference
from tests.helpers.quick import normal, normal_like, run

GRID, N, LAYERS, HEADS, HEAD_DIM = (2, 3), 7, 3, 2, 5
SIZES = {"dim": HEADS * HEAD_DIM, "num_heads": HEADS, "num_layers": LAYERS}
MODULES = {"irpe_gate": gates.IrpeGate, "string_gate": gates.StringGate}

both = pytest.mark.parametrize("name", MODULES)


def heads_inputs():
    q, k = normal(1, 2, 1, HEADS, N, HEAD_DIM)
    return q, k, np.ones((1, N, SIZES["dim"]), np.float32)


@both
@pytest.mark.parametrize("grid", [GRID, (6,)])
def test_gates_start_as_the_identity(name, grid):
    @jax.jit
    def outs(key, inputs):
        layers, _ = MODULES[name](**SIZES).init_with_output(key, grid, 1)
        return jnp.stack([jnp.stack(layer(*inputs)) for layer in layers])

    inputs = heads_inputs()
    for out in outs(jax.random.key(0), inputs):
        np.testing.assert_array_equal(out, inputs[:2])


@pytest.mark.quick("irpe_gate")
@both
def test_queries_and_keys_of_each_layer_and_head_have_their_scales(name):
    module = MODULES[name](**SIZES)
    shapes = jax.eval_shape(lambda key: module.init(key, GRID, 1), jax.random.key(0))
    variables = normal_like(shapes, scale=0.5)
    params = variables["params"]
    q, k, x = heads_inputs()

    def apply(variables, q, k, x):
        layer = module.apply(variables, GRID, 1)[2]
        one = layer.slice(4, 1)(q[:, :, 4:5], k[:, :, 4:5], x[:, :1])
        return layer(q, k, x), one

    outs, one = run(apply, variables, q, k, x)
    for side, (y, out) in enumerate(zip((q, k), outs, strict=True)):
        y = np.float64(y[0, 1])
        if name == "irpe_gate":
            tables = (
                np.float64(params[key][2, side, 1]) for key in ("rows", "columns")
            )
            naive = functools.partial(reference.irpe_gate, grid=GRID, num_prefix=1)
            expected = run(naive, y, *tables)
        else:
            waves = (params["frequencies"][2], params["phases"][2])
            coefficients = params["coefficients"][2, side, 1]
            naive = functools.partial(reference.string_gate, grid=GRID, num_prefix=1)
            expected = run(naive, y, *waves, coefficients)
        np.testing.assert_allclose(out[0, 1], expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(out[0, 1, 0], np.float32(y[0]))
    np.testing.assert_array_equal(one[1], outs[1][:, :, 4:5])


def test_rank_zero_raises():
    with pytest.raises(ValueError, match="'string_gate' needs rank >= 1, got 0"):
        gates.StringGate(**SIZES, rank=0).init(jax.random.key(0), GRID, 1)


def test_embeddings_of_another_grid_raise():
    module = gates.IrpeGate(**SIZES)
    variables = run(lambda: module.init(jax.random.key(0), GRID, 1))
    with pytest.raises(ValueError, match=r"position's rows has shape .* a grid of 4x3"):
        module.apply(variables, (4, 3), 1)

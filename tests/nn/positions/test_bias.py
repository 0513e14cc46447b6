"""Tests offset biases in attention layers and on grids of other sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import kernels, offsets
from relattn.nn.positions.relative import RelativeTables
from relattn.nn.registry import build
from tests import reference
from tests.helpers.quick import normal, quick_jit, run

GRID, N, DIM, HEADS, HEAD_DIM = (2, 3), 7, 8, 2, 4
T5 = "t5_bias(num_buckets=8, max_distance=5)"
POSITIONS = [T5, "alibi", "sincos_bias", "fourier_bias"]


def encode(position, grid, params=None):
    """Returns the biases of each layer, and the parameters."""
    _, make_position = build("favor", position, dim=DIM, num_heads=HEADS, num_layers=3)
    module = make_position()
    if params is None:
        variables = run(lambda: module.init(jax.random.key(0), grid, 1))
        params = variables.get("params", {})

    def biases(params):
        layers = module.apply({"params": params}, grid, 1)
        return jnp.stack([layer.bias for layer in layers])

    return run(biases, params), params


@pytest.mark.quick(T5)
@pytest.mark.parametrize("position", POSITIONS)
def test_parameters_fit_every_grid(position):
    small, params = encode(position, (2, 3))
    large, _ = encode(position, (5, 4), params)
    assert small.shape == (3, HEADS, 15) and large.shape == (3, HEADS, 63)
    large = large.reshape(3, HEADS, 9, 7)[:, :, 3:6, 1:6]
    np.testing.assert_allclose(large.reshape(small.shape), small, rtol=1e-6)
    line, _ = encode(position, (5,))
    assert line.shape == (3, HEADS, 9)


def test_t5_layers_share_a_table_for_rows_and_one_for_columns():
    bias, params = encode("t5_bias", GRID)
    np.testing.assert_array_equal(bias[0], bias[2])
    buckets = kernels.offset_buckets(offsets.table_offsets(GRID))
    rows, columns = params["table"]
    expected = rows[:, buckets[:, 0]] + columns[:, buckets[:, 1]]
    np.testing.assert_allclose(bias[0], expected, rtol=1e-6)


@pytest.mark.parametrize("grid", [(5,), (2, 3), offsets.Torus((5, 7))])
def test_alibi_subtracts_the_distance_times_the_slope_of_the_head(grid):
    bias, params = encode("alibi", grid)
    assert params == {}
    i, j = np.indices(2 * (np.prod(grid),))
    d = np.abs(np.array(np.unravel_index(i, grid)) - np.unravel_index(j, grid))
    if isinstance(grid, offsets.Torus):
        d = np.minimum(d, np.array(grid)[:, None, None] - d)
    distances = np.sqrt((d**2).sum(axis=0))
    expected = -np.array([2.0**-4, 2.0**-8])[:, None, None] * distances
    for layer in bias:
        pairs = layer[:, offsets.offset_index(grid)]
        np.testing.assert_allclose(pairs, expected, rtol=1e-6)


def test_sincos_bias_equals_the_logits_of_strategy_1():
    bias, params = encode("sincos_bias(num_scales=2)", GRID)
    make = build(
        "favor",
        "constrained_sincos(num_scales=2)",
        dim=DIM,
        num_heads=HEADS,
        num_layers=3,
    )[1]

    def widen(params):
        q, k = jnp.zeros((2, 1, HEADS, N, HEAD_DIM))
        layer = make().apply({"params": params}, GRID, 1)[1]
        return layer(q, k, jnp.zeros((1, N, DIM)))

    q, k = run(widen, params)
    logits = np.einsum("bhid,bhjd->hij", q, k) / q.shape[-1] ** 0.5
    rows = offsets.offset_index(GRID)
    np.testing.assert_allclose(bias[1][:, rows], logits[:, 1:, 1:], atol=1e-6)


@pytest.mark.quick("positive")
@pytest.mark.parametrize("features", ["positive", "relu"])
def test_linear_attention_multiplies_weights_by_exp_bias(features):
    make_attention, _ = build(
        f"favor(num_features=5, features='{features}', normalize=True)",
        "fourier_bias",
        dim=DIM,
        num_heads=HEADS,
        num_layers=3,
    )
    bias, _ = encode("relative_bias", GRID)
    bias = 30 * bias[1]
    x, tables = normal(1, 2, N, DIM), RelativeTables(bias=jnp.asarray(bias))
    options = {"grid": GRID, "num_prefix": 1, "position": tables}
    init = functools.partial(make_attention(layer=0).init_with_output, **options)
    out, variables = run(init, jax.random.key(2), x)
    params = variables["params"]
    projection = variables["random_features"]["projection"].projection

    def phi(vector):
        vector = vector / jnp.linalg.norm(vector) * HEAD_DIM**0.25
        return getattr(reference, f"{features}_features")(vector, projection)

    def project(name):
        y = x[0] @ params[name]["kernel"] + params[name]["bias"]
        return y.reshape(N, HEADS, HEAD_DIM).swapaxes(0, 1)

    @quick_jit
    def expected():
        rows = reference.offset_rows(GRID, 1)[0]
        pairs = [reference.gather_rows(b, rows) for b in bias]
        heads = [
            reference.linear_attention(*inputs, phi, np.ones((N, N), bool), b)
            for *inputs, b in zip(*map(project, "qkv"), pairs, strict=True)
        ]
        merged = jnp.stack(heads, axis=1).reshape(N, DIM)
        return merged @ params["out"]["kernel"] + params["out"]["bias"]

    np.testing.assert_allclose(out[0], expected(), atol=2e-5)


@pytest.mark.slow
def test_trigonometric_features_sow_the_share_of_nonpositive_normalizers():
    make_attention, _ = build(
        "favor(features='trigonometric', num_features=2)",
        "sincos_bias",
        dim=DIM,
        num_heads=HEADS,
        num_layers=3,
    )
    position = RelativeTables(bias=jnp.asarray(encode("sincos_bias", GRID)[0][0]))
    x = jax.device_put(normal(1, 2, N, DIM, scale=3))
    module = make_attention(layer=0)
    options = {"grid": GRID, "num_prefix": 1, "position": position}

    @quick_jit
    def apply():
        variables = module.init(jax.random.key(0), x, **options)
        variables = jax.tree.map(lambda leaf: 3 * leaf, variables)
        return module.apply(variables, x, **options, mutable=["intermediates"])

    out, sown = apply()
    (fraction,) = sown["intermediates"]["nonpositive_normalizer"]
    assert 0 < fraction < 1 and jnp.isfinite(out).all()


@pytest.mark.parametrize(
    ("position", "message"),
    [
        ("sincos_bias(num_scales=0)", "'sincos_bias' needs num_scales >= 1, got 0"),
        ("fourier_bias(num_frequencies=0)", "needs num_frequencies >= 1, got 0"),
        ("t5_bias(num_buckets=6)", "need num_buckets divisible by 4"),
    ],
)
def test_invalid_options_raise(position, message):
    with pytest.raises(ValueError, match=message):
        encode(position, GRID)

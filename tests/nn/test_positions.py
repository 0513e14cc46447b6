"""Position encodings: what they add, what they concatenate, what stays invariant."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import offsets
from relattn.nn import positions

GRID = (3, 5)
DIM, HEADS, LAYERS, BATCH, DEPTH = 12, 2, 3, 2, 7


def test_learnable_sincos_adds_the_published_sinusoids():
    module = positions.LearnableSincos(dim=DIM)
    tokens = jnp.zeros((BATCH, 15, DIM))
    added, variables = module.init_with_output(jax.random.key(0), tokens, GRID)
    frequencies = 32000.0 ** (-np.arange(3) / 3)
    np.testing.assert_allclose(
        variables["params"]["frequencies"], frequencies, rtol=1e-6
    )
    row, column = 2, 4
    angles = np.concatenate([row * frequencies, column * frequencies])
    expected = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(-1)
    np.testing.assert_allclose(added[1, row * 5 + column], expected, atol=1e-6)


def test_learnable_sincos_refuses_a_width_it_cannot_split():
    with pytest.raises(ValueError, match="dim divisible by 4, got 6"):
        positions.LearnableSincos(dim=6).init(
            jax.random.key(0), jnp.zeros((1, 15, 6)), GRID
        )


def heads_inputs(content_conditioned):
    module = positions.ConstrainedSincos(
        DIM, HEADS, LAYERS, num_scales=2, content_conditioned=content_conditioned
    )
    layers, variables = module.init_with_output(jax.random.key(0), GRID, 1)
    key_q, key_k, key_x = jax.random.split(jax.random.key(1), 3)
    q = jax.random.normal(key_q, (BATCH, HEADS, 16, DEPTH))
    k = jax.random.normal(key_k, (BATCH, HEADS, 16, DEPTH))
    x = jax.random.normal(key_x, (BATCH, 16, DIM))
    return layers, variables["params"], (q, k, x)


@pytest.mark.parametrize("content_conditioned", [False, True])
def test_constrained_sincos_scores_the_offset_and_spares_the_prefix(
    content_conditioned,
):
    layers, params, (q, k, x) = heads_inputs(content_conditioned)
    assert len(layers) == LAYERS
    layer = 1
    wide_q, wide_k = layers[layer](q, k, x)
    assert wide_q.shape == (BATCH, HEADS, 16, DEPTH + 2 * 2 * 2)
    np.testing.assert_array_equal(wide_q[..., :DEPTH], q)
    np.testing.assert_array_equal(wide_k[:, :, 0, DEPTH:], 0)
    np.testing.assert_array_equal(wide_q[:, :, 0, DEPTH:], 0)
    score = jnp.einsum("bhid,bhjd->bhij", wide_q, wide_k)
    score -= jnp.einsum("bhid,bhjd->bhij", q, k)
    coefficients = np.asarray(params["coefficients"][layer], np.float64)
    if content_conditioned:
        kernel = np.asarray(params["kernel"][layer], np.float64)
        conditioned = np.einsum("bic,chps->bhips", x, kernel)
        coefficients = coefficients[:, None] + conditioned
    else:
        coefficients = np.broadcast_to(
            coefficients[None, :, None], (BATCH, HEADS, 16, 4, 2)
        )
    scales = np.asarray(params["frequencies"], np.float64)
    delta = offsets.offsets(GRID)
    expected = np.zeros((BATCH, HEADS, 15, 15))
    for axis in range(2):
        for scale in range(2):
            a, b = np.moveaxis(coefficients[:, :, 1:, axis * 2 + scale], -1, 0)
            angle = scales[scale] * delta[..., axis]
            expected += a[..., None] * np.cos(angle) + b[..., None] * np.sin(angle)
    np.testing.assert_allclose(score[:, :, 1:, 1:], expected, atol=2e-5)


def test_constrained_sincos_shares_its_scales_only():
    _, params, _ = heads_inputs(False)
    shapes = jax.tree.map(jnp.shape, params)
    assert shapes == {"frequencies": (2,), "coefficients": (LAYERS, HEADS, 4, 2)}


def test_constrained_sincos_needs_a_scale():
    with pytest.raises(ValueError, match="num_scales >= 1, got 0"):
        positions.ConstrainedSincos(DIM, HEADS, LAYERS, num_scales=0).init(
            jax.random.key(0), GRID, 1
        )


def test_learned_adds_a_vector_for_every_place():
    module = positions.Learned(dim=DIM)
    tokens = jnp.ones((BATCH, 15, DIM))
    added, variables = module.init_with_output(jax.random.key(0), tokens, GRID)
    table = variables["params"]["table"]
    np.testing.assert_array_equal(added[1], 1 + table)
    # The standard deviation of N(0, 1), within 4 of its standard errors.
    assert abs(table.std() - 1) < 4 / (2 * table.size) ** 0.5
    with pytest.raises(ValueError, match=r"has shape \(15, 12\); a grid of 2x4 tokens"):
        module.apply(variables, jnp.ones((BATCH, 8, DIM)), (2, 4))


def test_sincos_is_learnable_sincos_at_its_start():
    tokens = jnp.zeros((BATCH, 15, DIM))
    learnable = positions.LearnableSincos(dim=DIM, base=50.0)
    expected, _ = learnable.init_with_output(jax.random.key(0), tokens, GRID)
    module = positions.Sincos(dim=DIM, base=50.0)
    out, variables = module.init_with_output(jax.random.key(0), tokens, GRID)
    np.testing.assert_array_equal(out, expected)
    assert not variables
    with pytest.raises(ValueError, match="'sincos' needs config.model.dim divisible"):
        positions.Sincos(dim=6).apply({}, jnp.zeros((1, 15, 6)), GRID)

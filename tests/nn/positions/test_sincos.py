"""Tests absolute sinusoids, learned vectors and constrained sinusoids."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import offsets
from relattn.nn.positions import sincos
from tests.helpers.quick import normal, quick_jit, run

GRID = (3, 5)
DIM, HEADS, LAYERS, BATCH, HEAD_DIM = 12, 2, 3, 4, 7


def init_with_output(module, tokens):
    def init(key, tokens):
        return module.init_with_output(key, tokens, GRID)

    return run(init, jax.random.key(0), np.float32(tokens))


def test_learnable_sincos_adds_the_published_sinusoids():
    module = sincos.LearnableSincos(dim=DIM)
    added, variables = init_with_output(module, np.zeros((BATCH, 15, DIM)))
    frequencies = 32000.0 ** (-np.arange(3) / 3)
    np.testing.assert_allclose(
        variables["params"]["frequencies"], frequencies, rtol=1e-6
    )
    row, column = 2, 4
    angles = np.concatenate([row * frequencies, column * frequencies])
    expected = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(-1)
    np.testing.assert_allclose(added[1, row * 5 + column], expected, atol=1e-6)


def test_learnable_sincos_with_an_indivisible_width_raises():
    with pytest.raises(ValueError, match="dim divisible by 4, got 6"):
        sincos.LearnableSincos(dim=6).init(
            jax.random.key(0), jnp.zeros((1, 15, 6)), GRID
        )


def heads_inputs(**options):
    module = sincos.ConstrainedSincos(DIM, HEADS, LAYERS, num_scales=2, **options)
    variables = run(lambda: module.init(jax.random.key(0), GRID, 1))
    q, k = normal(0, 2, BATCH, HEADS, 16, HEAD_DIM)
    inputs = jax.device_put((q, k, normal(1, BATCH, 16, DIM)))
    return module, variables["params"], inputs


def lemma_1(params, x, layer):
    """Computes the scores of image tokens by Lemma 1."""
    coefficients = params["coefficients"][layer][None, :, None]
    if "kernel" in params:
        content = jnp.einsum("bic,chps->bhips", x, params["kernel"][layer])
        coefficients = coefficients + content
    if "bias" in params:
        coefficients = coefficients + params["bias"][layer][:, None]
    if coefficients.shape[2] > 1:
        coefficients = coefficients[:, :, 1:]
    delta = offsets.offsets(GRID)
    scores = 0.0
    for axis in range(2):
        for scale in range(2):
            a, b = jnp.moveaxis(coefficients[..., None, axis * 2 + scale, :], -1, 0)
            angle = params["frequencies"][scale] * delta[..., axis]
            scores += a * jnp.cos(angle) + b * jnp.sin(angle)
    return scores


@pytest.mark.quick("options0-1")
@pytest.mark.parametrize(
    ("options", "blocks"),
    [({}, 1), ({"content_modulated": True}, 1), ({"content_conditioned": True}, 2)],
)
def test_constrained_sincos_equals_lemma_1_and_is_zero_for_the_prefix(options, blocks):
    module, params, (q, k, x) = heads_inputs(**options)
    layer = 1

    def widen(params, x):
        layers = module.apply({"params": params}, GRID, 1)
        assert len(layers) == LAYERS
        return layers[layer](q, k, x)

    def score(params, x):
        wide = [vectors[..., HEAD_DIM:] for vectors in widen(params, x)]
        return jnp.einsum("bhid,bhjd->bhij", *wide)[:, :, 1:, 1:]

    weights = np.random.default_rng(0).normal(size=(BATCH, HEADS, 15, 15))

    def outcome(scores, dtype):
        """Computes scores, and gradients of a weighted sum of all scores."""
        leaves = jax.tree.map(lambda leaf: np.asarray(leaf, dtype), (params, x))

        def loss(params, x):
            values = jnp.broadcast_to(scores(params, x), weights.shape)
            return (weights.astype(dtype) * values).sum(), values

        gradients, values = quick_jit(jax.grad(loss, (0, 1), has_aux=True))(*leaves)
        return values, gradients

    wide_q, wide_k = run(widen, params, x)
    assert wide_q.shape == wide_k.shape == (BATCH, HEADS, 16, HEAD_DIM + blocks * 8)
    np.testing.assert_array_equal(wide_q[..., :HEAD_DIM], q)
    np.testing.assert_array_equal(wide_k[..., :HEAD_DIM], k)
    np.testing.assert_array_equal(wide_k[:, :, 0, HEAD_DIM:], 0)
    np.testing.assert_array_equal(wide_q[:, :, 0, HEAD_DIM:], 0)
    found = outcome(score, jnp.float32)
    with jax.enable_x64(True):
        expected = outcome(lambda params, x: lemma_1(params, x, layer), jnp.float64)
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-4)


def test_content_conditioned_block_is_as_published():
    module, params, (q, k, x) = heads_inputs(content_conditioned=True)
    assert jax.tree.map(jnp.shape, params) == {
        "frequencies": (2,),
        "coefficients": (LAYERS, HEADS, 4, 2),
        "kernel": (LAYERS, DIM, HEADS, 4, 2),
        "bias": (LAYERS, HEADS, 4, 2),
    }
    # With zero coefficients only the block of the content remains; it comes first.
    params = {**params, "coefficients": 0 * params["coefficients"]}

    def widen(params):
        return module.apply({"params": params}, GRID, 1)[0](q, k, x)

    wide_q, wide_k = run(widen, params)
    np.testing.assert_array_equal(wide_q[..., HEAD_DIM + 8 :], 0)
    assert (wide_q[:, :, 1:, HEAD_DIM : HEAD_DIM + 8] != 0).any()
    np.testing.assert_array_equal(
        wide_k[..., HEAD_DIM : HEAD_DIM + 8], wide_k[..., -8:]
    )
    # PyTorch's initial values of a linear layer.
    for name in ("kernel", "bias"):
        assert 0.9 * DIM**-0.5 < np.abs(params[name]).max() <= DIM**-0.5


def test_both_forms_of_content_raise():
    with pytest.raises(ValueError, match="content_modulated=True, not both"):
        heads_inputs(content_conditioned=True, content_modulated=True)


def test_constrained_sincos_shares_only_its_scales():
    _, params, _ = heads_inputs()
    shapes = jax.tree.map(jnp.shape, params)
    assert shapes == {"frequencies": (2,), "coefficients": (LAYERS, HEADS, 4, 2)}


def test_constrained_sincos_without_scales_raises():
    with pytest.raises(ValueError, match="num_scales >= 1, got 0"):
        sincos.ConstrainedSincos(DIM, HEADS, LAYERS, num_scales=0).init(
            jax.random.key(0), GRID, 1
        )


def test_learned_adds_a_vector_for_every_position():
    module = sincos.Learned(dim=DIM)
    added, variables = init_with_output(module, np.ones((BATCH, 15, DIM)))
    table = variables["params"]["table"]
    np.testing.assert_array_equal(added[1], 1 + table)
    # The standard deviation of N(0, 1), within 4 standard errors.
    assert abs(table.std() - 1) < 4 / (2 * table.size) ** 0.5
    with pytest.raises(ValueError, match=r"has shape \(15, 12\); a grid of 2x4 tokens"):
        module.apply(variables, jnp.ones((BATCH, 8, DIM)), (2, 4))


def test_sincos_equals_initial_learnable_sincos():
    tokens = np.zeros((BATCH, 15, DIM))
    expected, _ = init_with_output(sincos.LearnableSincos(dim=DIM, base=50.0), tokens)
    out, variables = init_with_output(sincos.Sincos(dim=DIM, base=50.0), tokens)
    np.testing.assert_array_equal(out, expected)
    assert not variables
    with pytest.raises(ValueError, match="'sincos' needs dim divisible"):
        sincos.Sincos(dim=6).apply({}, jnp.zeros((1, 15, 6)), GRID)

"""Tests general Translution on points: definition, masks and equivariance."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import kernels, offsets
from tests.helpers.quick import normal, quick_jit, run

BATCH, N, DIM, WIDTH = 2, 7, 5, 3


def _cloud():
    """Returns features, points in space, and weights of the two functions."""
    weights = normal(2, DIM, DIM), normal(3, 3, DIM), normal(4, 3 + DIM, WIDTH)
    return normal(0, BATCH, N, DIM), normal(1, BATCH, N, 3), weights


def _attend(x, points, weights, **options):
    matrix, directions, values = weights

    def score(offset, query, key):
        products = (query @ matrix + jnp.tanh(offset @ directions)) * key
        return products.sum(-1)

    def value(offset, key):
        return jnp.concatenate([offset, key], axis=-1) @ values

    return kernels.general_translution(x, points, score, value, **options)


def _naive(x, points, weights, mask):
    matrix, directions, values = weights
    offset = points[:, :, None] - points[:, None]
    query = (x @ matrix)[:, :, None] + jnp.tanh(offset @ directions)
    scores = (query * x[:, None]).sum(-1)
    weights = jnp.where(mask[:, None], jnp.exp(scores), 0)
    weights = weights / weights.sum(-1, keepdims=True)
    keys = jnp.broadcast_to(x[:, None], (BATCH, N, N, DIM))
    pairs = jnp.concatenate([offset, keys], axis=-1) @ values
    return jnp.einsum("bij,bije->bie", weights, pairs)


@pytest.mark.quick("False")
@pytest.mark.parametrize("masked", [False, True])
def test_values_and_gradients_equal_the_definition(masked):
    inputs = _cloud()
    mask = normal(5, BATCH, N) > (-0.5 if masked else -9)

    def ours(*inputs):
        out = _attend(*inputs, key_mask=mask if masked else None)
        return jnp.sum(jnp.cos(jnp.arange(out.size)).reshape(out.shape) * out), out

    def naive(*inputs):
        out = _naive(*inputs, mask)
        return jnp.sum(jnp.cos(jnp.arange(out.size)).reshape(out.shape) * out), out

    gradients, out = run(jax.grad(ours, (0, 1, 2), has_aux=True), *inputs)
    with jax.enable_x64(True):
        wide = jax.tree.map(np.float64, inputs)
        expected = run(jax.grad(naive, (0, 1, 2), has_aux=True), *wide)
    ours_and_theirs = zip(
        jax.tree.leaves((gradients, out)), jax.tree.leaves(expected), strict=True
    )
    for x, y in ours_and_theirs:
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * np.abs(y).max())


def test_output_is_invariant_to_translation_but_not_reflection():
    x, points, weights = _cloud()
    out = run(_attend, x, points, weights)
    moved = run(_attend, x, points + np.float32([1.0, -2.0, 0.5]), weights)
    np.testing.assert_allclose(moved, out, atol=2e-5)
    assert np.abs(run(_attend, x, -points, weights) - out).max() > 0.1


def test_masked_points_have_no_effect():
    x, points, weights = _cloud()
    mask = np.arange(N) < N - 2
    broken = (np.where(mask[:, None], y, np.float32(np.nan)) for y in (x, points))
    attend = quick_jit(_attend)
    out = attend(*broken, weights, key_mask=mask)[:, : N - 2]
    expected = attend(x[:, : N - 2], points[:, : N - 2], weights)
    np.testing.assert_allclose(out, expected, atol=1e-6)
    nothing = attend(x, points, weights, key_mask=np.zeros(N, bool))
    np.testing.assert_array_equal(nothing, 0)


@pytest.mark.slow
def test_integer_positions_equal_translution():
    x, w = normal(0, 6, DIM), jax.device_put(normal(1, 3, 15, DIM, 1, WIDTH))
    positions = offsets.grid_positions((2, 3))

    def rows(w, offset):
        index = (offset[..., 0] + 1) * 5 + offset[..., 1] + 2
        return w[index.astype(int), :, 0]

    def score(offset, query, key):
        q = jnp.einsum("...nc,...nce->...ne", query + 0 * key, rows(w[0], offset))
        k = jnp.einsum("...nc,...nce->...ne", key, rows(w[1], -offset))
        return (q * k).sum(-1) / WIDTH**0.5

    def value(offset, key):
        return jnp.einsum("...nc,...nce->...ne", key, rows(w[2], offset))

    out = run(lambda *x: kernels.general_translution(*x, score, value), x, positions)
    attend = functools.partial(kernels.translution, index=kernels.Offsets((2, 3)))
    expected = run(attend, x, *w)[0]
    np.testing.assert_allclose(out, expected, atol=1e-5)

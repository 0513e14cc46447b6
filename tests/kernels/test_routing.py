"""Tests routing attention, centroid updates and local attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import kernels
from tests import reference
from tests.helpers import compare
from tests.helpers.quick import normal, quick_jit, run

N, HEAD_DIM, CLUSTERS, WINDOW = 11, 5, 3, 4


def normalise(x):
    x = np.float64(x)
    x = x - x.mean(axis=-1, keepdims=True)
    return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + 1e-5)


def inputs():
    return normal(0, 3, N, HEAD_DIM)


def centroids():
    mu = normal(1, CLUSTERS, HEAD_DIM)
    return mu / np.linalg.norm(mu, axis=-1, keepdims=True)


attend = jax.jit(kernels.routing_attention, static_argnames="window")


def naive_routing(q, k, v, mu, window, exists):
    """Computes algorithm 1 token by token; also returns the outputs per cluster."""
    q, k, v, mu = normalise(q), normalise(k), np.float64(v), np.float64(mu)
    outs = [[] for _ in q]
    for centroid in mu:

        def chosen(x, centroid=centroid):
            tokens = [(-x[i] @ centroid, i) for i in range(len(x)) if exists[i]]
            return [i for _, i in sorted(tokens)[:window]]

        keys = chosen(k)
        for i in chosen(q):
            weights = np.exp([q[i] @ k[j] / HEAD_DIM**0.5 for j in keys])
            outs[i].append(weights / weights.sum() @ v[keys])
    zeros = np.zeros(v.shape[1])
    return np.stack([np.mean(out, axis=0) if out else zeros for out in outs]), outs


@pytest.mark.parametrize("num_tokens", [N, 3])
def test_clusters_match_naive_routing(num_tokens):
    exists = np.arange(N) < num_tokens
    q, k, v = inputs()
    out = attend(q, k, v, centroids(), window=WINDOW, key_mask=exists)
    expected, outs = naive_routing(q, k, v, centroids(), WINDOW, exists)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    # Some tokens are in no cluster, some in one, some in several.
    counts = {len(found) for found in outs}
    assert {0, 1, 2} <= counts if num_tokens == N else counts == {0, CLUSTERS}


def test_single_cluster_of_all_tokens_is_softmax_attention():
    q, k, v = inputs()
    out = attend(q, k, v, centroids()[:1], window=N)
    directions = (np.float32(normalise(x)) for x in (q, k))
    expected = jax.jit(kernels.softmax_attention)(*directions, v)
    np.testing.assert_allclose(out, expected, atol=2e-6)


def test_cluster_assignment_has_no_gradient():
    def loss(q, mu):
        k, v = keys
        out = kernels.routing_attention(q, k, v, mu, window=WINDOW)
        sums, counts = kernels.cluster_sums(q, mu)
        return jnp.sin(out).sum() + sums.sum() + counts.sum()

    keys = inputs()[1:]
    gradients = run(jax.grad(loss, (0, 1)), inputs()[0], centroids())
    q_gradient, mu_gradient = gradients
    assert (mu_gradient == 0).all() and (q_gradient != 0).any()


@pytest.mark.parametrize("window", [0, N + 1])
def test_invalid_window_raises(window):
    q, k, v = inputs()
    with pytest.raises(ValueError, match=f"from 1 to 11, .*, got {window}"):
        kernels.routing_attention(q, k, v, centroids(), window=window)


def test_centroids_move_to_mean_of_their_tokens():
    x, mu = inputs(), centroids()
    mask = np.arange(N) % 3 != 0

    @jax.jit
    def move(mu, mask):
        sums, counts = kernels.cluster_sums(x, mu, key_mask=mask)
        return kernels.update_centroids(mu, sums.sum(0), counts.sum(0), decay=0.9)

    moved = move(mu, mask)
    tokens = normalise(x)[:, mask].reshape(-1, HEAD_DIM)
    nearest = (tokens @ np.float64(mu).T).argmax(axis=1)
    for cluster in range(CLUSTERS):
        mean = tokens[nearest == cluster].mean(axis=0) / HEAD_DIM**0.5
        expected = 0.9 * np.float64(mu[cluster]) + 0.1 * mean
        expected /= np.linalg.norm(expected)
        np.testing.assert_allclose(moved[cluster], expected, atol=1e-6)
    # Centroids of empty clusters do not change, and zeros stay zeros.
    np.testing.assert_array_equal(move(mu, np.zeros(N, bool)), mu)
    zeros = np.zeros((1, 2), np.float16)
    moved = kernels.update_centroids(zeros, zeros, np.ones(1, np.float16), decay=0.5)
    np.testing.assert_array_equal(moved, zeros)


@pytest.mark.quick("nan")
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_masked_tokens_reach_no_sum_or_output(value):
    x, mu, mask = inputs(), centroids(), np.arange(N) % 3 != 0
    changed = np.where(mask[:, None], x, np.float32(value))
    found = run(functools.partial(kernels.cluster_sums, key_mask=mask), changed, mu)
    expected = run(kernels.cluster_sums, x[:, mask], mu)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)

    def loss(q, k, v):
        # More tokens in a cluster than exist.
        out = kernels.routing_attention(q, k, v, mu, window=N, key_mask=mask)
        return jnp.sin(jnp.where(mask[:, None], out, 0)).sum()

    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))
    expected = gradients(*x)
    for ours, theirs in zip(gradients(*changed), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert np.isfinite(ours).all()


@pytest.mark.parametrize(
    ("window", "num_prefix", "n"),
    # Blocks that do not divide the sequence; a window longer than the sequence.
    [(4, 2, 11), (23, 0, 5)],
)
def test_local_attention_matches_reference(window, num_prefix, n):
    inputs = list(normal(0, 3, 2, n, 3))
    i, j = np.ogrid[:n, :n]
    near = abs(i - j) <= window // 2
    compare.expect_equal(
        functools.partial(
            kernels.local_attention, window=window, num_prefix=num_prefix
        ),
        functools.partial(
            reference.softmax_attention,
            allowed=near | (i < num_prefix) | (j < num_prefix),
        ),
        inputs,
    )


def test_local_window_of_one_token_returns_its_value():
    x, v = normal(0, 2, 5, 3)
    attend = jax.jit(functools.partial(kernels.local_attention, window=1))
    np.testing.assert_array_equal(attend(x, x, v), v)


def test_empty_local_window_raises():
    x = np.ones((5, 2))
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        kernels.local_attention(x, x, x, window=0)


@pytest.mark.slow
def test_local_attention_checks_num_prefix():
    x = np.ones((1, 3), np.float32)
    with pytest.raises(ValueError, match="from 0 to 1, the number of tokens, got 2"):
        kernels.local_attention(x, x, x, window=3, num_prefix=2)
    attend = quick_jit(kernels.local_attention, window=3, num_prefix=1)
    out = attend(x, x, x)
    np.testing.assert_allclose(out, x, rtol=1e-6)

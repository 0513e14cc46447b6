"""Tests feature maps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import kernels, offsets
from relattn.kernels import feature_maps
from tests import reference
from tests.helpers import compare
from tests.helpers.export import unchecked_annotations
from tests.helpers.quick import normal, quick_jit, run

NUM_FEATURES, HEAD_DIM = 7, 5
KEY = jax.random.key(3)


@functools.cache
def draw_projection():
    return run(lambda: kernels.draw_orthogonal(KEY, NUM_FEATURES, HEAD_DIM))


@pytest.mark.quick("positive")
@pytest.mark.parametrize("name", ["positive", "trigonometric", "relu", "hedgehog"])
def test_dense_features_match_reference(name):
    x, projection = normal(0, 2, 3, HEAD_DIM, scale=2), draw_projection()
    feature_map = getattr(feature_maps, f"{name}_features")
    features = run(lambda *x: feature_map(*x).dense(), x, projection)
    with jax.enable_x64(True):
        rows = np.float64(x).reshape(-1, HEAD_DIM)
        naive = jax.vmap(getattr(reference, f"{name}_features"), (0, None))
        expected = run(naive, rows, np.float64(projection))
    error = np.abs(np.reshape(features, expected.shape) - expected)
    assert (error.max(axis=-1) < 3e-6 * np.abs(expected).max(axis=-1)).all()


def test_relu_features_add_bias():
    x, projection = normal(0, 3, HEAD_DIM), normal(1, NUM_FEATURES, HEAD_DIM)
    bias = np.float32(np.arange(NUM_FEATURES) - 3)

    def features(x):
        return feature_maps.relu_features(x, projection, bias, eps=0.25).dense()

    def naive(x):
        return reference.relu_features(x, projection, bias, eps=0.25)

    np.testing.assert_allclose(run(features, x), run(jax.vmap(naive), x), rtol=1e-5)


def test_each_head_may_have_its_hedgehog_features():
    x, projections = normal(0, 2, 3, 4, HEAD_DIM), normal(1, 3, 7, HEAD_DIM)

    def features(x, projection):
        return feature_maps.hedgehog_features(x, projection).dense()

    def one_by_one(x, projections):
        return jax.vmap(features, (1, 0), 1)(x, projections)

    found = run(features, x, projections)
    np.testing.assert_allclose(found, run(one_by_one, x, projections), rtol=1e-5)


def test_opposite_tokens_have_weights_with_hedgehog():
    """The weight of a token for itself is exp(-138)."""
    key, v = 70 * np.eye(HEAD_DIM, dtype=np.float32)[:1], normal(0, 1, 3)
    to_features = functools.partial(
        feature_maps.hedgehog_features, projection=np.eye(HEAD_DIM)
    )

    def attend(q, k, v):
        return kernels.causal_linear_attention(q, k, v, to_features)

    found = run(attend, -key, key, v)
    np.testing.assert_allclose(found, v, rtol=1e-5)


def test_exponents_of_long_hedgehog_keys_stay_between_bounds():
    def exponents(x):
        features = feature_maps.hedgehog_features(x, 1e3 * np.eye(HEAD_DIM))
        return features.exponents, features.bound

    found, bound = run(exponents, normal(0, 9, HEAD_DIM))
    # exp(60) for each of many keys does not overflow.
    np.testing.assert_array_equal(bound, np.full(2 * HEAD_DIM, -60))
    # The largest feature of a token is at least 1 / (2 HEAD_DIM): none underflows.
    largest = found.max(axis=-1)
    assert (largest <= 0).all() and (largest > -np.log(2 * HEAD_DIM) - 1e-6).all()
    assert np.isfinite(found).all() and found.min() < -1e3


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_features_of_half_precision_inputs_are_float32(dtype):
    x, projection = normal(0, 3, HEAD_DIM).astype(dtype), draw_projection()
    for feature_map in (
        feature_maps.positive_features,
        feature_maps.trigonometric_features,
    ):

        def features(x, feature_map=feature_map):
            features = feature_map(x, projection)
            return features.exponents, features.dense()

        exponents, dense = run(features, x)
        assert exponents.dtype == np.float32
        np.testing.assert_array_equal(dense, run(features, np.float32(x))[1])


@pytest.mark.slow
def test_bound_keeps_exponents_below_eighty_at_any_head_dim():
    head_dim = 401
    projection = kernels.draw_orthogonal(KEY, NUM_FEATURES, head_dim)
    # The key with the largest exponent of every feature: k~ = w.
    keys = projection * head_dim**0.25
    features = feature_maps.positive_features(keys, projection)
    shifted = features.exponents - features.bound
    assert shifted.max() <= 80 and np.diag(shifted).min() > 70
    narrow = kernels.draw_orthogonal(KEY, NUM_FEATURES, HEAD_DIM)
    bound = feature_maps.positive_features(jnp.ones((1, HEAD_DIM)), narrow).bound
    np.testing.assert_array_equal(bound, 0.0)


def test_bound_includes_eps():
    def exponents(x, projection):
        features = feature_maps.positive_features(x, projection, eps=1e37)
        return features.exponents - features.bound

    shifted = run(exponents, np.ones((1, HEAD_DIM), np.float32), draw_projection())
    shifted = shifted + 0.5 * np.log(NUM_FEATURES)
    np.testing.assert_allclose(shifted, 80.0, rtol=1e-5)


@pytest.mark.parametrize("eps", [-1e-4, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["positive_features", "relu_features"])
def test_an_eps_that_is_negative_or_infinite_raises(name, eps):
    with pytest.raises(ValueError, match="eps must be finite and at least 0, got"):
        getattr(feature_maps, name)(np.ones((2, 2)), np.eye(2), eps=eps)


def strategy_1(batch, seed):
    """Draws queries, keys and values of 8 heads at initialisation, and a projection."""
    rng = np.random.default_rng(seed)
    positions = offsets.grid_positions((16, 16), 1)
    u = kernels.sinusoids(positions, 64.0 ** (-np.arange(4) / 4), num_prefix=1)
    coefficients = rng.standard_normal((8, 8, 2)).astype(np.float32)
    q_positions = jax.vmap(lambda c: kernels.constrained_sinusoids(u, c))(coefficients)

    def content():
        return rng.standard_normal((batch, 8, 257, 32)).astype(np.float32) / 3**0.5

    q, k = (
        np.concatenate([x, np.broadcast_to(p, (*x.shape[:-1], 16))], axis=-1)
        for x, p in ((content(), q_positions), (content(), u))
    )
    projection = kernels.draw_orthogonal(jax.random.key(seed), 185, 48)
    return q, k, content(), projection


def published_attention(q, k, v, projection, batch):
    """Attends with eps = 1e-4 added to features relative to the batch's largest one."""

    def project(x):
        x = x / 48**0.25
        return x @ projection.T, (x**2).sum(-1, keepdims=True) / 2

    (w_q, norm_q), (w_k, norm_k) = project(q), project(k)
    phi_q = np.exp(w_q - norm_q - w_q.max(-1, keepdims=True)) + 1e-4
    phi_k = np.exp(w_k - norm_k - project(batch)[0].max()) + 1e-4
    weights = phi_q @ phi_k.sum(-2)[..., None]
    return phi_q @ (phi_k.swapaxes(-1, -2) @ v) / weights


@pytest.mark.slow
def test_effect_of_eps_is_as_documented():
    *batch, projection = strategy_1(batch=22, seed=2)
    # The rest of the batch enters an example only through its largest key.
    q, k, v = (jnp.asarray(x[:2]) for x in batch)

    def attend(eps):
        phi = functools.partial(
            feature_maps.positive_features, projection=projection, eps=eps
        )
        return kernels.linear_attention(q, k, v, phi)

    def distance(x, y):
        return np.linalg.norm(x - y) / np.linalg.norm(y)

    exact = kernels.softmax_attention(q, k, v)
    plain, added = attend(0.0), attend(0.3)
    arrays = (np.asarray(x) for x in (q, k, v, projection))
    published = published_attention(*arrays, batch[1])
    assert 0.78 < distance(plain, exact) < 1.0
    assert distance(attend(1e-4), plain) < 2e-4
    assert 0.24 < distance(added, plain) < 0.255
    assert 0.55 < distance(added, exact) < 0.72
    assert 0.19 < distance(published, plain) < 0.33
    assert 0.59 < distance(published, exact) < 0.63


def test_different_head_dims_raise():
    projection = np.ones((NUM_FEATURES, HEAD_DIM))
    with pytest.raises(ValueError, match="head_dim 5, got 3: draw it with head_dim=3"):
        feature_maps.positive_features(np.ones((2, 3)), projection)


def test_default_num_features():
    assert [feature_maps.default_num_features(d) for d in (1, 32, 48)] == [1, 110, 185]
    with pytest.raises(ValueError, match="head_dim must be at least 1, got 0"):
        feature_maps.default_num_features(0)


def test_unit_norm_gives_unit_vectors_to_feature_maps():
    x = normal(0, 7, 5) * np.float32(np.arange(1, 8))[:, None]
    out = run(kernels.unit_norm, x)
    np.testing.assert_allclose(np.linalg.norm(out, axis=-1), 5**0.25, rtol=1e-6)
    np.testing.assert_allclose(run(kernels.unit_norm, 17 * x), out, rtol=1e-5)


def test_unit_norm_matches_reference():
    x = normal(0, 2, 7, 5)

    def naive(x):
        return 5**0.25 * x / jnp.sqrt((x**2).sum(-1, keepdims=True))

    compare.expect_equal(kernels.unit_norm, naive, [x])


@pytest.mark.quick("float32")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_unit_norm_of_short_vectors_stays_short_without_gradient(dtype):
    x = np.array([[0.0, 0.0, 0.0], [1e-5, 0.0, -2e-5], [3.0, 0.0, -4.0]], dtype)

    def value_and_gradient(x):
        out, pullback = jax.vjp(kernels.unit_norm, x)
        return out, *pullback(jnp.ones_like(out))

    out, gradient = run(value_and_gradient, x)
    assert out.dtype == dtype
    norms = np.linalg.norm(np.float32(out), axis=-1) / 3**0.25
    np.testing.assert_allclose(norms, [0, 5**0.5 * 1e-2, 1], rtol=1e-2)
    np.testing.assert_array_equal(gradient[:2], 0.0)
    expected = 3**0.25 / 5 * np.array([1.12, 1.0, 0.84])
    np.testing.assert_allclose(np.float32(gradient[2]), expected, rtol=1e-2)


GRID, N, VALUE_DIM = (2, 3), 6, 3
KERNELS = {
    "linear": kernels.linear_attention,
    "causal linear": kernels.causal_linear_attention,
    "toeplitz": lambda q, k, v, feature_map, bias: kernels.toeplitz_linear_attention(
        q, k, v, feature_map, grid=GRID, bias=bias
    ),
    "causal toeplitz": lambda q, k, v, feature_map, bias: (
        kernels.causal_toeplitz_linear_attention(q, k, v, feature_map, bias=bias)
    ),
    "causal toeplitz step": lambda q, k, v, feature_map, bias: (
        kernels.causal_toeplitz_linear_attention_step(
            q[4], k, v, feature_map, bias=bias, index=4
        )
    ),
    "banded": lambda q, k, v, feature_map: kernels.banded_attention(
        q, v, k[:2], feature_map, grid=GRID
    ),
}


@pytest.mark.quick("linear")
@pytest.mark.parametrize("name", KERNELS)
def test_a_pair_of_maps_equals_one_map_of_tokens_mapped_beforehand(name):
    kernel = KERNELS[name]
    q, k = normal(0, 2, N, HEAD_DIM)
    v = normal(1, N, VALUE_DIM)
    to_q, to_k = normal(2, 2, HEAD_DIM, HEAD_DIM, scale=0.5)
    bias = normal(3, 15 if name == "toeplitz" else 11)
    options = {"bias": bias} if "toeplitz" in name else {}
    feature_map = functools.partial(
        feature_maps.positive_features,
        projection=draw_projection(),
    )
    pair = (lambda x: feature_map(x @ to_q), lambda x: feature_map(x @ to_k))

    def by_pair(q, k, v):
        return kernel(q, k, v, pair, **options)

    def beforehand(q, k, v):
        return kernel(q @ to_q, k @ to_k, v, feature_map, **options)

    @quick_jit
    def pull_back(q, k, v):
        results = []
        for function in (by_pair, beforehand):
            out, pullback = jax.vjp(function, q, k, v)
            results.append((out, pullback(jnp.cos(out))))
        return results

    results, expected = pull_back(q, k, v)
    for ours, theirs in zip(*map(jax.tree.leaves, (results, expected)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", KERNELS)
def test_maps_of_different_numbers_of_features_raise(name):
    x = np.ones((N, HEAD_DIM), np.float32)
    bias = np.zeros(15 if name == "toeplitz" else 11, np.float32)
    options = {"bias": bias} if "toeplitz" in name else {}
    pair = (lambda x: x[..., :3], lambda x: x[..., :2])
    with pytest.raises(ValueError, match="queries and keys must return features of"):
        KERNELS[name](x, x, x, pair, **options)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("feature_map", "message"),
    [
        (lambda x: x.sum(axis=-1), r"got shape \("),
        (lambda x: x.swapaxes(-1, -2), r"got shape \("),
        (lambda x: jnp.concatenate([x, x], axis=-2), r"got shape \("),
        (lambda x: x.reshape(-1), r"got shape \("),
        (lambda x: (x, x), "got tuple"),
        (lambda x: None, "got NoneType"),
        ("favor", "must be a function .* got str"),
        ((jax.nn.relu,), "a tuple of two, for queries and for keys, got 1"),
    ],
)
def test_what_is_no_feature_map_is_refused(name, feature_map, message):
    """Stacked features, or those of one token, would broadcast silently."""
    x = np.ones((2, N, HEAD_DIM), np.float32)
    x = x[0] if name in ("causal toeplitz step", "banded") else x
    bias = np.zeros(15 if name == "toeplitz" else 11, np.float32)
    options = {"bias": bias} if "toeplitz" in name else {}
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        KERNELS[name](x, x, x, feature_map, **options)

"""Tests feature maps, orthogonal draws and redraws."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import kernels, offsets
from relattn.kernels import feature_maps
from tests import reference
from tests.helpers import compare
from tests.helpers.quick import quick_jit

NUM_FEATURES, HEAD_DIM = 7, 5
KEY = jax.random.key(3)


@pytest.mark.quick("positive")
@pytest.mark.parametrize("name", ["positive", "trigonometric", "relu"])
def test_dense_features_match_reference(name):
    x = 2 * jax.random.normal(KEY, (2, 3, HEAD_DIM))
    projection = feature_maps.draw_orthogonal(KEY, NUM_FEATURES, HEAD_DIM)
    features = getattr(feature_maps, f"{name}_features")(x, projection).dense()
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(a), jnp.float64) for a in (x, projection)]
        rows = wide[0].reshape(-1, HEAD_DIM)
        naive = getattr(reference, f"{name}_features")
        expected = jnp.stack([naive(row, wide[1]) for row in rows])
    error = np.abs(np.reshape(features, expected.shape) - np.asarray(expected))
    assert (error.max(axis=-1) < 3e-6 * np.abs(expected).max(axis=-1)).all()


def test_relu_features_add_bias():
    x = jax.random.normal(KEY, (3, HEAD_DIM))
    projection = feature_maps.draw_gaussian(KEY, NUM_FEATURES, HEAD_DIM)
    bias = jnp.arange(NUM_FEATURES) - 3.0
    features = feature_maps.relu_features(x, projection, bias, eps=0.25).dense()
    for row, vector in zip(features, x, strict=True):
        expected = reference.relu_features(vector, projection, bias, eps=0.25)
        np.testing.assert_allclose(row, expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_features_of_half_precision_inputs_are_float32(dtype):
    x = jax.random.normal(KEY, (3, HEAD_DIM)).astype(dtype)
    projection = feature_maps.draw_orthogonal(KEY, NUM_FEATURES, HEAD_DIM)
    for feature_map in (
        feature_maps.positive_features,
        feature_maps.trigonometric_features,
    ):
        features = feature_map(x, projection)
        wide = feature_map(x.astype(jnp.float32), projection)
        assert features.exponents.dtype == jnp.float32
        np.testing.assert_array_equal(features.dense(), wide.dense())


@pytest.mark.slow
def test_bound_keeps_exponents_below_eighty_at_any_head_dim():
    head_dim = 401
    projection = feature_maps.draw_orthogonal(KEY, NUM_FEATURES, head_dim)
    # The key with the largest exponent of every feature: k~ = w.
    keys = projection * head_dim**0.25
    features = feature_maps.positive_features(keys, projection)
    shifted = features.exponents - features.bound
    assert shifted.max() <= 80 and np.diag(shifted).min() > 70
    narrow = feature_maps.draw_orthogonal(KEY, NUM_FEATURES, HEAD_DIM)
    bound = feature_maps.positive_features(jnp.ones((1, HEAD_DIM)), narrow).bound
    np.testing.assert_array_equal(bound, 0.0)


def test_bound_includes_eps():
    projection = feature_maps.draw_orthogonal(KEY, NUM_FEATURES, HEAD_DIM)
    features = feature_maps.positive_features(
        jnp.ones((1, HEAD_DIM)), projection, eps=1e37
    )
    shifted = features.exponents - features.bound + 0.5 * np.log(NUM_FEATURES)
    np.testing.assert_allclose(shifted, 80.0, rtol=1e-5)


@pytest.mark.parametrize("eps", [-1e-4, float("nan")])
def test_negative_eps_raises(eps):
    with pytest.raises(ValueError, match="eps must be at least 0, got"):
        feature_maps.positive_features(jnp.ones((2, 2)), jnp.eye(2), eps=eps)


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
    projection = feature_maps.draw_orthogonal(jax.random.key(seed), 185, 48)
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
    projection = feature_maps.draw_gaussian(KEY, NUM_FEATURES, HEAD_DIM)
    with pytest.raises(ValueError, match="head_dim 5, got 3; draw it with head_dim=3"):
        feature_maps.positive_features(jnp.ones((2, 3)), projection)


@pytest.mark.parametrize("num_features", [3, 5, 13])
def test_rows_are_orthogonal_within_blocks(num_features):
    projection = feature_maps.draw_orthogonal(
        KEY, num_features, HEAD_DIM, norms="fixed"
    )
    assert projection.shape == (num_features, HEAD_DIM)
    assert projection.dtype == jnp.float32
    for start in range(0, num_features, HEAD_DIM):
        block = projection[start : start + HEAD_DIM]
        np.testing.assert_allclose(
            block @ block.T, HEAD_DIM * np.eye(len(block)), atol=1e-5
        )


def test_rows_are_orthogonal_at_large_head_dim():
    rows = feature_maps.draw_orthogonal(KEY, 300, 256, norms="fixed") / 16
    for block in (rows[:256], rows[256:]):
        block = np.float64(block)
        np.testing.assert_allclose(block @ block.T, np.eye(len(block)), atol=1e-5)


@pytest.mark.quick("1-True", "1-False", "2-False")
@pytest.mark.parametrize("haar", [True, False])
@pytest.mark.parametrize("head_dim", [1, 2, 5, 48])
def test_rows_match_lapack(head_dim, haar):
    rows = feature_maps.draw_orthogonal(
        KEY, 3 * head_dim, head_dim, norms="fixed", haar=haar
    )
    block_key, _ = jax.random.split(KEY)
    gaussian = np.float64(jax.random.normal(block_key, (3, head_dim, head_dim)))
    q, r = np.linalg.qr(gaussian)
    if haar:
        q *= np.sign(np.diagonal(r, axis1=1, axis2=2))[:, None, :]
    expected = q.swapaxes(1, 2).reshape(rows.shape) * head_dim**0.5
    np.testing.assert_allclose(rows, expected, atol=1e-5)


# Decompositions by LAPACK or cuSOLVER would be custom calls.
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_draw_lowers_without_lapack(platform):
    draw = jax.jit(
        lambda key: feature_maps.draw_orthogonal(key, NUM_FEATURES, HEAD_DIM)
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    exported = jax.export.export(draw, platforms=[platform])(key)
    assert "custom_call" not in exported.mlir_module()


def test_draws_of_a_key_are_unchanged():
    gaussian = [[-1.446257, 1.539381, 0.382506], [1.970702, -0.587667, 0.209416]]
    drawn = feature_maps.draw_gaussian(KEY, 2, 3)
    np.testing.assert_allclose(drawn, gaussian, atol=1e-5)
    orthogonal = [[-1.905793, -0.393762], [0.062659, -0.303266], [0.275281, 1.089174]]
    drawn = feature_maps.draw_orthogonal(KEY, 3, 2)
    np.testing.assert_allclose(drawn, orthogonal, atol=1e-5)
    layer_projection = [
        [1.153859, 1.071999],
        [0.232691, -0.250460],
        [-1.622414, 0.834958],
    ]
    drawn = feature_maps.draw_random_features(
        KEY, layer=4, index=2, num_features=3, head_dim=2
    ).projection
    np.testing.assert_allclose(drawn, layer_projection, atol=1e-5)


def draw_many(num, **kwargs):
    draw = functools.partial(
        feature_maps.draw_orthogonal,
        num_features=NUM_FEATURES,
        head_dim=HEAD_DIM,
        **kwargs,
    )
    return np.asarray(jax.jit(jax.vmap(draw))(jax.random.split(KEY, num)))


def standard_errors_from(samples, expected):
    samples = np.asarray(samples, np.float64)
    error = samples.std(axis=0, ddof=1) / len(samples) ** 0.5
    return (samples.mean(axis=0) - expected) / error


def test_chi_norms_make_every_row_gaussian():
    rows = draw_many(2000)
    assert np.abs(standard_errors_from(rows, 0.0)).max() < 4
    assert np.abs(standard_errors_from(rows**2, 1.0)).max() < 4
    # E w^4 = 3 for a Gaussian; for rows of fixed norm it is 15 / 7.
    assert np.abs(standard_errors_from(rows**4, 3.0)).max() < 4


def test_rows_without_sign_fix_are_not_uniform():
    uniform = draw_many(500)[:, 0, 0]
    unfixed = draw_many(500, haar=False)[:, 0, 0]
    assert abs(standard_errors_from(uniform, 0.0)) < 4
    assert abs(standard_errors_from(unfixed, 0.0)) > 20


def test_features_without_sign_fix_are_biased():
    x = jnp.zeros((1, HEAD_DIM)).at[0, 0].set(1.0)
    exact = np.exp(HEAD_DIM**-0.5)

    def estimate(projection):
        features = feature_maps.positive_features(x, projection).dense()
        return (features @ features.T)[0, 0]

    uniform = jax.vmap(estimate)(draw_many(2000))
    unfixed = jax.vmap(estimate)(draw_many(2000, haar=False))
    assert abs(standard_errors_from(uniform, exact)) < 4
    assert abs(standard_errors_from(unfixed, exact)) > 10


def test_bias_of_fixed_norms_is_as_documented():
    head_dim, x = 12, jnp.zeros((1, 12)).at[0, 0].set(1.5)

    @jax.jit
    @jax.vmap
    def estimate(key):
        projection = feature_maps.draw_orthogonal(
            key, 4 * head_dim, head_dim, norms="fixed"
        )
        features = feature_maps.positive_features(x, projection).dense()
        return (features @ features.T)[0, 0]

    exact = np.exp(1.5**2 / head_dim**0.5)
    documented = np.exp(-(3.0**4) / (4 * head_dim * (head_dim + 2)))
    samples = np.asarray(estimate(jax.random.split(KEY, 2000)))
    assert standard_errors_from(samples, exact) < -8
    assert abs(standard_errors_from(samples, documented * exact)) < 4


@pytest.mark.parametrize("sizes", [(0, 5), (7, 0)])
@pytest.mark.parametrize(
    "draw", [feature_maps.draw_orthogonal, feature_maps.draw_gaussian]
)
def test_sizes_below_one_raise(draw, sizes):
    with pytest.raises(ValueError, match="must be at least 1, got num_features="):
        draw(KEY, *sizes)


def test_unknown_norms_raise_and_name_valid_ones():
    with pytest.raises(ValueError, match="one of chi, fixed, got 'gauss'"):
        feature_maps.draw_orthogonal(KEY, 7, 5, norms="gauss")


def test_default_num_features():
    assert [feature_maps.default_num_features(d) for d in (1, 32, 48)] == [1, 110, 185]


def draw(layer, index=0, **kwargs):
    return feature_maps.draw_random_features(
        KEY, layer=layer, index=index, num_features=7, head_dim=5, **kwargs
    )


def test_redraw_depends_only_on_key_layer_and_index():
    collection = {"a": [draw(0), draw(1, norms="fixed")], "b": jnp.ones(3)}
    drawn = feature_maps.redraw(collection, KEY, 11)
    again = feature_maps.redraw(feature_maps.redraw(collection, KEY, 2), KEY, 11)
    for one, other in zip(jax.tree.leaves(drawn), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, other)
    assert jax.tree.structure(drawn) == jax.tree.structure(collection)
    np.testing.assert_array_equal(
        drawn["a"][1].projection, draw(1, 11, norms="fixed").projection
    )
    np.testing.assert_array_equal(drawn["b"], 1.0)
    projections = [draw(0), draw(1), draw(0, 1), draw(0, orthogonal=False)]
    for i, one in enumerate(projections):
        for other in projections[i + 1 :]:
            assert np.abs(one.projection - other.projection).min() > 0


@pytest.mark.quick("stack0")
@pytest.mark.parametrize("stack", [(3,), (2, 3)])
def test_a_stack_gets_what_its_layers_get_alone(stack):
    def draw(layer, index):
        return feature_maps.draw_random_features(
            KEY, layer=layer, index=index, num_features=5, head_dim=3, norms="fixed"
        )

    first = draw(4, 0)
    shape = (*stack, *first.projection.shape)
    stacked = dataclasses.replace(first, projection=jnp.zeros(shape, jnp.bfloat16))
    expected = [draw(4 + i, 7).projection for i in range(math.prod(stack))]
    expected = jnp.stack(expected).reshape(shape).astype(jnp.bfloat16)
    for redraw in (feature_maps.redraw, jax.jit(feature_maps.redraw)):
        found = redraw({"layer": stacked}, KEY, 7)["layer"]
        assert (found.layer, found.norms) == (4, "fixed")
        np.testing.assert_array_equal(found.projection, expected)


def test_redraw_in_compiled_step_keeps_shapes_and_dtypes():
    features = dataclasses.replace(
        draw(2), projection=draw(2).projection.astype(jnp.bfloat16)
    )

    @jax.jit
    def step(collection, number):
        return jax.lax.cond(
            number % 5 == 0,
            lambda c: feature_maps.redraw(c, KEY, number // 5),
            lambda c: c,
            collection,
        )

    kept, redrawn = step([features], 4)[0], step([features], 5)[0]
    assert redrawn.layer == 2 and redrawn.projection.dtype == jnp.bfloat16
    np.testing.assert_array_equal(kept.projection, features.projection)
    np.testing.assert_array_equal(
        redrawn.projection, draw(2, 1).projection.astype(jnp.bfloat16)
    )


def test_unit_norm_gives_unit_vectors_to_feature_maps():
    x = jax.random.normal(jax.random.key(0), (7, 5)) * jnp.arange(1, 8)[:, None]
    tilde = kernels.unit_norm(x) / 5**0.25
    np.testing.assert_allclose(jnp.linalg.norm(tilde, axis=-1), 1.0, rtol=1e-6)
    np.testing.assert_allclose(
        kernels.unit_norm(17 * x), kernels.unit_norm(x), rtol=1e-5
    )


def test_unit_norm_matches_reference():
    x = jax.random.normal(jax.random.key(0), (2, 7, 5))

    def naive(x):
        return 5**0.25 * x / jnp.sqrt((x**2).sum(-1, keepdims=True))

    compare.expect_equal(kernels.unit_norm, naive, [x])


@pytest.mark.quick("float32")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_unit_norm_of_short_vectors_stays_short_without_gradient(dtype):
    x = jnp.array([[0.0, 0.0, 0.0], [1e-5, 0.0, -2e-5], [3.0, 0.0, -4.0]], dtype)
    out, pullback = jax.vjp(kernels.unit_norm, x)
    assert out.dtype == dtype
    norms = jnp.linalg.norm(out.astype(jnp.float32), axis=-1) / 3**0.25
    np.testing.assert_allclose(norms, [0, 5**0.5 * 1e-2, 1], rtol=1e-2)
    (gradient,) = pullback(jnp.ones_like(out))
    np.testing.assert_array_equal(gradient[:2], 0.0)
    expected = 3**0.25 / 5 * np.array([1.12, 1.0, 0.84])
    np.testing.assert_allclose(gradient[2].astype(jnp.float32), expected, rtol=1e-2)


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
    keys = jax.random.split(KEY, 4)
    q, k = jax.random.normal(keys[0], (2, N, HEAD_DIM))
    v = jax.random.normal(keys[1], (N, VALUE_DIM))
    to_q, to_k = jax.random.normal(keys[2], (2, HEAD_DIM, HEAD_DIM)) / 2
    bias = jax.random.normal(keys[3], (15 if name == "toeplitz" else 11,))
    options = {"bias": bias} if "toeplitz" in name else {}
    feature_map = functools.partial(
        feature_maps.positive_features,
        projection=feature_maps.draw_orthogonal(KEY, NUM_FEATURES, HEAD_DIM),
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
    x = jnp.ones((N, HEAD_DIM))
    bias = jnp.zeros(15 if name == "toeplitz" else 11)
    options = {"bias": bias} if "toeplitz" in name else {}
    pair = (lambda x: x[..., :3], lambda x: x[..., :2])
    with pytest.raises(ValueError, match="queries and keys must return features of"):
        KERNELS[name](x, x, x, pair, **options)

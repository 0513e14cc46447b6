"""Tests linear attention: chunks, masks, normalisers and errors."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn.kernels import Features, draw_gaussian, draw_orthogonal
from relattn.kernels.linear import linear_attention
from relattn.kernels.platform import use_platform
from tests import reference
from tests.helpers import compare
from tests.helpers.quick import normal, quick_jit, run

# Of values of width 3, sums over keys take fewer multiplications; of 17, pairs do.
HEADS, N, M, HEAD_DIM, VALUE_DIM, WIDE = 2, 7, 11, 5, 3, 17
PROJECTION = run(lambda: draw_orthogonal(jax.random.key(1), 13, HEAD_DIM))
feature_map = functools.partial(compare.feature_map, projection=PROJECTION)
naive_map = functools.partial(compare.naive_map, projection=PROJECTION)
NAMES = ["positive", "trigonometric", "relu"]


def draw_inputs(n=N, m=M, scale=0.5, value_dim=VALUE_DIM):
    q = normal(0, HEADS, n, HEAD_DIM, scale=scale)
    k = normal(1, HEADS, m, HEAD_DIM, scale=scale)
    return q, k, normal(2, HEADS, m, value_dim)


@pytest.mark.quick("positive-3", "trigonometric-17")
@pytest.mark.parametrize("value_dim", [VALUE_DIM, WIDE])
@pytest.mark.parametrize("name", NAMES)
def test_one_chunk_equals_the_reference(name, value_dim):
    compare.expect_equal(
        lambda q, k, v: linear_attention(q, k, v, feature_map(name)),
        lambda q, k, v: reference.linear_attention(
            q, k, v, naive_map(name), np.ones((N, M), bool)
        ),
        draw_inputs(value_dim=value_dim),
    )


@pytest.mark.quick("relu")
@pytest.mark.parametrize("name", NAMES)
def test_second_derivatives_equal_the_reference(name):
    q, k, v = draw_inputs()
    # At zero, ReLU features are not differentiable.
    q[:, 1] = k[:, 2] = 0
    compare.expect_equal_second_derivatives(
        lambda q, k, v: linear_attention(q, k, v, feature_map(name), chunk_size=4),
        lambda q, k, v: reference.linear_attention(
            q, k, v, naive_map(name), np.ones((N, M), bool)
        ),
        (q, k, v),
    )


@pytest.mark.quick("3-4-True", "17-7-True")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 4, 7])
@pytest.mark.parametrize("value_dim", [VALUE_DIM, WIDE])
def test_chunks_do_not_change_the_output(value_dim, chunk_size, masked):
    key_mask = np.arange(M) % 3 != 1 if masked else None

    def attend(q, k, v, **size):
        return [
            linear_attention(q, k, v, feature_map(name), key_mask=key_mask, **size)
            for name in NAMES
        ]

    whole, parts = quick_jit(
        lambda *x: [attend(*x), attend(*x, chunk_size=chunk_size)]
    )(*draw_inputs(value_dim=value_dim))
    np.testing.assert_allclose(parts, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.quick("positive-4-3", "positive-64-17")
@pytest.mark.parametrize(
    ("chunk_size", "value_dim"), [(4, VALUE_DIM), (64, VALUE_DIM), (64, WIDE)]
)
@pytest.mark.parametrize("name", NAMES)
def test_all_keys_masked_gives_zeros_and_finite_gradients(name, chunk_size, value_dim):
    inputs = draw_inputs(value_dim=value_dim)
    key_mask = np.arange(HEADS)[:, None] == np.zeros(M)

    def attend(q, k, v):
        return linear_attention(
            q, k, v, feature_map(name), key_mask=key_mask, chunk_size=chunk_size
        )

    results = compare.value_and_gradients(attend, inputs, quick_jit)
    out, *gradients = map(np.asarray, results)
    np.testing.assert_array_equal(out[1], 0.0)
    assert np.abs(out[0]).max() > 0
    for gradient in gradients:
        assert np.isfinite(gradient).all()
        np.testing.assert_array_equal(gradient[1], 0.0)


def test_key_mask_broadcasts_against_leading_axes():
    q, k, v = (np.stack([x, x]) for x in draw_inputs())
    key_mask = np.arange(2 * M).reshape(2, 1, M) % 4 != 0
    attend = quick_jit(linear_attention, feature_map=feature_map("positive"))
    out = attend(q, k, v, key_mask=key_mask)
    for i in range(2):
        kept = np.flatnonzero(key_mask[i, 0])
        one = attend(q[i], k[i][:, kept], v[i][:, kept])
        np.testing.assert_allclose(out[i], one, rtol=1e-5, atol=1e-6)


def test_half_precision_features_are_computed_in_single_precision():
    q, k, v = (x.astype(jnp.bfloat16) for x in draw_inputs(scale=2.0))
    exists = np.arange(HEADS)[:, None] > np.zeros(M)

    def attend(dtype):
        def exponential(x):
            return Features(None, x.astype(dtype))

        return linear_attention(q, k, v, exponential, key_mask=jnp.asarray(exists))

    found, expected = run(lambda: [attend(jnp.bfloat16), attend(jnp.float32)])
    np.testing.assert_array_equal(found, expected)
    assert not found[0].any() and found[1].all()


@pytest.mark.slow
def test_gradients_flow_through_a_plain_array_of_features():
    q, k, v = draw_inputs()
    weight = draw_gaussian(jax.random.key(2), 13, HEAD_DIM)

    def attend(weight):
        return linear_attention(q, k, v, lambda x: jax.nn.softplus(x @ weight.T))

    def naive(weight):
        phi_q, phi_k = (jax.nn.softplus(x @ weight.T) for x in (q, k))
        weights = phi_q @ phi_k.swapaxes(-2, -1)
        return weights @ v / weights.sum(-1, keepdims=True)

    (out, gradient), (expected, expected_gradient) = (
        compare.value_and_gradients(f, [weight], quick_jit) for f in (attend, naive)
    )
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.quick("4-3", "64-17")
@pytest.mark.parametrize(
    ("chunk_size", "value_dim"), [(4, VALUE_DIM), (64, VALUE_DIM), (64, WIDE)]
)
def test_positive_normalizers_are_at_least_one(chunk_size, value_dim):
    attend = quick_jit(
        linear_attention,
        feature_map=feature_map("positive"),
        chunk_size=chunk_size,
        return_normalizer=True,
    )
    # Heads have queries and keys of their own or share them.
    for scale, heads in itertools.product((0.5, 5.0), (HEADS, 1)):
        q, k, v = draw_inputs(scale=scale, value_dim=value_dim)
        out, normalizer = jax.device_get(attend(q[:heads], k[:heads], v))
        assert normalizer.shape == (HEADS, N) and normalizer.min() >= 1
        assert np.abs(out).max() <= np.abs(v).max() * (1 + 1e-5)


@pytest.mark.quick("4-3")
@pytest.mark.parametrize(
    ("chunk_size", "value_dim"), [(4, VALUE_DIM), (64, VALUE_DIM), (64, WIDE)]
)
def test_negative_trigonometric_normalizers_are_returned(chunk_size, value_dim):
    q, k, v = draw_inputs(scale=3.0, value_dim=value_dim)
    features = feature_map("trigonometric")

    def attend(q, k, v):
        weights = features(q).dense() @ features(k).dense().swapaxes(-2, -1)
        options = {"chunk_size": chunk_size, "return_normalizer": True}
        return *linear_attention(q, k, v, features, **options), weights

    out, normalizer, weights = run(attend, q, k, v)
    np.testing.assert_array_equal(normalizer < 0, weights.sum(-1) < 0)
    assert 0 < (normalizer < 0).sum() < normalizer.size
    expected = weights @ v / weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(out, expected, rtol=1e-3)


# One feature is summed over keys; with five and three values, pairs take less.
@pytest.mark.quick("1-1--1.0", "5-3--1.0")
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(("num_features", "value_dim"), [(1, 1), (5, 3)])
def test_small_normalizer_is_clamped_with_its_sign(num_features, value_dim, sign):
    attend = functools.partial(
        linear_attention,
        feature_map=lambda x: jnp.tile(x, num_features),
        return_normalizer=True,
    )
    v = np.repeat([[2.0], [0.0]], value_dim, axis=1)
    inputs = [[1.0]], [[1.0], [-1.0 + sign * 1e-6]], v
    out, normalizer = run(attend, *map(np.float32, inputs))
    assert np.sign(normalizer) == sign and abs(normalizer) < 2e-6 * num_features
    np.testing.assert_allclose(out, np.full((1, value_dim), sign * 1e4), rtol=1e-5)


@pytest.mark.parametrize("chunk_size", [1, 2])
def test_keys_that_cancel_across_chunks_are_clamped(chunk_size):
    # Opposite weights that cancel to a share below 1e-4; exponents are far apart.
    k = [[np.exp(5.0), 0.0], [-1.0 + 4e-5, 5.0]]
    attend = functools.partial(
        linear_attention,
        feature_map=lambda x: Features(x[..., :1], x[..., 1:]),
        chunk_size=chunk_size,
    )
    out = run(attend, *map(np.float32, ([[1.0, 0.0]], k, [[3.0], [1.0]])))
    # Absolute weights sum to 2, weighted values to 3 - 1.
    np.testing.assert_allclose(out, [[(3 - 1) / (1e-4 * 2)]], rtol=1e-3)


def test_chunk_size_must_be_positive():
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        linear_attention(*draw_inputs(), feature_map("relu"), chunk_size=0)


@pytest.mark.parametrize("masked", [False, True])
def test_memory_is_linear_in_the_length(masked):
    def temporary_bytes(length):
        x = jax.ShapeDtypeStruct((HEADS, length, HEAD_DIM), jnp.float32)
        exists = jax.ShapeDtypeStruct((length,), bool) if masked else None

        def loss(q, k, v, exists):
            out = linear_attention(
                q, k, v, feature_map("positive"), key_mask=exists, chunk_size=64
            )
            return out.sum()

        gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
        compiled = gradient.lower(x, x, x, exists).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = temporary_bytes(512), temporary_bytes(2048)
    assert long < 4.5 * short
    # Less than the features of all tokens.
    assert long < HEADS * 2048 * len(PROJECTION) * 4 * 2


@pytest.mark.parametrize(("n", "m", "pairs"), [(14, 14, 1), (15, 15, 0), (7, 97, 1)])
def test_pairs_are_summed_where_they_take_fewer_multiplications(n, m, pairs):
    # The harmonic mean of 13 features and 17 values is 14.7.
    q, k, v = (
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in ((n, HEAD_DIM), (m, HEAD_DIM), (m, WIDE))
    )
    attend = functools.partial(linear_attention, feature_map=feature_map("positive"))
    program = str(jax.make_jaxpr(attend)(q, k, v))
    assert (f"f32[{n},{m}] = dot_general" in program) == pairs
    assert ("f32[13,17] = dot_general" in program) == (not pairs)


def test_the_platform_chooses_the_chunks():
    def num_scans(platform, chunk_size=None):
        x = jax.ShapeDtypeStruct((1031, HEAD_DIM), jnp.float32)

        def attend(q, k, v):
            return linear_attention(q, k, v, feature_map("relu"), chunk_size=chunk_size)

        with use_platform(platform):
            return str(jax.make_jaxpr(attend)(x, x, x)).count("scan[")

    assert num_scans("cpu") == 2
    assert num_scans("gpu") == 0
    assert num_scans("gpu", chunk_size=67) == 2

"""Tests exponentials, softmax and backward passes that stay finite."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import kernels
from relattn.kernels.guards import scale_backward, shifted_exp, softmax
from tests import reference
from tests.helpers import compare
from tests.helpers.export import export
from tests.helpers.quick import normal, quick_jit, run


def test_shifted_exp_is_at_most_one_and_has_its_own_gradient():
    def value_and_gradient(exponents, cotangent):
        out, pullback = jax.vjp(lambda x: shifted_exp(x, jnp.zeros(())), exponents)
        return out, *pullback(cotangent)

    exponents = np.float32([1e5, 0.0, -1.0, -200.0, -np.inf])
    cotangent = np.float32([1.0, 1.0, 1.0, np.inf, np.nan])
    out, gradient = run(value_and_gradient, exponents, cotangent)
    np.testing.assert_allclose(out, [1, 1, np.exp(-1), 0, 0], rtol=1e-6)
    np.testing.assert_allclose(gradient, [1, 1, np.exp(-1), 0, 0], rtol=1e-6)


def test_softmax_equals_that_of_jax_in_all_derivatives():
    scores, weights = normal(0, 3, 7), np.cos(np.arange(7, dtype=np.float32))

    def results(function):
        def weighted(scores):
            return (function(scores) * weights).sum()

        first = jax.grad(weighted)
        second = jax.jacfwd(first), jax.jacrev(first)
        return [function(scores), first(scores), *(f(scores) for f in second)]

    ours, theirs = jax.jit(lambda: (results(softmax), results(jax.nn.softmax)))()
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)


def test_large_scores_give_the_best_key():
    """XLA rounds a score differently in the maximum and in the exponential."""
    rng = np.random.default_rng(0)
    q, k = (1e6 * rng.standard_normal((97, 5)).astype(np.float32) for _ in "qk")
    v = rng.standard_normal((97, 3)).astype(np.float32)
    out = jax.jit(kernels.softmax_attention)(q, k, v)
    scores = np.float64(q) @ np.float64(k).T
    # Weights of all other keys are exp(-1e6) or less.
    clear = np.diff(np.sort(scores, axis=1)[:, -2:], axis=1)[:, 0] > 1e6 * 5**0.5
    assert clear.sum() > 90
    np.testing.assert_array_equal(out[clear], v[scores.argmax(axis=1)][clear])


def long_key(kernel, **options):
    """Returns values and gradients at a key that barely has weight."""

    def feature_map(x):
        return kernels.positive_features(x, jnp.zeros((1, 1)))

    def attend(q, k, v):
        return kernel(q, k, v, feature_map, **options)

    q, k, v = map(np.float32, ([[0.0]], [[12.82]], [[1000.0]]))

    @quick_jit
    def value_and_gradients(*inputs):
        out, pullback = jax.vjp(attend, *inputs)
        return out, *pullback(jnp.ones_like(out))

    return value_and_gradients(q, k, v)


@pytest.mark.quick("False")
@pytest.mark.parametrize("causal_toeplitz", [False, True])
def test_a_key_that_barely_has_weight_has_the_right_gradient(causal_toeplitz):
    if causal_toeplitz:
        kernel = kernels.causal_toeplitz_linear_attention
        results = long_key(kernel, bias=np.zeros(1, np.float32))
    else:
        results = long_key(kernels.causal_linear_attention)
    # The only key has weight one: out = v.
    for found, expected in zip(results, [1000.0, 0.0, 0.0, 1.0], strict=True):
        np.testing.assert_allclose(found, [[expected]], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.0, 1e6])
@pytest.mark.parametrize("norm", [31, 34, 60])
def test_long_tokens_have_the_gradients_of_float64_or_zeros(norm, factor):
    head_dim, n, draws = 32, 4, 20
    num_features = kernels.default_num_features(head_dim)

    def attend(q, k, v, w):
        feature_map = functools.partial(kernels.positive_features, projection=w)
        return kernels.causal_linear_attention(q, k, v, feature_map)

    def naive(q, k, v, w):
        naive_map = functools.partial(reference.positive_features, projection=w)
        allowed = np.tril(np.ones((n, n), bool))
        return reference.linear_attention(q, k, v, naive_map, allowed)

    def draw(seed):
        keys = jax.random.split(jax.random.key(seed), 4)
        q, k, v = (jax.random.normal(key, (n, head_dim)) for key in keys[:3])
        q, k = (norm * x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        return q, k, 100 * v, kernels.draw_orthogonal(keys[3], num_features, head_dim)

    inputs = jax.vmap(draw)(jnp.arange(draws))

    def value_and_gradients(function, *inputs):
        *tokens, w = inputs
        out, pullback = jax.vjp(lambda *x: function(*x, w), *tokens)
        cotangent = factor * jnp.cos(jnp.arange(out.size)).reshape(out.shape)
        return out, *pullback(cotangent.astype(out.dtype))

    results = quick_jit(jax.vmap(functools.partial(value_and_gradients, attend)))(
        *inputs
    )
    for x in results:
        assert np.isfinite(x).all()
    if norm > 31:
        return
    with jax.enable_x64(True):
        wide = [jnp.float64(np.asarray(x)) for x in inputs]
        expected = quick_jit(jax.vmap(functools.partial(value_and_gradients, naive)))(
            *wide
        )
    # Draws in which no weight underflows.
    close = np.isclose(results[0], expected[0], rtol=1e-3, atol=0.1).all(axis=(1, 2))
    assert close.sum() > 10
    for ours, theirs in zip(results, expected, strict=True):
        ours, theirs = np.float64(ours)[close], np.asarray(theirs)[close]
        scale = np.abs(theirs).max(axis=(1, 2), keepdims=True)
        assert (np.abs(ours - theirs) < 2e-2 * scale).all()


def long_tokens(norm, seed=0, batch=20, n=4, head_dim=32):
    """Draws queries and keys of one norm, values and a projection."""
    q, k, v = normal(seed, 3, batch, n, head_dim)
    q, k = (norm * x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    num_features = kernels.default_num_features(head_dim)
    return q, k, v, normal(seed + 1, num_features, head_dim)


def test_gradients_of_small_values_are_finite():
    """Cotangents scaled up for small values would overflow in the quotient."""
    q, k, v, w = long_tokens(34)
    feature_map = functools.partial(kernels.positive_features, projection=w)

    @jax.jit
    def gradients(q, k, v):
        attend = functools.partial(
            kernels.causal_linear_attention, feature_map=feature_map
        )
        out, pullback = jax.vjp(attend, q, k, v)
        return pullback(jnp.ones_like(out))

    for factor in (1e-6, 1e-10, 1e-30):
        for gradient in gradients(q, k, np.float32(factor) * v):
            assert np.isfinite(gradient).all()


def test_gradients_through_a_state_equal_those_of_one_call():
    """A state's gradient is divided by denominators of 1e-30, its own scale."""
    q, k, v, w = long_tokens(28)
    feature_map = functools.partial(kernels.positive_features, projection=w)
    attend = functools.partial(kernels.causal_linear_attention, feature_map=feature_map)

    def attend_in_two(q, k, v):
        first, last = ([x[:, part] for x in (q, k, v)] for part in np.s_[:2, 2:])
        out_1, state = attend(*first, return_state=True)
        return jnp.concatenate([out_1, attend(*last, state=state)], axis=1)

    def gradients(function, scale):
        out, pullback = jax.vjp(function, q, k, scale * v)
        weights = jnp.cos(jnp.arange(out.size)).reshape(out.shape)
        return pullback(weights)

    for scale in (1e-3, 1e2):
        results = jax.jit(
            lambda scale: [gradients(f, scale) for f in (attend_in_two, attend)]
        )(scale)
        for two, one, size in zip(*results, (scale, scale, 1.0), strict=True):
            np.testing.assert_allclose(two, one, atol=1e-4 * size)


@pytest.mark.parametrize("name", ["hedgehog", "positive"])
def test_second_derivatives_are_right_for_any_size_of_the_denominators(name):
    """Their squares are beyond float32: they are about 1e26 and 1e-25 here."""
    q, k, v, w = long_tokens(1 if name == "hedgehog" else 25, batch=2, n=3)
    feature_map = compare.feature_map(name, w[:16])

    def hessian_product(q, k, v):
        def weighted(inputs):
            out = kernels.causal_linear_attention(*inputs, feature_map)
            return jnp.vdot(jnp.cos(jnp.arange(out.size)).reshape(out.shape), out)

        return jax.vjp(jax.grad(weighted), (q, k, v))[1]((q, k, v))[0]

    results = run(hessian_product, q, k, v)
    with jax.enable_x64(True):
        expected = run(hessian_product, *(np.float64(x) for x in (q, k, v)))
    for ours, theirs in zip(results, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-3 * abs(theirs).max())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_scaling_the_backward_pass_changes_no_gradient(dtype):
    weights = jax.random.normal(jax.random.key(0), (5, 7))
    v, x = jax.random.normal(jax.random.key(1), (2, 7, 3)).astype(dtype)
    exists = jnp.arange(5) != 2

    def results(call):
        def function(weights, v, x, large):
            def average(v, x, exists):
                return (weights @ (v * x)) * exists[:, None]

            return (large * call(average, v, x, exists)).sum()

        return jax.grad(function, (0, 1, 2))(weights, v, x, 1e3)

    plain = results(lambda function, *arguments: function(*arguments))
    for ours, theirs in zip(results(scale_backward), plain, strict=True):
        assert ours.dtype == theirs.dtype
        tolerance = 2 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(
            np.float64(ours), np.float64(theirs), rtol=tolerance, atol=tolerance * 1e3
        )


def test_scaling_of_cotangents_keeps_no_tracers():
    w, x = normal(1, 4, 2), normal(0, 3, 2)

    def loss(w, x):
        return scale_backward(lambda v, x: w[0] * v * x, x, x).sum()

    with jax.checking_leaks():
        jax.jit(loss).trace(w, x)
        jax.jit(jax.grad(loss)).trace(w, x)


def test_feature_maps_in_a_scan_may_close_over_integers_and_keys():
    x, w = normal(0, 3, 2), normal(1, 4, 2)
    rows, keys = np.array([[0, 2], [3, 1]]), jax.random.split(jax.random.key(0))

    def loss(w, rows, key):
        def feature_map(x):
            chosen = w[rows] * jax.random.bernoulli(key, 0.5, (2, 1))
            return kernels.positive_features(x, chosen)

        return kernels.causal_linear_attention(x, x, x, feature_map).sum()

    def scanned(w):
        def step(total, inputs):
            return total + loss(w, *inputs), None

        return jax.lax.scan(step, 0.0, (rows, keys))[0]

    def looped(w):
        return loss(w, rows[0], keys[0]) + loss(w, rows[1], keys[1])

    found, expected = run(lambda w: [jax.grad(f)(w) for f in (scanned, looped)], w)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_nan_cotangent_reaches_its_own_row_only():
    q, k, v = (np.full((3, 2), i, np.float32) for i in (0.1, 0.2, 0.3))
    feature_map = compare.feature_map("relu", np.eye(2, dtype=np.float32))

    def attend(q):
        return kernels.causal_linear_attention(q, k, v, feature_map)

    cotangent = np.array([1.0, 1.0, np.nan], np.float32)[:, None]

    @quick_jit
    def gradient_of(q):
        out, pullback = jax.vjp(attend, q)
        return pullback(cotangent + jnp.zeros_like(out))[0]

    gradient = np.asarray(gradient_of(q))
    assert np.isfinite(gradient[:2]).all() and np.isnan(gradient[2]).all()


def test_gradients_with_a_symbolic_length_equal_naive_ones():
    def gradients(x, v):
        def attend(x, v):
            return kernels.causal_linear_attention(x, x, v, jnp.exp, chunk_size=4)

        out, pullback = jax.vjp(attend, x, v)
        return pullback(jnp.cos(out))

    def naive(x, v):
        def attend(x, v):
            weights = jnp.tril(jnp.exp(x) @ jnp.exp(x).mT)
            return weights @ v / weights.sum(axis=-1, keepdims=True)

        out, pullback = jax.vjp(attend, x, v)
        return pullback(jnp.cos(out))

    b, n = jax.export.symbolic_shape("b, n")
    tokens = jax.ShapeDtypeStruct((b, n, 3), jnp.float32)
    exported = export(gradients, tokens, tokens)
    x, v = normal(0, 2, 2, 7, 3)
    results = zip(exported.call(x, v), quick_jit(naive)(x, v), strict=True)
    for ours, theirs in results:
        np.testing.assert_allclose(ours, theirs, atol=1e-5)

"""Tests causal linear attention: chunks, masks, states and errors."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn.kernels import Features, draw_orthogonal
from relattn.kernels import feature_maps as maps
from relattn.kernels.linear import causal_linear_attention, underflowed
from relattn.kernels.platform import use_platform
from tests import reference
from tests.helpers import compare
from tests.helpers.quick import normal, quick_jit, run

HEADS, N, HEAD_DIM, VALUE_DIM = 2, 11, 5, 3
PROJECTION = run(lambda: draw_orthogonal(jax.random.key(1), 13, HEAD_DIM))
feature_map = functools.partial(compare.feature_map, projection=PROJECTION)
naive_map = functools.partial(compare.naive_map, projection=PROJECTION)
NAMES = ["positive", "trigonometric", "relu"]


def draw_inputs(scale=0.5):
    q, k = normal(0, 2, HEADS, N, HEAD_DIM, scale=scale)
    return q, k, normal(1, HEADS, N, VALUE_DIM)


@pytest.mark.quick("positive")
@pytest.mark.parametrize("name", NAMES)
def test_one_chunk_equals_the_reference(name):
    compare.expect_equal(
        lambda q, k, v: causal_linear_attention(q, k, v, feature_map(name)),
        lambda q, k, v: reference.linear_attention(
            q, k, v, naive_map(name), np.tril(np.ones((N, N), bool))
        ),
        draw_inputs(),
    )


def test_float64_takes_a_float32_projection_under_strict_promotion():
    attend = functools.partial(
        causal_linear_attention, feature_map=feature_map("positive")
    )
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        out = jax.eval_shape(attend, *(np.float64(x) for x in draw_inputs()))
    assert out.dtype == np.float64


def test_gradients_have_derivatives_in_forward_mode():
    q, k, v = (x[0, :5] for x in draw_inputs())

    def loss(q):
        phi = feature_map("positive")
        return jnp.sin(causal_linear_attention(q, k, v, phi, chunk_size=2)).sum()

    hessians = (jax.hessian(loss), jax.jacrev(jax.grad(loss)))
    found, expected = run(lambda q: [hessian(q) for hessian in hessians], q)
    np.testing.assert_allclose(found, expected, atol=1e-5 * abs(expected).max())
    with pytest.raises(TypeError, match="forward-mode .* to a custom_vjp function"):
        jax.jvp(loss, (q,), (q,))


@pytest.mark.quick("positive")
@pytest.mark.parametrize("name", NAMES)
def test_second_derivatives_equal_the_reference(name):
    q, k, v = draw_inputs()
    # At zero, ReLU features are not differentiable.
    q[:, 1] = k[:, 2] = 0
    compare.expect_equal_second_derivatives(
        lambda q, k, v: causal_linear_attention(
            q, k, v, feature_map(name), chunk_size=4
        ),
        lambda q, k, v: reference.linear_attention(
            q, k, v, naive_map(name), np.tril(np.ones((N, N), bool))
        ),
        (q, k, v),
    )


@pytest.mark.quick("1-False")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 4, 7])
def test_chunks_do_not_change_the_output(chunk_size, masked):
    key_mask = np.arange(N) % 3 != 1 if masked else None

    def attend(q, k, v, size):
        return [
            causal_linear_attention(
                q, k, v, feature_map(name), key_mask=key_mask, chunk_size=size
            )
            for name in NAMES
        ]

    whole, parts = quick_jit(lambda *x: [attend(*x, N), attend(*x, chunk_size)])(
        *draw_inputs()
    )
    np.testing.assert_allclose(parts, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.quick("positive-4")
@pytest.mark.parametrize("chunk_size", [4, 64])
@pytest.mark.parametrize("name", NAMES)
def test_rows_without_keys_give_zeros_and_finite_gradients(name, chunk_size):
    inputs = draw_inputs()
    key_mask = np.arange(N) >= 5

    def attend(q, k, v):
        return causal_linear_attention(
            q, k, v, feature_map(name), key_mask=key_mask, chunk_size=chunk_size
        )

    results = compare.value_and_gradients(attend, inputs, quick_jit)
    out, *gradients = map(np.asarray, results)
    np.testing.assert_array_equal(out[:, :5], 0.0)
    np.testing.assert_allclose(out[:, 5], np.asarray(inputs[2])[:, 5], rtol=1e-5)
    for gradient in gradients:
        assert np.isfinite(gradient).all()


@pytest.mark.quick("positive-True")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_continuing_from_a_state_equals_one_call(name, masked):
    inputs = draw_inputs(scale=2.0)
    key_mask = np.arange(N) % 3 != 1 if masked else None

    def attend(starts, chunk_size, q, k, v):
        outs, state = [], None
        for start, stop in zip(starts, [*starts[1:], N], strict=True):
            out, state = causal_linear_attention(
                *(x[:, start:stop] for x in (q, k, v)),
                feature_map(name),
                key_mask=None if key_mask is None else key_mask[start:stop],
                state=state,
                return_state=True,
                chunk_size=chunk_size,
            )
            outs.append(out)
        return jnp.concatenate(outs, axis=1), state

    @quick_jit
    def value_and_gradients(inputs):
        results = []
        # In one call, in two calls with padded chunks, and with two decoding steps.
        for starts, chunk_size in (([0], N), ([0, 6], 4), ([0, N - 2, N - 1], 64)):
            attend_parts = functools.partial(attend, starts, chunk_size)
            out, pullback = jax.vjp(lambda *x, f=attend_parts: f(*x)[0], *inputs)
            cotangent = jnp.cos(jnp.arange(out.size)).reshape(out.shape)
            results.append((out, pullback(cotangent), attend_parts(*inputs)[1]))
        return results

    (whole, gradients, state), *others = value_and_gradients(inputs)
    phi = feature_map(name)
    once = quick_jit(causal_linear_attention, feature_map=phi, chunk_size=N)
    expected = once(*inputs, key_mask=key_mask)
    np.testing.assert_allclose(whole, expected, rtol=1e-5, atol=1e-5)
    for out, other_gradients, other_state in others:
        np.testing.assert_allclose(out, whole, rtol=2e-4, atol=2e-5)
        for found, wanted in zip(other_gradients, gradients, strict=True):
            scale = np.abs(wanted).max()
            np.testing.assert_allclose(found, wanted, rtol=0, atol=5e-5 * scale)
        chex.assert_trees_all_close(other_state, state, rtol=2e-4, atol=2e-5)


@pytest.mark.quick("relu")
@pytest.mark.parametrize("name", NAMES)
def test_shared_keys_have_one_state(name):
    q, (k, v) = normal(0, 2, 3, N, HEAD_DIM), normal(1, 2, 2, 1, N, HEAD_DIM)
    options = {
        "key_mask": np.arange(2 * N).reshape(2, 1, N) % 5 != 2,
        "segment_ids": np.arange(2 * N).reshape(2, 1, N) // 6,
    }

    @quick_jit
    def results(q, k, v, options):
        def attend(q, k, v):
            attend = functools.partial(causal_linear_attention, chunk_size=4)
            options_of_state = {"key_mask": options["key_mask"], "return_state": True}
            outs = [
                attend(q, k, v, feature_map(name), **options),
                *attend(q, k, v, feature_map(name), **options_of_state),
            ]
            # A decoding step.
            last = (x[..., -1:, :] for x in (q, k, v))
            outs.append(attend(*last, feature_map(name), state=outs[2]))
            return outs

        def repeated(q, k, v):
            return attend(q, *(jnp.broadcast_to(x, q.shape) for x in (k, v)))

        found = []
        for function in (attend, repeated):
            outs, pullback = jax.vjp(function, q, k, v)
            found.append((outs, pullback(jax.tree.map(jnp.cos, outs))))
        return found

    (outs, gradients), (expected, wanted) = results(q, k, v, options)
    for i in (0, 1, 3):
        np.testing.assert_allclose(outs[i], expected[i], rtol=2e-4, atol=2e-5)
    for ours, theirs in zip(
        jax.tree.leaves(outs[2]), jax.tree.leaves(expected[2]), strict=True
    ):
        assert ours.shape == (*theirs.shape[:1], 1, *theirs.shape[2:])
        theirs = np.asarray(theirs)[:, :1]
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)
    # The cotangents of a state that is repeated count once for each copy.
    np.testing.assert_allclose(gradients[0], wanted[0], rtol=2e-3, atol=2e-4)


def test_keys_that_cancel_across_chunks_are_clamped():
    def feature_map(x):
        return Features(x[..., :1], x[..., 1:])

    q = np.array([[1.0, 0.0], [1.0, 0.0]], np.float32)
    # Opposite weights that cancel to a share below 1e-4; exponents are far apart.
    k = np.array([[np.exp(5.0), 0.0], [-1.0 + 4e-5, 5.0]], np.float32)
    v = np.array([[3.0], [1.0]], np.float32)
    # Absolute weights sum to 2, weighted values to 3 - 1.
    expected = [[3.0], [(3 - 1) / (1e-4 * 2)]]
    attend = functools.partial(causal_linear_attention, feature_map=feature_map)
    for size in (1, 2):
        out = quick_jit(attend, chunk_size=size)(q, k, v)
        np.testing.assert_allclose(out, expected, rtol=1e-3)
    _, state = quick_jit(attend, return_state=True)(q[:1], k[:1], v[:1])
    out = quick_jit(attend)(q[1:], k[1:], v[1:], state=state)
    np.testing.assert_allclose(out, expected[1:], rtol=1e-3)


@pytest.mark.slow
@pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="needs a CPU, where subnormal numbers are 0"
)
@pytest.mark.parametrize(
    ("head_dim", "zero", "underflow"), [(32, 36, 38), (64, 43, 46), (128, 51, 56)]
)
def test_long_keys_underflow_at_the_documented_norms(head_dim, zero, underflow):
    num_features = maps.default_num_features(head_dim)
    projection = draw_orthogonal(jax.random.key(0), num_features, head_dim)
    phi = compare.feature_map("positive", projection)
    directions = jax.random.normal(jax.random.key(1), (50, head_dim))
    directions /= jnp.linalg.norm(directions, axis=-1, keepdims=True)
    q = jax.random.normal(jax.random.key(2), (50, 1, head_dim))

    @quick_jit
    def share_of_zeros(norm):
        k = norm * directions[:, None]
        return (causal_linear_attention(q, k, jnp.ones_like(k), phi) == 0).mean()

    assert share_of_zeros(zero - 5) < 0.1 and share_of_zeros(zero + 5) > 0.9
    below, above = (phi((underflow + d) * directions) for d in (-5, 5))
    assert underflowed(below).mean() < 0.1 and underflowed(above).mean() > 0.9


def test_features_that_depend_on_later_tokens_raise():
    def unbounded(x):
        return Features(None, x.astype(jnp.float32))

    with pytest.raises(ValueError, match="with a bound, or with values and one"):
        causal_linear_attention(*draw_inputs(), unbounded)


@pytest.mark.slow
@pytest.mark.parametrize("values", [None, jnp.ones((HEADS, 1, 13))])
def test_decoding_with_features_that_depend_on_later_tokens_raises(values):
    q, k, v = (x[:, :1] for x in draw_inputs())
    bounded = feature_map("positive")
    _, state = causal_linear_attention(q, k, v, bounded, return_state=True)

    def unbounded(x):
        return Features(values, x @ PROJECTION.T)

    with pytest.raises(ValueError, match="needs Features with a bound, or with values"):
        causal_linear_attention(q, k, v, unbounded, state=state)


def test_underflowed_without_a_bound_raises():
    with pytest.raises(ValueError, match="only features with a bound underflow"):
        underflowed(Features(None, jnp.zeros((N, 13))))


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [4, 64])
def test_state_of_other_shapes_raises(chunk_size):
    inputs = draw_inputs()
    _, state = causal_linear_attention(*inputs, feature_map("relu"), return_state=True)
    attend = functools.partial(
        causal_linear_attention, state=state, chunk_size=chunk_size
    )
    message = r"state has sums of shape \(2, 13, 4\), but these .* need \({}\)"
    with pytest.raises(ValueError, match=message.format("3, 2, 13, 4")):
        attend(*(jnp.stack([x] * 3) for x in inputs), feature_map("relu"))
    with pytest.raises(ValueError, match=message.format("2, 26, 4")):
        attend(*inputs, feature_map("trigonometric"))
    with pytest.raises(ValueError, match="the state is a dict, expected LinearState"):
        attend(*inputs, feature_map("relu"), state=state._asdict())


def test_chunk_size_must_be_positive():
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got -3"):
        causal_linear_attention(*draw_inputs(), feature_map("relu"), chunk_size=-3)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [193, 211])
def test_deep_heads_neither_overflow_nor_underflow(head_dim):
    num_features = maps.default_num_features(head_dim)
    projection = draw_orthogonal(jax.random.key(1), num_features, head_dim)
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (N, head_dim)) for key in keys)
    attend = functools.partial(
        causal_linear_attention,
        feature_map=compare.feature_map("positive", projection),
    )
    out = quick_jit(attend)(q, k, v)
    naive = functools.partial(
        reference.linear_attention,
        feature_map=compare.naive_map("positive", projection),
        allowed=np.tril(np.ones((N, N), bool)),
    )
    with jax.enable_x64(True):
        wide = (jnp.float64(np.asarray(x)) for x in (q, k, v))
        expected = quick_jit(naive)(*wide)
    np.testing.assert_allclose(out, expected, rtol=0, atol=5e-5)
    gradient = quick_jit(jax.grad(lambda k: jnp.square(attend(q, k, v)).sum()))(k)
    assert np.isfinite(gradient).all() and np.abs(gradient).max() > 0


@pytest.mark.parametrize(("n", "chunks"), [(18, 1), (19, 5), (37, 8)])
def test_chunks_begin_where_they_take_fewer_multiplications(n, chunks):
    # The harmonic mean of 13 features and 17 values is 14.7.
    q, v = (jax.ShapeDtypeStruct((n, width), jnp.float32) for width in (HEAD_DIM, 17))

    def num_chunks(**options):
        attend = functools.partial(
            causal_linear_attention, feature_map=feature_map("positive"), **options
        )
        with use_platform("cpu", causal_chunk=4):
            program = str(jax.make_jaxpr(attend)(q, q, v))
        # Weights of pairs: [n, n], or [chunks, size, size].
        size = r"f32\[(?:(\d+),)?(\d+),\2\] = dot_general"
        return int(re.search(size, program)[1] or 1)

    assert num_chunks() == chunks
    # The state after the tokens needs S in any case.
    assert num_chunks(return_state=True) == num_chunks(chunk_size=4) >= 5


@pytest.mark.parametrize("masked", [False, True])
def test_memory_is_linear_in_the_length(masked):
    def temporary_bytes(length):
        x = jax.ShapeDtypeStruct((HEADS, length, HEAD_DIM), jnp.float32)
        exists = jax.ShapeDtypeStruct((length,), bool) if masked else None

        def loss(q, k, v, exists):
            features = feature_map("positive")
            return causal_linear_attention(q, k, v, features, key_mask=exists).sum()

        gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
        compiled = gradient.lower(x, x, x, exists).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(2048) < 4.5 * temporary_bytes(512)


SEGMENTS = np.repeat([4, 1, 7, 0], [2, 5, 1, 3])


@pytest.mark.quick("trigonometric-3")
@pytest.mark.parametrize("chunk_size", [3, N])
@pytest.mark.parametrize("name", NAMES)
def test_segments_equal_the_reference(name, chunk_size):
    exists = np.arange(N) % 5 != 2
    allowed = np.tril(SEGMENTS[:, None] == SEGMENTS) & exists
    compare.expect_equal(
        lambda q, k, v: causal_linear_attention(
            q,
            k,
            v,
            feature_map(name),
            key_mask=jnp.asarray(exists),
            segment_ids=jnp.asarray(SEGMENTS),
            chunk_size=chunk_size,
        ),
        lambda q, k, v: reference.linear_attention(q, k, v, naive_map(name), allowed),
        draw_inputs(),
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_segment_continues_from_a_state(name):
    q, k, v = draw_inputs()
    # The first segments have by far the largest features.
    k[:, SEGMENTS != 0] *= 9

    @quick_jit
    def attend(q, k, v):
        def call(start, stop, ids=None, state=None):
            return causal_linear_attention(
                *(x[:, start:stop] for x in (q, k, v)),
                feature_map(name),
                segment_ids=ids,
                state=state,
                return_state=True,
                chunk_size=4,
            )

        _, state = call(0, N - 1, jnp.asarray(SEGMENTS[:-1]))
        last, _ = call(N - 1, N, state=state)
        alone, _ = call(N - 3, N)
        return last, alone[:, 2:]

    last, expected = attend(q, k, v)
    np.testing.assert_allclose(last, expected, rtol=1e-5, atol=1e-6)

"""Tests softmax attention against the naive reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import kernels
from relattn.kernels import softmax
from relattn.kernels.platform import use_platform
from tests import reference
from tests.helpers import compare
from tests.helpers.quick import normal, quick_jit, run

HEADS, N, M, HEAD_DIM, VALUE_DIM = 2, 5, 7, 3, 4


def draw_inputs(m=M):
    q, k = normal(0, HEADS, N, HEAD_DIM), normal(1, HEADS, m, HEAD_DIM)
    return q, k, normal(2, HEADS, m, VALUE_DIM), normal(3, HEADS, N, m)


@pytest.mark.quick("dense")
@pytest.mark.usefixtures("form")
def test_bias_and_both_masks_match_reference():
    mask = np.arange(N * M).reshape(N, M) % 3 != 0
    key_mask = np.arange(M) != 2
    compare.expect_equal(
        lambda q, k, v, bias: softmax.softmax_attention(
            q, k, v, bias=bias, mask=jnp.asarray(mask), key_mask=jnp.asarray(key_mask)
        ),
        lambda q, k, v, bias: reference.softmax_attention(
            q, k, v, mask & key_mask, bias
        ),
        draw_inputs(),
    )


@pytest.mark.usefixtures("form")
def test_causal_matches_reference():
    key_mask = np.arange(N) != 1
    # An id that comes back starts a new segment.
    ids, runs = jnp.array([3, 3, 8, 8, 3]), np.array([0, 0, 1, 1, 2])
    allowed = np.tri(N, dtype=bool) & key_mask & (runs[:, None] == runs)
    compare.expect_equal(
        lambda q, k, v, bias: softmax.causal_softmax_attention(
            q, k, v, bias=bias, key_mask=jnp.asarray(key_mask), segment_ids=ids
        ),
        lambda q, k, v, bias: reference.softmax_attention(q, k, v, allowed, bias),
        draw_inputs(m=N),
    )


# All scores at once, a block for every query, and blocks of 4 queries.
WINDOW_FORMS = [2**22, 29, 2**12]


def attend_to_window(block_scores, q, k, v, **options):
    with use_platform("cpu", block_scores=block_scores):
        return softmax.causal_softmax_attention(q, k, v, window=5, **options)


@pytest.mark.quick("4096")
@pytest.mark.parametrize("block_scores", WINDOW_FORMS)
def test_window_matches_reference(block_scores):
    n, rng = 13, np.random.default_rng(5)
    key_mask, segments = rng.random(n) > 0.2, np.arange(n) // 8
    offsets = np.arange(n)[:, None] - np.arange(n)
    allowed = (offsets >= 0) & (offsets < 5) & key_mask
    allowed &= segments[:, None] == segments
    q, k = normal(0, HEADS, n, HEAD_DIM), normal(1, HEADS, n, HEAD_DIM)
    v, bias = normal(2, HEADS, n, VALUE_DIM), normal(3, HEADS, n, n)
    masks = {"key_mask": jnp.asarray(key_mask), "segment_ids": jnp.asarray(segments)}

    def kernel(q, k, v, bias=None):
        return attend_to_window(block_scores, q, k, v, bias=bias, **masks)

    def naive(q, k, v, bias=0.0):
        return reference.softmax_attention(q, k, v, allowed, bias)

    compare.expect_equal(kernel, naive, (q, k, v))
    compare.expect_equal(kernel, naive, (q, k, v, bias), double=True)


@pytest.mark.parametrize("block_scores", WINDOW_FORMS)
def test_tokens_outside_of_the_window_change_nothing_bit_for_bit(block_scores):
    n = 13
    attend = quick_jit(functools.partial(attend_to_window, block_scores))
    q, k, v = normal(4, 3, 2, 3, n, HEAD_DIM)
    out = np.asarray(attend(q, k, v))
    changed = [np.where(np.arange(n)[:, None] == 6, -3 * x, x) for x in (q, k, v)]
    result = np.asarray(attend(*changed))
    sees = (np.arange(n) >= 6) & (np.arange(n) < 11)
    np.testing.assert_array_equal(result[..., ~sees, :], out[..., ~sees, :])
    assert (result[..., sees, :] != out[..., sees, :]).any(axis=(0, 1, 3)).all()
    # In half precision, blocks round as one product does.
    half = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    rounded = np.asarray(attend(*half))
    wide = np.asarray(attend(*(x.astype(np.float32) for x in half)))
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rounded, wide.astype(jnp.bfloat16))


def test_a_window_computes_the_scores_of_its_keys_only():
    x = jax.ShapeDtypeStruct((8, 2**12, 16), jnp.float32)
    attend = functools.partial(softmax.causal_softmax_attention, window=128)
    gradient = jax.grad(lambda q, k, v: attend(q, k, v).sum(), (0, 1, 2))
    jaxpr = str(jax.make_jaxpr(gradient)(x, x, x))
    # 256 queries meet their own keys and the 127 before them.
    assert "f32[8,256,383]" in jaxpr
    assert "4096,4096]" not in jaxpr and "256,4096]" not in jaxpr


def test_a_window_of_no_token_raises():
    x = normal(0, 3, 2)
    message = "window must be at least 1, or None for all earlier tokens, got 0"
    with pytest.raises(ValueError, match=message):
        softmax.causal_softmax_attention(x, x, x, window=0)
    bias = normal(1, 5)
    with pytest.raises(ValueError, match=message):
        kernels.causal_relative_attention(x, x, x, bias=bias, window=0)


def test_segments_of_other_queries_than_keys_raise():
    q, k, v, _ = draw_inputs()
    with pytest.raises(ValueError, match="5 queries and 7 keys: pass a mask"):
        softmax.softmax_attention(q, k, v, segment_ids=jnp.zeros(N, int))


@pytest.mark.quick("dense")
@pytest.mark.usefixtures("form")
def test_logsumexp_matches_reference_and_combines_sets_of_keys():
    q, k, v, bias = draw_inputs()
    key_mask = np.arange(M) != 2
    kernel = quick_jit(softmax.softmax_attention, return_logsumexp=True)

    def attend(keys):
        return kernel(
            q,
            k[:, keys],
            v[:, keys],
            bias=bias[..., keys],
            key_mask=key_mask[keys],
        )

    out, total = map(np.asarray, attend(slice(None)))
    scores = np.einsum("hnd,hmd->hnm", *(np.asarray(x, np.float64) for x in (q, k)))
    weights = np.exp(scores / HEAD_DIM**0.5 + bias) * key_mask
    np.testing.assert_allclose(total, np.log(weights.sum(axis=-1)), rtol=1e-5)
    outs, totals = zip(*map(attend, (slice(4), slice(4, M))), strict=True)
    shares = [np.exp(part - total)[..., None] for part in totals]
    combined = outs[0] * shares[0] + outs[1] * shares[1]
    np.testing.assert_allclose(combined, out, rtol=1e-5, atol=1e-6)
    _, nothing = kernel(q, k, v, key_mask=np.zeros(M, bool))
    np.testing.assert_array_equal(nothing, np.float32(softmax.MASKED_SCORE))


@pytest.mark.quick("dense")
@pytest.mark.usefixtures("form")
def test_query_without_keys_gives_zeros_and_finite_gradients():
    q, k, v, _ = draw_inputs()
    mask = np.arange(N)[:, None] != np.full(M, 2)
    attend = functools.partial(softmax.softmax_attention, mask=mask)
    results = compare.value_and_gradients(attend, (q, k, v), quick_jit)
    out, *gradients = jax.device_get(results)
    np.testing.assert_array_equal(out[:, 2], 0.0)
    assert np.abs(out[:, 1]).min() > 0
    for gradient in gradients:
        assert np.isfinite(gradient).all()


@pytest.mark.slow
@pytest.mark.usefixtures("form")
def test_masks_and_bias_broadcast_over_leading_axes():
    q, k, v, bias = (np.stack([x, 2 * x]) for x in draw_inputs())
    mask = np.arange(N * M).reshape(N, M) % 2 == 0
    key_mask = np.arange(2 * M).reshape(2, 1, M) % 3 != 0
    bias = bias[0]
    attend = quick_jit(softmax.softmax_attention)
    out = np.asarray(attend(q, k, v, mask=mask, key_mask=key_mask, bias=bias))
    for i in range(2):
        one = attend(q[i], k[i], v[i], mask=mask & key_mask[i], bias=bias)
        np.testing.assert_allclose(out[i], one, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_inputs_are_summed_in_float32(dtype):
    q, k, v, _ = (x.astype(dtype) for x in draw_inputs())
    out = run(softmax.softmax_attention, q, k, v)
    wide = run(softmax.softmax_attention, *map(np.float32, (q, k, v)))
    assert out.dtype == dtype
    np.testing.assert_array_equal(out, wide.astype(dtype))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_memory_of_long_sequences_is_linear(causal, masked):
    attend = softmax.causal_softmax_attention if causal else softmax.softmax_attention
    x = jax.ShapeDtypeStruct((1, 8, 2**14, 32), jnp.float32)
    exists = jax.ShapeDtypeStruct((2**14,), bool) if masked else None

    def loss(q, k, v, exists):
        return attend(q, k, v, key_mask=exists).sum()

    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    memory = gradient.lower(x, x, x, exists).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1e9


@pytest.mark.parametrize(
    ("kernel", "segmented"),
    [
        ("softmax", False),
        ("softmax", True),
        ("relative", False),
        ("relative", True),
        ("causal_relative", False),
    ],
)
def test_keys_that_a_mask_hides_from_all_queries_may_be_nan(kernel, segmented):
    q, k, v = normal(0, 3, 2, 5, 3)
    mask = normal(1, 2, 1, 5) > 0
    mask = np.broadcast_to(mask, (2, 5, 5)) & (np.arange(5) != 3)
    mask = mask | (np.arange(5) == 0)
    seen = mask.any(axis=1)[..., None]
    # Queries that see no later key, or none of another segment.
    mask[:, :3, 3] = kernel == "causal_relative" or segmented

    @jax.jit
    def value_and_gradients(q, k, v):
        attend = getattr(kernels, f"{kernel}_attention")
        attend = functools.partial(attend, mask=jnp.asarray(mask))
        if kernel == "relative":
            attend = functools.partial(attend, grid=(5,))
        if segmented:
            attend = functools.partial(attend, segment_ids=jnp.arange(5) // 3)
        out, pullback = jax.vjp(attend, q, k, v)
        return out, *pullback(jnp.cos(out))

    zero, nan = np.float32(0), np.float32(np.nan)
    expected = value_and_gradients(q, *(np.where(seen, x, zero) for x in (k, v)))
    found = value_and_gradients(q, *(np.where(seen, x, nan) for x in (k, v)))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert np.isfinite(ours).all()

"""Tests attention behind the interfaces of jax.nn, Flax Linen and Flax NNX."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from relattn import kernels
from relattn.nn.compat import attention_fn, dot_product_attention
from tests.helpers.quick import quick_jit

BATCH, N, M, HEADS, HEAD_DIM, VALUE_DIM = 3, 7, 11, 6, 5, 13


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def inputs(n=N, m=M, key_heads=HEADS, batch=(BATCH,), value_dim=HEAD_DIM):
    return (
        draw(*batch, n, HEADS, HEAD_DIM, seed=0),
        draw(*batch, m, key_heads, HEAD_DIM, seed=1),
        draw(*batch, m, key_heads, value_dim, seed=2),
    )


def allowed(*shape):
    """A mask that hides some keys of every query, but never the first."""
    mask = np.arange(np.prod(shape)).reshape(shape) % 3 != 1
    mask[..., 0] = True
    return jnp.asarray(mask)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({}, {}),
        ({}, {"scale": 0.3}),
        ({}, {"is_causal": True}),
        ({"n": M, "m": N}, {"is_causal": True}),
        ({}, {"mask": allowed(BATCH, 1, 1, M)}),
        ({}, {"mask": allowed(1, HEADS, N, M), "is_causal": True}),
        ({}, {"bias": draw(1, HEADS, N, M), "mask": allowed(BATCH, 1, N, M)}),
        ({"key_heads": 2}, {"mask": allowed(BATCH, HEADS, 1, M)}),
        ({"key_heads": 2}, {"bias": draw(BATCH, HEADS, N, M), "is_causal": True}),
        ({"key_heads": 1}, {"bias": draw(BATCH, 1, N, M), "scale": 2.0}),
        ({"batch": ()}, {"mask": allowed(1, 1, N, M), "is_causal": True}),
        ({"batch": (), "key_heads": 3}, {"bias": draw(1, HEADS, 1, M)}),
    ],
)
def test_softmax_equals_jax_nn(sizes, options):
    arrays = inputs(**sizes)

    @quick_jit
    def value_and_gradients(*arrays):
        results = []
        for function in (dot_product_attention, jax.nn.dot_product_attention):
            out, pullback = jax.vjp(functools.partial(function, **options), *arrays)
            results.append((out, pullback(jnp.cos(out))))
        return results

    (out, gradients), (expected, expected_gradients) = value_and_gradients(*arrays)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    for found, wanted in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("key_heads", [HEADS, 2])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads", [1, HEADS])
def test_linear_attention_equals_the_kernel(key_heads, is_causal, heads):
    q, k, v = inputs(m=N, key_heads=key_heads, value_dim=VALUE_DIM)
    mask = allowed(BATCH, heads, 1, N)
    projection = kernels.draw_orthogonal(jax.random.key(1), 17, HEAD_DIM)
    feature_map = functools.partial(kernels.positive_features, projection=projection)
    attend, kernel = kernels.linear_attention, kernels.linear_attention
    if is_causal:
        kernel = kernels.causal_linear_attention

    @quick_jit
    def outs(q, k, v):
        call = functools.partial(
            dot_product_attention, q, k, v, mask=mask, is_causal=is_causal
        )
        repeated = (jnp.repeat(x, HEADS // key_heads, axis=2) for x in (k, v))
        expected = kernel(
            *(x.swapaxes(1, 2) for x in (q, *repeated)),
            feature_map,
            key_mask=mask[:, :, 0],
        )
        return (
            call(implementation="favor", projection=projection),
            call(implementation=attend, feature_map=feature_map),
            expected.swapaxes(1, 2),
        )

    *results, expected = outs(q, k, v)
    assert expected.shape == (BATCH, N, HEADS, VALUE_DIM)
    for out in results:
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_favor_estimates_softmax_attention():
    q, k, v = inputs()
    q, k = q / 3, k / 3
    exact, mean = dot_product_attention(q, k, v), v.mean(axis=1, keepdims=True)
    projection = kernels.draw_orthogonal(jax.random.key(1), 2003, HEAD_DIM)
    attend = functools.partial(
        dot_product_attention, implementation="favor", projection=projection
    )
    for options in ({}, {"features": "trigonometric"}):
        error = jnp.linalg.norm(attend(q, k, v, **options) - exact)
        assert error < 0.3 * jnp.linalg.norm(mean - exact)
    unrelated = attend(q, k, v, features="relu")
    assert jnp.linalg.norm(unrelated - exact) > 0.3 * jnp.linalg.norm(mean - exact)


def test_a_bias_of_offsets_is_an_option_of_the_kernel():
    q, k, v = inputs(m=N)
    bias = draw(2 * N - 1)
    attend = functools.partial(kernels.relative_attention, grid=(N,), bias=bias)
    out = dot_product_attention(q, k, v, implementation=attend)
    offset = np.arange(N)[:, None] - np.arange(N)
    expected = jax.nn.dot_product_attention(q, k, v, bias[offset + N - 1][None, None])
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"implementation": "favour"}, "implementation 'favour': did you mean 'favor'"),
        (
            {"implementation": "favor", "features": "relus"},
            "features 'relus': did you mean 'relu'",
        ),
        (
            {"implementation": "favor", "mask": allowed(BATCH, 1, N, M)},
            r"favor takes a mask of keys, .* got shape \(3, 1, 7, 11\); use is_causal",
        ),
        (
            {"implementation": "favor", "bias": draw(1, 1, N, M)},
            "favor takes no bias of pairs; use implementation='softmax'",
        ),
        (
            {"implementation": kernels.linformer_attention, "is_causal": True},
            "linformer_attention has no causal form; choose from softmax_attention",
        ),
        (
            {"implementation": kernels.banded_attention},
            r"must be a name or a kernel of queries, keys and values",
        ),
        ({"mask": jnp.zeros((1, 1, N, M))}, "mask must be boolean.*got float32"),
        ({"mask": allowed(2, 1, 1, N, M)}, r"mask must broadcast to .* got shape \(2,"),
    ],
)
def test_what_an_implementation_cannot_honour_raises(options, message):
    with pytest.raises(ValueError, match=message):
        dot_product_attention(*inputs(), **options)


@pytest.mark.parametrize("key_heads", [4, 0])
def test_heads_that_do_not_divide_raise(key_heads):
    with pytest.raises(ValueError, match="which divides that of query, got shapes"):
        dot_product_attention(*inputs(key_heads=key_heads))


def linen_layer(**options):
    layer = nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=8, **options)
    return layer, lambda x, mask: layer.apply(
        layer.init(jax.random.key(0), x), x, mask=mask
    )


def nnx_layer(**options):
    layer = nnx.MultiHeadAttention(
        num_heads=2,
        in_features=5,
        qkv_features=8,
        decode=False,
        rngs=nnx.Rngs(0),
        **options,
    )
    return layer, lambda x, mask: layer(x, mask=mask)


@pytest.mark.parametrize("make", [linen_layer, nnx_layer])
def test_flax_layers_take_the_hook(make):
    x = draw(BATCH, N, 5)
    keys = nn.make_attention_mask(jnp.ones((BATCH, N)), jnp.arange(N)[None] % 4 != 2)
    causal = nn.make_causal_mask(x[..., 0])
    for mask in (None, keys, causal, keys[:, :, :1]):
        expected = make()[1](x, mask)
        out = make(attention_fn=attention_fn("softmax"))[1](x, mask)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    expected = make(attention_fn=attention_fn("softmax"))[1](x, causal)
    out = make(attention_fn=attention_fn("softmax", is_causal=True))[1](x, None)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    favor = attention_fn("favor", is_causal=True)
    out = make(attention_fn=favor)[1](x, keys[:, :, :1])
    changed = make(attention_fn=favor)[1](x.at[:, 4:].set(1.0), keys[:, :, :1])
    np.testing.assert_array_equal(out[:, :4], changed[:, :4])
    assert not np.allclose(out[:, 4:], changed[:, 4:])


def test_linen_layer_decodes_with_the_hook():
    layer = nn.MultiHeadDotProductAttention(
        num_heads=2, decode=True, attention_fn=attention_fn("favor")
    )
    x = draw(BATCH, N, 8)
    variables = quick_jit(layer.init)(jax.random.key(0), x)
    whole = nn.MultiHeadDotProductAttention(
        num_heads=2, attention_fn=attention_fn("favor", is_causal=True)
    ).apply({"params": variables["params"]}, x)
    cache = variables["cache"]
    for i in range(N):
        out, changed = layer.apply(
            {"params": variables["params"], "cache": cache},
            x[:, i : i + 1],
            mutable=["cache"],
        )
        cache = changed["cache"]
        np.testing.assert_allclose(out[:, 0], whole[:, i], rtol=1e-4, atol=1e-5)


def test_settings_that_no_kernel_has_raise():
    attend = attention_fn("favor")
    q, k, v = inputs()
    with pytest.raises(ValueError, match="dropout_rate=0.1: kernels drop no attention"):
        attend(q, k, v, dropout_rate=0.1)
    attend(q, k, v, dropout_rate=0.1, deterministic=True)
    with pytest.raises(ValueError, match="leave out sow_weights=True"):
        attend(q, k, v, module=object())
    assert attend(q, k, v, dtype=jnp.bfloat16, precision="highest").dtype == "bfloat16"

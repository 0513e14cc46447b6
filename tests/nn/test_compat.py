"""Tests attention behind the interfaces of jax.nn, Flax Linen and Flax NNX."""

import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from relattn import kernels
from relattn.nn.compat import (
    attention_fn,
    dot_product_attention,
    split_attention_mask,
)
from tests.helpers.export import unchecked_annotations
from tests.helpers.quick import normal, quick_jit, run

BATCH, N, M, HEADS, HEAD_DIM, VALUE_DIM = 3, 7, 11, 6, 5, 13


def draw(*shape, seed=0):
    return jax.device_put(normal(seed, *shape))


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
    return mask


@pytest.mark.quick("sizes0-options0", "sizes1-options1", "sizes2-options2")
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
        ours = functools.partial(dot_product_attention, implementation="softmax")
        results = []
        for function in (ours, jax.nn.dot_product_attention):
            out, pullback = jax.vjp(functools.partial(function, **options), *arrays)
            results.append((out, pullback(jnp.cos(out))))
        return results

    (out, gradients), (expected, expected_gradients) = value_and_gradients(*arrays)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    for found, wanted in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"m": N}, {}),
        ({}, {}),
        ({"n": M, "m": N, "key_heads": 2}, {}),
        ({"m": N}, {"mask": allowed(BATCH, 1, N, N)}),
    ],
)
def test_window_of_the_kernel_equals_that_of_jax_nn(sizes, options):
    arrays, options = inputs(**sizes), {**options, "is_causal": True}

    @quick_jit
    def outs(*arrays):
        kernel = functools.partial(kernels.causal_softmax_attention, window=3)
        ours = dot_product_attention(*arrays, implementation=kernel, **options)
        theirs = jax.nn.dot_product_attention(
            *arrays, local_window_size=(2, 0), **options
        )
        return ours, theirs

    ours, theirs = jax.device_get(outs(*arrays))
    # Queries without keys: jax.nn gives the mean of all values.
    seen = np.abs(ours).max(axis=(-2, -1), keepdims=True) > 0
    np.testing.assert_allclose(ours, np.where(seen, theirs, 0), rtol=1e-5, atol=1e-6)


@pytest.mark.quick("1-False-6")
@pytest.mark.parametrize("key_heads", [HEADS, 2])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads", [1, HEADS])
def test_linear_attention_equals_the_kernel(key_heads, is_causal, heads):
    q, k, v = inputs(m=N, key_heads=key_heads, value_dim=VALUE_DIM)
    mask = allowed(BATCH, heads, 1, N)
    projection = normal(3, 17, HEAD_DIM)
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


def test_tables_of_heads_are_grouped_as_the_docstring_says():
    q, k, v = inputs(m=N, key_heads=2)
    bias = draw(2, 3, 2 * N - 1, seed=3)

    def out(k, v, bias):
        attend = functools.partial(kernels.relative_attention, grid=(N,), bias=bias)
        return run(
            functools.partial(dot_product_attention, implementation=attend), q, k, v
        )

    repeated = (jnp.repeat(x, 3, axis=2) for x in (k, v))
    expected = out(*repeated, bias.reshape(HEADS, -1))
    np.testing.assert_allclose(out(k, v, bias), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
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


def test_the_projection_is_the_same_with_every_setting_of_jax():
    arrays = inputs()
    attend = functools.partial(dot_product_attention, implementation="favor")
    expected = run(attend, *arrays)
    with jax.default_prng_impl("rbg"):
        # Another function, which is compiled again.
        found = run(functools.partial(attend), *arrays)
    np.testing.assert_array_equal(found, expected)


def test_a_bias_of_offsets_is_an_option_of_the_kernel():
    q, k, v = inputs(m=N)
    bias = draw(2 * N - 1)
    attend = functools.partial(kernels.relative_attention, grid=(N,), bias=bias)
    offset = np.arange(N)[:, None] - np.arange(N)
    pairs = bias[offset + N - 1][None, None]

    def both(q, k, v):
        ours = dot_product_attention(q, k, v, implementation=attend)
        return ours, jax.nn.dot_product_attention(q, k, v, pairs)

    np.testing.assert_allclose(*run(both, q, k, v), rtol=1e-5, atol=1e-6)


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
            r"favor takes a mask of keys, .* got shape \(3, 1, 7, 11\): use is_causal",
        ),
        (
            {"implementation": "favor", "bias": draw(1, 1, N, M)},
            "favor takes no bias of pairs: use implementation='softmax'",
        ),
        (
            {"implementation": kernels.linformer_attention, "is_causal": True},
            "linformer_attention has no causal form: choose from softmax_attention",
        ),
        (
            {"implementation": kernels.banded_attention},
            r"must be a name or a kernel of queries, keys and values",
        ),
        (
            {"mask": np.zeros((1, 1, N, M), np.float32)},
            "mask must be boolean.*got float32",
        ),
        ({"mask": allowed(2, 1, 1, N, M)}, r"mask must broadcast to .* got shape \(2,"),
    ],
)
def test_unsupported_arguments_raise(options, message):
    with pytest.raises(ValueError, match=message):
        dot_product_attention(*inputs(), **options)


@pytest.mark.parametrize("key_heads", [4, 0])
def test_heads_that_do_not_divide_raise(key_heads):
    with pytest.raises(ValueError, match="which divides that of query, got shapes"):
        dot_product_attention(*inputs(key_heads=key_heads))


def linen_layer(**options):
    layer = nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=8, **options)

    @quick_jit
    def apply(x, mask):
        return layer.apply(layer.init(jax.random.key(0), x), x, mask=mask)

    return layer, apply


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


@pytest.mark.quick("linen_layer")
@pytest.mark.parametrize("make", [linen_layer, nnx_layer])
def test_flax_layers_take_the_hook(make):
    x, ones = draw(BATCH, N, 5), np.ones((BATCH, N))
    keys = run(nn.make_attention_mask, ones, np.arange(N)[None] % 4 != 2)
    causal = run(nn.make_causal_mask, ones)
    plain, hooked = make()[1], make(attention_fn=attention_fn("softmax"))[1]
    for mask in (None, keys, keys[:, :, :1]):
        np.testing.assert_allclose(
            hooked(x, mask), plain(x, mask), rtol=1e-5, atol=1e-6
        )
    expected, by_mask = plain(x, causal), hooked(x, causal)
    by_flag = make(attention_fn=attention_fn("softmax", is_causal=True))[1](x, None)
    np.testing.assert_allclose(by_mask, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(by_flag, expected, rtol=1e-5, atol=1e-6)
    favor = make(attention_fn=attention_fn("favor", is_causal=True))[1]
    later = np.where(np.arange(N)[:, None] < 4, x, np.float32(1))
    out = np.asarray(favor(x, keys[:, :, :1]))
    changed = np.asarray(favor(later, keys[:, :, :1]))
    np.testing.assert_array_equal(out[:, :4], changed[:, :4])
    assert not np.allclose(out[:, 4:], changed[:, 4:])


def linen_steps(x, **options):
    """Decodes token by token with a Linen layer; returns outputs and parameters."""
    layer = nn.MultiHeadDotProductAttention(num_heads=2, decode=True, **options)
    variables = quick_jit(layer.init)(jax.random.key(0), x)
    cache, outs = variables["cache"], []
    step = quick_jit(functools.partial(layer.apply, mutable=["cache"]))
    for i in range(x.shape[1]):
        out, changed = step({**variables, "cache": cache}, x[:, i : i + 1])
        cache = changed["cache"]
        outs.append(out)
    return np.concatenate(outs, axis=1), variables["params"]


@pytest.mark.quick("softmax-False")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["softmax", "favor", "relu"])
def test_linen_layer_decodes_what_the_causal_layer_computes(name, is_causal):
    x = draw(BATCH, N, 8)
    out, params = linen_steps(x, attention_fn=attention_fn(name, is_causal=is_causal))
    causal = nn.MultiHeadDotProductAttention(
        num_heads=2, attention_fn=attention_fn(name, is_causal=True)
    )
    whole = run(causal.apply, {"params": params}, x)
    np.testing.assert_allclose(out, whole, rtol=1e-4, atol=1e-5)
    if name == "softmax":
        flax = nn.MultiHeadDotProductAttention(num_heads=2)
        mask = np.tril(np.ones((1, 1, N, N), bool))
        expected = run(functools.partial(flax.apply, mask=mask), {"params": params}, x)
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "is_causal", "in_call"),
    [
        ("softmax", False, False),
        ("softmax", True, False),
        ("softmax", False, True),
        ("favor", True, True),
        ("relu", False, False),
    ],
)
def test_nnx_layer_decodes_what_the_causal_layer_computes(name, is_causal, in_call):
    """With grouped queries, and with the flag of the layer's call."""

    def make(decode, **options):
        return nnx.MultiHeadAttention(
            num_heads=4,
            in_features=8,
            num_kv_heads=2,
            decode=decode,
            rngs=nnx.Rngs(0),
            **options,
        )

    x = draw(BATCH, N, 8)
    layer = make(True, attention_fn=attention_fn(name, is_causal=is_causal))
    layer.init_cache(x.shape)
    step = nnx.jit(lambda layer, x: layer(x, is_causal=in_call))
    out = jnp.concatenate([step(layer, x[:, i : i + 1]) for i in range(N)], axis=1)
    whole = make(False, attention_fn=attention_fn(name, is_causal=True))(x)
    np.testing.assert_allclose(out, whole, rtol=1e-4, atol=1e-5)
    if name == "softmax":
        expected = make(False)(x, is_causal=True)
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
def test_decoding_steps_have_the_values_of_softmax(is_causal):
    """Tokens 1 and 3: 3 e^9 and 1 e^3 are the weighted values of the second."""
    hook = attention_fn("softmax", is_causal=is_causal)
    q, k = np.full((1, 1, 1, 1), 3.0, np.float32), np.float32([1.0, 3.0, 7.0])
    k, seen = k.reshape(1, 3, 1, 1), np.array([1, 1, 0]).reshape(1, 1, 1, 3)
    expected = (np.exp(3) + 3 * np.exp(9)) / (np.exp(3) + np.exp(9))
    out = run(functools.partial(hook, mask=seen), q, k, k)
    np.testing.assert_allclose(out[0, 0, 0, 0], expected, rtol=1e-6)


@pytest.mark.quick("softmax")
@pytest.mark.parametrize("name", ["softmax", "favor", "relu"])
def test_causal_queries_are_the_last_of_the_keys(name):
    q, k, v = inputs(m=N, key_heads=2)
    hook = attention_fn(name, is_causal=True)
    mask = allowed(BATCH, 1, 1, N)

    @quick_jit
    def outs(q, k, v):
        parts = [hook(q[:, i:], k, v, mask=mask) for i in (1, 4, N - 1)]
        past = mask & np.tril(np.ones((N, N), bool))
        expected = jax.nn.dot_product_attention(q, k, v, mask=past)
        return parts, hook(q, k, v, mask=mask), expected

    parts, whole, expected = outs(q, k, v)
    for first, out in zip((1, 4, N - 1), parts, strict=True):
        np.testing.assert_allclose(out, whole[:, first:], rtol=1e-4, atol=1e-6)
    assert np.allclose(whole, expected, atol=1e-5) == (name == "softmax")


def test_causal_queries_that_cannot_be_placed_raise():
    q, k, v = inputs(n=M, m=N)
    for name in ("softmax", "favor"):
        with pytest.raises(ValueError, match="got 11 queries and 7 keys"):
            attention_fn(name, is_causal=True)(q, k, v)
        with pytest.raises(ValueError, match="where 2 queries stand among 7 keys"):
            attention_fn(name)(q[:, :2], k, v, is_causal=True)
    relative = functools.partial(kernels.relative_attention, grid=(N,))
    with pytest.raises(ValueError, match="as many queries as keys, whose positions"):
        attention_fn(relative, is_causal=True)(q[:, :1], k, v)


PADDING = np.arange(N) < np.array([[N], [4], [2]])


@pytest.mark.quick("softmax-False", "softmax-True")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["softmax", "favor", "relu"])
def test_padding_has_no_effect_in_any_form(name, is_causal):
    """The masks of Flax, taken apart; the expected value is each example alone."""
    arrays = inputs(m=N)
    mask = nn.make_attention_mask(PADDING, PADDING)
    if is_causal:
        mask = nn.combine_masks(mask, nn.make_causal_mask(PADDING))
    key_mask, found = split_attention_mask(mask)
    padding = jax.device_put(PADDING)
    np.testing.assert_array_equal(key_mask, padding)
    assert found is is_causal
    hook = attention_fn(name, is_causal=is_causal)

    @quick_jit
    def outs(*arrays):
        results = [
            hook(*arrays, mask=PADDING[:, None, None].astype(float)),
            hook(*arrays, key_mask=padding),
            attention_fn(name, is_causal=found, key_mask=key_mask)(*arrays),
        ]
        if name == "softmax":
            results.append(attention_fn(name)(*arrays, mask=mask))
        return results, hook(*(x[1:2, :4] for x in arrays))

    results, alone = outs(*arrays)
    for out in results:
        np.testing.assert_allclose(out[1:2, :4], alone, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(out[0], results[0][0], rtol=1e-4, atol=1e-6)
    if name == "softmax":
        np.testing.assert_array_equal(results[-1][2, 2:], 0)
        return
    with pytest.raises(ValueError, match="key_mask=.*relattn.split_attention_mask"):
        hook(*arrays, mask=mask)


@pytest.mark.parametrize(
    ("mask", "key_mask", "is_causal"),
    [
        (nn.make_causal_mask(jnp.ones((1, N))), np.ones((1, N)), True),
        (PADDING[:, None, None], PADDING, False),
        (nn.make_attention_mask(jnp.ones((3, M)), PADDING), PADDING, False),
        # Keys alone are padding, also on the left.
        (np.tri(N)[None, None] * PADDING[:, None, None, ::-1], PADDING[:, ::-1], True),
        # The same for all heads.
        (np.ones((1, HEADS, N, N)) * PADDING[:, None, None], PADDING, False),
        # The queries are the last of the keys.
        (np.tri(N, M, M - N)[None, None], np.ones((1, M)), True),
        (nn.make_causal_mask(jnp.ones((2, 1, N))), np.ones((2, 1, N)), True),
    ],
)
def test_masks_are_taken_apart(mask, key_mask, is_causal):
    found = split_attention_mask(mask)
    np.testing.assert_array_equal(found[0], key_mask)
    assert found[1] is is_causal


@pytest.mark.parametrize(
    "mask",
    [
        np.tri(N, k=1),
        np.tri(N, k=-1)[::-1],
        np.eye(N),
        np.ones((3, N, N)) * (np.arange(3)[:, None, None] < 2 + np.eye(N)),
        np.triu(np.ones((N, N))),
    ],
)
def test_other_masks_are_refused(mask):
    mask = np.asarray(mask).reshape(1, -1, N, N)
    with pytest.raises(ValueError, match="neither a padding mask.*use implementation"):
        split_attention_mask(mask)


def test_a_mask_that_is_added_to_scores_is_refused():
    """Where it is other than zero, it forbids."""
    mask = jnp.where(PADDING, 0.0, -jnp.inf)[:, None, None]
    message = "values below zero, as one that is added to scores, .*: pass mask == 0"
    with pytest.raises(ValueError, match=message):
        split_attention_mask(mask)
    for options in ({"mask": mask}, {"key_mask": mask[:, 0, 0]}):
        with pytest.raises(ValueError, match=message):
            attention_fn("favor")(*inputs(m=N), **options)


def test_a_mask_of_unknown_values_is_refused():
    mask = nn.make_causal_mask(jnp.ones((1, N)))
    with pytest.raises(ValueError, match="known: call it outside jax.jit"):
        jax.jit(split_attention_mask)(mask)
    for other, found in ((mask[0, 0], r"\(7, 7\)"), (None, "None: leave it out")):
        message = rf"mask must be \[\*batch, heads, n, m\], got {found}"
        with unchecked_annotations(), pytest.raises(ValueError, match=message):
            split_attention_mask(other)


@pytest.mark.quick("softmax")
@pytest.mark.parametrize("name", ["softmax", "favor"])
def test_a_mask_may_be_a_list(name):
    (q, k, v), keys = inputs(), [1, 0, 1, 1, 0, 0, 1, 0, 0, 1, 1]
    kept = np.flatnonzero(keys)
    expected = run(attention_fn(name), q, k[:, kept], v[:, kept])
    out = run(functools.partial(attention_fn(name), mask=[[[keys]]] * BATCH), q, k, v)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-6)


def test_key_mask_of_another_length_raises():
    q, k, v = inputs()
    message = r"key_mask must broadcast to .* \(3, 11\), got shape \(3, 7\)"
    with pytest.raises(ValueError, match=message):
        attention_fn("favor", key_mask=jax.device_put(PADDING))(q, k, v)
    hook = quick_jit(attention_fn("favor", key_mask=np.arange(M) < 5))
    expected = quick_jit(attention_fn("favor"))(q, k[:, :5], v[:, :5])
    np.testing.assert_allclose(hook(q, k, v), expected, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="mask must broadcast to"):
        hook(q, k, v, mask=np.ones((BATCH, 1, 1, N)))


@pytest.mark.quick("softmax-False")
@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("name", ["softmax", "favor"])
def test_dropout_acts_on_the_heads_outputs(name, broadcast):
    q, k, v = inputs(n=53)
    hook, rate = attention_fn(name), 0.3
    out = hook(q, k, v)
    drop = functools.partial(hook, q, k, v, broadcast_dropout=broadcast)
    np.testing.assert_array_equal(drop(dropout_rate=rate, deterministic=True), out)
    rng = jax.random.key(3)
    found = drop(dropout_rate=rate, dropout_rng=rng)
    kept = np.asarray(found != 0)
    np.testing.assert_allclose(found, np.where(kept, out / (1 - rate), 0), rtol=1e-5)
    # Three standard deviations of the share.
    drawn = kept[:1, :, :1] if broadcast else kept
    assert abs(drawn.mean() - 0.7) < 3 * (0.21 / drawn.size) ** 0.5
    assert (kept == kept[:1, :, :1]).all() == broadcast
    np.testing.assert_array_equal(drop(dropout_rate=rate, dropout_rng=rng), found)
    other = drop(dropout_rate=rate, dropout_rng=jax.random.PRNGKey(4))
    assert not np.array_equal(other, found)
    with pytest.raises(ValueError, match="dropout_rate=0.3 needs dropout_rng"):
        drop(dropout_rate=rate)
    with pytest.raises(ValueError, match="dropout_rate must be from 0 to below 1, got"):
        drop(dropout_rate=1.0, dropout_rng=rng)


@pytest.mark.slow
@pytest.mark.parametrize("make", [linen_layer, nnx_layer])
def test_flax_layers_train_with_dropout(make):
    x = draw(BATCH, N, 5)
    layer, _ = make(attention_fn=attention_fn("favor"), dropout_rate=0.5)
    _, call = make(attention_fn=attention_fn("favor"))
    if make is nnx_layer:
        out, again = (layer(x, deterministic=False) for _ in range(2))
        evaluated = layer(x, deterministic=True)
    else:
        variables = layer.init(jax.random.key(0), x, deterministic=True)
        apply = functools.partial(layer.apply, variables, x)
        out, again = (
            apply(deterministic=False, rngs={"dropout": jax.random.key(i)})
            for i in range(2)
        )
        evaluated = apply(deterministic=True)
    assert np.isfinite(out).all() and not np.allclose(out, again)
    assert not np.allclose(out, evaluated)
    np.testing.assert_allclose(evaluated, call(x, None), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "setting",
    [
        {"einsum_dot_general": jax.lax.dot_general},
        {"qk_attn_weights_einsum": jnp.einsum},
        {"attn_weights_value_einsum": jnp.einsum},
        {"input_positions": jnp.arange(N)},
        {"module": object()},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_settings_that_no_kernel_has_raise(setting):
    name = "sow_weights" if "module" in setting else next(iter(setting))
    with pytest.raises(ValueError, match=name):
        attention_fn("favor")(*inputs(), **setting)


@pytest.mark.parametrize("flax", [nn.dot_product_attention, nnx.dot_product_attention])
def test_hook_has_every_setting_of_flax(flax):
    """Linen leaves out, without a word, what the hook's signature does not name."""
    ours = inspect.signature(attention_fn("softmax")).parameters
    assert {*inspect.signature(flax).parameters} <= {*ours}


def test_hook_computes_in_the_dtype_of_flax():
    q, k, v = inputs()
    attend = attention_fn("softmax")
    mixed = (q.astype(jnp.bfloat16), k, v.astype(jnp.float16))
    for call in (
        {},
        {"dtype": jnp.bfloat16, "precision": "highest"},
        {"promote_dtype": nnx.nn.dtypes.promote_dtype, "dtype": jnp.float16},
        {"force_fp32_for_softmax": True, "deterministic": True, "dropout_rate": 0.1},
    ):
        given = {key: call[key] for key in ("dtype", "promote_dtype") if key in call}
        expected = nnx.dot_product_attention(*mixed, **given)
        out = attend(*mixed, **call)
        assert out.dtype == expected.dtype
        np.testing.assert_allclose(
            out.astype(float), expected.astype(float), atol=0.03 if given else 1e-5
        )


def test_sow_weights_of_the_layers_raises():
    x = draw(BATCH, N, 5)
    layer, _ = nnx_layer(attention_fn=attention_fn("favor"))
    with pytest.raises(ValueError, match="leave out sow_weights=True"):
        layer(x, sow_weights=True)

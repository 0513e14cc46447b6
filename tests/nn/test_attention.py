"""Tests attention modules against the references, with their parameters."""

import functools
import types
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import kernels
from relattn.kernels import redraw
from relattn.kernels.masks import finite_tokens
from relattn.nn.attention import Context, check_index
from relattn.nn.linear_attention import FavorAttention
from relattn.nn.positions.relative import RelativeTables
from relattn.nn.registry import POSITIONS, build
from relattn.nn.softmax_attention import SoftmaxAttention
from tests import reference
from tests.helpers import specs
from tests.helpers.export import unchecked_annotations
from tests.helpers.quick import normal, quick_jit, run
from tests.helpers.specs import with_others

GRID = (2, 3)
N, DIM, HEADS, HEAD_DIM = 7, 8, 2, 4
FEATURES = 5


def layer(attention, position="none"):
    """Returns an initialised attention module without position, and tokens."""
    make_attention, _ = build(
        attention, position, dim=DIM, num_heads=HEADS, num_layers=1
    )
    module = make_attention(layer=0)
    x = normal(1, 2, N, DIM)
    init = functools.partial(module.init, grid=GRID, num_prefix=1)
    variables = run(init, jax.random.key(0), x)
    params = dict(variables["params"])
    if "table" in params:
        params["table"] = normal(2, *params["table"].shape)
    return module, {**variables, "params": params}, x


def project(params, x):
    out = x @ params["kernel"] + params["bias"]
    return out.reshape(len(x), -1, HEAD_DIM).swapaxes(0, 1)


def expected(attention, variables, x):
    """Computes the layer's output for one example by the references, in float64."""
    params = variables["params"]
    q, v = project(params["q"], x), project(params["v"], x)
    everything = np.ones((N, N), bool)
    if attention == "softmax":
        k = project(params["k"], x)
        heads = [
            reference.softmax_attention(*inputs, everything)
            for inputs in zip(q, k, v, strict=True)
        ]
    else:
        drawn = variables["random_features"]

        eps = 0.3 if "eps" in attention else 0.0

        def phi(vector, name="projection"):
            return reference.positive_features(vector, drawn[name].projection, eps)

        k = project(params["k"], x)
        heads = [
            reference.linear_attention(*inputs, phi, everything)
            for inputs in zip(q, k, v, strict=False)
        ]
        if attention.startswith("banded"):
            name = "projection_1" if "separate" in attention else "projection"
            heads.append(
                reference.banded_attention(
                    q[1],
                    v[1],
                    params["table"],
                    lambda vectors: jnp.log(jnp.stack([phi(x, name) for x in vectors])),
                    GRID,
                    num_prefix=1,
                    cls="corner" if "corner" in attention else "far",
                )
            )
    merged = jnp.stack(heads, axis=1).reshape(N, DIM)
    return merged @ params["out"]["kernel"] + params["out"]["bias"]


@pytest.mark.quick("softmax")
@pytest.mark.parametrize(
    "attention",
    [
        "softmax",
        f"favor(num_features={FEATURES})",
        f"banded(clip=2, num_features={FEATURES})",
        f"favor(num_features={FEATURES}, eps=0.3)",
        f"banded(clip=2, num_features={FEATURES}, eps=0.3)",
        f"banded(clip=2, num_features={FEATURES}, separate_projections=True)",
        f"banded(clip=3, num_features={FEATURES}, cls='corner')",
    ],
)
def test_output_equals_the_reference_with_linear_projections(attention):
    module, variables, x = layer(attention)
    apply = functools.partial(module.apply, grid=GRID, num_prefix=1)
    out = quick_jit(apply)(variables, x)
    with jax.enable_x64(True):
        wide = jax.tree.map(np.float64, (variables, x))
        naive = quick_jit(
            lambda variables, x: [
                expected(attention, variables, x[0]),
                expected(attention, variables, x[1]),
            ]
        )
        np.testing.assert_allclose(out, naive(*wide), atol=2e-5)


@pytest.mark.slow
def test_separate_projections_are_drawn_independently():
    _, variables, _ = layer("banded(clip=2, separate_projections=True)")
    first = variables["random_features"]
    again = run(lambda first: redraw(first, jax.random.key(3), 1), first)
    for drawn in (first, again):
        content, position = (leaf.projection for leaf in drawn.values())
        assert not np.isclose(content, position).any()


@pytest.mark.quick("softmax", "favor")
@pytest.mark.parametrize("attention", ["softmax", "favor", "banded(clip=2)"])
def test_outputs_do_not_depend_on_masked_tokens(attention):
    module, variables, x = layer(attention)
    mask = np.tile(np.arange(N) != 4, (2, 1))
    apply = functools.partial(module.apply, variables, grid=GRID, num_prefix=1)
    attend = quick_jit(apply)
    tokens = (x, np.where(mask[..., None], x, np.float32(17)))
    outs = [np.asarray(attend(y, key_mask=mask)) for y in tokens]
    np.testing.assert_array_equal(outs[0][mask], outs[1][mask])
    unmasked = np.asarray(attend(x))
    assert not np.allclose(unmasked[mask], outs[0][mask], atol=1e-3)


@pytest.mark.quick("softmax")
@pytest.mark.parametrize("attention", ["softmax", "favor", "banded(clip=2)"])
def test_output_has_the_compute_dtype_and_parameters_are_float32(attention):
    make_attention, _ = build(attention, "none", dim=DIM, num_heads=HEADS, num_layers=1)
    module = make_attention(layer=0, dtype=jnp.bfloat16)
    x = np.ones((1, N, DIM), jnp.bfloat16)
    init = functools.partial(module.init_with_output, grid=GRID, num_prefix=1)
    out, variables = jax.eval_shape(init, jax.random.key(0), x)
    assert out.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {np.dtype("float32")}


@pytest.mark.parametrize("attention", ["favor", "banded"])
def test_draws_use_the_options(attention):
    options = "num_features=5, orthogonal=False, norms='fixed', sign_corrected=False"
    make_attention, _ = build(
        f"{attention}({options})", "none", dim=DIM, num_heads=HEADS, num_layers=9
    )
    variables = jax.eval_shape(
        functools.partial(make_attention(layer=7).init, grid=GRID, num_prefix=1),
        jax.random.key(0),
        jnp.ones((1, N, DIM)),
    )
    drawn = variables["random_features"]["projection"]
    assert drawn.projection.shape == (5, HEAD_DIM)
    assert (drawn.layer, drawn.orthogonal) == (7, False)
    assert (drawn.norms, drawn.sign_corrected) == ("fixed", False)


def test_default_num_features_is_d_ln_d_with_the_concatenated_width():
    make_attention, make_position = build(
        "favor", "constrained_sincos(num_scales=4)", dim=64, num_heads=2, num_layers=1
    )

    def init():
        position = make_position().init_with_output(jax.random.key(0), GRID, 1)[0][0]
        x = jnp.ones((1, N, 64))
        return make_attention(layer=0).init(jax.random.key(0), x, position=position)

    variables = jax.eval_shape(init)
    projection = variables["random_features"]["projection"].projection
    assert projection.shape == (185, 48)


@pytest.mark.slow
def test_trigonometric_features_sow_the_share_of_nonpositive_normalizers():
    module, variables, x = layer("favor(features='trigonometric', num_features=2)")
    variables = jax.tree.map(lambda leaf: leaf * 3, variables)
    apply = functools.partial(module.apply, mutable=["intermediates"])
    out, sown = run(apply, variables, x)
    (fraction,) = sown["intermediates"]["nonpositive_normalizer"]
    assert 0 < fraction < 1
    assert np.isfinite(out).all()


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
def test_causal_positive_features_sow_the_share_of_underflowed_keys(causal):
    make_attention, _ = build(
        "favor", "none", dim=DIM, num_heads=HEADS, num_layers=1, causal=causal
    )
    module = make_attention(layer=0)
    x = jax.random.normal(jax.random.key(1), (2, N, DIM))
    variables = module.init(jax.random.key(0), x)
    loud = x.at[0, jnp.array([3, 6])].multiply(1e4)
    key_mask = jnp.broadcast_to(jnp.arange(N) < 6, (2, N))

    def share(tokens, key_mask=None):
        _, sown = module.apply(
            variables, tokens, key_mask=key_mask, mutable=["intermediates"]
        )
        return sown["intermediates"]["underflowed_keys"][0] if sown else None

    found = [share(x), share(loud), share(loud, key_mask)]
    if causal:
        np.testing.assert_allclose(found, [0, 2 / 14, 1 / 14])
    else:
        assert found == [None] * 3


CAUSAL = with_others(
    [
        ("softmax", "none"),
        ("favor", "none"),
        ("favor(features='trigonometric')", "none"),
        ("favor(eps=0.3)", "none"),
        ("softmax", "constrained_sincos"),
        ("favor", "constrained_sincos(content_conditioned=True)"),
        ("favor", "constrained_sincos(content_modulated=True)"),
        ("softmax", "relative_key"),
        ("softmax", "relative_value"),
        ("softmax", "relative_bias"),
        ("favor", "rope1d"),
        ("softmax", "rope1d(interleaved=True)"),
        ("favor", "t5_bias(bidirectional=False)"),
        ("favor(features='trigonometric', normalize=True)", "sincos_bias"),
        ("softmax", "fourier_bias"),
        ("relu", "none"),
        ("softmax", "cayley_string"),
        ("relu", "circulant_string"),
        ("favor", "irpe_gate"),
        ("relu", "string_gate"),
        ("translution(clip=2)", "none"),
        ("lor_translution(clip=20)", "none"),
        ("hedgehog", "none"),
        ("hedgehog", "relative_bias"),
        ("softmax(window=3)", "rope1d"),
        ("softmax(window=5)", "none"),
        ("softmax(window=3)", "relative_value"),
        ("softmax(window=20)", "relative_bias"),
    ],
    specs.CAUSAL,
    [
        name
        for name, entry in POSITIONS.items()
        if entry.site not in ("none", "tokens") and name not in specs.ON_PLANES
    ],
)


def causal_layer(attention, position, **options):
    """Returns a causal attention, its variables, tokens and position."""
    sizes = {"dim": DIM, "num_heads": HEADS, "num_layers": 1, "causal": True}
    make_attention, make_position = build(attention, position, **sizes | options)
    if position == "none":
        encoding = None
    else:
        init = functools.partial(make_position().init_with_output, grid=(N,))
        encoding = quick_jit(lambda key: init(key, num_prefix=0)[0][0])(
            jax.random.key(3)
        )
    module = make_attention(layer=0)
    x = normal(1, 2, N, DIM)
    init = functools.partial(module.init, grid=(N,), position=encoding)
    variables = quick_jit(init)(jax.random.key(0), x)
    return module, variables, x, encoding


@pytest.mark.parametrize(("attention", "position"), CAUSAL[:2])
def test_causal_attention_does_not_depend_on_later_tokens(attention, position):
    module, variables, x, encoding = causal_layer(attention, position)

    @quick_jit
    def apply(x):
        return module.apply(variables, x, grid=(N,), position=encoding)

    factors = np.where(np.arange(N) < 4, 1, -3).astype(np.float32)[:, None]
    out, result = np.asarray(apply(x)), np.asarray(apply(x * factors))
    np.testing.assert_array_equal(result[:, :4], out[:, :4])
    assert (result[:, 4:] != out[:, 4:]).any()


@pytest.mark.quick(
    "favor(eps=0.3)-none",
    "softmax(window=3)-relative_value",
)
@pytest.mark.parametrize(("attention", "position"), CAUSAL)
def test_decoding_equals_full_attention(attention, position):
    expect_decoding_equals_full_attention(*causal_layer(attention, position))


def expect_decoding_equals_full_attention(module, variables, x, encoding):
    """Decodes all tokens, and the last ones after a prefill; returns the cache."""

    def apply(variables, x, index):
        return module.apply(
            variables,
            x,
            grid=(N,),
            position=encoding,
            index=index,
            mutable=["cache"],
        )

    first = jax.eval_shape(apply, variables, x[:, :1], 0)
    # What another sequence may have left has no effect.
    cache = jax.tree.map(lambda leaf: np.full(leaf.shape, 9.0, leaf.dtype), first[1])

    def step(cache, inputs):
        index, token = inputs
        out, cache = apply({**variables, **cache}, token[:, None], index)
        return cache, out[:, 0]

    def decode(cache, x, start):
        inputs = (jnp.arange(start, N), x[:, start:].swapaxes(0, 1))
        return jax.lax.scan(step, cache, inputs)[1].swapaxes(0, 1)

    @quick_jit
    def outputs(cache, x):
        # Prefill with three tokens, followed by padding.
        padded = x[:, :5].at[:, 3:].set(jnp.array([[17.0], [jnp.nan]]))
        prompt, filled = apply(variables, padded, 2)
        prefilled = jnp.concatenate([prompt[:, :3], decode(filled, x, 3)], axis=1)
        expected = module.apply(variables, x, grid=(N,), position=encoding)
        return decode(cache, x, 0), prefilled, expected

    with jax.numpy_rank_promotion("raise"):
        decoded, prefilled, expected = outputs(cache, x)
    np.testing.assert_allclose(decoded, expected, atol=2e-6)
    np.testing.assert_allclose(prefilled, expected, atol=2e-6)
    return cache["cache"]


@pytest.mark.parametrize(
    ("attention", "position", "length"),
    [
        ("softmax(window=3)", "rope1d", 3),
        ("softmax(window=20)", "rope1d", N),
        ("softmax(window=3)", "relative_bias", N),
    ],
)
def test_cache_holds_the_window(attention, position, length):
    module, variables, x, encoding = causal_layer(attention, position)
    apply = functools.partial(module.apply, grid=(N,), mutable=["cache"])
    _, cache = jax.eval_shape(
        lambda x: apply(variables, x, position=encoding, index=N - 1), x
    )
    shapes = jax.tree.map(np.shape, cache["cache"])
    assert shapes == dict.fromkeys(("keys", "values"), (2, HEADS, length, HEAD_DIM))


@pytest.mark.quick("blocks-relative_key")
@pytest.mark.parametrize("position", ["relative_key", "relative_bias"])
@pytest.mark.usefixtures("form")
def test_window_with_tables_equals_a_mask(position):
    module, variables, _, encoding = causal_layer("softmax(window=3)", position)
    context = Context((N,), 0, encoding, None, None, None)
    offsets = np.arange(N)[:, None] - np.arange(N)

    @quick_jit
    def outs(q, k, v):
        layer = module.bind(variables)
        mask = jnp.broadcast_to(offsets < 3, (2, HEADS, N, N))
        attend = functools.partial(kernels.causal_relative_attention, mask=mask)
        expected = attend(q, k, v, **layer.tables(context))
        return layer.attend(q, k, v, context), expected

    np.testing.assert_allclose(
        *outs(*normal(0, 3, 2, HEADS, N, HEAD_DIM)), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(("window", "causal"), [(-1, True), (3, False)])
def test_invalid_windows_raise(window, causal):
    message = f"got window={window} and causal={causal}"
    with pytest.raises(ValueError, match=message):
        build(
            f"softmax(window={window})",
            "none",
            dim=DIM,
            num_heads=HEADS,
            num_layers=1,
            causal=causal,
        )


# Six heads with queries and two with keys and values.
SHARED = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 4}
SHARED_PAIRS = [
    ("softmax", "rope1d"),
    ("softmax", "relative_key"),
    ("softmax", "relative_value"),
    ("favor(features='trigonometric')", "none"),
    ("favor", "sincos_bias"),
    ("relu", "constrained_sincos"),
    ("hedgehog", "rotary_values"),
    ("hedgehog", "relative_bias"),
]


def repeat_keys(params):
    """Gives every head the keys, values and features that it shares with others."""

    def repeat(path, leaf):
        name = "".join(str(key.key) + "/" for key in path)
        if name.startswith(("k/", "v/")):
            heads = leaf.reshape(*leaf.shape[:-1], 2, 4)
            return np.repeat(heads, 3, axis=-2).reshape(*leaf.shape[:-1], 24)
        return np.repeat(leaf, 3, axis=0) if name.startswith("key_pro") else leaf

    return jax.tree_util.tree_map_with_path(repeat, params)


@pytest.mark.quick("True-softmax-rope1d", "True-hedgehog-rotary_values")
@pytest.mark.parametrize(("attention", "position"), SHARED_PAIRS)
@pytest.mark.parametrize("causal", [True, False])
def test_shared_keys_equal_keys_that_are_repeated(attention, position, causal):
    module, variables, x, encoding = causal_layer(
        attention, position, **SHARED | {"causal": causal}
    )
    # Matrices that start alike would hide which head has which.
    noise = normal(5, 997, scale=0.3)
    params = jax.tree.map(
        lambda leaf: leaf + np.resize(noise, leaf.shape), variables["params"]
    )
    options = {"key_mask": np.arange(2 * N).reshape(2, N) % 5 != 1}
    if module.takes_segments(encoding):
        options["segment_ids"] = np.arange(2 * N).reshape(2, N) // 4

    @quick_jit
    def results(params, repeated, x, options):
        def loss(params, x, module):
            out = module.apply(
                {**variables, "params": params},
                x,
                grid=(N,),
                position=encoding,
                **options,
            )
            return (jnp.cos(jnp.arange(out.size)) * out.ravel()).sum(), out

        grad = jax.grad(loss, (0, 1), has_aux=True)
        separate = module.clone(num_kv_heads=6)
        return grad(params, x, module), grad(repeated, x, separate)

    found, expected = results(params, repeat_keys(params), x, options)
    expected = jax.device_get(expected)
    # The gradient of what is shared is the sum of the copies' gradients.
    copies = expected[0][0]
    for name, leaf in copies.items():
        if name in ("k", "v"):
            copies[name] = jax.tree.map(
                lambda leaf: (
                    leaf.reshape(*leaf.shape[:-1], 2, 3, 4)
                    .sum(axis=-2)
                    .reshape(*leaf.shape[:-1], 8)
                ),
                leaf,
            )
        elif name == "key_projection":
            copies[name] = leaf.reshape(2, 3, *leaf.shape[1:]).sum(axis=1)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-5),
        found,
        expected,
    )


@pytest.mark.quick("softmax-rope1d", "hedgehog-rotary_values")
@pytest.mark.parametrize(("attention", "position"), SHARED_PAIRS)
def test_decoding_caches_shared_keys_once(attention, position):
    layer = causal_layer(attention, position, **SHARED)
    cache = expect_decoding_equals_full_attention(*layer)
    assert {leaf.shape[1] for leaf in jax.tree.leaves(cache)} == {2}
    # No axis of queries, which the cache would repeat.
    sizes = {leaf.shape[2] for leaf in jax.tree.leaves(cache) if leaf.ndim > 4}
    assert sizes <= {1}


@pytest.mark.parametrize("attention", ["softmax", "hedgehog"])
def test_later_tokens_do_not_change_shared_keys(attention):
    module, variables, x, _ = causal_layer(attention, "none", **SHARED)
    apply = quick_jit(functools.partial(module.apply, grid=(N,)))
    factors = np.where(np.arange(N) < 4, 1, -3).astype(np.float32)[:, None]
    out, changed = apply(variables, x), apply(variables, x * factors)
    np.testing.assert_array_equal(changed[:, :4], out[:, :4])
    half = module.clone(dtype=jnp.bfloat16)
    rounded = quick_jit(functools.partial(half.apply, grid=(N,)))(variables, x)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(rounded), out, atol=0.02)


@pytest.mark.parametrize(
    ("attention", "position", "num_kv_heads", "message"),
    [
        ("softmax", "none", 4, "num_kv_heads must divide num_heads, or be 0.*got.*=4"),
        ("softmax", "none", -1, "got num_kv_heads=-1 and num_heads=6"),
        ("banded", "none", 2, "heads of BandedAttention cannot share keys and values"),
        ("lor_translution", "none", 2, "choose num_kv_heads=0, or attention 'softmax'"),
        ("softmax", "learned + cayley_string", 2, "position 'cayley_string' encodes"),
        ("softmax", "rotary_values(learned=True)", 2, "choose num_kv_heads=0, or a"),
        ("hedgehog", "irpe_gate", 1, "of each head differently, got num_kv_heads=1"),
    ],
)
def test_keys_that_cannot_be_shared_raise(attention, position, num_kv_heads, message):
    sizes = {"dim": DIM, "num_heads": 6, "head_dim": 4, "num_layers": 1}
    with pytest.raises(ValueError, match=message):
        build(attention, position, num_kv_heads=num_kv_heads, **sizes)


def test_causal_attention_with_prefix_tokens_raises():
    module, variables, x, _ = causal_layer("softmax", "none")
    with pytest.raises(ValueError, match="causal attention takes no prefix.*got 1"):
        module.apply(variables, jax.device_put(x), grid=(2, 3), num_prefix=1)


@pytest.mark.parametrize(
    "attention, has_bias, options, what",
    [
        ("banded", False, {}, "attention 'banded' needs distances"),
        ("softmax", True, {}, "each offset"),
        ("favor", True, {}, "each offset"),
        ("softmax", False, {"causal": True}, "decoding needs the length of the cache"),
    ],
)
def test_attention_that_needs_a_grid_asks_for_it(attention, has_bias, options, what):
    make_attention, _ = build(
        attention, "none", dim=DIM, num_heads=HEADS, num_layers=1, **options
    )
    index = 0 if options else None
    position = RelativeTables(bias=jnp.zeros((HEADS, 13))) if has_bias else None
    init = functools.partial(
        make_attention(layer=0).init, position=position, index=index
    )
    with pytest.raises(ValueError, match=f"{what}.*: pass grid="):
        jax.eval_shape(init, jax.random.key(0), np.zeros((2, N, DIM), np.float32))


@pytest.mark.parametrize("grid", [N, [N], (float(N),)], ids=str)
@pytest.mark.parametrize("attention", ["softmax", "banded", "translution"])
def test_a_grid_that_is_no_tuple_of_sizes_raises(attention, grid):
    make, _ = build(attention, "none", dim=DIM, num_heads=HEADS, num_layers=1)
    init = functools.partial(make(layer=0).init, grid=grid)
    message = "grid must be a tuple of the sizes of its axes, such as"
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        jax.eval_shape(init, jax.random.key(0), np.ones((1, N, DIM), np.float32))


@pytest.mark.parametrize(
    ("causal", "grid", "message"),
    [
        (False, (N - 1,), "grid 6 with num_prefix=0 holds 6 tokens, got 7"),
        (False, (N + 1,), "grid 8 with num_prefix=0 holds 8 tokens, got 7"),
        (True, (N - 1,), r"the sequence of 7 tokens is longer than grid=\(6,\)"),
        (True, (N + 1,), None),
    ],
)
@pytest.mark.parametrize("position", ["none", "rope1d"])
def test_a_grid_for_other_tokens_raises(position, causal, grid, message):
    make_attention, make_position = build(
        "softmax", position, dim=DIM, num_heads=HEADS, num_layers=1, causal=causal
    )
    encoding = make_position().apply({}, grid, 0, method="per_layer")
    init = functools.partial(
        make_attention(layer=0).init,
        grid=grid,
        position=encoding[0] if encoding else None,
    )
    raises = pytest.raises(ValueError, match=message) if message else nullcontext()
    with raises:
        jax.eval_shape(init, jax.random.key(0), jnp.ones((1, N, DIM)))


@pytest.mark.parametrize("causal", [False, True])
def test_decoding_without_causal_or_with_a_mask_raises(causal):
    make_attention, _ = build(
        "softmax", "none", dim=DIM, num_heads=HEADS, num_layers=1, causal=causal
    )
    mask = jnp.ones((1, 1), bool) if causal else None
    init = functools.partial(make_attention(layer=0).init, index=0, key_mask=mask)
    with pytest.raises(ValueError, match="decoding needs causal=True and no key_mask"):
        jax.eval_shape(init, jax.random.key(0), np.ones((1, 1, DIM), np.float32))


@pytest.mark.parametrize(("n", "index"), [(1, N), (1, -1), (2, 3), (2, jnp.array(2))])
def test_decoding_outside_of_the_cache_or_the_prompt_raises(n, index):
    """A later part of the text is no prompt: prefill starts at position 0."""
    module, variables, x, _ = causal_layer("softmax", "none")
    x = jax.device_put(x[:, :n])
    decode = functools.partial(module.apply, variables, grid=(N,), mutable=["cache"])
    with pytest.raises(ValueError, match="must be the position of the last token, 0"):
        decode(x, index=index)
    traced = jax.jit(lambda index: decode(x, index=index)[0])
    assert np.isnan(traced(index)).all()
    assert np.isfinite(traced(n - 1)).all()


@pytest.mark.parametrize(
    ("attention", "position"),
    [("softmax", "none"), ("favor", "t5_bias"), ("lor_translution", "none")],
)
def test_the_cache_of_another_batch_raises(attention, position):
    """Some attentions would broadcast the missing rows of the batch."""
    module, variables, x, encoding = causal_layer(attention, position)
    decode = functools.partial(
        module.apply, grid=(N,), position=encoding, mutable=["cache"]
    )
    _, cache = decode(variables, jax.device_put(x), index=N - 2)
    with pytest.raises(ValueError, match="the cache has .* pass the cache of the same"):
        decode({**variables, **cache}, jax.device_put(x[:1, -1:]), index=N - 1)


@pytest.mark.parametrize("index", [2.0, True, np.float32(2)])
def test_a_position_in_decoding_is_a_whole_number(index):
    with pytest.raises(ValueError, match="index must be a whole number, got"):
        check_index(index, 1, (N,))


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((2, 1, 1, N), bool, r"expected \(7,\) or \(2, 7\)"),
        ((2, N - 1), bool, r"must have the same n, got shapes"),
        ((2, N), float, r"key_mask must be boolean, True where attention is allowed"),
    ],
)
def test_masks_of_other_shapes_raise(shape, dtype, message):
    """Flax's masks, with axes of heads and queries, would broadcast."""
    with pytest.raises(ValueError, match=message):
        finite_tokens(normal(1, 2, N, DIM), jnp.ones(shape, dtype))


def test_positions_of_all_layers_raise():
    module, variables, x, encoding = causal_layer("softmax", "rope1d")
    with pytest.raises(ValueError, match="encodings of all layers: pass the entry"):
        module.apply(variables, jnp.asarray(x), position=[encoding], grid=(N,))


@pytest.mark.parametrize("n", [1, 2])
def test_decoding_at_several_positions_raises(n):
    check = functools.partial(check_index, num_tokens=n, grid=(N,))
    for call in (check, functools.partial(jax.eval_shape, check)):
        with pytest.raises(ValueError, match=r"one position .* shape \(2,\): for"):
            call(jnp.array([0, 1]))


def test_vectors_are_cast_and_biases_stay_float32():
    vectors = jnp.ones((2, 5, 3))
    tables = {"key_table": vectors, "value_table": vectors}
    position = RelativeTables(**tables, bias=jnp.full((2, 5), 7.9))
    module = SoftmaxAttention(dim=6, num_heads=2, dtype=jnp.bfloat16)
    found = module.tables(Context((3,), 0, position, None, None, None))
    assert found["key_table"].dtype == found["value_table"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(found["bias"], position.bias)


def test_tables_are_split_by_the_heads_that_share_keys():
    tables = {
        "bias": np.arange(30).reshape(6, 5),
        # The same for all heads.
        "key_table": np.ones((5, 2)),
        "value_table": np.ones((1, 5, 2)),
    }
    module = SoftmaxAttention(dim=12, num_heads=6, num_kv_heads=2)
    position = types.SimpleNamespace(tables=jax.tree.map(jnp.float32, tables))
    found = module.tables(Context((3,), 0, position, None, None, None))
    np.testing.assert_array_equal(found["bias"], tables["bias"].reshape(2, 3, 5))
    assert found["key_table"].shape == (5, 2)
    assert found["value_table"].shape == (1, 1, 5, 2)


@pytest.mark.parametrize(
    "options", [{"causal": False}, {"causal": True, "features": "trigonometric"}, None]
)
def test_causal_positive_features_with_wide_heads_raise(options):
    def shapes(options):
        module = FavorAttention(dim=227, num_heads=1, num_features=3, **options)
        x = jax.ShapeDtypeStruct((1, 5, 227), jnp.float32)
        return jax.eval_shape(module.init, jax.random.key(0), x)

    if options is not None:
        assert shapes(options)["random_features"]
        return
    with pytest.raises(ValueError, match="positive features needs .* 224, got 227"):
        shapes({"causal": True})


@pytest.mark.quick("softmax")
@pytest.mark.parametrize("attention", ["softmax", f"favor(num_features={FEATURES})"])
def test_cross_attention_equals_the_kernel(attention):
    make, _ = build(attention, "none", dim=DIM, num_heads=HEADS, num_layers=1)
    module, rng = make(layer=0), np.random.default_rng(0)
    x, memory = (
        rng.normal(size=shape).astype(np.float32) for shape in ((3, N, DIM), (3, 11, 5))
    )
    key_mask = jax.device_put(np.arange(33).reshape(3, 11) % 4 != 1)

    @quick_jit
    def outs(key, x, memory):
        out, variables = module.init_with_output(
            key, x, memory=memory, key_mask=key_mask
        )
        params = variables["params"]
        q, k, v = (
            (tokens @ params[name]["kernel"] + params[name]["bias"])
            .reshape(*tokens.shape[:2], HEADS, HEAD_DIM)
            .swapaxes(1, 2)
            for name, tokens in (("q", x), ("k", memory), ("v", memory))
        )
        options = {"key_mask": key_mask[:, None]}
        if attention == "softmax":
            heads = kernels.softmax_attention(q, k, v, **options)
        else:
            feature_map = functools.partial(
                kernels.positive_features,
                projection=variables["random_features"]["projection"].projection,
            )
            heads = kernels.linear_attention(q, k, v, feature_map, **options)
        merged = heads.swapaxes(1, 2).reshape(3, N, DIM)
        return out, merged @ params["out"]["kernel"] + params["out"]["bias"]

    out, expected = outs(jax.random.key(0), x, memory)
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("attention", "options"), [("banded(clip=2)", {}), ("softmax", {"causal": True})]
)
def test_attention_without_a_cross_form_raises(attention, options):
    make, _ = build(
        attention, "none", dim=DIM, num_heads=HEADS, num_layers=1, **options
    )
    x = np.ones((1, N, DIM), np.float32)
    with pytest.raises(
        ValueError, match="takes no memory: cross-attention needs a non"
    ):
        jax.eval_shape(make(layer=0).init, jax.random.key(0), x, memory=x)


@pytest.mark.parametrize("num_kv_heads", [0, 2])
def test_masks_of_two_batch_axes_equal_those_of_one(num_kv_heads):
    heads = {"num_heads": 2 * HEADS, "num_kv_heads": num_kv_heads, "head_dim": 3}
    make, _ = build("softmax", "none", dim=DIM, num_layers=1, **heads)
    # As many examples in a row as heads, which the masks must not meet.
    x, rng = normal(1, 2 * HEADS, N, DIM), np.random.default_rng(0)
    masks = {
        "key_mask": rng.random((2 * HEADS, N)) < 0.7,
        "segment_ids": rng.integers(2, size=(2 * HEADS, N)),
    }

    @quick_jit
    def outs(key, x):
        module = make(layer=0)
        variables = module.init(key, x)
        rows = {k: mask.reshape(2, HEADS, N).tolist() for k, mask in masks.items()}
        rows["key_mask"] = jnp.array(rows["key_mask"])
        out = module.apply(variables, x.reshape(2, HEADS, N, DIM), **rows)
        return out.reshape(x.shape), module.apply(variables, x, **masks)

    with unchecked_annotations():
        out, expected = outs(jax.random.key(0), x)
    np.testing.assert_allclose(out, expected, atol=1e-6)


@pytest.mark.parametrize("num_kv_heads", [0, 1])
def test_queries_that_examples_share(num_kv_heads):
    heads = {"num_heads": HEADS, "num_kv_heads": num_kv_heads}
    make, _ = build("softmax", "none", dim=DIM, num_layers=1, **heads)
    queries, memory = normal(1, 1, N, DIM), normal(2, 3, 5, DIM)

    @quick_jit
    def outs(key, queries, memory):
        out, variables = make(layer=0).init_with_output(key, queries, memory=memory)
        queries = jnp.tile(queries, (3, 1, 1))
        return out, make(layer=0).apply(variables, queries, memory=memory)

    with unchecked_annotations():
        out, expected = outs(jax.random.key(0), queries, memory)
    np.testing.assert_allclose(out, expected, atol=1e-6)


def test_memory_of_other_batch_axes_raises():
    make, _ = build("softmax", "none", dim=DIM, num_heads=HEADS, num_layers=1)
    x = jnp.ones((2, N, DIM))
    message = "memory must have the batch axes of x, of size 1"
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        jax.eval_shape(make(layer=0).init, jax.random.key(0), x, memory=x[0])


@pytest.mark.quick("favor-none-True")
@pytest.mark.parametrize(
    ("attention", "position", "causal"),
    [
        ("softmax", "none", False),
        ("softmax", "rope1d", True),
        ("softmax", "relative_bias", False),
        ("softmax", "relative_bias", True),
        ("favor", "none", True),
        ("relu", "rope1d", True),
        ("hedgehog", "none", True),
    ],
)
def test_packed_sequences_equal_separate_ones(attention, position, causal):
    make, make_position = build(
        attention,
        position,
        dim=DIM,
        num_heads=HEADS,
        num_layers=1,
        causal=causal,
    )
    module, lengths = make(layer=0), (3, N - 3)
    x, ids = normal(1, 2, N, DIM), np.repeat([5, 2], lengths)

    @quick_jit
    def outs(key, x):
        encoding = None
        if position != "none":
            layers, tables = make_position().init_with_output(key, (N,), 0)
            encoding = layers[0]
            if position == "relative_bias":
                bias = jnp.sin(jnp.arange(encoding.bias.size, dtype=jnp.float32))
                encoding = encoding.replace(bias=bias.reshape(encoding.bias.shape))
        call = functools.partial(module.apply, grid=(N,), position=encoding)
        variables = module.init(key, x, grid=(N,), position=encoding)
        packed = call(variables, x, segment_ids=jnp.stack([ids, ids]))
        # Each sequence alone, at the end of a padded one, or at its start.
        first = call(variables, x, key_mask=jnp.stack([ids == 5] * 2))
        second = call(variables, x, key_mask=jnp.stack([ids == 2] * 2))
        return packed, jnp.concatenate([first[:, :3], second[:, 3:]], axis=1)

    packed, expected = outs(jax.random.key(0), x)
    np.testing.assert_allclose(packed, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("attention", "position", "causal"),
    [("favor", "none", False), ("favor", "relative_bias", True)],
)
def test_attention_that_cannot_separate_sequences_raises(attention, position, causal):
    make, make_position = build(
        attention, position, dim=DIM, num_heads=HEADS, num_layers=1, causal=causal
    )

    def init(key):
        layer, x, ids = None, jnp.ones((1, N, DIM)), jnp.zeros((1, N), int)
        if position != "none":
            layer = make_position().init_with_output(key, (N,), 0)[0][0]
        return make(layer=0).init(key, x, position=layer, segment_ids=ids)

    with pytest.raises(ValueError, match="cannot separate packed sequences here: leav"):
        jax.eval_shape(init, jax.random.key(0))


@pytest.mark.parametrize(
    ("attention", "position"),
    [
        ("softmax", "rope1d"),
        ("softmax", "irpe_gate"),
        ("softmax", "relative_key"),
        ("relu", "relative_bias"),
        ("favor", "string_gate"),
        ("lor_translution(rank=2)", "learned"),
        ("routing(clusters=2)", "learned"),
    ],
)
def test_heads_may_have_any_width(attention, position):
    make, make_position = build(
        attention, position, dim=7, num_heads=3, num_layers=1, head_dim=4
    )
    module, x = make(layer=0), jnp.ones((1, 6, 7))

    def init(key):
        layer = None
        if position != "learned":
            layer = make_position().init_with_output(key, (6,), 0)[0][0]
        return module.init_with_output(key, x, grid=(6,), position=layer)

    out, variables = jax.eval_shape(init, jax.random.key(0))
    assert out.shape == x.shape
    assert variables["params"]["out"]["kernel"].shape == (12, 7)
    with pytest.raises(ValueError, match="num_heads must divide dim unless"):
        build(attention, "none", dim=7, num_heads=3, num_layers=1)

"""Tests the registry of attentions and positions, and its errors."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn.kernels import softmax_attention
from relattn.models import GPT, ViT, generate
from relattn.nn.attention import MultiHeadAttention
from relattn.nn.positions.base import LayerPosition, Position
from relattn.nn.registry import build, register_attention, register_position
from tests.helpers.export import unchecked_annotations
from tests.helpers.quick import quick_jit

SIZES = {"dim": 24, "num_heads": 4, "num_layers": 1}


@pytest.mark.parametrize(
    ("attention", "position", "sizes", "message"),
    [
        ("favour", "none", {}, "unknown attention 'favour': did you mean 'favor'?"),
        ("favor", "sincoz", {}, "unknown position 'sincoz': did you mean"),
        ("favor(num_feature=3)", "none", {}, "did you mean 'num_features'?"),
        ("favor(dim=3)", "none", {}, "attention 'favor' has no option 'dim'"),
        ("favor(features='relo')", "none", {}, "features 'relo': did you mean 'relu'"),
        (
            "favor(features='trigonometric', eps=0.1)",
            "none",
            {},
            "trigonometric features may be negative and take no eps: leave out eps=0.1",
        ),
        ("banded(eps=-0.1)", "none", {}, "need eps >= 0, got eps=-0.1"),
        ("favor(features='relu', eps=0.0)", "none", {}, "need eps > 0, got eps=0.0"),
        ("favor(norms='ch')", "none", {}, "unknown norms 'ch': did you mean 'chi'?"),
        ("favor(num_features=-1)", "none", {}, "num_features must be at least 1, or 0"),
        ("favor", "none(x=1)", {}, "position 'none' has no option 'x': it takes none"),
        (
            "banded",
            "constrained_sincos",
            {},
            "position 'constrained_sincos' acts at the site 'heads', which attention "
            "'banded' does not support: it takes position none, learned, sincos",
        ),
        (
            "favor",
            "learned + relative_key",
            {},
            "position 'relative_key' acts at the site 'pairs', which attention 'favor'",
        ),
        (
            "softmax",
            "rope2d(base=10.0) + learned + relative_bias",
            {},
            "has 2 terms that reach the attention: a sum takes one for",
        ),
        ("softmax", "learned + ropes", {}, "unknown position 'ropes': did you mean"),
        (
            "softmax",
            "none",
            {"num_heads": 5},
            "num_heads must divide dim unless",
        ),
        ("banded", "none", {"num_heads": 3}, "half of which are position heads, got 3"),
        ("banded(clip=0)", "none", {}, "needs clip >= 1, got 0"),
        ("banded(cls='cls')", "none", {}, "unknown cls 'cls' of attention 'banded'"),
        (
            "banded",
            "none",
            {"causal": True},
            "attention 'banded' has no causal form: choose from softmax, favor",
        ),
        ("banded(position_heads=5)", "none", {}, "has 4 heads, got position_heads=5"),
    ],
)
def test_invalid_specs_raise(attention, position, sizes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build(attention, position, **{**SIZES, **sizes})


def test_options_reach_the_modules():
    attention, position = build(
        "favor(num_features=7, norms='fixed')",
        "constrained_sincos(num_scales=2)",
        **SIZES,
    )
    module = attention(layer=3)
    assert (module.num_features, module.norms, module.layer) == (7, "fixed", 3)
    assert position().num_scales == 2 and position().num_heads == 4


def test_a_sum_adds_to_tokens_and_returns_layers():
    _, position = build(
        "softmax",
        "learned + rope2d(base=7.0) + sincos",
        **{**SIZES, "num_heads": 2},
    )
    module = position()
    learned, rope, sincos = module.makers
    assert rope.keywords == {"base": 7.0}
    tokens = jnp.zeros((1, 6, 24))
    variables = module.init(jax.random.key(0), tokens, (2, 3), method="add_to_tokens")
    out = module.apply(variables, tokens, (2, 3), method="add_to_tokens")
    table = variables["params"]["terms_0"]["table"]
    expected = sincos(dim=24).apply({}, tokens, (2, 3)) + table
    np.testing.assert_allclose(out, expected, atol=1e-6)
    (layer,) = module.apply(variables, (2, 3), 1, method="per_layer")
    assert layer.angles.shape == (7, 6)


class SharpAttention(MultiHeadAttention):
    sharpness: float = 1.0

    def attend(self, q, k, v, context):
        return softmax_attention(self.sharpness * q, k, v, key_mask=context.key_mask)


@pytest.fixture
def registered(registries):
    register_attention("sharp", SharpAttention)


def make_vit(attention):
    return ViT(3, attention=attention, patch_size=2, **SIZES)


@pytest.mark.usefixtures("registered")
def test_a_model_uses_a_registered_attention():
    images = jax.random.normal(jax.random.key(0), (2, 6, 4, 1))
    variables = quick_jit(make_vit("sharp").init)(jax.random.key(1), images)
    # Layers are not scanned by default.
    assert "block_0" in variables["params"]
    once, thrice = (
        quick_jit(make_vit(f"sharp(sharpness={factor})").apply)(variables, images)
        for factor in (1.0, 3)
    )
    assert not np.allclose(once, thrice)
    params = {**variables["params"]}
    params["blocks_0"] = jax.tree.map(lambda x: x[None], params.pop("block_0"))
    plain = quick_jit(make_vit("softmax").apply)({"params": params}, images)
    np.testing.assert_allclose(once, plain, atol=1e-5)


@pytest.mark.usefixtures("registered")
def test_a_registered_attention_has_only_the_declared_features():
    with pytest.raises(ValueError, match="'sharpnes': did you mean 'sharpness'"):
        build("sharp(sharpnes=2.0)", "none", **SIZES)
    with pytest.raises(ValueError, match="'heads', which attention 'sharp' does not"):
        build("sharp", "rope2d", **SIZES)
    with pytest.raises(ValueError, match="attention 'sharp' has no causal form"):
        build("sharp", "none", **SIZES, causal=True)

    class CausalAttention(SharpAttention):
        has_causal_form = True

    # A notebook may run a cell again.
    register_attention("sharp", CausalAttention)
    gpt = GPT(5, 7, attention="sharp", **SIZES)
    tokens = jnp.zeros((1, 1), jnp.int32)
    variables = quick_jit(gpt.init)(jax.random.key(0), tokens)
    with pytest.raises(NotImplementedError, match="CausalAttention cannot decode"):
        generate(gpt, variables, tokens, 2, key=jax.random.key(1))


@pytest.mark.usefixtures("registered")
def test_compiled_functions_have_the_class_that_was_registered_last():
    @functools.partial(jax.jit, static_argnums=0)
    def sharpen(vit, x):
        (make, _) = build(vit.attention, "none", **SIZES)
        return make(parent=None).sharpness * x

    assert sharpen(make_vit("sharp"), 3.0) == 3

    class SharperAttention(SharpAttention):
        sharpness: float = 2.0

    register_attention("sharp", SharperAttention)
    assert sharpen(make_vit("sharp"), 3.0) == 6


@pytest.mark.parametrize("name", ["softmax", "rope2d", "my attention", ""])
def test_registering_an_invalid_name_raises(name):
    with pytest.raises(ValueError, match="cannot be registered: choose a Python id"):
        register_attention(name, SharpAttention)
    with pytest.raises(ValueError, match="cannot be registered: choose a Python id"):
        register_position(name, Position)


def test_registering_another_class_raises():
    with pytest.raises(TypeError, match="'mine' needs a subclass of relattn.MultiHead"):
        register_attention("mine", Position)
    with pytest.raises(TypeError, match="'mine' needs a subclass of relattn.Position"):
        register_position("mine", SharpAttention)


def attention_of(**members):
    return type("Mine", (MultiHeadAttention,), members)


def position_of(**members):
    return type("Mine", (Position,), members)


@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize(
    ("register", "module", "message"),
    [
        (register_attention, attention_of(), "Mine must define attend, from .* or mix"),
        (
            register_attention,
            attention_of(attend=SharpAttention.attend, sites=("tokns",)),
            "unknown site 'tokns' in Mine.sites: did you mean 'tokens'",
        ),
        (
            register_attention,
            attention_of(attend=SharpAttention.attend, sites="none"),
            "Mine.sites must be a tuple, such as .*, got 'none'",
        ),
        (
            register_position,
            position_of(site="tokens"),
            "Mine does not define __call__",
        ),
        (
            register_position,
            position_of(__call__=lambda self, grid, num_prefix: []),
            "Mine needs a site, one of tokens, heads",
        ),
        (register_position, position_of(site="head"), "site 'head' of Mine: did you"),
    ],
)
def test_a_class_without_a_part_is_not_registered(register, module, message):
    with pytest.raises(ValueError, match=message):
        register("mine", module)


@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize(
    ("attend", "found"),
    [
        (lambda self, q, k, v, context: v[..., :1], r"shape \(2, 4, 5, 1\)"),
        (lambda self, q, k, v, context: v[..., :1, :], r"shape \(2, 4, 1, 6\)"),
        (lambda self, q, k, v, context: v.mean(axis=1), r"shape \(2, 5, 6\)"),
        (lambda self, q, k, v, context: None, "None"),
        (lambda self, q, k, v, context: (v, q), r"\(.*"),
    ],
)
def test_heads_of_another_shape_are_refused(attend, found):
    """A sum over the width, or one token for all, would broadcast silently."""
    register_attention("mine", attention_of(attend=attend))
    attention = build("mine", "none", **SIZES)[0](layer=0)
    message = rf"heads of Mine returned {found}, expected \[batch, 4, 5, 6\]"
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        attention.init(jax.random.key(0), jnp.ones((2, 5, 24)))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (LayerPosition(), "returned a LayerPosition, expected a list of 2 relattn"),
        ([LayerPosition()], "returned a list of 1 LayerPosition, expected a list of 2"),
        ([np.zeros(3)] * 2, "returned a list of 2 ndarray, expected a list of 2"),
        ([], "returned a list of 0, expected a list of 2"),
        (None, "returned a NoneType, expected a list of 2"),
    ],
)
def test_a_position_for_other_layers_is_refused(returned, message):
    kind = position_of(site="heads", __call__=lambda self, grid, num_prefix: returned)
    with pytest.raises(ValueError, match=f"^position Mine {message}"):
        kind(dim=24, num_heads=4, num_layers=2).per_layer((2, 3), 0)


@pytest.mark.parametrize("shape", [(6, 24), (1, 24), (1, 6, 24), (2, 6, 1)])
def test_tokens_of_another_shape_are_refused(shape):
    """Some of them would broadcast."""
    kind = position_of(site="tokens", __call__=lambda self, x, grid: jnp.ones(shape))
    with pytest.raises(ValueError, match=r"the tokens have \(2, 6, 24\): return the"):
        kind(dim=24, num_heads=4).add_to_tokens(jnp.ones((2, 6, 24)), (2, 3))

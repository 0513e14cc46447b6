"""Exports layers and models with symbolic sizes, and runs them at other sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from relattn.models import build_model
from relattn.nn import ATTENTIONS, POSITIONS, build
from relattn.nn.nnx import MultiHeadAttention
from tests.helpers.export import PLATFORMS, export
from tests.helpers.quick import quick_jit
from tests.helpers.specs import CAUSAL, ON_PLANES, small

GRID, N, DIM, HEADS = (2, 3), 7, 8, 2
SIZES = {"dim": 8, "num_layers": 2, "num_heads": HEADS, "mlp_dim": 11}
VOCAB, CONTEXT = 13, 7


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def draw_tokens(*shape):
    tokens = np.random.default_rng(0).integers(0, VOCAB, shape, np.int32)
    return jnp.asarray(tokens)


def expect_same(function, example, symbols, inputs, constraints=()):
    """Exports ``function(variables, x)``; compares it with calls at other sizes."""
    variables, dtype = example
    shape = jax.export.symbolic_shape(symbols, constraints=constraints)
    x = jax.ShapeDtypeStruct(shape, dtype)
    exported = export(function, variables, x)
    assert exported.platforms == PLATFORMS
    for x in inputs:
        out, expected = exported.call(variables, x), quick_jit(function)(variables, x)
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTENTIONS)
def test_linen_layer(name):
    make, _ = build(small(name), "none", dim=DIM, num_heads=HEADS, num_layers=2)
    layer, call = make(layer=1), {"grid": GRID, "num_prefix": 1}
    init = quick_jit(functools.partial(layer.init, **call))
    variables = init(jax.random.key(0), draw(2, N, DIM))

    def apply(variables, x):
        return layer.apply(variables, x, **call)

    batches = [draw(3, N, DIM), draw(5, N, DIM)]
    expect_same(apply, (variables, jnp.float32), f"b, {N}, {DIM}", batches)


@pytest.mark.quick("favor-False")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "name",
    ["softmax", "favor", "relu", "favor(features='trigonometric')"],
)
def test_linen_layer_of_any_length(name, causal):
    make, _ = build(name, "none", dim=DIM, num_heads=HEADS, num_layers=1, causal=causal)
    layer = make()
    variables = quick_jit(layer.init)(jax.random.key(0), draw(2, N, DIM))
    # Longer than a chunk of causal linear attention.
    inputs = [draw(2, 5, DIM), draw(3, 131, DIM)]
    expect_same(layer.apply, (variables, jnp.float32), f"b, n, {DIM}", inputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTENTIONS)
def test_nnx_layer(name):
    layer = MultiHeadAttention(
        small(name), dim=DIM, num_heads=HEADS, grid=GRID, num_prefix=1,
        rngs=nnx.Rngs(0),
    )  # fmt: skip
    layer.eval()

    def apply(_, x):
        return layer(x)

    batches = [draw(3, N, DIM), draw(5, N, DIM)]
    expect_same(apply, ((), jnp.float32), f"b, {N}, {DIM}", batches)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["softmax", "favor", "relu"])
def test_nnx_layer_of_any_length(name):
    layer = MultiHeadAttention(name, dim=DIM, num_heads=HEADS, rngs=nnx.Rngs(0))
    inputs = [draw(2, 5, DIM), draw(3, 11, DIM)]
    expect_same(lambda _, x: layer(x), ((), jnp.float32), f"b, n, {DIM}", inputs)


def expect_same_model(name, symbols, inputs, constraints=(), options=(), **sizes):
    model = build_model({"name": name, **dict(options)}, **sizes)
    variables = quick_jit(model.init)(jax.random.key(0), inputs[0])
    example = (variables, inputs[0].dtype)
    expect_same(model.apply, example, symbols, inputs, constraints)


VIT = [
    *((small(name), "none") for name in ATTENTIONS),
    *(("softmax", name) for name in POSITIONS if name != "none"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "position"), VIT)
def test_vit(attention, position):
    sizes = {"patch_size": 4, "dim": 16}
    options = {**SIZES, **sizes, "attention": attention, "position": position}
    images = [draw(batch, 12, 8, 1) for batch in (3, 5)]
    shape = {"num_classes": 3, "image_shape": (12, 8, 1)}
    expect_same_model("vit", "b, 12, 8, 1", images, options=options, **shape)


@pytest.mark.quick("attention")
@pytest.mark.parametrize("pool", ["mean", "cls_mean", "attention", "polyphase"])
def test_vit_with_other_pools(pool):
    options = {**SIZES, "patch_size": 4, "dim": 16, "pool": pool}
    if pool == "polyphase":
        options |= {"pool": "mean", "periodic": True, "anchor": pool}
    images = [draw(batch, 12, 8, 1) for batch in (3, 5)]
    shape = {"num_classes": 3, "image_shape": (12, 8, 1)}
    expect_same_model("vit", "b, 12, 8, 1", images, options=options, **shape)


@pytest.mark.slow
def test_points():
    points = [draw(batch, 7, 3) for batch in (3, 5)]
    shape = {"num_classes": 3, "point_shape": (7, 2, 1)}
    options = {**SIZES, "position": "fourier_values"}
    expect_same_model("point_transformer", "b, 7, 3", points, options=options, **shape)


GPTS = [
    *((small(name), "none") for name in CAUSAL),
    *(("softmax", name) for name in POSITIONS if name not in ("none", *ON_PLANES)),
    ("favor", "relative_bias"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "position"), GPTS)
def test_gpt(attention, position):
    options = {**SIZES, "attention": attention, "position": position}
    tokens = [draw_tokens(batch, CONTEXT) for batch in (3, 5)]
    shape = {"vocab_size": VOCAB, "context_length": CONTEXT}
    expect_same_model("gpt", f"b, {CONTEXT}", tokens, options=options, **shape)


LENGTHS = [
    ("favor", "none"),
    *(("softmax", name) for name in POSITIONS if name not in ON_PLANES),
]


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "position"), LENGTHS)
def test_gpt_of_any_length_up_to_its_context(attention, position):
    options = {**SIZES, "attention": attention, "position": position}
    tokens = [draw_tokens(3, 5), draw_tokens(2, CONTEXT)]
    shape = {"vocab_size": VOCAB, "context_length": CONTEXT}
    bounds = [f"n <= {CONTEXT}"]
    expect_same_model("gpt", "b, n", tokens, bounds, options=options, **shape)


def test_a_symbolic_length_needs_the_bound_of_the_context():
    model = build_model(
        {"name": "gpt", **SIZES}, vocab_size=VOCAB, context_length=CONTEXT
    )
    variables = quick_jit(model.init)(jax.random.key(0), draw_tokens(1, CONTEXT))
    tokens = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, n"), jnp.int32)
    with pytest.raises(ValueError, match=r'constraints=\["n <= 7"\]'):
        export(model.apply, variables, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "alexnet", "vgg16"])
def test_cnn(name):
    images = [draw(batch, 32, 32, 1) for batch in (2, 3)]
    shape = {"num_classes": 3, "image_shape": (32, 32, 1)}
    expect_same_model(name, "b, 32, 32, 1", images, **shape)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "position"),
    [("softmax", "rope1d"), ("favor", "none"), ("translution", "none")],
)
def test_decoding_step(attention, position):
    model = build_model(
        {"name": "gpt", **SIZES, "attention": attention, "position": position},
        vocab_size=VOCAB, context_length=CONTEXT,
    )  # fmt: skip
    tokens = draw_tokens(3, CONTEXT)
    variables = quick_jit(model.init)(jax.random.key(0), tokens)

    def decode(variables, tokens):
        """Prefills with all but the last token, then decodes that one."""
        _, cache = model.apply(variables, tokens, index=CONTEXT - 2, mutable=["cache"])
        both = {**variables, **cache}
        last = tokens[:, -1:]
        return model.apply(both, last, index=CONTEXT - 1, mutable=["cache"])[0]

    inputs = [tokens, draw_tokens(2, CONTEXT)]
    expect_same(decode, (variables, jnp.int32), f"b, {CONTEXT}", inputs)

"""Tests Performer, ViT and GPT: formulas, and the options passed to blocks."""

import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn.models import build_model
from tests import reference
from tests.helpers.quick import quick_jit

SIZES = {
    "dim": 12,
    "num_layers": 2,
    "num_heads": 2,
    "mlp_dim": 17,
    "attention": "softmax",
}
VOCAB, LENGTH, CLASSES = 13, 7, 5
MODELS = ("performer", "vit", "gpt")
RNG = np.random.default_rng(0)
IMAGES = 0.02 * RNG.random((3, 4, 6, 1), np.float32)
TOKENS = RNG.integers(0, VOCAB, (3, LENGTH), np.int32)
# These write to the residual stream: so small that the epsilon of norms matters.
WRITERS = re.compile(r"cls|position|embedding'|'out'")


def make(name, **options):
    """Returns a model, random variables and inputs."""
    config = {"name": name, **SIZES, **options}
    if name == "gpt":
        model = build_model(config, vocab_size=VOCAB, context_length=LENGTH)
        inputs = TOKENS
    else:
        config["patch_size"] = 2
        model = build_model(config, num_classes=CLASSES, image_shape=(4, 6, 1))
        inputs = IMAGES
    rng = np.random.default_rng(1)

    def draw(path, leaf):
        small = WRITERS.search(jax.tree_util.keystr(path))
        values = rng.normal(size=leaf.shape) * (0.01 if small else 0.3)
        return values.astype(leaf.dtype)

    shapes = jax.eval_shape(model.init, jax.random.key(0), inputs)
    variables = jax.tree_util.tree_map_with_path(draw, shapes)
    return model, variables, jax.device_put(inputs)


def blocks(x, params, allowed):
    for layer in range(SIZES["num_layers"]):
        if "blocks_0" in params:
            block = jax.tree.map(operator.itemgetter(layer), params["blocks_0"])
        else:
            block = params[f"block_{layer}"]
        x = reference.transformer_block(x, block, SIZES["num_heads"], allowed)
    return x


def patches(image):
    rows = range(0, image.shape[0], 2)
    columns = range(0, image.shape[1], 2)
    return jnp.stack(
        [image[i : i + 2, j : j + 2].reshape(-1) for i in rows for j in columns]
    )


def naive_performer(image, params):
    x = reference.linear(patches(image), params["embedding"])
    x = jnp.concatenate([params["cls"][0], x + params["position"]["table"]])
    x = blocks(x, params, np.ones((7, 7), bool))
    return reference.linear(x[0], params["head"])


def naive_vit(image, params):
    x = reference.layer_norm(patches(image), params["patch_norm"])
    x = reference.linear(x, params["embedding"])
    x = reference.layer_norm(x, params["embedding_norm"])
    x = jnp.concatenate([params["cls"][0], x + params["position"]["table"]])
    x = blocks(x, params, np.ones((7, 7), bool))
    cls = reference.layer_norm(x[:1], params["norm"])[0]
    cls = reference.gelu(reference.linear(cls, params["hidden"]))
    return reference.linear(cls, params["head"])


def naive_gpt(tokens, params):
    x = params["embedding"]["embedding"][tokens] + params["position"]["table"]
    x = blocks(x, params, np.tril(np.ones((LENGTH, LENGTH), bool)))
    x = reference.layer_norm(x, params["norm"])
    x = reference.layer_norm(x, params["head_norm"])
    return reference.linear(x, params["head"])


def llama_blocks(x, params, allowed, rotate=lambda x: x):
    """Blocks of RMSNorm and SwiGLU, whose two heads share keys and values."""
    for layer in range(SIZES["num_layers"]):
        block = jax.tree.map(operator.itemgetter(layer), params["blocks_0"])
        attention = block["attention"]
        y = reference.rms_norm(x, block["attention_norm"]["scale"])
        q, k, v = (reference.linear(y, attention[name]) for name in "qkv")
        heads = [
            reference.softmax_attention(rotate(query), rotate(k), v, allowed)
            for query in jnp.split(q, 2, axis=1)
        ]
        x = x + reference.linear(jnp.concatenate(heads, axis=1), attention["out"])
        y = reference.rms_norm(x, block["feed_forward_norm"]["scale"])
        x = x + reference.swiglu(y, block["feed_forward"])
    return x


def naive_llama(tokens, params):
    x, positions = params["embedding"]["embedding"][tokens], np.arange(LENGTH)[:, None]
    causal = np.tril(np.ones((LENGTH, LENGTH), bool))
    x = llama_blocks(x, params, causal, lambda x: reference.rotary(x, positions, 100.0))
    return reference.linear(
        reference.rms_norm(x, params["norm"]["scale"]), params["head"]
    )


def naive_modern_vit(image, params):
    x = reference.rms_norm(patches(image), params["patch_norm"]["scale"])
    x = reference.linear(x, params["embedding"])
    x = reference.rms_norm(x, params["embedding_norm"]["scale"])
    x = jnp.concatenate([params["cls"][0], x + params["position"]["table"]])
    x = reference.rms_norm(x, params["pre_norm"]["scale"])
    x = llama_blocks(x, params, np.ones((7, 7), bool))
    cls = reference.rms_norm(x[:1], params["norm"]["scale"])[0]
    return reference.linear(cls, params["head"])


MODERN = {
    "norm_type": "rms_norm",
    "activation": "swiglu",
    "out_bias": False,
    "mlp_bias": False,
    "num_kv_heads": 1,
}
LLAMA = {**MODERN, "position": "rope1d(base=100.0)", "head_norm": False}


@pytest.mark.quick(
    "performer-options0-naive_performer",
    "gpt-options3-naive_llama",
    "vit-options4-naive_modern_vit",
)
@pytest.mark.parametrize(
    "name, options, naive",
    [
        ("performer", {}, naive_performer),
        ("vit", {"head": "mlp"}, naive_vit),
        ("gpt", {}, naive_gpt),
        ("gpt", LLAMA, naive_llama),
        ("vit", {**MODERN, "pre_norm": True}, naive_modern_vit),
    ],
)
def test_logits_equal_the_formula(name, options, naive):
    model, variables, inputs = make(name, **{"position": "learned"} | options)
    logits = quick_jit(model.apply)(variables, inputs)
    with jax.enable_x64(True):
        params = jax.tree.map(np.float64, variables["params"])
        inputs = np.asarray(inputs) if name == "gpt" else np.float64(inputs)
        expected = quick_jit(jax.vmap(naive, (0, None)))(inputs, params)
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.quick(
    "attention_dropout-performer", "attention_dropout-vit", "attention_dropout-gpt"
)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rate", ["attention_dropout", "dropout"])
def test_each_dropout_acts_alone(name, rate):
    model, variables, inputs = make(name, num_layers=1, **{rate: 0.5})

    @quick_jit
    def apply(variables):
        rngs = {"dropout": jax.random.key(0)}
        dropped = model.apply(variables, inputs, deterministic=False, rngs=rngs)
        return model.apply(variables, inputs), dropped

    plain, dropped = apply(variables)
    assert np.abs(dropped - plain).max() > 1e-3 * np.abs(plain).max()


@pytest.mark.quick("performer", "gpt")
@pytest.mark.parametrize("name", MODELS)
def test_remat_saves_less_for_the_backward_pass(name):
    def kept(remat):
        model, variables, inputs = make(name, remat=remat)

        def pull_back(variables):
            return jax.vjp(lambda x: model.apply(x, inputs), variables)[1]

        residuals = jax.eval_shape(pull_back, variables)
        return sum(leaf.size for leaf in jax.tree.leaves(residuals))

    assert kept(True) < kept(False)


@pytest.mark.quick("performer")
@pytest.mark.parametrize("name", MODELS)
def test_tokens_start_as_standard_normals(name):
    """Tests the CLS token, and the embeddings of text."""
    model, _, inputs = make(name, dim=200, num_layers=1)

    @jax.jit
    def init(key):
        params = model.init(key, inputs)["params"]
        return params["embedding"]["embedding"] if name == "gpt" else params["cls"]

    values = init(jax.random.key(0))
    # Within four standard errors.
    assert abs(values.std() - 1) < 4 / (2 * values.size) ** 0.5

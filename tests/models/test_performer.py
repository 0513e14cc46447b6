"""Tests the pixel Performer and its construction from a config."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from relattn.models import build_model
from relattn.models.patches import extract_patches
from tests.helpers.quick import quick_jit, run

CONFIG = {
    "name": "performer",
    "dim": 16,
    "num_layers": 2,
    "num_heads": 2,
    "mlp_dim": 24,
}
SHAPE = (4, 6, 1)
# tests/test_pairs.py has further pairs.
VARIANTS = [
    ("favor", "constrained_sincos(content_conditioned=True)"),
    ("favor", "constrained_sincos(content_modulated=True)"),
    ("banded(clip=2, position_heads=2)", "learnable_sincos"),
]


def make(**options):
    model = build_model({**CONFIG, **options}, num_classes=3, image_shape=SHAPE)
    images = jax.device_put(np.random.default_rng(1).random((5, *SHAPE), np.float32))
    return model, quick_jit(model.init)(jax.random.key(0), images[:1]), images


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "position"), VARIANTS)
def test_every_parameter_has_a_gradient(attention, position):
    model, variables, images = make(attention=attention, position=position)
    params = variables.pop("params")
    # Zero tables and biases would hide parameters behind them.
    leaves, structure = jax.tree.flatten(params)
    rng = np.random.default_rng(2)
    noise = [0.3 * rng.standard_normal(leaf.shape, np.float32) for leaf in leaves]
    params = jax.tree.map(np.add, params, structure.unflatten(noise))

    def loss(params):
        logits = model.apply({"params": params, **variables}, images)
        return jnp.square(logits - 1.0).sum()

    value, gradients = quick_jit(jax.value_and_grad(loss))(params)
    assert jnp.isfinite(value)
    # softmax(q.(k + b)) does not depend on b: its gradient is rounding.
    unused = [r"\['k'\]\['bias'\]"]
    if attention.startswith("banded"):
        # The head reads only CLS, which is at the same distance from all tokens.
        unused += [r"block_1.*\['table'\]", r"block_1.*\['q'\]"]
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        name = jax.tree_util.keystr(path)
        if not any(re.search(pattern, name) for pattern in unused):
            assert jnp.abs(leaf).max() > 1e-6, name


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "position"), VARIANTS)
def test_an_example_does_not_depend_on_its_batch(attention, position):
    model, variables, images = make(attention=attention, position=position)
    apply = quick_jit(model.apply)
    logits = apply(variables, images)
    others = np.concatenate([images[:1], 0 * images[1:] + 17])
    np.testing.assert_array_equal(apply(variables, others)[0], logits[0])


@pytest.mark.slow
def test_without_position_the_model_is_permutation_invariant():
    model, variables, images = make(attention="favor", position="none")
    apply = quick_jit(model.apply)
    logits = apply(variables, images)
    shuffled = np.asarray(images)[:, :, [3, 0, 5, 1, 4, 2]]
    chex.assert_trees_all_close(apply(variables, shuffled), logits, atol=1e-5)
    model, variables, images = make(attention="favor", position="constrained_sincos")
    apply = quick_jit(model.apply)
    logits = apply(variables, images)
    assert not np.allclose(apply(variables, shuffled), logits, atol=1e-3)


def test_config_dicts_are_accepted():
    config = ConfigDict(CONFIG).lock()
    assert build_model(config, num_classes=3, image_shape=SHAPE).num_layers == 2


@pytest.mark.slow
def test_layers_draw_different_projections():
    _, variables, _ = make(attention="favor")
    features = jax.tree.leaves(variables["random_features"])
    assert len(features) == 2
    assert not np.allclose(features[0], features[1])


@pytest.mark.slow
def test_dropout_acts_only_in_training():
    model, variables, images = make(dropout=0.5, attention_dropout=0.5)
    evaluate, apply = (
        quick_jit(model.apply),
        quick_jit(model.apply, deterministic=False),
    )
    np.testing.assert_array_equal(
        evaluate(variables, images), evaluate(variables, images)
    )
    outs = [
        apply(variables, images, rngs={"dropout": jax.random.key(s)}) for s in (0, 1)
    ]
    assert not np.allclose(*outs)


@pytest.mark.slow
def test_bfloat16_models_have_float32_parameters_and_logits():
    model, variables, images = make(
        dtype="bfloat16", attention="favor", position="constrained_sincos"
    )
    logits = quick_jit(model.apply)(variables, images)
    assert logits.dtype == jnp.float32 and jnp.isfinite(logits).all()
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {np.dtype("float32")}


def test_patches_are_in_row_major_order():
    images = np.float32(np.arange(2 * 4 * 6).reshape(2, 4, 6, 1))
    tokens, grid = run(lambda images: extract_patches(images, 2), images)
    assert grid == (2, 3) and tokens.shape == (2, 6, 4)
    np.testing.assert_array_equal(tokens[1, 4], images[1, 2:4, 2:4, 0].reshape(-1))
    tokens, grid = run(lambda images: extract_patches(images, [4, 2]), images)
    assert grid == (1, 3) and tokens.shape == (2, 3, 8)
    np.testing.assert_array_equal(tokens[1, 2], images[1, :, 4:, 0].reshape(-1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "preformer"}, "unknown model name 'preformer': did you mean 'perfo"),
        ({"patchsize": 2}, "no option 'patchsize': did you mean 'patch_size'?"),
        ({"patch_size": 3}, "patch_size=3 does not divide the image of 4x6 pixels"),
        ({"patch_size": (2, 5)}, "patch_size=(2, 5) does not divide the image of 4x6"),
        ({"patch_size": (2, 3, 1)}, "must be a whole number of pixels, or two"),
        (
            {"num_heads": 3},
            "num_heads must divide dim unless",
        ),
        ({"attention": "banded(clip=0)"}, "needs clip >= 1, got 0"),
        ({"attention": "favour"}, "unknown attention 'favour': did you mean 'favor'?"),
        ({"position": "lernable_sincos"}, "did you mean 'learnable_sincos'?"),
        ({"dtype": "float33"}, "dtype must be one of float32, bfloat16, float16, got"),
        ({"dtype": "float64"}, "dtype must be one of float32, bfloat16, float16, got"),
        ({"dtype": None}, "dtype must be one of float32, bfloat16, float16, got None"),
        ({"dim": 0}, "dim must be at least 1, got 0"),
        ({"dim": 16.0}, "model 'performer' needs dim of type int, got 16.0"),
        ({"num_heads": "2"}, "model 'performer' needs num_heads of type int, got '2'"),
        ({"mlp_dim": 10**30}, "model 'performer' needs mlp_dim of type int, got 1000"),
        ({"num_layers": -1}, "num_layers must be at least 1, got -1"),
        ({"attention": 3}, "model 'performer' needs attention of type str, got 3"),
        ({"position": None}, "'performer' needs position of type str, got None"),
        ({"dropout": 1}, "dropout must be from 0 to below 1, got 1.0"),
        ({"dropout": float("nan")}, "needs dropout of type float, got nan"),
        ({"patch_size": 2.0}, "patch_size must be a whole number of pixels, or two"),
        ({"patch_size": (2, "2")}, "pixels, or two (height and width), got (2, '2')"),
        ({"attention": "favor(num_features='a')"}, "needs num_features of type int"),
        ({"dim" * 99: 1}, "model 'performer' has no option 'dimdim"),
    ],
)
def test_invalid_configs_raise(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**options)

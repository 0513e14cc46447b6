"""Tests the Vision Transformer: variants, hybrids, errors."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn.models import SIZES, attention_weights, build_model, features
from tests.helpers.export import unchecked_annotations
from tests.helpers.quick import quick_jit, run

CONFIG = {"name": "vit", "dim": 12, "num_layers": 3, "num_heads": 2, "mlp_dim": 17}
CONFIG |= {"patch_size": 2}
SHAPE = (4, 6, 1)
ATTENTIONS = ["softmax", "translution", "lor_translution(rank=2)"]
POSITIONS = [
    ("softmax", "learned + relative_key"),
    ("softmax", "rope1d(interleaved=True)"),
    ("softmax", "string_gate(rank=3)"),
]


def build(**options):
    return build_model(CONFIG | options, num_classes=5, image_shape=SHAPE)


def shapes_of(model):
    images = np.zeros((1, *SHAPE), np.float32)
    return jax.eval_shape(model.init, jax.random.key(0), images)


def make(**options):
    """Returns a model, variables so large that every part matters, and images."""
    model = build(**options)
    rng = np.random.default_rng(0)
    images = jax.device_put(rng.random((3, *SHAPE), np.float32))
    variables = jax.tree.map(
        lambda leaf: 0.3 * rng.normal(size=leaf.shape).astype(leaf.dtype),
        shapes_of(model),
    )
    return model, variables, images


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "position"),
    [*((name, "none") for name in ATTENTIONS), *POSITIONS],
)
def test_every_parameter_has_a_gradient(attention, position):
    model, variables, images = make(
        attention=attention, position=position, num_relative_layers=2
    )

    def loss(variables):
        return jnp.square(model.apply(variables, images) - 1.0).sum()

    gradients = run(jax.grad(loss), variables)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.abs(leaf).max() > 1e-6, jax.tree_util.keystr(path)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["favor", "translution", "linformer(k=3)"])
@pytest.mark.parametrize(
    "options",
    [
        {"num_registers": 2, "activation": "swiglu", "pre_norm": True},
        {"pool": "attention", "num_registers": 2, "class_token": True},
        {"pool": "cls_mean", "activation": "quick_gelu", "scan_layers": False},
    ],
)
def test_parts_of_backbones_have_gradients(attention, options):
    """Tests that all options meet in one model, and registers are read."""
    model, variables, images = make(
        attention=attention, position="learned", qkv_bias=True, **options
    )

    def loss(params):
        logits = model.apply({**variables, "params": params}, images)
        return jnp.square(logits - 1.0).sum()

    gradients = run(jax.grad(loss), variables["params"])
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        name = jax.tree_util.keystr(path)
        # A constant that is added to all keys changes no softmax.
        if not name.endswith("['k']['bias']"):
            assert np.abs(leaf).max() > 1e-7, name


def cls_and_mean(x, norm, prefix):
    x = norm(x)
    return np.concatenate([x[:, 0], x[:, prefix:].mean(1)], axis=-1)


@pytest.mark.quick("options1-mean_then_norm")
@pytest.mark.parametrize(
    "options, pooled",
    [
        ({"pool": "cls_mean", "num_registers": 2}, cls_and_mean),
        (
            {"pool": "mean", "class_token": True, "fc_norm": True},
            lambda x, norm, prefix: norm(x[:, prefix:].mean(1)),
        ),
        (
            {"pool": "mean", "num_registers": 1, "pool_prefix": True},
            lambda x, norm, prefix: norm(x).mean(1),
        ),
    ],
    ids=["options0-cls_and_mean", "options1-mean_then_norm", "options2-prefix"],
)
def test_pools_equal_the_formula(options, pooled):
    """Computes them from the last layer's tokens, by NumPy."""
    model, variables, images = make(num_layers=1, **options)
    found = features(model, variables, images, norm=False)
    params = jax.tree.map(np.float64, variables["params"])

    def norm(x):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
        return x * params["norm"]["scale"] + params["norm"]["bias"]

    expected = pooled(np.float64(found.tokens[0]), norm, model.num_prefix)
    np.testing.assert_allclose(found.pooled, expected, atol=1e-5)
    logits = expected @ params["head"]["kernel"] + params["head"]["bias"]
    found = quick_jit(model.apply)(variables, images)
    np.testing.assert_allclose(found, logits, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_features_have_the_norm_of_the_model(pool):
    model, variables, images = make(num_layers=1, norm_type="rms_norm", pool=pool)
    found = features(model, variables, images)
    expected = found.cls if pool == "cls" else found.mean
    np.testing.assert_allclose(found.pooled, expected, atol=1e-6)


def test_every_norm_is_that_of_the_model():
    options = {"pool": "attention", "pre_norm": True, "norm_type": "rms_norm"}
    params = shapes_of(build(**options, out_bias=False, mlp_bias=False))["params"]
    for path, _ in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        assert "norm" not in name or name.endswith("['scale']"), name
    block = params["blocks_0"]
    assert "bias" not in block["attention"]["out"] | block["feed_forward"]["hidden"]
    shared = shapes_of(build(num_kv_heads=1, attention="favor"))["params"]
    kernels = shared["block_2"]["attention"]
    assert kernels["q"]["kernel"].shape == (12, 12)
    assert kernels["k"]["kernel"].shape == kernels["v"]["kernel"].shape == (12, 6)
    with pytest.raises(ValueError, match="norm_type 'rms'"):
        build(norm_type="rms")
    with pytest.raises(ValueError, match="heads of Translution.* cannot share keys"):
        build(num_kv_heads=1, attention="translution")


@pytest.mark.slow
def test_a_layer_is_the_last_of_a_shorter_model():
    model, variables, images = make(num_registers=2, embedding_norms=False)
    found = features(model, variables, images, layers=(0, 1, -1))
    for layer, tokens in enumerate(found.tokens):
        params = dict(variables["params"])
        params["blocks_0"] = jax.tree.map(
            lambda leaf, layer=layer: leaf[: layer + 1], params["blocks_0"]
        )
        shorter = features(
            model.clone(num_layers=layer + 1), {"params": params}, images
        )
        np.testing.assert_allclose(tokens, shorter.tokens[0], atol=1e-5)
        np.testing.assert_allclose(tokens[:, 0], shorter.cls, atol=1e-5)
        np.testing.assert_allclose(tokens[:, 3:].mean(1), shorter.mean, atol=1e-5)


def test_layers_and_models_without_features_are_refused():
    model, variables, images = make()
    for layer in (3, -4, 0.5, "1"):
        message = rf"layers has {layer!r}, .* expected -3 \.\. 2"
        with unchecked_annotations(), pytest.raises(ValueError, match=message):
            features(model, variables, images, layers=(0, layer))
    message = r"layers must be a list, such as \[-1\], got -1"
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        features(model, variables, images, layers=-1)
    cnn = build_model({"name": "vgg16"}, num_classes=5, image_shape=(32, 32, 3))
    with pytest.raises(ValueError, match="tokens are patches, .* got Vgg16"):
        features(cnn, {}, images)


def test_a_pool_without_its_cls_token_is_refused():
    with pytest.raises(ValueError, match="pool='cls' reads the CLS token"):
        build(class_token=False)
    with pytest.raises(ValueError, match="num_registers must be at least 0"):
        build(num_registers=-1)
    with pytest.raises(ValueError, match="activation"):
        build(activation="relu")


def test_the_last_layers_of_a_hybrid_use_softmax():
    params = shapes_of(build(attention="translution", num_relative_layers=1))["params"]
    # A row for each offset of the 2x3 grid, and three for CLS.
    table = params["blocks_0"]["attention"]["q_table"]
    assert table.shape == (1, 3 * 5 + 3, 12, 2, 6)
    assert params["blocks_1"]["attention"]["q"]["kernel"].shape == (2, 12, 12)
    params = shapes_of(build(attention="translution"))["params"]
    assert params["blocks_0"]["attention"]["q_table"].shape[0] == 3
    options = {"attention": "lor_translution", "num_relative_layers": 1}
    params = shapes_of(build(qkv_bias=True, **options))["params"]
    for blocks in ("blocks_0", "blocks_1"):
        assert set(params[blocks]["attention"]["q"]) == {"kernel", "bias"}


def test_layers_with_random_features_have_a_block_each():
    variables = shapes_of(build(attention="favor", num_relative_layers=2))
    assert set(variables["params"]) >= {"block_0", "block_1", "blocks_2"}
    assert set(variables["random_features"]) == {"block_0", "block_1"}


@pytest.mark.slow
def test_translution_without_position_depends_on_the_order():
    moved = np.array([2, 3, 0, 1, 4, 5])
    for attention, differ in (("softmax", False), ("translution", True)):
        model, variables, images = make(attention=attention)
        apply = jax.jit(model.apply)
        logits = apply(variables, images)
        shuffled = apply(variables, images[:, :, moved])
        assert np.allclose(logits, shuffled, atol=1e-6) != differ


@pytest.mark.parametrize("function", [features, attention_weights])
def test_equal_models_are_compiled_once(function, monkeypatch):
    intercept, traced = nn.intercept_methods, []

    def count(method):
        traced.append(method)
        return intercept(method)

    monkeypatch.setattr(nn, "intercept_methods", count)
    images = jax.ShapeDtypeStruct((1, *SHAPE), np.float32)
    for _ in range(2):
        # As in a config.json. A module with a list would be no static argument.
        model = build(num_layers=1, norm_eps=0.3, patch_size=[2, 3])
        find = functools.partial(function, model)
        jax.eval_shape(find, shapes_of(model), images)
    assert len(traced) == 1


def test_bfloat16_models_have_float32_parameters_and_logits():
    model, variables, images = make(dtype="bfloat16", attention="translution")
    logits = np.asarray(jax.jit(model.apply)(variables, images))
    assert logits.dtype == np.float32 and np.isfinite(logits).all()
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(shapes_of(model))}
    assert dtypes == {np.dtype("float32")}


def test_sizes_are_as_published():
    rows = [tuple(SIZES[name].values()) for name in "ABC"]
    assert rows == [(6, 192, 3, 768), (12, 192, 3, 768), (12, 384, 6, 1536)]


def test_parameter_count_of_guojis_vit():
    """Compares with a count by hand: 6 layers of dim 256, 49 patches of 16 pixels."""
    options = {"dim": 256, "num_layers": 6, "num_heads": 8, "mlp_dim": 512}
    options |= {"patch_size": 4, "position": "learned", "qkv_bias": True}
    options |= {"embedding_norms": False, "head": "mlp"}
    model = build_model(
        {"name": "vit", **options}, num_classes=10, image_shape=(28, 28, 1)
    )
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 28, 28, 1)))[
        "params"
    ]
    norm, attention = 2 * 256, 4 * (256 * 256 + 256)
    feed_forward = 256 * 512 + 512 + 512 * 256 + 256
    embedding = 16 * 256 + 256 + 256 + 49 * 256
    head = norm + 256 * 512 + 512 + 512 * 10 + 10
    blocks = 6 * (2 * norm + attention + feed_forward)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == (
        embedding + blocks + head
    )
    assert not {"patch_norm", "embedding_norm"} & set(params)


def test_the_mlp_head_has_gradients():
    model, variables, images = make(
        head="mlp", embedding_norms=False, qkv_bias=True, num_layers=1
    )

    def loss(variables):
        return jnp.square(model.apply(variables, images) - 1.0).sum()

    gradients = run(jax.grad(loss), variables)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        # A bias that all keys share cancels in softmax.
        if "'k']['bias'" not in jax.tree_util.keystr(path):
            assert np.abs(leaf).max() > 1e-6, jax.tree_util.keystr(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": "mpl"}, "unknown head 'mpl': did you mean 'mlp'?"),
        ({"patch_size": 7}, "patch_size=7 is larger than the image of 4x6 pixels"),
        ({"patch_size": 3}, "patch_size=3 does not divide the image of 4x6 pixels"),
        (
            {"num_relative_layers": 4},
            "num_relative_layers must be from 0 (all layers) to num_layers=3, got 4",
        ),
        ({"attention": "lor_translution(rank=0)"}, "needs rank >= 1, got 0"),
        ({"attention": "translution(relative='qx')"}, "unknown relative 'qx': did"),
        ({"attention": "translution(relative='')"}, "unknown relative '': avail"),
        ({"attention": "translution(rank=2)"}, "'translution' has no option 'rank'"),
        ({"vocab_size": 7}, "model 'vit' has no option 'vocab_size'"),
    ],
)
def test_invalid_configs_raise(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build(**options)


@pytest.mark.parametrize("name", ["vit", "alexnet"])
def test_images_that_are_no_inputs_are_refused(name):
    """Integers would be taken for values far beyond those of training."""
    model = build_model({"name": name}, num_classes=5, image_shape=(32, 32, 1))
    for images, message in (
        (np.zeros((3, 32, 32, 1), np.uint8), "are uint8, but .* as run.preprocess and"),
        (np.zeros((32, 32, 1), np.float32), "add the axis of the batch, images.None."),
        (np.zeros((5, 32, 32), np.float32), r"of the channels, images\[..., None\]"),
    ):
        with unchecked_annotations(), pytest.raises(ValueError, match=message):
            jax.eval_shape(model.init, jax.random.key(0), images)


@pytest.mark.parametrize("embedding_norms", [True, False])
def test_images_of_other_channels_are_refused(embedding_norms):
    model, variables, images = make(embedding_norms=embedding_norms)
    message = "images have 3 channels, but the model's parameters are for 1: pass"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(model.apply, variables, images.repeat(3, axis=-1))


@pytest.mark.parametrize("shape", [(3, 7), (2, 6), (6,), (3, 2, 3)])
def test_a_key_mask_has_an_entry_for_each_patch(shape):
    model, variables, images = make()
    call = functools.partial(model.apply, key_mask=np.ones(shape, bool))
    message = re.escape(f"key_mask has shape {shape}, expected (3, 6): an entry for")
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        jax.eval_shape(call, variables, images)


def test_an_image_model_for_text_raises():
    with pytest.raises(ValueError, match="'vit' is for images and needs num_classes"):
        build_model(CONFIG, vocab_size=11, context_length=7)


@pytest.mark.quick("mean-softmax")
@pytest.mark.parametrize("attention", ["softmax", "favor", "lor_translution(rank=2)"])
@pytest.mark.parametrize(
    "pool",
    [
        "cls",
        "mean",
        {"pool": "attention", "num_registers": 2},
        {"pool": "attention", "class_token": True, "pool_prefix": True},
        {"pool": "cls_mean", "num_registers": 1, "fc_norm": True},
        {"pool": "mean", "num_registers": 2, "pool_prefix": True, "pre_norm": True},
    ],
    ids=["cls", "mean", "attention", "attention_prefix", "cls_mean", "mean_prefix"],
)
def test_masked_patches_have_no_effect(pool, attention):
    options = pool if isinstance(pool, dict) else {"pool": pool}
    model, variables, images = make(attention=attention, position="learned", **options)
    key_mask = np.arange(18).reshape(3, 6) % 3 != 1
    pixels = np.repeat(key_mask.reshape(3, 2, 3), 2, axis=1).repeat(2, axis=2)
    changed = np.where(pixels[..., None], images, np.float32(17))
    apply = quick_jit(model.apply)
    logits = apply(variables, images, key_mask=key_mask)
    np.testing.assert_array_equal(apply(variables, changed, key_mask=key_mask), logits)
    unmasked = apply(variables, images)
    assert not np.allclose(unmasked, logits, atol=1e-3)
    every = np.ones_like(key_mask)
    out = apply(variables, images, key_mask=every)
    np.testing.assert_allclose(out, unmasked, rtol=1e-5, atol=1e-6)


def test_image_without_patches_has_finite_logits_and_gradients():
    """Such images fill a batch; their logits do not count, but NaN would."""
    model, variables, images = make(pool="mean")
    images = jnp.asarray(images)
    key_mask = np.ones((3, 6), bool)
    key_mask[1] = False

    def loss(params):
        logits = model.apply({"params": params}, images, key_mask=jnp.array(key_mask))
        return (logits * np.array([[1], [0], [1]])).sum(), logits

    gradients, logits = jax.grad(loss, has_aux=True)(variables["params"])
    assert np.isfinite(logits).all()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))
    others = model.apply(variables, images[::2])
    np.testing.assert_allclose(logits[::2], others, rtol=1e-5, atol=1e-6)

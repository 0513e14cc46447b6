"""Tests the convolutional networks: parameter counts, outputs, errors."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from relattn.models import MODELS, build_model, resize_grid
from relattn.models.cnn import CNN, ResidualBlock, average_to_grid, convolve
from relattn.nn.batch_norm import BatchNorm
from relattn.training.step import create_state, make_train_step
from studies.sizes import count_parameters

# These round to the published 2.5M, 134M and 11.2M.
GOLDEN = {
    ("alexnet", 3): 2_472_266,
    ("alexnet", 1): 2_456_778,
    ("vgg16", 3): 134_301_514,
    ("vgg16", 1): 134_300_362,
    ("resnet18", 3): 11_173_962,
    ("resnet18", 1): 11_172_810,
}
# The forms of Horn et al.; AlexNet's and VGG's counts are those above.
PUBLISHED = {
    "alexnet": {"dropout": 0.5, "weight_init": "pytorch"},
    "vgg16": {"weight_init": "torchvision"},
    "resnet18": {"stem": "imagenet", "weight_init": "torchvision"},
}
PUBLISHED_GOLDEN = {
    **GOLDEN,
    ("resnet18", 3): 11_181_642,
    ("resnet18", 1): 11_175_370,
}
NAMES = [name for name, model in MODELS.items() if issubclass(model, CNN)]


def make(name, shape=(32, 32, 1), **options):
    return build_model({"name": name, **options}, num_classes=10, image_shape=shape)


@pytest.mark.quick("alexnet-3", "alexnet-1", "vgg16-3")
@pytest.mark.parametrize(("name", "channels"), GOLDEN)
def test_parameter_counts(name, channels):
    shape = (32, 32, channels)
    assert count_parameters(make(name, shape), shape) == GOLDEN[name, channels]
    published = make(name, shape, **PUBLISHED[name])
    assert count_parameters(published, shape) == PUBLISHED_GOLDEN[name, channels]


def start(path, **options):
    """Returns the initial value of one parameter; the others are not computed."""
    model = make(**options)

    @jax.jit
    def init(key):
        params = model.init(key, jnp.zeros((1, 32, 32, 1)))["params"]
        for name in path.split("/"):
            params = params[name]
        return params

    return np.asarray(init(jax.random.key(0)))


@pytest.mark.quick(
    "resnet18-conv/kernel-0.025253813613805267",
    "vgg16-conv_1_0/kernel-0.041666666666666664",
    "vgg16-head/kernel-0.01",
)
@pytest.mark.parametrize(
    ("name", "path", "std"),
    [
        # By fan-out, 7 x 7 x 64 and 3 x 3 x 128; by fan-in it is 7 x 7 x 1.
        ("resnet18", "conv/kernel", (2 / 3136) ** 0.5),
        ("vgg16", "conv_1_0/kernel", (2 / 1152) ** 0.5),
        ("vgg16", "head/kernel", 0.01),
        # Uniform: 1 / sqrt(3 fan-in) of 11 x 11 x 1, 3 x 3 x 192 and 256.
        ("alexnet", "conv_0/kernel", (1 / 363) ** 0.5),
        ("alexnet", "conv_0/bias", (1 / 363) ** 0.5),
        ("alexnet", "conv_2/bias", (1 / 5184) ** 0.5),
        ("alexnet", "head/kernel", (1 / 768) ** 0.5),
        ("vgg16", "conv_0_0/bias", 0),
        ("vgg16", "hidden_0/bias", 0),
        ("vgg16", "head/bias", 0),
    ],
)
def test_published_weights_start_as_in_the_authors_code(name, path, std):
    weights = start(path, name=name, **PUBLISHED[name])
    # Within 4 standard errors.
    assert abs(weights.std() - std) <= 4 * std / (2 * weights.size) ** 0.5
    if std and name == "alexnet":
        assert np.abs(weights).max() <= 3**0.5 * std


def captured(model, kind, key, images):
    """Returns the outputs of the layers of a kind in training, by name."""
    _, state = model.init_with_output(
        {"params": key, "dropout": key},
        images,
        deterministic=False,
        capture_intermediates=lambda module, _: isinstance(module, kind),
        mutable=True,
    )
    return state["intermediates"]


def shapes(model, kind):
    outputs = jax.eval_shape(
        lambda key: captured(model, kind, key, jnp.zeros((5, 32, 32, 1))),
        jax.random.key(0),
    )
    return {name: out["__call__"][0].shape for name, out in outputs.items()}


def test_published_alexnet_has_dropout_after_three_convolutions():
    assert shapes(make("alexnet", **PUBLISHED["alexnet"]), nn.Dropout) == {
        "Dropout_0": (5, 8, 8, 64),
        "Dropout_1": (5, 2, 2, 384),
        "Dropout_2": (5, 2, 2, 256),
    }
    kept = {}
    for rate in (0.0, 0.5):
        model = make("alexnet", dropout=rate)

        @jax.jit
        def first(key, model=model):
            images = jax.random.uniform(key, (2, 32, 32, 1))
            return captured(model, nn.Dropout, key, images)["Dropout_0"]["__call__"][0]

        kept[rate] = int((first(jax.random.key(0)) > 0).sum())
    # Half of them, within 4 standard errors.
    assert abs(kept[0.5] / kept[0.0] - 0.5) < 2 / kept[0.0] ** 0.5


def test_published_resnet_starts_its_blocks_on_8x8_pixels():
    grids = shapes(make("resnet18", **PUBLISHED["resnet18"]), ResidualBlock)
    assert grids["block_0_0"] == (5, 8, 8, 64)
    assert grids["block_3_1"] == (5, 1, 1, 512)
    assert shapes(make("resnet18"), ResidualBlock)["block_0_0"] == (5, 32, 32, 64)


@pytest.mark.quick("float32-alexnet", "float32-vgg16", "bfloat16-alexnet")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_have_the_compute_dtype_and_variables_are_float32(name, dtype):
    model, images = make(name, dtype=dtype), jnp.zeros((3, 32, 32, 1))
    variables = jax.eval_shape(model.init, jax.random.key(0), images)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(variables)} == {"float32"}

    def apply(variables, images):
        return model.apply(variables, images, capture_intermediates=True)

    logits, state = jax.eval_shape(apply, variables, images)
    assert (logits.shape, logits.dtype) == ((3, 10), jnp.float32)
    assert jax.eval_shape(model.apply, variables, images[:0]).shape == (0, 10)
    for module, captured in state["intermediates"].items():
        if module.startswith(("conv", "block", "hidden")):
            (out,) = jax.tree.leaves(captured["__call__"])
            assert out.dtype == dtype, module


@pytest.mark.parametrize(
    "name, kind, count", [("resnet18", BatchNorm, 20), ("vgg16", nn.Dropout, 2)]
)
def test_training_reaches_every_norm_and_dropout(name, kind, count):
    model, images = make(name), jnp.zeros((3, 32, 32, 1))
    variables = jax.eval_shape(model.init, jax.random.key(0), images)
    called = {True: [], False: []}

    def apply(variables, deterministic):
        def record(call, args, kwargs, context):
            if isinstance(context.module, kind):
                called[deterministic].append(kwargs["deterministic"])
            return call(*args, **kwargs)

        with nn.intercept_methods(record):
            return model.apply(
                variables,
                images,
                deterministic=deterministic,
                rngs={"dropout": jax.random.key(0)},
                mutable=["batch_stats"],
            )

    for deterministic in called:
        jax.eval_shape(functools.partial(apply, deterministic=deterministic), variables)
        assert called[deterministic] == [deterministic] * count


def test_convolutions_start_as_he_normal():
    model, images = make("resnet18"), jnp.zeros((1, 32, 32, 1))

    @jax.jit
    def init(key):
        params = model.init(key, images)["params"]
        return params["block_0_0"]["first_conv"]["kernel"]

    kernel = init(jax.random.key(0))
    std = (2 / (9 * 64)) ** 0.5
    # Within four standard errors.
    assert abs(kernel.std() - std) < 4 * std / (2 * kernel.size) ** 0.5


@pytest.mark.parametrize("name", NAMES)
def test_images_too_small_for_the_strides_raise(name):
    least = MODELS[name].min_size
    for shape in ((least, least + 5, 1), (least + 7, least, 3)):
        make(name, shape)
    if least > 1:
        message = f"must be at least {least} for .* image of {least}x{least - 1} "
        with pytest.raises(ValueError, match=message):
            make(name, (least, least - 1, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "favor"}, "'alexnet' has no option 'attention'"),
        ({"dim": 256}, "'alexnet' has no option 'dim'"),
        ({"min_size": 1}, "'alexnet' has no option 'min_size'"),
        ({"dtypes": "float32"}, "no option 'dtypes': did you mean 'dtype'"),
        ({"name": "resnet_18"}, "name 'resnet_18': did you mean 'resnet18'"),
        (
            {"weight_init": "torch"},
            "unknown weight_init 'torch': did you mean",
        ),
        (
            {"name": "resnet18", "stem": "cifar10"},
            "unknown stem 'cifar10': did you mean 'cifar'",
        ),
    ],
)
def test_options_of_other_models_raise(options, message):
    with pytest.raises(ValueError, match=message):
        make(**{"name": "alexnet", **options})


def test_a_residual_block_equals_its_formula():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 5, 7, 3)).astype(np.float32)
    block = ResidualBlock(4, 2)
    shapes = jax.eval_shape(block.init, jax.random.key(0), jnp.asarray(x))
    variables = jax.tree.map(
        lambda leaf: rng.uniform(0.2, 1.0, leaf.shape).astype(np.float32), shapes
    )
    params, stats = variables["params"], variables["batch_stats"]

    def convolve(x, name, stride):
        """Convolves pixel by pixel, then normalises as in evaluation."""
        kernel = np.float64(params[f"{name}_conv"]["kernel"])
        size = len(kernel)
        x = np.pad(x, ((0, 0), *[(size // 2,) * 2] * 2, (0, 0)))
        rows = range(0, x.shape[1] - size + 1, stride)
        columns = range(0, x.shape[2] - size + 1, stride)
        y = np.array(
            [
                [
                    np.tensordot(x[:, i : i + size, j : j + size], kernel, 3)
                    for j in columns
                ]
                for i in rows
            ]
        )
        norm, moments = params[f"{name}_norm"], stats[f"{name}_norm"]
        y = np.moveaxis(y, 2, 0) - moments["mean"]
        y = y / np.sqrt(moments["variance"] + 1e-5)
        return y * norm["scale"] + norm["bias"]

    y = convolve(np.maximum(convolve(x, "first", 2), 0), "second", 1)
    expected = np.maximum(convolve(x, "shortcut", 2) + y, 0)
    out = block.apply(variables, jnp.asarray(x))
    assert out.shape == (2, 3, 4, 4)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("grid", [(2, 3), (3, 2), (5, 2), (7, 5)])
def test_convolve_with_a_large_kernel_equals_lax(grid):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, *grid, 3)).astype(np.float32)
    kernel = rng.normal(size=(5, 3, 3, 4)).astype(np.float32)
    padding = [(2, 2), (1, 1)]
    options = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}

    def outcome(function):
        def loss(x, kernel):
            y = function(x, kernel, (1, 1), padding, **options)
            return jnp.square(y).sum(), y

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(x, kernel)

    ours, theirs = outcome(convolve), outcome(jax.lax.conv_general_dilated)
    chex.assert_trees_all_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_average_to_grid_averages_over_equal_parts():
    x = np.random.default_rng(0).normal(size=(2, 5, 3, 2)).astype(np.float32)
    expected = np.stack(
        [
            x[:, start:end, column].mean(1)
            for start, end in ((0, 3), (2, 5))
            for column in (0, 0, 1, 1, 2, 2)
        ],
        axis=1,
    ).reshape(2, 2, 6, 2)
    out = average_to_grid(jnp.asarray(x), (2, 6))
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    one = average_to_grid(jnp.asarray(x[:, :1, :1]), (7, 7))
    np.testing.assert_array_equal(one, np.broadcast_to(x[:, :1, :1], (2, 7, 7, 2)))


def test_resize_grid_leaves_convolutions_unchanged():
    model = make("resnet18")
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 32, 32, 1)))
    resized = resize_grid(model, variables, (32, 32), (48, 40))
    larger = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 48, 40, 1)))
    assert resized == variables == larger


@pytest.mark.quick("alexnet")
@pytest.mark.parametrize("name", NAMES)
def test_a_train_step_lowers_for_every_platform(name):
    model, optimizer = make(name), optax.adam(1e-3)
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(
        lambda key: create_state(model, optimizer, key, (32, 32, 1)), key
    )
    batch = {
        "image": jax.ShapeDtypeStruct((6, 32, 32, 1), jnp.float32),
        "label": jax.ShapeDtypeStruct((6,), jnp.int32),
    }
    step = jax.jit(make_train_step(model, optimizer, lambda batch: batch["image"]))
    exported = jax.export.export(step, platforms=["cpu", "cuda", "tpu"])(
        state, batch, key
    )
    assert exported.platforms == ("cpu", "cuda", "tpu")

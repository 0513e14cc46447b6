"""Training from converted models and from runs: config.init_from."""

import jax
import numpy as np
import pytest

import relattn
from relattn import data as data_lib
from relattn import training
from relattn.convert import convert
from relattn.data import ImageInfo
from relattn.models import pretrained
from relattn.training.config import default_config
from relattn.training.initialize import initial_state
from relattn.training.seeds import make_task

INFO = ImageInfo("a set", tuple("01234"), (6, 6, 1), (0.1,), (0.2,), 200, "somewhere")


def make_data():
    """Images of noise in three classes."""
    rng = np.random.default_rng(0)

    def split(n):
        images = rng.integers(0, 256, (n, 5, 5, 1), dtype=np.uint8)
        return data_lib.ImageSplit(images, rng.integers(0, 3, n).astype(np.int32))

    return data_lib.ImageData(
        name="columns",
        train=split(23),
        validation=split(11),
        test=split(13),
        class_names=("left", "middle", "right"),
        mean=np.array([0.4], np.float32),
        std=np.array([0.2], np.float32),
        origin="noise",
    )


SIZES = {"dim": 12, "num_heads": 3, "num_layers": 2, "mlp_dim": 7, "patch_size": 2}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A softmax ViT for images of 6x6 pixels and five classes."""
    model = {"name": "vit", "position": "learned", "qkv_bias": True, **SIZES}
    config = {"model": model, "num_classes": 5, "image_shape": [6, 6, 1]}
    module = pretrained.build(config)
    images = np.zeros((1, 6, 6, 1), np.float32)
    variables = jax.jit(module.init)(jax.random.key(3), images)
    folder = tmp_path_factory.mktemp("source")
    pretrained.save_pretrained(folder, config, variables)
    return folder


def task(source, *, info=INFO, num_seeds=1, init_skip="", **model):
    config = default_config()
    model = {"name": "vit", "position": "learned", "qkv_bias": True, **SIZES, **model}
    config.model.update(model)
    config.data.update({"name": "mnist", "image_size": 6})
    config.num_seeds = num_seeds
    config.init_from = str(source)
    config.init_skip = init_skip
    return make_task(config, info)


def flat(model, params):
    return pretrained.flatten(model, {"params": params})


def test_swapped_attention_keeps_every_other_parameter(source):
    new = task(
        source,
        attention="favor(num_features=8)",
        position="learned + sincos_bias",
        init_skip="sincos_bias",
    )
    found = flat(new.model, initial_state(new).params)
    loaded = relattn.load_pretrained(source)
    for name, array in flat(loaded.model, loaded.variables["params"]).items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    start = flat(new.model, new.create_state().params)
    rest = [name for name in found if "sincos_bias" in name]
    assert rest
    for name in rest:
        np.testing.assert_array_equal(found[name], start[name])


def test_what_does_not_fit_is_named(source):
    info = ImageInfo("a set", ("0", "1"), (6, 6, 1), (0.1,), (0.2,), 200, "here")
    new = task(source, info=info, position="none")
    message = (
        r"without a value .*: params\.head\.bias, params\.head\.kernel; "
        r"without a place .*: params\.position\.learned\.table; .*init_skip"
    )
    with pytest.raises(ValueError, match=message):
        initial_state(new)
    new = task(source, info=info, position="none", init_skip="head, position")
    initial_state(new)


def test_skipped_parameters_start_as_without_a_source(source):
    new = task(source, init_skip="attention.q")
    found = flat(new.model, initial_state(new).params)
    start = flat(new.model, new.create_state().params)
    name = "params.layers.1.attention.q.kernel"
    np.testing.assert_array_equal(found[name], start[name])
    other = "params.layers.1.attention.k.kernel"
    assert not np.array_equal(found[other], start[other])


def test_every_seed_starts_from_the_source(source):
    params = initial_state(task(source, num_seeds=3)).params
    head = params["head"]["kernel"]
    assert head.shape == (3, 12, 5)
    loaded = relattn.load_pretrained(source).variables["params"]["head"]["kernel"]
    for seed in range(3):
        np.testing.assert_array_equal(head[seed], loaded)


def train(workdir, **options):
    config = default_config()
    config.model.update({"name": "vit", **SIZES, "patch_size": 1})
    config.data.update({"image_size": 5, "standardize": True})
    config.update({"num_steps": 2, "num_epochs": 0, "progress": False, **options})
    config.update({"batch_size": 8, "eval_every_steps": 2})
    training.train_and_evaluate(
        config, workdir, data=make_data(), devices=jax.local_devices()[:1]
    )
    return training.load_run(workdir)


def test_run_is_saved_converted_and_trained_on(tmp_path):
    run = train(tmp_path / "run")
    run.save_pretrained(tmp_path / "saved", license="cc0-1.0")
    images = make_data().test.images[:2]
    convert("run", tmp_path / "run", tmp_path / "converted")
    for folder in (tmp_path / "saved", tmp_path / "converted"):
        loaded = relattn.load_pretrained(folder)
        jax.tree.map(
            np.testing.assert_array_equal,
            loaded.variables["params"],
            run.variables["params"],
        )
        assert loaded.config["image_shape"] == [5, 5, 1]
        assert loaded.config["data"]["class_names"] == ["left", "middle", "right"]
        inputs = loaded.preprocess(images)
        np.testing.assert_array_equal(inputs, run.preprocess({"image": images}))
        logits = loaded.model.apply(loaded.variables, inputs)
        np.testing.assert_allclose(
            jax.nn.softmax(logits), run.predict(images).probabilities, rtol=1e-5
        )
        smaller = relattn.load_pretrained(folder, image_size=3)
        assert smaller.preprocess(images).shape == (2, 3, 3, 1)
        oblong = relattn.load_pretrained(folder, image_size=(3, 5))
        with pytest.raises(ValueError, match="squares, but the model sees 3x5 pixels"):
            oblong.preprocess(images)
    card = (tmp_path / "saved" / "README.md").read_text()
    for text in ("license: cc0-1.0", "# vit on columns", "| test_accuracy | "):
        assert text in card
    assert "(pixels / 255 - mean) / std, mean 0.4000, std 0.2000." in card
    assert "arrays: uint8 [n, 5, 5, 1].\ninputs = pretrained.preprocess(images)" in card
    config = run.pretrained_config()
    config["data"]["mean"], config["data"]["std"] = (0.25, 0.5), (1.0, 2.0)
    card = pretrained.model_card(config, {}, "cc0-1.0")
    assert "mean 0.2500, 0.5000, std 1.0000, 2.0000" in card
    config["training"]["data"]["standardize"] = False
    card = pretrained.model_card(config, {}, "cc0-1.0")
    assert "Inputs are grey images of 5x5 pixels." in card
    assert "Values are pixels / 255." in card
    # An update this small changes no float32.
    still = {"learning_rate": 1e-30}
    with_run = train(
        tmp_path / "more", init_from=str(tmp_path / "run"), optimizer=still
    )
    jax.tree.map(
        np.testing.assert_array_equal,
        with_run.variables["params"],
        run.variables["params"],
    )

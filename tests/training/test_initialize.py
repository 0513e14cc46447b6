"""Training from converted models and from runs: config.init_from."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import relattn
from relattn import cli, training
from relattn import data as data_lib
from relattn.convert import convert
from relattn.data import ImageInfo, PointInfo
from relattn.models import complete_options, pretrained, variable_names
from relattn.models.model_card import model_card
from relattn.training.config import default_config
from relattn.training.config_file import read_config
from relattn.training.initialize import initial_state, take_model
from relattn.training.seeds import make_task
from tests.helpers.quick import quick_jit

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


SIZES = {"dim": 12, "num_heads": 3, "num_layers": 1, "mlp_dim": 7, "patch_size": 2}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A softmax ViT for images of 6x6 pixels and five classes."""
    model = {"name": "vit", "position": "learned", "qkv_bias": True, **SIZES}
    config = {"model": model, "num_classes": 5, "image_shape": [6, 6, 1]}
    folder = tmp_path_factory.mktemp("source")
    return save(folder, config, np.zeros((1, 6, 6, 1), np.float32))


def task(source, *, info=INFO, num_seeds=1, init_skip="", ema_decay=0.0, **model):
    config = default_config()
    model = {"name": "vit", "position": "learned", "qkv_bias": True, **SIZES, **model}
    config.model.update(model)
    config.data.update({"name": "mnist", "image_size": 6})
    config.num_seeds = num_seeds
    config.init_from = str(source)
    config.init_skip = init_skip
    config.ema_decay = ema_decay
    return make_task(config, info)


def flat(model, params):
    return variable_names.flatten(model, {"params": params})


def test_swapped_attention_keeps_every_other_parameter(source):
    new = task(
        source,
        attention="favor(num_features=4)",
        position="learned + sincos_bias",
        init_skip="sincos_bias",
        ema_decay=0.9,
    )
    state = initial_state(new)
    jax.tree.map(np.testing.assert_array_equal, state.ema, state.params)
    found = flat(new.model, state.params)
    loaded = relattn.load_pretrained(source)
    for name, array in flat(loaded.model, loaded.variables["params"]).items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    start = flat(new.model, new.create_state().params)
    rest = [name for name in found if "sincos_bias" in name]
    assert rest
    for name in rest:
        np.testing.assert_array_equal(found[name], start[name])


@pytest.mark.parametrize(
    ("attention", "init_skip", "taken"),
    [
        ("favor(norms='fixed', num_features=4)", "", True),
        ("favor(num_features=4)", "", False),
        ("favor(num_features=5, norms='fixed')", "", False),
        ("favor(num_features=4, norms='fixed')", "random_features", False),
    ],
)
def test_a_model_keeps_the_random_features_of_its_attention(
    attention, init_skip, taken, tmp_path
):
    """It may have learned with this draw alone."""
    model = {"name": "vit", **SIZES, "attention": "favor(num_features=4,norms='fixed')"}
    sizes = {"num_classes": 5, "image_shape": [6, 6, 1]}
    config = {"model": {**model, "position": "learned", "qkv_bias": True}, **sizes}
    variables = pretrained.abstract(pretrained.build(config), config)
    variables = jax.tree.map(lambda x: np.full(x.shape, 0.5, x.dtype), variables)
    pretrained.save_pretrained(tmp_path, config, variables)
    new = task(tmp_path, attention=attention, init_skip=init_skip, num_seeds=2)
    (found,) = jax.tree.leaves(initial_state(new).random_features)
    (drawn,) = jax.tree.leaves(new.create_state().random_features)
    expected = np.full(drawn.shape, 0.5) if taken else drawn
    np.testing.assert_array_equal(found, expected)


@pytest.mark.quick("2")
@pytest.mark.parametrize("clusters", [2, 3])
def test_moving_statistics_that_fit_are_those_of_the_source(clusters, tmp_path):
    model = {"name": "vit", **SIZES, "attention": "routing(clusters=2)"}
    sizes = {"num_classes": 5, "image_shape": [6, 6, 1]}
    config = {"model": {**model, "position": "learned", "qkv_bias": True}, **sizes}
    variables = pretrained.abstract(pretrained.build(config), config)
    variables = jax.tree.map(lambda x: np.full(x.shape, 0.5, x.dtype), variables)
    pretrained.save_pretrained(tmp_path, config, variables)
    new = task(tmp_path, attention=f"routing(clusters={clusters})", num_seeds=2)
    state, start = initial_state(new), new.create_state()
    expected = variables if clusters == 2 else {"batch_stats": start.batch_stats}
    found = jax.tree.leaves(state.batch_stats)
    assert found
    for array, value in zip(
        found, jax.tree.leaves(expected["batch_stats"]), strict=True
    ):
        np.testing.assert_array_equal(array, np.broadcast_to(value, array.shape))


def test_points_of_other_classes_get_a_new_head(tmp_path):
    options = {"name": "point_transformer", "dim": 6, "num_heads": 2, "num_layers": 1}
    config = {"model": {**options, "mlp_dim": 5}, "num_classes": 5}
    config["point_shape"] = [7, 2, 1]
    variables = pretrained.abstract(pretrained.build(config), config)
    variables = jax.tree.map(lambda x: np.full(x.shape, 0.5, x.dtype), variables)
    pretrained.save_pretrained(tmp_path, config, variables)
    settings = default_config()
    settings.init_from = str(tmp_path)
    take_model(settings, ())
    info = PointInfo("a set", tuple("012"), (9, 2, 1), 200, "somewhere")
    new = make_task(settings, info)
    found, start = (x.params for x in (initial_state(new), new.create_state()))
    head, start_head = found.pop("head"), start.pop("head")
    jax.tree.map(np.testing.assert_array_equal, head, start_head)
    assert all((leaf == 0.5).all() for leaf in jax.tree.leaves(found))
    # A text has no points.
    settings.data = {"source": "text", "context_length": 5}
    take_model(settings, ())
    assert settings.data.context_length == 5


@pytest.mark.slow
def test_what_does_not_fit_is_named(source):
    info = ImageInfo("a set", ("0", "1"), (6, 6, 1), (0.1,), (0.2,), 200, "here")
    new = task(source, info=info, position="none", head="mlp")
    message = (
        r"without a value .*: params\.hidden\.bias, params\.hidden\.kernel; "
        r"without a place .*: params\.position\.learned\.table; .*except for head="
        r"'mlp' \('linear' there\), position='none' \('learned' there\).*init_skip"
    )
    with pytest.raises(ValueError, match=message):
        initial_state(new)
    skip = "hidden, position"
    new = task(source, info=info, position="none", head="mlp", init_skip=skip)
    initial_state(new)
    new = task(source, init_skip="attention.q, haed")
    with pytest.raises(ValueError, match="init_skip has 'haed', .*did you mean 'head'"):
        initial_state(new)


@pytest.mark.slow
def test_skipped_parameters_start_as_without_a_source(source):
    new = task(source, init_skip="attention.q")
    found = flat(new.model, initial_state(new).params)
    start = flat(new.model, new.create_state().params)
    name = "params.layers.0.attention.q.kernel"
    np.testing.assert_array_equal(found[name], start[name])
    other = "params.layers.0.attention.k.kernel"
    assert not np.array_equal(found[other], start[other])


def test_layers_that_are_stacked_are_taken_one_by_one(tmp_path):
    """Of three layers the source has two, of which one is skipped."""
    model = {"name": "vit", "position": "learned", "qkv_bias": True, **SIZES}
    config = {"model": {**model, "num_layers": 2}, "num_classes": 5}
    config["image_shape"] = [6, 6, 1]
    source = save(tmp_path, config, np.zeros((1, 6, 6, 1), np.float32))
    skip = "layers.0, layers.2"
    new = task(source, num_layers=3, init_skip=skip, num_seeds=2)
    found, start, loaded = (
        params["blocks_0"]["attention"]["q"]["kernel"]
        for params in (
            initial_state(new).params,
            new.create_state().params,
            relattn.load_pretrained(source).variables["params"],
        )
    )
    expected = np.array(start)
    expected[..., 1, :, :] = loaded[1]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_every_seed_starts_from_the_source(source):
    params = initial_state(task(source, num_seeds=3)).params
    head = params["head"]["kernel"]
    assert head.shape == (3, 12, 5)
    loaded = relattn.load_pretrained(source).variables["params"]["head"]["kernel"]
    for seed in range(3):
        np.testing.assert_array_equal(head[seed], loaded)


@pytest.mark.slow
def test_other_classes_get_a_new_head(source):
    info = ImageInfo("a set", ("0", "1"), (6, 6, 1), (0.1,), (0.2,), 200, "here")
    new, said = task(source, info=info), []
    found = flat(new.model, initial_state(new, said.append).params)
    start = flat(new.model, new.create_state().params)
    kernel = "params.head.kernel"
    np.testing.assert_array_equal(found[kernel], start[kernel])
    loaded = relattn.load_pretrained(source)
    for name, array in flat(loaded.model, loaded.variables["params"]).items():
        if not name.startswith("params.head."):
            np.testing.assert_array_equal(found[name], array, err_msg=name)
    assert "except for num_classes=2 (5 there)." in said[0]


VIT = {
    "name": "vit",
    "dim": 12,
    "num_layers": 2,
    "num_heads": 3,
    "mlp_dim": 7,
    "patch_size": [8, 8],
    "position": "learned",
    "qkv_bias": True,
    "embedding_norms": False,
    "norm_eps": 1e-6,
}
GPT = {
    "name": "gpt",
    "dim": 12,
    "num_layers": 2,
    "num_heads": 3,
    "mlp_dim": 7,
    "position": "learned",
    "qkv_bias": True,
    "head_norm": False,
    "tie_head": True,
    "activation": "gelu_tanh",
    "norm_eps": 1e-3,
}
QUICK = [
    "--config.num_steps=1",
    "--config.batch_size=8",
    "--config.num_devices=1",
    # An update this small changes no float32.
    "--config.optimizer.learning_rate=1e-30",
    "--config.progress=False",
]


def save(folder, config, inputs):
    """Saves a random model whose parameters are all different from their start."""
    module = pretrained.build(config)
    shapes = jax.eval_shape(module.init, jax.random.key(3), inputs)
    draw = np.random.default_rng(0).normal
    params = jax.tree.map(
        lambda x: draw(size=x.shape).astype(x.dtype), shapes["params"]
    )
    pretrained.save_pretrained(folder, config, {"params": params})
    return folder


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    """As converted from timm: three channels, seven classes."""
    config = {"model": VIT, "num_classes": 7, "image_shape": [16, 16, 3]}
    return save(tmp_path_factory.mktemp("vit"), config, np.zeros((1, 16, 16, 3)))


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    """As converted from GPT-2."""
    config = {"model": GPT, "vocab_size": 256, "context_length": 11}
    return save(tmp_path_factory.mktemp("gpt"), config, np.zeros((1, 11), np.int32))


def model_options(config):
    """The model's options as JSON has them."""
    return {k: list(v) if type(v) is tuple else v for k, v in config.model.items()}


@pytest.mark.slow
def test_train_makes_the_model_of_a_vit(vit, tmp_path):
    words = ["--config=rpe_vit:smoke", f"--config.init_from={vit}", *QUICK]
    cli.train([*words, f"--workdir={tmp_path / 'run'}"])
    run = training.load_run(tmp_path / "run")
    assert model_options(run.config) == complete_options(VIT)
    assert run.config.data.image_size == 16
    loaded = relattn.load_pretrained(vit)
    images = jnp.asarray(np.random.default_rng(1).random((3, 16, 16, 1)), jnp.float32)
    variables = jax.device_put(run.variables)
    params = {**loaded.variables["params"], "head": variables["params"]["head"]}
    wide = loaded.model.clone(num_classes=10)
    expected = quick_jit(wide.apply)({"params": params}, jnp.repeat(images, 3, axis=-1))
    found = quick_jit(run.model.apply)(variables, images)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    # The same command resumes.
    cli.train([*words, f"--workdir={tmp_path / 'run'}"])


PREPROCESSING = {
    "resized": 20,
    "squash": False,
    "interpolation": "bicubic",
    "mean": [0.25, 0.5, 0.75],
    "std": [0.25, 0.5, 0.75],
}


@pytest.fixture(scope="module")
def prepared_vit(tmp_path_factory):
    """As `vit`, with the preprocessing of its checkpoint."""
    config = {"model": VIT, "num_classes": 7, "image_shape": [16, 16, 3]}
    config["preprocessing"] = PREPROCESSING
    return save(tmp_path_factory.mktemp("vit"), config, np.zeros((1, 16, 16, 3)))


def test_images_are_prepared_as_for_the_source(prepared_vit):
    """Grey images are standardised by the means over the source's channels."""
    init = f"--config.init_from={prepared_vit}"
    config = read_config("rpe_vit", [init]).data
    assert (config.interpolation, config.crop_pct) == ("bicubic", 0.8)
    info = ImageInfo("grey", tuple("01"), (16, 16, 1), (0.1,), (0.2,), 7, "here")
    white = np.full((1, 16, 16, 1), 255, np.uint8)
    found = data_lib.make_preprocess(config, info)({"image": white})
    np.testing.assert_allclose(found, (1 - 0.5) / 0.5, rtol=1e-6)
    assert "mean 0.5000" in data_lib.describe_preprocessing(config, info)
    streamed = dataclasses.replace(info, streamed=True)
    described = data_lib.describe_preprocessing(config, streamed)
    assert "resized to 20 pixels, by bicubic interpolation" in described
    colour = dataclasses.replace(info, image_shape=(16, 16, 3))
    white = np.full((1, 16, 16, 3), 255, np.uint8)
    found = data_lib.make_preprocess(config, colour)({"image": white})[0, 0, 0]
    np.testing.assert_allclose(found, [3, 1, 1 / 3], rtol=1e-6)
    plain = read_config("rpe_vit", [init, "--config.data.standardize=False"]).data
    assert data_lib.make_preprocess(plain, colour)({"image": white}).max() == 1


OWN = """
from relattn.data import image_options
from relattn.training import default_config

def get_config():
    config = default_config()
    config.init_from = {folder!r}
    config.data = image_options("mnist", 28)
    return config
"""


@pytest.mark.parametrize(
    ("standardize", "mean"), [(False, None), (True, INFO.mean)], ids=["plain", "mean"]
)
def test_images_are_prepared_as_for_the_run_that_was_saved(standardize, mean, tmp_path):
    model = {"name": "vit", "position": "learned", "qkv_bias": True, **SIZES}
    config = {"model": model, "num_classes": 5, "image_shape": [6, 6, 1]}
    config["data"] = dataclasses.asdict(INFO)
    config["training"] = {"data": {"image_size": 6, "standardize": standardize}}
    source = save(tmp_path / "saved", config, np.zeros((1, 6, 6, 1)))
    # Of these, the first standardises, the second does not.
    for recipe in ("rpe_vit", "performer"):
        found = read_config(recipe, [f"--config.init_from={source}"]).data
        assert (found.standardize, found.get("mean")) == (standardize, mean)
    own = tmp_path / "own.py"
    own.write_text(OWN.format(folder=str(source)))
    found = read_config(str(own)).data
    assert (found.standardize, found.get("mean")) == (standardize, mean)
    assert found.image_size == 28
    typed = read_config(str(own), [f"--config.data.standardize={not standardize}"])
    assert typed.data.standardize is not standardize
    # Without an effect, it would be refused.
    assert "mean" not in typed.data


@pytest.mark.slow
def test_a_fine_tuned_model_keeps_the_preprocessing(prepared_vit, tmp_path):
    words = ["--config=rpe_vit:smoke", f"--config.init_from={prepared_vit}", *QUICK]
    for _ in range(2):
        # The second time, it resumes.
        cli.train([*words, f"--workdir={tmp_path / 'run'}"])
    run = training.load_run(tmp_path / "run")
    run.save_pretrained(tmp_path / "saved")
    loaded = relattn.load_pretrained(tmp_path / "saved")
    images = np.random.default_rng(0).integers(0, 256, (3, 28, 28, 1), np.uint8)
    inputs = loaded.preprocess(images)
    np.testing.assert_array_equal(inputs, run.preprocess({"image": images}))
    resized = data_lib.preprocess(images, image_size=16)
    np.testing.assert_allclose(inputs, (resized - 0.5) / 0.5, atol=1e-6)
    # Two batches, of which the second is padded.
    found = run.features(images, layers=(0, -1), batch_size=2, progress=False)
    expected = loaded.features(inputs, layers=(0, -1))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), found, expected
    )
    logits = found.pooled @ run.variables["params"]["head"]["kernel"]
    logits = logits + run.variables["params"]["head"]["bias"]
    labels = run.predict(images, progress=False).labels
    np.testing.assert_array_equal(logits.argmax(-1), labels)


@pytest.mark.slow
def test_train_makes_the_model_of_a_gpt(gpt, tmp_path):
    words = ["--config=translution_gpt:smoke", f"--config.init_from={gpt}", *QUICK]
    cut = ["--config.data.context_length=5", "--config.model.dropout=0.5"]
    cli.train([*words, *cut, f"--workdir={tmp_path}"])
    run = training.load_run(tmp_path)
    assert model_options(run.config) == complete_options({**GPT, "dropout": 0.5})
    loaded = relattn.load_pretrained(gpt)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 256, (3, 5)), jnp.int32)
    expected = quick_jit(loaded.model.apply)(loaded.variables, tokens)
    found = quick_jit(run.model.apply)(run.variables, tokens)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert read_config("translution_gpt", words[1:2]).data.context_length == 11


def test_tables_of_offsets_are_cut_for_a_shorter_text(tmp_path):
    config = {"model": {**GPT, "position": "relative_bias", "num_layers": 1}}
    config |= {"vocab_size": 256, "context_length": 11}
    source = save(tmp_path, config, np.zeros((1, 11), np.int32))
    words = [f"--config.init_from={source}", "--config.data.context_length=5"]
    config = read_config("translution_gpt:smoke", words)
    new = make_task(config, data_lib.load_data(config.data).info)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 256, (3, 5)), jnp.int32)
    loaded = relattn.load_pretrained(source)
    np.testing.assert_allclose(
        quick_jit(new.model.apply)({"params": initial_state(new).params}, tokens),
        quick_jit(loaded.model.apply)(loaded.variables, tokens),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_rows_that_pad_the_vocabulary_are_cut(tokenizer, tmp_path):
    config = {"model": GPT, "vocab_size": 263, "context_length": 11}
    config["tokenizer"] = tokenizer
    source = save(tmp_path, config, np.zeros((1, 11), np.int32))
    words = [f"--config.init_from={source}", "--config.data.tokenizer=bytes"]
    config = read_config("translution_gpt:smoke", words)
    data = data_lib.load_data(config.data)
    if tokenizer == "gpt2":
        with pytest.raises(ValueError, match="params.embedding.embedding"):
            initial_state(make_task(config, data.info))
        return
    params = initial_state(make_task(config, data.info)).params
    table = relattn.load_pretrained(source).variables["params"]["embedding"]
    found = params["embedding"]["embedding"]
    np.testing.assert_array_equal(found, table["embedding"][:256])


def test_tokens_of_another_tokenizer_are_refused(tmp_path):
    """Their ids are those of other texts, even if there are as many."""
    name = "hf:0123456789abcdef"
    config = {"model": GPT, "vocab_size": 256, "context_length": 11, "tokenizer": name}
    source = save(tmp_path, config, np.zeros((1, 11), np.int32))
    words = [f"--config.init_from={source}", "--config.data.tokenizer=bytes"]
    config = read_config("translution_gpt:smoke", words)
    task = make_task(config, data_lib.load_data(config.data).info)
    message = f"{name!r}, but .* tokens of 'bytes': .* config.init_skip='embedding'$"
    with pytest.raises(ValueError, match=message):
        initial_state(task)
    config.init_skip = "embedding"
    assert initial_state(make_task(config, task.info))


@pytest.mark.slow
def test_the_tokenizer_is_that_of_the_model(tmp_path):
    name = "hf:0123456789abcdef"
    config = {"model": GPT, "vocab_size": 256, "context_length": 11, "tokenizer": name}
    save(tmp_path, config, np.zeros((1, 11), np.int32))

    def found(given=(), **data):
        config = default_config()
        config.init_from = str(tmp_path)
        config.data.update({"source": "text", "tokenizer": "", "data_dir": "", **data})
        take_model(config, given)
        return config.data.tokenizer

    assert found() == name
    (tmp_path / "tokenizer.json").write_text("{}")
    assert found() == str(tmp_path / "tokenizer.json")
    # A folder of tokens has the file too, and remains where it is.
    assert found(data_dir="tokens") == name
    assert found(["data.tokenizer"], tokenizer="gpt2") == "gpt2"


def test_a_run_resumes_after_its_source_has_gone(gpt, tmp_path):
    source, workdir = tmp_path / "source", tmp_path / "run"
    shutil.copytree(gpt, source)
    words = [
        "--config=translution_gpt:smoke",
        "--config.batch_size=8",
        "--config.num_devices=1",
        "--config.progress=False",
        "--config.schedule.name=constant",
        "--config.model.dropout=0.5",
    ]
    start = [*words, f"--config.init_from={source}"]
    cli.train([*start, "--config.num_steps=1", f"--workdir={workdir}"])
    source.rename(tmp_path / "gone")
    cli.train([*start, "--config.num_steps=2", f"--workdir={workdir}"])
    config = default_config()
    config.init_from = str(source)
    take_model(config, given=(), workdir=workdir)
    assert model_options(config) == complete_options({**GPT, "dropout": 0.5})
    # A run that was not interrupted.
    words += [f"--config.init_from={gpt}", "--config.num_steps=2"]
    cli.train([*words, f"--workdir={tmp_path / 'whole'}"])
    runs = [training.load_run(path, "latest") for path in (workdir, tmp_path / "whole")]
    assert [run.step for run in runs] == [2, 2]
    jax.tree.map(np.testing.assert_array_equal, *(run.variables for run in runs))
    # Another run does not have the model, nor does one that started elsewhere.
    for other in (tmp_path / "new", tmp_path / "whole"):
        with pytest.raises(FileNotFoundError, match="holds neither a converted model"):
            take_model(config, given=(), workdir=other)


@pytest.mark.parametrize("recipe", ["rpe_vit", "demo", "performer", "translution_vit"])
def test_overrides_change_the_model_of_the_source(vit, recipe):
    options = {"attention": "favor", "num_layers": 1, "norm_eps": 0.5}
    words = [f"--config.model.{name}={value}" for name, value in options.items()]
    size = "--config.data.image_size=24"
    config = read_config(recipe, [f"--config.init_from={vit}", *words, size])
    assert model_options(config) == complete_options({**VIT, **options})
    assert config.data.image_size == 24


@pytest.mark.slow
def test_grey_patches_become_patches_of_three_equal_channels(tmp_path):
    config = {"model": VIT, "num_classes": 5, "image_shape": [8, 16, 1]}
    folder = save(tmp_path, config, np.zeros((1, 8, 16, 1)))
    config = default_config()
    config.init_from = str(folder)
    config.data.image_size = 28
    take_model(config.lock(), given=())
    assert config.data.image_size == (8, 16)
    with config.ignore_type():
        config.data.image_size = 16
    info = ImageInfo("a set", tuple("01234"), (9, 9, 3), (0.1,), (0.2,), 200, "here")
    new = make_task(config, info)
    images = jnp.asarray(np.random.default_rng(1).random((2, 16, 16, 3)), jnp.float32)
    loaded = relattn.load_pretrained(folder, image_size=16)
    grey = images.mean(axis=-1, keepdims=True)
    np.testing.assert_allclose(
        quick_jit(new.model.apply)({"params": initial_state(new).params}, images),
        quick_jit(loaded.model.apply)(loaded.variables, grey),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.slow
def test_python_takes_what_the_model_leaves_out(vit, tmp_path):
    config = default_config()
    config.init_from = str(vit)
    config.model.attention = "favor"
    config.data.image_size = 24
    config.update(num_steps=1, batch_size=8, progress=False)
    training.train_and_evaluate(
        config, tmp_path, data=make_data(), devices=jax.local_devices()[:1]
    )
    found = training.load_run(tmp_path).config
    assert model_options(found) == complete_options({**VIT, "attention": "favor"})
    assert found.data.image_size == 24


@pytest.mark.slow
def test_errors_say_whose_values_they_are(vit, gpt, tmp_path):
    def message(recipe, source, *words):
        options = [f"--config.{word}" for word in words]
        words = [f"--config.init_from={source}", *options]

        def start():
            training.train_and_evaluate(read_config(recipe, words), tmp_path / "run")

        with pytest.raises((ValueError, OSError)) as raised:
            start()
        return str(raised.value)

    found = message("rpe_vit:smoke", vit, "data.image_size=28")
    assert "patch_size=(8, 8) does not divide the image of 28x28" in found
    assert f"(config.model is that of config.init_from={vit}, except for num_" in found
    found = message("rpe_vit:smoke", vit, "model.patch_size=3")
    assert "patch_size=3 does not divide the image of 16x16" in found
    assert "except for patch_size=3 ([8, 8] there)" in found
    found = message("rpe_vit:smoke", vit, "model.patch_size=4")
    assert "params.embedding.kernel" in found and "patch_size=4 ([8, 8] th" in found
    found = message("translution_gpt:smoke", gpt, "data.context_length=13")
    assert "params.position.learned.table; " in found
    assert "context_length=13 (11 there)" in found
    found = message("rpe_vit:smoke", gpt)
    assert "'gpt' is for tokens" in found and f"config.init_from={gpt}" in found
    found = message("rpe_vit:smoke", vit, "model.tie_head=True")
    assert "model 'vit' has no option 'tie_head'" in found
    found = message("rpe_vit:smoke", tmp_path / "no")
    assert f"config.init_from={tmp_path / 'no'} holds neither a converted" in found


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


@pytest.mark.slow
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
        logits = quick_jit(loaded.model.apply)(loaded.variables, inputs)
        np.testing.assert_allclose(
            jax.nn.softmax(logits), run.predict(images).probabilities, rtol=1e-5
        )
        smaller = relattn.load_pretrained(folder, image_size=3)
        assert smaller.preprocess(images).shape == (2, 3, 3, 1)
        oblong = relattn.load_pretrained(folder, image_size=(3, 5))
        assert oblong.preprocess(images).shape == (2, 3, 5, 1)
    card = (tmp_path / "saved" / "README.md").read_text()
    for text in ("license: cc0-1.0", "# vit on columns", "| test_accuracy | "):
        assert text in card
    # The results are those of images of the size of training.
    resized = training.load_run(tmp_path / "run", image_size=3)
    resized.save_pretrained(tmp_path / "resized")
    assert "test_accuracy" not in (tmp_path / "resized" / "README.md").read_text()
    assert "(pixels / 255 - mean) / std, mean 0.4000, std 0.2000." in card
    assert "arrays: uint8 [n, 5, 5, 1].\ninputs = pretrained.preprocess(images)" in card
    config = run.pretrained_config()
    config["data"].update(image_shape=(5, 5, 2), mean=(0.25, 0.5), std=(1.0, 2.0))
    card = model_card(config, {}, "cc0-1.0")
    assert "mean 0.2500, 0.5000, std 1.0000, 2.0000" in card
    config["data"]["image_shape"] = (5, 5, 1)
    config["training"]["data"]["standardize"] = False
    card = model_card(config, {}, "cc0-1.0")
    assert "Inputs are grey images of 5x5 pixels." in card
    assert "Values are pixels / 255." in card
    prepared = read_config("performer", [f"--config.init_from={tmp_path / 'run'}"])
    assert prepared.data.standardize
    assert prepared.data.mean == run.data.mean
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

"""``--config.key=value``: every key, in every form that it takes."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from relattn import models
from relattn.data import ImageInfo, input_shape
from relattn.spec import LARGEST_FLOAT, SMALLEST_FLOAT
from relattn.training.config import check_config
from relattn.training.config_file import read_config
from relattn.training.overrides import override

CONFIGS = ("demo", "performer", "baselines", "rpe_vit", "translution_vit")
CONFIGS += ("translution_gpt",)
# Another value of an option than its default, as text, by the default.
OTHER = {bool: ("True", True), int: ("3", 3), float: ("0.25", 0.25), str: ("x", "x")}


def options_of(name):
    found = {}
    for option, parameter in models.model_options(name).items():
        text, value = OTHER.get(type(parameter.default), ("bfloat16", "bfloat16"))
        found[option] = (text, value)
    return found


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("model", models.MODELS)
def test_every_option_of_every_model_can_be_set(config, model):
    options = options_of(model)
    assert options
    words = [f"--config.model.{name}={text}" for name, (text, _) in options.items()]
    found = read_config(config, [f"--config.model.name={model}", *words]).model
    for name, (_, value) in options.items():
        assert (found[name], type(found[name])) == (value, type(value)), name


def test_a_configuration_has_every_option_of_the_model_it_is_overridden_to():
    """Not the defaults of the model that the file names."""
    assert read_config("baselines:alexnet").model.dropout == 0.0
    found = read_config("baselines:alexnet", ["--config.model.name=vgg16"]).model
    assert found.dropout == 0.5
    assert {*found} == {"name", *models.model_options("vgg16")}
    assert (found.dtype, found.is_locked) == ("float32", True)


def test_fields_of_modules_are_options():
    """`models.model_options` leaves out only what the data decide."""
    for name, model in models.MODELS.items():
        fields = {field.name for field in dataclasses.fields(model)}
        sizes = {"num_classes", "num_axes", "vocab_size", "context_length"}
        assert {*models.model_options(name)} == fields - sizes - {"parent", "name"}


@pytest.mark.quick("4-4-demo", "4-4-rpe_vit", "4,2-value2-demo")
@pytest.mark.parametrize("config", ["demo", "rpe_vit"])
@pytest.mark.parametrize(
    "text, value", [("4", 4), ("(4, 2)", (4, 2)), ("4,2", (4, 2)), ("[4, 2]", (4, 2))]
)
def test_a_patch_is_a_side_or_a_pair(config, text, value):
    """The defaults are a pair and a side."""
    found = read_config(config, [f"--config.model.patch_size={text}"]).model
    patch = found.patch_size
    assert (tuple(patch) if isinstance(patch, list | tuple) else patch) == value
    shape = (28, 28, 1)
    model = models.build_model(found, num_classes=3, image_shape=shape)
    sides = (value, value) if isinstance(value, int) else value
    grid = models.patch_grid((28, 28), model.patch_size)
    assert grid == (28 // sides[0], 28 // sides[1])


@pytest.mark.parametrize("text, sides", [("8", (8, 8)), ("(8, 6)", (8, 6))])
def test_an_image_size_is_a_side_or_a_pair(text, sides):
    info = ImageInfo("grey", ("a", "b"), (4, 4, 1), (0.5,), (0.5,), 7, "")
    found = read_config("rpe_vit", [f"--config.data.image_size={text}"])
    assert input_shape(found.data, info) == (*sides, 1)


def test_an_option_of_images_need_not_be_in_the_configuration():
    given = {"interpolation": "bicubic", "crop_pct": 0.9, "mean": (0.5,)}
    options = [f"--config.data.{key}={value}" for key, value in given.items()]
    found = read_config("rpe_vit", options).data
    assert {key: found[key] for key in given} == given
    with pytest.raises(ValueError, match="no --config.data.interpol: did.*interpolat"):
        read_config("rpe_vit", ["--config.data.interpol=bicubic"])


@pytest.mark.parametrize("text", ["four", "None", "4.0", "(4,)", "(4, 2, 1)", "True"])
def test_other_patches_are_refused(text):
    found = read_config("demo", [f"--config.model.patch_size={text}"]).model
    with pytest.raises(ValueError, match="patch_size must be .* two|one side"):
        models.build_model(found, num_classes=3, image_shape=(28, 28, 1))


def test_an_option_without_default_takes_any_literal(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from ml_collections import ConfigDict\n"
        "def get_config():\n"
        "    return ConfigDict({'data': {'crop': None, 'sizes': (1, 2)}})\n"
    )
    options = ["--config.data.crop=7", "--config.data.sizes=None"]
    found = read_config(str(path), options).data
    assert (found.crop, found.sizes) == (7, None)
    assert read_config(str(path), ["--config.data.crop=None"]).data.crop is None


@pytest.mark.parametrize(
    "words, value",
    [
        (["--config.progress"], True),
        (["--noconfig.progress"], False),
        (["--config.progress", "false"], False),
        (["-config.progress=T"], True),
        (["--config.progress=0"], False),
    ],
)
def test_true_and_false_are_options_or_values(words, value):
    found = ConfigDict({"progress": not value, "seed": 0})
    override(found, [*words, "--config.seed", "-3"])
    assert (found.progress, found.seed) == (value, -3)


@pytest.mark.parametrize(
    "word, message",
    [
        ("--noconfig.progress=True", "'--noconfig.progress=True' is not an option"),
        ("--noconfig.seed", "--config.seed has no value"),
        ("--config.seed=True", "seed needs an integer, got 'True'"),
        ("--config=3", "'--config=3' is not an option"),
    ],
)
def test_a_refused_option_changes_nothing(word, message):
    found = ConfigDict({"progress": True, "seed": 1, "name": "x"})
    with pytest.raises(ValueError, match=message):
        override(found, ["--config.name=y", word])
    assert found.to_dict() == {"progress": True, "seed": 1, "name": "x"}


def test_an_unknown_key_is_answered_with_the_closest():
    for key, closest in (("model.nrm_eps", "norm_eps"), ("optimizer.beta1", "b1")):
        with pytest.raises(ValueError, match=f"no --config.{key}: did.*{closest}"):
            read_config("rpe_vit", [f"--config.{key}=1"])


def test_the_length_of_the_command_line_replaces_that_of_the_recipe():
    smoke = "rpe_vit:smoke"
    assert read_config(smoke).num_steps == 100
    found = read_config(smoke, ["--config.num_epochs=3"])
    assert (found.num_steps, found.num_epochs) == (0, 3)
    found = read_config("rpe_vit", ["--config.num_steps=3"])
    assert (found.num_steps, found.num_epochs) == (3, 0)
    both = ["--config.num_steps=3", "--config.num_epochs=2"]
    with pytest.raises(ValueError, match="num_epochs=2 exclude|num_steps=3 exclude"):
        read_config(smoke, both)
    found = read_config(smoke, ["--config.num_steps=3", "--config.num_epochs=0"])
    assert (found.num_steps, found.num_epochs) == (3, 0)
    found = read_config("rpe_vit:cpu", ["--config.eval_every_epochs=2"])
    assert (found.eval_every_steps, found.eval_every_epochs) == (0, 2)


def test_sgd_takes_no_betas():
    sgd = "--config.optimizer.name=sgd"
    # The recipe's b2 is 0.98.
    check_config(read_config("performer", [sgd]))
    for option in ("b1=0.5", "b1=0.9", "b2=0.999"):
        with pytest.raises(ValueError, match=f"optimizer.{option[:2]} needs .*'sgd'"):
            read_config("performer", [sgd, f"--config.optimizer.{option}"])
    config = read_config("performer", ["--config.optimizer.b1=0.5"])
    config.optimizer.name = "sgd"
    with pytest.raises(ValueError, match="b1=0.5 needs .*'adam' or 'adamw', got 'sgd'"):
        check_config(config)


@pytest.mark.parametrize(
    "key, value, becomes",
    [
        ("b1", 0.99999999, 1),
        ("b2", 0.99999999, 1),
        ("b1", 1e-50, 0),
        ("learning_rate", 1e-50, 0),
        ("clip_norm", 1e-40, 0),
        ("weight_decay", 1e-60, 0),
    ],
)
def test_numbers_are_checked_in_float32(key, value, becomes):
    config = read_config("rpe_vit")
    config.optimizer[key] = value
    with pytest.raises(ValueError, match=f"{key}={value!r} is {becomes} in float32"):
        check_config(config)
    if becomes:
        assert jnp.float32(value) == 1
        config.optimizer[key] = 0.9999999
        check_config(config)


def test_a_learning_rate_may_round_to_one():
    config = read_config("rpe_vit")
    config.optimizer.learning_rate = 1.00000001
    check_config(config)
    config.schedule.name, config.schedule.decay_rate = "exponential", 0.99999999
    with pytest.raises(ValueError, match="decay_rate=0.99999999 is 1 in float32"):
        check_config(config)


def test_options_of_models_are_checked_in_the_type_they_are_used_in():
    def build(**options):
        options = {"name": "vit", "patch_size": 4, **options}
        return models.build_model(options, num_classes=3, image_shape=(8, 8, 1))

    # Half of 1/256 is rounded to zero, as Python rounds half to even.
    for rate in (1 / 512, 0.999):
        with pytest.raises(ValueError, match="dropout is rounded to a multiple of 1/2"):
            build(dropout=rate)
    assert build(dropout=1 / 256).dropout == 1 / 256
    for eps in (1e-50, 1e39):
        with pytest.raises(ValueError, match="norm_eps in the range of float32.*got"):
            build(norm_eps=eps)
    for value in ("1e999", "1e-60"):
        with pytest.raises(ValueError, match="needs eps (of type|in the range of)"):
            build(attention=f"favor(eps={value})")
    assert np.isfinite(np.float32(LARGEST_FLOAT)) and np.float32(SMALLEST_FLOAT) > 0
    assert (np.finfo("f4").max, np.finfo("f4").tiny) == (LARGEST_FLOAT, SMALLEST_FLOAT)


def test_init_skip_needs_a_source():
    with pytest.raises(ValueError, match="init_skip='head' needs config.init_from"):
        check_config(read_config("rpe_vit", ["--config.init_skip=head"]))

from pathlib import Path

import pytest
from ml_collections import ConfigDict

from relattn.data import TextInfo, image_options
from relattn.models import build_model
from relattn.training import (
    check_config,
    default_config,
    read_config,
    train_and_evaluate,
)
from relattn.training.config import complete, differences, to_json
from relattn.training.task import Task
from tests.helpers.export import unchecked_annotations


def changed(key, value):
    config = default_config()
    config.update_from_flattened_dict({key: value})
    return config


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("batch_size", 0, r"config.batch_size must be at least 1, got 0"),
        ("accumulate_steps", 0, r"accumulate_steps must be at least 1, got 0"),
        ("redraw_every", -1, r"config.redraw_every must be at least 0, got -1"),
        ("num_epochs", 0, r"num_epochs and config.num_steps are both 0"),
        ("log_every_steps", 0, r"log_every_steps must be at least 1"),
        ("optimizer.learning_rate", 0.0, r"learning_rate must be positive, got 0.0"),
        ("optimizer.clip_norm", -1.0, r"clip_norm must be at least 0.0, got -1.0"),
        ("optimizer.weight_decay", 0.1, r"weight_decay=0.1 needs .*name='adamw'"),
        ("optimizer.name", "adamm", r"unknown config.optimizer.name 'adamm'.*'adam'"),
        ("schedule.decay_rate", 0.7, r"decay_rate=0.7 needs .*name='exponential', got"),
        ("schedule.decay_rate", -0.1, r"decay_rate must be at least 0.0, got -0.1"),
        ("schedule.name", "cosin", r"unknown config.schedule.name.*'cosine'"),
        ("optimizer.learning_rate", float("nan"), "must be finite, got nan"),
        ("optimizer.b2", float("-inf"), r"optimizer.b2 must be finite, got -inf"),
        ("redraw_every", 2**32, "redraw_every must be at most 2147483647, got 4294967"),
        ("num_steps", 2**31, r"config.num_steps must be at most 2147483647"),
        ("schedule.warmup_steps", 2**31, r"warmup_steps must be at most 2147483647"),
        ("optimizer.b1", 1.0, r"config.optimizer.b1 must be at least 0 and below 1"),
        ("optimizer.b2", -0.1, r"config.optimizer.b2 must be .* below 1, got -0.1"),
        (
            "label_smoothing",
            1.0,
            r"label_smoothing must be at least 0 and below 1",
        ),
        ("loggers", "wandb,tensorbord", r"config.loggers 'tensorbord': did you mean"),
        ("optimizer.momentum", 0.9, r"momentum=0.9 needs config.optimizer.name='sgd'"),
        ("optimizer.layer_decay", 0.0, r"layer_decay must be above 0 and at most 1"),
        ("optimizer.decay_mask", "matrix", r"decay_mask 'matrix': .* 'matrices'"),
        ("optimizer.learning_rate", 1e39, r"learning_rate must be at most 3.4028234"),
        ("optimizer.learning_rate", -1.0, r"learning_rate must be positive, got -1.0"),
        ("seed", 2**63, r"config.seed must be within \+-9223372036854775807, got 922"),
    ],
)
def test_values_out_of_range(key, value, message):
    with pytest.raises(ValueError, match=message):
        check_config(changed(key, value))


def test_the_last_of_several_seeds_is_in_range():
    config = changed("seed", 2**32 - 1)
    check_config(config)
    config.num_seeds = 2
    with pytest.raises(ValueError, match=r"seed must be at most 4294967294, got"):
        check_config(config)


def test_the_number_of_steps_fits_32_bits():
    config = default_config()
    config.num_epochs = 2**30
    check_config(config)
    info = TextInfo("plays", "bytes", 256, 7, 3 * config.batch_size, "a file")
    with pytest.raises(ValueError, match="of 3 steps each, has more than 2147483647"):
        Task.build(config, info)


def test_an_error_of_the_model_names_its_part_of_the_configuration():
    config = default_config()
    config.model = {"name": "gpt", "num_heads": 2, "dim": 7}
    info = TextInfo("plays", "bytes", 256, 7, 3 * config.batch_size, "a file")
    with pytest.raises(ValueError, match="^config.model: num_heads must divide dim u"):
        Task.build(config, info)


@pytest.mark.parametrize("value", [2.5, "3", True, None])
def test_values_of_another_type(value):
    config = default_config()
    config.unlock()
    del config.batch_size
    config.batch_size = value
    with pytest.raises(ValueError, match=r"config.batch_size must be of type int"):
        check_config(config)


def test_long_keys_and_values_are_cut():
    long = "a" * 10**6
    for key, value, message in [
        (long, 1, r"^unknown config\.a+\.\.\.: available: "),
        ("schedule.name", long, r"^unknown config\.schedule\.name 'a+\.\.\.: avail"),
        ("batch_size", -(10**5000), r"batch_size must be within .*, got a huge int$"),
    ]:
        with pytest.raises(ValueError, match=message) as raised:
            check_config(changed(key, value))
        assert len(str(raised.value)) < 800
    config = default_config().unlock()
    config.optimizer = ConfigDict({**config.optimizer, "b1": [long]})
    with pytest.raises(ValueError, match=r"b1 must be of type float, got \['a+\.\.\. "):
        check_config(config)


def test_an_integer_is_accepted_for_a_float():
    check_config(changed("optimizer.clip_norm", 1))


def test_unknown_and_missing_keys():
    config = default_config()
    config.batchsize = 3
    with pytest.raises(ValueError, match=r"unknown config.batchsize: did you mean"):
        check_config(config)
    config = default_config()
    del config.redraw_every
    with pytest.raises(ValueError, match=r"redraw_every is missing; its default is 0"):
        check_config(config)
    config = default_config()
    del config.model
    with pytest.raises(ValueError, match=r"config.model is missing"):
        check_config(config)


@pytest.mark.parametrize("given", ["performer:smoke", {"model": {}}, None])
def test_what_is_no_configuration_is_refused(given, tmp_path):
    message = r"config must be a ConfigDict, such as read_config\('performer:smoke'\)"
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        train_and_evaluate(given, tmp_path)


def test_options_and_models_of_other_types_are_refused():
    with unchecked_annotations():
        with pytest.raises(ValueError, match="options must be a list of texts, got '-"):
            read_config("performer:smoke", "--config.num_steps=3")
        with pytest.raises(ValueError, match="the path of a configuration, got 3"):
            read_config(3)
        with pytest.raises(ValueError, match="must be a dictionary, .* got 'vit'"):
            build_model("vit", num_classes=3, image_shape=(8, 8, 1))
    with pytest.raises(ValueError, match="num_classes must be at least 0 .* got -1"):
        build_model({"name": "vit"}, num_classes=-1, image_shape=(8, 8, 1))
    assert read_config(Path("configs/demo.py")) == read_config("demo")


def test_differences_leave_free_keys_out():
    old = default_config()
    old.data.data_dir = "here"
    old.data.num_workers = 2
    new = old.copy_and_resolve_references()
    new.data.data_dir = "there"
    new.data.num_workers = 3
    new.log_every_steps = 3
    new.eval_batch_size = 5
    new.loggers = ""
    new.checkpoint_every_steps = 3
    assert differences(to_json(old), to_json(new)) == []
    new.model.name = "performer"
    new.optimizer.b2 = 0.98
    assert differences(to_json(old), to_json(new)) == [
        "model.name: absent there, 'performer' now",
        "optimizer.b2: 0.999 there, 0.98 now",
    ]


def test_options_that_a_run_leaves_out_have_the_default_of_its_model():
    before = {"model": {"name": "vgg16", "dtype": "float32"}}
    now = {"model": {"name": "vgg16", "dropout": 0.5, "precision": ""}}
    assert differences(before, now) == []
    now["model"]["dropout"] = 0.0
    assert differences(before, now) == ["model.dropout: 0.5 there, 0.0 now"]
    assert differences(now, {"model": {"name": "resnet18"}}) == [
        "model.dropout: 0.0 there, absent now",
        "model.name: 'vgg16' there, 'resnet18' now",
    ]


def test_missing_keys_get_their_default():
    config = default_config()
    config.optimizer.clip_norm = 1
    config.model.name = "performer"
    old = to_json(config)
    del old["accumulate_steps"]
    assert complete(old).to_dict() == config.to_dict()
    config.accumulate_steps = 2
    assert differences(to_json(complete(old)), to_json(config)) == [
        "accumulate_steps: 1 there, 2 now"
    ]


def test_a_run_of_before_an_option_of_images_has_its_default():
    before = {"data": {"name": "mnist", "image_size": 28}}
    now = {"data": image_options("mnist", 28).to_dict()}
    assert not differences(before, now)
    now["data"]["augment"] = "rotate"
    assert differences(before, now) == ["data.augment: 'none' there, 'rotate' now"]


def test_an_empty_tokenizer_may_be_that_of_a_run():
    before, now = ({"data": {"tokenizer": name}} for name in ("bytes", ""))
    assert not differences(before, now) and not differences(now, before)
    now["data"]["tokenizer"] = "gpt2"
    assert differences(before, now) == ["data.tokenizer: 'bytes' there, 'gpt2' now"]

import importlib
import itertools

import jax
import jax.numpy as jnp
import pytest

from relattn.models import build_model
from relattn.training import check_config

DATASETS = ["mnist", "fashion_mnist", "cifar10"]
VARIANTS = ["none", "learnable_sincos", "constrained_sincos", "banded"]
PAIRS = [",".join(pair) for pair in itertools.product(DATASETS, VARIANTS)]
CONFIGS = [("performer", pair) for pair in ["", "smoke", *PAIRS]]
CONFIGS += [("demo", variant) for variant in VARIANTS]


def get_config(name, argument):
    return importlib.import_module(f"configs.{name}").get_config(argument)


@pytest.mark.parametrize(("name", "argument"), CONFIGS)
def test_config_is_locked_and_complete(name, argument):
    config = get_config(name, argument)
    check_config(config)
    for part in (config, config.model, config.data, config.optimizer):
        assert part.is_locked
    with pytest.raises(AttributeError, match="learning_rates"):
        config.optimizer.learning_rates = 1.0


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["performer", "demo"])
def test_config_builds_its_model(name, variant):
    config = get_config(name, variant)
    model = build_model(config.model.to_dict(), num_classes=10, image_shape=(32, 32, 1))
    logits, _ = jax.eval_shape(
        model.init_with_output, jax.random.key(0), jnp.zeros((1, 32, 32, 1))
    )
    assert logits.shape == (1, 10)


@pytest.mark.parametrize("name", ["performer", "demo"])
def test_config_says_how_to_launch_it(name):
    command = f"python train.py --config=configs/{name}.py:"
    assert command in importlib.import_module(f"configs.{name}").__doc__


@pytest.mark.parametrize(
    ("name", "argument", "message"),
    [
        ("performer", "fashion_mnits,none", "'fashion_mnits': did you mean 'fashion_m"),
        ("performer", "mnist,banned", "no argument 'banned': did you mean 'banded'"),
        ("demo", "nnone", "no argument 'nnone': did you mean 'none'"),
    ],
)
def test_unknown_argument_is_refused_with_the_closest(name, argument, message):
    with pytest.raises(ValueError, match=message):
        get_config(name, argument)


def test_the_arguments_choose_the_recipe():
    config = get_config("performer", "cifar10,banded")
    assert (config.data.name, config.data.standardize) == ("cifar10", True)
    assert config.model.attention == "banded(clip=6)"
    assert get_config("performer", "banded,cifar10").to_dict() == config.to_dict()
    assert not get_config("performer", "mnist,none").data.standardize
    assert get_config("performer", "fashion_mnist,smoke").data.source == "embedded"

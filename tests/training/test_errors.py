import json
from types import SimpleNamespace

import jax
import pytest

from relattn.command import (
    explain_no_backend,
    explain_out_of_memory,
    is_user_error,
)
from relattn.training import NonFiniteLossError, default_config
from relattn.training.config import check_config
from relattn.training.config_file import read_config
from relattn.training.loop import TrainLoop


def raised_by(function):
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_only_errors_of_the_package_are_user_errors():
    config = default_config()
    config.batch_size = 0
    assert is_user_error(raised_by(lambda: check_config(config)))
    assert not is_user_error(raised_by(lambda: int("three")))
    assert not is_user_error(raised_by(lambda: default_config().missing))
    assert not is_user_error(raised_by(lambda: json.loads("{")))


@pytest.mark.parametrize(
    "override, message",
    [
        ("sed=3", r"no --config\.sed: did you mean 'seed'\?"),
        ("no.such=3", r"no --config\.no\.such: available: accumul"),
        ("seed.x=3", r"no --config\.seed\.x: seed is a value and has"),
        ("seed=x\r\ny", r"^--config.seed needs an integer, got 'x\\r\\ny'$"),
        ("seed=1e3", "^--config.seed needs an integer, got '1e3'$"),
        ("optimizer.learning_rate=a", "learning_rate needs a number, got 'a'$"),
        pytest.param(
            "seed=" + "1" * 10**5 + "x", r"needs an integer, got '1+\.\.\.$", id="long"
        ),
        ("learning_rate=1", "did you mean --config.optimizer.learning_rate[?]$"),
        ("optimizer.batch_size=1", "batch_size: did you mean --config.batch_size[?]$"),
        (
            "norm_eps=1",
            "no --config.norm_eps: did you mean --config.model.norm_eps[?]$",
        ),
        ("seed", "^--config.seed has no value: write --config.seed=value$"),
        ("optimizer.name", "^--config.optimizer.name has no value: write"),
        ("progress=no", "^--config.progress needs True or False, got 'no'$"),
        ("model.patch_size[0]=3", r"^--config.model.patch_size\[0\] is not a key: "),
        ("model['dim']=3", r"^--config.model\['dim'\] is not a key: "),
        ("=3", r"^--config. is not a key: write --config.key=value"),
        ("optimizer=sgd", r"^--config.optimizer has no value .*config.optimizer.name"),
        pytest.param("model=" + "-" * 10**5 + "1", "has no value of its", id="nested"),
    ],
)
def test_an_invalid_override_is_one_sentence(override, message):
    with pytest.raises(ValueError, match=message) as raised:
        read_config("configs/demo.py", [f"--config.{override}"])
    assert len(str(raised.value)) < 600
    assert len(str(raised.value).splitlines()) == 1


def test_running_out_of_memory_is_one_sentence():
    message = "RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.\nA\nlong\ntable"
    text = explain_out_of_memory(jax.errors.JaxRuntimeError(message))
    assert text.startswith("a device ran out of memory (Out of memory allocating 7 b")
    assert "table" not in text
    for key in ("batch_size", "accumulate_steps", "model.remat", "parallel"):
        assert f"config.{key}" in text
    assert explain_out_of_memory(ValueError(message)) is None
    text = explain_out_of_memory(MemoryError("Unable to allocate 7 TiB"))
    assert text.startswith("the host ran out of memory (Unable to allocate 7 TiB): ")


def test_the_error_has_its_step():
    assert NonFiniteLossError("the loss is nan", 8).step == 8


def test_a_platform_without_its_package_is_one_sentence():
    """As JAX without CUDA and with JAX_PLATFORMS=cuda."""
    code = compile("assert False", "jax/_src/xla_bridge.py", "exec")
    text = explain_no_backend(raised_by(lambda: exec(code)))
    assert text.startswith("JAX_PLATFORMS cannot be used: JAX has none of ")
    assert explain_no_backend(AssertionError()) is None


def test_printed_lines_do_not_control_the_terminal(capsys):
    TrainLoop._print(SimpleNamespace(_shows_progress=True), "in \x1b[2J\n/data")
    assert capsys.readouterr().out == "In \\x1b[2J\\n/data\n"

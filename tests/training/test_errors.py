import json
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from relattn.evaluation.runs import read_config
from relattn.training import (
    NonFiniteLossError,
    default_config,
    explain_flag_error,
    explain_out_of_memory,
    is_user_error,
)
from relattn.training.config import check_config

ROOT = Path(__file__).parents[2]


def raised_by(function):
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_only_what_the_package_raises_is_a_users_error():
    config = default_config()
    config.batch_size = 0
    assert is_user_error(raised_by(lambda: check_config(config)))
    assert not is_user_error(raised_by(lambda: int("three")))
    assert not is_user_error(raised_by(lambda: default_config().missing))
    assert not is_user_error(raised_by(lambda: json.loads("{")))


@pytest.mark.parametrize(
    "override, message",
    [
        ("sed=3", r"no --config.\[...\] key 'sed' Did you mean \"seed\""),
        ("no.such=3", r"no --config.\[...\] key 'no'$"),
        ("seed.x=3", r"no --config.\[...\] key Attribute .*seed.x$"),
        ("seed=x\r\ny", "^flag --config.seed=x y: invalid literal for int"),
        pytest.param(
            "seed=" + "1" * 10**5 + "x", r"^flag --config.seed=1+\.\.\.$", id="long"
        ),
        ("model.attention[0]=3", r"^--config.\[...\] cannot be read: 0 is not a valid"),
        ("=3", r"^--config.\[...\] cannot be read: Could not parse ''"),
        pytest.param("model=" + "-" * 10**5 + "1", "cannot be read", id="nested"),
    ],
)
def test_an_override_that_cannot_be_is_one_sentence(override, message):
    with pytest.raises(ValueError, match=message) as raised:
        read_config("configs/demo.py", [f"--config.{override}"])
    assert len(str(raised.value)) < 600
    assert len(str(raised.value).splitlines()) == 1


def test_an_error_in_a_configuration_keeps_its_traceback():
    assert explain_flag_error(raised_by(lambda: {}["key"])) is None
    assert explain_flag_error(raised_by(lambda: default_config().missing)) is None


def test_a_configuration_that_is_no_python_is_one_sentence(tmp_path):
    path = tmp_path / "config.txt"
    path.write_text("A title\n\nAnd text.")
    error = raised_by(lambda: runpy.run_path(str(path)))
    text = explain_flag_error(error)
    assert text.startswith(f"{path}, line 1, is not Python (invalid syntax): --config")


def test_memory_that_runs_out_is_one_sentence():
    message = "RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.\nA\nlong\ntable"
    text = explain_out_of_memory(jax.errors.JaxRuntimeError(message))
    assert text.startswith("a device ran out of memory (Out of memory allocating 7 b")
    assert "table" not in text
    for key in ("batch_size", "accumulate_steps", "model.remat", "parallel"):
        assert f"config.{key}" in text
    assert explain_out_of_memory(ValueError(message)) is None
    text = explain_out_of_memory(MemoryError("Unable to allocate 7 TiB"))
    assert text.startswith("the host ran out of memory (Unable to allocate 7 TiB): ")


def test_the_error_knows_its_step():
    assert NonFiniteLossError("the loss is nan", 8).step == 8


@pytest.mark.parametrize(
    "flag, message",
    [
        ("--config.batch_size=0", "train.py: config.batch_size must be at least 1"),
        ("--config.no.such=3", "train.py: there is no --config.[...] key 'no'"),
        ("extra", "train.py: unexpected argument 'extra': options are --name=value"),
        (
            "--config=configs/performer.py:smok",
            "train.py: configs/performer.py has no argument 'smok': did you mean 'smo",
        ),
        ("--config.seed=7", "train.py: a device ran out of memory (Out of memory): l"),
    ],
)
def test_train_ends_with_one_sentence(tmp_path, flag, message):
    path = tmp_path / "config.py"
    path.write_text(
        "import jax\n"
        "from relattn import training\n"
        "from relattn.training import default_config\n"
        "def train(config, workdir):\n"
        "    training.check_config(config)\n"
        "    raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory.')\n"
        "def get_config():\n"
        "    training.train_and_evaluate = train\n"
        "    return default_config().lock()\n"
    )
    command = [sys.executable, "train.py", f"--config={path}", flag]
    result = subprocess.run(
        [*command, f"--workdir={tmp_path / 'run'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(message)
    assert not (tmp_path / "run").exists()

import json
import subprocess
import sys
from pathlib import Path

import pytest

from relattn.training import NonFiniteLossError, default_config, is_user_error
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


def test_the_error_knows_its_step():
    assert NonFiniteLossError("the loss is nan", 8).step == 8


@pytest.mark.parametrize(
    "flag, message",
    [
        ("--config.batch_size=0", "train.py: config.batch_size must be at least 1"),
        ("--config.batchsize=3", "no --config.[...] key 'batchsize' Did you mean"),
    ],
)
def test_train_ends_with_one_sentence(tmp_path, flag, message):
    path = tmp_path / "config.py"
    path.write_text(
        "from relattn.training import default_config\n"
        "def get_config():\n"
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
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()

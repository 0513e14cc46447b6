"""One run at a time in a run directory; clocks and host names do not matter."""

import errno
import json
import math
import os
import socket
import subprocess
import sys
import time

import pytest

from relattn import training
from relattn.training import workdir
from relattn.training.task import Task
from relattn.training.workdir import (
    LOCK,
    back_up,
    lock_workdir,
    read_result,
    usable_workdir,
    write_json,
    write_run_json,
)
from tests.helpers.sentences import assert_refused
from tests.training.conftest import make_data


@pytest.mark.usefixtures("tiny")
def test_a_second_run_in_a_directory_is_refused(config, tmp_path, one_device):
    config.num_epochs, config.redraw_every = 1, 0
    refused = []

    def on_step(done):
        if done == 2:
            before = sorted(tmp_path.rglob("*"))
            with pytest.raises(training.WorkdirError) as error:
                training.train_and_evaluate(config, tmp_path, devices=one_device)
            refused.append(str(error.value))
            assert sorted(tmp_path.rglob("*")) == before

    training.train_and_evaluate(config, tmp_path, devices=one_device, on_step=on_step)
    assert refused == [
        f"--workdir {tmp_path} is in use by process {os.getpid()} on "
        f"{socket.gethostname()}: wait until it has ended, or choose another directory"
    ]
    assert not (tmp_path / LOCK).exists()


def test_the_lock_of_a_process_ends_with_it(tmp_path):
    """The contents of the file do not matter: here another host and a future time."""
    path = tmp_path / LOCK
    hold = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); "
    hold += "print(flush=True); sys.stdin.read()"
    path.write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
    tomorrow = time.time() + 86400
    os.utime(path, (tomorrow, tomorrow))
    holder = subprocess.Popen(
        [sys.executable, "-c", hold, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        holder.stdout.readline()
        with (
            pytest.raises(training.WorkdirError, match="process 1 on elsewhere: wait"),
            lock_workdir(tmp_path),
        ):
            pass
        path.write_text("")
        with (
            pytest.raises(training.WorkdirError, match="in use by another process: "),
            lock_workdir(tmp_path),
        ):
            pass
        holder.kill()
        holder.wait()
        path.write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
        os.utime(path, (tomorrow, tomorrow))
        with lock_workdir(tmp_path):
            record = {"pid": os.getpid(), "host": socket.gethostname()}
            assert json.loads(path.read_text()) == record
    assert not path.exists()


def test_a_removed_lock_file_does_not_count(tmp_path, monkeypatch):
    class Racing:
        LOCK_EX, LOCK_NB = workdir.fcntl.LOCK_EX, workdir.fcntl.LOCK_NB
        calls = 0

        @classmethod
        def flock(cls, file, operation):
            cls.calls += 1
            if cls.calls == 1:
                (tmp_path / LOCK).unlink()

    monkeypatch.setattr(workdir, "fcntl", Racing)
    with lock_workdir(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert Racing.calls == 2


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    class Unsupported:
        LOCK_EX, LOCK_NB = workdir.fcntl.LOCK_EX, workdir.fcntl.LOCK_NB

        @staticmethod
        def flock(file, operation):
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(workdir, "fcntl", Unsupported)
    with (
        pytest.warns(UserWarning, match="cannot be locked .*: start no other run"),
        lock_workdir(tmp_path),
    ):
        pass
    monkeypatch.setattr(workdir, "fcntl", None)
    with lock_workdir(tmp_path):
        assert not (tmp_path / LOCK).exists()


@pytest.fixture
def task(tiny, config):
    return Task.build(config, make_data().info)


def start_at(workdir, task, devices, step):
    """Returns the steps of the starts in run.json."""
    write_run_json(workdir, task, devices, step)
    record = json.loads((workdir / "run.json").read_text())
    assert record["data"]["name"] == "columns"
    return [start["step"] for start in record["starts"]]


def test_every_start_is_listed(tmp_path, task, one_device):
    assert start_at(tmp_path, task, one_device, 0) == [0]
    assert start_at(tmp_path, task, one_device, 3) == [0, 3]
    assert start_at(tmp_path, task, one_device, 0) == [0]


START = b'{"config": {}, "data": {}, "starts": [%s]}'
CONTENTS = [
    b"",
    b"{}",
    b"5",
    b'{"starts": 5}',
    b"\xff",
    b"[" * 100000,
    START % b"7",
    START % b'{"num_devices": 1e999}',
    START % b'{"num_devices": 1, "device": "a", "cpu": "b", "cores": 2}',
]


@pytest.mark.parametrize("content", CONTENTS, ids=lambda content: repr(content[:20]))
def test_an_unreadable_run_json(tmp_path, task, one_device, content):
    path = tmp_path / "run.json"
    path.write_bytes(content)
    message = r"run.json is damaged and written again without its list .* kept as .*/"
    with pytest.warns(UserWarning, match=f"{message}run.json.damaged$"):
        assert start_at(tmp_path, task, one_device, 3) == [3]
    assert (tmp_path / "run.json.damaged").read_bytes() == content
    assert start_at(tmp_path, task, one_device, 5) == [3, 5]


GOOD_RESULT = {"step": 3, "num_steps": 3, "epochs": 1.5, "stopped_early": False}
GOOD_RESULT |= {"test_loss": 0.5}


def test_the_cores_are_those_that_xla_uses(monkeypatch):
    monkeypatch.setenv("NPROC", "1")
    assert workdir.describe_cpu()["cores"] == 1


def test_read_result_of_a_seed_and_a_checkpoint(tmp_path):
    assert read_result(tmp_path, 7, 2) == {}
    result = {**GOOD_RESULT, "best_step": 2}
    runs = [{**result, "seed": seed, "test_loss": float(seed)} for seed in (5, 7)]
    write_json(tmp_path / "result.json", {**GOOD_RESULT, "runs": runs})
    assert read_result(tmp_path, 7, 2) == {**result, "seed": 7, "test_loss": 7.0}
    assert read_result(tmp_path, 7, 3) == {}
    # A loss may be infinite.
    write_json(tmp_path / "result.json", {**GOOD_RESULT, "test_loss": math.inf})
    assert read_result(tmp_path, 7, 2)["test_loss"] == math.inf


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is not JSON"),
        (b"\xff", "byte 0 is not UTF-8"),
        (b"[" * 100000, "50 nested lists and objects"),
        (b"[]", "which must be an object"),
        (b"{}", "has no step, which must be an integer"),
        (b'{"step": 3, "step": 4}', "'step' is given twice"),
        ({"step": True}, "has step=True, which must be an integer from 0 to"),
        ({"step": -1}, "has step=-1, which must be an integer from 0 to"),
        ({"step": 10**30}, "an integer has more than 20 characters"),
        ({"stopped_early": 0}, "has stopped_early=0, which must be true or false"),
        ({"test_loss": "<b>"}, "has test_loss='<b>', which must be"),
        ({"test_loss": [0.5]}, r"has test_loss=\[0.5\], which must be"),
        ({"runs": {}}, "has runs={}, which must be a list"),
        ({"runs": [GOOD_RESULT]}, r"has no runs\[0\].seed, which must be an integer"),
    ],
    ids=lambda value: None if isinstance(value, str) else repr(value)[:20],
)
def test_a_damaged_result_is_named(tmp_path, content, problem):
    path = tmp_path / "result.json"
    if isinstance(content, dict):
        content = json.dumps({**GOOD_RESULT, **content}).encode()
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"result.json .*{problem}.*: repeat") as info:
        read_result(tmp_path, 3, 2)
    assert len(str(info.value)) < 400 + len(str(path))


@pytest.mark.parametrize("target", ["victim", "nowhere"])
def test_links_in_a_run_directory_are_not_followed(target, tmp_path):
    """A run directory that others made may have links to files outside of it."""
    (tmp_path / "victim").write_text("precious\n")
    workdir = tmp_path / "run"
    workdir.mkdir()
    replaced = ("run.json", "result.json", "result.json.tmp", "a.damaged")
    for name in (*replaced, LOCK):
        (workdir / name).symlink_to(tmp_path / target)
    for name in ("run.json", "result.json"):
        write_json(workdir / name, {"a": 1})
    (workdir / "a").write_text("damaged")
    assert back_up(workdir / "a").name == "a.damaged2"
    with pytest.raises(OSError, match="symbolic link"), lock_workdir(workdir):
        pass
    assert (tmp_path / "victim").read_text() == "precious\n"
    assert {path.name for path in tmp_path.iterdir()} == {"victim", "run"}
    assert not (workdir / "result.json").is_symlink()


@pytest.mark.parametrize("name", ["a[1]", "a*", "a?/b", "\udcff"])
def test_paths_in_which_orbax_loses_its_files_are_refused(name, tmp_path):
    assert_refused(lambda: usable_workdir(tmp_path / name), "--workdir", "where orbax")
    assert not list(tmp_path.iterdir())


def test_a_directory_of_a_saved_model_is_refused(tmp_path):
    (tmp_path / "model.safetensors").touch()
    assert_refused(
        lambda: usable_workdir(tmp_path), "--workdir", "saved model", "move it away"
    )

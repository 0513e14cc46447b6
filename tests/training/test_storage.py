"""A full disk and a read-only directory: one sentence, and nothing written is lost."""

import asyncio
import contextlib
import gc
import math
import os
import resource
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from relattn import training
from relattn.command import is_user_error
from relattn.training.checkpoint import CheckpointWriter, checkpoint_steps
from relattn.training.events import EventsFile
from relattn.training.records import usable_workdir, write_json
from tests.training.interrupted import final_state, untimed, untimed_rows
from tests.unprivileged import public_folder, without_privileges


@contextlib.contextmanager
def files_of_at_most(size):
    """Every write beyond that fails, in this process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # What is compiled meanwhile is not kept, which would be such a write.
    keep_from = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", math.inf)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", keep_from)


@contextlib.contextmanager
def disk_of_a_megabyte(folder):
    """False where mounting is not allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]
    try:
        mounted = not subprocess.run(mount, capture_output=True).returncode
    except OSError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", folder], check=True)


@contextlib.contextmanager
def filled(folder):
    """No space but for small files."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    os.truncate(filler, filler.stat().st_size - 20480)
    try:
        yield
    finally:
        filler.unlink()


def wait_for_a_checkpoint(workdir):
    """It is written in the background."""
    while not checkpoint_steps(workdir / "checkpoints"):
        time.sleep(0.01)


@pytest.mark.usefixtures("tiny")
def test_a_checkpoint_that_cannot_be_written(config, tmp_path, one_device, capfd):
    config.redraw_every = 0
    with config.unlocked():
        config.model.width = 101
    whole, limited, full = (tmp_path / name for name in ("whole", "limited", "full"))
    expected = training.train_and_evaluate(config, whole, devices=one_device)

    def check(workdir, context, reason):
        failing = contextlib.ExitStack()

        def on_step(done):
            if done == 7:
                wait_for_a_checkpoint(workdir)
                failing.enter_context(context)

        with (
            failing,
            pytest.raises(
                training.CheckpointError,
                match=rf"/10 cannot be written \({reason}\); the last good checkpoint "
                r"is .*/5: make room, or the directory writable, and give the same",
            ) as error,
        ):
            training.train_and_evaluate(
                config, workdir, devices=one_device, on_step=on_step
            )
        assert is_user_error(error.value)
        assert checkpoint_steps(workdir / "checkpoints") == [5]
        assert training.load_run(workdir).step == 5
        actual = training.train_and_evaluate(config, workdir, devices=one_device)
        assert untimed(actual) == untimed(expected)
        assert untimed_rows(workdir) == untimed_rows(whole)
        states = final_state(workdir), final_state(whole)
        jax.tree.map(np.testing.assert_array_equal, *states)

    check(limited, files_of_at_most(9000), "File too large")
    with disk_of_a_megabyte(full) as mounted:
        if mounted:
            check(full, filled(full), "No space left on device")
    assert "Traceback" not in "".join(capfd.readouterr())


def test_what_fails_after_the_writer_was_closed_is_not_printed(
    tmp_path, caplog, monkeypatch
):
    """A write of many files fails once, and its other files whenever they are due."""
    raised = []

    def hook(unraisable):
        raised.append(str(unraisable.exc_value))

    monkeypatch.setattr(sys, "unraisablehook", hook)
    for _ in range(2):
        CheckpointWriter(tmp_path / "checkpoints").close()
    for text in "Event loop is closed", "another":
        sys.unraisablehook(SimpleNamespace(exc_value=RuntimeError(text)))
    assert raised == ["another"]
    loop = asyncio.new_event_loop()
    for text in "Failed to write 9 bytes to file 3: Disk full [x]", "another":
        loop.create_future().set_exception(ValueError(text))
    gc.collect()
    loop.close()
    assert [str(record.exc_info[1]) for record in caplog.records] == ["another"]


@pytest.mark.usefixtures("tiny")
def test_metrics_that_cannot_be_written(config, tmp_path, one_device):
    config.redraw_every = 0
    full = contextlib.ExitStack()

    def on_step(done):
        if done == 7:
            wait_for_a_checkpoint(tmp_path)
            full.enter_context(files_of_at_most(100))

    with (
        full,
        pytest.raises(
            training.WorkdirError,
            match=r"metrics.jsonl cannot be written \(File too large\); what was",
        ) as error,
    ):
        training.train_and_evaluate(
            config, tmp_path, devices=one_device, on_step=on_step
        )
    assert is_user_error(error.value)
    assert checkpoint_steps(tmp_path / "checkpoints") == [5]
    result = training.train_and_evaluate(config, tmp_path, devices=one_device)
    assert result["step"] == 15


def test_events_fail_at_once_where_the_disk_is_full(tmp_path):
    """A writer with a queue and a thread would wait for ever."""
    events = EventsFile(tmp_path, start_step=0)
    many = {f"train/{name}": 0.5 for name in range(99)}
    with files_of_at_most(100), pytest.raises(OSError, match="File too large"):
        events.add(3, many)
    events.close()


def test_a_file_that_cannot_be_replaced_stays(tmp_path):
    path = tmp_path / "result.json"
    write_json(path, {"step": 3})
    with (
        files_of_at_most(5),
        pytest.raises(
            training.WorkdirError, match=r"result.json cannot be written \(File too la"
        ),
    ):
        write_json(path, {"step": 5})
    assert path.read_text() == '{\n  "step": 3\n}\n'
    write_json(path, {"step": 5})
    assert path.read_text() == '{\n  "step": 5\n}\n'


@pytest.fixture
def public():
    with public_folder() as folder:
        yield folder


@pytest.mark.usefixtures("tiny")
def test_a_read_only_directory(config, public, one_device):
    config.redraw_every = 0
    workdir = public / "run"
    training.train_and_evaluate(config, workdir, devices=one_device)
    for path in [workdir, *workdir.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = {p: p.stat().st_mtime_ns for p in workdir.rglob("*")}
    with without_privileges():
        with pytest.raises(
            training.WorkdirError,
            match=r"run is not writable \(Permission denied\): choose another",
        ):
            training.train_and_evaluate(config, workdir, devices=one_device)
        with pytest.raises(training.WorkdirError, match="not writable"):
            usable_workdir(workdir / "checkpoints" / "run")
        assert training.load_run(workdir, "latest").step == 15
    assert {p: p.stat().st_mtime_ns for p in workdir.rglob("*")} == before
    for path in [workdir, *workdir.rglob("*")]:
        path.chmod(0o755)


def test_an_empty_directory_name_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(training.WorkdirError, match="--workdir is empty, as a"):
        usable_workdir("")


def test_a_home_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match=r"^--workdir=~no.such.user/x begins with a h"):
        usable_workdir("~no.such.user/x")

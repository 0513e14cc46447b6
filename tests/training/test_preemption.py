"""Signals: a checkpoint is written, and the same command resumes from it."""

import asyncio
import contextlib
import errno
import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from PIL import Image, ImageOps

from relattn import data, training
from relattn.data import image_io, streaming, tfds
from relattn.training import checkpoint, loop, run_metadata
from relattn.training.checkpoint import checkpoint_steps
from relattn.training.config_file import read_config
from relattn.training.metrics_log import read_rows
from relattn.training.preemption import Preemption
from tests.helpers.interrupted import final_state, untimed

ROOT = Path(__file__).parents[2]
# What train.py trains here: the tiny model of the tests.
CONFIG = """
from relattn import data, models
from tests.training.conftest import build_tiny, make_config, make_data

models.build_model = build_tiny
data.load_data = lambda config: make_data()

def get_config():
    config = make_config()
    config.num_epochs = 100000
    config.redraw_every = 0
    return config
"""


def unhandled(number, frame):
    """Without a handler, the signal would end the tests."""


def signal_at(step, number=signal.SIGTERM):
    def on_step(done):
        if done == step:
            os.kill(os.getpid(), number)

    return on_step


@pytest.mark.quick("7")
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("step", [7, 10])
def test_a_preempted_run_equals_an_uninterrupted_one(
    config, tmp_path, one_device, step
):
    config.redraw_every = 0
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expected = training.train_and_evaluate(config, whole, devices=one_device)
    before = signal.signal(signal.SIGTERM, unhandled)
    try:
        with pytest.raises(
            training.PreemptedError,
            match=rf"SIGTERM at step {step} of 15, .*/{step}: repeat the command",
        ) as error:
            training.train_and_evaluate(
                config, parts, devices=one_device, on_step=signal_at(step)
            )
        assert signal.getsignal(signal.SIGTERM) is unhandled
    finally:
        signal.signal(signal.SIGTERM, before)
    assert error.value.step == step
    assert checkpoint_steps(parts / "checkpoints") == [5, step]
    assert read_rows(parts / "metrics.jsonl")[-1]["step"] == step
    actual = training.train_and_evaluate(config, parts, devices=one_device)
    assert untimed(actual) == untimed(expected)
    jax.tree.map(np.testing.assert_array_equal, final_state(parts), final_state(whole))


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_ctrl_c_saves_and_a_second_one_interrupts(config, tmp_path, one_device):
    # A shell ignores it for a command in the background.
    before = signal.default_int_handler
    signal.signal(signal.SIGINT, before)
    with pytest.raises(
        training.PreemptedError, match="Stopped by SIGINT at step 3 "
    ) as e:
        training.train_and_evaluate(
            config, tmp_path, devices=one_device, on_step=signal_at(3, signal.SIGINT)
        )
    assert e.value.by_hand and checkpoint_steps(tmp_path / "checkpoints") == [3]

    def twice(done):
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        training.train_and_evaluate(config, tmp_path, devices=one_device, on_step=twice)
    assert checkpoint_steps(tmp_path / "checkpoints") == [3]
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.quick("load_data")
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("when", ["load_data", "final_results"])
def test_sigterm_outside_of_the_updates(
    config, tmp_path, one_device, monkeypatch, when
):
    place = data if when == "load_data" else loop
    function = getattr(place, when)

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(place, when, interrupted)
    with pytest.raises(training.PreemptedError, match="nothing is lost: repeat"):
        training.train_and_evaluate(config, tmp_path, devices=one_device)
    monkeypatch.setattr(place, when, function)
    assert training.train_and_evaluate(config, tmp_path, devices=one_device)


def read_with_checkpoint(monkeypatch, interrupted, tmp_path):
    monkeypatch.setattr(ocp.Checkpointer, "restore", interrupted)
    return lambda: checkpoint._read_meta(tmp_path)


def read_prepared(monkeypatch, interrupted, tmp_path):
    def read():
        with tfds.reading_prepared(tmp_path):
            interrupted()

    return read


def open_an_image(monkeypatch, interrupted, tmp_path):
    monkeypatch.setattr(Image, "open", interrupted)
    return lambda: image_io.open_image(io.BytesIO(), "image.png")


def decode_an_image(monkeypatch, interrupted, tmp_path):
    monkeypatch.setattr(Image.Image, "load", interrupted)
    return lambda: image_io.decode_image(Image.new("RGB", (2, 3)), "image.png")


def turn_an_image(monkeypatch, interrupted, tmp_path):
    monkeypatch.setattr(ImageOps, "exif_transpose", interrupted)
    return lambda: image_io.decode_image(Image.new("RGB", (2, 3)), "image.png")


def read_metadata(monkeypatch, interrupted, tmp_path):
    def read():
        with run_metadata.explain_metadata_errors(tmp_path):
            interrupted()

    return read


def read_a_configuration(monkeypatch, interrupted, tmp_path):
    path = tmp_path / "config.py"
    path.write_text("import signal\nsignal.raise_signal(signal.SIGTERM)\n")
    return lambda: read_config(str(path), [])


def read_records(monkeypatch, interrupted, tmp_path):
    class Records:
        __getitems__ = staticmethod(interrupted)

    images = streaming.Photographs(
        Records(), np.arange(3), num_classes=2, origin="a set", hint="prepare it again"
    )
    return lambda: next(iter(images.read(np.arange(2))))


def write_a_checkpoint(monkeypatch, interrupted, tmp_path):
    writer = checkpoint.CheckpointWriter(tmp_path / "checkpoints")
    monkeypatch.setattr(writer._manager, "wait_until_finished", interrupted)
    return writer.close


@pytest.mark.parametrize(
    "reader",
    [
        read_with_checkpoint,
        read_prepared,
        open_an_image,
        decode_an_image,
        turn_an_image,
        read_metadata,
        read_a_configuration,
        read_records,
        write_a_checkpoint,
    ],
)
def test_a_signal_inside_a_reader_is_no_damage(monkeypatch, tmp_path, reader):
    def interrupted(*arguments, **options):
        signal.raise_signal(signal.SIGTERM)

    read = reader(monkeypatch, interrupted, tmp_path)
    with Preemption().handled(), pytest.raises(training.PreemptedError) as error:
        read()
    assert error.value.exit_code == 75


def test_a_signal_inside_an_event_loop_ends_it():
    """Orbax reads in one; its callback must not be logged and forgotten."""

    async def wait_for_a_callback():
        loop = asyncio.get_running_loop()
        loop.call_soon(signal.raise_signal, signal.SIGTERM)
        await asyncio.wait_for(loop.create_future(), timeout=60)

    with Preemption().handled(), pytest.raises(training.PreemptedError) as error:
        asyncio.run(wait_for_a_callback())
    assert error.value.exit_code == 75


@pytest.mark.parametrize(
    "error",
    [MemoryError("no"), OSError(errno.EMFILE, "Too many open files")],
    ids=["memory", "files"],
)
@pytest.mark.parametrize(
    "reader",
    [
        read_with_checkpoint,
        read_prepared,
        open_an_image,
        decode_an_image,
        turn_an_image,
        read_metadata,
        read_records,
    ],
)
def test_a_lack_of_memory_or_files_in_a_reader_is_no_damage(
    monkeypatch, tmp_path, reader, error
):
    def interrupted(*arguments, **options):
        raise error

    read = reader(monkeypatch, interrupted, tmp_path)
    with pytest.raises(type(error), match=str(error.args[-1])) as raised:
        read()
    assert raised.value is error


def test_sighup_is_sigterm_unless_it_is_ignored():
    received = []
    before = {
        signal.SIGTERM: signal.signal(
            signal.SIGTERM, lambda number, _: received.append(number)
        ),
        # Under nohup, the tests ignore it.
        signal.SIGHUP: signal.signal(signal.SIGHUP, unhandled),
    }
    try:
        error = pytest.raises(training.PreemptedError, match="Stopped by SIGHUP out")
        with error, Preemption().handled():
            signal.raise_signal(signal.SIGHUP)
        # With several processes, JAX listens to SIGTERM.
        with Preemption(handles=False).handled():
            signal.raise_signal(signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with Preemption().handled():
            signal.raise_signal(signal.SIGHUP)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert received == [signal.SIGTERM]


def test_a_swallowed_sigterm_ends_the_run_at_its_next_update():
    preemption = Preemption()
    with preemption.handled(), contextlib.suppress(training.PreemptedError):
        signal.raise_signal(signal.SIGTERM)
    assert preemption.received == "SIGTERM"


@pytest.mark.usefixtures("tiny")
def test_signals_are_left_alone_in_another_thread(config, tmp_path, one_device):
    handlers = []

    def on_step(done):
        handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(
        target=training.train_and_evaluate,
        args=(config, tmp_path),
        kwargs={"devices": one_device, "on_step": on_step},
    )
    thread.start()
    thread.join()
    assert set(handlers) == {signal.getsignal(signal.SIGTERM)}


@pytest.mark.slow
def test_train_py_has_its_own_exit_code(tmp_path):
    path, workdir = tmp_path / "config.py", tmp_path / "run"
    path.write_text(CONFIG)
    command = [sys.executable, "train.py", f"--config={path}", f"--workdir={workdir}"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    while not read_rows(workdir / "metrics.jsonl"):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    process.terminate()
    _, said = process.communicate()
    assert process.returncode == 75
    last = checkpoint_steps(workdir / "checkpoints")[-1]
    assert said.startswith(f"Stopped by SIGTERM at step {last} ")
    assert said.count("\n") == 1
    assert not list(workdir.glob("checkpoints/*tmp*"))

"""SIGTERM: a checkpoint is written, and the same command resumes from it."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from relattn import data, training
from relattn.training import loop
from relattn.training.checkpoint import checkpoint_steps
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
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with pytest.raises(
            training.PreemptedError,
            match=rf"SIGTERM at step {step} of 15, .*/{step}: repeat the command",
        ) as error:
            training.train_and_evaluate(
                config, parts, devices=one_device, on_step=signal_at(step)
            )
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
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
    before = signal.getsignal(signal.SIGINT)
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

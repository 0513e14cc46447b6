"""Two processes on one machine train what one process trains."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import chex
import jax
import pytest

from relattn import training
from relattn.training.checkpoint import CHECKPOINTS, checkpoint_steps
from relattn.training.config import to_json
from relattn.training.distributed import initialize
from relattn.training.metrics_log import read_rows
from relattn.training.workdir import lock_workdir
from tests.helpers.interrupted import final_state

ROOT = Path(__file__).parents[2]


def start(config, *workdirs, pause_at=(0, 0)):
    """Starts two processes, in one directory or in two; the caller ends them.

    Each process waits after its step in ``pause_at``, if it has one, so that it does
    not end before the signal.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    request = {
        "config": to_json(config),
        "port": port,
        "num_processes": 2,
    }
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.helpers.process",
                json.dumps(
                    {
                        **request,
                        "process_id": index,
                        "pause_at": pause_at[index],
                        "workdir": str(workdirs[index % len(workdirs)]),
                    }
                ),
            ],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]


def finish(processes):
    """Waits for processes; returns their error output."""
    try:
        return [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()


def run(config, workdir):
    processes = start(config, workdir)
    errors = finish(processes)
    assert [process.returncode for process in processes] == [0, 0], errors


def wait_for_step(process, step):
    for line in process.stdout:
        if line == f"step {step}\n":
            return
    raise AssertionError(process.communicate()[1])


@pytest.fixture
def config(config):
    config.update(num_epochs=2, checkpoint_every_steps=3)
    return config


@pytest.fixture
def expected(config, tiny, tmp_path):
    """Returns the state and the metrics of a single process on four devices."""
    workdir = tmp_path / "alone"
    training.train_and_evaluate(config, workdir)
    return final_state(workdir), read_rows(workdir / "metrics.jsonl")


def expect_the_same(workdir, expected):
    state, rows = expected
    chex.assert_trees_all_close(final_state(workdir), state, atol=1e-6)
    found = read_rows(workdir / "metrics.jsonl")
    assert [row["step"] for row in found] == [row["step"] for row in rows]
    for row, other in zip(rows, found, strict=True):
        assert row.keys() == other.keys()
        assert row["train_loss"] == pytest.approx(other["train_loss"], abs=1e-5)
    record = json.loads((workdir / "run.json").read_text())["starts"][-1]
    assert (record["num_devices"], record["num_processes"]) == (4, 2)
    result = json.loads((workdir / "result.json").read_text())
    assert result["validation_accuracy"] == max(
        row["validation_accuracy"] for row in rows if "validation_accuracy" in row
    )


@pytest.mark.slow
def test_a_killed_process_ends_the_other_and_both_resume(config, expected, tmp_path):
    workdir = tmp_path / "two"
    first, second = start(config, workdir, pause_at=(0, 7))
    # The checkpoint of step 3 is complete once that of step 5 has begun.
    wait_for_step(second, 7)
    second.send_signal(signal.SIGKILL)
    error, _ = finish([first, second])
    assert first.returncode not in (0, None)
    # JAX ends it, or a collective operation without the other process.
    assert re.search("another task died|Connection (reset|closed)|heartbeat", error)
    assert 3 <= checkpoint_steps(workdir / CHECKPOINTS)[-1] < 10
    run(config, workdir)
    expect_the_same(workdir, expected)


@pytest.mark.slow
def test_a_mesh_over_two_killed_processes_resumes(config, tiny, tmp_path):
    config.update(parallel="mesh", model_axis=2)
    training.train_and_evaluate(config, tmp_path / "alone on a mesh")
    processes = start(config, tmp_path / "two", pause_at=(7, 0))
    wait_for_step(processes[0], 7)
    for process in processes:
        process.kill()
    finish(processes)
    run(config, tmp_path / "two")
    state = final_state(tmp_path / "alone on a mesh")
    chex.assert_trees_all_close(final_state(tmp_path / "two"), state, atol=1e-6)


@pytest.mark.slow
def test_sigterm_of_one_ends_both_at_the_same_step(config, tmp_path):
    # JAX looks for the signal once a second.
    config.update(num_epochs=200)
    processes = start(config, tmp_path, pause_at=(0, 2))
    wait_for_step(processes[1], 2)
    processes[1].send_signal(signal.SIGTERM)
    print(file=processes[1].stdin, flush=True)
    errors = finish(processes)
    for process, error in zip(processes, errors, strict=True):
        assert process.returncode == 1
        assert "Stopped by SIGTERM at step" in error
    (step,) = {re.search("at step ([0-9]+) of", error)[1] for error in errors}
    assert checkpoint_steps(tmp_path / CHECKPOINTS)[-1] == int(step) < 1000


@pytest.mark.slow
def test_directories_that_are_not_shared(config, tmp_path):
    processes = start(config, tmp_path / "one", tmp_path / "two")
    errors = finish(processes)
    for process, error in zip(processes, errors, strict=True):
        assert process.returncode == 1
        assert "WorkdirError: --workdir" in error
        assert "process 1 does not see a file that process 0 wrote" in error
    assert not (tmp_path / "one" / "checkpoints").exists()


@pytest.mark.slow
def test_an_error_in_process_0_ends_all(config, tmp_path):
    """Process 0 locks the directory and reads the checkpoint for the others too."""
    with lock_workdir(tmp_path):
        processes = start(config, tmp_path)
        errors = finish(processes)
    for process, error in zip(processes, errors, strict=True):
        assert process.returncode == 1
        assert f"is in use by process {os.getpid()}" in error


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("127.0.0.1:1", 2, -1), "--coordinator=HOST:PORT, --num_processes and"),
        (("127.0.0.1:1", 2, 2), "--process_id=2 must be below --num_processes=2"),
        (("127.0.0.1", 2, 0), "--coordinator=127.0.0.1 must be HOST:PORT, such as"),
        (("host:70000", 2, 0), "--coordinator=host:70000 must be HOST:PORT"),
        ((), "--distributed found no cluster that JAX supports"),
    ],
)
def test_flags_that_do_not_fit_are_refused(arguments, message, monkeypatch):
    def find_no_cluster(*arguments, **options):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", find_no_cluster)
    with pytest.raises(ValueError, match=message):
        initialize(*arguments)


@pytest.mark.parametrize("seconds", [-1, 0, 2**40])
def test_a_heartbeat_out_of_range_is_refused(seconds):
    with pytest.raises(ValueError, match=rf"--heartbeat_seconds={seconds} must be fro"):
        initialize("127.0.0.1:1", 2, 0, heartbeat_seconds=seconds)

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from relattn import command
from relattn.training import WorkdirError
from relattn.training.config_file import read_config
from studies import launcher
from studies.launcher import Training, train
from tests.helpers.sentences import assert_refused
from tests.helpers.trained import CONFIG, IMAGES, TEXT, make_training


def test_read_config_applies_overrides():
    options = ["--config.num_epochs=3", "--config.model.dim", "8"]
    config = read_config("configs/demo.py", options)
    assert (config.num_epochs, config.model.dim, config.is_locked) == (3, 8, True)
    with pytest.raises(ValueError, match="no argument 'bandd': did you mean 'banded'"):
        read_config("configs/demo.py:bandd")
    with pytest.raises(ValueError, match=r"no --config\.num_epoch: .*'num_epochs'"):
        read_config(CONFIG, ["--config.num_epoch=3"])
    with pytest.raises(ValueError, match="'--verbosity=1' is not an option --config"):
        read_config(CONFIG, ["--verbosity=1"])
    with pytest.raises(ValueError, match="num_epochs needs an integer, got 'x'"):
        read_config(CONFIG, ["--config.num_epochs=x"])


def test_run_is_complete_at_its_last_step_with_its_configuration(tmp_path):
    assert not Training("banded", CONFIG, tmp_path).is_complete()
    training = make_training(tmp_path)
    assert training.is_complete()
    training.overrides = ["--config.progress=False"]
    assert training.is_complete()
    training.overrides = ["--config.data.data_dir=other"]
    assert not training.is_complete()
    training.overrides = ["--config.num_epochs=30"]
    with pytest.raises(WorkdirError, match="the cosine schedule depends on the length"):
        training.is_complete()
    training.overrides = ["--config.model.dim=8"]
    with pytest.raises(WorkdirError, match=r"another configuration \(model.dim: .* 8"):
        training.is_complete()
    constant = "--config.schedule.name=constant"
    values = json.loads((tmp_path / "run.json").read_text())
    values["config"]["schedule"]["name"] = "constant"
    (tmp_path / "run.json").write_text(json.dumps(values))
    training.overrides = [constant, "--config.num_epochs=30"]
    assert not training.is_complete()
    assert not make_training(tmp_path, step=40).is_complete()
    assert make_training(tmp_path, step=40, stopped_early=True).is_complete()


@pytest.mark.parametrize("name", ["run.json", "result.json"])
@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", "3", "[" * 10000, '{"config": "x", "step": []}']
)
def test_run_with_damaged_files_is_not_complete(tmp_path, name, text):
    training = make_training(tmp_path)
    (tmp_path / name).write_text(text)
    assert not training.is_complete()


@pytest.mark.parametrize(
    "name, changes",
    [
        ("result.json", {"seconds": None}),
        ("result.json", {"test_accuracy": None}),
        ("result.json", {"runs": [{"seed": 3, "step": 60, "epochs": 1.0}]}),
        ("run.json", {"starts": []}),
        ("run.json", {"data": {**dataclasses.asdict(IMAGES), "num_train": 3}}),
        ("run.json", {"data": {**dataclasses.asdict(IMAGES), "kind": "a\nb"}}),
        ("run.json", {"config": {"batch_size": None}}),
        ("run.json", {"config": {"num_epochs": "x"}}),
    ],
)
def test_wrong_values_are_refused_with_the_file(tmp_path, name, changes):
    training = make_training(tmp_path)
    values = json.loads((tmp_path / name).read_text())
    for key, value in changes.items():
        nested = isinstance(value, dict) and key == "config"
        values[key] = {**values[key], **value} if nested else value
    (tmp_path / name).write_text(json.dumps(values))
    assert not training.is_complete()
    assert_refused(training.say_result, str(tmp_path / name))


@pytest.mark.parametrize("key", ["epoch", "train_loss", "examples_per_second"])
def test_rows_without_what_is_shown_are_left_out(tmp_path, capsys, key):
    row = {"step": 6, "epoch": 2.5, "train_loss": 1.0, "train_accuracy": 0.5}
    row |= {"examples_per_second": 9.0, "validation_accuracy": 0.625}
    del row[key]
    training = make_training(tmp_path, rows=[row])
    training.show()
    assert capsys.readouterr().out == ""


def test_log_is_not_written_through_a_link(tmp_path, monkeypatch):
    (tmp_path / "other").write_text("other")
    (tmp_path / "train.log").symlink_to(tmp_path / "other")
    monkeypatch.setattr(sys, "executable", "true")
    training = Training("banded", CONFIG, tmp_path)
    training.start()
    training.process.wait()
    assert (tmp_path / "other").read_text() == "other"


@pytest.mark.parametrize(
    "info, metric, progress, outcome",
    [
        (IMAGES, "accuracy", "accuracy 62.5%", "87.5% of the test images"),
        (TEXT, "loss", "loss 0.625", "a validation loss of 0.625"),
    ],
)
def test_progress_is_printed_without_a_terminal(
    tmp_path, monkeypatch, capfd, info, metric, progress, outcome
):
    row = {"epoch": 2.5, "step": 6, "train_loss": 1.0, "train_accuracy": 0.5}
    row |= {"examples_per_second": 9.0, "validation_accuracy": 0.625}
    row |= {f"validation_{metric}": 0.625}
    training = make_training(tmp_path, info, rows=[row], validation_loss=0.625)
    monkeypatch.setattr(sys, "executable", "true")
    train([training], jobs=1)
    said = capfd.readouterr().out.splitlines()
    assert said == [
        f"banded, seed 3: epoch 2.5 of 20, validation {progress}",
        f"banded, seed 3: {outcome}, 7 s",
    ]


def replace_python(monkeypatch, tmp_path, script):
    """Runs a shell script in place of Python."""
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\n{script}")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


@pytest.mark.slow
def test_keep_going_continues_after_a_failure(tmp_path, capfd):
    options = ["--config.no_such_key=1"]
    trainings = [
        Training("a", CONFIG, tmp_path / "a", overrides=options),
        Training("b", CONFIG, tmp_path / "b", overrides=options),
    ]
    train(trainings, jobs=2, keep_going=True)
    assert "training b, seed 0 failed" in capfd.readouterr().out
    for training in trainings:
        assert "no_such_key" in training.error
        assert f"{training.log} ends with" in training.error


def test_a_failure_is_printed_and_ends_in_one_line(tmp_path, monkeypatch, capfd):
    replace_python(monkeypatch, tmp_path, "echo Traceback\necho KeyError: 3\nexit 1\n")
    training = Training("banded", CONFIG, tmp_path / "run")
    with pytest.raises(ChildProcessError) as failure:
        train([training], jobs=1)
    assert (
        str(failure.value) == f"not trained: banded, seed 0; its log is {training.log}"
    )
    assert "ends with:\nTraceback\nKeyError: 3\n" in capfd.readouterr().out


def test_long_logs_are_read_rarely(tmp_path, monkeypatch):
    shown = []

    def show(self):
        shown.append(time.monotonic())
        time.sleep(0.05)

    replace_python(monkeypatch, tmp_path, "sleep 0.5\n")
    monkeypatch.setattr(launcher, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(Training, "show", show)
    monkeypatch.setattr(Training, "say_result", lambda self: None)
    train([Training("banded", CONFIG, tmp_path / "run")], jobs=1)
    assert all(b - a >= launcher.REST * 0.05 for a, b in itertools.pairwise(shown[:-1]))


def unhandled(number, frame):
    """Without a handler, the signal would end the tests."""


def test_sigterm_ends_the_trainings(tmp_path, monkeypatch):
    replace_python(monkeypatch, tmp_path, "exec sleep 600\n")
    training = Training("banded", CONFIG, tmp_path / "run")

    def send():
        while training.process is None:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, unhandled)
    try:
        sender = threading.Thread(target=send)
        sender.start()
        with pytest.raises(SystemExit) as leaving:
            train([training], jobs=1, keep_going=True)
        sender.join()
        assert signal.getsignal(signal.SIGTERM) is unhandled
    finally:
        signal.signal(signal.SIGTERM, before)
    assert leaving.value.code == 128 + signal.SIGTERM
    assert training.process.returncode == -signal.SIGTERM


def start_and_interrupt(tmp_path, monkeypatch, script):
    """Trains with a shell script in place of Python; Ctrl-C comes once it is ready."""
    replace_python(monkeypatch, tmp_path, script)
    training = Training("banded", CONFIG, tmp_path / "run")

    def interrupt(*_):
        while not (tmp_path / "program.started").exists():
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(Training, "show", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train([training], jobs=1)
    return training


def test_interrupted_study_waits_for_checkpoints(tmp_path, monkeypatch, capfd):
    script = "trap 'sleep 1; touch $0.saved; exit 75' TERM\ntouch $0.started\n"
    script += "while true; do sleep 0.1; done\n"
    training = start_and_interrupt(tmp_path, monkeypatch, script)
    assert (tmp_path / "program.saved").exists()
    assert training.process.returncode == 75
    assert "checkpoints of running trainings (1)" in capfd.readouterr().out


def test_second_interrupt_kills_a_training_that_ignores_sigterm(tmp_path, monkeypatch):
    script = "trap '' TERM\ntouch $0.started\nexec sleep 600\n"
    wait = subprocess.Popen.wait
    interrupts = iter([KeyboardInterrupt])

    def interrupted_once(process, timeout=None):
        for interrupt in interrupts:
            raise interrupt
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted_once)
    training = start_and_interrupt(tmp_path, monkeypatch, script)
    assert training.process.returncode == -signal.SIGKILL


def test_trainings_import_what_the_study_imports(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "imported", ["mine"])
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda words, **_: started.append(words))
    Training("banded", CONFIG, tmp_path).start()
    assert "--import=mine" in started[0]


def test_each_process_has_its_own_process_group(tmp_path, monkeypatch):
    """Ctrl-C then reaches only the study, which sends SIGTERM to the processes."""
    monkeypatch.setattr(sys, "executable", "true")
    training = Training("banded", CONFIG, tmp_path)
    training.start()
    with contextlib.suppress(ProcessLookupError):
        assert os.getpgid(training.process.pid) == training.process.pid
    training.process.wait()
    training.bar.close()


LISTED = """\
GPU 0: NVIDIA A (UUID: GPU-7f-a)
GPU 1: NVIDIA A (UUID: GPU-7f-b)
"""
DIVIDED = """\
GPU 0: NVIDIA H (UUID: GPU-7f-a)
  MIG 1g.18gb     Device  0: (UUID: MIG-7f-c)
  MIG 1g.18gb     Device  1: (UUID: MIG-7f-d)
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Fakes JAX's CUDA plugin and the output of nvidia-smi."""

    def fake(listed):
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{listed}'\n")
        (tmp_path / "nvidia-smi").chmod(0o755)

    (tmp_path / "jax_plugins" / "xla_cuda13").mkdir(parents=True)
    (tmp_path / "jax_plugins" / "xla_cuda13" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    return fake


def test_visible_gpus_needs_no_cuda(machine, tmp_path, monkeypatch):
    machine(LISTED)
    assert launcher.visible_gpus() == ["GPU-7f-a", "GPU-7f-b"]
    machine(DIVIDED)
    assert launcher.visible_gpus() == ["MIG-7f-c", "MIG-7f-d"]
    for chosen, found in (("3, 1", ["3", "1"]), ("", []), ("2,-1,0", ["2"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert launcher.visible_gpus() == found
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert launcher.visible_gpus() == []
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    assert launcher.visible_gpus() == ["MIG-7f-c", "MIG-7f-d"]
    (tmp_path / "jax_plugins" / "xla_cuda13").rename(tmp_path / "removed")
    assert launcher.visible_gpus() == []


@pytest.mark.parametrize(
    "jobs, seen",
    [
        (1, ["all"]),
        (2, ["GPU-7f-a", "GPU-7f-b"]),
        (3, ["GPU-7f-a", "GPU-7f-b", "GPU-7f-a"]),
    ],
)
def test_each_parallel_training_sees_one_gpu(
    machine, tmp_path, monkeypatch, jobs, seen
):
    machine(LISTED)
    replace_python(monkeypatch, tmp_path, "echo ${CUDA_VISIBLE_DEVICES-all}\n")
    monkeypatch.setattr(launcher, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(Training, "say_result", lambda self: None)
    trainings = [Training(str(i), CONFIG, tmp_path / str(i)) for i in range(3)]
    train(trainings, jobs)
    said = [training.log.read_text().strip() for training in trainings]
    assert said[:jobs] == seen
    assert set(said) == set(seen)


@pytest.mark.parametrize("jobs, seen", [(1, "all"), (2, "1")])
def test_parallel_trainings_compute_on_one_core_each(tmp_path, monkeypatch, jobs, seen):
    """Not on the first cores, which another study may use."""
    script = "import os, sys; print(os.environ.get('NPROC', 'all'), end=' ');"
    script += "print(os.sched_getaffinity(0) == os.sched_getaffinity(os.getppid()))"
    replace_python(monkeypatch, tmp_path, f'exec {sys.executable} -c "{script}"\n')
    monkeypatch.setattr(launcher, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(launcher, "describe_cpu", lambda: {"cores": 3})
    monkeypatch.setattr(Training, "say_result", lambda self: None)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("NPROC", raising=False)
    trainings = [Training(str(i), CONFIG, tmp_path / str(i)) for i in range(3)]
    train(trainings, jobs)
    assert {training.log.read_text() for training in trainings} == {f"{seen} True\n"}


def test_no_job_is_refused():
    with pytest.raises(ValueError, match="jobs must be at least 1, got 0"):
        train([], 0)

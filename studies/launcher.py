"""Runs ``train.py`` in parallel processes, with progress bars."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import os
import pkgutil
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from relattn import command
from relattn.command import lacks_resources, one_line
from relattn.data import DataInfo, read_info
from relattn.files import open_new
from relattn.json_files import check_json
from relattn.training.config import (
    MAY_CHANGE_ON_RESUME,
    check_config,
    complete,
    differences,
    to_json,
)
from relattn.training.config_file import read_config
from relattn.training.metrics import BEST_METRICS
from relattn.training.metrics_log import Row, read_rows
from relattn.training.overrides import typed_keys
from relattn.training.preemption import ENDING, on_signals
from relattn.training.resume import check_same_config
from relattn.training.workdir import describe_cpu, read_record, read_results

POLL_SECONDS = 0.5
# Pause between two readings of a log, as a multiple of the time that the first took.
REST = 20
LOG_BYTES = 2000
# What a progress bar shows of a row of metrics.
_SHOWN = {"epoch", "train_loss", "train_accuracy", "examples_per_second"}
BAR = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"


@dataclasses.dataclass
class Training:
    """One run of ``train.py`` in a separate process.

    Attributes:
        label: Name of the model, for messages.
        config: The configuration, ``configs/demo.py:banded``.
        workdir: The run directory.
        seed: The seed, or the first of several.
        num_seeds: Number of seeds to train together.
        overrides: More options of ``train.py``.
        gpu: The only visible GPU, as in CUDA_VISIBLE_DEVICES; None for all.
        process: The process, after the start.
        shown: Number of rows of metrics shown so far.
        due: Time, as of `time.monotonic`, from which the rows are read again.
        error: Message of the failure, or "".
        bar: The progress bar; only after the start.
    """

    label: str
    config: str
    workdir: Path
    seed: int = 0
    num_seeds: int = 1
    overrides: Sequence[str] = ()
    gpu: str | None = None
    process: subprocess.Popen | None = None
    shown: int = 0
    due: float = 0.0
    error: str = ""
    bar: tqdm = dataclasses.field(init=False, repr=False, compare=False)

    @property
    def name(self) -> str:
        """The label and the seeds, for messages."""
        if self.num_seeds == 1:
            return f"{self.label}, seed {self.seed}"
        return f"{self.label}, seeds {self.seed} to {self.seeds[-1]}"

    @property
    def seeds(self) -> range:
        """The seeds of the run."""
        return range(self.seed, self.seed + self.num_seeds)

    @property
    def log(self) -> Path:
        """The file with the output of the process."""
        return self.workdir / "train.log"

    @property
    def options(self) -> list[str]:
        """The options that change the configuration."""
        own = {
            "seed": f"--config.seed={self.seed}",
            "num_seeds": f"--config.num_seeds={self.num_seeds}",
            "log_every_steps": "--config.log_every_steps=10",
        }
        typed = typed_keys(self.overrides)
        return [*(own[key] for key in own if key not in typed), *self.overrides]

    def start(self, gpu: str | None = None, *, one_core: bool = False) -> None:
        """Starts the process.

        Args:
            gpu: The only visible GPU; None for all.
            one_core: Whether JAX computes on one core, which the system chooses.
        """
        words = [
            sys.executable,
            "train.py",
            f"--config={self.config}",
            f"--workdir={self.workdir}",
            *(f"--import={name}" for name in command.imported),
            *self.options,
        ]
        self.workdir.mkdir(parents=True, exist_ok=True)
        # Two runs may share one GPU.
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        if one_core:
            environment["NPROC"] = "1"
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        with open_new(self.log, "w") as log:
            # A new process group: Ctrl-C must not reach it; `stop` ends it.
            self.process = subprocess.Popen(
                words,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                process_group=0,
            )
        self.gpu = gpu
        self.bar = tqdm(
            total=1.0,
            desc=self.name,
            bar_format=BAR,
            dynamic_ncols=True,
            disable=None,
        )

    def show(self) -> None:
        """Updates the progress bar from the log; without a terminal, prints lines."""
        rows = [row for row in self.rows() if row.keys() >= _SHOWN]
        if len(rows) <= self.shown:
            return
        record = self.record()
        config, info = record["config"], read_info(record["data"])
        epoch_steps = info.steps_per_epoch(config["batch_size"])
        total = config["num_steps"] or config["num_epochs"] * epoch_steps
        metric = BEST_METRICS[info.kind]
        style = ".3f" if metric == "loss" else ".1%"
        for row in rows[self.shown :]:
            self.bar.set_postfix(
                {
                    "loss": f"{row['train_loss']:.3f}",
                    "accuracy": f"{row['train_accuracy']:.3f}",
                    "examples/s": f"{row['examples_per_second']:.0f}",
                },
                refresh=False,
            )
            if self.bar.disable and f"validation_{metric}" in row:
                position = f"step {row['step']} of {total}"
                if not config["num_steps"]:
                    position = f"epoch {row['epoch']:.4g} of {config['num_epochs']}"
                print(
                    f"{self.label}, seed {row.get('seed', self.seed)}: {position}, "
                    f"validation {metric} {row[f'validation_{metric}']:{style}}",
                    flush=True,
                )
        self.bar.update(rows[-1]["step"] / total - self.bar.n)
        self.shown = len(rows)

    def finish(self) -> None:
        """Closes the progress bar and prints the result.

        Raises:
            ChildProcessError: If the run failed; the message has the end of its log.
        """
        self.bar.close()
        if self.process and self.process.returncode:
            raise ChildProcessError(
                f"training {self.name} failed; {self.log} ends with:\n"
                + self.log.read_text(errors="replace")[-LOG_BYTES:]
            )
        self.say_result()

    def say_result(self) -> None:
        """Prints the result."""
        results = self.results()
        if self._is_text():
            losses = [f"{result['validation_loss']:.3f}" for result in results]
            outcome = f"a validation loss of {', '.join(losses)}"
        else:
            accuracies = [f"{result['test_accuracy']:.1%}" for result in results]
            outcome = f"{', '.join(accuracies)} of the test images"
        tqdm.write(f"{self.name}: {outcome}, {self.result()['seconds']:.0f} s")

    def rows(self, seed: int | None = None) -> list[Row]:
        """Reads the rows of metrics of one seed; None for all seeds."""
        rows = read_rows(self.workdir / "metrics.jsonl")
        return [row for row in rows if seed in (None, row.get("seed", seed))]

    def record(self) -> dict[str, Any]:
        """Reads ``run.json``.

        Raises:
            ValueError: If it describes no run of this version.
        """
        record = read_record(self.workdir)
        try:
            config = complete(record["config"])
            check_config(config)
            read_info(record["data"]).steps_per_epoch(config.batch_size)
            if not record["starts"]:
                raise ValueError("it has no starts")
        except Exception as error:
            if lacks_resources(error):
                raise
            # Unchecked values reach other libraries.
            raise ValueError(
                f"{self.workdir / 'run.json'} describes no run of this version "
                f"({one_line(error)}): delete the folder to train again"
            ) from error
        return {**record, "config": to_json(config)}

    def info(self) -> DataInfo:
        """Reads the description of the data."""
        return read_info(self.record()["data"])

    def result(self) -> dict[str, Any]:
        """Reads the final metrics.

        Raises:
            ValueError: If those of a seed, or those that a study shows, are missing.
        """
        path, result = self.workdir / "result.json", read_results(self.workdir)
        shown = {self._shown_metric(): float}
        schema = {"runs": [shown]} if "runs" in result else shown
        check_json(result, {"seconds": float, **schema}, path)
        found = len(result.get("runs", [result]))
        if found != self.num_seeds:
            raise ValueError(
                f"{path} has the metrics of {found} seeds, not {self.num_seeds}: "
                "repeat the command that trained, which writes it again"
            )
        return result

    def _shown_metric(self) -> str:
        """The result that is printed."""
        return "validation_loss" if self._is_text() else "test_accuracy"

    def _is_text(self) -> bool:
        return self.info().kind == "tokens"

    def results(self) -> list[dict[str, Any]]:
        """Reads the final metrics of each seed."""
        result = self.result()
        return result.get("runs", [result])

    def is_complete(self) -> bool:
        """Checks that the run has ended, with the current configuration.

        Raises:
            ValueError: If the configuration does not exist or an option is invalid.
            WorkdirError: If a run of another configuration has ended there.
        """
        config = read_config(self.config, self.options)
        try:
            result = self.result()
            ended = result["stopped_early"] or result["step"] >= result["num_steps"]
            there = self.record()["config"]
        except (OSError, ValueError) as error:
            if lacks_resources(error):
                raise
            # Missing or damaged: train.py continues or starts again.
            return False
        if ended:
            check_same_config(there, config, self.workdir)
        # In another folder, train.py compares the data.
        free = {*MAY_CHANGE_ON_RESUME} - {"data.data_dir"}
        return ended and not differences(there, to_json(config), [*free])


def train(
    trainings: Sequence[Training], jobs: int, *, keep_going: bool = False
) -> None:
    """Runs trainings in parallel, each with a progress bar.

    Ctrl-C, SIGTERM and SIGHUP end the trainings too, with a checkpoint; the same call
    continues them.

    Args:
        trainings: The trainings; complete ones take a few seconds.
        jobs: Number of parallel processes. If several, each sees one GPU, shared only
            if there are fewer GPUs than jobs. Without GPUs, each computes on one core,
            which is faster for small models than sharing cores.
        keep_going: If True, a failed training is printed and has its ``error`` set, and
            the others continue.

    Raises:
        ChildProcessError: If a training fails, unless ``keep_going``.
        ValueError: If ``jobs`` is less than one.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    gpus = visible_gpus() if jobs > 1 else []
    if not gpus:
        jobs = max(1, min(jobs, describe_cpu()["cores"], len(trainings)))
    free = [gpus[job % len(gpus)] if gpus else None for job in range(jobs)]
    one_core = jobs > 1 and not gpus
    waiting, running = list(trainings), []
    with contextlib.ExitStack() as stack:
        stack.enter_context(leaving_on_sigterm())
        stack.callback(stop, trainings)
        while waiting or running:
            while waiting and free:
                training = waiting.pop(0)
                training.start(free.pop(0), one_core=one_core)
                running.append(training)
            time.sleep(POLL_SECONDS)
            for training in list(running):
                ended = training.process.poll() is not None
                began = time.monotonic()
                if ended or began >= training.due:
                    training.show()
                    # To read a long log takes seconds, of which the trainings need
                    # the cores.
                    training.due = began + REST * (time.monotonic() - began)
                if not ended:
                    continue
                running.remove(training)
                free.append(training.gpu)
                _finish(training, keep_going)


def _finish(training: Training, keep_going: bool) -> None:
    """Finishes a training that has ended; raises, or prints, its failure."""
    try:
        training.finish()
    except ChildProcessError as error:
        training.error = str(error)
        tqdm.write(training.error)
        if not keep_going:
            # The last message of a program is one line: it would escape the log's.
            raise ChildProcessError(
                f"not trained: {training.name}; its log is {training.log}"
            ) from error


def visible_gpus() -> list[str]:
    """Lists the GPUs that JAX would use, without initialising CUDA.

    Returns:
        Entries for CUDA_VISIBLE_DEVICES, from the variable if it is set; empty if JAX
        has no CUDA plugin or JAX_PLATFORMS names another platform.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return []
    package = importlib.util.find_spec("jax_plugins")
    folders = package.submodule_search_locations if package else []
    plugins = pkgutil.iter_modules(folders)
    if not any(name.startswith("xla_cuda") for _, name, _ in plugins):
        return []
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        names = [name.strip() for name in chosen.split(",")]
        # CUDA ignores all entries after an invalid one.
        return list(itertools.takewhile(lambda name: name not in ("", "-1"), names))
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    except OSError:
        return []
    # UUIDs, since CUDA may number GPUs in another order than nvidia-smi.
    uuids = re.findall(r"UUID: ([^)]+)\)", listed.stdout)
    # On a partitioned GPU, CUDA sees only the partitions.
    return [uuid for uuid in uuids if uuid.startswith("MIG-")] or uuids


def stop(trainings: Sequence[Training]) -> None:
    """Ends running trainings, and waits until each has written its checkpoint.

    An evaluation and a large checkpoint take minutes. A second Ctrl-C or SIGTERM kills
    the trainings; their next start then resumes from the checkpoint before.

    Args:
        trainings: Trainings, started or not.
    """
    started = [training.process for training in trainings if training.process]
    running = [process for process in started if process.poll() is None]
    if not running:
        return
    try:
        for process in running:
            process.terminate()
        # The output may be closed.
        with contextlib.suppress(OSError):
            tqdm.write(
                f"Waiting for the checkpoints of running trainings ({len(running)}); "
                "Ctrl-C again kills them"
            )
        for process in running:
            process.wait()
    except BaseException:
        for process in running:
            process.kill()
            process.wait()
        raise


def leaving_on_sigterm() -> contextlib.AbstractContextManager[None]:
    """Makes SIGTERM and SIGHUP raise SystemExit: the caller can end its children."""
    return on_signals(_leave, *ENDING)


def _leave(number: int, frame: Any) -> None:
    del frame
    sys.exit(128 + number)

"""Runs of ``train.py`` in processes of their own, side by side, with progress."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import json
import os
import pkgutil
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from relattn.data import DataInfo, read_info
from relattn.training.config import complete, differences, read_config, to_json
from relattn.training.metrics import Row, read_rows
from relattn.training.preemption import on_signals

POLL_SECONDS = 0.5
LOG_BYTES = 2000
# What clusters leave between SIGTERM and SIGKILL.
GRACE_SECONDS = 30.0
# On CPUs, XLA's temporaries come from malloc: a heap in huge pages that is kept, not
# given back to the system after every step, saves most page faults.
KEEP_HEAP = ":".join(
    f"glibc.malloc.{option}"
    for option in (
        "hugetlb=1",
        "arena_max=1",
        "mmap_max=0",
        "trim_threshold=0x7fffffffffffffff",
    )
)
BAR = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"


@dataclasses.dataclass
class Training:
    """One run of ``train.py`` in a process of its own.

    Attributes:
        label: What is trained, for people.
        config: Its configuration, ``configs/demo.py:banded``.
        workdir: Its folder.
        seed: Of the run, or the first of its seeds.
        num_seeds: How many seeds the one process trains together.
        overrides: More options of ``train.py``.
        core: The core it is bound to; None leaves that to the system.
        gpu: The only GPU it sees, as in CUDA_VISIBLE_DEVICES; None for all.
        malloc: Options of glibc's malloc.
        process: Once started.
        bar: Its progress bar, once started.
        shown: How many rows of its log the bar has shown.
        error: Why it failed, or "".
    """

    label: str
    config: str
    workdir: Path
    seed: int = 0
    num_seeds: int = 1
    overrides: Sequence[str] = ()
    core: int | None = None
    gpu: str | None = None
    malloc: str = KEEP_HEAP
    process: subprocess.Popen | None = None
    bar: tqdm | None = None
    shown: int = 0
    error: str = ""

    @property
    def name(self) -> str:
        """Of the run, for people."""
        if self.num_seeds == 1:
            return f"{self.label}, seed {self.seed}"
        return f"{self.label}, seeds {self.seed} to {self.seeds[-1]}"

    @property
    def seeds(self) -> range:
        """The seeds that it trains."""
        return range(self.seed, self.seed + self.num_seeds)

    @property
    def log(self) -> Path:
        """The file that its output goes to."""
        return self.workdir / "train.log"

    @property
    def options(self) -> list[str]:
        """What changes its configuration."""
        return [
            f"--config.seed={self.seed}",
            f"--config.num_seeds={self.num_seeds}",
            "--config.log_every_steps=10",
            *self.overrides,
        ]

    def start(self, core: int | None = None, gpu: str | None = None) -> None:
        """Starts the process.

        Args:
            core: The core to bind it to; None leaves that to the system.
            gpu: The only GPU that it sees; None for all.
        """
        command = [
            sys.executable,
            "train.py",
            f"--config={self.config}",
            f"--workdir={self.workdir}",
            *self.options,
        ]
        self.workdir.mkdir(parents=True, exist_ok=True)
        # Two runs may share one GPU.
        environment = {
            "GLIBC_TUNABLES": self.malloc,
            **os.environ,
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        with self.log.open("w") as log:
            # In a group of its own, lest Ctrl-C reach it beside `stop`.
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                process_group=0,
            )
        self.core, self.gpu = core, gpu
        if core is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(self.process.pid, {core})
        self.bar = tqdm(
            total=1.0,
            desc=self.name,
            bar_format=BAR,
            dynamic_ncols=True,
            disable=None,
        )

    def show(self) -> None:
        """Brings its bar up to what it has logged; without a terminal, prints lines."""
        rows = self.rows()
        if len(rows) <= self.shown:
            return
        config = self.record()["config"]
        in_epoch = self.info().steps_per_epoch(config["batch_size"])
        total = config["num_steps"] or config["num_epochs"] * in_epoch
        for row in rows[self.shown :]:
            self.bar.set_postfix(
                {
                    "loss": f"{row['train_loss']:.3f}",
                    "accuracy": f"{row['train_accuracy']:.3f}",
                    "examples/s": f"{row['examples_per_second']:.0f}",
                },
                refresh=False,
            )
            if self.bar.disable and "validation_accuracy" in row:
                seed = row.get("seed", self.seed)
                progress = self._progress(row, total)
                print(f"{self.label}, seed {seed}: {progress}", flush=True)
        self.bar.update(rows[-1]["step"] / total - self.bar.n)
        self.shown = len(rows)

    def _progress(self, row: Row, total: int) -> str:
        config = self.record()["config"]
        place = f"step {row['step']} of {total}"
        if not config["num_steps"]:
            place = f"epoch {row['epoch']:.0f} of {config['num_epochs']}"
        if self.info().kind == "tokens":
            return f"{place}, validation loss {row['validation_loss']:.3f}"
        return f"{place}, validation accuracy {row['validation_accuracy']:.1%}"

    def finish(self) -> None:
        """Says how it ended.

        Raises:
            ChildProcessError: If it failed; shows the end of its log.
        """
        self.bar.close()
        if self.process.returncode:
            raise ChildProcessError(
                f"training {self.name} failed; {self.log} ends with:\n"
                + self.log.read_text(errors="replace")[-LOG_BYTES:]
            )
        self.say_result()

    def say_result(self) -> None:
        """Says what came of it."""
        results = self.results()
        if self.info().kind == "tokens":
            losses = [f"{result['validation_loss']:.3f}" for result in results]
            outcome = f"a validation loss of {', '.join(losses)}"
        else:
            accuracies = [f"{result['test_accuracy']:.1%}" for result in results]
            outcome = f"{', '.join(accuracies)} of the test images"
        tqdm.write(f"{self.name}: {outcome}, {self.result()['seconds']:.0f} s")

    def rows(self, seed: int | None = None) -> list[Row]:
        """What it has logged, of all seeds or of one."""
        rows = read_rows(self.workdir / "metrics.jsonl")
        return [row for row in rows if seed in (None, row.get("seed", seed))]

    def record(self) -> dict[str, Any]:
        """What it says about itself, its ``run.json``."""
        return json.loads((self.workdir / "run.json").read_text())

    def info(self) -> DataInfo:
        """Of its data."""
        return read_info(self.record()["data"])

    def result(self) -> dict[str, Any]:
        """Its final metrics."""
        return json.loads((self.workdir / "result.json").read_text())

    def results(self) -> list[dict[str, Any]]:
        """The final metrics of each seed."""
        result = self.result()
        return result.get("runs", [result])

    def is_complete(self) -> bool:
        """Whether it has run to its end, with the configuration that it has now.

        Raises:
            ValueError: If the configuration does not exist or an option does not fit.
        """
        config = read_config(self.config, self.options)
        try:
            result = self.result()
            ended = result["stopped_early"] or result["step"] >= result["num_steps"]
            there = to_json(complete(self.record()["config"]))
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            # Missing or damaged, which train.py mends.
            return False
        return ended and not differences(there, to_json(config))


def train(
    trainings: Sequence[Training], jobs: int, *, keep_going: bool = False
) -> None:
    """Runs trainings side by side, with a progress bar each.

    Args:
        trainings: What to train; those that are complete take a few seconds.
        jobs: How many at a time. If several, each sees one GPU, which they share only
            if there are fewer GPUs than jobs. Without GPUs each is bound to a core of
            its own, which uses small models' cores better than sharing them.
        keep_going: Whether one that fails is reported, in its ``error`` too, and the
            others go on.

    Whatever ends this process, Ctrl-C or SIGTERM, ends the trainings too, which go on
    from where they were when they are started again.

    Raises:
        ChildProcessError: If one fails, unless ``keep_going``.
    """
    cores = list(range(os.cpu_count() or 1))
    if hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
    gpus = visible_gpus() if jobs > 1 else []
    if gpus:
        free = [(None, gpus[job % len(gpus)]) for job in range(jobs)]
    else:
        jobs = min(jobs, len(cores), len(trainings))
        free = [(core, None) for core in cores[:jobs]] if jobs > 1 else [(None, None)]
    waiting, running = list(trainings), []
    with contextlib.ExitStack() as stack:
        stack.enter_context(leaving_on_sigterm())
        stack.callback(stop, trainings)
        while waiting or running:
            while waiting and free:
                training = waiting.pop(0)
                training.start(*free.pop(0))
                running.append(training)
            time.sleep(POLL_SECONDS)
            for training in list(running):
                ended = training.process.poll() is not None
                training.show()
                if not ended:
                    continue
                running.remove(training)
                free.append((training.core, training.gpu))
                try:
                    training.finish()
                except ChildProcessError as error:
                    if not keep_going:
                        raise
                    training.error = str(error)
                    tqdm.write(training.error)


def visible_gpus() -> list[str]:
    """The GPUs that JAX would use here, found without starting CUDA.

    Returns:
        Entries for CUDA_VISIBLE_DEVICES: those of the variable, if it is set; none if
        JAX is installed without CUDA or JAX_PLATFORMS names another platform.
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
        # CUDA ignores what follows an entry that names no GPU.
        return list(itertools.takewhile(lambda name: name not in ("", "-1"), names))
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    except OSError:
        return []
    # CUDA may number GPUs in another order than nvidia-smi.
    uuids = re.findall(r"UUID: ([^)]+)\)", listed.stdout)
    # Where GPUs are divided, CUDA sees their parts alone.
    return [uuid for uuid in uuids if uuid.startswith("MIG-")] or uuids


def stop(trainings: Sequence[Training]) -> None:
    """Ends those that run; each first writes a checkpoint, if it is quick.

    Args:
        trainings: Perhaps not all of them started.
    """
    running = [training.process for training in trainings if training.process]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def leaving_on_sigterm() -> contextlib.AbstractContextManager[None]:
    """Makes SIGTERM leave as an exception does; elsewhere than here it just kills."""
    return on_signals(_leave, signal.SIGTERM)


def _leave(number: int, frame: Any) -> None:
    del frame
    sys.exit(128 + number)

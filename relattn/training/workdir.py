"""The run directory: its lock, its records, and damaged files in it."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import re
import socket
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import jax

from relattn import files
from relattn.json_files import Range, parse_json, read_json
from relattn.messages import printable
from relattn.models.pretrained import WEIGHTS
from relattn.training.config import to_json
from relattn.training.errors import WorkdirError, explain_write_errors
from relattn.training.parallel import Device
from relattn.training.task import Task

try:
    import fcntl
except ImportError:  # Windows has no flock.
    fcntl = None

# Orbax takes these characters of a path for a pattern; it cannot encode surrogates.
_UNUSABLE = re.compile(r"[*?\[\ud800-\udfff]")

LOCK = "lock.json"
DAMAGED = ".damaged"

_RECORD = {
    "config": dict,
    "data": dict,
    "starts": [
        {
            "num_devices": Range(1, 2**31),
            "device": str,
            "platform": str,
            "cpu": str,
            "cores": Range(1, 2**31),
            "versions": {"jax": str, "*": (str, None)},
        }
    ],
}
_STEPS = Range(0, 2**53)
_METRICS = {"step": _STEPS, "epochs": float, "*": (bool, float, None)}
_RESULT = {
    **_METRICS,
    "num_steps": _STEPS,
    "stopped_early": bool,
    "runs?": [{"seed": Range(0, 2**32), **_METRICS}],
}

_PACKAGES = ("relattn", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def usable_folder(folder: str | Path, flag: str) -> Path:
    """Creates a folder and checks that it is writable.

    Args:
        folder: The folder, as given on the command line.
        flag: The command-line option, for the message.

    Returns:
        Its absolute path.

    Raises:
        WorkdirError: If it is not writable.
        ValueError: If it begins with an unknown home directory.

    Example:
        >>> usable_folder("", "--workdir")
        Traceback (most recent call last):
        relattn.training.errors.WorkdirError: --workdir is empty (unset shell \
variable?): name a directory
    """
    try:
        return files.usable_folder(folder, flag)
    except OSError as error:
        raise WorkdirError(str(error)) from error


def usable_workdir(workdir: str | Path) -> Path:
    """Creates a run directory and checks that it is writable, see `usable_folder`.

    Args:
        workdir: The ``--workdir``.

    Returns:
        Its absolute path.

    Raises:
        WorkdirError: If it is not writable, holds a saved model, or orbax cannot write
            checkpoints to a path of this name.
        ValueError: If it begins with an unknown home directory.
    """
    if str(workdir):
        found = _UNUSABLE.search(str(files.expand(workdir, "--workdir").absolute()))
        if found:
            raise WorkdirError(
                f"--workdir {printable(str(workdir))} has {found[0]!r} in its path, "
                "where orbax does not find its files: choose a path without *, ?, [ "
                "and bytes that are not UTF-8"
            )
    folder = usable_folder(workdir, "--workdir")
    if (folder / WEIGHTS).exists():
        raise WorkdirError(
            f"--workdir {printable(str(workdir))} holds a saved model ({WEIGHTS}), in "
            "place of which no program would load the run: move it away, or choose "
            "another directory"
        )
    return folder


def describe_start(
    task: Task,
    devices: Sequence[Device],
    available: int,
    workdir: Path,
    start_step: int,
    finished: bool,
) -> list[str]:
    """Describes a run before it starts.

    Args:
        task: The task.
        devices: The devices that it trains on.
        available: Number of devices that it could train on, for the message.
        workdir: The run directory.
        start_step: Number of updates in the checkpoint that it starts from.
        finished: Whether there is nothing left to train.

    Returns:
        The lines.
    """
    if finished:
        return [
            f"Already at the final step {start_step} of {workdir}: nothing to train."
        ]
    idle = []
    if len(devices) < available and not task.config.num_devices:
        sizes = [f"config.batch_size={task.config.batch_size}"]
        for key in ("accumulate_steps", "model_axis"):
            if task.config[key] > 1:
                sizes.append(f"config.{key}={task.config[key]}")
        idle = [
            f"Using {len(devices)} of {available} devices, the most that fit "
            f"{', '.join(sizes)}."
        ]
    never = []
    if task.config.redraw_every and task.redraw is None:
        never = [
            f"config.redraw_every={task.config.redraw_every} has no effect: "
            + (
                f"the run has {task.num_steps:,} steps."
                if jax.tree.leaves(task.abstract_state.random_features)
                else "the model has no random features."
            )
        ]
    if task.info.kind == "images" and not task.info.streamed:
        for key, same in (("interpolation", "bilinear"), ("crop_pct", 1)):
            if (value := task.config.data.get(key, same)) != same:
                never.append(
                    f"config.data.{key}={value} has no effect: the images are in "
                    "memory."
                )
    begin = [f"Resuming from step {start_step} of {workdir}."] if start_step else []
    return [
        *begin,
        f"Training {task.describe_size()} on {task.info.origin}: "
        f"{task.num_steps:,} steps of {task.config.batch_size} examples, "
        f"{task.steps_per_epoch:,} an epoch, on {len(devices)} x "
        f"{devices[0].device_kind}.",
        *idle,
        *never,
    ]


def write_run_json(
    workdir: Path, task: Task, devices: Sequence[Device], start_step: int
) -> None:
    """Writes ``run.json``; a resumed run adds its start to the list there.

    A file that cannot be read is kept as ``run.json.damaged``, with a warning.

    Args:
        workdir: The run directory.
        task: The task.
        devices: The devices that the run trains on.
        start_step: Number of updates in the checkpoint that it starts from.
    """
    path = workdir / "run.json"
    start = {
        "step": start_step,
        "time": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "device": devices[0].device_kind,
        "platform": devices[0].platform,
        "num_devices": len(devices),
        **describe_cpu(),
        "num_processes": jax.process_count(),
        "versions": versions(),
        "git_commit": _git_commit(),
    }
    record = {
        "config": to_json(task.config),
        "data": dataclasses.asdict(task.info),
        "starts": [*(_starts(path) if start_step else []), start],
    }
    write_json(path, record)


def _starts(path: Path) -> list[Any]:
    """Reads the starts in a ``run.json``; without the file there are none."""
    if not path.is_file():
        return []
    try:
        return read_record(path.parent)["starts"]
    except ValueError:
        pass
    warnings.warn(
        f"{path} is damaged and written again without its list of starts; the old file "
        f"is kept as {back_up(path)}",
        stacklevel=3,
    )
    return []


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Replaces a file atomically by indented JSON.

    Args:
        path: The file.
        values: Values that JSON can hold.
    """
    write_text(path, json.dumps(values, indent=2) + "\n")


def describe_cpu() -> dict[str, Any]:
    """Returns the processor's name and the number of usable cores.

    Example:
        >>> describe_cpu()["cores"] >= 1
        True
    """
    cpu = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        lines = information.read_text().splitlines()
        names = [line.split(":")[1] for line in lines if line.startswith("model name")]
        cpu = names[0].strip() if names else cpu
    return {"cpu": cpu, "cores": _num_cores()}


def _num_cores() -> int:
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    # XLA computes with this many threads.
    threads = os.environ.get("NPROC", "")
    return min(cores, max(1, int(threads))) if threads.isdigit() else cores


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that affect results.

    Returns:
        Versions by name; ``"not installed"`` for a package that is only on the path.

    Example:
        >>> versions()["jax"] == jax.__version__
        True
    """
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _git_commit() -> str | None:
    """Returns the commit of the package's source, with ``-dirty`` if it was changed.

    None if the package is not in its own git checkout.
    """
    source = Path(__file__).parent

    def git(*arguments: str) -> str:
        result = subprocess.run(
            ["git", *arguments], cwd=source, capture_output=True, text=True, check=True
        )
        return result.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)
        dirty = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("-dirty" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return None


@contextlib.contextmanager
def lock_workdir(workdir: Path) -> Iterator[None]:
    """Locks a run directory for this process.

    The lock is the system's, ``flock`` on ``lock.json``: it ends with the process,
    even after a kill. The file's text is only for messages, so a file left by a process
    that was killed does no harm.

    Args:
        workdir: The run directory, which exists.

    Yields:
        Nothing.

    Raises:
        WorkdirError: If another run holds the lock; the message has its process and
            host.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with lock_workdir(folder):
        ...     json.loads((folder / LOCK).read_text())["pid"] == os.getpid()
        True
    """
    if fcntl is None:
        yield
        return
    path = workdir / LOCK
    with _locked(path) as file:
        with explain_write_errors(path):
            file.truncate(0)
            json.dump({"pid": os.getpid(), "host": socket.gethostname()}, file)
            file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _locked(path: Path) -> IO[str]:
    """Opens and locks the file."""
    assert fcntl is not None
    while True:
        with explain_write_errors(path):
            file = open(path, "a+", opener=files.no_follow)  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            with file:
                raise WorkdirError(
                    f"--workdir {path.parent} is in use by {_holder(file)}: wait until "
                    "it has ended, or choose another directory"
                ) from error
        except OSError as error:
            warnings.warn(
                f"{path} cannot be locked ({error.strerror}): start no other run with "
                "this --workdir",
                stacklevel=4,
            )
            return file
        # Another run may have removed the file between the two calls.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()


def _holder(file: IO[str]) -> str:
    file.seek(0)
    try:
        record = parse_json(file.read(1000), file.name, {"pid": int, "host": str})
        return f"process {record['pid']} on {record['host']}"
    except ValueError:
        # It has not written its process id yet.
        return "another process"


def free_name(path: Path) -> Path:
    """Returns the first free name for a damaged file or folder.

    Args:
        path: A file or folder.

    Returns:
        ``<path>.damaged``, or with a number if it exists.

    Example:
        >>> free_name(Path("metrics.jsonl")).name
        'metrics.jsonl.damaged'
    """
    renamed, number = path.with_name(f"{path.name}{DAMAGED}"), 1
    while os.path.lexists(renamed):
        number += 1
        renamed = path.with_name(f"{path.name}{DAMAGED}{number}")
    return renamed


def back_up(path: Path) -> Path:
    """Copies a damaged file that is about to be replaced.

    Args:
        path: The file. It is copied, not moved, so that a kill loses nothing.

    Returns:
        The copy, see `free_name`.

    Raises:
        WorkdirError: If the disk is full or read-only.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "run.json"
        >>> _ = path.write_text("{")
        >>> back_up(path).read_text()
        '{'
    """
    copy = free_name(path)
    with files.naming(path):
        data = path.read_bytes()
    with explain_write_errors(copy):
        files.replace_file(copy, data)
    return copy


def write_text(path: Path, text: str) -> None:
    """Replaces a file atomically, even if power fails.

    Args:
        path: The file.
        text: Its new contents.

    Raises:
        WorkdirError: If the disk is full or read-only.
    """
    with explain_write_errors(path):
        files.replace_file(path, text)


def read_result(workdir: Path, seed: int, step: int) -> dict[str, Any]:
    """Returns the metrics of a seed in ``result.json``.

    Args:
        workdir: The run directory.
        seed: The seed.
        step: The checkpoint that they should be of.

    Returns:
        The metrics; empty if the run has not finished, or if they are of another
        checkpoint: the latest is not the best, or the run was extended.
    """
    if not (workdir / "result.json").is_file():
        return {}
    result = read_results(workdir)
    runs = {each["seed"]: each for each in result.pop("runs", [])}
    found = result | runs.get(seed, {})
    return found if found.get("best_step", step) == step else {}


def read_results(workdir: Path) -> dict[str, Any]:
    """Reads ``result.json``, the metrics of a finished run.

    Args:
        workdir: The run directory.

    Returns:
        The metrics; with several seeds, those of each are in the list ``runs``.

    Raises:
        FileNotFoundError: If the run has not finished.
        ValueError: If the file is damaged.
    """
    path = workdir / "result.json"
    try:
        return read_json(path, _RESULT, allow_nan=True)
    except ValueError as error:
        raise ValueError(
            f"{error}: repeat the command that trained, which writes it again"
        ) from error


def read_record(workdir: Path) -> dict[str, Any]:
    """Reads ``run.json``: the configuration, the data, and the starts of a run.

    Args:
        workdir: The run directory.

    Returns:
        The record.

    Raises:
        FileNotFoundError: If the run was not started.
        ValueError: If the file is damaged.
    """
    return read_json(workdir / "run.json", _RECORD)

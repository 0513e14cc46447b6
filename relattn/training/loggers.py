"""Where rows of metrics are copied to, beside ``metrics.jsonl``: ``config.loggers``."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from relattn.json_files import read_json
from relattn.messages import check_choice
from relattn.training.errors import explain_write_errors

# The part of a name before the metric, which TensorBoard shows as a group.
_SPLIT = re.compile(r"^(train|validation)_")


class Logger(Protocol):
    """Takes rows of metrics."""

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        """Adds the values of a step by name."""

    def close(self) -> None:
        """Ends the log."""


class TensorBoard:
    """Writes the events of TensorBoard to the run directory.

    Args:
        workdir: The run directory.
        start_step: Number of updates before the first row; TensorBoard hides what
            earlier files have of later steps.
        config: The configuration; unused.
    """

    def __init__(self, workdir: Path, start_step: int, config: Mapping[str, Any]):
        del config
        # Imported late: tensorboardX imports PyTorch where it is installed.
        from tensorboardX import SummaryWriter

        self._file = workdir / "events.out.tfevents"
        # An error ends the writer's thread. A queue without a limit does not block
        # after that, and `flush` raises the error.
        with explain_write_errors(self._file):
            self._writer = SummaryWriter(
                str(workdir), purge_step=start_step + 1, max_queue=0, flush_secs=1
            )

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        """Adds the values of a step by name."""
        with explain_write_errors(self._file):
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        # On a full disk its last values are lost; metrics.jsonl has them.
        with contextlib.suppress(OSError):
            self._writer.close()


class WandB:
    """Logs to Weights & Biases, offline unless the variable WANDB_MODE says otherwise.

    A run that resumes has the id of its start. ``wandb sync`` uploads the folders
    ``wandb/offline-run-*`` of the run directory.

    Args:
        workdir: The run directory.
        start_step: Number of updates before the first row; unused.
        config: The configuration, which is logged.

    Raises:
        ValueError: If wandb is not installed.
    """

    def __init__(self, workdir: Path, start_step: int, config: Mapping[str, Any]):
        del start_step
        with explain_write_errors(workdir / "wandb"):
            self._run = _import_wandb().init(
                dir=str(workdir),
                name=workdir.name,
                project=os.environ.get("WANDB_PROJECT", "relattn"),
                id=_run_id(workdir),
                resume="allow",
                mode=os.environ.get("WANDB_MODE", "offline"),
                config=dict(config),
            )

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        """Adds the values of a step by name."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()


LOGGERS: dict[str, Callable[[Path, int, Mapping[str, Any]], Logger]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
}


def logger_names(text: str) -> list[str]:
    """Splits ``config.loggers``.

    Args:
        text: Names in `LOGGERS`, separated by commas.

    Returns:
        The names.

    Raises:
        ValueError: If a name is unknown.

    Example:
        >>> logger_names("tensorboard, wandb"), logger_names("")
        (['tensorboard', 'wandb'], [])
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        check_choice("config.loggers", name, LOGGERS)
    return names


def check_installed(text: str) -> None:
    """Checks that the packages of ``config.loggers`` are installed.

    Args:
        text: Names in `LOGGERS`, separated by commas.

    Raises:
        ValueError: If one is not; the message says how to install it.
    """
    if "wandb" in logger_names(text):
        _import_wandb()


def tag(name: str, seed: int | float | None = None) -> str:
    """Returns the name of a value in a logger.

    Args:
        name: Its name in ``metrics.jsonl``.
        seed: The seed of the row, if several train together.

    Example:
        >>> tag("train_loss"), tag("learning_rate", 3)
        ('train/loss', 'learning_rate/seed_3')
    """
    return _SPLIT.sub(r"\1/", name) + ("" if seed is None else f"/seed_{seed}")


def _import_wandb() -> Any:
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise ValueError(
            "config.loggers has 'wandb', which is not installed: pip install "
            "'relattn[wandb]', or leave it out"
        ) from error


def _run_id(workdir: Path) -> str:
    """Returns the same id for all starts of a run."""
    start = ""
    with contextlib.suppress(OSError, ValueError, LookupError):
        record = read_json(workdir / "run.json", {"starts": [{"time": str}]})
        start = record["starts"][0]["time"]
    return hashlib.sha256(f"{workdir}\n{start}".encode()).hexdigest()[:12]

"""Metrics of a run: aggregated over an interval, then written to files."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import socket
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from relattn.training.cost import peak_flops
from relattn.training.errors import NonFiniteLossError, explain_write_errors
from relattn.training.run_metadata import History
from relattn.training.step import FINITE_METRICS
from relattn.training.task import Task
from relattn.training.workdir import back_up, write_text

# A row of metrics by name.
Row = dict[str, int | float]
# Metrics of several updates, each an array ``[updates, seeds]``.
Window = dict[str, np.ndarray]

_SPLIT = re.compile(r"^(train|validation)_")


class MetricsWindow:
    """Aggregates step metrics over a logging interval, and times its updates.

    Example:
        >>> window = MetricsWindow()
        >>> window.add({"loss": np.array(2.0)})
        >>> window.add({"loss": np.array(1.0)})
        >>> values, seconds, updates = window.take(fetch=lambda tree: tree)
        >>> values["loss"].tolist(), updates
        ([[2.0], [1.0]], 2)
    """

    def __init__(self) -> None:
        self._metrics: list[dict[str, Any]] = []
        self.restart_timer()

    def restart_timer(self) -> None:
        """Excludes the time and the updates so far from the timing."""
        self._start = time.perf_counter()
        self._untimed = len(self._metrics)

    def add(self, metrics: dict[str, Any]) -> None:
        """Adds the metrics of an update, still on the devices."""
        self._metrics.append(metrics)

    def take(self, fetch: Callable[[Any], Any]) -> tuple[Window, float, int]:
        """Empties the window.

        Args:
            fetch: Copies metrics from the devices.

        Returns:
            The metrics, the seconds since the timer started, and the number of updates
            in these seconds.
        """
        fetched = fetch(self._metrics)
        seconds = time.perf_counter() - self._start
        updates = len(fetched) - self._untimed
        self._metrics, self._untimed = [], 0
        values = {
            name: np.reshape([metrics[name] for metrics in fetched], (len(fetched), -1))
            for name in sorted(fetched[0])
        }
        return values, seconds, updates


def is_finite(window: Window) -> np.ndarray:
    """Returns which updates have finite `FINITE_METRICS`.

    Args:
        window: As `MetricsWindow.take` returns it.

    Returns:
        Shape ``[updates, seeds]``.

    Example:
        >>> loss, norm = np.array([[1.0], [np.nan]]), np.ones((2, 1))
        >>> window = {"loss": loss, "grad_norm": norm, "update_norm": norm}
        >>> is_finite(window).tolist()
        [[True], [False]]
    """
    return np.all([np.isfinite(window[name]) for name in FINITE_METRICS], axis=0)


def count_skipped(
    window: Window,
    histories: Sequence[History],
    done: int,
    max_skipped: int,
    last_checkpoint: Callable[[], Path | None],
) -> None:
    """Counts the updates of a window that are not finite.

    Args:
        window: As `MetricsWindow.take` returns it.
        histories: The history of each seed; their counts are increased.
        done: Number of updates so far.
        max_skipped: ``config.max_skipped_updates``.
        last_checkpoint: Returns the last checkpoint for the message, or None.

    Raises:
        NonFiniteLossError: At the first such update beyond ``max_skipped``.
    """
    num_updates = len(window["loss"])
    for update, index in np.argwhere(~is_finite(window)):
        history = histories[index]
        if history.stopped_early:
            continue
        if history.skipped_updates < max_skipped:
            history.skipped_updates += 1
            continue
        values = {name: float(window[name][update, index]) for name in FINITE_METRICS}
        name = next(name for name, value in values.items() if not np.isfinite(value))
        step = done - num_updates + 1 + int(update)
        after = f" after {max_skipped} skipped updates" if max_skipped else ""
        last = last_checkpoint()
        kept = "no checkpoint was written before it"
        if last is not None:
            kept = f"the last good checkpoint is {last}"
        raise NonFiniteLossError(
            f"{history.prefix}the {FINITE_METRICS[name]} is {values[name]} at step "
            f"{step}{after}; {kept}. Lower config.optimizer.learning_rate or set "
            "config.optimizer.clip_norm, with a new --workdir, or resume with a larger "
            "config.max_skipped_updates",
            step,
        )


def summarize(
    window: Window, task: Task, histories: Sequence[History], done: int
) -> list[Row]:
    """Averages the finite updates of a window to one row for each seed.

    Args:
        window: As `MetricsWindow.take` returns it.
        task: The task that is trained.
        histories: The history of each seed, with the updates skipped so far.
        done: Number of updates so far, those skipped included.

    Returns:
        The rows. A mean over no update is NaN.
    """
    rows = []
    finite = is_finite(window)
    for index, history in enumerate(histories):
        row: Row = {} if history.seed is None else {"seed": history.seed}
        for name, values in window.items():
            kept = values[finite[:, index], index]
            row[f"train_{name}"] = float(np.mean(kept)) if len(kept) else math.nan
        row["epoch"] = done / task.steps_per_epoch
        # A skipped update does not advance the optimiser's schedule.
        count = max(done - history.skipped_updates, 1)
        row["learning_rate"] = float(np.asarray(task.schedule(count - 1)))
        if task.config.max_skipped_updates:
            row["train_skipped"] = history.skipped_updates
        rows.append(row)
    return rows


def throughput(rate: float, task: Task, devices: Sequence[Any]) -> Row:
    """Computes the throughput of each device.

    Args:
        rate: Examples per second, of all seeds and devices.
        task: The task that is trained.
        devices: The JAX devices that share the work.

    Returns:
        ``examples_per_second``, ``examples_per_second_per_device`` and, if the device's
        peak is known, ``model_flops_utilization``, a fraction.
    """
    row: Row = {
        "examples_per_second": rate,
        "examples_per_second_per_device": rate / len(devices),
    }
    peak = peak_flops(devices[0].device_kind)
    if peak is not None:
        done = rate * task.flops_per_example / len(devices)
        row["model_flops_utilization"] = done / peak
    return row


class MetricsLog:
    """Writes rows by step to ``metrics.jsonl``, ``metrics.csv`` and TensorBoard.

    Rows after the step that a run starts from are dropped first, so that a resumed run
    leaves the same rows as one that was not interrupted. A file with unreadable lines
    is kept as ``metrics.jsonl.damaged``.

    Attributes:
        workdir: The run directory.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> log = MetricsLog(folder, start_step=0)
        >>> log.write(3, {"train_loss": 0.5})
        >>> log.close()
        >>> (folder / "metrics.csv").read_text().splitlines()
        ['step,train_loss', '3,0.5']
    """

    def __init__(self, workdir: Path, start_step: int):
        """Opens the files for a run that starts or resumes after ``start_step``."""
        self.workdir = workdir
        path = workdir / "metrics.jsonl"
        rows, unreadable = _parse(path)
        if unreadable:
            warnings.warn(
                f"{_describe(path, unreadable)}; the whole file is kept as "
                f"{back_up(path)}",
                stacklevel=2,
            )
        rows = [row for row in rows if row["step"] <= start_step]
        write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
        self._columns = list(dict.fromkeys(key for row in rows for key in row))
        self._rewrite_csv()
        with explain_write_errors(workdir / "events.out.tfevents"):
            self._events = EventsFile(workdir, start_step)

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        """Adds a row; each of several seeds has its own.

        Args:
            step: Number of updates so far.
            values: Values by name. ``train_loss`` is ``train/loss`` in TensorBoard, or
                ``train/loss/seed_3`` in a row with a ``seed``.
        """
        row: Row = {"step": step, **values}
        path = self.workdir / "metrics.jsonl"
        with explain_write_errors(path), path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        new = [key for key in row if key not in self._columns]
        if new:
            self._columns += new
            self._rewrite_csv()
        else:
            path = self.workdir / "metrics.csv"
            with explain_write_errors(path), path.open("a", newline="") as file:
                self._csv(file).writerow(row)
        suffix = f"/seed_{values['seed']}" if "seed" in values else ""
        with explain_write_errors(self.workdir / "events.out.tfevents"):
            self._events.add(
                step,
                {
                    _SPLIT.sub(r"\1/", name) + suffix: value
                    for name, value in values.items()
                    if name != "seed"
                },
            )

    def _csv(self, file: Any) -> csv.DictWriter:
        return csv.DictWriter(file, self._columns, lineterminator="\n")

    def _rewrite_csv(self) -> None:
        if not self._columns:
            (self.workdir / "metrics.csv").unlink(missing_ok=True)
            return
        text = io.StringIO()
        writer = self._csv(text)
        writer.writeheader()
        # Read again from the file: rows kept in memory would grow without limit.
        writer.writerows(read_rows(self.workdir / "metrics.jsonl"))
        write_text(self.workdir / "metrics.csv", text.getvalue())

    def close(self) -> None:
        """Flushes and closes the files."""
        with explain_write_errors(self.workdir / "events.out.tfevents"):
            self._events.close()


def read_rows(path: Path) -> list[Row]:
    """Reads the rows of a ``metrics.jsonl``.

    A last line that a crash cut short is left out. Any other line that is not a row is
    left out too, with a warning.

    Args:
        path: The file; need not exist.

    Returns:
        Rows in the order of the file.

    Example:
        >>> read_rows(Path("no/such/file"))
        []
    """
    rows, unreadable = _parse(path)
    if unreadable:
        warnings.warn(_describe(path, unreadable), stacklevel=2)
    return rows


def _parse(path: Path) -> tuple[list[Row], list[int]]:
    """Returns the rows of a file, and the numbers of lines that are not rows."""
    rows: list[Row] = []
    unreadable: list[int] = []
    if not path.is_file():
        return rows, unreadable
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if _is_row(row):
            rows.append(row)
        elif number < len(lines):
            unreadable.append(number)
    return rows, unreadable


def _is_row(row: Any) -> TypeGuard[Row]:
    return (
        isinstance(row, dict)
        and type(row.get("step")) is int
        and all(isinstance(value, int | float) for value in row.values())
    )


def _describe(path: Path, unreadable: list[int]) -> str:
    lines = ", ".join(map(str, unreadable[:5])) + ", ..." * (len(unreadable) > 5)
    return f"{path} is damaged: rows that cannot be read are left out (line {lines})"


class EventsFile:
    """A new file of TensorBoard events.

    Args:
        folder: The folder of the file.
        start_step: TensorBoard drops values of later steps in earlier files.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> events = EventsFile(folder, start_step=0)
        >>> events.add(3, {"train/loss": 0.5})
        >>> events.close()
        >>> [path.name[:19] for path in folder.iterdir()]
        ['events.out.tfevents']
    """

    def __init__(self, folder: Path, start_step: int):
        # Imported late: tensorboardX imports PyTorch where it is installed.
        from tensorboardX.proto import event_pb2
        from tensorboardX.record_writer import RecordWriter

        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}"
        self._records = RecordWriter(str(folder / name))
        self._write(file_version="brain.Event:2")
        if start_step:
            session_log = event_pb2.SessionLog  # pyright: ignore[reportAttributeAccessIssue]
            restart = session_log(status=session_log.START)
            self._write(step=start_step + 1, session_log=restart)

    def add(self, step: int, values: dict[str, float]) -> None:
        """Writes scalars.

        Args:
            step: Number of updates so far.
            values: Scalars by tag.
        """
        from tensorboardX.summary import scalar

        for tag, value in values.items():
            self._write(step=step, summary=scalar(tag, value))
        self._records.flush()

    def _write(self, **event: Any) -> None:
        from tensorboardX.proto import event_pb2

        make = event_pb2.Event  # pyright: ignore[reportAttributeAccessIssue]
        record = make(wall_time=time.time(), **event)
        self._records.write(record.SerializeToString())

    def close(self) -> None:
        """Flushes and closes the file, even if flushing fails."""
        self._records.close()

"""The rows of metrics of a run: written to its files, and read again."""

from __future__ import annotations

import csv
import io
import json
import re
import socket
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from relattn.training.errors import explain_write_errors
from relattn.training.workdir import back_up, write_text

# A row of metrics by name.
Row = dict[str, int | float]

_SPLIT = re.compile(r"^(train|validation)_")


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

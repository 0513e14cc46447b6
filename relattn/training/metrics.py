"""Metrics of a run on disk: JSON lines, CSV and TensorBoard events."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relattn.training.aside import copy_aside
from relattn.training.errors import writing
from relattn.training.events import EventsFile

Row = dict[str, int | float]

_SPLIT = re.compile(r"^(train|validation)_")


class MetricsLog:
    """Writes rows by step to ``metrics.jsonl``, ``metrics.csv`` and TensorBoard.

    Rows beyond the step that a run starts from are dropped first, so that a resumed
    run leaves the rows of one never interrupted. A file with lines that cannot be read
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
        """Opens the files for a run that starts, or goes on, after ``start_step``."""
        self.workdir = workdir
        path = workdir / "metrics.jsonl"
        rows, unreadable = _parse(path)
        if unreadable:
            warnings.warn(
                f"{_describe(path, unreadable)}; the whole file is kept as "
                f"{copy_aside(path)}",
                stacklevel=2,
            )
        rows = [row for row in rows if row["step"] <= start_step]
        write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
        self._columns = list(dict.fromkeys(key for row in rows for key in row))
        self._rewrite_csv()
        with writing(workdir / "events.out.tfevents"):
            self._events = EventsFile(workdir, start_step)

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        """Adds a row; of seeds that train together, each has its own.

        Args:
            step: Number of updates so far.
            values: By name; ``train_loss`` is ``train/loss`` in TensorBoard, and with
                a ``seed`` among them ``train/loss/seed_3``.
        """
        row: Row = {"step": step, **values}
        path = self.workdir / "metrics.jsonl"
        with writing(path), path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        new = [key for key in row if key not in self._columns]
        if new:
            self._columns += new
            self._rewrite_csv()
        else:
            path = self.workdir / "metrics.csv"
            with writing(path), path.open("a", newline="") as file:
                self._csv(file).writerow(row)
        suffix = f"/seed_{values['seed']}" if "seed" in values else ""
        with writing(self.workdir / "events.out.tfevents"):
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
        # Read anew: rows that are kept would grow without end.
        writer.writerows(read_rows(self.workdir / "metrics.jsonl"))
        write_text(self.workdir / "metrics.csv", text.getvalue())

    def close(self) -> None:
        """Writes what is left."""
        with writing(self.workdir / "events.out.tfevents"):
            self._events.close()


def read_rows(path: Path) -> list[Row]:
    """The rows of a ``metrics.jsonl``.

    A last line cut short by a crash is left out. Any other line that is no row is left
    out too, with a warning.

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
    """The rows of a file, and the numbers of the lines that are none."""
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


def _is_row(row: Any) -> bool:
    return (
        isinstance(row, dict)
        and type(row.get("step")) is int
        and all(isinstance(value, int | float) for value in row.values())
    )


def _describe(path: Path, unreadable: list[int]) -> str:
    lines = ", ".join(map(str, unreadable[:5])) + ", ..." * (len(unreadable) > 5)
    return f"{path} is damaged: rows that cannot be read are left out (line {lines})"


def write_text(path: Path, text: str) -> None:
    """Replaces a file by one with this text, all or nothing, even if power fails.

    Args:
        path: The file.
        text: Its new contents.

    Raises:
        WorkdirError: If the disk is full or read-only.
    """
    temporary = path.with_name(path.name + ".tmp")
    with writing(path):
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            # Or a file system may give the new name to a file still empty.
            os.fsync(file.fileno())
        os.replace(temporary, path)

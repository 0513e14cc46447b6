"""Metrics of a run on disk: JSON lines, CSV and TensorBoard events."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relattn.training.errors import writing
from relattn.training.events import EventsFile

Row = dict[str, int | float]

_SPLIT = re.compile(r"^(train|validation)_")


class MetricsLog:
    """Writes rows by step to ``metrics.jsonl``, ``metrics.csv`` and TensorBoard.

    Rows beyond the step that a run starts from are dropped first, so that a resumed
    run leaves the rows of one never interrupted.

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
        rows = [row for row in read_rows(path) if row["step"] <= start_step]
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
    """The rows of a ``metrics.jsonl``; a last line cut short by a crash is left out.

    Args:
        path: The file; need not exist.

    Returns:
        Rows in the order of the file.

    Example:
        >>> read_rows(Path("no/such/file"))
        []
    """
    rows: list[Row] = []
    if not path.exists():
        return rows
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def write_text(path: Path, text: str) -> None:
    """Replaces a file by one with this text, all or nothing.

    Args:
        path: The file.
        text: Its new contents.

    Raises:
        WorkdirError: If the disk is full or read-only.
    """
    temporary = path.with_name(path.name + ".tmp")
    with writing(path):
        temporary.write_text(text)
        os.replace(temporary, path)

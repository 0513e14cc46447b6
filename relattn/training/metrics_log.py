"""Writes and reads the rows of metrics of a run."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relattn.files import naming, no_follow
from relattn.json_files import Range, parse_json
from relattn.training.errors import explain_write_errors
from relattn.training.loggers import LOGGERS, logger_names, tag
from relattn.training.workdir import back_up, write_text

# A row of metrics by name.
Row = dict[str, int | float]

_ROW = {"step": Range(0, 2**53), "seed?": Range(0, 2**32), "*": float}


class MetricsLog:
    """Writes rows by step to ``metrics.jsonl``, and copies them to loggers.

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
        >>> read_rows(folder / "metrics.jsonl")
        [{'step': 3, 'train_loss': 0.5}]
    """

    def __init__(
        self,
        workdir: Path,
        start_step: int,
        log_every_steps: int = 0,
        loggers: str = "tensorboard",
        config: Mapping[str, Any] | None = None,
        ends: Mapping[int | None, int] | None = None,
    ):
        """Opens the files for a run that starts or resumes after ``start_step``.

        With ``log_every_steps``, warns if the file has no row of ``start_step``, or if
        rows before it are further apart: some were removed. ``loggers`` are names
        in `relattn.training.loggers.LOGGERS`, which are given the configuration.
        ``ends`` has the last step of each seed, if several train together.
        """
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
        if log_every_steps and not unreadable:
            for seed, end in (ends or {None: start_step}).items():
                own = [row for row in rows if row.get("seed") == seed]
                if gap := _find_gap(own, end, log_every_steps):
                    whose = "" if seed is None else f" of seed {seed}"
                    warnings.warn(
                        f"{path} has no rows{whose} between the steps {gap[0]} and "
                        f"{gap[1]}, which the run has passed: its metrics there are "
                        "lost",
                        stacklevel=2,
                    )
        write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
        self._loggers = [
            LOGGERS[name](workdir, start_step, config or {})
            for name in logger_names(loggers)
        ]

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        """Adds a row; each of several seeds has its own.

        Args:
            step: Number of updates so far.
            values: Values by name. ``train_loss`` is ``train/loss`` in loggers, or
                ``train/loss/seed_3`` in a row with a ``seed``.
        """
        path = self.workdir / "metrics.jsonl"
        with explain_write_errors(path), open(path, "a", opener=no_follow) as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        seed = values.get("seed")
        tagged = {
            tag(name, seed): value for name, value in values.items() if name != "seed"
        }
        for logger in self._loggers:
            logger.write(step, tagged)

    def close(self) -> None:
        """Closes the loggers."""
        for logger in self._loggers:
            logger.close()


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
    with naming(path):
        lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(parse_json(line, path, _ROW, allow_nan=True))
        except ValueError:
            if number < len(lines):
                unreadable.append(number)
    return rows, unreadable


def _find_gap(rows: list[Row], end: int, step: int) -> tuple[int, int] | None:
    """Returns the first two steps between which rows are missing."""
    logged = sorted({int(row["step"]) for row in rows})
    if end and end not in logged:
        return (logged or [0])[-1], end
    for before, after in itertools.pairwise([0, *logged]):
        if after - before > step:
            return before, after
    return None


def _describe(path: Path, unreadable: list[int]) -> str:
    lines = ", ".join(map(str, unreadable[:5])) + ", ..." * (len(unreadable) > 5)
    return f"{path} is damaged: rows that cannot be read are left out (line {lines})"

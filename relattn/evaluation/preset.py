"""What a study is: its runs, and the columns and the published rows of its table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from relattn.spec import closest


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a study's table: a final metric of the runs.

    Attributes:
        name: In files.
        title: For people.
        metric: The key in a run's ``result.json``.
        trained: Which of the row's runs it is of; "" for the first that there is.
        unit: A key of `relattn.evaluation.study_report.UNITS`.
        digits: After the point; None for the unit's.
        published: The column of the published table, "" where it has none.
    """

    name: str
    title: str
    metric: str
    trained: str = ""
    unit: str = "number"
    digits: int | None = None
    published: str = ""


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a study's table: a model, trained in one way or several.

    Attributes:
        name: Of the model; its runs' folders start with it.
        runs: Configurations with their arguments, by what the model is trained on.
        published: The row of the published table; empty where it has none.
    """

    name: str
    runs: Mapping[str, str]
    published: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Preset:
    """A study.

    Attributes:
        title: A sentence for the head of the table.
        rows: Of the table.
        columns: Of the table.
        curve: The metric of validation that is drawn by step.
        notes: Sentences for below the table.
        shifts: Options of `relattn.evaluation.compare.shift_report`, by which accuracy
            under shifts of the test images is measured too; None for not at all.
    """

    title: str
    rows: Sequence[Row]
    columns: Sequence[Column]
    curve: str = "loss"
    notes: Sequence[str] = ()
    shifts: Mapping[str, Any] | None = None

    @property
    def datasets(self) -> list[str]:
        """What its models are trained on."""
        return list(dict.fromkeys(name for row in self.rows for name in row.runs))

    def of(self, names: Sequence[str]) -> Preset:
        """The part of the study that trains some models.

        Args:
            names: Of rows.

        Returns:
            A smaller study.

        Raises:
            ValueError: If there is no such row; names the closest.

        Example:
            >>> rows = [Row("vit", {"": "vit.py"}), Row("gpt", {"": "gpt.py"})]
            >>> [row.name for row in Preset("Two", rows, []).of(["gpt"]).rows]
            ['gpt']
        """
        known = [row.name for row in self.rows]
        for name in names:
            if name not in known:
                raise ValueError(f"unknown model {name!r}: {closest(name, known)}")
        rows = [row for row in self.rows if row.name in names]
        return dataclasses.replace(self, rows=rows)

    def on(self, dataset: str) -> Preset:
        """The part of the study that trains on one data set.

        Args:
            dataset: One of ``datasets``.

        Returns:
            A smaller study.

        Raises:
            ValueError: If nothing is trained on it; names the closest.

        Example:
            >>> row = Row("vit", {"mnist": "vit.py:mnist", "cifar10": "vit.py:cifar10"})
            >>> Preset("Two", [row], []).on("cifar10").datasets
            ['cifar10']
        """
        if dataset not in self.datasets:
            raise ValueError(
                f"unknown dataset {dataset!r}: {closest(dataset, self.datasets)}"
            )
        rows = [
            dataclasses.replace(row, runs={dataset: row.runs[dataset]})
            for row in self.rows
            if dataset in row.runs
        ]
        columns = [column for column in self.columns if column.trained in ("", dataset)]
        return dataclasses.replace(self, rows=rows, columns=columns)


PARAMS = Column("parameters", "parameters", "num_params", unit="millions")
SECONDS = Column("seconds", "training, s", "seconds", unit="seconds")

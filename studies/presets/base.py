"""What a study is made of: columns, rows, and the preset that has both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from relattn.messages import check_choice


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a study's table: a final metric of the runs.

    Attributes:
        name: Name in files.
        title: Title in tables.
        metric: Key in the run's ``result.json``.
        trained: Key of the row's run; "" for the first run.
        unit: Key of `studies.report.UNITS`.
        digits: Number of decimals; None for the default of the unit.
        published: Column of the published table; "" if it has none.
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
    """A row of a study's table: a model, trained on one or more data sets.

    Attributes:
        name: Name of the model; the folders of its runs start with it.
        runs: Configurations with their arguments, by data set.
        published: Row of the published table; empty if there is none.
    """

    name: str
    runs: Mapping[str, str]
    published: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Redraws:
    """What a study says of redraws, see `studies.redraws.redraw_report`.

    Attributes:
        intervals: Rows that differ only in the interval of redraws -> the interval in
            steps, 0 for one draw.
        exact: Rows that do not depend on a draw; the first is what the others estimate.
        draws: Numbers of draws over which evaluations average.
        shifts: Options of `relattn.evaluation.compare.compare`.
        expected: What was expected, in sentences.
    """

    intervals: Mapping[str, int]
    exact: Sequence[str]
    draws: Sequence[int]
    shifts: Mapping[str, Any]
    expected: str


@dataclasses.dataclass(frozen=True)
class Preset:
    """A study.

    Attributes:
        title: Sentence above the table.
        rows: Rows of the table.
        columns: Columns of the table.
        curve: Validation metric to plot over steps.
        notes: Sentences below the table.
        shifts: Options of `relattn.evaluation.compare.shift_report`, which measures the
            accuracy under shifts of the test images; None to skip it.
        redraws: The rows in which redraws are compared; None to skip it.
    """

    title: str
    rows: Sequence[Row]
    columns: Sequence[Column]
    curve: str = "loss"
    notes: Sequence[str] = ()
    shifts: Mapping[str, Any] | None = None
    redraws: Redraws | None = None

    @property
    def datasets(self) -> list[str]:
        """Lists the data sets of the runs."""
        return list(dict.fromkeys(name for row in self.rows for name in row.runs))

    def of(self, names: Sequence[str]) -> Preset:
        """Selects rows by name.

        Args:
            names: Names of rows.

        Returns:
            A smaller study.

        Raises:
            ValueError: If there is no such row; suggests the closest name.

        Example:
            >>> rows = [Row("vit", {"": "vit.py"}), Row("gpt", {"": "gpt.py"})]
            >>> [row.name for row in Preset("Two", rows, []).of(["gpt"]).rows]
            ['gpt']
        """
        known = [row.name for row in self.rows]
        for name in names:
            check_choice("model", name, known)
        return self.with_runs(lambda name, dataset: name in names)

    def on(self, dataset: str) -> Preset:
        """Selects the runs on one data set.

        Args:
            dataset: One of ``datasets``.

        Returns:
            A smaller study.

        Raises:
            ValueError: If no run uses it; suggests the closest name.

        Example:
            >>> row = Row("vit", {"mnist": "vit.py:mnist", "cifar10": "vit.py:cifar10"})
            >>> Preset("Two", [row], []).on("cifar10").datasets
            ['cifar10']
        """
        if self.datasets == [""]:
            raise ValueError(
                "the models of this study have one run each: leave --dataset out"
            )
        check_choice("dataset", dataset, self.datasets)
        return self.with_runs(lambda name, trained: trained == dataset)

    def with_runs(self, selects: Callable[[str, str], bool]) -> Preset:
        """Selects the runs for whose row and data set ``selects`` returns True."""
        rows = []
        for row in self.rows:
            runs = {key: run for key, run in row.runs.items() if selects(row.name, key)}
            rows += [dataclasses.replace(row, runs=runs)] if runs else []
        trained = {"", *(key for row in rows for key in row.runs)}
        columns = [column for column in self.columns if column.trained in trained]
        return dataclasses.replace(self, rows=rows, columns=columns)


PARAMS = Column("parameters", "parameters", "num_params", unit="millions")
SECONDS = Column("seconds", "training, s", "seconds", unit="seconds")

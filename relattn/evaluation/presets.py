"""The studies that there are: for each its runs, its columns and the published rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from relattn.evaluation.publications import read_published
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
        shifts: Options of `relattn.evaluation.compare.shift_report`, by which accuracy
            under shifts of the test images is measured too; None for not at all.
    """

    title: str
    rows: Sequence[Row]
    columns: Sequence[Column]
    curve: str = "loss"
    shifts: Mapping[str, Any] | None = None

    @property
    def datasets(self) -> list[str]:
        """What its models are trained on."""
        return list(dict.fromkeys(name for row in self.rows for name in row.runs))

    def on(self, dataset: str) -> Preset:
        """The part of the study that trains on one data set.

        Args:
            dataset: One of ``datasets``.

        Returns:
            A smaller study.

        Raises:
            ValueError: If nothing is trained on it; names the closest.

        Example:
            >>> PRESETS["rpe_vit"].on("cifar10").datasets
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


_METHODS = ("self_attention", "lor_translution", "translution")
_PARAMS = Column("parameters", "parameters", "num_params", unit="millions")
_SECONDS = Column("seconds", "training, s", "seconds", unit="seconds")


def _table2(cut: str = "", dynamic: Sequence[str] = _METHODS) -> Preset:
    """Table 2 of Translution for ViT-A/12.

    Args:
        cut: One more argument of the configuration, that makes it smaller.
        dynamic: The methods that are trained on dynamic MNIST too.
    """

    def config(placement: str, method: str) -> str:
        arguments = [placement, "A/12", method, *filter(None, [cut])]
        return f"configs/translution_vit.py:{','.join(arguments)}"

    published = {
        row["method"]: row
        for row in read_published("translution_table2_mnist")
        if row["arch"] == "ViT-A/12"
    }
    placements = {"static": _METHODS, "dynamic": dynamic}
    return Preset(
        title="ViT-A/12 on MNIST, in the centre of a canvas (static) or anywhere on it "
        "(dynamic): test accuracy in %, trained → evaluated (Translution, table 2)",
        rows=[
            Row(
                name=method,
                runs={
                    placement: config(placement, method)
                    for placement, methods in placements.items()
                    if method in methods
                },
                published=published[method],
            )
            for method in _METHODS
        ],
        columns=[
            dataclasses.replace(_PARAMS, published="params"),
            _accuracy("static", "static", "static_static"),
            _accuracy("dynamic", "dynamic", "dyn_dyn"),
            _accuracy("static", "dynamic", "static_dyn"),
            dataclasses.replace(_SECONDS, trained="static"),
        ],
    )


def _accuracy(trained: str, evaluated: str, published: str) -> Column:
    return Column(
        name=f"{trained}_{evaluated}",
        title=f"{trained} → {evaluated}",
        metric=f"test_{evaluated}_accuracy",
        trained=trained,
        unit="percent",
        published=published,
    )


def _text() -> Preset:
    methods = ("self_attention", "rope", "lor_translution", "translution")
    return Preset(
        title="A small GPT on the bytes of tinyshakespeare: the best validation loss, "
        "in nats a byte, within equal steps",
        rows=[
            Row(method, {"": f"configs/translution_gpt.py:{method},cpu"})
            for method in methods
        ],
        columns=[
            _PARAMS,
            Column("loss", "validation loss", "validation_loss"),
            Column("perplexity", "perplexity", "validation_perplexity"),
            Column("accuracy", "accuracy, %", "validation_accuracy", unit="percent"),
            _SECONDS,
        ],
    )


def _rpe_vit(datasets: Sequence[str] = ("mnist", "cifar10"), cut: str = "") -> Preset:
    """Tables 1 and 2 of Guoji.

    Args:
        datasets: Those to train on.
        cut: One more argument of the configuration, that makes it smaller.
    """
    tables = [
        row for row in read_published("rpe_vit_tables") if row["dataset"] in datasets
    ]
    models = dict.fromkeys((row["attention"], row["position"]) for row in tables)
    rows = []
    for model in models:
        of_model = {
            row["dataset"]: row
            for row in tables
            if (row["attention"], row["position"]) == model
        }
        arguments = ",".join([*model, *filter(None, [cut])])
        rows.append(
            Row(
                name="_".join(word for word in model if word != "none"),
                runs={
                    dataset: f"configs/rpe_vit.py:{dataset},{arguments}"
                    for dataset in of_model
                },
                published={
                    f"{dataset}_{key}": value
                    for dataset, row in of_model.items()
                    for key, value in row.items()
                },
            )
        )
    columns = [_PARAMS]
    for dataset in datasets:
        where = f"{dataset}, " if len(datasets) > 1 else ""
        for key, title, metric, unit in (
            ("val_acc", "validation accuracy, %", "validation_accuracy", "percent"),
            ("test_acc", "test accuracy, %", "test_accuracy", "percent"),
            ("inference_s", "inference, s", "inference_seconds", "seconds"),
        ):
            columns.append(
                Column(
                    name=f"{dataset}_{key}",
                    title=where + title,
                    metric=metric,
                    trained=dataset,
                    unit=unit,
                    digits=2,
                    published=f"{dataset}_{key}",
                )
            )
    columns += [
        dataclasses.replace(
            _SECONDS,
            name=f"{dataset}_seconds",
            trained=dataset,
            title=f"{dataset}, {_SECONDS.title}",
        )
        for dataset in datasets
    ]
    return Preset(
        title="A Vision Transformer of 6 layers with softmax and linear attention and "
        f"position encodings on {' and '.join(datasets)} (Guoji, tables 1 and 2)",
        rows=rows,
        columns=columns,
    )


# The names of Horn et al., and the arguments of configs/baselines.py and
# configs/performer.py.
BASELINES = {
    "AlexNet": "alexnet",
    "VGG-16": "vgg16",
    "ResNet-18": "resnet18",
    "Linformer": "linformer",
    "Routing Transformer": "routing",
}
_PERFORMERS = {
    "Performer (No Pos.)": "none",
    "Performer (Absolute)": "learnable_sincos",
    "Performer (Rel. S1)": "constrained_sincos",
    "Performer (Rel. S2)": "banded",
}


def _table1(
    configs: Mapping[str, Mapping[str, str]],
    datasets: Sequence[str],
    title: str,
    *,
    cut: str = "",
    shifts: Mapping[str, Any] | None = None,
) -> Preset:
    """Models of table 1 of Horn et al.

    Args:
        configs: By configuration the arguments, by the names of the table.
        datasets: Those to train on.
        title: Of the study.
        cut: One more argument of the configurations, that makes them smaller.
        shifts: Options of the evaluation under shifts; None for none.
    """
    published = {row["model"]: row for row in read_published("performer_table1")}
    rows = []
    for config, models in configs.items():
        for model, argument in models.items():
            arguments = ",".join(filter(None, [argument, cut]))
            runs = {
                dataset: f"configs/{config}.py:{dataset},{arguments}"
                for dataset in datasets
            }
            rows.append(Row(argument, runs, published[model]))
    return Preset(
        title=title,
        rows=rows,
        columns=[
            dataclasses.replace(_PARAMS, published="params"),
            *(
                Column(
                    name=dataset,
                    title=f"{dataset}, test accuracy, %",
                    metric="test_accuracy",
                    trained=dataset,
                    unit="percent",
                    published=f"{dataset}_acc",
                )
                for dataset in datasets
            ),
        ],
        shifts=shifts,
    )


PRESETS = {
    "rpe_vit": _rpe_vit(),
    "rpe_vit_cpu": _rpe_vit(("mnist",), "cpu"),
    "performer_table1": _table1(
        {"baselines": BASELINES, "performer": _PERFORMERS},
        ("mnist", "fashion_mnist", "cifar10"),
        "Performers on pixels as tokens, and their baselines: test accuracy in % (Horn "
        "et al., table 1)",
    ),
    "performer_table1_cpu": _table1(
        {"baselines": BASELINES, "performer": _PERFORMERS},
        ("mnist", "fashion_mnist"),
        "Performers on patches of 4x4 pixels as tokens, and their baselines: test "
        "accuracy in %, and under shifts of the test images (Horn et al., table 1)",
        cut="cpu",
        shifts={"classes": "all", "num_images": 300},
    ),
    "performer_figure1": _table1(
        {"performer": _PERFORMERS},
        ("mnist", "fashion_mnist"),
        "Performers on pixels as tokens, and under shifts of the test images (Horn et "
        "al., figure 1)",
        shifts={},
    ),
    "translution_table2": _table2(),
    "translution_table2_cpu": _table2("cpu", dynamic=_METHODS[:2]),
    "translution_text": _text(),
}

"""The studies that there are: for each its runs, its columns and the published rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from relattn.evaluation.publications import read_published


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a study's table: a final metric of the runs.

    Attributes:
        name: In files.
        title: For people.
        metric: The key in a run's ``result.json``.
        trained: Which of the row's runs it is of; "" for the first that there is.
        unit: A key of `relattn.evaluation.study_report.UNITS`.
        published: The column of the published table, "" where it has none.
    """

    name: str
    title: str
    metric: str
    trained: str = ""
    unit: str = "number"
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
    """

    title: str
    rows: Sequence[Row]
    columns: Sequence[Column]
    curve: str = "loss"


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


PRESETS = {
    "translution_table2": _table2(),
    "translution_table2_cpu": _table2("cpu", dynamic=_METHODS[:2]),
    "translution_text": _text(),
}

"""The studies of Translution: its tables, and what of them fits two CPU cores."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from relattn.evaluation.preset import PARAMS, SECONDS, Column, Preset, Row
from relattn.evaluation.translution_tables import Entry, translution_entries

_PLACEMENTS = {"static": "static", "dynamic": "dynamic"}
_VECTORS = "relative_key and relative_value beside learned ones"


def _entries(*tables: str, size: str = "") -> list[Entry]:
    return [
        entry
        for entry in translution_entries()
        if entry.table in tables and size in ("", entry.size)
    ]


def _rows(
    entries: Sequence[Entry], config: str, data: Mapping[str, str], cut: str = ""
) -> list[Row]:
    """A row an entry.

    Args:
        entries: Those of the table.
        config: The configuration.
        data: The arguments that choose data, by what the rows say of them.
        cut: One more argument of the configuration, that makes it smaller.
    """
    several = len({entry.size for entry in entries}) > 1
    rows = []
    for entry in entries:
        options = [f"{key}={value}" for key, value in entry.options.items()]
        arguments = [entry.size, entry.method, *options, *filter(None, [cut])]
        runs = {
            trained: f"configs/{config}.py:{','.join([word, *arguments])}"
            for trained, word in data.items()
        }
        size = [entry.size.lower().replace("/", "").replace("-", "")] * several
        name = "_".join([*size, *entry.words]).replace("=", "_")
        rows.append(Row(name, runs, entry.published))
    return rows


def _params(entries: Sequence[Entry]) -> Column:
    printed = all(entry.published.get("params") for entry in entries)
    return dataclasses.replace(PARAMS, published="params" if printed else "")


def _mnist(
    tables: str,
    entries: Sequence[Entry],
    models: str,
    cut: str = "",
    static: Collection[str] = (),
) -> Preset:
    """A table on MNIST.

    Args:
        tables: Which, as people say it.
        entries: Its rows.
        models: What they are.
        cut: One more argument of the configuration, that makes it smaller.
        static: Rows that are trained on static images only.
    """
    rows = [
        dataclasses.replace(row, runs={"static": row.runs["static"]})
        if row.name in static
        else row
        for row in _rows(entries, "translution_vit", _PLACEMENTS, cut)
    ]
    return Preset(
        title=f"{models} on MNIST, in the centre of a canvas (static) or anywhere on "
        "it (dynamic): test accuracy in %, trained → evaluated (Translution, "
        f"{tables})",
        rows=rows,
        columns=[
            _params(entries),
            _accuracy("static", "static", "static_static"),
            _accuracy("dynamic", "dynamic", "dyn_dyn"),
            _accuracy("static", "dynamic", "static_dyn"),
            dataclasses.replace(SECONDS, trained="static"),
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


def _imagenet(tables: str, entries: Sequence[Entry], models: str) -> Preset:
    """A table on ImageNet, whose validation images are its test."""
    percent = {"unit": "percent", "digits": 2}
    return Preset(
        title=f"{models} on ImageNet-1K: accuracy in % (Translution, {tables})",
        rows=_rows(entries, "translution_vit", {"": "imagenet"}),
        columns=[
            _params(entries),
            Column("top1", "top-1", "test_accuracy", published="top1", **percent),
            Column("top5", "top-5", "test_top5_accuracy", published="top5", **percent),
            SECONDS,
        ],
    )


def _openwebtext(tables: str, entries: Sequence[Entry], models: str) -> Preset:
    """A table on OpenWebText."""
    return Preset(
        title=f"{models} on OpenWebText: perplexity (Translution, {tables})",
        rows=_rows(entries, "translution_gpt", {"": "openwebtext"}),
        columns=[
            _params(entries),
            Column(
                "perplexity",
                "perplexity",
                "validation_perplexity",
                digits=2,
                published="perplexity",
            ),
            SECONDS,
        ],
    )


def _tinyshakespeare() -> Preset:
    methods = ("self_attention", "rope", "lor_translution", "translution")
    return Preset(
        title="A small GPT on the bytes of tinyshakespeare: the best validation loss, "
        "in nats a byte, within equal steps",
        rows=[
            Row(method, {"": f"configs/translution_gpt.py:{method},cpu"})
            for method in methods
        ],
        columns=[
            PARAMS,
            Column("loss", "validation loss", "validation_loss"),
            Column("perplexity", "perplexity", "validation_perplexity"),
            Column("accuracy", "accuracy, %", "validation_accuracy", unit="percent"),
            SECONDS,
        ],
    )


TRANSLUTION_PRESETS = {
    "translution_table2": _mnist("table 2", _entries("2"), "ViT-A"),
    "translution_table2_cpu": _mnist(
        "table 2", _entries("2", size="A/12"), "ViT-A/12", "cpu", static=["translution"]
    ),
    "translution_table3": _imagenet("table 3", _entries("3"), "ViTs of three sizes"),
    "translution_table4": _imagenet(
        "table 4", _entries("4"), f"ViT-A/56 with relative positions ({_VECTORS})"
    ),
    "translution_table5": _mnist(
        "table 5",
        _entries("5"),
        "ViT-A/12 with weights of offsets or of pairs of tokens",
    ),
    "translution_table7": _openwebtext("table 7", _entries("7"), "GPTs of three sizes"),
    "translution_table8": _openwebtext(
        "table 8", _entries("8"), f"GPT-A-160 with relative positions ({_VECTORS})"
    ),
    "translution_table10": _mnist(
        "table 10", _entries("10"), "ViT-A/12 without and with learned positions"
    ),
    "translution_table11": _imagenet(
        "tables 6 and 11",
        _entries("6, 11", "11"),
        "ViT-A/56 with and without plain projections",
    ),
    "translution_text": _tinyshakespeare(),
}

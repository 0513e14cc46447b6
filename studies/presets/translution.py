"""Presets of Translution's tables, and of questions that they leave open."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from studies.presets.base import PARAMS, SECONDS, Column, Preset, Row
from studies.published import Entry, translution_entries

_PLACEMENTS = {"static": "static", "dynamic": "dynamic"}
_PLACES = {"once": "dynamic_once", "dynamic": "dynamic", "static": "static"}
_WAVES = "fourier_values(num_frequencies={})"
_VECTORS = "relative_key and relative_value in addition to learned ones"


def _entries(*tables: str, size: str = "") -> list[Entry]:
    return [
        entry
        for entry in translution_entries()
        if entry.table in tables and size in ("", entry.size)
    ]


def _rows(
    entries: Sequence[Entry], config: str, data: Mapping[str, str], cut: str = ""
) -> list[Row]:
    """Makes one row per entry.

    Args:
        entries: Entries of the table.
        config: Name of the configuration.
        data: Key of a run -> argument of the configuration that selects the data.
        cut: Another argument, which makes the run smaller.

    Returns:
        The rows.
    """
    several = len({entry.size for entry in entries}) > 1
    rows = []
    for entry in entries:
        arguments = [entry.arguments, *filter(None, [cut])]
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
    """Makes the preset of a table on MNIST.

    Args:
        tables: Number of the table, for the title.
        entries: Entries of the table.
        models: Description of the models, for the title.
        cut: Another argument of the configuration, which makes the run smaller.
        static: Names of rows to train on static images only.
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
            _accuracy("dynamic", "static", ""),
            dataclasses.replace(SECONDS, trained="static"),
        ],
    )


def _places() -> Preset:
    """Makes the preset of places that are the same, or new, in every epoch."""
    methods = {
        "self_attention": "self_attention",
        "lor_translution": "lor_translution",
        "rope2d_mixed": "self_attention,position=rope2d_mixed",
        **{
            f"fourier_values_{count}": "self_attention,position=rope2d_mixed + "
            + _WAVES.format(count)
            for count in (2, 8)
        },
        "relative_bias": "relative_bias",
        "favor": "favor,position=sincos_bias",
        "translution": "translution",
    }
    published = {entry.method: entry.published for entry in _entries("2", size="A/12")}
    rows = [
        Row(
            name,
            {
                trained: f"configs/translution_vit.py:{placement},A/12,{method}"
                for trained, placement in _PLACES.items()
            },
            published.get(name, {}),
        )
        for name, method in methods.items()
    ]
    return Preset(
        title="ViT-A/12 on MNIST, each training image anywhere on a canvas, always at "
        "one place (once) or at a new one in each epoch (dynamic), or in the centre "
        "(static): test accuracy in %, trained → evaluated (Translution, table 2)",
        rows=rows,
        columns=[
            _params(_entries("2", size="A/12")),
            # The paper does not say which of the two its digits are.
            _accuracy("once", "dynamic", "dyn_dyn"),
            _accuracy("dynamic", "dynamic", "dyn_dyn"),
            _accuracy("static", "dynamic", "static_dyn"),
            _accuracy("static", "static", "static_static"),
            dataclasses.replace(SECONDS, trained="once"),
        ],
    )


def _fourier() -> Preset:
    """Makes the preset of Fourier values and scores, beside what they replace."""
    methods = {
        "self_attention": "self_attention",
        "rope2d_mixed": "self_attention,position=rope2d_mixed",
        "lor_translution": "lor_translution",
        "fourier_scores": "self_attention,position=fourier_scores + fourier_values",
        **{
            f"fourier_values_{count}": "self_attention,position=rope2d_mixed + "
            + _WAVES.format(count)
            for count in (2, 4, 8, 16)
        },
        "favor": "favor,position=sincos_bias",
        **{
            f"favor_fourier_values_{count}": "favor,position=sincos_bias + "
            + _WAVES.format(count)
            for count in (2, 4, 8, 16)
        },
        "translution_clip_2": "translution,clip=2",
        "translution": "translution",
    }
    published = {entry.method: entry.published for entry in _entries("2", size="A/12")}
    return Preset(
        title="ViT-A/12 on static MNIST, with Fourier values and scores in softmax and "
        "linear attention, and with Translution's tables: test accuracy in %, trained "
        "→ evaluated",
        rows=[
            Row(
                name,
                {"static": f"configs/translution_vit.py:static,A/12,{method},cpu"},
                published.get(name, {}),
            )
            for name, method in methods.items()
        ],
        columns=[
            _params(_entries("2", size="A/12")),
            _accuracy("static", "static", "static_static"),
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
    """Makes the preset of a table on ImageNet, tested on its validation images."""
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


def _gpt(
    tables: str, entries: Sequence[Entry], models: str, data: str = "openwebtext"
) -> Preset:
    """Makes the preset of a table on OpenWebText, or of its models on other data."""
    text = {
        "openwebtext": "OpenWebText",
        "wikitext2": "WikiText-2",
        "kernel_docs": "the documentation of Linux",
    }[data]
    return Preset(
        title=f"{models} on {text}: perplexity (Translution, {tables})",
        rows=_rows(entries, "translution_gpt", {"": data}),
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
    waves = {
        f"rope_fourier_values_{count}": f"rope,position=rope1d + {_WAVES.format(count)}"
        for count in (2, 4, 8)
    }
    methods = {
        "self_attention": "self_attention",
        "rope": "rope",
        "lor_translution": "lor_translution",
        "translution": "translution",
        "rope_rotary_values": "rope,position=rope1d + rotary_values",
        **waves,
        "rope_fourier_values_rank_4": "rope,position=rope1d + "
        "fourier_values(num_frequencies=8, rank=4)",
        "fourier_scores": "self_attention,position=fourier_scores + fourier_values",
        "favor_rope": "favor,position=rope1d",
        "favor_sincos_bias": "favor,position=sincos_bias",
        "favor_rope_fourier_values": f"favor,position=rope1d + {_WAVES.format(8)}",
        "relu_rope": "relu,position=rope1d",
        "hedgehog_rope": "hedgehog,position=rope1d",
    }
    return Preset(
        title="A small GPT on the bytes of tinyshakespeare: the best validation loss, "
        "in nats per byte, within equal steps",
        rows=[
            Row(name, {"": f"configs/translution_gpt.py:{method},cpu"})
            for name, method in methods.items()
        ],
        columns=[
            PARAMS,
            Column("loss", "validation loss", "validation_loss"),
            Column("perplexity", "perplexity", "validation_perplexity"),
            Column("accuracy", "accuracy, %", "validation_accuracy", unit="percent"),
            SECONDS,
        ],
    )


def _long_text() -> Preset:
    """Makes the preset of Fourier values in causal linear attention, by context."""
    values = _WAVES.format(8)
    methods = {
        "rope": "rope",
        "favor": "favor",
        "favor_fourier_values": f"favor,position=learned + {values}",
        "favor_rope": "favor,position=rope1d",
        "favor_rope_fourier_values": f"favor,position=rope1d + {values}",
        "lor_translution": "lor_translution",
        "translution": "translution",
    }
    # Translution's tables of 4,096 offsets have 67 million parameters each, and
    # LoR-Translution projects each of 8 million pairs.
    short = ("lor_translution", "translution")
    contexts = ("160", "1024", "4096")
    return Preset(
        title="A small GPT on the bytes of the documentation of Linux, with contexts "
        "of 160, 1,024 and 4,096 bytes: the best validation loss, in nats per byte",
        rows=[
            Row(
                name,
                {
                    context: f"configs/translution_gpt.py:kernel_docs,A-{context},"
                    f"{method},cpu"
                    for context in (contexts[:1] if name in short else contexts)
                },
            )
            for name, method in methods.items()
        ],
        columns=[
            PARAMS,
            *(
                Column(f"loss_{context}", context, "validation_loss", trained=context)
                for context in contexts
            ),
            *(
                dataclasses.replace(
                    SECONDS,
                    name=f"seconds_{context}",
                    title=f"seconds, {context}",
                    trained=context,
                )
                for context in contexts
            ),
        ],
    )


TRANSLUTION_PRESETS = {
    "translution_table2": _mnist("table 2", _entries("2"), "ViT-A"),
    "translution_table2_cpu": _mnist(
        "table 2", _entries("2", size="A/12"), "ViT-A/12", "cpu", static=["translution"]
    ),
    "translution_places": _places(),
    "translution_fourier": _fourier(),
    "translution_table3": _imagenet("table 3", _entries("3"), "ViTs of three sizes"),
    "translution_table4": _imagenet(
        "table 4", _entries("4"), f"ViT-A/56 with relative positions ({_VECTORS})"
    ),
    "translution_table5": _mnist(
        "table 5",
        _entries("5"),
        "ViT-A/12 with weights of offsets or of pairs of tokens",
    ),
    "translution_table7": _gpt("table 7", _entries("7"), "GPTs of three sizes"),
    "translution_table8": _gpt(
        "table 8", _entries("8"), f"GPT-A-160 with relative positions ({_VECTORS})"
    ),
    "translution_wikitext2": _gpt(
        "table 8",
        _entries("8"),
        f"GPT-A-160 with relative positions ({_VECTORS})",
        "wikitext2",
    ),
    "translution_kernel_docs": _gpt(
        "table 8",
        _entries("8"),
        f"GPT-A-160 with relative positions ({_VECTORS})",
        "kernel_docs",
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
    "translution_long_text": _long_text(),
}

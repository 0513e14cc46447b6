"""Presets: the runs, columns and published values of every study.

Reading order: the dataclasses `Column`, `Row` and `Preset`; the tables of Translution,
of Guoji (``rpe_vit``) and of Horn et al. (``performer``); and the dict `PRESETS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from relattn.messages import check_choice
from studies.published import BASELINES, Entry, read_published, translution_entries


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
        rows = [row for row in self.rows if row.name in names]
        return dataclasses.replace(self, rows=rows)

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
        check_choice("dataset", dataset, self.datasets)
        rows = [
            dataclasses.replace(row, runs={dataset: row.runs[dataset]})
            for row in self.rows
            if dataset in row.runs
        ]
        columns = [column for column in self.columns if column.trained in ("", dataset)]
        return dataclasses.replace(self, rows=rows, columns=columns)


PARAMS = Column("parameters", "parameters", "num_params", unit="millions")
SECONDS = Column("seconds", "training, s", "seconds", unit="seconds")


_PLACEMENTS = {"static": "static", "dynamic": "dynamic"}
_PLACES = {"once": "dynamic_once", "dynamic": "dynamic", "static": "static"}
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
        "relative_bias": "relative_bias",
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
    waves = "fourier_values(num_frequencies={})"
    methods = {
        "self_attention": "self_attention",
        "rope2d_mixed": "self_attention,position=rope2d_mixed",
        "lor_translution": "lor_translution",
        "fourier_scores": "self_attention,position=fourier_scores + fourier_values",
        **{
            f"fourier_values_{count}": "self_attention,position=rope2d_mixed + "
            + waves.format(count)
            for count in (2, 4, 8, 16)
        },
        "favor": "favor,position=sincos_bias",
        **{
            f"favor_fourier_values_{count}": "favor,position=sincos_bias + "
            + waves.format(count)
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
    methods = ("self_attention", "rope", "lor_translution", "translution")
    return Preset(
        title="A small GPT on the bytes of tinyshakespeare: the best validation loss, "
        "in nats per byte, within equal steps",
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
}


_RPE_VIT_LOSS = (
    "Validation losses are final values, smoothed over the evaluations. The published "
    "ones are quoted from the text, which names TensorBoard's smoothing but no weight; "
    "ours use its default weight, 0.6."
)
_RPE_VIT_INFERENCE = (
    "Inference is timed on {:,} test images on the device below; the published times "
    "are for an A100 on Google Colab and a number of images that is not stated."
)


def _rpe_vit(datasets: Sequence[str] = ("mnist", "cifar10"), cut: str = "") -> Preset:
    """Makes the preset of tables 1 and 2 of Guoji.

    Args:
        datasets: Data sets to train on.
        cut: Another argument of the configuration, which makes the run smaller.
    """
    tables = [
        row for row in read_published("rpe_vit_tables") if row["dataset"] in datasets
    ]
    losses = {
        (row["dataset"], row["attention"], row["position"]): row["final_val_loss"]
        + ("" if row["smoothed"] == "1" else " (not smoothed)")
        for row in read_published("rpe_vit_losses")
    }
    models = dict.fromkeys((row["attention"], row["position"]) for row in tables)
    rows = []
    for model in models:
        by_dataset = {
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
                    for dataset in by_dataset
                },
                published={
                    f"{dataset}_{key}": value
                    for dataset, row in by_dataset.items()
                    for key, value in row.items()
                }
                | {
                    f"{dataset}_loss": losses.get((dataset, *model), "not quoted")
                    for dataset in by_dataset
                },
            )
        )
    columns = [PARAMS]
    for dataset in datasets:
        where = f"{dataset}, " if len(datasets) > 1 else ""
        for key, title, metric, unit in (
            ("loss", "validation loss", "smoothed_validation_loss", "number"),
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
                    digits=3 if key == "loss" else 2,
                    published=f"{dataset}_{key}",
                )
            )
    columns += [
        dataclasses.replace(
            SECONDS,
            name=f"{dataset}_seconds",
            trained=dataset,
            title=f"{dataset}, {SECONDS.title}",
        )
        for dataset in datasets
    ]
    return Preset(
        title="A Vision Transformer of 6 layers with softmax and linear attention and "
        f"position encodings on {' and '.join(datasets)} (Guoji, tables 1 and 2)",
        rows=rows,
        columns=columns,
        notes=[_RPE_VIT_LOSS, _RPE_VIT_INFERENCE.format(1000 if cut else 10000)],
    )


_PERFORMERS = {
    "Performer (No Pos.)": "none",
    "Performer (Absolute)": "learnable_sincos",
    "Performer (Rel. S1)": "constrained_sincos",
    "Performer (Rel. S2)": "banded",
}
# Not in the table.
_INVARIANT = {"Performer on a torus": "invariant"}


def _table1(
    configs: Mapping[str, Mapping[str, str]],
    datasets: Sequence[str],
    title: str,
    *,
    form: str,
    shifts: Mapping[str, Any] | None = None,
) -> Preset:
    """Makes a preset of models of table 1 of Horn et al.

    Args:
        configs: Configuration -> model name, that of the table if it is there ->
            argument.
        datasets: Data sets to train on.
        title: Title of the study.
        form: Another argument of the configurations, ``"published"`` or ``"cpu"``.
        shifts: Options of the evaluation under shifts; None to skip it.
    """
    published = {row["model"]: row for row in read_published("performer_table1")}
    rows = []
    for config, models in configs.items():
        for model, argument in models.items():
            runs = {
                dataset: f"configs/{config}.py:{dataset},{argument},{form}"
                for dataset in datasets
            }
            rows.append(Row(argument, runs, published.get(model, {})))
    return Preset(title, rows, _accuracies(datasets), shifts=shifts)


def _clip(datasets: Sequence[str]) -> Preset:
    """Makes the preset of clipping distances, strategy 2, from the raw results."""
    rows = []
    for published in read_published("performer_clip"):
        clip = published["clip"]
        runs = {
            dataset: f"configs/performer.py:{dataset},banded,published,clip={clip}"
            for dataset in datasets
        }
        rows.append(Row(f"clip_{clip}", runs, published))
    title = (
        "Performers of strategy 2 with clipping distances of 2, 4 and 6 pixels (raw "
        "results of the authors, Horn et al.)"
    )
    return Preset(title, rows, _accuracies(datasets))


def _strategy1(option: str, values: Sequence[int], title: str) -> Preset:
    """Makes a preset of strategy 1 with the values of an option in the authors' data.

    Args:
        option: Option of the configuration, ``"redraw"`` or ``"scales"``.
        values: Its values.
        title: Title of the study.
    """
    counts = {
        row["settings"]: f"{int(row['params']) / 1e6:.2f}M"
        for row in read_published("performer_param_counts")
        if (row["model"], row["in_channels"]) == ("Rel. S1", "1")
    }
    datasets, rows = ("mnist", "fashion_mnist"), []
    for value in values:
        runs = {
            dataset: f"configs/performer.py:{dataset},constrained_sincos,published,"
            f"{option}={value}"
            for dataset in datasets
        }
        scales = value if option == "scales" else 4
        published = {"params": counts[f"{scales} length scales"]}
        rows.append(Row(f"{option}_{value}", runs, published))
    params, *accuracies = _accuracies(datasets)
    # The data have no accuracy for each value.
    columns = [dataclasses.replace(column, published="") for column in accuracies]
    return Preset(title, rows, [params, *columns], shifts={})


def _pixels16() -> Preset:
    """Makes the preset of redraws on pixels; the most telling rows come first."""
    intervals = {
        "drawn_once": 0,
        "redraw_20": 20,
        "redraw_100": 100,
        "redraw_1000": 1000,
        "redraw_1": 1,
    }

    def argument(row: str) -> str:
        if row not in intervals:
            return row
        return f"constrained_sincos,redraw={intervals[row]}"

    names = ["drawn_once", "redraw_20", "softmax", "sincos_bias", "redraw_100"]
    names += ["redraw_1000", "redraw_1", "learnable_sincos", "none", "banded"]
    names.append("invariant")
    config = "configs/performer_pixels16.py"
    rows = [
        Row(
            name,
            {
                schedule: f"{config}:{argument(name)},{schedule}"
                for schedule in ("constant", "cosine")
            },
        )
        for name in names
    ]
    columns = [PARAMS]
    for schedule in ("constant", "cosine"):
        columns += [
            Column(
                name=schedule,
                title=f"{schedule}, test accuracy, %",
                metric="test_accuracy",
                trained=schedule,
                unit="percent",
            ),
            dataclasses.replace(
                SECONDS,
                name=f"{schedule}_seconds",
                title=f"{schedule}, {SECONDS.title}",
                trained=schedule,
            ),
        ]
    return Preset(
        "Small Performers on the 256 pixels of Fashion-MNIST at 16x16, with constant "
        "and cosine learning rate, and under shifts of the test images by up to 4 "
        "pixels; strategy 1 of Horn et al. with one draw of the random features "
        "(`drawn_once`) and with redraws every 1 to 1,000 steps",
        rows,
        columns,
        redraws=Redraws(
            intervals=intervals,
            exact=("softmax", "sincos_bias", "invariant"),
            draws=(1, 4, 16),
            shifts={"max_shift": 4, "num_images": 500},
            expected="One draw of the random features breaks the invariance of "
            "strategy 1. Horn et al. (section 2.3) conjecture that redraws in training "
            "restore it. So consistency should rise as the interval falls, towards "
            "that of the exact forms, and a mean over several draws should raise it "
            "further.",
        ),
    )


def _accuracies(datasets: Sequence[str]) -> list[Column]:
    """Makes columns for the parameters and the test accuracy on each data set."""
    return [
        dataclasses.replace(PARAMS, published="params"),
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
    ]


PRESETS = {
    "rpe_vit": _rpe_vit(),
    "rpe_vit_cpu": _rpe_vit(("mnist",), "cpu"),
    "performer_table1": _table1(
        {"baselines": BASELINES, "performer": _PERFORMERS},
        ("mnist", "fashion_mnist", "cifar10"),
        "Performers on pixels as tokens, and their baselines: test accuracy in % (Horn "
        "et al., table 1)",
        form="published",
    ),
    "performer_table1_cpu": _table1(
        {"baselines": BASELINES, "performer": _PERFORMERS},
        ("mnist", "fashion_mnist"),
        "Performers on patches of 4x4 pixels as tokens, and their baselines: test "
        "accuracy in %, and under shifts of the test images (Horn et al., table 1)",
        form="cpu",
        shifts={"classes": "all", "num_images": 300},
    ),
    "performer_figure1": _table1(
        {"performer": _PERFORMERS | _INVARIANT},
        ("mnist", "fashion_mnist"),
        "Performers on pixels as tokens, an exactly invariant one on patches, and both "
        "under shifts of the test images (Horn et al., figure 1)",
        form="published",
        shifts={},
    ),
    "invariant_shift": Preset(
        "Small Performers on the embedded Fashion-MNIST, and under shifts of the test "
        "images; the `invariant` ones have a torus and a polyphase anchor",
        [
            Row(variant, {"fashion_mnist": f"configs/demo.py:{variant}"})
            for variant in (
                "learnable_sincos",
                "constrained_sincos",
                "sincos_bias",
                "invariant_softmax",
                "invariant",
                "invariant_banded",
                "invariant_lor_translution",
            )
        ],
        [*_accuracies(["fashion_mnist"]), SECONDS],
        shifts={
            "classes": "all",
            "axis": "xy",
            # Garments reach the edge: none can move along both axes and stay whole.
            "boundary": "circular",
            "num_images": 100,
        },
    ),
    "performer_clip": _clip(("mnist", "fashion_mnist")),
    "performer_redraw": _strategy1(
        "redraw",
        (1, 100, 1000),
        "Performers of strategy 1 whose random features are redrawn every 1, 100 and "
        "1,000 steps, and under shifts of the test images (Horn et al., authors' data)",
    ),
    "performer_scales": _strategy1(
        "scales",
        (4, 16),
        "Performers of strategy 1 with 4 and 16 length scales, and under shifts of the "
        "test images (Horn et al., authors' data)",
    ),
    "performer_pixels16": _pixels16(),
    **TRANSLUTION_PRESETS,
}

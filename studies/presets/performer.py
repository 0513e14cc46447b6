"""Presets of the tables and figures of Horn et al."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from studies.presets.base import PARAMS, SECONDS, Column, Preset, Redraws, Row
from studies.published import BASELINES, read_published

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


def _torus16() -> Preset:
    """Makes the preset of redraws on a torus, of the rows that depend on offsets."""
    plane = _pixels16()
    assert plane.redraws is not None
    rows = [
        Row(row.name, {"constant": f"{row.runs['constant']},torus"})
        for row in plane.rows
        if row.name not in ("learnable_sincos", "none", "invariant")
    ]
    redraws = dataclasses.replace(
        plane.redraws,
        exact=("softmax", "sincos_bias"),
        shifts={**plane.redraws.shifts, "boundary": "circular"},
        expected="On a torus, strategy 1 with softmax attention is invariant to "
        "circular shifts, and so is its mean over all draws of the random features. "
        f"{plane.redraws.expected}",
    )
    return dataclasses.replace(
        plane,
        title="Small Performers on the 256 pixels of Fashion-MNIST at 16x16, as tokens "
        "on a torus, and under circular shifts of the test images by up to 4 pixels; "
        "strategy 1 of Horn et al. with one draw of the random features (`drawn_once`) "
        "and with redraws every 1 to 1,000 steps",
        rows=rows,
        columns=[each for each in plane.columns if each.trained != "cosine"],
        redraws=redraws,
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


PERFORMER_PRESETS = {
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
    "performer_torus16": _torus16(),
}

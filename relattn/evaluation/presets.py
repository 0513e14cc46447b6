"""The studies that there are: for each its runs, its columns and the published rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from relattn.evaluation.preset import PARAMS, SECONDS, Column, Preset, Row
from relattn.evaluation.presets_translution import TRANSLUTION_PRESETS
from relattn.evaluation.publications import read_published

_RPE_VIT_LOSS = (
    "Validation losses are those at the end of training, smoothed over the "
    "evaluations. The published ones are quoted from the text, which names "
    "TensorBoard's smoothing but no weight; ours have its default weight, 0.6."
)
_RPE_VIT_INFERENCE = (
    "Inference is that of {:,} test images on the device below; the published seconds "
    "are of an A100 on Google Colab, for a number of images that is not stated."
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
    losses = {
        (row["dataset"], row["attention"], row["position"]): row["final_val_loss"]
        + ("" if row["smoothed"] == "1" else " (not smoothed)")
        for row in read_published("rpe_vit_losses")
    }
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
                }
                | {
                    f"{dataset}_loss": losses.get((dataset, *model), "not quoted")
                    for dataset in of_model
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
    form: str,
    shifts: Mapping[str, Any] | None = None,
) -> Preset:
    """Models of table 1 of Horn et al.

    Args:
        configs: By configuration the arguments, by the names of the table.
        datasets: Those to train on.
        title: Of the study.
        form: One more argument of the configurations, ``"published"`` or ``"cpu"``.
        shifts: Options of the evaluation under shifts; None for none.
    """
    published = {row["model"]: row for row in read_published("performer_table1")}
    rows = []
    for config, models in configs.items():
        for model, argument in models.items():
            runs = {
                dataset: f"configs/{config}.py:{dataset},{argument},{form}"
                for dataset in datasets
            }
            rows.append(Row(argument, runs, published[model]))
    return Preset(title, rows, _accuracies(datasets), shifts=shifts)


def _clip(datasets: Sequence[str]) -> Preset:
    """Clipping distances of strategy 2 of Horn et al., from their raw results."""
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
        "results of Horn et al.)"
    )
    return Preset(title, rows, _accuracies(datasets))


def _accuracies(datasets: Sequence[str]) -> list[Column]:
    """The number of parameters, and the test accuracy on each data set."""
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
        {"performer": _PERFORMERS},
        ("mnist", "fashion_mnist"),
        "Performers on pixels as tokens, and under shifts of the test images (Horn et "
        "al., figure 1)",
        form="published",
        shifts={},
    ),
    "performer_clip": _clip(("mnist", "fashion_mnist")),
    **TRANSLUTION_PRESETS,
}

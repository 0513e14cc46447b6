"""Presets of the tables of Guoji."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from studies.presets.base import PARAMS, SECONDS, Column, Preset, Row
from studies.published import read_published

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


RPE_VIT_PRESETS = {
    "rpe_vit": _rpe_vit(),
    "rpe_vit_cpu": _rpe_vit(("mnist",), "cpu"),
}

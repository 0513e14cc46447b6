"""Writes a study's results as JSON, tables and curves."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from relattn.evaluation.figures import plain, save_figure
from relattn.files import hide_folders, replace_file
from relattn.markdown import markdown_table
from studies.launcher import Training
from studies.presets import Column, Preset, Row

# Unit -> factor, number of decimals and suffix of the displayed value.
UNITS = {
    "number": (1.0, 3, ""),
    "percent": (100.0, 1, ""),
    "millions": (1e-6, 2, "M"),
    "seconds": (1.0, 0, ""),
}
MISSING = "–"
# Weight of earlier values; the default of TensorBoard.
SMOOTHING = 0.6

Trainings = Mapping[tuple[str, str], Sequence[Training]]


def study_results(
    preset: Preset,
    finished: Trainings,
    failed: Sequence[Training] = (),
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Collects the results of a study.

    Args:
        preset: The study.
        finished: The complete runs, by row name and data set.
        failed: The failed runs.
        overrides: Options of ``train.py`` that changed the configurations.

    Returns:
        The content of ``results.json``. Each row has for every column the mean and the
        standard deviation over the seeds (None for one seed) in the column's unit, the
        published value as printed, and its runs with their curves.
    """
    trainings = [training for group in finished.values() for training in group]
    return {
        "title": preset.title,
        "overrides": list(overrides),
        "budgets": list(dict.fromkeys(map(budget, trainings))),
        "seeds": sorted({seed for training in trainings for seed in training.seeds}),
        "failed": {training.name: last_line(training.error) for training in failed},
        "curve": f"validation_{preset.curve}",
        "rows": [_row(row, preset, finished) for row in preset.rows],
    }


def _row(row: Row, preset: Preset, finished: Trainings) -> dict[str, Any]:
    groups = {trained: finished.get((row.name, trained), ()) for trained in row.runs}
    groups = {trained: group for trained, group in groups.items() if group}
    columns = {}
    for column in preset.columns:
        trained = column.trained or next(iter(groups), "")
        results = _results(groups.get(trained, ()))
        scale, *_ = UNITS[column.unit]
        columns[column.name] = {
            **_statistics(
                [
                    scale * result[column.metric]
                    for result in results
                    # Top-5 accuracy is measured only with more than ten classes.
                    if isinstance(result.get(column.metric), int | float)
                ]
            ),
            "published": row.published.get(column.published, ""),
        }
    metric = f"validation_{preset.curve}"
    runs = {
        trained: {
            "config": row.runs[trained],
            "seeds": [seed for training in group for seed in training.seeds],
            "results": _results(group),
            "curve": _curve(group, metric),
        }
        for trained, group in groups.items()
    }
    return {"name": row.name, "columns": columns, "runs": runs}


def _results(group: Sequence[Training]) -> list[dict[str, Any]]:
    """Returns the final metrics of every seed, with the smoothed validation loss."""
    results = []
    for training in group:
        for seed, result in zip(training.seeds, training.results(), strict=True):
            name, rows = "validation_loss", training.rows(seed)
            losses = smooth([row[name] for row in rows if name in row])
            results.append(result | {f"smoothed_{name}": loss for loss in losses[-1:]})
    return results


def smooth(values: Sequence[float]) -> list[float]:
    """Computes an exponential moving average, as TensorBoard does.

    s_t = (1 - w) sum_{i <= t} w^(t - i) x_i / (1 - w^(t + 1)), w = `SMOOTHING`

    Args:
        values: Values by step.

    Returns:
        The smoothed values.

    Example:
        >>> smooth([1.0, 1.0, 3.0])
        [1.0, 1.0, 2.020408163265306]
    """
    total, weight, smoothed = 0.0, 0.0, []
    for value in values:
        total = SMOOTHING * total + (1 - SMOOTHING) * value
        weight = SMOOTHING * weight + (1 - SMOOTHING)
        smoothed.append(total / weight)
    return smoothed


def _statistics(values: Sequence[float]) -> dict[str, float | None]:
    # Relative to the first value: equal values then have deviation 0 exactly.
    deviations = np.subtract(values, values[:1])
    return {
        "mean": float(np.mean(values)) if values else None,
        "std": float(np.std(deviations, ddof=1)) if len(values) > 1 else None,
    }


def _curve(group: Sequence[Training], metric: str) -> dict[str, list]:
    """Averages a metric over the seeds by step, up to the end of the shortest run."""
    curves = [
        [(row["step"], row[metric]) for row in training.rows(seed) if metric in row]
        for training in group
        for seed in training.seeds
    ]
    points = list(zip(*curves, strict=False))
    values = np.array([[value for _, value in point] for point in points])
    many = len(curves) > 1 and len(points) > 0
    std = values.std(axis=1, ddof=1) if many else np.zeros(len(points))
    return {
        "step": [point[0][0] for point in points],
        "mean": [float(np.mean(row)) for row in values],
        "std": std.tolist(),
    }


def budget(training: Training) -> str:
    """Describes the budget of a run: steps, examples and device.

    Args:
        training: A complete run.

    Returns:
        A phrase for a list.
    """
    record, result, info = training.record(), training.results()[0], training.info()
    start, batch = record["starts"][-1], record["config"]["batch_size"]
    if info.kind == "tokens":
        examples = f"windows of {info.context_length} tokens"
    else:
        epochs = f"{result['epochs']:.3g}"
        noun = "epoch" if epochs == "1" else "epochs"
        what = "sets of points" if info.kind == "points" else info.kind
        examples = f"{what} ({epochs} {noun} of {info.num_train:,})"
    folder = record["config"]["data"].get("data_dir")
    origin = hide_folders(info.origin, folder if isinstance(folder, str) else "")
    seeds = training.num_seeds
    together = f", {seeds} seeds together" if seeds > 1 else ""
    device = f"{start['num_devices']} x {start['device']}"
    if start["platform"] == "cpu":
        device = f"{start['cores']} x {start['cpu']}"
    return (
        f"{result['step']:,} steps of {batch} {examples}, {origin}; on {device}, "
        f"jax {start['versions']['jax']}{together}"
    )


def last_line(text: str) -> str:
    r"""Returns the last line of a text, such as the message of a traceback.

    Example:
        >>> last_line("Traceback\nValueError: no\n")
        'ValueError: no'
    """
    # After the message, JAX notes that the traceback lacks frames.
    lines = re.sub(r"-{20}\nFor simplicity, JAX .*", "", text).strip().splitlines()
    return lines[-1] if lines else ""


def study_table(preset: Preset, results: Mapping[str, Any]) -> str:
    """Formats a study's table.

    Args:
        preset: The study.
        results: The output of `study_results`.

    Returns:
        Markdown: one row per model with means, standard deviations (if several seeds)
        and published values; then the budgets of the runs.
    """
    rows = results["rows"]
    header = ["model"]
    for column in preset.columns:
        header += [column.title, *["published"] * _has_published(column, rows)]
    lines = []
    for row in rows:
        cells = [row["name"]]
        for column in preset.columns:
            cell = row["columns"][column.name]
            cells.append(_cell(cell, column))
            if _has_published(column, rows):
                cells.append(cell["published"] or MISSING)
        lines.append(cells)
    parts = [f"{results['title']}.", markdown_table(header, lines), *preset.notes]
    if results["seeds"]:
        seeds = ", ".join(map(str, results["seeds"]))
        many = len(results["seeds"]) > 1
        what = "Means ± standard deviations over the seeds" if many else "One seed,"
        parts.append(f"{what} {seeds}. Each run:")
        parts.append("\n".join(f"- {line}." for line in results["budgets"]))
        if results["overrides"]:
            parts.append(f"Options: `{' '.join(results['overrides'])}`.")
    if results["failed"]:
        failed = [f"- {name}: {error}" for name, error in results["failed"].items()]
        parts += ["Runs that failed:", "\n".join(failed)]
    return "\n\n".join(parts) + "\n"


def _has_published(column: Column, rows: Sequence[Mapping[str, Any]]) -> bool:
    return any(row["columns"][column.name]["published"] for row in rows)


def _cell(cell: Mapping[str, Any], column: Column) -> str:
    _, digits, suffix = UNITS[column.unit]
    digits = digits if column.digits is None else column.digits
    if cell["mean"] is None:
        return MISSING
    mean = f"{cell['mean']:.{digits}f}{suffix}"
    if not cell["std"]:
        return mean
    return f"{mean} ± {cell['std']:.{digits}f}{suffix}"


def write_study_csv(preset: Preset, results: Mapping[str, Any], path: Path) -> None:
    """Writes the table as numbers, in the columns' units.

    Args:
        preset: The study.
        results: The output of `study_results`.
        path: The file.
    """
    rows = results["rows"]
    keys = [
        (column.name, kind)
        for column in preset.columns
        for kind in ("mean", "std", *["published"] * _has_published(column, rows))
    ]
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerow(["model", *("_".join(key) for key in keys)])
    for row in rows:
        values = [row["columns"][name][kind] for name, kind in keys]
        writer.writerow([row["name"], *values])
    replace_file(path, file.getvalue())


def plot_study(results: Mapping[str, Any], path: Path) -> None:
    """Plots the curves over steps, with a band of one standard deviation.

    Args:
        results: The output of `study_results`.
        path: The file; its suffix selects the format.
    """
    rows = results["rows"]
    trained = list(dict.fromkeys(name for row in rows for name in row["runs"])) or [""]
    figure = Figure(figsize=(1 + 5 * len(trained), 5), layout="constrained")
    panels = figure.subplots(1, len(trained), sharey=True, squeeze=False)[0]
    lines = {}
    for panel, name in zip(panels, trained, strict=True):
        for i, row in enumerate(rows):
            if name not in row["runs"]:
                continue
            curve = row["runs"][name]["curve"]
            mean, std = np.array(curve["mean"]), np.array(curve["std"])
            # There are ten colours.
            style = {
                "color": f"C{i}",
                "linestyle": ("-", "--", ":", "-.")[i // 10 % 4],
                "marker": ".",
                "label": plain(row["name"]),
            }
            (lines[row["name"]],) = panel.plot(curve["step"], mean, **style)
            panel.fill_between(
                curve["step"], mean - std, mean + std, color=f"C{i}", alpha=0.2, lw=0
            )
        panel.set(title=name and plain(f"trained on {name}"), xlabel="step")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel(plain(results["curve"].replace("_", " ")))
    if lines:
        names = [plain(name) for name in lines]
        figure.legend(lines.values(), names, loc="outside lower center", ncols=2)
    save_figure(figure, path)

"""Consistency under shifts against the interval of redraws of random features."""

from __future__ import annotations

import dataclasses
import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from relattn.evaluation.compare import compare
from relattn.evaluation.figures import save_figure
from relattn.evaluation.shift import ShiftedPredictions
from relattn.evaluation.shift_curves import curves_of
from relattn.evaluation.shift_plots import Panel, plot
from relattn.evaluation.shift_runs import open_shift_runs
from relattn.evaluation.shift_tables import write_csv
from relattn.files import replace_file
from relattn.markdown import markdown_table
from relattn.training.workdir import write_json
from studies.figure1 import LABEL
from studies.launcher import Training
from studies.presets import Preset, Redraws

# Mean and standard deviation over seeds; None for one seed.
Value = tuple[float, float | None]
# Arrays of a file of predictions; the rest is text.
ARRAYS = ("predicted", "random_predicted", "labels")


@dataclasses.dataclass(frozen=True)
class Point:
    """What a model does under shifts, with some number of draws.

    Attributes:
        row: Name of the model.
        schedule: Key of the row's run: the schedule of the learning rate.
        draws: Number of draws of the random features.
        images: ``"all"``, or the class of the images.
        accuracy: Accuracy on the unshifted images.
        shifted: Accuracy, averaged over the shifts.
        consistency: Consistency, averaged over the shifts.
    """

    row: str
    schedule: str
    draws: int
    images: str
    accuracy: Value
    shifted: Value
    consistency: Value


def redraw_report(
    preset: Preset,
    finished: Mapping[tuple[str, str], Sequence[Training]],
    output: Path,
) -> str:
    """Evaluates the runs of a study of redraws under shifts; writes and describes it.

    Writes ``redraws.png``, ``redraws.json`` and ``shift.csv``, and for each schedule a
    figure of the curves of one draw, ``shift_<schedule>.png``. The predictions of each
    run are kept in its folder, so that the next call evaluates the new runs only.

    Args:
        preset: The study, with ``redraws``.
        finished: The complete runs, by row name and schedule.
        output: The folder of the study.

    Returns:
        Markdown: what was expected, what came out, and a table.
    """
    study = preset.redraws
    assert study is not None
    predictions = {
        (row, schedule, draws): found
        for (row, schedule), trainings in finished.items()
        for draws in study.draws
        if (found := predictions_of(trainings, draws, study.shifts))
    }
    curves = [
        curve
        for found in predictions.values()
        for label in (LABEL, None)
        for curve in curves_of(found, label)
    ]
    write_csv(curves, output / "shift.csv")
    for schedule in dict.fromkeys(schedule for _, schedule in finished):
        panels = [
            Panel(
                title,
                [
                    curve
                    for (_, key, draws), found in predictions.items()
                    if key == schedule and draws == 1
                    for curve in curves_of(found, label)
                ],
            )
            for title, label in ((f"class {LABEL}", LABEL), ("all classes", None))
        ]
        if panels[0].curves:
            plot(panels, output / f"shift_{schedule}.png")
    points = [
        point(*key, label, found)
        for key, found in predictions.items()
        for label in (None, LABEL)
    ]
    values = [dataclasses.asdict(each) for each in points]
    write_json(output / "redraws.json", {"points": values})
    _plot_redraws(study, points, output / "redraws.png")
    return "\n\n".join(
        [
            "## Redraws and consistency under shifts",
            f"Expected: {study.expected}",
            *findings(study, points),
            "In %, of all classes: accuracy on unshifted images, and accuracy and "
            "consistency averaged over the shifts of 1 to "
            f"{study.shifts['max_shift']} pixels along x.",
            redraw_table(study, points),
        ]
    )


def predictions_of(
    trainings: Sequence[Training], draws: int, options: Mapping[str, Any]
) -> list[ShiftedPredictions]:
    """Predicts shifted images with each seed, or reads the predictions of before.

    Args:
        trainings: Complete runs of one configuration.
        draws: Number of draws of the random features.
        options: Options of `relattn.evaluation.compare.compare`.

    Returns:
        The predictions of each seed; none if the model has no random features.
    """
    found = []
    for training in trainings:
        key = json.dumps(
            [
                training.record()["config"],
                [result["best_step"] for result in training.results()],
                dict(options),
            ],
            sort_keys=True,
        )
        paths = [training.workdir / f"shift-{s}-{draws}.npz" for s in training.seeds]
        read = [read_predictions(path, key) for path in paths]
        if None in read:
            (run,) = open_shift_runs([training.workdir])
            drawn = run.saved.task.single.abstract_state.random_features
            if draws > 1 and not jax.tree.leaves(drawn):
                return []
            read = compare([run], draws=draws, **options).results
            for path, each in zip(paths, read, strict=True):
                write_predictions(path, key, each)
        found += read
    return found


def write_predictions(path: Path, key: str, predictions: ShiftedPredictions) -> None:
    """Writes predictions to a file.

    Args:
        path: The file.
        key: What the predictions depend on, for `read_predictions`.
        predictions: The predictions.
    """
    values = vars(predictions)
    text = {name: value for name, value in values.items() if name not in ARRAYS}
    arrays = {name: values[name] for name in ARRAYS}
    file = io.BytesIO()
    np.savez_compressed(file, key=key, text=json.dumps(text), **arrays)
    replace_file(path, file.getvalue())


def read_predictions(path: Path, key: str) -> ShiftedPredictions | None:
    """Reads predictions; returns None if they are missing, damaged or of another key.

    Args:
        path: The file.
        key: What the predictions must depend on.
    """
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            if str(file["key"]) != key:
                return None
            text = json.loads(str(file["text"]))
            arrays = {name: file[name] for name in ARRAYS}
    except (OSError, ValueError, LookupError, zipfile.BadZipFile):
        return None
    text["shifts"] = tuple(map(tuple, text["shifts"]))
    text["settings"] = tuple(text["settings"])
    return ShiftedPredictions(**text, **arrays)


def point(
    row: str,
    schedule: str,
    draws: int,
    label: int | None,
    predictions: Sequence[ShiftedPredictions],
) -> Point:
    """Averages what the seeds of a model do under shifts.

    Args:
        row: Name of the model.
        schedule: Key of the row's run.
        draws: Number of draws.
        label: The class of the images, None for all.
        predictions: The predictions of each seed.

    Returns:
        The means and the standard deviations.
    """
    curves = [curve for each in predictions for curve in curves_of([each], label)]
    shifted = [i for i, shift in enumerate(curves[0].shifts) if shift != (0, 0)]

    def over_seeds(values: Sequence[float]) -> Value:
        std = float(np.std(values, ddof=1)) if len(values) > 1 else None
        return float(np.mean(values)), std

    return Point(
        row,
        schedule,
        draws,
        "all" if label is None else str(label),
        over_seeds([float(curve.at((0, 0)).accuracy) for curve in curves]),
        over_seeds([float(curve.metrics.accuracy[shifted].mean()) for curve in curves]),
        over_seeds(
            [float(curve.metrics.consistency[shifted].mean()) for curve in curves]
        ),
    )


def findings(study: Redraws, points: Sequence[Point]) -> list[str]:
    """Says what came out, on the images of all classes.

    Args:
        study: The rows to compare.
        points: What the models do under shifts.

    Returns:
        A paragraph for each schedule and number of draws that has runs.
    """
    found = {
        (p.schedule, p.draws, p.row): p.consistency[0]
        for p in points
        if p.images == "all"
    }
    paragraphs = []
    for schedule, draws in dict.fromkeys((p.schedule, p.draws) for p in points):
        by_interval = [
            (interval, found[schedule, draws, row])
            for row, interval in study.intervals.items()
            if (schedule, draws, row) in found
        ]
        exact = {
            row: found[schedule, 1, row]
            for row in study.exact
            if (schedule, 1, row) in found
        }
        if not by_interval:
            continue
        listed = ", ".join(
            f"{value:.1%} ({interval_name(interval)})"
            for interval, value in by_interval
        )
        sentences = [f"Consistency is {listed}."]
        if exact:
            listed = ", ".join(f"{value:.1%} ({row})" for row, value in exact.items())
            sentences.append(f"The exact forms have {listed}.")
        by_interval = dict(by_interval)
        limit = exact.get(study.exact[0])
        if limit is not None and 0 in by_interval:
            gap = limit - by_interval.pop(0)
            if gap <= 0:
                sentences.append(
                    f"One draw is no less consistent than {study.exact[0]}."
                )
            for interval, value in by_interval.items() if gap > 0 else ():
                sentences.append(
                    f"Redraws {interval_name(interval)} close "
                    f"{(value - limit + gap) / gap:.0%} of the gap to "
                    f"{study.exact[0]}."
                )
        noun = "draw" if draws == 1 else "draws"
        paragraphs.append(
            f"Found with the {schedule} learning rate and {draws} {noun}: "
            + " ".join(sentences)
        )
    return paragraphs


def interval_name(interval: int) -> str:
    """Returns an interval in words.

    Example:
        >>> interval_name(0), interval_name(1), interval_name(1000)
        ('drawn once', 'every step', 'every 1,000 steps')
    """
    if interval == 0:
        return "drawn once"
    return "every step" if interval == 1 else f"every {interval:,} steps"


def redraw_table(study: Redraws, points: Sequence[Point]) -> str:
    """Makes a table with a row for each model, schedule and number of draws.

    Args:
        study: The rows to compare; those of strategy 1 come first.
        points: What the models do under shifts.

    Returns:
        Markdown; values of all classes, in %.
    """
    header = ["model", "learning rate", "draws", "unshifted", "shifted", "consistency"]

    def order(each: Point) -> tuple[str, float]:
        # From rare to frequent redraws.
        return each.schedule, -(study.intervals.get(each.row, -1) or 1e9)

    lines = [
        [
            *(each.row, each.schedule, str(each.draws)),
            *(_cell(*x) for x in (each.accuracy, each.shifted, each.consistency)),
        ]
        for each in sorted(points, key=order)
        if each.images == "all"
    ]
    return markdown_table(header, lines) + "\n"


def _cell(mean: float, std: float | None) -> str:
    spread = "" if std is None else f" ± {100 * std:.1f}"
    return f"{100 * mean:.1f}{spread}"


def _plot_redraws(study: Redraws, points: Sequence[Point], path: Path) -> None:
    """Plots consistency against the interval of redraws; the exact forms are lines."""
    points = [each for each in points if each.images == "all"]
    schedules = list(dict.fromkeys(each.schedule for each in points)) or [""]
    figure = Figure(figsize=(1 + 5 * len(schedules), 5), layout="constrained")
    panels = figure.subplots(1, len(schedules), sharey=True, squeeze=False)[0]
    # From rare to frequent: towards the exact forms.
    intervals = sorted(study.intervals.items(), key=lambda item: -(item[1] or 1e9))
    names = [interval_name(interval) for _, interval in intervals]
    lines = {}
    for panel, schedule in zip(panels, schedules, strict=True):
        found = {
            (each.row, each.draws): each.consistency
            for each in points
            if each.schedule == schedule
        }
        for color, draws in enumerate(study.draws):
            chosen = [
                (x, found[row, draws][0], found[row, draws][1] or 0.0)
                for x, (row, _) in enumerate(intervals)
                if (row, draws) in found
            ]
            if not chosen:
                continue
            x, mean, std = np.array(chosen).T
            label = "1 draw" if draws == 1 else f"mean of {draws} draws"
            lines[label] = panel.errorbar(
                x, mean, std, color=f"C{color}", marker="o", capsize=3
            )
        for style, row in zip(("--", ":", "-."), study.exact, strict=False):
            if (row, 1) in found:
                lines[row] = panel.axhline(found[row, 1][0], color="k", ls=style)
        panel.set_xticks(range(len(names)), names, rotation=20)
        panel.set_xlim(-0.4, len(names) - 0.6)
        panel.set(title=f"{schedule} learning rate", xlabel="random features drawn")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("consistency, mean over the shifts, all classes")
    if lines:
        figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=3)
    save_figure(figure, path)

"""Shift curves as a table, a figure and a summary."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from relattn.evaluation.curves import ShiftCurve
from relattn.evaluation.publications import read_published

COLUMNS = (
    "run",
    "dataset",
    "model",
    "shift_px",
    "accuracy_mean",
    "accuracy_std",
    "num_images",
    "source",
)


def published_curve(dataset: str, model: str) -> tuple[list[int], list[float]]:
    """Figure 1 of Horn et al., from its authors' raw results.

    Args:
        dataset: ``"mnist"`` or ``"fashion_mnist"``; others have no curve.
        model: ``"Absolute"``, ``"Rel. S1"``, ``"Rel. S2"`` or ``"No Pos."``.

    Returns:
        Shifts in pixels along x and the accuracies on class 1, both empty where the
        figure has no such curve.

    Example:
        >>> shifts, accuracies = published_curve("fashion_mnist", "Rel. S1")
        >>> shifts[0], accuracies[0]
        (-8, 0.8963)
    """
    rows = [
        row
        for row in read_published("performer_figure1")
        if (row["dataset"], row["model"]) == (dataset, model)
    ]
    shifts = [int(row["shift_px"]) for row in rows]
    return shifts, [float(row["accuracy"]) for row in rows]


def published_curves(
    curves: Sequence[ShiftCurve],
) -> list[tuple[str, str, dict[int, float]]]:
    """The published curves of the models and data sets of measured ones.

    Args:
        curves: Measured curves.

    Returns:
        For each published curve the data set, the model's published name and the
        accuracy by shift, at the shifts that were measured.
    """
    found = []
    for dataset, model in dict.fromkeys((c.dataset, c.published) for c in curves):
        by_shift = dict(zip(*published_curve(dataset, model), strict=True))
        by_shift = {s: by_shift[s] for s in curves[0].shifts if s in by_shift}
        if by_shift:
            found.append((dataset, model, by_shift))
    return found


def write_csv(
    curves: Sequence[ShiftCurve], path: Path, *, published: bool = False
) -> None:
    """Writes one row a curve and shift; ``source`` is ``measured`` or ``published``.

    Args:
        curves: What to write.
        path: The file.
        published: Whether to write the published curves too. They have no run,
            standard deviation and number of images.
    """
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for curve in curves:
            for pixels in curve.shifts:
                mean, std, count = curve.at(pixels)
                row = [curve.run, curve.dataset, curve.model, pixels]
                row += [f"{mean:.6f}", f"{std:.6f}", count, "measured"]
                writer.writerow(row)
        for dataset, model, by_shift in published_curves(curves) if published else ():
            for pixels, accuracy in by_shift.items():
                row = ["", dataset, model, pixels, f"{accuracy:.6f}", "", ""]
                writer.writerow([*row, "published"])


@dataclasses.dataclass(frozen=True)
class Panel:
    """One panel of the figure.

    Attributes:
        title: Which images.
        curves: Of one data set.
        published: Whether to draw the published curves, dashed.
    """

    title: str
    curves: Sequence[ShiftCurve]
    published: bool = False


def plot(panels: Sequence[Panel], path: Path, *, axis: str = "x") -> None:
    """Draws accuracy against shift, with a band of one standard deviation.

    Args:
        panels: From left to right.
        path: The file; its suffix is the format.
        axis: ``"x"`` or ``"y"``.
    """
    figure = Figure(figsize=(1 + 5 * len(panels), 5), layout="constrained")
    places = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    lines: dict[str, Line2D] = {}
    colors: dict[str, str] = {}
    for place, panel in zip(places, panels, strict=True):
        for curve in panel.curves:
            label = _label(curve, panel.curves)
            color = colors.setdefault(label, f"C{len(colors)}")
            (lines[label],) = place.plot(curve.shifts, curve.mean, color=color)
            place.fill_between(
                curve.shifts,
                (curve.mean - curve.std).clip(0, 1),
                (curve.mean + curve.std).clip(0, 1),
                color=color,
                alpha=0.2,
                linewidth=0,
            )
            shifts, accuracies = published_curve(curve.dataset, curve.published)
            if panel.published and shifts:
                label = f"{curve.published} (published)"
                (lines[label],) = place.plot(
                    shifts, accuracies, "--", color=color, lw=1
                )
        place.set(title=panel.title, xlabel=f"shift along {axis} in pixels")
        place.set_ylim(-0.02, 1.02)
        place.grid(alpha=0.3)
    places[0].set_ylabel("accuracy")
    figure.legend(
        lines.values(), lines.keys(), loc="outside lower center", ncols=2, frameon=False
    )
    figure.savefig(path, dpi=150)


def table(curves: Sequence[ShiftCurve], *, published: bool = False) -> str:
    """A Markdown table of the curves at five of their shifts.

    Args:
        curves: Of the same shifts.
        published: Whether to add the published curves.

    Returns:
        A row a curve: mean, standard deviation and number of images; of published ones
        the accuracy.
    """
    largest = max(curves[0].shifts)
    middle = 3 * largest // 4
    shifts = list(dict.fromkeys([-largest, -middle, 0, middle, largest]))
    header = [
        "data set",
        "model",
        "runs",
        *(f"{pixels:+d} px" if pixels else "0 px" for pixels in shifts),
    ]
    lines = ["| " + " | ".join(header) + " |", "| --- " * len(header) + "|"]
    for curve in curves:
        cells = [curve.dataset, _label(curve, curves), str(curve.num_runs)]
        for pixels in shifts:
            mean, std, count = curve.at(pixels)
            cells.append(f"{mean:.3f} ± {std:.3f} ({count})")
        lines.append("| " + " | ".join(cells) + " |")
    for dataset, model, by_shift in published_curves(curves) if published else ():
        cells = [dataset, f"{model} (published)", "–"]
        cells += [f"{by_shift[s]:.3f}" if s in by_shift else "–" for s in shifts]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def summary(
    one_class: Sequence[ShiftCurve],
    every_class: Sequence[ShiftCurve],
    *,
    class_name: str,
    max_shift: int,
    axis: str,
    published: bool = False,
) -> str:
    """States the figure of one class and the stricter one of all classes.

    Args:
        one_class: Curves of one class, perhaps none.
        every_class: Curves of all classes.
        class_name: Of the one class.
        max_shift: In pixels.
        axis: ``"x"`` or ``"y"``.
        published: Whether to state the published curves beside those of one class.

    Returns:
        Markdown.
    """
    parts = [f"# Accuracy under shifts along {axis}", f"## Class {class_name}"]
    if one_class:
        parts += [
            f"The test images of this class that can move {max_shift} pixels both ways "
            "without losing a non-zero pixel. One class alone flatters a model that "
            "names it too often.",
            table(one_class, published=published),
        ]
    else:
        parts += [
            f"No test image of this class can move {max_shift} pixels both ways "
            "without losing a non-zero pixel."
        ]
    parts += [
        "## All classes",
        "At every shift the test images, of any class, that lose no non-zero pixel by "
        "it: fewer, and other ones, the larger the shift.",
        table(every_class),
        "Mean accuracy ± standard deviation (number of images): over the runs that "
        "differ in their seed; of a single run, the binomial sqrt(p (1 - p) / n).",
    ]
    return "\n\n".join(parts) + "\n"


def _label(curve: ShiftCurve, others: Sequence[ShiftCurve]) -> str:
    same = [other for other in others if other.dataset == curve.dataset]
    alike = sum(other.model == curve.model for other in same)
    return f"{curve.model} [{curve.run}]" if alike > 1 else curve.model

"""Writes accuracy and consistency under shifts as CSV and Markdown."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from relattn.evaluation.shift import BOUNDARIES, NUM_RANDOM_SHIFTS, Shift
from relattn.evaluation.shift_curves import (
    MEASURES,
    ShiftCurve,
    ShiftMetrics,
    curve_label,
    published_curves,
    to_print,
)
from relattn.files import replace_file
from relattn.markdown import escape_markdown, markdown_table

COLUMNS = (
    "run",
    "dataset",
    "model",
    "class",
    "shift_x_px",
    "shift_y_px",
    "accuracy_mean",
    "accuracy_std",
    "consistency_mean",
    "consistency_std",
    "num_images",
    "source",
)


def write_csv(curves: Sequence[ShiftCurve], path: Path) -> None:
    """Writes a row for each curve and shift to a CSV file.

    The column ``source`` is ``measured``, ``random`` or ``published``; ``class`` is the
    class of the images, or ``all``.

    Args:
        curves: Measured curves. Each has a row ``random`` for its random shifts,
            without a shift. The published curves follow; they have only accuracies.
        path: The file.
    """
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerow(COLUMNS)
    for curve in curves:
        name = [curve.run, curve.dataset, curve.model, _images(curve)]
        for shift in curve.shifts:
            writer.writerow([*name, *shift, *_values(curve.at(shift)), "measured"])
        writer.writerow([*name, "", "", *_values(curve.random), "random"])
    for curve, published in published_curves(curves):
        name = ["", curve.dataset, published.name, _images(curve)]
        for shift, accuracy in published.accuracy.items():
            values = [f"{accuracy:.6f}", "", "", "", ""]
            writer.writerow([*name, *shift, *values, "published"])
    replace_file(path, file.getvalue())


def _images(curve: ShiftCurve) -> str:
    return "all" if curve.label is None else str(curve.label)


def _values(metrics: ShiftMetrics) -> list[str]:
    *statistics, count = vars(metrics).values()
    return [*("" if np.isnan(x) else f"{x:.6f}" for x in statistics), str(count)]


def table(curves: Sequence[ShiftCurve], measure: str = "accuracy") -> str:
    """Makes a Markdown table of the curves at five of their shifts and random ones.

    Args:
        curves: Curves with the same shifts.
        measure: ``"accuracy"``, also of the published curves, or ``"consistency"``.

    Returns:
        A row for each curve: mean, standard deviation and number of images; for a
        published curve the accuracy.
    """
    shifts = _shown(curves[0].shifts)
    header = ["data set", "model", "runs", *map(_shift_name, shifts), "random shifts"]
    rows = []
    for curve in curves:
        cells = [*map(escape_markdown, (curve.dataset, curve_label(curve, curves)))]
        cells.append(str(curve.num_runs))
        for metrics in (*map(curve.at, shifts), curve.random):
            mean, std = getattr(metrics, measure), getattr(metrics, f"{measure}_std")
            if not metrics.num_images:
                cells.append("–")
                continue
            mean = to_print(measure, float(mean))
            cells.append(f"{mean:.3f} ± {std:.3f} ({metrics.num_images})")
        rows.append(cells)
    known = published_curves(curves) if measure == "accuracy" else ()
    for curve, published in known:
        accuracy = published.accuracy
        cells = [escape_markdown(curve.dataset), f"{published.name} (published)", "–"]
        cells += [f"{accuracy[s]:.3f}" if s in accuracy else "–" for s in shifts]
        rows.append([*cells, "–"])
    return markdown_table(header, rows)


def _shown(shifts: Sequence[Shift]) -> list[Shift]:
    """Selects the shifts of a table: 0, the largest, 3/4 of it; of pairs, the corners.

    Example:
        >>> _shown([(0, dy) for dy in range(-8, 9)])
        [(0, -8), (0, -6), (0, 0), (0, 6), (0, 8)]
        >>> _shown([(dx, dy) for dy in (-1, 0, 1) for dx in (-1, 0, 1)])
        [(-1, -1), (1, -1), (0, 0), (-1, 1), (1, 1)]
    """
    right, down = shifts[-1]
    some = (-right, down) if right and down else (3 * right // 4, 3 * down // 4)
    chosen = [(-right, -down), (-some[0], -some[1]), (0, 0), some, (right, down)]
    return list(dict.fromkeys(chosen))


def _shift_name(shift: Shift) -> str:
    pixels = [f"{x:+d}" if x else "0" for x in shift]
    if all(shift):
        return f"({', '.join(pixels)}) px"
    return f"{pixels[0] if shift[0] else pixels[1]} px"


def summary(
    one_class: Sequence[ShiftCurve],
    every_class: Sequence[ShiftCurve],
    *,
    class_name: str,
    max_shift: int,
    axis: str,
    boundary: str = "zeros",
) -> str:
    """Summarises the metrics on one class and, which is stricter, on all classes.

    Args:
        one_class: Curves of one class; without any, its section is left out.
        every_class: Curves of all classes.
        class_name: The name of the one class.
        max_shift: Largest shift in pixels.
        axis: ``"x"``, ``"y"`` or ``"xy"``.
        boundary: What moves into an image.

    Returns:
        Markdown.
    """
    along = " and ".join(axis)
    every = "At every shift, the test images of any class that lose no non-zero pixel "
    every += "by it. Larger shifts use fewer, and different, images."
    one = f"The test images of this class that can move {max_shift} pixels both ways "
    one += f"along {along} without losing a non-zero pixel."
    random = f"uniform from {-max_shift} to {max_shift} pixels along x and y, the same "
    random += "for every model; those that lose a non-zero pixel do not count."
    if boundary != "zeros":
        one = "All test images of this class."
        every = f"All test images. {BOUNDARIES[boundary]}."
        random = random.partition(";")[0] + "."
    parts = [f"# Accuracy and consistency under shifts along {along}"]
    if one_class:
        parts += [
            f"## Class {escape_markdown(class_name)}",
            f"{one} Accuracy on one class favours a model that predicts it too often.",
            *_tables(one_class),
        ]
    parts += [
        "## All classes",
        every,
        *_tables(every_class),
        "Consistency is the fraction of the images whose predicted class is that of "
        f"the unshifted image, rounded down. Each image has {NUM_RANDOM_SHIFTS} random "
        f"shifts, {random}",
        "Mean ± standard deviation (number of images) over the runs that differ in "
        "their seed; for a single run, the binomial sqrt(p (1 - p) / n).",
    ]
    return "\n\n".join(parts) + "\n"


def _tables(curves: Sequence[ShiftCurve]) -> list[str]:
    parts = [(f"{name.capitalize()}:", table(curves, name)) for name in MEASURES]
    return [text for part in parts for text in part]

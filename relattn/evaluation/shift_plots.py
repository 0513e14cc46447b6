"""Plots accuracy and consistency under shifts: curves, or maps for both axes."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from relattn.evaluation.figures import plain, save_figure
from relattn.evaluation.shift_curves import (
    MEASURES,
    ShiftCurve,
    curve_label,
    to_print,
)

# The definition of consistency, for labels.
CONSISTENCY = "consistency: fraction of images\npredicted as when unshifted"


@dataclasses.dataclass(frozen=True)
class Panel:
    """One panel of the figure.

    Attributes:
        title: The title: data set and images.
        curves: Curves of one data set.
    """

    title: str
    curves: Sequence[ShiftCurve]


def plot(panels: Sequence[Panel], path: Path, *, axis: str = "x") -> None:
    """Plots accuracy and consistency against the shift.

    Along one axis, each panel has its curves with a band of one standard deviation, the
    published ones dashed, and below them those of consistency, with dotted lines at the
    consistency under random shifts. Along both axes, each curve of each panel is two
    heat maps.

    Args:
        panels: Panels from left to right.
        path: The file; its suffix is the format.
        axis: ``"x"``, ``"y"`` or ``"xy"``.
    """
    figure = _maps(panels) if axis == "xy" else _curves(panels, axis)
    save_figure(figure, path)


def _curves(panels: Sequence[Panel], axis: str) -> Figure:
    figure = Figure(figsize=(1 + 5 * len(panels), 8), layout="constrained")
    rows = figure.subplots(2, len(panels), sharex=True, sharey="row", squeeze=False)
    lines: dict[str, Line2D] = {}
    colors: dict[str, str] = {}
    for top, bottom, panel in zip(*rows, panels, strict=True):
        for curve in panel.curves:
            label = curve_label(curve, panel.curves)
            color = colors.setdefault(label, f"C{len(colors)}")
            pixels = [shift["xy".index(axis)] for shift in curve.shifts]
            for ax, measure in zip((top, bottom), MEASURES, strict=True):
                mean = getattr(curve.metrics, measure)
                std = getattr(curve.metrics, f"{measure}_std")
                (lines[label],) = ax.plot(pixels, mean, color=color)
                low, high = (mean - std).clip(0, 1), (mean + std).clip(0, 1)
                ax.fill_between(pixels, low, high, color=color, alpha=0.2, linewidth=0)
            bottom.axhline(float(curve.random.consistency), color=color, linestyle=":")
            if curve.published:
                known = curve.published.accuracy
                pixels = [shift["xy".index(axis)] for shift in known]
                label = f"{curve.published.name} (published)"
                (lines[label],) = top.plot(
                    pixels, list(known.values()), "--", color=color, lw=1
                )
        top.set_title(plain(panel.title))
        bottom.set_xlabel(f"shift along {axis} in pixels\n({_images(panel.curves)})")
        for ax in (top, bottom):
            ax.set_ylim(-0.02, 1.02)
            ax.grid(alpha=0.3)
    rows[0, 0].set_ylabel("accuracy")
    rows[1, 0].set_ylabel(CONSISTENCY)
    label = "consistency under random shifts along x and y"
    lines[label] = Line2D([], [], color="gray", linestyle=":")
    figure.legend(
        lines.values(),
        [plain(label) for label in lines],
        loc="outside lower center",
        ncols=min(len(panels), 2),
        frameon=False,
    )
    return figure


def _maps(panels: Sequence[Panel]) -> Figure:
    rows = [(panel, curve) for panel in panels for curve in panel.curves]
    # Room for the titles: the layout takes less than they need.
    layout = ConstrainedLayoutEngine(h_pad=0.1)
    figure = Figure(figsize=(9, 4.7 * len(rows)), layout=layout)
    axes = figure.subplots(len(rows), 2, squeeze=False)
    for pair, (panel, curve) in zip(axes, rows, strict=True):
        largest = curve.shifts[-1][0]
        size, edge = 2 * largest + 1, largest + 0.5
        names = [panel.title, *textwrap.wrap(curve_label(curve, panel.curves), 50)]
        for ax, measure in zip(pair, MEASURES, strict=True):
            # The shifts are in the order of an image, row by row.
            values = getattr(curve.metrics, measure).reshape(size, size)
            extent = (-edge, edge, edge, -edge)
            image = ax.imshow(values, vmin=0, vmax=1, extent=extent)
            numbers = [values.min(), values.max(), getattr(curve.random, measure)]
            low, high, random = (
                f"{to_print(measure, float(number)):.1%}" for number in numbers
            )
            text = f"{measure} {low} to {high}"
            if curve.random.num_images:
                text += f"; random shifts: {random}"
            ax.set_title(plain("\n".join([*names, text])), fontsize="small")
            ax.set_xlabel(f"shift along x in pixels (right)\n({_images([curve])})")
            for each in (ax.xaxis, ax.yaxis):
                each.set_major_locator(
                    MaxNLocator("auto", steps=[1, 2, 10], integer=True)
                )
            names = []
        pair[0].set_ylabel("shift along y in pixels (down)")
        label = f"accuracy, or\n{CONSISTENCY}"
        figure.colorbar(image, ax=list(pair), shrink=0.8, label=label)
    return figure


def _images(curves: Sequence[ShiftCurve]) -> str:
    counts = np.concatenate([curve.metrics.num_images for curve in curves])
    images = f"{counts.max():,} images"
    if counts.min() < counts.max():
        images = f"{counts.min():,} to {images}, by shift"
    return images

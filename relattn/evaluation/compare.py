"""Compares trained runs under shifts of the test images."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relattn.data import ImageInfo, ImageSplit, StreamedSplit
from relattn.evaluation.shift import (
    ShiftedPredictions,
    check_boundary,
    check_shift,
    shifted_predictions,
)
from relattn.evaluation.shift_curves import FindPublished, ShiftCurve, curves_of
from relattn.evaluation.shift_plots import Panel, plot
from relattn.evaluation.shift_runs import ShiftRun, check_runs
from relattn.evaluation.shift_tables import summary, write_csv
from relattn.files import replace_file
from relattn.messages import shorten
from relattn.offsets import is_whole
from relattn.training import Run
from relattn.training.draws import check_draws
from relattn.training.errors import explain_write_errors
from relattn.training.workdir import usable_folder

# Class names listed in a message.
MAX_LISTED = 20


def shift_report(
    runs: Sequence[ShiftRun],
    output: str | Path,
    *,
    classes: str | int = "1",
    **options,
) -> str:
    """Evaluates runs under shifts; writes ``shift.csv``, ``shift.png``, ``summary.md``.

    Args:
        runs: The runs, from `relattn.evaluation.shift_runs.open_shift_runs`. Those that
            differ only in their seed are averaged.
        output: The folder to write to.
        classes: A class, by name or number, that gets its own curves next to those of
            all classes; or ``"all"`` for only the curves of all classes.
        **options: Options of `compare`.

    Returns:
        The summary, in Markdown.

    Raises:
        ValueError: If an argument does not fit the runs, or no image allows a shift.
        CheckpointError: If a checkpoint is damaged.
        WorkdirError: If the folder is not writable; raised before any work.
    """
    output = usable_folder(output, "--output")
    class_name = None if classes == "all" else classes
    comparison = compare(runs, class_name=class_name, **options)
    one_class, every_class = comparison.one_class(), comparison.every_class()
    text = summary(
        one_class,
        every_class,
        class_name=comparison.class_name,
        max_shift=comparison.max_shift,
        axis=comparison.axis,
        boundary=comparison.boundary,
    )
    curves = [*one_class, *every_class]
    panels = comparison.panels(curves)
    with explain_write_errors(output):
        write_csv(curves, output / "shift.csv")
        plot(panels, output / "shift.png", axis=comparison.axis)
        replace_file(output / "summary.md", text)
    return text


def compare(
    runs: Sequence[ShiftRun],
    *,
    max_shift: int = 8,
    axis: str = "x",
    class_name: str | int | None = None,
    num_images: int | None = None,
    boundary: str = "zeros",
    draws: int | np.integer | None = None,
    find_published: FindPublished | None = None,
    on_load: Callable[[Run], None] | None = None,
) -> Comparison:
    """Evaluates runs on their test images at every shift, one run after the other.

    Args:
        runs: The runs, from `relattn.evaluation.shift_runs.open_shift_runs`.
        max_shift: Largest shift in pixels, both ways.
        axis: ``"x"``, ``"y"`` or ``"xy"``, every pair of shifts along both.
        class_name: The class that has its own curves, by name or number; None for none.
        num_images: Number of test images to use, from the first; None for all.
        boundary: What moves into an image: see `shifted_predictions`.
        draws: Number of draws of the random features over which the probabilities are
            averaged; None for the ``config.eval_draws`` of each run.
        find_published: Returns the published curve of a run, to compare with; None for
            no such curves.
        on_load: Called with the first seed of each run while it is in memory.

    Returns:
        The classes that each run predicts at each shift.

    Raises:
        ValueError: If an argument does not fit the runs, no image allows one of the
            shifts, or no image of the class allows all of them.
        CheckpointError: If a checkpoint is damaged.
    """
    check_runs(runs)
    # Check all runs before evaluating the first.
    for run in runs:
        check_shift(max_shift, axis, run.image_size)
        check_boundary(boundary, run.info.streamed, str(run.workdir))
        if draws is not None:
            _check_draws(run, draws)
    label, title = None, ""
    if class_name is not None:
        label, title = _one_label([run.info for run in runs], class_name)
    splits = [_first(run.split, num_images) for run in runs]
    results = []
    for run, split in zip(runs, splits, strict=True):
        results += _predictions(
            run,
            split,
            on_load,
            max_shift=max_shift,
            axis=axis,
            boundary=boundary,
            draws=draws,
        )
        # If no image allows a shift, do not wait for the other runs.
        for images in (None, label):
            curves_of(results, images)
    return Comparison(
        tuple(results), label, title, max_shift, axis, boundary, find_published
    )


def _check_draws(run: ShiftRun, draws: int | np.integer) -> None:
    features = run.saved.task.abstract_state.random_features
    try:
        check_draws(draws, features)
    except ValueError as error:
        raise ValueError(f"{run.workdir}: {error}") from error


def _predictions(
    run: ShiftRun,
    split: ImageSplit | StreamedSplit,
    on_load: Callable[[Run], None] | None,
    **options: Any,
) -> list[ShiftedPredictions]:
    """Predicts with every seed of a run; its arrays are in memory only in this call."""
    seeds = run.load()
    several = len(seeds) > 1
    found = [
        shifted_predictions(
            seed,
            split,
            name=f"{run.name}:{seed.config.seed}" if several else run.name,
            **options,
        )
        for seed in seeds
    ]
    if on_load is not None:
        on_load(seeds[0])
    return found


def _first(
    split: ImageSplit | StreamedSplit, num_images: int | None
) -> ImageSplit | StreamedSplit:
    if num_images is None:
        return split
    if not is_whole(num_images) or not 1 <= num_images <= len(split):
        raise ValueError(
            f"num_images={shorten(num_images)} must be an integer from 1 to "
            f"{len(split)}, the number of test images"
        )
    if isinstance(split, StreamedSplit):
        photographs = split.photographs
        first = dataclasses.replace(
            photographs, indices=photographs.indices[:num_images]
        )
        return dataclasses.replace(split, photographs=first)
    if not isinstance(split, ImageSplit):
        raise ValueError(
            f"num_images={num_images} needs test images in an ImageSplit, got "
            f"{type(split).__name__}: leave it out"
        )
    return ImageSplit(split.images[:num_images], split.labels[:num_images])


def _one_label(infos: Sequence[ImageInfo], class_name: str | int) -> tuple[int, str]:
    labels = [class_index(str(class_name), info.class_names) for info in infos]
    if len(set(labels)) > 1:
        raise ValueError(
            f"class {class_name!r} has different labels in the runs' data sets: pass "
            "its number"
        )
    titles = dict.fromkeys(info.class_names[labels[0]] for info in infos)
    return labels[0], f"{labels[0]} ({', '.join(titles)})"


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """The predictions of several runs for shifted images.

    Attributes:
        results: The predictions of each run.
        label: The label of the class that has its own curves; None for none.
        class_name: Number and name of this class, "" if there is none.
        max_shift: Largest shift in pixels, both ways.
        axis: ``"x"``, ``"y"`` or ``"xy"``.
        boundary: What moves into an image.
        find_published: Returns the published curve of a run.
    """

    results: tuple[ShiftedPredictions, ...]
    label: int | None
    class_name: str
    max_shift: int
    axis: str
    boundary: str = "zeros"
    find_published: FindPublished | None = None

    def one_class(self) -> tuple[ShiftCurve, ...]:
        """Returns the curves of the images of the one class that can move both ways.

        Without such a class, there are no curves.

        Raises:
            ValueError: If there is no such image.
        """
        if self.label is None:
            return ()
        return curves_of(self.results, self.label, self.find_published)

    def every_class(self) -> tuple[ShiftCurve, ...]:
        """Returns the curves of all images at the shifts that they allow.

        Raises:
            ValueError: If no image allows one of the shifts.
        """
        return curves_of(self.results, None, self.find_published)

    def panels(self, curves: Sequence[ShiftCurve]) -> list[Panel]:
        """Makes a panel of the figure for each data set and its images.

        Args:
            curves: Curves of `one_class` or `every_class`, or both.

        Returns:
            The panels.
        """
        groups: dict[str, list[ShiftCurve]] = {}
        for curve in curves:
            one = curve.label is not None
            images = f"class {self.class_name}" if one else "all classes"
            groups.setdefault(f"{curve.dataset}, {images}", []).append(curve)
        return [Panel(title, curves) for title, curves in groups.items()]


def class_index(name: str, class_names: Sequence[str]) -> int:
    """Finds the label of a class.

    Args:
        name: The class's number or name, such as ``"1"`` or ``"trouser"``; upper and
            lower case are the same.
        class_names: Names in the order of the labels.

    Returns:
        The label.

    Raises:
        ValueError: If there is no such class; the message has the closest.

    Example:
        >>> class_index("trouser", ["T-shirt/top", "Trouser"])
        1
    """
    # A number is a label before it is a name.
    if name.isdecimal() and int(name) < len(class_names):
        return int(name)
    known = [str(known).lower() for known in class_names]
    if name.lower() in known:
        return known.index(name.lower())
    similar = difflib.get_close_matches(name.lower(), known, n=1)
    hint = "available"
    if similar:
        hint = f"did you mean {class_names[known.index(similar[0])]!r}? Available"
    names = ", ".join(class_names) if len(class_names) <= MAX_LISTED else "their names"
    raise ValueError(
        f"unknown class {name!r}: {hint}: all, 0 to {len(class_names) - 1}, " + names
    )

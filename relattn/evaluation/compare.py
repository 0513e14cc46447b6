"""Compares trained runs under shifts of the test images."""

from __future__ import annotations

import csv
import dataclasses
import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from ml_collections import ConfigDict

from relattn.data import EvalSplit, ImageInfo, ImageSplit, StreamedSplit, load_data
from relattn.evaluation.shift import (
    BORDERS,
    ShiftedAccuracy,
    check_border,
    check_shift,
    shifted_accuracy,
)
from relattn.evaluation.sizes import read_published
from relattn.spec import parse
from relattn.training.errors import writing
from relattn.training.run import SavedRun, check_labels, open_run
from relattn.training.workdir import usable_folder

# The class of the published curves.
PUBLISHED_CLASS = 1
# Class names listed in a message.
MAX_LISTED = 20

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


def shift_report(
    workdirs: Sequence[str | Path],
    output: str | Path,
    *,
    classes: str = "1",
    **options,
) -> str:
    """Evaluates runs under shifts; writes ``shift.csv``, ``shift.png``, ``summary.md``.

    Args:
        workdirs: Folders of runs. Runs that differ only in their seed are averaged.
        output: The folder to write to.
        classes: ``"all"``, or the class of the curves, by name or number; with
            ``"all"`` the summary's one class is 1.
        **options: Options of `compare`.

    Returns:
        The summary, in Markdown, with the curves of one class and of all.

    Raises:
        ValueError: If an argument does not fit the runs, or no image allows a shift.
        CheckpointError: As for `compare`.
        WorkdirError: If the folder is not writable; raised before any work.
    """
    output = usable_folder(output, "--output")
    class_name = "1" if classes == "all" else classes
    comparison = compare(workdirs, class_name=class_name, **options)
    every_class = comparison.every_class()
    try:
        one_class = comparison.one_class()
    except ValueError:
        if classes != "all":
            raise
        one_class = ()
    if classes == "all":
        shown, images = every_class, "all classes"
    else:
        shown, images = one_class, f"class {comparison.class_name}"
    text = summary(
        one_class,
        every_class,
        class_name=comparison.class_name,
        max_shift=comparison.max_shift,
        axis=comparison.axis,
        border=comparison.border,
        published=comparison.has_published,
    )
    panels = comparison.panels(shown, images, published=classes != "all")
    with writing(output):
        published = classes != "all" and comparison.has_published
        write_csv(shown, output / "shift.csv", published=published)
        plot(panels, output / "shift.png", axis=comparison.axis)
        (output / "summary.md").write_text(text, "utf-8")
    return text


def compare(
    workdirs: Sequence[str | Path],
    *,
    max_shift: int = 8,
    axis: str = "x",
    class_name: str = "1",
    checkpoint: str = "best",
    image_size: int | None = None,
    data_dir: str | None = None,
    num_images: int | None = None,
    border: str = "zeros",
) -> Comparison:
    """Evaluates runs on their test images at every shift, one run after the other.

    Args:
        workdirs: Folders of runs.
        max_shift: Largest shift in pixels, both ways.
        axis: ``"x"`` or ``"y"``.
        class_name: The class that has its own curves, by name or number.
        checkpoint: ``"best"`` or ``"latest"``.
        image_size: Height and width of the images, in pixels, for which the models are
            resized; None for the size of training.
        data_dir: The folder of the data set; None for the folder of training.
        num_images: Number of test images to use, from the first; None for all.
        border: What moves into an image: see `shifted_accuracy`.

    Returns:
        Which images each run classifies correctly.

    Raises:
        ValueError: If an argument does not fit the runs, or a run is not of images.
        CheckpointError: If a folder has no run with a checkpoint, or the data have
            other classes than a run predicts.
    """
    if not workdirs:
        raise ValueError("no run: name at least one folder by --workdir")
    folders = [Path(workdir).name for workdir in workdirs]
    if len(set(folders)) < len(folders):
        folders = [str(workdir) for workdir in workdirs]
    # Check all runs before evaluating the first.
    runs = [open_run(workdir, checkpoint, image_size) for workdir in workdirs]
    for run in runs:
        if run.task.info.kind != "images":
            raise ValueError(
                f"{run.workdir} was trained on {run.task.info.kind}: only runs on "
                "images can be shifted"
            )
        check_shift(max_shift, axis, run.task.config.data.image_size)
        check_border(border, run.task.info.streamed, str(run.workdir))
    label, title = _one_label([run.task.info for run in runs], class_name)
    test_splits: dict[str, tuple[EvalSplit, ImageInfo]] = {}
    results = []
    for run, name in zip(runs, folders, strict=True):
        config = _test_config(run, data_dir)
        key = config.to_json()
        if key not in test_splits:
            data = load_data(config)
            test_splits[key] = _first(data.eval_splits["test"], num_images), data.info
        split, info = test_splits[key]
        _check_data(run, info)
        results += _shifted_accuracies(
            run, split, name=name, max_shift=max_shift, axis=axis, border=border
        )
    return Comparison(tuple(results), label, title, max_shift, axis, border)


def _test_config(run: SavedRun, data_dir: str | None) -> ConfigDict:
    config = ConfigDict(run.task.config.data.to_dict())
    if data_dir is not None:
        if config.source == "embedded":
            raise ValueError(
                f"--data_dir={data_dir} does not apply to {run.workdir}, which was "
                "trained on images that ship with relattn: leave it out"
            )
        config.data_dir = data_dir
    return config


def _shifted_accuracies(
    saved: SavedRun, split: EvalSplit, *, name: str, **options: Any
) -> list[ShiftedAccuracy]:
    """Evaluates every seed of a run; its arrays are in memory only in this call."""
    several = len(saved.seeds) > 1
    return [
        shifted_accuracy(
            run, split, name=f"{name}:{run.config.seed}" if several else name, **options
        )
        for run in saved.load()
    ]


def _check_data(run: SavedRun, info: ImageInfo) -> None:
    trained = run.task.info
    check_labels(trained, info, run.workdir)
    channels, given = trained.image_shape[2], info.image_shape[2]
    if channels != given:
        raise ValueError(
            f"{run.workdir} was trained on images of {channels} channels, but those of "
            f"{info.name} have {given}: use the data that it was trained on"
        )


def _first(split: EvalSplit, num_images: int | None) -> EvalSplit:
    if num_images is None:
        return split
    if not 1 <= num_images <= len(split):
        raise ValueError(
            f"num_images={num_images} must be from 1 to {len(split)}, the number of "
            "test images"
        )
    if isinstance(split, StreamedSplit):
        photographs = split.photographs
        first = dataclasses.replace(
            photographs, indices=photographs.indices[:num_images]
        )
        return dataclasses.replace(split, photographs=first)
    return ImageSplit(split.images[:num_images], split.labels[:num_images])


def _one_label(infos: Sequence[ImageInfo], class_name: str) -> tuple[int, str]:
    labels = [class_index(class_name, info.class_names) for info in infos]
    if len(set(labels)) > 1:
        raise ValueError(
            f"class {class_name!r} has different labels in the runs' data sets: give "
            "its number"
        )
    titles = dict.fromkeys(info.class_names[labels[0]] for info in infos)
    return labels[0], f"{labels[0]} ({', '.join(titles)})"


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """The accuracy of several runs under shifts.

    Attributes:
        results: The results of each run.
        label: The label of the class that has its own curves.
        class_name: Number and name of this class.
        max_shift: Largest shift in pixels, both ways.
        axis: ``"x"`` or ``"y"``.
        border: What moves into an image.
    """

    results: tuple[ShiftedAccuracy, ...]
    label: int
    class_name: str
    max_shift: int
    axis: str
    border: str = "zeros"

    @property
    def has_published(self) -> bool:
        """Whether the published curves are of the same class, axis and border."""
        shift = self.axis, self.label, self.border
        return shift == ("x", PUBLISHED_CLASS, "zeros")

    def one_class(self) -> tuple[ShiftCurve, ...]:
        """Returns the curves of the images of the one class that can move both ways.

        Raises:
            ValueError: If there is no such image.
        """
        return curves_of(self.results, self.label)

    def every_class(self) -> tuple[ShiftCurve, ...]:
        """Returns the curves of all images at the shifts that they allow.

        Raises:
            ValueError: If no image allows one of the shifts.
        """
        return curves_of(self.results, None)

    def panels(
        self, curves: Sequence[ShiftCurve], images: str, *, published: bool
    ) -> list[Panel]:
        """Makes a panel of the figure for each data set.

        Args:
            curves: Curves of `one_class` or `every_class`.
            images: The name of these images, for the titles.
            published: Whether to draw the published curves, if they are of the same
                class and axis.

        Returns:
            The panels.
        """
        return [
            Panel(
                title=f"{dataset}, {images}",
                curves=[curve for curve in curves if curve.dataset == dataset],
                published=published and self.has_published,
            )
            for dataset in dict.fromkeys(curve.dataset for curve in curves)
        ]


@dataclasses.dataclass(frozen=True, eq=False)
class ShiftCurve:
    """Accuracy by shift, of one run or of several that differ in their seed.

    Attributes:
        run: The names of the runs.
        dataset: The name of the data set.
        model: The label of the model, see `model_label`.
        published: The model's name in the published figure, or "".
        shifts: Shifts in pixels.
        mean: The accuracy at each shift, averaged over the runs.
        std: The standard deviation over the runs; for a single run, the binomial
            standard deviation sqrt(p (1 - p) / n) of its accuracy p on n images.
        num_images: Number of images at each shift.
        num_runs: Number of runs.
    """

    run: str
    dataset: str
    model: str
    published: str
    shifts: tuple[int, ...]
    mean: Float[np.ndarray, "shifts"]
    std: Float[np.ndarray, "shifts"]
    num_images: Int[np.ndarray, "shifts"]
    num_runs: int

    def at(self, pixels: int) -> tuple[float, float, int]:
        """Returns mean, standard deviation and number of images at one shift."""
        i = self.shifts.index(pixels)
        return float(self.mean[i]), float(self.std[i]), int(self.num_images[i])


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
    hint = f"did you mean {class_names[known.index(similar[0])]!r}? " if similar else ""
    names = ", ".join(class_names) if len(class_names) <= MAX_LISTED else "their names"
    raise ValueError(
        f"unknown class {name!r}: {hint}There are: all, 0 to {len(class_names) - 1}, "
        + names
    )


def model_label(model: str, attention: str, position: str) -> str:
    """Makes a model's label for a legend: its specs without defaults, or its name.

    Args:
        model: Name of the model, used if it has no attention.
        attention: Spec of the attention, or "".
        position: Spec of the position, or ""; ``none`` is left out.

    Returns:
        The label.

    Example:
        >>> model_label("performer", "favor", "constrained_sincos(num_scales=4)")
        'favor + constrained_sincos(num_scales=4)'
        >>> model_label("performer", "favor", "none"), model_label("alexnet", "", "")
        ('favor', 'alexnet')
    """
    positions = [] if position in ("", "none") else [position]
    return " + ".join([attention or model, *positions])


def published_name(model: str, attention: str, position: str) -> str:
    """Returns the name of a model in figure 1 of Horn et al., "" if it is not there.

    Args:
        model: Name of the model.
        attention: Spec of the attention.
        position: Spec of the position.

    Returns:
        The name.

    Example:
        >>> published_name("performer", "favor", "constrained_sincos(num_scales=4)")
        'Rel. S1'
    """
    if model != "performer":
        return ""
    names = {
        ("favor", "none"): "No Pos.",
        ("favor", "learnable_sincos"): "Absolute",
        ("favor", "constrained_sincos"): "Rel. S1",
        ("banded", "none"): "Rel. S2",
    }
    return names.get((parse(attention)[0], parse(position)[0]), "")


def curves_of(
    results: Iterable[ShiftedAccuracy], label: int | None
) -> tuple[ShiftCurve, ...]:
    """Computes accuracy by shift, averaged over runs that differ only in their seed.

    Args:
        results: The results of each run.
        label: A class, to use its images that allow every shift; or None, to use at
            every shift all images that allow it.

    Returns:
        One curve for each recipe, in the order of the results.

    Raises:
        ValueError: If no image is left at one of the shifts.
    """
    groups: dict[tuple[str, str], list[ShiftedAccuracy]] = {}
    for result in results:
        groups.setdefault((result.dataset, result.recipe), []).append(result)
    return tuple(_curve(group, label) for group in groups.values())


def _curve(group: Sequence[ShiftedAccuracy], label: int | None) -> ShiftCurve:
    first = group[0]
    names = first.model, first.attention, first.position
    accuracies, counts = [], []
    for result in group:
        chosen = result.allowed
        if label is not None:
            chosen = chosen & result.both_ways & (result.labels == label)
        count = chosen.sum(axis=1)
        if not count.all():
            pixels = first.shifts[int(count.argmin())]
            what = "test image" if label is None else f"test image of class {label}"
            raise ValueError(
                f"no {what} of {first.dataset} can move {abs(pixels)} pixels without "
                "losing a non-zero one: choose a smaller max_shift"
            )
        accuracies.append((result.correct & chosen).sum(axis=1) / count)
        counts.append(count)
    mean = np.mean(accuracies, axis=0)
    if len(group) > 1:
        std = np.std(accuracies, axis=0, ddof=1)
    else:
        std = np.sqrt(mean * (1 - mean) / counts[0])
    return ShiftCurve(
        run=" ".join(result.run for result in group),
        dataset=first.dataset,
        model=model_label(*names),
        published=published_name(*names),
        shifts=first.shifts,
        mean=mean,
        std=std,
        num_images=counts[0],
        num_runs=len(group),
    )


def published_curve(dataset: str, model: str) -> tuple[list[int], list[float]]:
    """Returns a curve of figure 1 of Horn et al., from its authors' raw results.

    Args:
        dataset: ``"mnist"`` or ``"fashion_mnist"``; others have no curve.
        model: ``"Absolute"``, ``"Rel. S1"``, ``"Rel. S2"`` or ``"No Pos."``.

    Returns:
        Shifts in pixels along x and the accuracies on class 1, both empty if the figure
        has no such curve.

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
    """Returns the published curves of the measured models and data sets.

    Args:
        curves: Measured curves.

    Returns:
        For each published curve the data set, the model's published name and the
        accuracy by shift, at the measured shifts.
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
    """Writes a row for each curve and shift to a CSV file.

    The column ``source`` is ``measured`` or ``published``.

    Args:
        curves: Measured curves.
        path: The file.
        published: Whether to add the published curves. They have no run, standard
            deviation and number of images.
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
        title: The title: data set and images.
        curves: Curves of one data set.
        published: Whether to draw the published curves, dashed.
    """

    title: str
    curves: Sequence[ShiftCurve]
    published: bool = False


def plot(panels: Sequence[Panel], path: Path, *, axis: str = "x") -> None:
    """Plots accuracy against shift, with a band of one standard deviation.

    Args:
        panels: Panels from left to right.
        path: The file; its suffix is the format.
        axis: ``"x"`` or ``"y"``.
    """
    figure = Figure(figsize=(1 + 5 * len(panels), 5), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    lines: dict[str, Line2D] = {}
    colors: dict[str, str] = {}
    for ax, panel in zip(axes, panels, strict=True):
        for curve in panel.curves:
            label = _label(curve, panel.curves)
            color = colors.setdefault(label, f"C{len(colors)}")
            (lines[label],) = ax.plot(curve.shifts, curve.mean, color=color)
            ax.fill_between(
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
                (lines[label],) = ax.plot(shifts, accuracies, "--", color=color, lw=1)
        counts = np.concatenate([curve.num_images for curve in panel.curves])
        images = f"{counts.max():,} images"
        if counts.min() < counts.max():
            images = f"{counts.min():,} to {images}, by shift"
        ax.set(title=panel.title, xlabel=f"shift along {axis} in pixels\n({images})")
        ax.set_ylim(-0.02, 1.02)
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("accuracy")
    figure.legend(
        lines.values(), lines.keys(), loc="outside lower center", ncols=2, frameon=False
    )
    figure.savefig(path, dpi=150)


def table(curves: Sequence[ShiftCurve], *, published: bool = False) -> str:
    """Makes a Markdown table of the curves at five of their shifts.

    Args:
        curves: Curves with the same shifts.
        published: Whether to add the published curves.

    Returns:
        A row for each curve: mean, standard deviation and number of images; for a
        published curve the accuracy.
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
    border: str = "zeros",
    published: bool = False,
) -> str:
    """Summarises the accuracy on one class and, a stricter measure, on all classes.

    Args:
        one_class: Curves of one class, perhaps none.
        every_class: Curves of all classes.
        class_name: The name of the one class.
        max_shift: Largest shift in pixels.
        axis: ``"x"`` or ``"y"``.
        border: What moves into an image.
        published: Whether to add the published curves to those of one class.

    Returns:
        Markdown.
    """
    parts = [f"# Accuracy under shifts along {axis}", f"## Class {class_name}"]
    every = "At every shift, the test images of any class that lose no non-zero pixel "
    every += "by it. Larger shifts use fewer, and different, images."
    one = f"The test images of this class that can move {max_shift} pixels both ways "
    one += "without losing a non-zero pixel."
    if border != "zeros":
        one = "All test images of this class."
        every = f"All test images. {BORDERS[border]}."
    if one_class:
        parts += [
            f"{one} Accuracy on one class favours a model that predicts it too often.",
            table(one_class, published=published),
        ]
    else:
        parts += [
            f"No test image of this class can move {max_shift} pixels both ways "
            "without losing a non-zero pixel."
        ]
    parts += [
        "## All classes",
        every,
        table(every_class),
        "Mean accuracy ± standard deviation (number of images) over the runs that "
        "differ in their seed; for a single run, the binomial sqrt(p (1 - p) / n).",
    ]
    return "\n\n".join(parts) + "\n"


def _label(curve: ShiftCurve, others: Sequence[ShiftCurve]) -> str:
    same = [other for other in others if other.dataset == curve.dataset]
    alike = sum(other.model == curve.model for other in same)
    return f"{curve.model} [{curve.run}]" if alike > 1 else curve.model

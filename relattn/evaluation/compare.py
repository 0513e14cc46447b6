"""Compares trained runs under shifts of the test images."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from ml_collections import ConfigDict

from relattn.data import (
    DataInfo,
    DataSource,
    ImageInfo,
    ImageSplit,
    StreamedSplit,
    input_shape,
    load_data,
)
from relattn.evaluation.shift import (
    ShiftedPredictions,
    check_boundary,
    check_shift,
    shifted_predictions,
)
from relattn.evaluation.shift_curves import FindPublished, ShiftCurve, curves_of
from relattn.evaluation.shift_plots import Panel, plot
from relattn.evaluation.shift_tables import summary, write_csv
from relattn.training.errors import explain_write_errors
from relattn.training.given_data import require_data
from relattn.training.resume import check_fits
from relattn.training.saved_run import SavedRun, open_run
from relattn.training.workdir import usable_folder

SHIFT_CALL = (
    "relattn.evaluation.compare.shift_report(workdirs, output, data=...), and for a "
    "page by relattn.evaluation.page.write_page(workdirs, path, data=...)"
)
# Class names listed in a message.
MAX_LISTED = 20


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
        classes: A class, by name or number, that has its own curves beside those of all
            classes; or ``"all"``, for these alone.
        **options: Options of `compare`.

    Returns:
        The summary, in Markdown.

    Raises:
        ValueError: If an argument does not fit the runs, or no image allows a shift.
        CheckpointError: As for `compare`.
        WorkdirError: If the folder is not writable; raised before any work.
    """
    output = usable_folder(output, "--output")
    class_name = "1" if classes == "all" else classes
    comparison = compare(workdirs, class_name=class_name, **options)
    one_class = () if classes == "all" else comparison.one_class()
    every_class = comparison.every_class()
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
    boundary: str = "zeros",
    data: DataSource | None = None,
    find_published: FindPublished | None = None,
) -> Comparison:
    """Evaluates runs on their test images at every shift, one run after the other.

    Args:
        workdirs: Folders of runs.
        max_shift: Largest shift in pixels, both ways.
        axis: ``"x"``, ``"y"`` or ``"xy"``, every pair of shifts along both.
        class_name: The class that has its own curves, by name or number.
        checkpoint: ``"best"`` or ``"latest"``.
        image_size: Height and width of the images, in pixels, for which the models are
            resized; None for the size of training.
        data_dir: The folder of the data set; None for the folder of training.
        num_images: Number of test images to use, from the first; None for all.
        boundary: What moves into an image: see `shifted_predictions`.
        data: The data set of all runs; None for that of training, unless it was given
            in memory.
        find_published: Returns the published curve of a run, to compare with; None for
            no such curves.

    Returns:
        The classes that each run predicts at each shift.

    Raises:
        ValueError: If an argument does not fit the runs, a run is not of images, or no
            image allows one of the shifts.
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
        check_shift(
            max_shift, axis, input_shape(run.task.config.data, run.task.info)[0]
        )
        check_boundary(boundary, run.task.info.streamed, str(run.workdir))
        check_source(run.given, run.task.info, run.workdir, data, data_dir, SHIFT_CALL)
    infos = [cast(ImageInfo, run.task.info) for run in runs]
    label, title = _one_label(infos, class_name)
    test_splits: dict[str, tuple[Any, DataInfo]] = {}
    results = []
    for run, name in zip(runs, folders, strict=True):
        config = data_config(run.task.config.data, run.workdir, data_dir)
        key = config.to_json() if data is None else ""
        if key not in test_splits:
            found = load_data(config) if data is None else data
            test_splits[key] = _first(found.eval_splits["test"], num_images), found.info
        split, info = test_splits[key]
        check_fits(run.task.info, info, run.workdir)
        results += _predictions(
            run, split, name=name, max_shift=max_shift, axis=axis, boundary=boundary
        )
        # If no image allows a shift, do not wait for the other runs.
        curves_of(results, None)
    return Comparison(
        tuple(results), label, title, max_shift, axis, boundary, find_published
    )


def check_source(
    given: bool,
    info: DataInfo,
    workdir: Path,
    data: DataSource | None,
    data_dir: str | None,
    call: str,
) -> None:
    """Checks that a run's data are given if, and as, they have to be.

    Args:
        given: Whether the training data were given in memory.
        info: Their description.
        workdir: The run directory, for the message.
        data: The data set, if it is given here.
        data_dir: The folder to load it from.
        call: The Python call that takes the data, for the message.

    Raises:
        ValueError: If the data are missing, or given in both ways.
    """
    if data is None:
        require_data(given, info, workdir, call)
    elif data_dir is not None:
        raise ValueError(f"data_dir={data_dir!r} does not apply to data in memory")


def data_config(data: ConfigDict, workdir: Path, data_dir: str | None) -> ConfigDict:
    """Returns the configuration of a run's test images, which may have moved.

    Args:
        data: The run's ``config.data``.
        workdir: The run's folder, for the message.
        data_dir: The folder of the data set; None for the folder of training.

    Raises:
        ValueError: If the images ship with relattn and have no other folder.
    """
    config = ConfigDict(data.to_dict())
    if data_dir is not None:
        if config.source == "embedded":
            raise ValueError(
                f"--data_dir={data_dir} does not apply to {workdir}, which was "
                "trained on images that ship with relattn: leave it out"
            )
        config.data_dir = data_dir
    return config


def _predictions(
    saved: SavedRun, split: Any, *, name: str, **options: Any
) -> list[ShiftedPredictions]:
    """Predicts with every seed of a run; its arrays are in memory only in this call."""
    several = len(saved.seeds) > 1
    return [
        shifted_predictions(
            run, split, name=f"{name}:{run.config.seed}" if several else name, **options
        )
        for run in saved.load()
    ]


def _first(split: Any, num_images: int | None) -> Any:
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
    """The predictions of several runs for shifted images.

    Attributes:
        results: The predictions of each run.
        label: The label of the class that has its own curves.
        class_name: Number and name of this class.
        max_shift: Largest shift in pixels, both ways.
        axis: ``"x"``, ``"y"`` or ``"xy"``.
        boundary: What moves into an image.
        find_published: Returns the published curve of a run.
    """

    results: tuple[ShiftedPredictions, ...]
    label: int
    class_name: str
    max_shift: int
    axis: str
    boundary: str = "zeros"
    find_published: FindPublished | None = None

    def one_class(self) -> tuple[ShiftCurve, ...]:
        """Returns the curves of the images of the one class that can move both ways.

        Raises:
            ValueError: If there is no such image.
        """
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
    hint = f"did you mean {class_names[known.index(similar[0])]!r}? " if similar else ""
    names = ", ".join(class_names) if len(class_names) <= MAX_LISTED else "their names"
    raise ValueError(
        f"unknown class {name!r}: {hint}Available: all, 0 to {len(class_names) - 1}, "
        + names
    )

"""Compares trained runs under shifts of the test images."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

from relattn.data import ImageInfo, ImageSplit, load_images
from relattn.evaluation import report
from relattn.evaluation.curves import ShiftCurve, class_index, curves_of
from relattn.evaluation.shift import ShiftedAccuracy, check_shift, shifted_accuracy
from relattn.training import Run, load_runs
from relattn.training.errors import writing
from relattn.training.records import usable_folder
from relattn.training.run import check_labels

PUBLISHED_CLASS = 1


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """Runs under shifts.

    Attributes:
        results: One a run.
        label: Of the class that is shown alone.
        class_name: Its number and name.
        max_shift: In pixels, both ways.
        axis: ``"x"`` or ``"y"``.
    """

    results: tuple[ShiftedAccuracy, ...]
    label: int
    class_name: str
    max_shift: int
    axis: str

    @property
    def has_published(self) -> bool:
        """Whether the published curves are of the same class and axis."""
        return self.axis == "x" and self.label == PUBLISHED_CLASS

    def one_class(self) -> tuple[ShiftCurve, ...]:
        """Curves of the images of the one class that can move both ways.

        Raises:
            ValueError: If there is no such image.
        """
        return curves_of(self.results, self.label)

    def every_class(self) -> tuple[ShiftCurve, ...]:
        """Curves of all images at the shifts they allow.

        Raises:
            ValueError: If no image allows some shift.
        """
        return curves_of(self.results, None)

    def panels(
        self, curves: Sequence[ShiftCurve], images: str, *, published: bool
    ) -> list[report.Panel]:
        """A panel of the figure for each data set.

        Args:
            curves: From `one_class` or `every_class`.
            images: Which images these are, for the titles.
            published: Whether to draw the published curves where they are of the same
                class and axis.

        Returns:
            The panels.
        """
        return [
            report.Panel(
                title=f"{dataset}, {images}",
                curves=[curve for curve in curves if curve.dataset == dataset],
                published=published and self.has_published,
            )
            for dataset in dict.fromkeys(curve.dataset for curve in curves)
        ]


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
) -> Comparison:
    """Evaluates runs on their test images at every shift.

    Args:
        workdirs: Folders of runs.
        max_shift: In pixels, both ways.
        axis: ``"x"`` or ``"y"``.
        class_name: The class that is shown alone, by name or number.
        checkpoint: ``"best"`` or ``"latest"``.
        image_size: Height and width of the images, in pixels, to which the models are
            resized; None is the size that each was trained on.
        data_dir: Where the data set lies now; None is where it lay in training.
        num_images: Number of test images, the first that there are; None for all.

    Returns:
        What each run classifies rightly.

    Raises:
        ValueError: If an argument does not fit the runs, or a run is not of images.
        CheckpointError: If a folder holds no run with a checkpoint, or the data have
            other classes than a run predicts.
    """
    if not workdirs:
        raise ValueError("no run: name at least one folder by --workdir")
    folders = [Path(workdir).name for workdir in workdirs]
    if len(set(folders)) < len(folders):
        folders = [str(workdir) for workdir in workdirs]
    runs, names = [], []
    for workdir, name in zip(workdirs, folders, strict=True):
        seeds = load_runs(workdir, checkpoint, image_size)
        runs += seeds
        names += [
            f"{name}:{run.config.seed}" if len(seeds) > 1 else name for run in seeds
        ]
    for run in runs:
        if run.data.kind != "images":
            raise ValueError(
                f"{run.workdir} was trained on {run.data.kind}: only runs on images "
                "can be shifted"
            )
        check_shift(max_shift, axis, run.config.data.image_size)
    label, title = _one_label(runs, class_name)
    tests: dict[str, tuple[ImageSplit, ImageInfo]] = {}
    results = []
    for run, name in zip(runs, names, strict=True):
        config = ConfigDict(run.config.data.to_dict())
        if data_dir is not None:
            if config.source == "embedded":
                raise ValueError(
                    f"--data_dir={data_dir} is not for {run.workdir}, which was "
                    "trained on images that ship with relattn: leave it out"
                )
            config.data_dir = data_dir
        key = config.to_json()
        if key not in tests:
            data = load_images(config)
            tests[key] = _first(data.test, num_images), data.info
        split, info = tests[key]
        _check_data(run, info)
        results.append(
            shifted_accuracy(run, split, name=name, max_shift=max_shift, axis=axis)
        )
    return Comparison(tuple(results), label, title, max_shift, axis)


def shift_report(
    workdirs: Sequence[str | Path],
    output: str | Path,
    *,
    classes: str = "1",
    **options,
) -> str:
    """Writes ``shift.csv``, ``shift.png`` and ``summary.md`` about runs under shifts.

    Args:
        workdirs: Folders of runs. Those that differ only in their seed are averaged.
        output: The folder to write to.
        classes: ``"all"``, or the class of the curves, by name or number; with
            ``"all"`` the summary's one class is 1.
        **options: Of `compare`.

    Returns:
        The summary, in Markdown. It states the curves of one class and of all.

    Raises:
        ValueError: If an argument does not fit the runs, or no image can be shifted so.
        CheckpointError: As `compare` says.
        WorkdirError: If the folder cannot be written to, before any work.
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
    text = report.summary(
        one_class,
        every_class,
        class_name=comparison.class_name,
        max_shift=comparison.max_shift,
        axis=comparison.axis,
        published=comparison.has_published,
    )
    panels = comparison.panels(shown, images, published=classes != "all")
    with writing(output):
        published = classes != "all" and comparison.has_published
        report.write_csv(shown, output / "shift.csv", published=published)
        report.plot(panels, output / "shift.png", axis=comparison.axis)
        (output / "summary.md").write_text(text, "utf-8")
    return text


def _check_data(run: Run, info: ImageInfo) -> None:
    check_labels(run.data, info, run.workdir)
    channels, given = run.data.image_shape[2], info.image_shape[2]
    if channels != given:
        raise ValueError(
            f"{run.workdir} sees images of {channels} channels, but those of "
            f"{info.name} have {given}: use the data that it was trained on"
        )


def _first(split: ImageSplit, num_images: int | None) -> ImageSplit:
    if num_images is None:
        return split
    if not 1 <= num_images <= len(split):
        raise ValueError(
            f"num_images={num_images} must be from 1 to {len(split)}, the number of "
            "test images"
        )
    return ImageSplit(split.images[:num_images], split.labels[:num_images])


def _one_label(runs: Sequence[Run], class_name: str) -> tuple[int, str]:
    labels = [class_index(class_name, run.data.class_names) for run in runs]
    if len(set(labels)) > 1:
        raise ValueError(
            f"class {class_name!r} has different labels in the runs' data sets: give "
            "its number"
        )
    titles = dict.fromkeys(run.data.class_names[labels[0]] for run in runs)
    return labels[0], f"{labels[0]} ({', '.join(titles)})"

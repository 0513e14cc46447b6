"""Computes accuracy and consistency by shift, averaged over the seeds of a recipe."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int

from relattn.evaluation.shift import NOT_ALLOWED, Shift, ShiftedPredictions

# What is measured at each shift, in the order of tables and figures.
MEASURES = ("accuracy", "consistency")


@dataclasses.dataclass(frozen=True, eq=False)
class ShiftMetrics:
    """Accuracy and consistency on the shifted images, at each of some shifts or at one.

    Means and standard deviations are over runs; for a single run, the standard
    deviation is the binomial sqrt(p (1 - p) / n) of a fraction p of n images.

    Attributes:
        accuracy: Fraction of the images that are classified correctly.
        accuracy_std: Its standard deviation.
        consistency: Fraction of the images whose predicted class is that of the
            unshifted image.
        consistency_std: Its standard deviation.
        num_images: Number of images.
    """

    accuracy: Float[np.ndarray, "*shifts"]
    accuracy_std: Float[np.ndarray, "*shifts"]
    consistency: Float[np.ndarray, "*shifts"]
    consistency_std: Float[np.ndarray, "*shifts"]
    num_images: Int[np.ndarray, "*shifts"]


@dataclasses.dataclass(frozen=True)
class PublishedCurve:
    """A published curve of accuracy by shift, to compare with.

    Attributes:
        name: The model's name in its publication.
        accuracy: The accuracy at each shift.
    """

    name: str
    accuracy: Mapping[Shift, float]


# Returns the published curve of a run on the images of a class (None: of all classes),
# or None without one.
FindPublished = Callable[[ShiftedPredictions, int | None], PublishedCurve | None]


@dataclasses.dataclass(frozen=True, eq=False)
class ShiftCurve:
    """Accuracy and consistency by shift, of one run or of several seeds.

    Attributes:
        run: The names of the runs.
        dataset: The name of the data set.
        model: The label of the model, with the number of draws if it is more than one.
        label: The class of the images, None for all classes.
        published: The published curve of the model on the same images, None without
            one.
        shifts: Shifts (dx, dy) in pixels.
        metrics: The metrics at each shift.
        random: The metrics under random shifts: of all pairs of an image and a random
            shift that it allows, NaN without any; ``num_images`` counts the images.
        num_runs: Number of runs.
    """

    run: str
    dataset: str
    model: str
    label: int | None
    published: PublishedCurve | None
    shifts: tuple[Shift, ...]
    metrics: ShiftMetrics
    random: ShiftMetrics
    num_runs: int

    def at(self, shift: Shift) -> ShiftMetrics:
        """Returns the metrics at one of the shifts."""
        i = self.shifts.index(shift)
        return ShiftMetrics(*(values[i, ...] for values in vars(self.metrics).values()))


def _model_label(model: str, attention: str, position: str) -> str:
    """Makes a model's label for a legend: its specs without defaults, or its name.

    Example:
        >>> _model_label("performer", "favor", "constrained_sincos(num_scales=4)")
        'favor + constrained_sincos(num_scales=4)'
        >>> _model_label("performer", "favor", "none"), _model_label("alexnet", "", "")
        ('favor', 'alexnet')
    """
    positions = [] if position in ("", "none") else [position]
    return " + ".join([attention or model, *positions])


def curve_label(curve: ShiftCurve, others: Sequence[ShiftCurve]) -> str:
    """Returns a curve's model, with its runs if another curve has the same model.

    Args:
        curve: A curve.
        others: The curves of the same table or figure.

    Returns:
        The label.
    """
    same = [other for other in others if other.dataset == curve.dataset]
    alike = sum(other.model == curve.model for other in same)
    return f"{curve.model} [{curve.run}]" if alike > 1 else curve.model


def curves_of(
    results: Iterable[ShiftedPredictions],
    label: int | None,
    find_published: FindPublished | None = None,
) -> tuple[ShiftCurve, ...]:
    """Computes the metrics by shift, averaged over runs that differ only in their seed.

    Args:
        results: The predictions of each run.
        label: A class, to use its images that allow every shift; or None, to use at
            every shift all images that allow it.
        find_published: Returns the published curve of a run; None for no such curves.

    Returns:
        One curve for each recipe, in the order of the results.

    Raises:
        ValueError: If no image is left at one of the shifts.
    """
    groups: dict[tuple[str, str, int], list[ShiftedPredictions]] = {}
    for result in results:
        key = result.dataset, result.recipe, result.draws
        groups.setdefault(key, []).append(result)
    return tuple(_curve(group, label, find_published) for group in groups.values())


def _curve(
    group: Sequence[ShiftedPredictions],
    label: int | None,
    find_published: FindPublished | None,
) -> ShiftCurve:
    first = group[0]
    names = first.model, first.attention, first.position
    name_of_model = " + ".join([_model_label(*names), *first.settings])
    if first.draws > 1:
        name_of_model += f", mean of {first.draws} draws"
    by_shift, random = [], []
    for result in group:
        images = np.ones(len(result.labels), bool)
        if label is not None:
            images = result.labels == label
            if not images.any():
                raise ValueError(
                    f"none of the {len(images)} test images of {first.dataset} is of "
                    f"class {label}: choose another by --classes, or a larger "
                    "--num_images"
                )
            images &= result.all_allowed
        chosen = (result.predicted != NOT_ALLOWED) & images
        count = chosen.sum(axis=1)
        if not count.all():
            dx, dy = first.shifts[int(count.argmin())]
            what = "test image" if label is None else f"test image of class {label}"
            raise ValueError(
                f"no {what} of {first.dataset} can move {_distance(dx, dy)} without "
                "losing a non-zero pixel: choose a smaller --max_shift, "
                "--boundary=circular or a larger --num_images"
            )
        right, same = (
            ((result.predicted == classes) & chosen).sum(axis=1) / count
            for classes in (result.labels, result.unshifted)
        )
        by_shift.append((right, same, count))
        random.append(_random_metrics(result, images))
    return ShiftCurve(
        run=" ".join(result.run for result in group),
        dataset=first.dataset,
        model=name_of_model,
        label=label,
        published=find_published(first, label) if find_published else None,
        shifts=first.shifts,
        metrics=_average(by_shift),
        random=_average(random),
        num_runs=len(group),
    )


def _distance(dx: int, dy: int) -> str:
    distances = [f"{abs(dx)} pixels along x"] if dx else []
    distances += [f"{abs(dy)} pixels along y"] if dy else []
    return " and ".join(distances) or "0 pixels"


def _random_metrics(
    result: ShiftedPredictions, images: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns accuracy, consistency and the number of images under random shifts."""
    chosen = (result.random_predicted != NOT_ALLOWED) & images
    # The mean of no pairs is NaN.
    pairs = chosen.sum() or np.nan
    right, same = (
        np.asarray(((result.random_predicted == classes) & chosen).sum() / pairs)
        for classes in (result.labels, result.unshifted)
    )
    return right, same, np.asarray(chosen.any(axis=0).sum())


def _average(runs: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> ShiftMetrics:
    """Averages accuracies and consistencies over runs."""
    *measured, counts = map(np.stack, zip(*runs, strict=True))
    statistics = []
    for values in measured:
        mean = values.mean(axis=0)
        if len(values) > 1:
            std = values.std(axis=0, ddof=1)
        else:
            # NaN where there is no image.
            std = np.sqrt(mean * (1 - mean) / np.maximum(counts[0], 1))
        statistics += [np.asarray(mean), np.asarray(std)]
    return ShiftMetrics(*statistics, num_images=counts[0, ...])


def to_print(measure: str, value: float) -> float:
    """Returns a value of one of `MEASURES` as it is printed.

    Consistency is rounded down to three digits, so that only 1 is printed as 1.

    Example:
        >>> to_print("consistency", 0.9996), to_print("consistency", 1.0)
        (0.999, 1.0)
        >>> to_print("accuracy", 0.9996)
        0.9996
    """
    if measure == "consistency":
        return math.floor(1000 * value + 1e-6) / 1000
    return value


def published_curves(
    curves: Sequence[ShiftCurve],
) -> list[tuple[ShiftCurve, PublishedCurve]]:
    """Returns the published curves, each once, at the measured shifts.

    Args:
        curves: Measured curves.

    Returns:
        Each published curve, after the first of the measured curves that have it.
    """
    found: dict[tuple[str, str], tuple[ShiftCurve, PublishedCurve]] = {}
    for curve in curves:
        if curve.published is None:
            continue
        name, known = curve.published.name, curve.published.accuracy
        accuracy = {shift: known[shift] for shift in curve.shifts if shift in known}
        if accuracy:
            pair = curve, PublishedCurve(name, accuracy)
            found.setdefault((curve.dataset, name), pair)
    return list(found.values())

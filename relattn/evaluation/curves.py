"""Curves of accuracy against shift, over the runs of a recipe."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float, Int

from relattn.evaluation.shift import ShiftedAccuracy
from relattn.spec import parse

MAX_LISTED = 20


@dataclasses.dataclass(frozen=True, eq=False)
class ShiftCurve:
    """Accuracy against shift, of one run or of several that differ in their seed.

    Attributes:
        run: The runs' names.
        dataset: The data set's name.
        model: What tells the model from others.
        published: The model's name in the published figure, "" where it has none.
        shifts: In pixels.
        mean: The accuracy at each shift, averaged over the runs.
        std: The standard deviation over the runs; of a single run, the binomial
            standard deviation sqrt(p (1 - p) / n) of its accuracy p on n images.
        num_images: Per shift.
        num_runs: The number of runs.
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
        """Mean, standard deviation and number of images at one shift."""
        i = self.shifts.index(pixels)
        return float(self.mean[i]), float(self.std[i]), int(self.num_images[i])


def class_index(name: str, class_names: Sequence[str]) -> int:
    """The class that a name or a number means.

    Args:
        name: ``"1"`` or, in any case, ``"trouser"``.
        class_names: In the order of the labels.

    Returns:
        The label.

    Raises:
        ValueError: If there is no such class; names the closest.

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
    """What tells a model from others: its specs, without the defaults, or its name.

    Args:
        model: Name of the model; one that has an attention goes by it.
        attention: Spec of the attention, or ""; a plain ``favor`` goes without saying.
        position: Spec of the position, or ""; ``none`` goes without saying.

    Returns:
        A label for a legend.

    Example:
        >>> model_label("performer", "favor", "constrained_sincos(num_scales=4)")
        'constrained_sincos(num_scales=4)'
        >>> model_label("performer", "banded(clip=6)", "none")
        'banded(clip=6)'
        >>> model_label("performer", "favor", "none"), model_label("alexnet", "", "")
        ('none', 'alexnet')
    """
    attentions = [] if attention == "favor" else [attention or model]
    positions = [] if position in ("", "none") else [position]
    return " + ".join(attentions + positions) or "none"


def published_name(model: str, attention: str, position: str) -> str:
    """The name of a model in figure 1 of Horn et al., "" where it is not there.

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
    """Accuracy against shift, runs that differ only in their seed taken together.

    Args:
        results: One a run.
        label: The images of this class that allow every shift; or None: at every shift
            all the images that allow it, of any class.

    Returns:
        One curve a recipe, in the order of the results.

    Raises:
        ValueError: If no image is left at some shift.
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

"""The curves of figure 1 of Horn et al.: accuracy on shifted images of class 1."""

from __future__ import annotations

from relattn.evaluation.shift import ShiftedPredictions
from relattn.evaluation.shift_curves import PublishedCurve
from relattn.spec import parse
from studies.published import read_published

# The digit 1, and trousers.
LABEL = 1


def published_name(model: str, attention: str, position: str) -> str:
    """Returns the name of a model in the figure, "" if it is not there.

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
        # The same score, without the error of the random features.
        ("favor", "sincos_bias"): "Rel. S1",
        ("banded", "none"): "Rel. S2",
    }
    return names.get((parse(attention)[0], parse(position)[0]), "")


def published_accuracies(dataset: str, name: str) -> dict[int, float]:
    """Reads a curve of the figure, from its authors' raw results.

    Args:
        dataset: ``"mnist"`` or ``"fashion_mnist"``; others have no curve.
        name: ``"Absolute"``, ``"Rel. S1"``, ``"Rel. S2"`` or ``"No Pos."``.

    Returns:
        The accuracy on class 1 by the shift along x in pixels; empty if the figure has
        no such curve.

    Example:
        >>> published_accuracies("fashion_mnist", "Rel. S1")[-8]
        0.8963
    """
    return {
        int(row["shift_px"]): float(row["accuracy"])
        for row in read_published("performer_figure1")
        if (row["dataset"], row["model"]) == (dataset, name)
    }


def published_curve(
    result: ShiftedPredictions, label: int | None
) -> PublishedCurve | None:
    """Returns the curve of a run's model in the figure.

    Args:
        result: The predictions of the run.
        label: The class of its images, None for all classes.

    Returns:
        The curve, None if the figure does not have the model, or shows other images or
        shifts.
    """
    horizontal = all(dy == 0 for _, dy in result.shifts)
    zeros = result.boundary == "zeros" and not result.settings
    if label != LABEL or not horizontal or not zeros:
        return None
    name = published_name(result.model, result.attention, result.position)
    accuracies = published_accuracies(result.dataset, name)
    if not accuracies:
        return None
    return PublishedCurve(name, {(dx, 0): value for dx, value in accuracies.items()})

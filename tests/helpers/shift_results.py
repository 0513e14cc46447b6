"""Predictions under shifts, for the tests of what is made of them."""

import numpy as np

from relattn.evaluation.shift import NOT_ALLOWED, ShiftedPredictions, shifts_along
from relattn.evaluation.shift_curves import PublishedCurve

# Whether each of four images is classified correctly, at the shifts -1, 0 and 1.
ONE = [[1, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]]
TWO = [[0, 0, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]


def result(correct, *, seed=0, labels=(1, 1, 0, 1), recipe="a", axis="x"):
    """The last image does not allow the first shift; the wrong class is 7."""
    predicted = np.where(correct, labels, 7)
    predicted[0, 3] = NOT_ALLOWED
    return ShiftedPredictions(
        run=f"run{seed}",
        dataset="mnist",
        model="performer",
        attention="favor",
        position="none",
        recipe=recipe,
        shifts=shifts_along(axis, 1),
        predicted=predicted,
        random_predicted=predicted[-1:],
        labels=np.array(labels),
    )


def find_published(result, label):
    """Class 1 has a curve, also at a shift that is not measured."""
    accuracies = {-2: 0.125, -1: 0.25, 0: 0.75, 1: 0.5}
    accuracies = {(dx, 0): value for dx, value in accuracies.items()}
    return PublishedCurve("Known", accuracies) if label == 1 else None

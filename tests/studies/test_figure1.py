"""The published curves of figure 1 of Horn et al."""

import dataclasses

import pytest

from relattn.evaluation.shift import shifts_along
from studies.figure1 import published_accuracies, published_curve
from tests.helpers.shift_results import ONE, result


@pytest.mark.parametrize("dataset", ["mnist", "fashion_mnist"])
def test_the_published_curves_are_there(dataset):
    accuracies = published_accuracies(dataset, "Absolute")
    assert list(accuracies) == list(range(-8, 9))
    assert max(accuracies.values()) > 0.99
    assert published_accuracies("cifar10", "Absolute") == {}


def test_a_curve_has_all_shifts_of_the_figure():
    curve = published_curve(result(ONE), 1)
    assert curve.name == "No Pos."
    assert tuple(curve.accuracy) == shifts_along("x", 8)
    accuracies = published_accuracies("mnist", "No Pos.")
    assert list(curve.accuracy.values()) == list(accuracies.values())


@pytest.mark.parametrize(
    "changes, label",
    [
        ({}, None),
        ({}, 0),
        ({"shifts": shifts_along("y", 1)}, 1),
        ({"boundary": "circular"}, 1),
        ({"settings": ("torus", "polyphase")}, 1),
        ({"dataset": "cifar10"}, 1),
        ({"model": "vit"}, 1),
        ({"position": "learned"}, 1),
    ],
)
def test_other_models_images_and_shifts_have_no_curve(changes, label):
    assert published_curve(dataclasses.replace(result(ONE), **changes), label) is None

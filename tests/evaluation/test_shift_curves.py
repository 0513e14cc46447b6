import dataclasses

import chex
import numpy as np
import pytest

from relattn.evaluation.shift_curves import (
    curves_of,
    published_curve,
    published_curves,
)
from tests.helpers.shift_results import ONE, TWO, result


def test_a_class_uses_the_images_that_move_both_ways():
    (curve,) = curves_of([result(ONE)], 1)
    assert curve.shares.num_images.tolist() == [2, 2, 2]
    chex.assert_trees_all_close(curve.shares.accuracy, np.array([0.5, 1.0, 0.0]))
    expected = np.array([0.5 / np.sqrt(2), 0.0, 0.0])
    chex.assert_trees_all_close(curve.shares.accuracy_std, expected)


def test_all_classes_use_what_each_shift_allows():
    (curve,) = curves_of([result(ONE)], None)
    assert curve.shares.num_images.tolist() == [3, 4, 4]
    chex.assert_trees_all_close(curve.shares.accuracy, np.array([2 / 3, 1.0, 0.0]))


def test_consistency_compares_with_the_unshifted_image():
    """It does not depend on the labels: a wrong prediction may stay the same."""
    wrong = np.array([[1, 2, 3, -1], [1, 2, 5, 4], [7, 2, 5, 3]])
    changed = dataclasses.replace(result(ONE), predicted=wrong)
    (curve,) = curves_of([changed], None)
    chex.assert_trees_all_close(curve.shares.consistency, np.array([2 / 3, 1, 0.5]))
    expected = np.array([np.sqrt(2 / 27), 0, 0.25])
    chex.assert_trees_all_close(curve.shares.consistency_std, expected)
    (curve,) = curves_of([changed], 1)
    chex.assert_trees_all_close(curve.shares.consistency, np.array([1, 1, 0.5]))


def test_random_shifts_count_the_pairs_that_are_allowed():
    random = np.array([[1, 2, -1, 4], [1, -1, -1, 1], [3, -1, -1, 4]])
    predicted = np.array([[1, 2, 3, -1], [1, 1, 5, 4], [7, 2, 5, 3]])
    changes = {"predicted": predicted, "random_predicted": random}
    changed = dataclasses.replace(result(ONE), **changes)
    (curve,) = curves_of([changed], None)
    # Labels 1, 1, 0, 1; unshifted 1, 1, 5, 4.
    assert curve.random.num_images == 3
    assert curve.random.accuracy == pytest.approx(3 / 7)
    assert curve.random.consistency == pytest.approx(4 / 7)
    assert curve.random.consistency_std == pytest.approx(np.sqrt(4 / 49))
    (curve,) = curves_of([changed], 1)  # The first two images allow every shift.
    assert curve.random.num_images == 2
    assert curve.random.consistency == pytest.approx(2 / 4)
    none = dataclasses.replace(changed, random_predicted=np.full((3, 4), -1))
    (curve,) = curves_of([none], 1)
    assert curve.random.num_images == 0 and np.isnan(curve.random.consistency)


def test_runs_that_differ_in_their_seed_are_averaged():
    (curve,) = curves_of([result(ONE), result(TWO, seed=1)], 1)
    assert (curve.run, curve.num_runs) == ("run0 run1", 2)
    mean, std = np.array([0.25, 1.0, 0.5]), np.array([0.5, 0.0, 1.0]) / np.sqrt(2)
    chex.assert_trees_all_close(curve.shares.accuracy, mean)
    chex.assert_trees_all_close(curve.shares.accuracy_std, std)
    # Everything is predicted correctly when unshifted.
    chex.assert_trees_all_close(curve.shares.consistency, mean)
    chex.assert_trees_all_close(curve.shares.consistency_std, std)
    two = curves_of([result(ONE), result(TWO, seed=1, recipe="b")], 1)
    assert [curve.run for curve in two] == ["run0", "run1"]


def test_no_image_to_shift_is_an_error():
    message = "no test image of class 0 of mnist can move 1 pixels along x without"
    with pytest.raises(ValueError, match=message):
        curves_of([result(ONE, labels=(1, 1, 1, 1))], 0)
    shifts = tuple((dx, 2 * dx) for dx, _ in result(ONE).shifts)
    both = dataclasses.replace(result(ONE, labels=(1, 1, 1, 1)), shifts=shifts)
    with pytest.raises(ValueError, match="move 1 pixels along x and 2 pixels along y"):
        curves_of([both], 0)


def test_the_published_curves_are_those_of_the_measured_shifts():
    (curve,) = curves_of([result(ONE)], 1)
    known = dict(zip(*published_curve("mnist", "No Pos."), strict=True))
    expected = {(dx, 0): known[dx] for dx in (-1, 0, 1)}
    assert published_curves([curve]) == [("mnist", "No Pos.", expected)]
    far = dataclasses.replace(curve, shifts=((-9, 0), (0, 0)))
    assert [list(by_shift) for *_, by_shift in published_curves([far])] == [[(0, 0)]]


@pytest.mark.parametrize(
    "found, label",
    [
        (result(ONE), None),
        (result(ONE), 0),
        (result(ONE, axis="y"), 1),
        (dataclasses.replace(result(ONE), boundary="circular"), 1),
    ],
)
def test_other_images_and_shifts_have_no_published_curve(found, label):
    (curve,) = curves_of([found], label)
    assert (curve.published, curve.label) == ("", label)


def test_a_model_without_a_published_curve_has_none():
    (curve,) = curves_of([result(ONE)], 1)
    other = dataclasses.replace(curve, published="")
    elsewhere = dataclasses.replace(curve, dataset="cifar10")
    assert published_curves([other]) == published_curves([elsewhere]) == []


def test_a_torus_is_in_the_label_and_has_no_published_curve():
    exact = dataclasses.replace(result(ONE), settings=("torus", "polyphase"))
    (curve,) = curves_of([exact], 1)
    assert (curve.model, curve.published) == ("favor + torus + polyphase", "")


@pytest.mark.parametrize("dataset", ["mnist", "fashion_mnist"])
def test_the_published_curves_are_there(dataset):
    shifts, accuracies = published_curve(dataset, "Absolute")
    assert shifts == list(range(-8, 9))
    assert max(accuracies) > 0.99
    assert published_curve("cifar10", "Absolute") == ([], [])

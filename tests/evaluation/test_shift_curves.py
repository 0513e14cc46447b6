import dataclasses

import chex
import numpy as np
import pytest

from relattn.evaluation.shift_curves import (
    PublishedCurve,
    curves_of,
    published_curves,
)
from tests.helpers.shift_results import ONE, TWO, find_published, result


def test_a_class_uses_the_images_that_move_both_ways():
    (curve,) = curves_of([result(ONE)], 1)
    assert curve.metrics.num_images.tolist() == [2, 2, 2]
    chex.assert_trees_all_close(curve.metrics.accuracy, np.array([0.5, 1.0, 0.0]))
    expected = np.array([0.5 / np.sqrt(2), 0.0, 0.0])
    chex.assert_trees_all_close(curve.metrics.accuracy_std, expected)


def test_all_classes_use_what_each_shift_allows():
    (curve,) = curves_of([result(ONE)], None)
    assert curve.metrics.num_images.tolist() == [3, 4, 4]
    chex.assert_trees_all_close(curve.metrics.accuracy, np.array([2 / 3, 1.0, 0.0]))


def test_consistency_compares_with_the_unshifted_image():
    """It does not depend on the labels: a wrong prediction may stay the same."""
    wrong = np.array([[1, 2, 3, -1], [1, 2, 5, 4], [7, 2, 5, 3]])
    changed = dataclasses.replace(result(ONE), predicted=wrong)
    (curve,) = curves_of([changed], None)
    chex.assert_trees_all_close(curve.metrics.consistency, np.array([2 / 3, 1, 0.5]))
    expected = np.array([np.sqrt(2 / 27), 0, 0.25])
    chex.assert_trees_all_close(curve.metrics.consistency_std, expected)
    (curve,) = curves_of([changed], 1)
    chex.assert_trees_all_close(curve.metrics.consistency, np.array([1, 1, 0.5]))


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


def test_other_numbers_of_draws_have_other_curves():
    several = dataclasses.replace(result(TWO), draws=4)
    one, mean = curves_of([result(ONE), several], None)
    assert (one.model, mean.model) == ("favor", "favor, mean of 4 draws")
    assert one.num_runs == mean.num_runs == 1


def test_runs_that_differ_in_their_seed_are_averaged():
    (curve,) = curves_of([result(ONE), result(TWO, seed=1)], 1)
    assert (curve.run, curve.num_runs) == ("run0 run1", 2)
    mean, std = np.array([0.25, 1.0, 0.5]), np.array([0.5, 0.0, 1.0]) / np.sqrt(2)
    chex.assert_trees_all_close(curve.metrics.accuracy, mean)
    chex.assert_trees_all_close(curve.metrics.accuracy_std, std)
    # Everything is predicted correctly when unshifted.
    chex.assert_trees_all_close(curve.metrics.consistency, mean)
    chex.assert_trees_all_close(curve.metrics.consistency_std, std)
    two = curves_of([result(ONE), result(TWO, seed=1, recipe="b")], 1)
    assert [curve.run for curve in two] == ["run0", "run1"]


def test_no_image_to_shift_is_an_error():
    message = "no test image of class 0 of mnist can move 1 pixels along x without"
    with pytest.raises(ValueError, match=message):
        curves_of([result(ONE, labels=(1, 1, 1, 0))], 0)
    shifts = tuple((dx, 2 * dx) for dx, _ in result(ONE).shifts)
    both = dataclasses.replace(result(ONE, labels=(1, 1, 1, 0)), shifts=shifts)
    with pytest.raises(ValueError, match="move 1 pixels along x and 2 pixels along y"):
        curves_of([both], 0)
    message = "^none of the 4 test images of mnist is of class 2: choose another by"
    with pytest.raises(ValueError, match=message):
        curves_of([result(ONE)], 2)


def test_a_published_curve_is_looked_up_by_run_and_class():
    asked = []

    def find(*arguments):
        asked.append(arguments)
        return find_published(*arguments)

    runs = [result(ONE), result(TWO, seed=1), result(ONE, seed=2, recipe="b")]
    curves = [*curves_of(runs, 1, find), *curves_of(runs, None, find)]
    assert asked == [(runs[0], 1), (runs[2], 1), (runs[0], None), (runs[2], None)]
    assert [curve.published is None for curve in curves] == [False] * 2 + [True] * 2
    assert {curve.published for curve in curves_of(runs, 1)} == {None}


def test_published_curves_are_those_of_the_measured_shifts():
    (curve,) = curves_of([result(ONE)], 1, find_published)
    expected = {(-1, 0): 0.25, (0, 0): 0.75, (1, 0): 0.5}
    found = published_curves([curve, dataclasses.replace(curve, model="other")])
    assert found == [(curve, PublishedCurve("Known", expected))]
    far = dataclasses.replace(curve, shifts=((-9, 0), (0, 0)))
    ((_, published),) = published_curves([far])
    assert published.accuracy == {(0, 0): 0.75}
    farther = dataclasses.replace(curve, shifts=((-9, 0),))
    none = dataclasses.replace(curve, published=None)
    assert published_curves([farther, none]) == []
    elsewhere = dataclasses.replace(curve, dataset="cifar10")
    assert len(published_curves([curve, elsewhere])) == 2


def test_a_torus_is_in_the_label():
    exact = dataclasses.replace(result(ONE), settings=("torus", "polyphase"))
    (curve,) = curves_of([exact], 1)
    assert curve.model == "favor + torus + polyphase"

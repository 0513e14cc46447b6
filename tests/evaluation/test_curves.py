import csv
import dataclasses

import chex
import numpy as np
import pytest

from relattn.evaluation.curves import class_index, curves_of
from relattn.evaluation.report import (
    published_curve,
    published_curves,
    summary,
    table,
    write_csv,
)
from relattn.evaluation.shift import ShiftedAccuracy


@pytest.mark.parametrize(("name", "label"), [("0", 0), ("2", 2), ("BAG", 2), ("7", 1)])
def test_a_class_goes_by_number_or_name(name, label):
    assert class_index(name, ("coat", "7", "Bag")) == label


def test_unknown_class_is_refused_with_the_closest():
    message = "unknown class 'trousers': did you mean 'Trouser'"
    with pytest.raises(ValueError, match=message):
        class_index("trousers", ("Dress", "Trouser"))
    with pytest.raises(ValueError, match="unknown class '2'.* 0 to 1, Dress, Trouser"):
        class_index("2", ("Dress", "Trouser"))


def result(correct, *, seed=0, labels=(1, 1, 0, 1), recipe="a"):
    shape = np.shape(correct)
    allowed = np.ones(shape, bool)
    allowed[0, 3] = False
    return ShiftedAccuracy(
        run=f"run{seed}",
        dataset="mnist",
        model="performer",
        attention="favor",
        position="none",
        recipe=recipe,
        shifts=(-1, 0, 1),
        correct=np.array(correct, bool) & allowed,
        allowed=allowed,
        both_ways=allowed.all(axis=0),
        labels=np.array(labels),
    )


ONE = [[1, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]]
TWO = [[0, 0, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]


def test_a_class_uses_the_images_that_move_both_ways():
    (curve,) = curves_of([result(ONE)], 1)
    assert curve.num_images.tolist() == [2, 2, 2]
    chex.assert_trees_all_close(curve.mean, np.array([0.5, 1.0, 0.0]))
    chex.assert_trees_all_close(curve.std, np.array([0.5 / np.sqrt(2), 0.0, 0.0]))


def test_all_classes_use_what_each_shift_allows():
    (curve,) = curves_of([result(ONE)], None)
    assert curve.num_images.tolist() == [3, 4, 4]
    chex.assert_trees_all_close(curve.mean, np.array([2 / 3, 1.0, 0.0]))


def test_runs_that_differ_in_their_seed_are_averaged():
    (curve,) = curves_of([result(ONE), result(TWO, seed=1)], 1)
    assert (curve.run, curve.num_runs) == ("run0 run1", 2)
    chex.assert_trees_all_close(curve.mean, np.array([0.25, 1.0, 0.5]))
    chex.assert_trees_all_close(curve.std, np.array([0.5, 0.0, 1.0]) / np.sqrt(2))
    two = curves_of([result(ONE), result(TWO, seed=1, recipe="b")], 1)
    assert [curve.run for curve in two] == ["run0", "run1"]
    assert "| none [run1] |" in table(two).replace("| mnist ", "")


def test_no_image_to_shift_is_an_error():
    with pytest.raises(ValueError, match="no test image of class 0 of mnist can move"):
        curves_of([result(ONE, labels=(1, 1, 1, 1))], 0)


def test_the_published_curves_are_written_once_beside_the_measured_ones(tmp_path):
    curves = curves_of([result(ONE), result(TWO, seed=1, recipe="b")], 1)
    rows = {}
    for published in (False, True):
        write_csv(curves, tmp_path / "shift.csv", published=published)
        with (tmp_path / "shift.csv").open() as file:
            rows[published] = list(csv.DictReader(file))
    assert {row["source"] for row in rows[False]} == {"measured"}
    assert rows[True][:6] == rows[False]
    known = dict(zip(*published_curve("mnist", "No Pos."), strict=True))
    assert rows[True][6:] == [
        {
            "run": "",
            "dataset": "mnist",
            "model": "No Pos.",
            "shift_px": str(shift),
            "accuracy_mean": f"{known[shift]:.6f}",
            "accuracy_std": "",
            "num_images": "",
            "source": "published",
        }
        for shift in (-1, 0, 1)
    ]
    line = f"| mnist | No Pos. (published) | – | {known[-1]:.3f} |"
    assert line in table(curves, published=True) and line not in table(curves)
    text = summary(
        curves, curves, class_name="1", max_shift=1, axis="x", published=True
    )
    assert text.count(line) == 1


def test_a_model_without_a_published_curve_has_none():
    (curve,) = curves_of([result(ONE)], 1)
    other = dataclasses.replace(curve, published="")
    elsewhere = dataclasses.replace(curve, dataset="cifar10")
    assert published_curves([other]) == published_curves([elsewhere]) == []
    far = dataclasses.replace(curve, shifts=(-9, 0, 9))
    assert [list(by_shift) for *_, by_shift in published_curves([far])] == [[0]]


@pytest.mark.parametrize("dataset", ["mnist", "fashion_mnist"])
def test_the_published_curves_are_there(dataset):
    shifts, accuracies = published_curve(dataset, "Absolute")
    assert shifts == list(range(-8, 9))
    assert max(accuracies) > 0.99
    assert published_curve("cifar10", "Absolute") == ([], [])

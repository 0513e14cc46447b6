import csv
import dataclasses

import numpy as np
import pytest

from relattn.evaluation.shift import shifts_along
from relattn.evaluation.shift_curves import curves_of
from relattn.evaluation.shift_tables import summary, table, write_csv
from tests.helpers.shift_results import ONE, TWO, find_published, result


def rows_of(curves, path):
    write_csv(curves, path)
    with path.open() as file:
        return list(csv.DictReader(file))


def test_csv_has_a_row_for_each_shift_and_one_for_random_shifts(tmp_path):
    rows = rows_of(curves_of([result(ONE)], None), tmp_path / "shift.csv")
    assert len(rows) == 4
    assert rows[0] == {
        "run": "run0",
        "dataset": "mnist",
        "model": "favor",
        "class": "all",
        "shift_x_px": "-1",
        "shift_y_px": "0",
        "accuracy_mean": "0.666667",
        "accuracy_std": "0.272166",
        "consistency_mean": "0.666667",
        "consistency_std": "0.272166",
        "num_images": "3",
        "source": "measured",
    }
    assert rows[3] == {
        **rows[0],
        "shift_x_px": "",
        "shift_y_px": "",
        "accuracy_mean": "0.000000",
        "accuracy_std": "0.000000",
        "consistency_mean": "0.000000",
        "consistency_std": "0.000000",
        "num_images": "4",
        "source": "random",
    }


def test_random_shifts_that_no_image_allows_are_left_empty(tmp_path):
    none = dataclasses.replace(result(ONE), random_predicted=np.full((1, 4), -1))
    curves = curves_of([none], None)
    *_, random = rows_of(curves, tmp_path / "shift.csv")
    assert (random["consistency_mean"], random["num_images"]) == ("", "0")
    assert table(curves).endswith("(4) | – |")


def test_the_published_curves_are_written_once(tmp_path):
    results = [result(ONE), result(TWO, seed=1, recipe="b")]
    curves = curves_of(results, 1, find_published)
    every_class = curves_of(results, None, find_published)
    rows = rows_of([*curves, *every_class], tmp_path / "shift.csv")
    assert [row["class"] for row in rows[:16]] == ["1"] * 8 + ["all"] * 8
    assert {row["source"] for row in rows[:16]} == {"measured", "random"}
    assert rows[16:] == [
        {
            "run": "",
            "dataset": "mnist",
            "model": "Known",
            "class": "1",
            "shift_x_px": str(shift),
            "shift_y_px": "0",
            "accuracy_mean": accuracy,
            "accuracy_std": "",
            "consistency_mean": "",
            "consistency_std": "",
            "num_images": "",
            "source": "published",
        }
        for shift, accuracy in ((-1, "0.250000"), (0, "0.750000"), (1, "0.500000"))
    ]
    line = "| mnist | Known (published) | – | 0.250 | 0.750 | 0.500 | – |"
    assert line in table(curves) and line not in table(every_class)
    assert "published" not in table(curves, "consistency")
    text = summary(curves, every_class, class_name="1", max_shift=1, axis="x")
    assert text.count(line) == 1


def test_table_has_the_largest_shifts_of_both_ways():
    curves = curves_of([result(ONE), result(TWO, seed=1, recipe="b")], 1)
    header, _, first, second = table(curves, "consistency").splitlines()
    assert header == (
        "| data set | model | runs | -1 px | 0 px | +1 px | random shifts |"
    )
    assert first == (
        "| mnist | favor [run0] | 1 | 0.500 ± 0.354 (2) | 1.000 ± 0.000 (2) "
        "| 0.000 ± 0.000 (2) | 0.000 ± 0.000 (2) |"
    )
    assert "| favor [run1] |" in second


@pytest.mark.parametrize(
    "axis, header",
    [
        ("x", "| -8 px | -6 px | 0 px | +6 px | +8 px |"),
        ("y", "| -8 px | -6 px | 0 px | +6 px | +8 px |"),
        ("xy", "| (-8, -8) px | (+8, -8) px | 0 px | (-8, +8) px | (+8, +8) px |"),
    ],
)
def test_table_of_both_axes_has_the_corners(axis, header):
    (curve,) = curves_of([wide_result(axis, 8)], None)
    assert header in table([curve])


def wide_result(axis, max_shift):
    shifts = shifts_along(axis, max_shift)
    predicted = np.ones((len(shifts), 4), int)
    return dataclasses.replace(result(ONE), shifts=shifts, predicted=predicted)


def test_summary_says_which_images_count():
    curves = curves_of([wide_result("xy", 3)], None)
    options = {"class_name": "1", "max_shift": 3, "axis": "xy"}
    zeros = summary(curves, curves, **options)
    assert "move 3 pixels both ways along x and y without losing" in zeros
    assert "from -3 to 3 pixels along x and y" in zeros
    assert "those that lose a non-zero pixel do not count." in zeros
    circular = summary([], curves, boundary="circular", **options)
    assert "the same for every model.\n" in circular

"""Tests sets of points: arrays, files of arrays, MNIST as points, and errors."""

import collections

import numpy as np
import pytest
from ml_collections import ConfigDict

from relattn.data import (
    PointData,
    PointInfo,
    PointSplit,
    load_data,
    read_info,
    read_point_sets,
)
from relattn.data.mnist_points import draw_points, shift_points
from tests.helpers.export import unchecked_annotations
from tests.helpers.quick import normal

N, POINTS = 7, 5
INFO = PointInfo("mine", ("a", "b"), (POINTS, 3, 2), 5, "")
LABELS = np.arange(N) % 3


def make_arrays():
    mask = np.arange(POINTS) < np.arange(N)[:, None] % 3 + 2
    return {
        "positions": normal(0, N, POINTS, 3),
        "labels": LABELS,
        "features": normal(1, N, POINTS, 2),
        "mask": mask,
    }


def make_data(train, class_names=("a", "b", "c"), **options):
    return PointData.from_splits("mine", train, class_names, **options)


def test_arrays_are_joined_and_padding_is_nan():
    arrays = make_arrays()
    split = PointSplit.from_arrays(**arrays)
    assert split.point_shape == (POINTS, 3, 2)
    expected = np.concatenate([arrays["positions"], arrays["features"]], axis=-1)
    exists = arrays["mask"]
    np.testing.assert_array_equal(split.points[exists], expected[exists])
    assert np.isnan(split.points[~exists]).all() and (~exists).any()
    np.testing.assert_array_equal(split.labels, LABELS)


def test_sets_far_from_zero_keep_their_offsets():
    arrays = make_arrays()
    mask = arrays["mask"]
    # What is masked does not move the others.
    arrays["positions"] = np.where(mask[..., None], arrays["positions"], np.nan)
    near = PointSplit.from_arrays(**arrays).points
    far = np.float64(arrays["positions"]) + [5e6 + 1 / 3, -400.0, 2.0**40]
    found = PointSplit.from_arrays(**arrays | {"positions": far}).points
    listed = [
        np.concatenate([far[i], arrays["features"][i]], axis=-1)[mask[i]]
        for i in range(N)
    ]
    listed = read_point_sets(listed, INFO)
    for each, expected, of_list, exists in zip(found, near, listed, mask, strict=True):
        assert abs(each[exists, :3]).max() < 520
        offsets, given = (x[exists, :3] - x[exists][0, :3] for x in (each, expected))
        np.testing.assert_allclose(offsets, given, rtol=0, atol=2.0**-11)
        np.testing.assert_array_equal(each[exists], of_list[: exists.sum()])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"positions": np.zeros((N, 3))},
            r"shape \(7, 3\), expected .*: for one axis pass positions\[..., None\]$",
        ),
        ({"labels": LABELS[1:]}, "labels have shape .* expected 7 integers"),
        ({"features": np.zeros((N, 4, 1))}, r"expected \[7, 5, channels\]$"),
        ({"features": np.zeros((N, 5))}, r"channels\]: pass features\[..., None\]$"),
        ({"mask": np.ones((N, POINTS))}, r"expected \[7, 5\] and bool: .*type\(bool"),
        ({"positions": np.full((N, POINTS, 3), np.inf)}, "point is not finite: set"),
        ({"features": np.full((N, POINTS, 1), "a")}, "features have dtype <U1, expect"),
        (
            {"positions": [np.zeros((n, 3)) for n in (4, 5)]},
            "positions has sets of different numbers of points: pad them to the same",
        ),
    ],
)
def test_wrong_arrays_raise(changes, message):
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        PointSplit.from_arrays(**make_arrays() | changes)


def test_splits_that_differ_in_shape_are_refused():
    arrays = make_arrays()
    train = PointSplit.from_arrays(**arrays)
    fewer = {name: x[:, 1:] for name, x in arrays.items() if name != "labels"}
    fewer = PointSplit.from_arrays(labels=arrays["labels"], **fewer)
    plain = PointSplit.from_arrays(**arrays | {"features": None})
    message = r"test are \(4, 3, 2\), but .* train \(5, 3, 2\): pad the points and"
    with pytest.raises(ValueError, match=message):
        make_data(train, test=fewer)
    message = r"test are \(5, 3, 1\), but .* \(5, 3, 2\): pass the same axes and feat"
    with pytest.raises(ValueError, match=message):
        make_data(train, test=plain)


def test_data_split_batches_and_description():
    split = PointSplit.from_arrays(**make_arrays())
    data = make_data(split, num_validation=2)
    assert len(data.train) == 5 and data.test is data.validation
    both = np.concatenate([data.train.points, data.validation.points])
    order = np.lexsort(both[:, 0].T), np.lexsort(split.points[:, 0].T)
    np.testing.assert_array_equal(both[order[0]], split.points[order[1]])
    info = data.info
    assert info.point_shape == (POINTS, 3, 2) and info.num_classes == 3
    assert read_info({**vars(info), "point_shape": [*info.point_shape]}) == info
    with data.train_loader(2, seed=0, start_step=3) as loader:
        step, batch = next(loader)
    assert step == 3 and batch["points"].shape == (2, POINTS, 5)
    batches = list(split.batches(4))
    assert [batch["weight"].tolist() for batch in batches] == [[1] * 4, [1, 1, 1, 0]]
    found = np.concatenate([batch["points"] for batch in batches])[:N]
    np.testing.assert_array_equal(found, split.points)


def test_splits_that_do_not_fit_raise():
    split = PointSplit.from_arrays(**make_arrays())
    with pytest.raises(ValueError, match="labels of train are from 0 to 2, expected 0"):
        make_data(split, class_names=("a", "b"))
    other = PointSplit.from_arrays(np.zeros((1, 4, 3)), np.zeros(1, int))
    with pytest.raises(
        ValueError, match=r"of test are \(4, 3, 1\), but those of train"
    ):
        make_data(split, test=other)
    large = PointSplit.from_arrays(**make_arrays() | {"labels": LABELS + 2**32})
    with pytest.raises(ValueError, match="labels of train are from 2147483647 to"):
        make_data(large)
    with pytest.raises(ValueError, match="'far': choose a name that starts with 'tes"):
        make_data(split, more_tests={"far": split})
    with pytest.raises(ValueError, match="test has no sets of points: pass at least"):
        make_data(split, test=split.select(np.arange(0)))
    message = r"must be a PointSplit, such as .*from_arrays\(positions, labels\), got"
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        make_data(split.points)


def test_a_file_of_arrays_is_read(tmp_path):
    arrays, file = make_arrays(), tmp_path / "mine.npz"
    stored = {f"train_{part}": array for part, array in arrays.items()}
    config = {"source": "points", "name": "mnist_points", "num_validation": 2}
    config = ConfigDict(config | {"data_dir": str(file)})
    np.savez(file, test_positions=arrays["positions"], test_labels=LABELS, **stored)
    with pytest.raises(ValueError, match="of test are .5, 3, 1.,.* but those of train"):
        load_data(config)
    np.savez(file, class_names=np.array(["a", "b", "c"]), **stored)
    data = load_data(config)
    assert data.info.name == "mine"
    assert data.info.class_names == ("a", "b", "c") and len(data.train) == 5
    whole = PointSplit.from_arrays(**arrays)
    sums = [np.nansum(split.points) for split in (data.train, data.test, whole)]
    np.testing.assert_allclose(sums[0] + sums[1], sums[2], rtol=1e-5)
    np.savez(file, class_names=np.array(["a", "b", "a"]), **stored)
    with pytest.raises(ValueError, match="class_names in .*mine.npz has 'a' twice"):
        load_data(config)
    # As for images, classes are the labels of training, numbers or names.
    names = np.array(["10", "9", "x"])
    for labels, expected in (
        (np.array([9, 1, 10])[LABELS], ("1", "9", "10")),
        (names[LABELS][:, None], ("10", "9", "x")),
    ):
        np.savez(file, **stored | {"train_labels": labels})
        data = load_data(config)
        assert data.info.class_names == expected
        found = np.concatenate([data.train.labels, data.validation.labels])
        order = [expected.index(str(label)) for label in labels.ravel()]
        assert sorted(found) == sorted(order)
    own = {"validation_positions": arrays["positions"], "validation_labels": LABELS}
    np.savez(file, train_positions=arrays["positions"], train_labels=LABELS, **own)
    with pytest.raises(ValueError, match="num_validation=2 holds out .* of their own"):
        load_data(config)
    data = load_data(ConfigDict({**config.to_dict(), "num_validation": 0}))
    assert len(data.train) == len(data.validation) == len(data.test) == N
    np.savez(file, **stored | {"train_labels": np.eye(3)[LABELS]})
    with pytest.raises(ValueError, match="train_labels in .* for one-hot labels pass"):
        load_data(config)
    np.savez(file, train_positions=arrays["positions"])
    with pytest.raises(ValueError, match="no array train_labels, only train_positions"):
        load_data(config)
    with pytest.raises(ValueError, match="has no option data.mask"):
        load_data(ConfigDict({**config.to_dict(), "mask": 1}))
    with pytest.raises(ValueError, match="but the data are points: remove data.mix"):
        load_data(ConfigDict({**config.to_dict(), "mix": "mixup(alpha=0.8)"}))


def test_points_of_an_image_are_a_function_of_the_image_and_the_seed():
    images = np.random.default_rng(0).integers(1, 256, (4, 6, 5, 1), np.uint8)
    images[:, :2] = 0
    images[3, 1:] = 0
    labels = np.arange(4, dtype=np.int32)
    split = draw_points(images, labels, 3, 10)
    assert split.point_shape == (10, 2, 1) and np.isnan(split.points[3]).all()
    for image, points in zip(images[:3, ..., 0], split.points[:3], strict=True):
        rows, columns = (points[:, :2] + [2.5, 2.0]).astype(int).T
        assert len({*zip(rows, columns, strict=True)}) == 10 and (rows >= 2).all()
        expected = (image[rows, columns] / 255).astype(np.float32)
        np.testing.assert_array_equal(points[:, 2], expected)
    order = np.array([2, 0, 3, 1])
    again = draw_points(images[order], labels[order], 3, 10)
    np.testing.assert_array_equal(again.points, split.points[order])
    other = draw_points(images, labels, 4, 10)
    assert (other.points != split.points)[:3].any()


def test_shifts_are_real_and_move_a_set_as_a_whole():
    points = PointSplit.from_arrays(**make_arrays())
    shifted = shift_points(points, 0, max_shift=20.0)
    difference = shifted.points - points.points
    np.testing.assert_array_equal(difference[..., 3:], 0 * points.points[..., 3:])
    vectors = difference[:, 0, :3]
    assert (abs(vectors % 1 - 0.5) < 0.49).all() and abs(vectors).max() > 10
    expected = np.broadcast_to(vectors[:, None], (N, POINTS, 3))
    exists = ~np.isnan(points.points[..., 0])
    np.testing.assert_allclose(difference[..., :3][exists], expected[exists], atol=1e-5)


@pytest.mark.slow
def test_the_embedded_digits_are_split_and_shifted():
    config = ConfigDict({"source": "mnist_points", "num_validation": 500})
    with pytest.raises(ValueError, match="no effect .* set data.source='points' to r"):
        load_data(ConfigDict({**config.to_dict(), "data_dir": "a.npz"}))
    data = load_data(config)
    assert [len(data.train), len(data.validation), len(data.test)] == [4500, 500, 1000]
    assert data.info.point_shape == (100, 2, 1) and data.info.num_classes == 10
    shifted = data.eval_splits["test_shifted"]
    assert abs(np.nanmean(shifted.points - data.test.points, axis=1)).max() > 25
    with pytest.raises(ValueError, match="has no option data.canvas"):
        load_data(ConfigDict({**config.to_dict(), "canvas": 84}))


def test_sets_of_a_user_are_read_in_every_form(tmp_path):
    arrays, file = make_arrays(), tmp_path / "mine.npz"
    labels = arrays.pop("labels")
    expected = PointSplit.from_arrays(labels=labels, **arrays).points
    np.savez(file, labels=labels, **arrays)
    for given in (arrays, file, str(file), expected, [*expected]):
        np.testing.assert_array_equal(read_point_sets(given, INFO), expected)
    # Sets of other numbers of points, of which the last rows are padding.
    sets = [each[mask] for each, mask in zip(expected, arrays["mask"], strict=True)]
    found = read_point_sets(collections.UserList(sets), INFO)
    longest = arrays["mask"].sum(axis=1).max()
    assert longest < POINTS and found.dtype == np.float32
    np.testing.assert_array_equal(found, expected[:, :longest])
    np.testing.assert_array_equal(read_point_sets(expected[1], INFO), expected[1:2])
    assert read_point_sets([], INFO).shape == (0, 1, 5)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (np.zeros(5), r"points has shape \(5,\), expected \[n, points, 5\] or one set"),
        (np.zeros((2, 7, 4)), r"set 0 .* shape \(7, 4\), expected \[points, 5\]: the"),
        ([np.zeros((3, 5)), np.zeros((0, 5))], r"set 1 .* shape \(0, 5\), expected"),
        ([np.full((3, 5), "a")], "set 0 of the points has dtype <U1, expected numbers"),
        (np.full((2, 7, 5), np.inf), "a point is not finite: set its mask to False"),
        (
            np.float32([[[np.nan, 0, 0, 1, 1]]]),
            "a point is not finite: .* or correct it",
        ),
        ({"features": 1}, "points has features, expected positions and, optionally"),
        ({"positions": 1, "grey": 1}, "points has positions, grey, expected positions"),
        (
            {"positions": np.zeros((2, 7, 2)), "features": np.zeros((2, 7, 3))},
            "points have 2 axes and 3 channels, but the model was trained on 3 and 2",
        ),
    ],
)
def test_wrong_sets_of_a_user_raise(points, message):
    with pytest.raises(ValueError, match=message):
        read_point_sets(points, INFO)


def test_wrong_files_of_a_user_raise(tmp_path):
    file = tmp_path / "mine.npz"
    with pytest.raises(FileNotFoundError, match="is missing: pass a file of numpy.sav"):
        read_point_sets(file, INFO)
    np.savez(file, train_positions=np.zeros((2, 3, 3)))
    with pytest.raises(ValueError, match="no array positions, only train_positions: n"):
        read_point_sets(file, INFO)
    np.savez(file, positions=np.zeros((2, 3, 3)), feature=np.zeros((2, 3, 1)))
    with (
        pytest.warns(UserWarning, match="mine.npz: left out arrays: feature$"),
        pytest.raises(ValueError, match="have 3 axes"),
    ):
        read_point_sets(file, INFO)

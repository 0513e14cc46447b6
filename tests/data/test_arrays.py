"""Image sets from files of arrays."""

import numpy as np
import pytest
from ml_collections import ConfigDict

from relattn.data.arrays import read_arrays
from relattn.data.load import load_data

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (7, 5, 3, 3), np.uint8)
LABELS = np.array([0, 1, 2, 0, 1, 2, 1])


def save(folder, **arrays):
    np.savez(folder / "a.npz", **arrays)
    return folder / "a.npz"


def load(file, **changes):
    config = ConfigDict({"name": "mine", "source": "npz", "data_dir": str(file)})
    config.update({"num_validation": 0} | changes)
    return load_data(config)


@pytest.mark.parametrize(
    "names",
    [
        ("train_images", "train_labels", "val_images", "val_labels", "test_{}s"),
        ("x_train", "y_train", "x_val", "y_val", "{}_test"),
        ("train_images", "train_labels", "valid_images", "valid_labels", "test_{}s"),
    ],
    ids=["medmnist", "keras", "valid"],
)
def test_names_of_medmnist_and_keras_are_read(tmp_path, names):
    images, labels, val_images, val_labels, test = names
    letters = ("x", "y") if test.startswith("{}_") else ("image", "label")
    arrays = {
        images: IMAGES[..., 0],
        labels: LABELS[:, None],
        val_images: IMAGES[:2, ..., 1],
        val_labels: LABELS[:2],
        test.format(letters[0]): IMAGES[2:4, ..., 2],
        test.format(letters[1]): LABELS[2:4],
    }
    data = load(save(tmp_path, **arrays))
    np.testing.assert_array_equal(data.train.images, IMAGES[..., :1])
    np.testing.assert_array_equal(data.train.labels, LABELS)
    np.testing.assert_array_equal(data.validation.images, IMAGES[:2, ..., 1:2])
    np.testing.assert_array_equal(data.test.images, IMAGES[2:4, ..., 2:])
    np.testing.assert_array_equal(data.test.labels, LABELS[2:4])
    assert data.info.class_names == ("0", "1", "2")
    with pytest.raises(ValueError, match="num_validation=2 holds out training images"):
        load(tmp_path / "a.npz", num_validation=2)
    file = save(tmp_path, **arrays, X_test=IMAGES)
    with pytest.warns(UserWarning, match="a.npz: left out arrays: X_test$"):
        load(file)


def test_names_are_classes_and_numbers_are_positions_in_class_names(tmp_path):
    words = np.array(["dog", "cat", "ape"])
    found = read_arrays(save(tmp_path, train_images=IMAGES, train_labels=words[LABELS]))
    assert found.class_names == ("ape", "cat", "dog")
    np.testing.assert_array_equal(found.train.labels, 2 - LABELS)
    file = save(tmp_path, train_images=IMAGES, train_labels=LABELS, class_names=words)
    assert read_arrays(file).class_names == ("dog", "cat", "ape")
    np.testing.assert_array_equal(read_arrays(file).train.labels, LABELS)
    data = load(file, num_validation=3)
    assert (len(data.train), len(data.validation)) == (4, 3)
    assert data.eval_splits["test"] is data.eval_splits["validation"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_images": None}, "has train_labels but no train_images: add it"),
        (
            {"train_images": None, "train_labels": None, "other": LABELS},
            "has no array train_images, only other: name the arrays train_images and",
        ),
        ({"train_labels": LABELS[:6]}, r"has shape \(6,\) .*, expected 7 integers or"),
        ({"train_labels": LABELS / 2}, "dtype float64, expected 7 integers or names"),
        (
            {"train_labels": LABELS * 0, "class_names": ["a", "b"]},
            "are of one class, '0': add images of another",
        ),
        ({"train_labels": LABELS.astype("S")}, r"S\d+, .*: pass labels.astype\(str\)$"),
        ({"train_labels": LABELS * 0}, "are of one class, '0': add images of another"),
        (
            {"train_labels": np.array(["1", "01", "2", "1", "1", "2", "2"])},
            r"^the labels '01' and '1' of .*a.npz are the same number",
        ),
        ({"train_images": IMAGES / 255}, r"float64, expected uint8 .*: for values in"),
        (
            {"train_images": IMAGES * 0.9},
            r": pass images.round\(\).astype\(np.uint8\)$",
        ),
        ({"train_images": IMAGES > 3}, r"pass \(255 \* images\).astype\(np.uint8\)$"),
        ({"train_images": IMAGES.astype(int)}, r": pass images.astype\(np.uint8\)$"),
        ({"train_images": 257 * IMAGES.astype(np.uint16)}, r"16 bits .*images >> 8"),
        ({"train_images": 16 * IMAGES.astype(np.uint16)}, r", for 12 bits with >> 4$"),
        ({"train_images": IMAGES * np.nan}, r"pass np.nan_to_num\(images\)"),
        (
            {"train_images": IMAGES.reshape(7, -1)},
            r"shape \(7, \d+\), .*: reshape them",
        ),
        ({"train_labels": np.eye(7)}, r"one-hot labels pass labels.argmax\(axis=-1\)"),
        ({"train_labels": LABELS / 1}, r"float64, .*: pass labels.astype\(int\)$"),
        (
            {"train_labels": LABELS > 0},
            r"bool, expected .*: pass labels.astype\(int\)$",
        ),
        ({"train_labels": LABELS * np.nan}, "pass one whole number for each image$"),
        ({"class_names": ["a", "b", "a"]}, r"names in .*a.npz has 'a' twice: give ea"),
        (
            {"class_names": np.array([b"a", b"b", b"c"])},
            r"names in .*a.npz has dtype |S1: save class_names.astype\(str\)$",
        ),
        ({"class_names": ["a", "", "b"]}, r"names in .*a.npz must be a name for each"),
        (
            {"train_images": np.zeros((7, 6, 5, 5), np.uint8)},
            r"which is \[n, frames, height, width\], volumes .*: pass images\[..., No",
        ),
        ({"class_names": ["a", "b"]}, r"train in .* have 2, .* in the 2 class_names"),
        (
            {"test_images": IMAGES, "test_labels": LABELS + 1},
            r"^the labels of test in .*a.npz have 3, which is not a class of training",
        ),
        (
            {"test_images": IMAGES[:, 1:], "test_labels": LABELS},
            r"of test in .* have shape \(4, 3, 3\), but those of training \(5, 3, 3\)",
        ),
        (
            {"test_images": IMAGES[:0], "test_labels": LABELS[:0]},
            "test in .* has no images: add at least one",
        ),
        ({"train_labels": np.array([{}] * 7)}, r"cannot be read \(.*: write it with"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path, change, message):
    arrays = {"train_images": IMAGES, "train_labels": LABELS} | change
    given = {name: value for name, value in arrays.items() if value is not None}
    with pytest.raises(ValueError, match=message) as raised:
        load(save(tmp_path, **given))
    assert len(str(raised.value).splitlines()) == 1


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "b.npz").write_bytes(b"no arrays")
    with pytest.raises(ValueError, match=r"b.npz cannot be read \(.*: write it with"):
        load(tmp_path / "b.npz")
    np.save(tmp_path / "c.npy", LABELS)
    with pytest.raises(ValueError, match=r"c.npy cannot be read \(.*: write it with"):
        load(tmp_path / "c.npy")
    with pytest.raises(FileNotFoundError, match="no.npz is missing: set data.data_dir"):
        load(tmp_path / "no.npz")

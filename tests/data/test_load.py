"""`load_images` and its errors, without TensorFlow."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest
from ml_collections import ConfigDict, FrozenConfigDict
from PIL import Image

from relattn.data.base import ImageInfo
from relattn.data.images import ImageData, ImageSplit
from relattn.data.load import image_options, load_data, load_images, register_data
from relattn.data.preprocess import make_preprocess
from tests.helpers.export import unchecked_annotations

ROOT = pathlib.Path(__file__).parents[2]


def test_embedded_set_is_loaded():
    config = FrozenConfigDict({"name": "fashion_mnist", "num_validation": 701})
    data = load_images(config)
    sizes = (len(data.train), len(data.validation), len(data.test))
    assert sizes == (4299, 701, 1000)
    assert (data.num_classes, data.image_shape) == (10, (28, 28, 1))
    assert data.class_names[1] == "Trouser"
    assert data.train.images.dtype == np.uint8 and data.train.labels.dtype == np.int32
    mean = (data.train.images / 255).mean(dtype=np.float64)
    np.testing.assert_allclose(data.mean, mean, rtol=1e-6)
    assert "subset of Fashion-MNIST" in data.origin


def test_validation_images_depend_on_split_seed_only():
    def load(**keys):
        return load_images(ConfigDict({"name": "mnist", "num_validation": 53} | keys))

    first, second, other = load(), load(), load(split_seed=1)
    np.testing.assert_array_equal(first.validation.images, second.validation.images)
    assert (first.validation.images != other.validation.images).any()


@pytest.mark.parametrize(
    "keys, message",
    [
        (
            {"name": "fashion-mnist"},
            r"^unknown data.name 'fashion-mnist' of the source \"embedded\": did you "
            r"mean 'fashion_mnist'\? Available: fashion_mnist, mnist$",
        ),
        (
            {"name": "cifar10"},
            "'cifar10' does not ship with relattn: prepare it by relattn prepare",
        ),
        (
            {"name": "cifra10", "source": "tfds"},
            r"^unknown data.name 'cifra10': did you mean 'cifar10'\?",
        ),
        (
            {"name": "mnist", "source": "tfd"},
            r"^unknown data.source 'tfd': did you mean 'tfds'\? Available: csv, emb",
        ),
        (
            {"name": "mnist", "source": "xyz"},
            "data.source 'xyz': available: csv, embedded",
        ),
        (
            {"name": "mnist", "num_validation": 5000},
            "data.num_validation=5000 must be an integer from 0 to 4999, ",
        ),
    ],
)
def test_invalid_options_raise(keys, message):
    with pytest.raises(ValueError, match=message):
        load_images(ConfigDict(keys))


@pytest.mark.slow
def test_reading_does_not_import_tensorflow(tmp_path):
    # A fake TensorFlow makes any import of it fail, even if TensorFlow is installed.
    fake = tmp_path / "tensorflow" / "__init__.py"
    fake.parent.mkdir()
    fake.write_text("raise RuntimeError('TensorFlow was imported')")
    program = (
        "import sys\n"
        f"sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n"
        "from ml_collections import ConfigDict\n"
        "import relattn, relattn.data\n"
        "assert len(relattn.data.load_images(ConfigDict({'name': 'mnist'})).test)\n"
        "assert 'tensorflow' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


@pytest.mark.parametrize("returned", [None, np.zeros((7, 5, 3, 1))])
def test_a_loader_that_returns_no_data_is_refused(registries, returned):
    register_data("mine", lambda config: returned)
    kind = type(returned).__name__
    message = f"the loader of data.source='mine' returned {kind}: return a data set"
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        load_data(ConfigDict({"source": "mine"}))


def test_what_is_no_loader_is_refused():
    with unchecked_annotations():
        with pytest.raises(ValueError, match="the loader of 'mine' must be a function"):
            register_data("mine", 3)
        with pytest.raises(ValueError, match="None cannot be registered: choose a P"):
            register_data(None, load_data)


def test_a_source_of_relattn_is_not_replaced():
    for name in ("folder", "not a name"):
        with pytest.raises(ValueError, match=f"'{name}' cannot be registered: choose"):
            register_data(name, load_data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"images": np.zeros((7, 5, 3, 1))},
            "images have dtype float64, expected uint8",
        ),
        ({"images": np.zeros((7, 5, 3), np.uint8)}, r"images have shape \(7, 5, 3\)"),
        ({"labels": np.zeros(5, int)}, r"images have shape \(5,\) .* expected 7 integ"),
        ({"labels": np.zeros(7)}, "and dtype float64, expected 7 integers"),
        ({"labels": np.full(7, 2)}, "are from 2 to 2, expected 0 to 1"),
        (
            {"labels": np.array(list("abababa"))},
            r"pass \[class_names.index\(name\) for",
        ),
        ({"labels": np.array(["a", None] * 4, object)[:7]}, "pass one label for each"),
        ({"labels": np.zeros(7, object)}, r"object, .*: pass labels.astype\(int\)"),
        ({"labels": np.zeros((7, 1), int)}, r"\(7, 1\) .*: pass labels\[:, 0\]"),
        ({"class_names": ["a"]}, r"images has fewer than 2 classes \(1\): add"),
        ({"class_names": 2}, r"names must be a name for each label, .*'dog'\), got 2"),
        ({"class_names": "ab"}, "names must be a name for each label, .*, got 'ab'"),
        (
            {"class_names": range(2)},
            "_names must be a name for each label, .*got 0",
        ),
        ({"class_names": ["a", "a"]}, "class_names has 'a' twice: give each class"),
        ({"labels": np.array([1, 2, 1, 1, 1, 1, 2])}, "0 to 1: pass labels - 1"),
        ({"labels": np.array([-1, 0, 0, 0, 0, 0, 0])}, r"0 to 1: pass labels \+ 1$"),
        ({"labels": np.array([-1, 0, 1, 0, 0, 0, 0])}, "1: leave out examples without"),
        ({"augment": "rotat"}, "augment 'rotat': did you mean 'rotate'"),
        ({"test_labels": None}, "test_images and test_labels need each other: pass"),
        ({"test_images": None}, "test_images and test_labels need each other: pass"),
        (
            {"validation_labels": np.zeros(7, int)},
            "validation_images and validation_labels need each other: pass",
        ),
        (
            {
                "validation_images": np.zeros((7, 5, 3, 1), np.uint8),
                "validation_labels": np.zeros(7, int),
            },
            "num_validation=1 holds out .* images of their own: set data.num_valid",
        ),
        (
            {"test_images": np.zeros((7, 6, 3, 1), np.uint8)},
            r"test_images has images of shape \(6, 3, 1\), but images has \(5, 3, 1\)",
        ),
        ({"labels": np.array([0, 1, 0, 0, 0, 0, -1])}, "are from -1 to 1, expected 0"),
        ({"labels": np.full(7, np.nan)}, "type float64, expected 7 integers"),
        ({"images": np.zeros((7, 3, 5, 6), np.uint8)}, r"pass images.transpose\(0, 2"),
        ({"images": np.zeros((7, 4, 9, 5), np.uint8)}, r"pass images.transpose\(0, 2"),
        ({"images": np.zeros((7, 5, 3, 1), object)}, r"pass images.astype\(float\)"),
        (
            {"images": [np.zeros((5, 3 + i % 2, 1), np.uint8) for i in range(7)]},
            "differ in shape: resize the images to one size",
        ),
        (
            {"images": np.array([*map(np.zeros, range(7))], object)},
            "an array of objects: resize the images to one size, and pass np.stack",
        ),
        ({"images": np.full((7, 5, 3, 1), np.nan)}, "type float64, expected uint8"),
        ({"images": np.full((7, 5, 3, 1), 300)}, "type int64, expected uint8"),
        ({"images": np.zeros((7, 0, 3, 1), np.uint8)}, "the images have no pixels"),
        (
            {"images": np.zeros((0, 5, 3, 1), np.uint8), "labels": np.zeros(0, int)},
            "images has no images",
        ),
    ],
)
def test_arrays_of_another_type_shape_or_range_are_refused(change, message):
    images, labels = np.zeros((7, 5, 3, 1), np.uint8), np.zeros(7, int)
    arguments = {
        "class_names": ["a", "b"],
        "images": images,
        "labels": labels,
        "test_images": images,
        "test_labels": labels,
    }
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        ImageData.from_arrays("mine", num_validation=1, **arguments | change)


def test_arrays_may_have_validation_images_of_their_own():
    images = np.arange(9, dtype=np.uint8).repeat(15).reshape(9, 5, 3, 1)
    labels = np.arange(9) % 2
    own = {"validation_images": images[4:7], "validation_labels": labels[4:7]}
    data = ImageData.from_arrays("mine", images[:4], labels[:4], ("a", "b"), **own)
    np.testing.assert_array_equal(data.train.images, images[:4])
    for split in (data.validation, data.test):
        np.testing.assert_array_equal(split.images, images[4:7])
        np.testing.assert_array_equal(split.labels, labels[4:7])
    test = {"test_images": images[7:], "test_labels": labels[7:]}
    data = ImageData.from_arrays(
        "mine", images[:4], labels[:4], ("a", "b"), **own, **test
    )
    np.testing.assert_array_equal(data.validation.images, images[4:7])
    np.testing.assert_array_equal(data.test.images, images[7:])


def test_splits_are_checked_without_from_arrays():
    images, labels = np.zeros((7, 5, 3, 1), np.uint8), np.full(7, 2, np.int32)
    with pytest.raises(ValueError, match="the images have no pixels"):
        ImageSplit(images[:, :, :0], labels)
    right, wrong = ImageSplit(images, labels - 1), ImageSplit(images, labels)
    statistics = np.ones(1, np.float32), np.ones(1, np.float32)
    for splits in ((wrong, right, right), (right, wrong, right), (right, right, wrong)):
        with pytest.raises(ValueError, match="are from 2 to 2, expected 0 to 1"):
            ImageData("mine", *splits, ("a", "b"), *statistics, "here")


def test_equal_pixels_are_refused_when_the_data_are_standardised(tmp_path):
    for index, value in enumerate((3, 200, 90)):
        pixels = np.full((5, 3, 3), value, np.uint8)
        # One channel is the same everywhere.
        pixels[..., 1] = 7
        path = tmp_path / "train" / "aab"[index] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    config = image_options("mine", 5, source="folder", data_dir=str(tmp_path))
    config.num_validation = 1
    assert load_data(config).info.std[1] == 0
    config.standardize = True
    for load in (load_data, load_images):
        with pytest.raises(ValueError, match="all pixels of channel 1 of mine are equ"):
            load(config)


def test_statistics_that_are_not_finite_are_refused():
    config = ConfigDict({"standardize": True})
    for mean, std in ((np.nan, 1.0), (0.0, np.inf), (0.0, np.nan), (0.0, -1.0)):
        info = ImageInfo("mine", ("a", "b"), (4, 4, 1), (mean,), (std,), 7, "")
        with pytest.raises(ValueError, match="channel 0 of mine has mean .*finite"):
            make_preprocess(config, info)


def test_unknown_image_options_raise():
    with pytest.raises(TypeError, match="no option 'canvsa': did you mean 'canvas'"):
        image_options("mnist", 28, canvsa=84)
    for source in ("embedded", "folder", "tfds", "moving_digits"):
        config = image_options("mnist", 28, source=source)
        config.standardise = True
        message = f"'{source}' has no option data.standardise: did you mean 'standardi"
        with pytest.raises(ValueError, match=message):
            load_data(config)
    message = "'text' has no option data.context_lenght: did you mean 'context_length'"
    with pytest.raises(ValueError, match=message):
        load_data(ConfigDict({"source": "text", "context_lenght": 8}))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"data_dir": "d"}, r"data\.data_dir='d' has no effect .* than 'embedded'"),
        ({"manual_dir": "d"}, r"data\.manual_dir='d' .* data\.source='tfds'"),
        (
            {"background": "red"},
            r"data\.background='red' .* image files, such as 'folder'",
        ),
        ({"skip_unreadable": True}, r"data\.skip_unreadable=True .* leave it at False"),
        ({"canvas": 40}, r"data\.canvas=40 .* needs data\.placement: leave it at 84"),
        ({"short_side": 40}, r"data\.short_side=40 .* photographs .* leave it at 0"),
        ({"num_workers": 2}, r"data\.num_workers=2 .* photographs"),
    ],
)
def test_options_without_effect_are_refused(change, message):
    config = image_options("mnist", 28, num_validation=5, **change)
    for load in (load_data, load_images):
        with pytest.raises(ValueError, match=message):
            load(config)


@pytest.mark.parametrize("source", ["folder", "embedded", "moving_digits"])
@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"std": (0.5,)},
            r"data\.std=\(0\.5,\) .* needs data\.standardize=True: leave",
        ),
        ({"standardize": "False"}, r"data\.standardize='False' must be True or False"),
        ({"placement": "statik"}, r"data\.placement[ =]'statik'"),
    ],
)
def test_options_are_checked_before_images_are_read(source, change, message):
    config = ConfigDict({"name": "mnist", "source": source, **change})
    if source == "folder":
        config.data_dir = "missing"
    with pytest.raises(ValueError, match=message):
        load_data(config)


def test_options_without_effect_on_a_folder_are_refused(tmp_path):
    def load(**change):
        config = image_options("mine", 5, source="folder", data_dir=str(tmp_path))
        config.update(num_validation=1, **change)
        return load_data(config)

    for index, name in enumerate("aab"):
        folder = tmp_path / "train" / name
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("L", (5, 5), 40 * index).save(folder / f"{index}.png")
    assert load(background="black").info.num_train == 2
    # The name of a recipe's set is not that of one's own images.
    names = {name: load(name=name).info.name for name in ("mine", "mnist", "")}
    assert names == {"mine": "mine", "mnist": tmp_path.name, "": tmp_path.name}
    for option in ("num_workers", "short_side"):
        with pytest.raises(ValueError, match=f"data.{option}=7 has no effect"):
            load(**{option: 7})
    # Of another size: read during training.
    Image.new("L", (6, 5)).save(folder / "3.png")
    info = load(num_workers=2, short_side=7, name="mnist").info
    assert info.streamed and info.name == tmp_path.name
    with pytest.raises(ValueError, match="data.canvas=9 has no effect"):
        load(canvas=9)

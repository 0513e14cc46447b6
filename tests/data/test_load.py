"""`load_images` and its errors, without TensorFlow."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest
from ml_collections import ConfigDict, FrozenConfigDict

from relattn.data.images import ImageData
from relattn.data.load import load_data, load_images, register_data

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
            r"mean 'fashion_mnist'\? There are: fashion_mnist, mnist$",
        ),
        (
            {"name": "cifra10", "source": "tfds"},
            r"^unknown data.name 'cifra10': did you mean 'cifar10'\?",
        ),
        (
            {"name": "mnist", "source": "tfd"},
            r"^unknown data.source 'tfd': did you mean 'tfds'\? There are: embedded",
        ),
        ({"name": "mnist", "source": "xyz"}, "data.source 'xyz': there are: embedded"),
        (
            {"name": "mnist", "num_validation": 5000},
            "data.num_validation=5000 of 5000 training images",
        ),
    ],
)
def test_invalid_options_raise(keys, message):
    with pytest.raises(ValueError, match=message):
        load_images(ConfigDict(keys))


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


def test_a_source_of_relattn_is_not_replaced():
    for name in ("folder", "not a name"):
        with pytest.raises(ValueError, match=f"'{name}' cannot be registered: choose"):
            register_data(name, load_data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": np.zeros((7, 5, 3, 1))}, "images has shape .* type float64, expec"),
        ({"images": np.zeros((7, 5, 3), np.uint8)}, r"images has shape \(7, 5, 3\)"),
        ({"labels": np.zeros(5, int)}, r"images have shape \(5,\) .* expected 7 integ"),
        ({"labels": np.zeros(7)}, "and type float64, expected 7 integers"),
        ({"labels": np.full(7, 2)}, "are from 2 to 2, expected 0 to 1"),
        ({"test_labels": None}, "labels of test_images have shape"),
    ],
)
def test_arrays_of_another_type_shape_or_range_are_refused(change, message):
    images, labels = np.zeros((7, 5, 3, 1), np.uint8), np.zeros(7, int)
    arguments = {
        "images": images,
        "labels": labels,
        "test_images": images,
        "test_labels": labels,
    }
    with pytest.raises(ValueError, match=message):
        ImageData.from_arrays(
            "mine", class_names=("a", "b"), num_validation=1, **arguments | change
        )

"""`load_images` and its errors; nothing imports TensorFlow."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest
from ml_collections import ConfigDict, FrozenConfigDict

from relattn.data.load import load_images

ROOT = pathlib.Path(__file__).parents[2]


def test_an_embedded_set():
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


def test_the_validation_images_are_the_same_for_everyone():
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
def test_errors(keys, message):
    with pytest.raises(ValueError, match=message):
        load_images(ConfigDict(keys))


def test_reading_never_imports_tensorflow(tmp_path):
    # A TensorFlow that cannot be imported unnoticed, whether or not one is installed.
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

"""`load_images` and its errors, without TensorFlow."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest
from ml_collections import ConfigDict, FrozenConfigDict

from relattn.data.load import load_images

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

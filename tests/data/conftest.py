"""Small image sets in TFDS's layout, written without TensorFlow."""

import io
import pathlib

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from tests.training.programs import shared_images as shared_images  # noqa: PLC0414
from tools.embed import encode_png


class SmallSet(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Random grey images; `splits` gives the size of each split."""

    __module__ = "conftest"
    VERSION = tfds.core.Version("3.0.1")
    pkg_dir_path = "."

    def _info(self):
        image = tfds.features.Image(shape=(5, 7, 1), encoding_format="png")
        label = tfds.features.ClassLabel(names=["cat", "dog"])
        features = tfds.features.FeaturesDict({"image": image, "label": label})
        return tfds.core.DatasetInfo(
            builder=self, features=features, disable_shuffling=True
        )

    def _split_generators(self, dl_manager):
        return {split: self._generate_examples(n) for split, n in self.splits.items()}

    def _generate_examples(self, n):
        rng = np.random.default_rng(n)
        for index in range(n):
            image = rng.integers(0, 256, (5, 7), np.uint8)
            yield index, {"image": encode_png(image), "label": index % 2}


@pytest.fixture
def write_set(tmp_path):
    """Returns a function that writes a small set, returning data_dir and folder."""

    def write(name, file_format="array_record", **splits):
        name, _, config = name.partition("/")
        configs = [tfds.core.BuilderConfig(name=config)] if config else []
        members = {"name": name, "splits": splits, "BUILDER_CONFIGS": configs}
        members["__module__"] = "conftest"
        builder = type("Set", (SmallSet,), members, skip_registration=True)(
            data_dir=tmp_path, file_format=file_format
        )
        builder.download_and_prepare()
        return str(tmp_path), pathlib.Path(builder.data_path)

    return write


class SmallPhotographs(SmallSet, skip_registration=True):
    """Noise images of many sizes, colour and grey, JPEG and PNG, like ImageNet."""

    VERSION = tfds.core.Version("5.1.0")

    def _info(self):
        features = tfds.features.FeaturesDict(
            {
                "image": tfds.features.Image(encoding_format="jpeg"),
                "label": tfds.features.ClassLabel(names=["n01", "n02", "n03"]),
                "file_name": tfds.features.Text(),
            }
        )
        return tfds.core.DatasetInfo(
            builder=self, features=features, supervised_keys=("image", "label")
        )

    def _generate_examples(self, n):
        for index in range(n):
            name = f"{index}.JPEG"
            image = encode_photograph(n, index)
            yield name, {"image": image, "label": index % 3, "file_name": name}


def encode_photograph(n, index):
    """Encodes an image of a split of n; its grey level is about 10 times its index."""
    rng = np.random.default_rng([n, index])
    height, width = rng.integers(23, 61, 2)
    coarse = rng.integers(0, 7, (8, 8, 3), np.uint8) + np.uint8(10 * index)
    image = Image.fromarray(coarse).resize((width, height), Image.Resampling.NEAREST)
    image = image.convert("L") if index % 7 == 3 else image
    encoded = io.BytesIO()
    image.save(encoded, "PNG" if index % 5 == 1 else "JPEG")
    encoded.seek(0)
    return encoded


@pytest.fixture(scope="session")
def photographs(tmp_path_factory):
    """Returns the data_dir of a small set named imagenet2012."""
    data_dir = tmp_path_factory.mktemp("photographs")
    members = {"name": "imagenet2012", "splits": {"train": 23, "validation": 7}}
    members["__module__"] = "conftest"
    builder = type("Set", (SmallPhotographs,), members, skip_registration=True)(
        data_dir=data_dir, file_format="array_record"
    )
    builder.download_and_prepare()
    return data_dir

"""Small image sets in TFDS's layout, written without TensorFlow."""

import pathlib

import numpy as np
import pytest
import tensorflow_datasets as tfds

from relattn.data.embed import encode_png


class SmallSet(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Random grey images, of the sizes that `splits` says."""

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
    """Writes a small set and returns its data_dir and its folder."""

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

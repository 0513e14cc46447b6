"""Reading prepared sets, damage, and starting the preparation."""

import dataclasses
import importlib.util
import pathlib
import shutil

import numpy as np
import pytest
import tensorflow_datasets as tfds_lib
from ml_collections import ConfigDict

from relattn.data import tfds
from relattn.data.images import ImageSplit
from relattn.data.load import load_data, load_images
from relattn.data.registry import SETS
from relattn.data.tfds import (
    DatasetNotPreparedError,
    content_digest,
    find_prepared,
    prepare_command,
    read_prepared,
)
from relattn.manifest import write_manifest
from tests.data.conftest import SmallPhotographs
from tools.embed import encode_png


def expected_images(n):
    rng = np.random.default_rng(n)
    return np.stack([rng.integers(0, 256, (5, 7), np.uint8) for _ in range(n)])


@pytest.mark.parametrize("mapped", [False, True])
def test_images_labels_and_classes_are_read(write_set, monkeypatch, mapped):
    monkeypatch.setattr("relattn.data.tfds.CHUNK", 3)
    if mapped:
        monkeypatch.setattr("relattn.data.tfds.MAPPED_BYTES", 0)
    _, folder = write_set("mnist", train=11, test=5)
    for _ in range(2):
        train, test, class_names = read_prepared(folder)
        for split, n in ((train, 11), (test, 5)):
            np.testing.assert_array_equal(split.images[..., 0], expected_images(n))
            np.testing.assert_array_equal(split.labels, np.arange(n) % 2)
            assert isinstance(split.images, np.memmap) == mapped
            split.images[:] = 0
        assert class_names == ("cat", "dog")


def test_interrupted_decoding_is_repeated(write_set, monkeypatch):
    monkeypatch.setattr("relattn.data.tfds.MAPPED_BYTES", 0)
    _, folder = write_set("mnist", train=11, test=5)
    fill = tfds._fill

    def interrupt(source, images, labels, title):
        raise KeyboardInterrupt

    monkeypatch.setattr(tfds, "_fill", interrupt)
    with pytest.raises(KeyboardInterrupt):
        read_prepared(folder)
    (folder / "decoded-train-images.7.partial").write_bytes(b"of a killed process")
    monkeypatch.setattr(tfds, "_fill", fill)
    train, _, _ = read_prepared(folder)
    np.testing.assert_array_equal(train.images[..., 0], expected_images(11))
    left = {path.name for path in folder.glob("*.partial")}
    assert left == {"decoded-train-images.7.partial"}


def test_concurrent_decoding_does_not_conflict(write_set, monkeypatch):
    monkeypatch.setattr("relattn.data.tfds.MAPPED_BYTES", 0)
    _, folder = write_set("mnist", train=11, test=5)
    fill = tfds._fill

    def interrupted(source, images, labels, title):
        images[:3] = 1
        monkeypatch.setattr(tfds, "_fill", fill)
        others.append(read_prepared(folder)[0])
        fill(source, images, labels, title)

    others = []
    monkeypatch.setattr(tfds, "_fill", interrupted)
    for train in (read_prepared(folder)[0], *others):
        np.testing.assert_array_equal(train.images[..., 0], expected_images(11))
        np.testing.assert_array_equal(train.labels, np.arange(11) % 2)
    assert len(others) == 1


def test_newest_version_is_found(write_set):
    data_dir, folder = write_set("mnist", train=2, test=2)
    for version in ("3.0.0", "10.0.0", "incomplete.XYZ_11.0.0"):
        shutil.copytree(folder, folder.with_name(version))
    (folder.with_name("12.0.0")).mkdir()
    assert find_prepared("mnist", data_dir).name == "10.0.0"
    assert find_prepared("cifar10", data_dir) is None


def test_changed_class_name_raises(write_set):
    _, folder = write_set("mnist", train=11, test=5)
    write_manifest(folder, ["label.labels.txt", "features.json"])
    read_prepared(folder)
    (folder / "label.labels.txt").write_text("bat\ndog\n")
    message = r"cannot be read \(/.*label.labels.txt is damaged .*prepare the"
    with pytest.raises(ValueError, match=message):
        read_prepared(folder)


@pytest.mark.parametrize("damage", ["features.json", "dataset_info.json", "*train*"])
def test_damaged_sets_raise(write_set, damage):
    _, folder = write_set("mnist", train=11, test=5)
    for file in folder.glob(damage):
        file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(ValueError, match=r"mnist.3.0.1 cannot be read .*prepare the"):
        read_prepared(folder)


def test_modules_named_by_a_set_are_not_imported(write_set, tmp_path, monkeypatch):
    _, folder = write_set("mnist", train=11, test=5)
    (tmp_path / "intruder.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    features = (folder / "features.json").read_text()
    name = "tensorflow_datasets.core.features.image_feature.Image"
    (folder / "features.json").write_text(features.replace(name, "intruder.Image"))
    message = r"mnist.3.0.1 cannot be read .*names 'intruder.Image', which is not"
    with pytest.raises(ValueError, match=message):
        read_prepared(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "kind, array, problem",
    [
        (
            "images",
            np.zeros((11, 5, 7, 1), np.int8),
            r"int8\[11, 5, 7, 1\], expected uin",
        ),
        (
            "images",
            np.zeros((7, 5, 7, 1), np.uint8),
            r"uint8\[7, 5, 7, 1\], expected ui",
        ),
        ("labels", np.zeros(7, np.int32), r"int32\[7\], expected int32\[11\]"),
        (
            "labels",
            np.full(11, 2, np.int32),
            "image 0 has the label 2, expected 0 to 1",
        ),
        (
            "labels",
            np.arange(11, dtype=np.int32) - 1,
            "image 0 has the label -1, expec",
        ),
    ],
)
def test_wrong_decoded_file_raises(write_set, monkeypatch, kind, array, problem):
    monkeypatch.setattr("relattn.data.tfds.MAPPED_BYTES", 0)
    _, folder = write_set("mnist", train=11, test=5)
    read_prepared(folder)
    np.save(folder / f"decoded-train-{kind}.npy", array)
    with pytest.raises(ValueError, match=f"cannot be read .*{problem}"):
        read_prepared(folder)


def test_image_of_another_shape_is_not_broadcast():
    class Source(tfds._Images):
        def __init__(self):
            self.images = [np.zeros(size, np.uint8) for size in [(5, 7, 1), (1, 1, 1)]]

        def __len__(self):
            return 2

        def read(self, keys):
            return ((self.images[key], 0) for key in keys)

    source = Source()
    images, labels = np.empty((2, 5, 7, 1), np.uint8), np.empty(2, np.int32)
    with pytest.raises(ValueError, match=r"image 1 has shape \(1, 1, 1\), but the"):
        tfds._fill(source, images, labels, "")


def test_missing_test_split_raises(write_set):
    _, folder = write_set("mnist", train=11)
    with pytest.raises(ValueError, match="cannot be read .*test"):
        read_prepared(folder)


def test_digest_depends_on_content_but_not_order():
    images = expected_images(7)[..., None]
    labels = np.arange(7, dtype=np.int32)

    def digest(order, labels=labels, cut=4):
        parts = order[:cut], order[cut:]
        return content_digest(*(ImageSplit(images[p], labels[p]) for p in parts))

    order = np.arange(7)
    assert digest(order) == digest(order[::-1]) == digest(order, cut=5)
    assert digest(order) != digest(order, labels=labels[::-1])


def tfds_config(name, data_dir, **keys):
    return ConfigDict(
        keys | {"name": name, "source": "tfds", "data_dir": str(data_dir)}
    )


def without_digest(monkeypatch, name):
    entry = dataclasses.replace(SETS[name], digest="")
    monkeypatch.setitem(SETS, name, entry)


@pytest.mark.parametrize(
    "name, test_split, first_class",
    [
        ("mnist", "test", "0"),
        ("fashion_mnist", "test", "T-shirt/top"),
        ("cifar10", "test", "cat"),
        ("imagenet_resized/64x64", "validation", "cat"),
    ],
)
def test_prepared_sets_are_read(write_set, monkeypatch, name, test_split, first_class):
    without_digest(monkeypatch, name)
    data_dir, folder = write_set(name, **{"train": 11, test_split: 5})
    data = load_images(tfds_config(name, data_dir, num_validation=3))
    assert (len(data.train), len(data.validation), len(data.test)) == (8, 3, 5)
    assert data.class_names[0] == first_class
    assert data.origin == f"{name} 3.0.1, prepared by TFDS in {folder}"


def test_images_of_another_set_raise(write_set):
    data_dir, _ = write_set("fashion_mnist", train=11, test=5)
    message = "fashion_mnist.3.0.1 are not those of Fashion-MNIST, perhaps"
    with pytest.raises(ValueError, match=message):
        load_images(tfds_config("fashion_mnist", data_dir))


def test_not_prepared_without_tensorflow_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DatasetNotPreparedError) as info:
        load_images(tfds_config("imagenet_resized/64x64", tmp_path))
    message = str(info.value)
    assert f"imagenet_resized/64x64 is not prepared in {tmp_path}" in message
    assert "TensorFlow, required for preparation only, is missing" in message
    assert "pip install 'relattn[prepare]'" in message
    command = f"relattn prepare --name=imagenet_resized/64x64 --data_dir={tmp_path}"
    assert f"`{command}`" in message
    assert "--config.data.manual_dir=DIR" in message


@pytest.fixture
def fake_preparation(tmp_path, monkeypatch):
    """Replaces the preparation with a script and pretends TensorFlow is installed."""

    def replace(program):
        script = tmp_path / "prepare.py"
        script.write_text(program)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        monkeypatch.setattr(
            tfds, "prepare_command", lambda *names: [str(script), *names]
        )

    return replace


def test_not_prepared_without_network_raises(tmp_path, fake_preparation, capsys):
    fake_preparation(
        "import sys\n"
        "print('downloading', file=sys.stderr)\n"
        "sys.exit('cifar10 was not prepared: no connection to host')\n"
    )
    with pytest.raises(
        DatasetNotPreparedError, match=r"\(no connection to host\): `pip"
    ):
        load_images(tfds_config("cifar10", tmp_path))
    assert "downloading" in capsys.readouterr().err


@pytest.mark.slow
def test_set_is_prepared_in_a_separate_process(
    write_set, monkeypatch, fake_preparation, tmp_path
):
    without_digest(monkeypatch, "mnist")
    _, folder = write_set("mnist", train=11, test=5)
    hidden = folder.with_name("hidden")
    folder.rename(hidden)
    fake_preparation(
        "import os, pathlib, sys\n"
        "import relattn.data.tfds\n"
        "assert sys.argv[1:] == ['mnist', sys.argv[2], 'archives']\n"
        f"os.rename({str(hidden)!r}, {str(folder)!r})\n"
    )
    data = load_images(tfds_config("mnist", tmp_path, manual_dir="archives"))
    assert len(data.train) == 11


def test_message_contains_the_prepare_command():
    command = prepare_command("mnist", "a b", "archives")
    expected = ["-m", "relattn.data.prepare"]
    expected += ["--name=mnist", "--data_dir=a b", "--manual_dir=archives"]
    assert command == expected
    text = str(tfds.not_prepared("mnist", "a b", "why"))
    assert "`relattn prepare --name=mnist '--data_dir=a b'`" in text
    assert pathlib.Path(tfds.__file__).with_name("prepare.py").is_file()


# The size of a split whose labels are not public.
UNLABELLED = 4


class Fruits(SmallPhotographs, skip_registration=True):
    """A set that relattn does not know, whose features have other names."""

    __module__ = "conftest"

    def _info(self):
        features = {
            "photo": tfds_lib.features.Image(shape=self.shape, encoding_format="png"),
            "mask": tfds_lib.features.Image(shape=self.shape, encoding_format="png"),
            "kind": tfds_lib.features.ClassLabel(names=["fig", "kiwi", "lime"]),
            "farm": tfds_lib.features.ClassLabel(num_classes=5),
        }
        return tfds_lib.core.DatasetInfo(
            builder=self,
            features=tfds_lib.features.FeaturesDict(features),
            supervised_keys=self.keys,
            disable_shuffling=True,
        )

    def _generate_examples(self, n):
        for index in range(n):
            height, width = (5, 7) if self.shape[0] else (30 + index, 40)
            image = np.full((height, width), 10 * n + index, np.uint8)
            values = {"photo": encode_png(image), "mask": encode_png(0 * image)}
            kind = index % 3 if n != UNLABELLED else -1
            yield index, {**values, "kind": kind, "farm": 4}


def write_fruits(folder, shape, keys=("photo", "kind"), file_format=None, **splits):
    members = {"name": "fruits", "splits": splits, "shape": shape, "keys": keys}
    members["__module__"] = "conftest"
    builder = type("Set", (Fruits,), members, skip_registration=True)(
        data_dir=folder, file_format=file_format or "array_record"
    )
    builder.download_and_prepare()
    config = ConfigDict({"name": "fruits", "source": "tfds", "data_dir": str(folder)})
    config.update(image_size=5, num_validation=0)
    return config


def levels(split):
    (batch,) = split.batches(11)
    rows = batch["weight"] > 0
    return batch["image"][rows, 0, 0, 0].tolist(), batch["label"][rows].tolist()


@pytest.mark.parametrize("shape", [(5, 7, 1), (None, None, 1)])
def test_any_prepared_image_set_is_read_by_name(tmp_path, shape):
    config = write_fruits(tmp_path, shape, train=7, validation=2, test=3)
    data = load_data(config)
    assert data.info.streamed == (shape[0] is None)
    assert data.info.class_names == ("fig", "kiwi", "lime")
    assert data.info.num_train == 7
    assert levels(data.eval_splits["validation"]) == ([20, 21], [0, 1])
    assert levels(data.eval_splits["test"]) == ([30, 31, 32], [0, 1, 2])
    with data.train_loader(7, seed=0) as loader:
        _, batch = next(loader)
    expected = {70 + index: index % 3 for index in range(7)}
    found = batch["image"][:, 0, 0, 0].tolist()
    assert dict(zip(found, batch["label"].tolist(), strict=True)) == expected
    config.num_validation = 2
    with pytest.raises(ValueError, match="num_validation=2 .* of their own: set data"):
        load_data(config)


def test_a_set_of_one_split_is_its_training_images(tmp_path):
    config = write_fruits(tmp_path, (5, 7, 1), train=7)
    config.num_validation = 2
    data = load_data(config)
    assert (len(data.train), len(data.validation)) == (5, 2)
    assert data.eval_splits["test"] is data.eval_splits["validation"]


@pytest.mark.parametrize("shape", [(5, 7, 1), (None, None, 1)])
def test_a_split_without_labels_is_left_out(tmp_path, shape):
    config = write_fruits(tmp_path, shape, train=7, validation=2, test=UNLABELLED)
    with pytest.warns(UserWarning, match="left out split test, which has no labels"):
        data = load_data(config)
    assert data.eval_splits["test"] is data.eval_splits["validation"]
    assert levels(data.eval_splits["validation"]) == ([20, 21], [0, 1])


def test_unsuitable_and_unknown_sets_are_refused_with_a_fix(tmp_path):
    config = write_fruits(tmp_path, (5, 7, 1), keys=None, train=7)
    message = (
        r"fruits.* must have one feature that is the image of an example, but has "
    )
    with pytest.raises(ValueError, match=rf"{message}several features \(mask, photo\)"):
        load_data(config)
    config.name = "fruit"
    message = r"unknown data.name 'fruit': did you mean 'fruits'\? .*; to add an image "
    with pytest.raises(
        ValueError, match=f"^{message}set of TFDS, run `tfds build NAME"
    ):
        load_data(config)
    config.name = "../fruits"
    with pytest.raises(ValueError, match=r"unknown data.name '../fruits'"):
        load_data(config)


def test_a_set_without_training_images_is_refused(tmp_path):
    config = write_fruits(tmp_path, (5, 7, 1), test=7)
    with pytest.raises(ValueError, match="has no split 'train', only 'test': choose"):
        load_data(config)

"""Streamed photographs: order, augmentation, workers, bad input."""

import importlib.util
import itertools
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from ml_collections import ConfigDict
from PIL import Image

from relattn.data import DatasetNotPreparedError, load_data, load_images
from relattn.data.base import DataSource, EvalSplit
from relattn.data.image_transforms import (
    random_flip,
    random_resized_crop,
    resized_center_crop,
)
from relattn.data.prepare import check_archives
from relattn.data.prepare import main as prepare
from relattn.data.streaming import EvalBatches, Photographs, read_batches
from tests.data.conftest import encode_photograph
from tests.helpers.shards import check_shards_equal_batches


@pytest.fixture
def config(photographs):
    return ConfigDict(
        {
            "name": "imagenet2012",
            "source": "tfds",
            "data_dir": str(photographs),
            "image_size": 13,
            "num_validation": 3,
        }
    )


def take(data, num_steps, batch_size=5, seed=0, start_step=0):
    with data.train_loader(batch_size, seed, start_step) as loader:
        return dict(itertools.islice(loader, num_steps))


def indices(batch):
    """Returns the indices of the photographs in a batch, from their grey level."""
    return np.round((batch["image"].mean((1, 2, 3)) - 3) / 10).astype(int)


def equal(first, second):
    return all(np.array_equal(first[key], second[key]) for key in first)


def test_streamed_images_are_a_data_source(config, photographs):
    data = load_data(config)
    assert isinstance(data, DataSource)
    info = data.info
    assert (info.kind, info.name, info.num_train) == ("images", "imagenet2012", 20)
    assert info.class_names == ("n01", "n02", "n03")
    assert info.image_shape == (13, 13, 3)
    assert info.mean == (0.485, 0.456, 0.406) and info.std == (0.229, 0.224, 0.225)
    folder = photographs / "imagenet2012" / "5.1.0"
    assert info.origin == f"imagenet2012 5.1.0, prepared by TFDS in {folder}"
    assert list(data.eval_splits) == ["validation", "test"]
    assert all(isinstance(split, EvalSplit) for split in data.eval_splits.values())
    assert [len(split) for split in data.eval_splits.values()] == [3, 7]


def test_epoch_visits_every_photograph_once(config):
    data = load_data(config)
    steps = take(data, 8)
    assert list(steps) == list(range(8))
    order = np.concatenate([indices(batch) for batch in steps.values()])
    first, second = order[:20], order[20:]
    held_out = np.concatenate(
        [indices(batch)[:3] for batch in data.eval_splits["validation"].batches(3)]
    )
    assert sorted([*first, *held_out]) == list(range(23))
    assert sorted(second) == sorted(first) and list(second) != list(first)
    for batch in steps.values():
        assert batch["image"].shape == (5, 13, 13, 3)
        assert (batch["image"].dtype, batch["label"].dtype) == (np.uint8, np.int32)
        np.testing.assert_array_equal(batch["label"], indices(batch) % 3)


def test_validation_photographs_depend_on_split_seed_only(config):
    def held_out(**keys):
        split = load_data(ConfigDict({**config, **keys})).eval_splits["validation"]
        return [indices(batch).tolist() for batch in split.batches(3)]

    assert held_out() == held_out()
    assert held_out() != held_out(split_seed=1)


@pytest.mark.parametrize("augment", ["none", "randaugment(num_ops=2, magnitude=9)"])
def test_batch_is_a_pure_function_of_the_step(config, augment):
    config.augment = augment
    data = load_data(config)
    whole = take(data, 9)
    resumed = take(load_data(config), 4, start_step=5)
    assert list(resumed) == [5, 6, 7, 8]
    for step, batch in resumed.items():
        assert equal(batch, whole[step])
    other = take(data, 1, seed=1)
    assert not equal(other[0], whole[0])


def test_training_photographs_are_cropped_then_flipped(config):
    (batch,) = take(load_data(config), 1, seed=3).values()
    flips = []
    for row, index in enumerate(indices(batch)):
        rng = np.random.default_rng([3, 0, row, 1])
        whole = Image.open(encode_photograph(23, index)).convert("RGB")
        crop = random_resized_crop(whole, rng, 13)
        image = random_flip(crop, rng)
        np.testing.assert_array_equal(batch["image"][row], np.asarray(image))
        flips.append(image is not crop)
    assert 0 < sum(flips) < 5


def test_crops_and_augmentations_differ_between_epochs(config):
    data = load_data(config)
    first, second = take(data, 4), take(data, 4, start_step=4)
    image = {}
    for batch in first.values():
        image |= dict(zip(indices(batch), batch["image"], strict=True))
    for batch in second.values():
        for index, again in zip(indices(batch), batch["image"], strict=True):
            assert not np.array_equal(image[index], again)
    config.augment = "randaugment"
    augmented = take(load_data(config), 4)
    assert any(not equal(augmented[step], first[step]) for step in first)
    config.augment = "randaugment(num_ops=0)"
    unchanged = take(load_data(config), 4)
    assert all(equal(unchanged[step], first[step]) for step in first)


def test_evaluation_uses_central_crops(config):
    config.short_side = 17
    batches = list(load_data(config).eval_splits["test"].batches(4))
    assert [batch["weight"].tolist() for batch in batches] == [[1] * 4, [1, 1, 1, 0]]
    found = []
    for batch in batches:
        for image, label, weight in zip(*batch.values(), strict=True):
            if weight:
                index = int(round((image.mean() - 3) / 10))
                found.append(index)
                assert label == index % 3
                whole = Image.open(encode_photograph(7, index)).convert("RGB")
                crop = resized_center_crop(whole, 13, 17)
                np.testing.assert_array_equal(image, np.asarray(crop))
            else:
                assert not image.any()
    assert sorted(found) == list(range(7))
    with pytest.raises(ValueError, match="integer of at least 1, got 0"):
        list(load_data(config).eval_splits["test"].batches(0))


def test_short_side_default_scales_with_image_size(config):
    config.image_size = 14
    splits = load_data(config).eval_splits
    assert splits["test"].short_side == 16
    del config.image_size
    splits = load_data(config).eval_splits
    assert (splits["test"].image_size, splits["test"].short_side) == (224, 256)


KILLED = """
import multiprocessing, os, signal
import numpy as np
from relattn.data.streaming import read_batches
if __name__ == "__main__":
    with read_batches([{"label": np.zeros(1)}] * 9, num_workers=1) as batches:
        next(batches)
        (worker,) = multiprocessing.active_children()
        print(worker.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_workers_end_with_a_process_that_is_killed(tmp_path):
    (tmp_path / "read.py").write_text(KILLED)
    command = [sys.executable, str(tmp_path / "read.py")]
    # The worker has the pipe, too: this waits for both.
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=120)
    assert done.returncode == -signal.SIGKILL and int(done.stdout)


@pytest.mark.slow
def test_worker_processes_yield_the_same_batches(config):
    config.augment = "randaugment(num_ops=2, magnitude=9)"
    expected = take(load_data(config), 3, start_step=3)
    config.num_workers = 2
    data = load_data(config)
    actual = take(data, 3, start_step=3)
    assert list(actual) == list(expected) == [3, 4, 5]
    for step, batch in expected.items():
        assert equal(batch, actual[step])
        # A copy, not a view of the workers' shared memory.
        assert type(actual[step]["image"]) is np.ndarray
    assert "tensorflow" not in sys.modules


def test_batches_end_at_an_error():
    class Damaged(list):
        def __getitems__(self, keys):
            raise RuntimeError("damaged")

    images = Photographs(Damaged(), np.arange(5), 3, "FOLDER")
    source = EvalBatches(images, batch_size=1, image_size=3, short_side=4)
    with read_batches(source, num_workers=0) as batches:
        with pytest.raises(ValueError, match="records 0 of FOLDER"):
            next(batches)
        assert not list(batches)


def test_a_sentence_says_that_a_worker_was_killed():
    class Killed(EvalBatches):
        def __getitem__(self, number):
            # The error of grain.
            raise RuntimeError(
                "Worker process was terminated unexpectedly with exit code -9. Search "
                "the logs above for the source of the crash."
            )

    images = Photographs([], np.arange(5), 3, "FOLDER")
    source = Killed(images, batch_size=1, image_size=3, short_side=4)
    message = "reads images ended with exit code -9, perhaps .*: lower data.num_workers"
    with (
        read_batches(source, num_workers=0) as batches,
        pytest.raises(ChildProcessError, match=message),
    ):
        next(batches)


def test_place_is_applied_to_batches(config):
    with load_data(config).train_loader(5, 0, place=indices) as loader:
        step, placed = next(loader)
    assert step == 0 and placed.shape == (5,)
    with pytest.raises(ValueError, match="batch_size=21 must be from 1 to 20, "):
        take(load_data(config), 1, batch_size=21)


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"num_workers": -1}, "num_workers=-1 must be an integer of at least 0"),
        ({"image_size": 0}, "data.image_size=0 must be at least 1"),
        (
            {"image_size": 14, "short_side": 13},
            "data.image_size=14 must be .* data.short_side=13",
        ),
        (
            {"augment": "randaugmnet"},
            "unknown data.augment 'randaugmnet': did you mean 'randaugment'",
        ),
        (
            {"augment": "randaugment(magnitud=3)"},
            "'randaugment' has no option 'magnitud': did you mean 'magnitude'",
        ),
        (
            {"augment": "randaugment(magnitude=31)"},
            "randaugment: magnitude=31 must be within 0 .. 30",
        ),
        (
            {"num_validation": 23},
            "data.num_validation=23 must be an integer from 0 to 22, ",
        ),
    ],
)
def test_invalid_options_raise(config, keys, message):
    config.update(keys)
    with pytest.raises(ValueError, match=message):
        load_data(config)


def test_load_images_raises_for_streamed_set(config):
    with pytest.raises(ValueError, match="'imagenet2012' does not fit into memory"):
        load_images(config)


def test_set_not_prepared_raises(config, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config.data_dir = str(tmp_path)
    message = (
        rf"^imagenet2012 is not prepared in {tmp_path} \(TensorFlow, required "
        r"for preparation only, is missing\): put "
        r"ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar, .* `pip install "
        r"'relattn\[prepare\]'`, and run once "
        rf"`relattn prepare --name=imagenet2012 --data_dir={tmp_path} "
        r"--manual_dir=DIR`$"
    )
    with pytest.raises(DatasetNotPreparedError, match=message):
        load_data(config)


def test_missing_archives_raise(tmp_path):
    message = "^ILSVRC2012_img_train.tar needs --manual_dir: register with its owners"
    with pytest.raises(FileNotFoundError, match=message):
        check_archives("imagenet2012", [], "")
    (tmp_path / "ILSVRC2012_img_train.tar").touch()
    message = f"^ILSVRC2012_img_val.tar is not in {tmp_path}: register"
    with pytest.raises(FileNotFoundError, match=message):
        check_archives("imagenet2012", [], str(tmp_path))
    (tmp_path / "ILSVRC2012_img_val.tar").touch()
    check_archives("imagenet2012", [], str(tmp_path))


def test_prepare_accepts_a_prepared_set(photographs, capsys):
    prepare(["--name=imagenet2012", f"--data_dir={photographs}"])
    assert "imagenet2012 is prepared in" in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["features.json", "*train*"])
def test_damaged_set_raises(config, photographs, tmp_path, damage):
    shutil.copytree(photographs, tmp_path / "copy")
    config.data_dir = str(tmp_path / "copy")
    for file in (tmp_path / "copy").glob(f"imagenet2012/*/{damage}"):
        file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(ValueError, match=r"2012.5.1.0 cannot be read .*prepare the"):
        load_data(config)


def test_damaged_photograph_raises(tmp_path):
    class Records(list):
        def __getitems__(self, keys):
            if 4 in keys:
                raise RuntimeError("bad checksum\nat 0x7f")
            return [self[key] for key in keys]

    file = tmp_path / "image.png"
    Image.new("RGB", (7, 5)).save(file)
    whole, half = file.read_bytes(), file.read_bytes()[:40]
    contents = [(whole, 2), (half, 2), (whole, 3), (whole, -1)]
    records = Records({"image": image, "label": label} for image, label in contents)
    images = Photographs(records, np.arange(5), 3, "the train images in FOLDER")
    [(image, label)] = images.read([0])
    assert (image.size, label) == ((7, 5), 2)
    start = "^record {} of the train images in FOLDER "
    message = start.format(1) + "cannot be read as an image .*: prepare the set again"
    with pytest.raises(ValueError, match=message):
        list(images.read([1]))
    message = "records 0, 4 of the .* be read .RuntimeError: bad checksum.: prepare"
    with pytest.raises(ValueError, match=message):
        list(images.read([0, 4]))
    for position, wrong in ((2, 3), (3, -1)):
        message = start.format(position) + f"has the label {wrong}, expected 0 to 2"
        with pytest.raises(ValueError, match=message):
            list(images.read([position]))


def test_the_shards_of_processes_equal_the_batch(config):
    config.augment = "randaugment(num_ops=2, magnitude=9)"
    data = load_data(config)
    check_shards_equal_batches(data, batch_size=6, num_shards=3)

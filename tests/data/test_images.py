"""Image sets in memory: validation split, channel statistics, training batches."""

import numpy as np
import pytest

from relattn.data.base import DataSource, EvalSplit, batch_indices
from relattn.data.images import (
    ImageData,
    ImageSplit,
    channel_statistics,
    draw_validation,
    split_validation,
)
from tests.helpers.export import unchecked_annotations
from tests.helpers.shards import check_shards_equal_batches


def numbered_split(n):
    labels = np.arange(n, dtype=np.int32)
    images = np.repeat(labels.astype(np.uint8), 6).reshape(n, 2, 3, 1)
    return ImageSplit(images, labels)


@pytest.mark.parametrize("num_validation", [0, 1, 11, 22])
def test_validation_split_partitions_the_images(num_validation):
    train, validation = split_validation(numbered_split(23), num_validation, 7)
    assert len(validation) == num_validation
    assert sorted([*train.labels, *validation.labels]) == list(range(23))
    for split in (train, validation):
        assert (split.images == split.labels[:, None, None, None]).all()


def test_validation_split_depends_on_the_seed_only():
    def chosen(seed):
        return set(split_validation(numbered_split(101), 13, seed)[1].labels.tolist())

    assert chosen(0) == chosen(0)
    assert chosen(0) != chosen(1)
    assert chosen(0) == set(np.random.default_rng(0).permutation(101)[:13].tolist())


def test_validation_split_does_not_copy():
    split = numbered_split(23)
    train, validation = split_validation(split, 5, 0)
    assert np.shares_memory(train.images, split.images)
    assert np.shares_memory(validation.images, split.images)


@pytest.mark.parametrize("num_validation", [-1, 23, 24, 0.1])
def test_num_validation_out_of_range_raises(num_validation):
    message = f"data.num_validation={num_validation} must be an integer from 0 to 22"
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        split_validation(numbered_split(23), num_validation, 0)


def test_statistics_equal_numpy(monkeypatch):
    monkeypatch.setattr("relattn.data.images.CHUNK_BYTES", 5 * 7 * 3 * 4)
    images = np.random.default_rng(0).integers(0, 256, (11, 5, 7, 3), np.uint8)
    mean, std = channel_statistics(images)
    values = images / 255
    np.testing.assert_allclose(mean, values.mean(axis=(0, 1, 2)), rtol=1e-6)
    np.testing.assert_allclose(std, values.std(axis=(0, 1, 2)), rtol=1e-6)


def numbered_data():
    train, validation = split_validation(numbered_split(23), 5, 0)
    mean, std = channel_statistics(train.images)
    return ImageData(
        name="numbers",
        train=train,
        validation=validation,
        test=numbered_split(3),
        class_names=tuple(map(str, range(23))),
        mean=mean,
        std=std,
        origin="numbers",
    )


@pytest.mark.parametrize("start_step", [0, 7])
def test_train_loader_yields_the_batch_of_each_step(start_step):
    data = numbered_data()
    with data.train_loader(5, 1, start_step, place=lambda batch: batch) as loader:
        for expected, (step, batch) in zip(range(start_step, 11), loader, strict=False):
            assert step == expected
            indices = batch_indices(18, 5, 1, step)
            np.testing.assert_array_equal(batch["label"], data.train.labels[indices])
            np.testing.assert_array_equal(batch["image"], data.train.images[indices])


def test_image_data_is_a_data_source():
    data = numbered_data()
    assert isinstance(data, DataSource)
    assert all(isinstance(split, EvalSplit) for split in data.eval_splits.values())
    assert {name: len(split) for name, split in data.eval_splits.items()} == {
        "validation": 5,
        "test": 3,
    }
    info = data.info
    assert (info.kind, info.num_train, info.num_classes) == ("images", 18, 23)
    assert info.image_shape == (2, 3, 1)
    assert info.steps_per_epoch(5) == 3


def test_batch_larger_than_training_set_raises():
    with pytest.raises(ValueError, match="batch_size=29 must be from 1 to 18, "):
        numbered_data().train_loader(29, 0)


def test_the_shards_of_processes_equal_the_batch():
    check_shards_equal_batches(numbered_data(), batch_size=6, num_shards=3)


@pytest.mark.parametrize("seed", [-1, 1.5])
def test_a_wrong_split_seed_raises(seed):
    message = f"data.split_seed={seed} must be an integer of at least 0"
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        draw_validation(7, 3, seed)


def test_lists_are_no_split():
    images = np.zeros((2, 3, 3, 1), np.uint8)
    message = "the labels of images must be a NumPy array, got list: pass np.asarray"
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        ImageSplit(images, [0, 1])

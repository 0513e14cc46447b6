"""Validation split and channel statistics."""

import numpy as np
import pytest

from relattn.data.images import ImageSplit, channel_statistics, split_validation


def numbered_split(n):
    labels = np.arange(n, dtype=np.int32)
    images = np.repeat(labels.astype(np.uint8), 6).reshape(n, 2, 3, 1)
    return ImageSplit(images, labels)


@pytest.mark.parametrize("num_validation", [0, 1, 11, 22])
def test_validation_images_leave_the_training_images(num_validation):
    train, validation = split_validation(numbered_split(23), num_validation, 7)
    assert len(validation) == num_validation
    assert sorted([*train.labels, *validation.labels]) == list(range(23))
    for split in (train, validation):
        assert (split.images == split.labels[:, None, None, None]).all()


def test_the_seed_decides_and_nothing_else():
    def chosen(seed):
        return set(split_validation(numbered_split(101), 13, seed)[1].labels.tolist())

    assert chosen(0) == chosen(0)
    assert chosen(0) != chosen(1)
    assert chosen(0) == set(np.random.default_rng(0).permutation(101)[:13].tolist())


def test_images_are_not_copied():
    split = numbered_split(23)
    train, validation = split_validation(split, 5, 0)
    assert np.shares_memory(train.images, split.images)
    assert np.shares_memory(validation.images, split.images)


@pytest.mark.parametrize("num_validation", [-1, 23, 24])
def test_num_validation_out_of_range(num_validation):
    message = f"data.num_validation={num_validation} of 23 training images.*at most 22"
    with pytest.raises(ValueError, match=message):
        split_validation(numbered_split(23), num_validation, 0)


def test_statistics_are_those_of_numpy(monkeypatch):
    monkeypatch.setattr("relattn.data.images.CHUNK_BYTES", 5 * 7 * 3 * 4)
    images = np.random.default_rng(0).integers(0, 256, (11, 5, 7, 3), np.uint8)
    mean, std = channel_statistics(images)
    values = images / 255
    np.testing.assert_allclose(mean, values.mean(axis=(0, 1, 2)), rtol=1e-6)
    np.testing.assert_allclose(std, values.std(axis=(0, 1, 2)), rtol=1e-6)

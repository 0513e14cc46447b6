"""Batches are a pure function of the seed and the step."""

import numpy as np
import pytest

from relattn.data.batches import batch_indices, part_rows, steps_per_epoch
from relattn.data.images import ImageSplit


def random_split(n):
    rng = np.random.default_rng(n)
    images = rng.integers(0, 256, (n, 3, 5, 2), np.uint8)
    return ImageSplit(images, np.arange(n, dtype=np.int32))


def test_an_epoch_visits_each_example_at_most_once():
    seen = np.concatenate([batch_indices(23, 5, 0, step) for step in range(4)])
    assert len(set(seen.tolist())) == 20 == 5 * steps_per_epoch(23, 5)


def test_each_epoch_has_its_own_order_and_remainder():
    first, second = (
        np.concatenate([batch_indices(23, 5, 0, 4 * e + s) for s in range(4)])
        for e in range(2)
    )
    assert first.tolist() != second.tolist()
    assert set(first.tolist()) != set(second.tolist())


def test_pure_function_of_seed_and_step():
    forwards = [batch_indices(23, 5, 3, step).tolist() for step in range(12)]
    backwards = [batch_indices(23, 5, 3, step).tolist() for step in reversed(range(12))]
    assert forwards == backwards[::-1]
    assert batch_indices(23, 5, 4, 0).tolist() != forwards[0]


def test_the_order_never_changes_between_versions():
    assert batch_indices(23, 5, 0, 0).tolist() == [18, 4, 20, 10, 11]


@pytest.mark.parametrize("batch_size", [0, 24])
def test_batch_that_cannot_be_filled(batch_size):
    message = f"batch_size={batch_size} with 23 training images.*between 1 and 23"
    with pytest.raises(ValueError, match=message):
        batch_indices(23, batch_size, 0, 0)


def test_gather():
    split = random_split(7)
    batch = split.gather(np.array([5, 0, 2]))
    assert batch["label"].tolist() == [5, 0, 2]
    np.testing.assert_array_equal(batch["image"], split.images[[5, 0, 2]])


@pytest.mark.parametrize("n", [0, 1, 5, 13])
def test_evaluation_sees_every_example_once(n):
    split = random_split(n)
    batches = list(split.batches(5))
    assert all(len(array) == 5 for batch in batches for array in batch.values())
    images, labels = [np.empty((0, 3, 5, 2))], [np.empty(0)]
    for batch in batches:
        real = batch["weight"] == 1
        assert batch["weight"][~real].tolist() == [0] * (~real).sum()
        assert batch["image"].dtype == np.uint8
        images.append(batch["image"][real])
        labels.append(batch["label"][real])
    np.testing.assert_array_equal(np.concatenate(images), split.images)
    np.testing.assert_array_equal(np.concatenate(labels), split.labels)


def test_eval_batch_size_must_be_positive():
    with pytest.raises(ValueError, match="batch_size=0: it must be at least 1"):
        next(random_split(3).batches(0))


def test_a_batch_that_processes_cannot_share():
    with pytest.raises(ValueError, match="batch_size=7 does not divide by the 3 p"):
        part_rows(7, (0, 3))

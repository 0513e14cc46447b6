"""Data descriptions, batch order, padding, shards and the loader."""

import dataclasses
import itertools
import json
import threading

import numpy as np
import pytest

from relattn.data.base import (
    ImageInfo,
    Loader,
    ShardIndex,
    TextInfo,
    batch_indices,
    read_info,
    shard_rows,
    steps_per_epoch,
)
from relattn.data.images import ImageSplit
from tests.helpers.sentences import assert_refused

IMAGES = ImageInfo(
    name="columns",
    class_names=("left", "right"),
    image_shape=(5, 3, 1),
    mean=(0.25,),
    std=(0.5,),
    num_train=101,
    origin="noise",
)
TEXT = TextInfo(
    name="plays",
    tokenizer="bytes",
    vocab_size=256,
    context_length=7,
    num_train=11,
    origin="a file",
)


@pytest.mark.parametrize("info", [IMAGES, TEXT])
def test_info_round_trips_through_json(info):
    values = json.loads(json.dumps(dataclasses.asdict(info)))
    assert read_info(values) == info


def test_info_without_kind_is_of_images():
    values = dataclasses.asdict(IMAGES)
    del values["kind"]
    assert read_info(values) == IMAGES


@pytest.mark.parametrize(
    "info, key, value",
    [
        *((IMAGES, "class_names", value) for value in ([], "ab", [["a"], ["b"]], [1])),
        *((IMAGES, "image_shape", value) for value in ([5, 3], [5, 3, 0], [5, 3, 1.0])),
        *((IMAGES, "mean", value) for value in ([float("nan")], ["0"], 0.5, [1e9])),
        *((IMAGES, "std", value) for value in ([-1], [float("inf")], [True])),
        (IMAGES, "num_train", -1),
        (TEXT, "vocab_size", 2**40),
        (TEXT, "context_length", "8"),
        (TEXT, "kind", "images\n"),
    ],
)
def test_values_that_describe_no_data_are_refused(info, key, value):
    values = {**dataclasses.asdict(info), key: value}
    assert_refused(lambda: read_info(values), key)


def test_too_few_examples_for_a_batch_raise():
    with pytest.raises(
        ValueError, match="batch_size=13 must be from 1 to 11,.*windows"
    ):
        TEXT.steps_per_epoch(13)
    assert IMAGES.steps_per_epoch(13) == 7


def random_split(n):
    rng = np.random.default_rng(n)
    images = rng.integers(0, 256, (n, 3, 5, 2), np.uint8)
    return ImageSplit(images, np.arange(n, dtype=np.int32))


def test_an_epoch_visits_each_example_at_most_once():
    seen = np.concatenate([batch_indices(23, 5, 0, step) for step in range(4)])
    assert len(set(seen.tolist())) == 20 == 5 * steps_per_epoch(23, 5)


def test_order_and_remainder_differ_between_epochs():
    first, second = (
        np.concatenate([batch_indices(23, 5, 0, 4 * e + s) for s in range(4)])
        for e in range(2)
    )
    assert first.tolist() != second.tolist()
    assert set(first.tolist()) != set(second.tolist())


def test_batch_indices_are_a_pure_function_of_seed_and_step():
    forwards = [batch_indices(23, 5, 3, step).tolist() for step in range(12)]
    backwards = [batch_indices(23, 5, 3, step).tolist() for step in reversed(range(12))]
    assert forwards == backwards[::-1]
    assert batch_indices(23, 5, 4, 0).tolist() != forwards[0]


def test_order_is_stable_across_versions():
    assert batch_indices(23, 5, 0, 0).tolist() == [18, 4, 20, 10, 11]


@pytest.mark.parametrize("batch_size", [0, 24])
def test_invalid_batch_size_raises(batch_size):
    message = f"batch_size={batch_size} must be from 1 to 23, .* images"
    with pytest.raises(ValueError, match=message):
        batch_indices(23, batch_size, 0, 0)


def test_gather_returns_images_and_labels():
    split = random_split(7)
    batch = split.gather(np.array([5, 0, 2]))
    assert batch["label"].tolist() == [5, 0, 2]
    np.testing.assert_array_equal(batch["image"], split.images[[5, 0, 2]])


@pytest.mark.parametrize("n", [0, 1, 5, 13])
def test_eval_batches_yield_every_example_once(n):
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
    with pytest.raises(ValueError, match="integer of at least 1, got 0"):
        next(random_split(3).batches(0))


def test_batch_size_not_divisible_by_processes_raises():
    with pytest.raises(ValueError, match="batch_size=7 is not divisible by 3, "):
        shard_rows(7, ShardIndex(0, 3))


SPLIT = ImageSplit(
    np.random.default_rng(0).integers(0, 256, (23, 3, 5, 1), np.uint8),
    np.arange(23, dtype=np.int32),
)


def make_batch(step):
    return SPLIT.gather(batch_indices(23, 5, 1, step))


@pytest.mark.parametrize("start_step", [0, 3, 10])
@pytest.mark.parametrize("ahead", [0, 2])
def test_loader_yields_the_batch_of_each_step(start_step, ahead):
    with Loader(make_batch, start_step, ahead=ahead) as loader:
        for expected, (step, batch) in enumerate(
            itertools.islice(loader, 9), start_step
        ):
            indices = batch_indices(23, 5, 1, step)
            assert step == expected
            np.testing.assert_array_equal(batch["label"], indices)
            np.testing.assert_array_equal(batch["image"], SPLIT.images[indices])


def test_place_runs_in_the_loader_thread():
    names = []

    def place(batch):
        names.append(threading.current_thread().name)
        return batch["label"].sum()

    with Loader(make_batch, place=place) as loader:
        _, total = next(loader)
    assert total == batch_indices(23, 5, 1, 0).sum()
    assert all(name.startswith("loader") for name in names)


@pytest.mark.parametrize("ahead", [0, 2])
def test_loader_places_batches_ahead_of_time(ahead):
    placed = threading.Semaphore(0)

    def place(batch):
        placed.release()

    with Loader(make_batch, place=place, ahead=ahead) as loader:
        for _ in range(3):
            next(loader)
        assert all(placed.acquire(timeout=10) for _ in range(3 + ahead))
        assert not placed.acquire(timeout=0.1)


def test_error_in_the_thread_is_raised_by_next():
    def place(batch):
        raise RuntimeError("no such device")

    with (
        Loader(make_batch, place=place) as loader,
        pytest.raises(RuntimeError, match="no such device"),
    ):
        next(loader)


def test_close_stops_the_thread():
    loader = Loader(make_batch)
    loader.close()
    assert not any(t.name.startswith("loader") for t in threading.enumerate())

"""What a run remembers of its data."""

import dataclasses
import itertools
import json
import threading

import numpy as np
import pytest

from relattn.data.base import (
    ImageInfo,
    Loader,
    TextInfo,
    batch_indices,
    part_rows,
    read_info,
    steps_per_epoch,
)
from relattn.data.images import ImageSplit

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
def test_json_holds_all_of_it(info):
    values = json.loads(json.dumps(dataclasses.asdict(info)))
    assert read_info(values) == info


def test_a_run_from_before_there_was_text_is_of_images():
    values = dataclasses.asdict(IMAGES)
    del values["kind"]
    assert read_info(values) == IMAGES


def test_too_few_examples_for_a_batch():
    with pytest.raises(ValueError, match="batch_size=13 with 11 training windows"):
        TEXT.steps_per_epoch(13)
    assert IMAGES.steps_per_epoch(13) == 7


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


SPLIT = ImageSplit(
    np.random.default_rng(0).integers(0, 256, (23, 3, 5, 1), np.uint8),
    np.arange(23, dtype=np.int32),
)


def batch_of(step):
    return SPLIT.gather(batch_indices(23, 5, 1, step))


@pytest.mark.parametrize("start_step", [0, 3, 10])
@pytest.mark.parametrize("ahead", [0, 2])
def test_batches_follow_from_the_step(start_step, ahead):
    with Loader(batch_of, start_step, ahead=ahead) as loader:
        for expected, (step, batch) in enumerate(
            itertools.islice(loader, 9), start_step
        ):
            indices = batch_indices(23, 5, 1, step)
            assert step == expected
            np.testing.assert_array_equal(batch["label"], indices)
            np.testing.assert_array_equal(batch["image"], SPLIT.images[indices])


def test_place_runs_ahead_in_the_thread():
    names = []

    def place(batch):
        names.append(threading.current_thread().name)
        return batch["label"].sum()

    with Loader(batch_of, place=place) as loader:
        _, total = next(loader)
    assert total == batch_indices(23, 5, 1, 0).sum()
    assert all(name.startswith("loader") for name in names)


def test_an_error_of_the_thread_is_raised_here():
    def place(batch):
        raise RuntimeError("no such device")

    with (
        Loader(batch_of, place=place) as loader,
        pytest.raises(RuntimeError, match="no such device"),
    ):
        next(loader)


def test_closing_stops_the_thread():
    loader = Loader(batch_of)
    loader.close()
    assert not any(t.name.startswith("loader") for t in threading.enumerate())

"""The loader yields the batches of the steps, from any step on."""

import itertools
import threading

import numpy as np
import pytest

from relattn.data.batches import batch_indices
from relattn.data.images import ImageSplit
from relattn.data.loader import Loader

SPLIT = ImageSplit(
    np.random.default_rng(0).integers(0, 256, (23, 3, 5, 1), np.uint8),
    np.arange(23, dtype=np.int32),
)


@pytest.mark.parametrize("start_step", [0, 3, 10])
@pytest.mark.parametrize("ahead", [0, 2])
def test_batches_follow_from_the_step(start_step, ahead):
    with Loader(SPLIT, 5, seed=1, start_step=start_step, ahead=ahead) as loader:
        assert loader.steps_per_epoch == 4
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

    with Loader(SPLIT, 5, seed=0, place=place) as loader:
        _, total = next(loader)
    assert total == batch_indices(23, 5, 0, 0).sum()
    assert all(name.startswith("loader") for name in names)


def test_an_error_of_the_thread_is_raised_here():
    def place(batch):
        raise RuntimeError("no such device")

    with (
        Loader(SPLIT, 5, seed=0, place=place) as loader,
        pytest.raises(RuntimeError, match="no such device"),
    ):
        next(loader)


def test_closing_stops_the_thread():
    loader = Loader(SPLIT, 5, seed=0)
    loader.close()
    assert not any(t.name.startswith("loader") for t in threading.enumerate())


def test_batch_larger_than_the_split():
    with pytest.raises(ValueError, match="batch_size=29 with 23 training images"):
        Loader(SPLIT, 29, seed=0)

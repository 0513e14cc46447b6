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

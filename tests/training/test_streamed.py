"""Training on photographs that are read during training."""

import collections
import dataclasses
import json
import runpy

import jax
import numpy as np
import pytest

from relattn import data as data_lib
from relattn import models, training
from relattn.command import is_user_error
from relattn.data.base import batch_indices
from tests.data.conftest import photographs as photographs  # noqa: PLC0414
from tests.helpers.interrupted import final_state, train_until
from tests.training.conftest import build_tiny


@pytest.fixture
def streamed(config, photographs, monkeypatch):
    monkeypatch.setattr(models, "build_model", build_tiny)
    config.unlock()
    config.data.update(
        name="imagenet2012",
        source="tfds",
        data_dir=str(photographs),
        image_size=7,
        num_validation=3,
        augment="randaugment(num_ops=2, magnitude=9)",
        num_workers=0,
    )
    config.update(batch_size=5, eval_batch_size=4, num_epochs=2, redraw_every=3)
    config.checkpoint_every_steps = 2
    return config


def test_the_main_guard_is_asked_for_before_the_run_starts(
    streamed, tmp_path, one_device
):
    streamed.data.num_workers = 2
    script = tmp_path / "script.py"
    script.write_text("train(workdir)")

    def train(workdir):
        training.train_and_evaluate(streamed, workdir, devices=one_device)

    values = {"train": train, "workdir": tmp_path / "run"}
    with pytest.raises(ValueError, match="starts processes .*: put .* under `if __na"):
        runpy.run_path(str(script), values, run_name="__main__")
    assert not [*tmp_path.glob("run/**/*.json")]


class Damaged(collections.abc.Sequence):
    """Records, one of which is not an image."""

    def __init__(self, records, damaged):
        self.records, self.damaged = records, damaged

    def __len__(self):
        return len(self.records)

    def __getitem__(self, key):
        (record,) = self.records.__getitems__([key])
        return {**record, "image": b""} if key == self.damaged else record

    def __getitems__(self, keys):
        return [self[key] for key in keys]


def damage(data):
    """Damages a photograph of the first step, which the next epoch reads again."""
    index = batch_indices(len(data.train), batch_size=5, seed=0, step=0)[0]
    record = int(data.train.indices[index])
    photographs = dataclasses.replace(
        data.train, records=Damaged(data.train.records, record)
    )
    return dataclasses.replace(data, train=photographs), record


@pytest.mark.slow
def test_a_run_resumed_and_loaded_without_its_data(
    streamed, tmp_path, one_device, monkeypatch
):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expected = training.train_and_evaluate(streamed, whole, devices=one_device)
    train_until(3, streamed, parts, devices=one_device)
    # A photograph damaged in between ends the run, but no earlier step is lost.
    data, record = damage(data_lib.load_data(streamed.data))
    message = f"^record {record} of the train images in .* cannot be read as an image"
    with monkeypatch.context() as patch:
        patch.setattr(data_lib, "load_data", lambda config: data)
        with pytest.raises(ValueError, match=message) as raised:
            training.train_and_evaluate(streamed, parts, devices=one_device)
    assert is_user_error(raised.value)
    actual = training.train_and_evaluate(streamed, parts, devices=one_device)
    starts = json.loads((parts / "run.json").read_text())["starts"]
    assert [start["step"] for start in starts] == [0, 2, 4]
    jax.tree.map(np.testing.assert_array_equal, final_state(parts), final_state(whole))
    assert (actual["step"], actual["num_steps"]) == (8, 8)
    for key in ("test_accuracy", "test_loss", "validation_loss", "best_step"):
        assert actual[key] == expected[key]
    run = training.load_run(parts)
    assert run.data.class_names == ("n01", "n02", "n03")
    images = np.full((1, 7, 7, 3), 255, np.uint8)
    standardised = run.preprocess({"image": images})[0, 0, 0]
    expected = (1 - np.array([0.485, 0.456, 0.406])) / np.array([0.229, 0.224, 0.225])
    np.testing.assert_allclose(standardised, expected, rtol=1e-5)
    logits = training.make_predict_fn(run)(run.preprocess({"image": images}))
    assert logits.shape == (1, 3)

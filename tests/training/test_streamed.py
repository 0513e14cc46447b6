"""Training on photographs that are read as it goes on."""

import json

import jax
import numpy as np
import pytest

from relattn import models, training
from tests.data.conftest import photographs as photographs  # noqa: PLC0414
from tests.training.conftest import build_tiny
from tests.training.test_loop import Interrupted, final_state, interrupt_at


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


def test_a_run_resumed_and_loaded_without_its_data(streamed, tmp_path, one_device):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expected = training.train_and_evaluate(streamed, whole, devices=one_device)
    with pytest.raises(Interrupted):
        training.train_and_evaluate(
            streamed, parts, devices=one_device, on_step=interrupt_at(3)
        )
    actual = training.train_and_evaluate(streamed, parts, devices=one_device)
    starts = json.loads((parts / "run.json").read_text())["starts"]
    assert [start["step"] for start in starts] == [0, 2]
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

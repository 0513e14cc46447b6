"""Training on images placed on a canvas: both test sets in one run."""

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from relattn import data as data_lib
from relattn import training
from relattn.data.canvas import place_on_canvas
from tests.helpers.interrupted import train_until
from tests.training.conftest import make_data


@pytest.fixture
def placed_config(tiny, config, monkeypatch):
    with config.unlocked():
        config.data.update(placement="static", canvas=7, image_size=7)

    def load(config):
        return place_on_canvas(make_data(), ConfigDict(config.to_dict()))

    monkeypatch.setattr(data_lib, "load_data", load)
    return config


@pytest.mark.slow
def test_static_training_is_evaluated_on_both(placed_config, tmp_path, one_device):
    result = training.train_and_evaluate(placed_config, tmp_path, devices=one_device)
    for metric in ("accuracy", "loss"):
        assert result[f"test_{metric}"] == result[f"test_static_{metric}"]
    assert result["test_static_accuracy"] > 0.5
    # Columns that have moved belong to other classes.
    assert result["test_dynamic_accuracy"] < result["test_static_accuracy"]
    run = training.load_run(tmp_path)
    source = data_lib.load_data(placed_config.data)
    scores = training.evaluate(run, source.test_dynamic, 8, one_device)
    np.testing.assert_allclose(scores["loss"], result["test_dynamic_loss"], rtol=1e-5)


@pytest.mark.slow
def test_a_resumed_dynamic_run_sees_the_same_positions(
    placed_config, tmp_path, one_device
):
    placed_config.data.placement = "dynamic"
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    result = training.train_and_evaluate(placed_config, whole, devices=one_device)
    assert result["test_accuracy"] == result["test_dynamic_accuracy"]
    train_until(12, placed_config, parts, devices=one_device)
    training.train_and_evaluate(placed_config, parts, devices=one_device)
    runs = [training.load_run(folder, "latest") for folder in (whole, parts)]
    jax.tree.map(np.testing.assert_array_equal, runs[0].variables, runs[1].variables)

import jax
import pytest

from benchmarks.pipeline import measure
from relattn import data as data_lib
from relattn import models
from tests.training.conftest import build_tiny, make_data
from tests.training.conftest import config as config


def test_measure_times_pipeline_and_fixed_batches(config, monkeypatch):
    monkeypatch.setattr(models, "build_model", build_tiny)
    monkeypatch.setattr(data_lib, "load_data", lambda config: make_data())
    devices = jax.local_devices()[:2]
    result = measure(config, steps=3, rounds=2, devices=devices)
    assert result["device"] == "2 x cpu"
    assert result["batch_size"] == 20
    assert result["fixed_ms"] > 0 and result["pipeline_ms"] > 0 and result["ratio"] > 0
    rate = 20 / result["pipeline_ms"] * 1e3
    assert result["examples_per_second"] == pytest.approx(rate)
    assert result["read_examples_per_second"] > 0
    with config.unlocked():
        config.update(batch_size=21, num_devices=2)
    with pytest.raises(ValueError, match="batch_size=21 is not divisible"):
        measure(config, devices=devices)

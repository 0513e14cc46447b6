"""The trace of a few updates."""

import gzip
import json

import jax
import pytest

from relattn import training
from tests.helpers.export import unchecked_annotations
from tests.helpers.interrupted import train_until

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture
def traced(monkeypatch):
    """Records calls of the profiler among the updates."""
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda path: calls.append(path))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    return calls


def test_updates_after_the_third_are_traced(config, tmp_path, one_device, traced):
    options = {"devices": one_device, "on_step": traced.append}
    config.num_steps = 7
    training.train_and_evaluate(config, tmp_path, profile=2, **options)
    assert traced == [1, 2, 3, tmp_path / "profile", 4, 5, "stop", 6, 7]


@pytest.mark.slow
def test_a_trace_ends_with_the_run(config, tmp_path, one_device, traced):
    train_until(5, config, tmp_path, profile=9, devices=one_device)
    assert traced == [tmp_path / "profile", "stop"]


@pytest.mark.parametrize(
    "profile, message",
    [
        (-1, "profile must be a whole number of at least 0, got -1"),
        (1.5, "profile must be a whole number of at least 0, got 1.5"),
        (13, "profile=13 needs 16 updates, but the run has 15 left: trace fewer"),
    ],
)
def test_more_updates_than_the_run_has(config, tmp_path, one_device, profile, message):
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        training.train_and_evaluate(
            config, tmp_path, profile=profile, devices=one_device
        )


@pytest.mark.slow
def test_the_trace_has_the_updates(config, tmp_path, one_device):
    training.train_and_evaluate(config, tmp_path, profile=2, devices=one_device)
    (path,) = tmp_path.glob("profile/plugins/profile/*/*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    updates = [event for event in events if event.get("name") == "update"]
    assert [event["args"]["step_num"] for event in updates] == ["4", "5"]
    assert list(path.parent.glob("*.xplane.pb"))

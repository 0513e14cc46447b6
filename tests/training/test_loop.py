import functools
import json
import shutil
import threading
import time
import types

import chex
import jax
import numpy as np
import optax
import pytest

from relattn import data as data_lib
from relattn import training
from relattn.kernels.random_projections import redraw
from relattn.training import loop, metrics_window
from relattn.training import task as task_lib
from relattn.training.checkpoint import CHECKPOINTS, checkpoint_steps, read_meta
from relattn.training.config import to_json
from relattn.training.metrics_log import read_rows
from relattn.training.parallel import IN_FLIGHT
from tests.helpers.clock import slow_to_compile
from tests.helpers.export import unchecked_annotations
from tests.helpers.interrupted import final_state, train_until, untimed, untimed_rows
from tests.training.conftest import make_data
from tests.training.test_checkpoint import forge

pytestmark = pytest.mark.usefixtures("tiny")


def test_a_run_writes_its_results(finished):
    workdir, result = finished
    assert result["step"] == result["num_steps"] == 15
    assert result["epochs"] == 3
    assert result["test_accuracy"] > 0.6
    assert json.loads((workdir / "result.json").read_text()) == result
    record = json.loads((workdir / "run.json").read_text())
    assert record["config"]["optimizer"]["learning_rate"] == 0.01
    assert record["data"]["name"] == "columns"
    assert record["starts"][0]["num_devices"] == 1
    assert record["starts"][0]["versions"]["jax"] == jax.__version__
    rows = read_rows(workdir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [2, 4, 5, 6, 8, 10, 12, 14, 15]
    assert all("train_feature_mean" in row for row in rows)
    evaluated = [row for row in rows if "validation_accuracy" in row]
    assert [row["step"] for row in evaluated] == [5, 10, 15]
    best = max(evaluated, key=lambda row: row["validation_accuracy"])
    assert result["best_step"] == best["step"]
    assert 0 < result["inference_seconds"] < result["seconds"]
    assert result["validation_accuracy"] == best["validation_accuracy"]
    assert list(workdir.glob("events.out.tfevents.*"))


@pytest.mark.quick("13")
@pytest.mark.parametrize("stop", [3, 9, 13])
def test_a_resumed_run_equals_an_uninterrupted_one(
    config, tmp_path, one_device, stop, capsys
):
    config.checkpoint_every_steps = 3
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expected = training.train_and_evaluate(config, whole, devices=one_device)
    train_until(stop, config, parts, devices=one_device)
    saved = checkpoint_steps(parts / CHECKPOINTS)
    config.progress = True
    actual = training.train_and_evaluate(config, parts, devices=one_device)
    said = capsys.readouterr().out
    if saved:
        assert f"Resuming from step {saved[-1]} of {parts}" in said
    else:
        assert "Resuming" not in said
    jax.tree.map(np.testing.assert_array_equal, final_state(parts), final_state(whole))
    assert untimed(actual) == untimed(expected)
    assert untimed_rows(parts) == untimed_rows(whole)


@pytest.mark.quick("1")
@pytest.mark.parametrize("num_seeds", [1, 2])
def test_throughput_counts_updates_alone(
    config, tmp_path, one_device, monkeypatch, num_seeds
):
    """Uses a clock that compilation and evaluation advance far, and updates little."""
    now = [0.0]
    make = slow_to_compile(task_lib.make_train_step, now)

    class Slow(loop.Evaluator):
        def __call__(self, *args, **kwargs):
            now[0] += 1000
            return super().__call__(*args, **kwargs)

    def on_step(done):
        now[0] += done > 1

    clock = types.SimpleNamespace(perf_counter=lambda: now[0], time=time.time)
    monkeypatch.setattr(task_lib, "make_train_step", make)
    monkeypatch.setattr(loop, "Evaluator", Slow)
    monkeypatch.setattr(loop, "time", clock)
    monkeypatch.setattr(metrics_window, "time", clock)
    config.num_seeds = num_seeds
    result = training.train_and_evaluate(
        config, tmp_path, devices=one_device, on_step=on_step
    )
    rows = [*read_rows(tmp_path / "metrics.jsonl"), *result.get("runs", [result])]
    rate = num_seeds * config.batch_size
    assert {row["examples_per_second"] for row in rows} == {rate}
    # Compilation and three evaluations, and the 14 updates after the first.
    assert result["seconds"] == 4 * 1000 + 14


def test_a_finished_run_only_reports(config, tmp_path, one_device, capsys, finished):
    folder, first = finished
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config.progress = True
    record = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").unlink()
    again = training.train_and_evaluate(config, tmp_path, devices=one_device)
    assert json.loads((tmp_path / "run.json").read_text())["data"] == record["data"]
    assert f"Already at the final step 15 of {tmp_path}" in capsys.readouterr().out
    for key in ("seconds", "examples_per_second"):
        assert again[key] == first[key]
    assert untimed(again) == untimed(first)


@pytest.mark.slow
def test_early_stopping_keeps_the_best(config, tmp_path, one_device, capsys):
    config.optimizer.learning_rate = 1e-9
    config.redraw_every = 0
    config.early_stopping_epochs = 2
    config.num_epochs = 11
    config.progress = True
    result = training.train_and_evaluate(config, tmp_path, devices=one_device)
    assert result["stopped_early"]
    assert result["best_step"] == 5
    assert result["step"] == 15
    assert "no gain in validation accuracy in 2 epochs" in capsys.readouterr().out
    assert checkpoint_steps(tmp_path / CHECKPOINTS) == [5, 10, 15]
    again = training.train_and_evaluate(config, tmp_path, devices=one_device)
    assert untimed(again) == untimed(result)


@pytest.mark.quick("eval_every_steps-4-steps0")
@pytest.mark.parametrize(
    "key, every, steps",
    [("eval_every_steps", 4, [4, 8, 12, 15]), ("eval_every_epochs", 2, [10, 15])],
)
def test_evaluations_follow_steps_or_epochs(
    config, tmp_path, one_device, key, every, steps
):
    config[key] = every
    training.train_and_evaluate(config, tmp_path, devices=one_device)
    rows = read_rows(tmp_path / "metrics.jsonl")
    evaluated = [row["step"] for row in rows if "validation_loss" in row]
    assert evaluated == steps


def test_the_best_checkpoint_survives_a_restart(config, tmp_path, one_device):
    config.optimizer.learning_rate = 1e-9
    config.redraw_every = 0
    config.num_epochs = 6
    train_until(16, config, tmp_path, devices=one_device)
    training.train_and_evaluate(config, tmp_path, devices=one_device)
    assert checkpoint_steps(tmp_path / CHECKPOINTS) == [5, 25, 30]
    assert training.load_run(tmp_path).step == 5
    assert training.load_run(tmp_path, "latest").step == 30


def test_early_stopping_survives_a_restart(config, tmp_path, one_device):
    config.optimizer.learning_rate = 1e-9
    config.redraw_every = 0
    config.early_stopping_epochs = 3
    config.num_epochs = 11
    train_until(12, config, tmp_path, devices=one_device)
    result = training.train_and_evaluate(config, tmp_path, devices=one_device)
    assert result["stopped_early"]
    assert result["step"] == 20


@pytest.mark.quick("1")
@pytest.mark.parametrize("log_every", [1, 100])
def test_a_non_finite_loss_names_its_step(
    config, tmp_path, one_device, monkeypatch, log_every
):
    make = task_lib.make_train_step

    def make_poisoned(*args, **kwargs):
        step = make(*args, **kwargs)

        def poisoned(state, batch, key):
            new, metrics = step(state, batch, key)
            bad = state.step + 1 >= 8
            loss = jax.numpy.where(bad, jax.numpy.nan, metrics["loss"])
            return new, {**metrics, "loss": loss}

        return poisoned

    monkeypatch.setattr(task_lib, "make_train_step", make_poisoned)
    config.log_every_steps = log_every
    with pytest.raises(
        training.NonFiniteLossError,
        match=r"loss is nan at step 8; the last good checkpoint is .*5\. Lower",
    ) as error:
        training.train_and_evaluate(config, tmp_path, devices=one_device)
    assert error.value.step == 8
    assert checkpoint_steps(tmp_path / CHECKPOINTS) == [5]
    assert training.load_run(tmp_path).step == 5


@pytest.mark.slow
@pytest.mark.parametrize("skipped", [0, 3])
def test_parameters_that_are_not_finite_are_never_saved(
    config, tmp_path, one_device, monkeypatch, skipped
):
    """Loss and gradient are finite, but the optimiser returns NaN."""

    def make_optimizer(*args):
        def update(grads, state, params=None):
            scale = jax.numpy.where(state.count == 7, jax.numpy.nan, -0.01)
            count = optax.ScaleByScheduleState(state.count + 1)
            return jax.tree.map(lambda x: scale * x, grads), count

        return optax.GradientTransformation(
            lambda params: optax.ScaleByScheduleState(jax.numpy.int32(0)), update
        )

    monkeypatch.setattr(task_lib, "make_optimizer", make_optimizer)
    config.update(checkpoint_every_steps=1, max_skipped_updates=skipped)
    with pytest.raises(
        training.NonFiniteLossError,
        match=rf"the update is nan at step {8 + skipped}.*last good checkpoint is .*/"
        rf"{7 + skipped}\.",
    ):
        training.train_and_evaluate(config, tmp_path, devices=one_device)
    chex.assert_tree_all_finite(final_state(tmp_path).params)


def test_a_huge_learning_rate_is_an_error(config, tmp_path, one_device):
    config.optimizer.name = "sgd"
    config.optimizer.learning_rate = 1e30
    with pytest.raises(training.NonFiniteLossError, match="no checkpoint was written"):
        training.train_and_evaluate(config, tmp_path, devices=one_device)


@pytest.mark.quick("3-0")
@pytest.mark.parametrize("steps, index", [(3, 0), (4, 1), (15, 3)])
def test_random_features_are_those_of_the_redraw_index(
    config, tmp_path, one_device, steps, index
):
    config.num_steps = steps
    training.train_and_evaluate(config, tmp_path, devices=one_device)
    features = final_state(tmp_path).random_features
    expected = redraw(features, jax.random.key(config.seed), index)
    chex.assert_trees_all_close(features, expected, atol=1e-6)


def test_random_features_follow_the_step_of_skipped_updates(
    config, tmp_path, one_device, monkeypatch
):
    nan = float("nan")
    monkeypatch.setattr(task_lib, "make_optimizer", lambda *args: optax.scale(nan))
    config.update(num_steps=4, max_skipped_updates=4)
    training.train_and_evaluate(config, tmp_path, devices=one_device)
    features = final_state(tmp_path).random_features
    expected = redraw(features, jax.random.key(config.seed), 1)
    chex.assert_trees_all_close(features, expected, atol=1e-6)


def test_nothing_is_traced_twice(config, tmp_path, monkeypatch):
    chex.clear_trace_counter()
    redraw_once = chex.assert_max_traces(redraw, n=1)
    monkeypatch.setattr(task_lib, "redraw", redraw_once)
    for name in ("make_train_step", "make_eval_step"):
        make = getattr(task_lib, name)

        def make_counted(*args, make=make, **kwargs):
            return chex.assert_max_traces(make(*args, **kwargs), n=1)

        monkeypatch.setattr(task_lib, name, make_counted)
    training.train_and_evaluate(config, tmp_path, devices=jax.local_devices()[:2])


@pytest.mark.slow
def test_all_devices_train_and_evaluate(config, tmp_path):
    config.eval_batch_size = 15
    result = training.train_and_evaluate(config, tmp_path)
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["starts"][0]["num_devices"] == len(jax.local_devices())
    assert result["test_accuracy"] > 0.6


@pytest.mark.slow
def test_accumulation_equals_whole_batches(config, tmp_path):
    config.model.dropout = 0.0
    config.optimizer.name = "sgd"
    config.num_epochs = 1
    results = []
    for parts in (1, 5):
        config.accumulate_steps = parts
        workdir = tmp_path / str(parts)
        training.train_and_evaluate(config, workdir, devices=jax.local_devices()[:2])
        results.append(final_state(workdir).params)
    chex.assert_trees_all_close(*results, atol=1e-6)
    config.accumulate_steps = 3
    with pytest.raises(
        ValueError,
        match=r"batch_size=20 is not divisible by the 2 devices times "
        r"config.accumulate_steps=3: set it to 18 or 24",
    ):
        training.train_and_evaluate(
            config, tmp_path / "run", devices=jax.local_devices()[:2]
        )


@pytest.mark.slow
def test_every_test_set_and_top5_accuracy_are_reported(
    config, tmp_path, one_device, monkeypatch, capsys
):
    data = make_data()

    class Shifted(data_lib.ImageData):
        @property
        def eval_splits(self):
            splits = super().eval_splits
            return {**splits, "test_shifted": make_data(seed=5).test}

    many = dict(vars(data), class_names=tuple("abcdefghijk"))
    monkeypatch.setattr(data_lib, "load_data", lambda config: Shifted(**many))
    config.progress = True
    result = training.train_and_evaluate(config, tmp_path, devices=one_device)
    for split in ("validation", "test", "test_shifted"):
        for metric in ("loss", "accuracy", "top5_accuracy"):
            assert f"{split}_{metric}" in result
        assert result[f"{split}_accuracy"] <= result[f"{split}_top5_accuracy"]
    assert result["test_loss"] != result["test_shifted_loss"]
    said = capsys.readouterr().out
    assert f"test shifted accuracy {result['test_shifted_accuracy']:.4f}" in said
    row = read_rows(tmp_path / "metrics.jsonl")[-1]
    assert "validation_top5_accuracy" in row


@pytest.mark.slow
def test_a_batch_trains_on_the_most_devices_that_divide_it(config, tmp_path, capsys):
    config.update(batch_size=22, num_steps=3, checkpoint_every_steps=2, progress=True)
    train_until(3, config, tmp_path)
    said = capsys.readouterr().out
    assert "Using 2 of 4 devices, the most that fit config.batch_size=22.\n" in said
    row = read_rows(tmp_path / "metrics.jsonl")[-1]
    rate = row["examples_per_second"]
    assert row["examples_per_second_per_device"] == pytest.approx(rate / 2)
    config.num_devices = 1
    training.train_and_evaluate(config, tmp_path)
    assert "devices" not in capsys.readouterr().out
    starts = json.loads((tmp_path / "run.json").read_text())["starts"]
    assert [start["num_devices"] for start in starts] == [2, 1]


def test_a_batch_that_does_not_divide_is_an_error_before_any_work(config, tmp_path):
    config.update(batch_size=22, num_devices=4)
    with pytest.raises(
        ValueError, match=r"config.batch_size=22 is not divisible by the 4 devices: set"
    ):
        training.train_and_evaluate(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_workdir_that_is_not_writable_is_refused(config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(training.WorkdirError, match="is a file: name a directory"):
        training.train_and_evaluate(config, tmp_path / "file" / "run")


def test_an_address_is_not_a_workdir(config):
    with pytest.raises(training.WorkdirError, match="gs://bucket/run is an address"):
        training.train_and_evaluate(config, "gs://bucket/run")


def test_what_is_no_path_is_no_workdir(config):
    message = "--workdir must be a path, got None"
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        training.train_and_evaluate(config, None)


def test_validation_images_are_needed(config, tmp_path, monkeypatch):
    monkeypatch.setattr(
        data_lib, "load_data", lambda config: make_data(num_validation=0)
    )
    with pytest.raises(ValueError, match="or num_validation of data of your own"):
        training.train_and_evaluate(config, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["constant", "exponential"])
def test_a_finished_run_goes_on_like_a_longer_one(
    config, tmp_path, one_device, schedule
):
    config.schedule.name = schedule
    if schedule == "exponential":
        config.schedule.decay_rate = 0.5
    train = functools.partial(training.train_and_evaluate, devices=one_device)
    train(config, tmp_path / "short")
    config.num_epochs = 5
    result = train(config, tmp_path / "short")
    assert result["step"] == result["num_steps"] == 25
    train(config, tmp_path / "long")
    chex.assert_trees_all_equal(
        final_state(tmp_path / "short").params, final_state(tmp_path / "long").params
    )
    config.num_steps = 24
    message = "holds a run of 25 steps, but the configuration has 24: choose another"
    with pytest.raises(training.WorkdirError, match=message):
        train(config, tmp_path / "short")


def test_a_run_is_not_cut_where_it_was_not_evaluated(
    config, tmp_path, one_device, finished
):
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    meta = read_meta(tmp_path / CHECKPOINTS, 15)
    # The checkpoint as SIGTERM leaves it in a longer run, before any evaluation.
    longer = {**to_json(config), "num_epochs": 5, "eval_every_epochs": 4}
    history = [{**each, "best": {}, "best_step": None} for each in meta["history"]]
    forge(tmp_path / CHECKPOINTS / "15", {**meta, "config": longer, "history": history})
    config.eval_every_epochs = 4
    message = r"a run of 15 steps, not evaluated after the last, but .* has 15: choose"
    with pytest.raises(training.WorkdirError, match=message):
        training.train_and_evaluate(config, tmp_path, devices=one_device)


def test_a_cosine_run_does_not_go_on(config, tmp_path, one_device, finished):
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    config.schedule.name = "cosine"
    meta = read_meta(tmp_path / CHECKPOINTS, 15)
    forge(tmp_path / CHECKPOINTS / "15", {**meta, "config": to_json(config)})
    config.num_epochs = 5
    message = (
        r"num_epochs: 3 there, 5 now\): choose another directory or the same values, "
        "since the cosine schedule depends on the length of the run"
    )
    with pytest.raises(training.WorkdirError, match=message):
        training.train_and_evaluate(config, tmp_path, devices=one_device)


def test_few_updates_are_unfinished():
    """Each has a batch, and on CPUs a state, in memory."""
    finished = []

    class Metric:
        def __init__(self, step):
            self.step = step

        def block_until_ready(self):
            finished.append(self.step)
            return self

    window = metrics_window.MetricsWindow()
    for step in range(IN_FLIGHT + 3):
        window.add({"loss": Metric(step)})
    assert finished == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("parallel, seeds", [("mesh", 1), ("pmap", 3)])
def test_only_updates_are_dispatched_between_two_rows(
    config, tmp_path, monkeypatch, parallel, seeds
):
    config.update(parallel=parallel, num_seeds=seeds, log_every_steps=5, num_steps=10)
    make = task_lib.make_train_step
    updates_may_end, ended_in_time = threading.Event(), []
    updates_may_end.set()

    def wait(value):
        # In vain if the loop waits for this update.
        ended_in_time.append(updates_may_end.wait(timeout=30))
        updates_may_end.set()
        return value

    def make_waiting(*args, **kwargs):
        step = make(*args, **kwargs)

        def waiting(state, batch, key):
            state, metrics = step(state, batch, key)
            metrics["loss"] = jax.pure_callback(wait, metrics["loss"], metrics["loss"])
            return state, metrics

        return waiting

    def on_step(done):
        if done == 6:
            updates_may_end.clear()
            jax.config.update("jax_transfer_guard", "disallow")
        if done == 5 + IN_FLIGHT:
            updates_may_end.set()
        if done == 10:
            jax.config.update("jax_transfer_guard", "allow")

    monkeypatch.setattr(task_lib, "make_train_step", make_waiting)
    # With one device, an update that calls back is not asynchronous on CPUs.
    devices = jax.local_devices()[:2]
    try:
        training.train_and_evaluate(config, tmp_path, devices=devices, on_step=on_step)
    finally:
        jax.config.update("jax_transfer_guard", "allow")
        updates_may_end.set()
    assert len(ended_in_time) >= 10 and all(ended_in_time)

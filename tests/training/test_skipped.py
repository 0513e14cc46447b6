"""At most config.max_skipped_updates updates that are not finite are skipped."""

import math

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from relattn import data as data_lib
from relattn import training
from relattn.data.base import ONE_SHARD
from relattn.training import seeds
from relattn.training.metrics_log import read_rows
from relattn.training.metrics_window import summarize
from relattn.training.run_metadata import History
from relattn.training.step import create_state, make_train_step
from relattn.training.task import Task
from tests.helpers.interrupted import final_state, train_until, untimed, untimed_rows
from tests.helpers.quick import quick_jit
from tests.training.conftest import TinyModel, make_data

SHAPE = (5, 3, 1)


class Root(nn.Module):
    """A model whose values are finite at zero, but whose gradients are not."""

    @nn.compact
    def __call__(self, images, *, deterministic=True):
        scale = self.param("scale", nn.initializers.ones, (15,))
        return nn.Dense(3)(jnp.sqrt(images.reshape(len(images), -1) * scale))


@pytest.mark.parametrize("model, bad", [(TinyModel(3), np.nan), (Root(), 0.0)])
def test_a_skipped_update_changes_only_the_step(model, bad):
    optimizer, key = optax.adam(0.1), jax.random.key(3)
    state = create_state(model, optimizer, key, SHAPE).replace(step=jnp.int32(6))
    step = quick_jit(
        make_train_step(
            model,
            optimizer,
            lambda batch: batch["image"],
            skip_non_finite=True,
        )
    )
    images = np.random.default_rng(0).uniform(1, 2, (13, *SHAPE)).astype(np.float32)
    batch = {"image": images.copy(), "label": np.arange(13) % 3}
    batch["image"][-1, -1] = bad
    skipped, metrics = step(state, batch, key)
    assert np.isfinite(metrics["loss"]) == np.isfinite(bad)
    assert not np.isfinite(metrics["grad_norm"])
    chex.assert_trees_all_equal(skipped, state.replace(step=7))
    made, metrics = step(skipped, {**batch, "image": images}, key)
    assert np.isfinite(metrics["grad_norm"])
    assert int(made.opt_state[0].count) == 1


class Poisoned(data_lib.ImageData):
    """Data in which one image of some updates' batches is NaN."""

    updates = {}

    def train_loader(self, batch_size, seed, start_step=0, place=None, shard=ONE_SHARD):
        assert shard == ONE_SHARD

        def make_batch(step):
            indices = data_lib.batch_indices(len(self.train), batch_size, seed, step)
            batch = self.train.gather(indices)
            batch["poison"] = np.zeros((batch_size, 1, 1, 1), np.float32)
            if step + 1 in self.updates.get(seed, ()):
                batch["poison"][-1] = np.nan
            return batch

        return data_lib.Loader(make_batch, start_step, place=place)


@pytest.fixture
def poisoned(tiny, monkeypatch, config):
    """Makes updates 3 and 8 of seed 0, and 2, 6 and 7 of seed 2, not finite."""
    monkeypatch.setattr(Poisoned, "updates", {0: (3, 8), 2: (2, 6, 7)})
    data = Poisoned(**vars(make_data()))
    monkeypatch.setattr(data_lib, "load_data", lambda config: data)
    make_preprocess = data_lib.make_preprocess

    def make_poisoned(*args):
        preprocess = make_preprocess(*args)
        return lambda batch: preprocess(batch) + batch.get("poison", 0.0)

    monkeypatch.setattr(data_lib, "make_preprocess", make_poisoned)
    config.num_epochs = 2
    config.max_skipped_updates = 2
    config.redraw_every = 0
    return config


@pytest.mark.slow
def test_skipped_updates_are_counted_and_survive_a_restart(poisoned, tmp_path):
    devices = jax.local_devices()[:2]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expected = training.train_and_evaluate(poisoned, whole, devices=devices)
    assert expected["skipped_updates"] == 2
    rows = read_rows(whole / "metrics.jsonl")
    skipped = {row["step"]: row["train_skipped"] for row in rows}
    assert skipped == {2: 0, 4: 1, 5: 1, 6: 1, 8: 2, 10: 2}
    assert all(math.isfinite(row["train_loss"]) for row in rows)
    assert int(final_state(whole).opt_state[0].count) == 10 - 2
    train_until(9, poisoned, parts, devices=devices)
    poisoned.max_skipped_updates = 1
    with pytest.raises(
        training.NonFiniteLossError,
        match=r"loss is nan at step 8 after 1 skipped updates; the last .*/5\. Lower",
    ) as error:
        training.train_and_evaluate(poisoned, parts, devices=devices)
    assert error.value.step == 8
    poisoned.max_skipped_updates = 2
    actual = training.train_and_evaluate(poisoned, parts, devices=devices)
    assert untimed(actual) == untimed(expected)
    assert untimed_rows(parts) == untimed_rows(whole)
    chex.assert_trees_all_equal(final_state(parts), final_state(whole))


def test_each_seed_skips_its_own_updates(poisoned, tmp_path, monkeypatch):
    # By vmap, as on accelerators.
    monkeypatch.setattr(seeds, "LOOP_PLATFORMS", ())
    poisoned.num_seeds, poisoned.max_skipped_updates = 3, 3
    result = training.train_and_evaluate(
        poisoned, tmp_path, devices=jax.local_devices()[:1]
    )
    assert [run["skipped_updates"] for run in result["runs"]] == [2, 0, 3]
    state = final_state(tmp_path)
    np.testing.assert_array_equal(state.opt_state[0].count, [8, 10, 7])
    chex.assert_tree_all_finite(state.params)


def test_means_leave_skipped_updates_out(tiny, config):
    config.max_skipped_updates = 9
    config.schedule.name = "cosine"
    task = Task.build(config, make_data().info)
    window = {
        "loss": np.array([[1.0, 2.0], [np.nan, np.inf], [5.0, np.nan]], np.float32),
        "grad_norm": np.array([[1.0, np.nan], [1.0, 1.0], [2.0, 1.0]], np.float32),
        "update_norm": np.ones((3, 2), np.float32),
    }
    histories = [History(skipped_updates=1), History(skipped_updates=3)]
    first, second = summarize(window, task, histories, 7)
    assert (first["train_loss"], first["train_grad_norm"]) == (3.0, 1.5)
    assert math.isnan(second["train_loss"]) and math.isnan(second["train_grad_norm"])
    assert (first["train_skipped"], second["train_skipped"]) == (1, 3)
    assert first["epoch"] == second["epoch"] == 7 / task.steps_per_epoch
    assert first["learning_rate"] == float(task.schedule(5))
    assert second["learning_rate"] == float(task.schedule(3))
    config.max_skipped_updates = 0
    assert "train_skipped" not in summarize(window, task, histories, 7)[0]


def test_the_number_of_skipped_updates_is_not_negative(config, tmp_path):
    config.max_skipped_updates = -1
    with pytest.raises(ValueError, match="config.max_skipped_updates must be at least"):
        training.train_and_evaluate(config, tmp_path)

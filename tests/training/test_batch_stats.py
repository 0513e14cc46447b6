"""Moving statistics: checkpointed, frozen in evaluation, averaged over devices."""

import chex
import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

from relattn import models, training
from relattn.nn.batch_norm import MOMENTUM, BatchNorm
from relattn.training import seeds
from relattn.training.pmap import DataParallel
from relattn.training.step import create_state, make_train_step
from tests.helpers.interrupted import train_until
from tests.training.conftest import TinyModel, make_data
from tests.training.test_devices import batches, run, to_float

SHAPE = (5, 3, 1)


class Normalised(nn.Module):
    """A linear classifier of normalised images."""

    num_classes: int = 3

    @nn.compact
    def __call__(self, images, *, deterministic=True):
        x = BatchNorm(name="norm")(images, deterministic=deterministic)
        return nn.Dense(self.num_classes, name="head")(x.reshape(len(x), -1))


class NormalisedWithFeatures(TinyModel):
    """The tiny model, with its random features, on normalised images."""

    @nn.compact
    def __call__(self, images, *, deterministic=True):
        x = BatchNorm(name="norm")(images, deterministic=deterministic)
        return super().__call__(x, deterministic=deterministic)


def updates(model, devices, count=3, accumulate_steps=1):
    """Returns the state after SGD, which shows a wrong scale of the gradient."""
    _, state, _ = run(
        DataParallel(devices),
        optax.sgd(0.3),
        model,
        steps=count,
        accumulate_steps=accumulate_steps,
    )
    return state


def moments(images):
    axes = tuple(range(images.ndim - 1))
    return {"mean": images.mean(axes), "variance": images.var(axes)}


def moved(averages, *batches):
    return jax.tree.map(
        lambda old, *new: MOMENTUM * old + (1 - MOMENTUM) * np.mean(new),
        averages,
        *batches,
    )


@pytest.mark.slow
def test_batch_statistics_are_averaged_over_devices():
    model, devices = NormalisedWithFeatures(num_classes=3), jax.local_devices()
    one, four = (updates(model, devices[:count]) for count in (1, 4))
    chex.assert_trees_all_close(one.params, four.params, atol=2e-6)
    chex.assert_trees_all_close(one.batch_stats, four.batch_stats, atol=1e-6)
    expected = {"mean": np.zeros(1), "variance": np.ones(1)}
    for batch in batches(3):
        expected = moved(expected, moments(to_float(batch)))
    chex.assert_trees_all_close(four.batch_stats["norm"], expected, atol=1e-6)


def test_accumulation_updates_moving_averages_once():
    state = updates(Normalised(), jax.local_devices()[:1], count=1, accumulate_steps=5)
    (batch,) = batches(1)
    images = to_float(batch)
    parts = [moments(images[first::5]) for first in range(5)]
    expected = moved({"mean": np.zeros(1), "variance": np.ones(1)}, *parts)
    chex.assert_trees_all_close(state.batch_stats["norm"], expected, atol=1e-6)


def averages(run, steps):
    """Computes the moving averages of the images after a run's updates by hand."""
    result = {"mean": np.zeros(1), "variance": np.ones(1)}
    with make_data().train_loader(run.config.batch_size, run.config.seed) as loader:
        for _, (_, batch) in zip(range(steps), loader, strict=False):
            result = moved(result, moments(np.asarray(run.preprocess(batch))))
    return result


@pytest.mark.slow
def test_resumed_seeds_equal_an_uninterrupted_run(
    tiny, config, tmp_path, one_device, monkeypatch
):
    monkeypatch.setattr(models, "build_model", lambda config, **sizes: Normalised())
    config.num_seeds = 2

    result = training.train_and_evaluate(config, tmp_path / "a", devices=one_device)
    train_until(12, config, tmp_path / "b", devices=one_device)
    training.train_and_evaluate(config, tmp_path / "b", devices=one_device)
    whole, parts = (
        training.load_runs(tmp_path / name, "latest") for name in ("a", "b")
    )
    for one, other in zip(whole, parts, strict=True):
        chex.assert_trees_all_equal(one.variables, other.variables)
        # Three evaluations have not changed the result of 15 updates.
        chex.assert_trees_all_close(
            one.variables["batch_stats"]["norm"], averages(one, 15), rtol=1e-4
        )
    best = training.load_run(tmp_path / "a")
    scores = training.evaluate(best, make_data().test, 7, devices=one_device)
    expected = result["runs"][0]["test_loss"]
    np.testing.assert_allclose(scores["loss"], expected, rtol=1e-4)


def test_stacked_seeds_have_separate_statistics(monkeypatch):
    monkeypatch.setattr(seeds, "LOOP_PLATFORMS", ())
    parallel = DataParallel(jax.local_devices()[:2])
    model, optimizer = Normalised(), optax.sgd(0.3)
    step = make_train_step(model, optimizer, to_float)
    mapped = parallel.compile_train_step(seeds.map_train_step(step))
    keys = jax.vmap(jax.random.key)(np.arange(2))
    create = jax.vmap(
        lambda key: create_state(model, optimizer, key, SHAPE),
        out_axes=seeds.STATE_AXES,
    )
    one, other = batches(2)
    batch = jax.tree.map(lambda *x: np.stack(x), one, other)
    state, _ = mapped(
        parallel.place(jax.jit(create)(keys)), parallel.shard(batch, axis=1), keys
    )
    stats = parallel.fetch(state).batch_stats["norm"]["mean"]
    expected = [[(1 - MOMENTUM) * to_float(batch).mean()] for batch in (one, other)]
    np.testing.assert_allclose(stats, expected, rtol=1e-5)

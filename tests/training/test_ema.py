"""The moving average of the parameters: its formula; evaluated, saved and resumed."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from relattn import training
from relattn.training.checkpoint import CHECKPOINTS, array_shapes, read_meta
from relattn.training.step import average, create_state, make_train_step
from tests.helpers import quick
from tests.helpers.interrupted import final_state, train_until, untimed_rows
from tests.training.conftest import TinyModel, make_data
from tests.training.test_checkpoint import forge

SHAPE = (5, 3, 1)


def test_the_average_of_a_frozen_parameter_is_this_parameter():
    frozen = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    ema = {"kernel": frozen}
    for step in (1, 10, 1000):
        ema = average(ema, {"kernel": frozen}, jnp.int32(step), 0.9999)
        np.testing.assert_array_equal(ema["kernel"], frozen)


def test_the_average_follows_its_formula_and_skips_what_is_not_finite():
    model, optimizer, key = TinyModel(num_classes=3), optax.sgd(0.5), jax.random.key(3)
    rng = np.random.default_rng(0)
    batches = {
        "image": rng.normal(size=(5, 7, *SHAPE)).astype(np.float32),
        "label": rng.integers(0, 3, (5, 7)).astype(np.int32),
    }
    batches["image"][2] = np.nan
    step = make_train_step(
        model,
        optimizer,
        lambda batch: batch["image"],
        ema_decay=0.28,
        skip_non_finite=True,
    )

    def train(batches):
        def update(state, batch):
            state, _ = step(state, batch, key)
            return state, state

        start = create_state(model, optimizer, key, SHAPE, ema=True)
        return start, jax.lax.scan(update, start, batches)[1]

    start, states = quick.run(train, batches)
    chex.assert_trees_all_equal(start.ema, start.params)
    kernels = states.params["head"]["kernel"].astype(np.float64)
    expected = start.params["head"]["kernel"].astype(np.float64)
    for index, decay in enumerate([1 / 10, 2 / 11, None, 0.28, 0.28]):
        if decay is not None:
            expected = decay * expected + (1 - decay) * kernels[index]
        found = states.ema["head"]["kernel"][index]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert np.abs(kernels[-1] - expected).max() > 1e-3


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_the_average_is_evaluated_saved_and_resumed(config, tmp_path, one_device):
    config.ema_decay = 0.8
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    result = training.train_and_evaluate(config, whole, devices=one_device)
    train_until(9, config, parts, devices=one_device)
    training.train_and_evaluate(config, parts, devices=one_device)
    state = final_state(whole)
    jax.tree.map(np.testing.assert_array_equal, final_state(parts), state)
    assert untimed_rows(parts) == untimed_rows(whole)
    assert jax.tree.structure(state.ema) == jax.tree.structure(state.params)
    difference = np.subtract(*(p["head"]["kernel"] for p in (state.ema, state.params)))
    assert np.abs(difference).max() > 1e-3
    run = training.load_run(whole, "latest")
    chex.assert_trees_all_equal(run.variables["params"], state.ema)
    # The model of the rows, of the result and of the loaded run is the average.
    best = training.load_run(whole)
    scores = training.evaluate(best, make_data().validation, 16)
    np.testing.assert_allclose(scores["loss"], result["validation_loss"], rtol=1e-5)


@pytest.mark.usefixtures("tiny")
def test_a_checkpoint_of_before_the_options_resumes(
    config, tmp_path, one_device, finished
):
    """Neither the arrays nor the configuration of a run have changed."""
    state = final_state(finished[0])
    paths = {path.split("/")[0] for path in array_shapes(state)}
    assert paths == {"step", "params", "opt_state", "random_features"}
    train_until(9, config, tmp_path, devices=one_device)
    meta = read_meta(tmp_path / CHECKPOINTS, 5)
    for key in ("label_smoothing", "ema_decay", "freeze", "loggers"):
        del meta["config"][key]
    for key in ("decay_mask", "layer_decay", "momentum"):
        del meta["config"]["optimizer"][key]
    forge(tmp_path / CHECKPOINTS / "5", meta)
    training.train_and_evaluate(config, tmp_path, devices=one_device)
    jax.tree.map(np.testing.assert_array_equal, final_state(tmp_path), state)

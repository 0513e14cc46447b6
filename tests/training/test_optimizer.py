import jax.numpy as jnp
import numpy as np
import pytest

from relattn.training import default_config
from relattn.training.optimizer import make_optimizer, make_schedule


def test_warm_up_and_cosine():
    schedule = make_schedule("cosine", 3.0, warmup_steps=5, num_steps=13)
    steps = np.arange(14)
    warm = np.minimum(1, (steps + 1) / 5)
    cosine = (1 + np.cos(np.pi * np.clip((steps - 5) / 8, 0, 1))) / 2
    expected = 3.0 * warm * cosine
    actual = [float(schedule(jnp.asarray(step))) for step in steps]
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_constant():
    schedule = make_schedule("constant", 0.1, warmup_steps=0, num_steps=7)
    np.testing.assert_allclose([schedule(0), schedule(6)], [0.1, 0.1], rtol=1e-6)


def test_exponential_decays_after_each_epoch():
    options = {"warmup_steps": 2, "num_steps": 7, "steps_per_epoch": 3}
    schedule = make_schedule("exponential", 2.0, decay_rate=0.7, **options)
    expected = 2.0 * np.array([0.5, 1, 1, 0.7, 0.7, 0.7, 0.49])
    actual = [float(schedule(jnp.asarray(step))) for step in range(7)]
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_a_warm_up_as_long_as_the_run():
    with pytest.raises(ValueError, match=r"warmup_steps=7 must be less than the 7"):
        make_schedule("constant", 0.1, warmup_steps=7, num_steps=7)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_gradients_are_clipped_by_their_global_norm(name):
    config = default_config().optimizer
    config.update(name=name, clip_norm=0.5)
    optimizer = make_optimizer(config, lambda step: 1.0)
    params = {"a": jnp.zeros(3), "b": jnp.zeros(2)}
    grads = {"a": jnp.full(3, 30.0), "b": jnp.full(2, 40.0)}
    norm = np.sqrt(3 * 30.0**2 + 2 * 40.0**2)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    if name == "sgd":
        np.testing.assert_allclose(updates["a"], -30.0 * 0.5 / norm * np.ones(3), 1e-5)
    else:
        np.testing.assert_allclose(updates["a"], -np.ones(3), rtol=1e-4)


def test_adamw_decays_the_weights():
    config = default_config().optimizer
    config.update(name="adamw", weight_decay=0.05)
    optimizer = make_optimizer(config, lambda step: 2.0)
    params = {"a": jnp.full(3, 7.0)}
    zero = {"a": jnp.zeros(3)}
    updates, _ = optimizer.update(zero, optimizer.init(params), params)
    np.testing.assert_allclose(updates["a"], -2.0 * 0.05 * 7.0 * np.ones(3), rtol=1e-5)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_adam_averages_as_its_decay_rates_say(name):
    config = default_config().optimizer
    config.update(name=name, b1=0.5, b2=0.75)
    optimizer = make_optimizer(config, lambda step: 2.0)
    params = {"a": jnp.zeros(3)}
    state = optimizer.init(params)
    for gradient in (4.0, 0.0):
        grads = {"a": jnp.full(3, gradient)}
        updates, state = optimizer.update(grads, state, params)
    mean = 0.5 * 0.5 * 4 / (1 - 0.5**2)
    square = 0.75 * 0.25 * 4**2 / (1 - 0.75**2)
    np.testing.assert_allclose(updates["a"], -2 * mean / square**0.5 * np.ones(3), 1e-5)

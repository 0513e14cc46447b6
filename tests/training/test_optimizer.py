import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn.models import build_model
from relattn.training import default_config
from relattn.training.config import complete, to_json
from relattn.training.optimizer import make_optimizer, make_schedule
from tests.helpers import quick

MODEL = nn.Dense(3)


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
    optimizer = make_optimizer(config, lambda step: 1.0, MODEL)
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
    config.update(name="adamw", weight_decay=0.05, decay_mask="all")
    optimizer = make_optimizer(config, lambda step: 2.0, MODEL)
    params = {"a": jnp.full(3, 7.0)}
    zero = {"a": jnp.zeros(3)}
    updates, _ = optimizer.update(zero, optimizer.init(params), params)
    np.testing.assert_allclose(updates["a"], -2.0 * 0.05 * 7.0 * np.ones(3), rtol=1e-5)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_adam_averages_as_its_decay_rates_say(name):
    config = default_config().optimizer
    config.update(name=name, b1=0.5, b2=0.75)
    optimizer = make_optimizer(config, lambda step: 2.0, MODEL)
    params = {"a": jnp.zeros(3)}
    state = optimizer.init(params)
    for gradient in (4.0, 0.0):
        grads = {"a": jnp.full(3, gradient)}
        updates, state = optimizer.update(grads, state, params)
    mean = 0.5 * 0.5 * 4 / (1 - 0.5**2)
    square = 0.75 * 0.25 * 4**2 / (1 - 0.75**2)
    np.testing.assert_allclose(updates["a"], -2 * mean / square**0.5 * np.ones(3), 1e-5)


def vit(**options):
    """Returns a ViT with a layer of its own, two that are stacked, and parameters."""
    sizes = {"dim": 4, "num_layers": 3, "num_heads": 2, "mlp_dim": 4, "patch_size": 2}
    kinds = {"attention": "translution", "num_relative_layers": 1}
    config = {"name": "vit", **sizes, **kinds, "position": "learned", **options}
    model = build_model(config, num_classes=3, image_shape=(4, 4, 1))
    images = jnp.zeros((1, 4, 4, 1))
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), images))["params"]
    rng = np.random.default_rng(0)
    draw = lambda leaf: rng.normal(size=leaf.shape).astype(np.float32)  # noqa: E731
    return model, jax.tree.map(draw, shapes)


def update_once(optimizer, params, grads):
    def update(params, grads):
        return optimizer.update(grads, optimizer.init(params), params)[0]

    return flat(quick.run(update, params, grads))


def flat(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(k, simple=True, separator="/"): v for k, v in leaves}


def test_weight_decay_shrinks_matrices_alone():
    model, params = vit()
    config = default_config().optimizer
    config.update(name="adamw", weight_decay=0.05)
    optimizer = make_optimizer(config, lambda step: 2.0, model)
    zero = jax.tree.map(np.zeros_like, params)
    updates = update_once(optimizer, params, zero)
    ends = ("kernel", "q_table", "k_table", "v_table")
    decayed = {name for name in updates if name.endswith(ends)}
    assert {"blocks_0/attention/q_table", "blocks_1/attention/q/kernel"} < decayed
    for name, value in flat(params).items():
        factor = -2.0 * 0.05 * (name in decayed)
        np.testing.assert_allclose(updates[name], factor * value, 1e-5, err_msg=name)


def test_a_run_of_before_the_decay_mask_decays_all():
    config = default_config()
    config.optimizer.update(name="adamw", weight_decay=0.05)
    before = to_json(config)
    del before["optimizer"]["decay_mask"]
    assert complete(before).optimizer.decay_mask == "all"
    assert complete(to_json(config)).optimizer.decay_mask == "matrices"
    before["optimizer"]["weight_decay"] = 0.0
    assert complete(before).optimizer.decay_mask == "matrices"

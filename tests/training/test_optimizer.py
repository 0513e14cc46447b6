import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from relattn.models import build_model
from relattn.nn.registry import POSITIONS
from relattn.training import default_config
from relattn.training.config import complete, to_json
from relattn.training.optimizer import make_optimizer, make_schedule
from relattn.training.parameters import hold, is_frozen, layer_scales
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


def test_a_compiled_schedule_decays_at_the_first_step_of_an_epoch():
    """In float32, 41 times the rounded 1 / 41 is less than 1."""
    options = {"warmup_steps": 0, "num_steps": 99, "steps_per_epoch": 41}
    schedule = make_schedule("exponential", 1.0, decay_rate=0.5, **options)
    steps = jnp.arange(84)
    found = jax.jit(jax.vmap(schedule))(steps)
    np.testing.assert_array_equal(found, 0.5 ** (steps // 41))


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


def test_momentum_sums_the_gradients():
    config = default_config().optimizer
    config.update(name="sgd", momentum=0.5, clip_norm=3.0)
    optimizer = make_optimizer(config, lambda step: 2.0, MODEL)
    params = {"a": jnp.zeros(1)}
    state = optimizer.init(params)
    for gradient in (4.0, 1.0, 0.0):
        grads = {"a": jnp.full(1, gradient)}
        updates, state = optimizer.update(grads, state, params)
    # The first gradient is clipped before it is summed.
    np.testing.assert_allclose(updates["a"], -2 * (0.25 * 3 + 0.5 * 1), rtol=1e-6)
    config.momentum = 0.0
    assert not jax.tree.leaves(
        make_optimizer(config, optax.constant_schedule(0.1), MODEL).init(params)
    )[1:]


@functools.cache
def vit():
    """Returns a ViT with a layer of its own and two that are stacked; parameters."""
    sizes = {"dim": 4, "num_layers": 3, "num_heads": 2, "mlp_dim": 4, "patch_size": 2}
    kinds = {"attention": "translution", "num_relative_layers": 1}
    config = {"name": "vit", **sizes, **kinds, "position": "learned"}
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


def test_frozen_parameters_have_neither_gradient_nor_update():
    """Of two stacked layers one is frozen."""
    model, params = vit()
    freeze = "*, !head, !layers.[01].*kernel, layers.0.feed_forward"
    grads = jax.tree.map(lambda p: (p + 1).astype(np.float32), params)

    def gradient(params):
        held = hold(params, is_frozen(model, params, freeze))
        products = jax.tree.map(lambda p, g: jnp.sum(p * g), held, grads)
        return sum(jax.tree.leaves(products))

    def updates(params):
        found = jax.grad(gradient)(params)
        update = optimizer.update(found, optimizer.init(params), params)[0]
        return found, update

    kernels = [f"attention/{name}/kernel" for name in ("q", "k", "v", "out")]
    kernels += [f"feed_forward/{name}/kernel" for name in ("hidden", "out")]
    expected = flat(jax.tree.map(np.zeros_like, params))
    for name, value in flat(grads).items():
        if name.startswith("head/") or name == "blocks_0/attention/out/kernel":
            expected[name] = value
        elif name in [f"blocks_1/{kernel}" for kernel in kernels]:
            expected[name] = value * np.array([1, 0]).reshape(2, 1, 1)
    norm = np.sqrt(sum(np.sum(value.astype(float) ** 2) for value in expected.values()))
    for kind in ("sgd", "adamw"):
        config = default_config().optimizer
        config.update(name=kind, clip_norm=0.5, weight_decay=0.5 * (kind == "adamw"))
        optimizer = make_optimizer(config, lambda step: 2.0, model, freeze)
        found, update = map(flat, quick.run(updates, params))
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)
            if kind == "sgd":
                value = -2.0 * value * 0.5 / norm
                np.testing.assert_allclose(update[name], value, 1e-5, err_msg=name)
            else:
                assert ((update[name] == 0) == (value == 0)).all(), name
    stored = jax.eval_shape(optimizer.init, params)
    sizes = sum(leaf.size for leaf in jax.tree.leaves(stored))
    kept = sum(value.size for value in expected.values() if value.any())
    assert sizes == 2 * kept + 2


@pytest.mark.parametrize(
    "freeze, message",
    [
        ("hed", "config.freeze has 'hed', which is the name of no .* mean 'head'"),
        ("!head", "config.freeze='!head' freezes no parameter: name some, as in 'emb"),
        ("*, !layer.0", "has '!layer.0', which .* did you mean 'layers.0'"),
        ("*", r"config.freeze='\*' leaves no parameter to train: .*'\*, !head'"),
    ],
)
def test_patterns_that_freeze_nothing_or_everything(freeze, message):
    model, params = vit()
    with pytest.raises(ValueError, match=message):
        is_frozen(model, params, freeze)


@pytest.mark.parametrize("freeze", ["", "layers.2"])
def test_layers_nearer_the_input_have_smaller_learning_rates(freeze):
    """Frozen layers still count."""
    model, params = vit()
    config = default_config().optimizer
    config.update(name="sgd", layer_decay=0.5)
    optimizer = make_optimizer(config, lambda step: 2.0, model, freeze)
    ones = jax.tree.map(np.ones_like, params)
    updates = update_once(optimizer, params, ones)
    factors = {"blocks_0": [0.5**3], "blocks_1": [0.5**2, 0.5 * (not freeze)]}
    factors |= {"norm": 1, "head": 1}
    for name, value in flat(params).items():
        # Four layers: embedding, three blocks, head.
        factor = np.array(factors.get(name.split("/")[0], 0.5**4))
        factor = factor.reshape(-1, *[1] * (value.ndim - 1))
        expected = np.broadcast_to(-2.0 * factor, value.shape)
        np.testing.assert_array_equal(updates[name], expected, err_msg=name)


def test_what_pools_the_last_layer_learns_as_fast_as_the_head():
    sizes = {"dim": 4, "num_layers": 1, "num_heads": 2, "mlp_dim": 4, "patch_size": 2}
    config = {"name": "vit", **sizes, "pool": "attention", "head": "mlp"}
    model = build_model(config, num_classes=3, image_shape=(4, 4, 1))
    images = jnp.zeros((1, 4, 4, 1))
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), images))["params"]
    factors = {
        name: set(map(float, jax.tree.leaves(found)))
        for name, found in layer_scales(model, params, 0.5).items()
        if name != "blocks_0"
    }
    last = {"pool", "norm", "hidden", "head"}
    assert {name for name, found in factors.items() if found == {1.0}} == last


@pytest.mark.parametrize(
    "position",
    [
        *(name for name, entry in POSITIONS.items() if entry.site != "none"),
        "constrained_sincos(content_conditioned=True)",
        "rotary_values(learned=True)",
        "learned + rope2d_mixed + fourier_values(rank=1)",
    ],
)
def test_what_acts_in_a_layer_learns_as_fast_as_the_layer(position):
    def make(num_layers):
        config = {"name": "vit", "dim": 8, "num_heads": 2, "mlp_dim": 4}
        config |= {"patch_size": 2, "position": position, "num_layers": num_layers}
        model = build_model(config, num_classes=3, image_shape=(4, 6, 1))
        images = jnp.zeros((1, 4, 6, 1))
        params = jax.eval_shape(lambda: model.init(jax.random.key(0), images))["params"]
        return model, params

    model, params = make(3)
    shapes, others = (
        {name: leaf.shape for name, leaf in flat(tree).items()}
        for tree in (params, make(5)[1])
    )
    factors = {
        name: np.ravel(value).tolist()
        for name, value in flat(layer_scales(model, params, 0.5)).items()
        if name.startswith("position/")
    }
    assert factors == {
        name: [0.5**4] if shapes[name] == others[name] else [0.5**3, 0.5**2, 0.5]
        for name in factors
    }


def test_layer_decay_needs_layers():
    config = default_config().optimizer
    config.layer_decay = 0.75
    optimizer = make_optimizer(config, lambda step: 1.0, MODEL)
    params = {"kernel": np.ones((2, 3))}
    with pytest.raises(ValueError, match="layer_decay=0.75 needs a model with layers"):
        jax.eval_shape(lambda: optimizer.update(params, optimizer.init(params), params))

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from relattn import models
from relattn.kernels.random_projections import redraw
from relattn.training import default_config
from relattn.training.draws import stream_key
from relattn.training.metrics import cross_entropy
from relattn.training.optimizer import make_optimizer, make_schedule
from relattn.training.step import (
    create_state,
    make_eval_step,
    make_train_step,
    scalars,
)
from tests.helpers import quick
from tests.helpers.quick import quick_jit
from tests.training.conftest import TinyModel

SHAPE = (5, 3, 1)
KEY = jax.random.key(3)


def make_batch(seed=0, size=13):
    rng = np.random.default_rng(seed)
    return {
        "image": rng.normal(size=(size, *SHAPE)).astype(np.float32),
        "label": rng.integers(0, 3, size).astype(np.int32),
    }


def identity(batch):
    return batch["image"]


def test_an_update_is_the_gradients():
    model, optimizer, key = TinyModel(num_classes=3), optax.sgd(0.5), jax.random.key(3)
    state = create_state(model, optimizer, key, SHAPE)
    batch = make_batch()

    def loss_fn(params):
        logits = model.apply({**state.variables, "params": params}, batch["image"])
        logits = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        return -logits[np.arange(13), batch["label"]].mean()

    loss, grads = jax.jit(jax.value_and_grad(loss_fn))(state.params)
    expected = jax.tree.map(lambda p, g: p - 0.5 * g, state.params, grads)
    step = jax.jit(make_train_step(model, optimizer, identity))
    new, metrics = step(state, batch, key)
    chex.assert_trees_all_close(new.params, expected, atol=1e-6)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    np.testing.assert_allclose(metrics["update_norm"], 0.5 * norm, rtol=1e-5)
    logits = model.apply(state.variables, batch["image"])
    correct = np.argmax(logits, axis=1) == batch["label"]
    np.testing.assert_allclose(metrics["accuracy"], correct.mean(), rtol=1e-6)
    assert int(new.step) == 1


def test_the_loss_is_computed_in_float32():
    logits = jnp.array([[100.0, 0.5, 0.0]], jnp.bfloat16)
    loss = cross_entropy(logits, jnp.array([1]))
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, 99.5)


def test_dropout_depends_on_the_step_and_the_key():
    model = TinyModel(num_classes=3, dropout=0.5)
    optimizer, batch = optax.sgd(0.0), make_batch()
    state = create_state(model, optimizer, jax.random.key(3), SHAPE)
    step = jax.jit(make_train_step(model, optimizer, identity))

    def loss(number, seed):
        now = state.replace(step=jnp.int32(number))
        return float(step(now, batch, jax.random.key(seed))[1]["loss"])

    assert loss(0, 0) == loss(0, 0)
    assert len({loss(0, 0), loss(1, 0), loss(0, 1)}) == 3


def test_evaluation_has_no_dropout():
    model = TinyModel(num_classes=3, dropout=0.5)
    state = create_state(model, optax.sgd(0.1), jax.random.key(3), SHAPE)
    batch = {**make_batch(), "weight": np.ones(13, np.float32)}
    sums = jax.jit(make_eval_step(model, identity))(state.variables, batch)
    logits = model.apply(state.variables, batch["image"])
    losses = cross_entropy(logits, jnp.asarray(batch["label"]))
    np.testing.assert_allclose(sums["loss"], losses.sum(), rtol=1e-5)


def test_state_is_a_pure_function_of_the_key():
    model, optimizer = TinyModel(num_classes=3), optax.adam(0.1)
    one, same, other = (
        create_state(model, optimizer, jax.random.key(seed), SHAPE)
        for seed in (0, 0, 1)
    )
    chex.assert_trees_all_equal(one, same)
    assert not jnp.array_equal(
        one.params["head"]["kernel"], other.params["head"]["kernel"]
    )
    key = jax.random.key(0)
    expected = redraw(one.random_features, key, 0)
    chex.assert_trees_all_equal(one.random_features, expected)
    rngs = {"params": stream_key(key, "params"), "random_features": key}
    expected = model.init(rngs, jnp.zeros((1, *SHAPE)))["params"]
    chex.assert_trees_all_equal(one.params, expected)


def test_an_unknown_collection_is_refused():
    class Cached(nn.Module):
        @nn.compact
        def __call__(self, images):
            return self.variable("cache", "images", lambda: images).value

    with pytest.raises(
        ValueError, match="has a collection 'cache'; .*only .*'batch_stats'"
    ):
        create_state(Cached(), optax.sgd(0.1), jax.random.key(0), SHAPE)


def test_streams_of_randomness_differ():
    key = jax.random.key(0)
    keys = [stream_key(key, name) for name in ("params", "dropout")]
    keys += [key, *(jax.random.fold_in(key, layer) for layer in range(3))]
    assert len({tuple(jax.random.key_data(k).tolist()) for k in keys}) == len(keys)


def test_only_scalars_are_logged():
    sown = {"a": {"b": (jnp.float32(1), jnp.float32(4))}, "c": (jnp.ones((2, 3)),)}
    assert {k: float(v) for k, v in scalars(sown).items()} == {"a/b": 2.5}


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["favor", "banded(clip=2)"])
def test_a_whole_train_step_lowers_for_every_platform(attention):
    config = {
        "name": "performer",
        "dim": 8,
        "num_layers": 1,
        "num_heads": 2,
        "mlp_dim": 16,
        "attention": attention,
    }
    model = models.build_model(config, num_classes=3, image_shape=(4, 4, 1))
    schedule = make_schedule("cosine", 1e-3, warmup_steps=2, num_steps=100)
    options = optimizer_config(name="adamw", weight_decay=0.05, clip_norm=0.5)
    optimizer = make_optimizer(options, schedule, model)
    state = jax.eval_shape(
        lambda key: create_state(model, optimizer, key, (4, 4, 1)), jax.random.key(0)
    )
    batch = {
        "image": jax.ShapeDtypeStruct((6, 4, 4, 1), jnp.float32),
        "label": jax.ShapeDtypeStruct((6,), jnp.int32),
    }
    key = jax.eval_shape(lambda: jax.random.key(0))
    step = jax.jit(make_train_step(model, optimizer, identity))
    exported = jax.export.export(step, platforms=["cpu", "cuda", "tpu"])(
        state, batch, key
    )
    assert exported.platforms == ("cpu", "cuda", "tpu")


@pytest.mark.parametrize("parts", [2, 3, 6])
def test_an_accumulated_update_is_that_of_the_whole_batch(parts):
    model, optimizer, key = TinyModel(num_classes=3), optax.sgd(0.5), jax.random.key(3)
    state = create_state(model, optimizer, key, SHAPE)
    batch = make_batch(size=6)
    (whole, expected), (new, metrics) = (
        jax.jit(make_train_step(model, optimizer, identity, accumulate_steps=count))(
            state, batch, key
        )
        for count in (1, parts)
    )
    chex.assert_trees_all_close(new.params, whole.params, atol=1e-6)
    chex.assert_trees_all_close(metrics, expected, rtol=1e-5)
    assert int(new.step) == 1


# A rounding in bfloat16 changes a value by at most 2^-9; a gradient has some dozens.
@pytest.mark.parametrize(
    "changes, accumulate_steps, error",
    [
        pytest.param({"remat": True}, 1, 1e-5, marks=pytest.mark.slow),
        pytest.param({}, 3, 1e-5, marks=pytest.mark.slow),
        pytest.param({"dtype": "bfloat16"}, 1, 2**-5, marks=pytest.mark.slow),
        pytest.param(
            {"dtype": "bfloat16", "remat": True}, 3, 2**-5, marks=pytest.mark.slow
        ),
    ],
)
def test_remat_changes_an_update_by_rounding(changes, accumulate_steps, error):
    config = {
        "name": "vit",
        "dim": 8,
        "num_layers": 2,
        "num_heads": 2,
        "mlp_dim": 12,
        "patch_size": 2,
        "attention": "translution",
        "embedding_norms": False,
    }
    optimizer, key = optax.sgd(1.0), jax.random.key(3)
    rng = np.random.default_rng(0)
    batch = {
        "image": rng.random((6, 4, 6, 1), np.float32),
        "label": rng.integers(0, 3, 6).astype(np.int32),
    }

    def update(changes, accumulate_steps):
        model = models.build_model(
            config | changes, num_classes=3, image_shape=(4, 6, 1)
        )
        create = functools.partial(create_state, model, optimizer)
        state = quick_jit(lambda key: create(key, (4, 6, 1)))(key)
        assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {
            np.dtype(np.float32)
        }
        step = make_train_step(
            model, optimizer, identity, accumulate_steps=accumulate_steps
        )
        new, metrics = quick_jit(step)(state, batch, key)
        return jax.tree.map(jnp.subtract, new.params, state.params), metrics["loss"]

    expected, loss = update({}, 1)
    found, found_loss = update(changes, accumulate_steps)
    difference = optax.tree.norm(jax.tree.map(jnp.subtract, found, expected))
    assert difference < error * optax.tree.norm(expected)
    np.testing.assert_allclose(found_loss, loss, rtol=error)


def test_every_part_has_its_own_dropout():
    model = TinyModel(num_classes=3, dropout=0.5)
    state = create_state(model, optax.sgd(0.1), jax.random.key(3), SHAPE)
    one = make_batch(size=1)
    twice = jax.tree.map(lambda x: np.concatenate([x, x]), one)

    def loss(batch, parts):
        step = make_train_step(model, optax.sgd(0.1), identity, accumulate_steps=parts)
        return float(jax.jit(step)(state, batch, jax.random.key(3))[1]["loss"])

    losses = {loss(one, 1), loss(twice, 1), loss(twice, 2)}
    assert len(losses) == 3


def test_smoothed_labels_have_the_cross_entropy_of_their_distribution():
    logits = quick.normal(0, 4, 5, scale=3.0)
    label = np.array([0, 3, 3, 1])
    batch = {"label": label, "image": logits}
    previous = {"label": np.roll(label, 1), "image": np.roll(logits, 1, axis=0)}

    class Scaled(nn.Module):
        @nn.compact
        def __call__(self, images, *, deterministic=True):
            scale = self.param("scale", nn.initializers.ones, ())
            return scale * images.reshape(len(images), -1)

    def loss(share):
        mix = share and (lambda key, size: jnp.full(size, share))
        step = make_train_step(
            Scaled(),
            optax.sgd(1.0),
            lambda batch: batch["image"][:, None, :, None],
            label_smoothing=0.3,
            mix=mix,
            metrics=(),
        )
        make = lambda: create_state(Scaled(), optax.sgd(1.0), KEY, (1, 5, 1))  # noqa: E731
        return quick.run(lambda batch: step(make(), batch, KEY)[1], batch)

    for share in (None, 0.6):
        weights = {0.6: 0.6, None: 1.0}[share]
        inputs = weights * logits + (1 - weights) * previous["image"]
        inputs = inputs.astype(np.float64)
        truth = 0.3 / 5 + 0.7 * (
            weights * np.eye(5)[label] + (1 - weights) * np.eye(5)[previous["label"]]
        )
        probability = np.exp(inputs) / np.exp(inputs).sum(-1, keepdims=True)
        expected = -(truth * np.log(probability)).sum(-1).mean()
        np.testing.assert_allclose(loss(share)["loss"], expected, rtol=1e-5)


def test_a_batch_that_does_not_split_into_parts():
    model, optimizer = TinyModel(num_classes=3), optax.sgd(0.1)
    state = create_state(model, optimizer, jax.random.key(0), SHAPE)
    step = make_train_step(model, optimizer, identity, accumulate_steps=5)
    with pytest.raises(ValueError, match="accumulate_steps=5 does not divide the 13"):
        jax.jit(step)(state, make_batch(), jax.random.key(0))
    with pytest.raises(ValueError, match="accumulate_steps must be at least 1, got 0"):
        make_train_step(model, optimizer, identity, accumulate_steps=0)


def test_a_weight_in_training_is_refused():
    """Labels of weight 0 would be learned."""
    model, optimizer = TinyModel(num_classes=3), optax.sgd(0.1)
    state = create_state(model, optimizer, jax.random.key(0), SHAPE)
    batch = {**make_batch(), "weight": np.zeros(13, np.float32)}
    step = make_train_step(model, optimizer, identity)
    with pytest.raises(ValueError, match="counts all labels of a batch equally"):
        jax.jit(step)(state, batch, jax.random.key(0))


def test_evaluation_needs_a_weight_for_each_label():
    """Weights [13, 1] would sum over all pairs."""
    model = TinyModel(num_classes=3)
    state = jax.eval_shape(
        lambda key: create_state(model, optax.sgd(0.1), key, SHAPE), jax.random.key(0)
    )
    batch = {**make_batch(), "weight": np.ones((13, 1), np.float32)}
    message = r"weights of the shape \(13, 1\) for labels of the shape \(13,\): yield"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(make_eval_step(model, identity), state.variables, batch)


def test_the_five_largest_logits():
    logits = np.random.default_rng(0).normal(size=(17, 11)).astype(np.float32)
    labels = np.arange(17, dtype=np.int32) % 11
    weight = np.array([1.0] * 13 + [0.0] * 4, np.float32)

    class Fixed(nn.Module):
        def __call__(self, images, *, deterministic=True):
            return images

    metrics = ("accuracy", "top5_accuracy")
    step = jax.jit(make_eval_step(Fixed(), identity, metrics=metrics))
    sums = step({}, {"image": logits, "label": labels, "weight": weight})
    rank = (logits > logits[np.arange(17), labels][:, None]).sum(-1)
    assert sums["top5_accuracy"] == (rank < 5)[:13].sum()
    assert sums["accuracy"] == (rank == 0)[:13].sum()
    assert 0 < sums["accuracy"] < sums["top5_accuracy"] < 13
    equal = step({}, {"image": 0 * logits, "label": labels, "weight": weight})
    assert equal["top5_accuracy"] == (labels < 5)[:13].sum()


def optimizer_config(**options):
    config = default_config().optimizer
    config.update(options)
    return config

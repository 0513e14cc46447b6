"""Training on mixed images: the loss, the update, devices and parts."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from relattn.data import make_mix
from relattn.training.draws import stream_key
from relattn.training.mesh import MeshParallel
from relattn.training.pmap import DataParallel
from relattn.training.step import create_state, make_train_step
from relattn.training.task import Task
from tests.helpers.quick import quick_jit
from tests.training.conftest import TinyModel, make_data

SHAPE = (5, 3, 1)
MIX = "cutmix(alpha=1.0) | mixup(alpha=0.8)"
MODEL, OPTIMIZER = TinyModel(num_classes=3), optax.sgd(0.5)


def to_float(batch):
    # Not linear: images must be mixed after it.
    return jnp.square(batch["image"] / 255.0)


def run(parallel, steps=3, **options):
    """Runs updates on batches of 12 images; returns the parameters and the metrics."""
    key, train = jax.random.key(7), make_data(num_train=12 * steps).train
    step = make_train_step(
        MODEL,
        OPTIMIZER,
        to_float,
        mix=make_mix(MIX),
        **options,
    )
    mapped = parallel.compile_train_step(step)
    state = parallel.create(lambda: create_state(MODEL, OPTIMIZER, key, SHAPE))
    history = []
    for i in range(steps):
        batch = train.gather(np.arange(12 * i, 12 * (i + 1)))
        state, metrics = mapped(state, parallel.shard(batch), key)
        history.append(metrics)
    return parallel.fetch(state).params, parallel.fetch(history)


@pytest.mark.quick("1")
@pytest.mark.parametrize("number", [1, 3])
def test_an_update_uses_mixed_images_and_soft_labels(number):
    key, batch = jax.random.key(3), make_data().train.gather(np.arange(13))
    state = create_state(MODEL, OPTIMIZER, key, SHAPE)
    state = state.replace(step=jnp.int32(number))
    draw = jax.jit(make_mix(MIX), static_argnums=1)
    mask = draw(jax.random.fold_in(stream_key(key, "mix"), number), SHAPE[:2])
    # Example by example, each with the one before it.
    images, labels = np.square(batch["image"] / np.float32(255)), np.eye(3)
    pairs = [(i, i - 1) for i in range(13)]
    share = float(np.mean(mask))
    mask = np.asarray(mask)[..., None]
    mixed = np.stack([mask * images[i] + (1 - mask) * images[j] for i, j in pairs])
    soft = [labels[batch["label"][k]] for k in np.array(pairs).T]
    soft = share * soft[0] + (1 - share) * soft[1]

    def loss_fn(params):
        logits = MODEL.apply({**state.variables, "params": params}, mixed)
        logits = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        return -(soft * logits).sum(-1).mean(), logits

    compute = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    (loss, logits), grads = compute(state.params)
    expected = jax.tree.map(lambda p, g: p - 0.5 * g, state.params, grads)
    step = jax.jit(make_train_step(MODEL, OPTIMIZER, to_float, mix=make_mix(MIX)))
    new, metrics = step(state, batch, key)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    chex.assert_trees_all_close(new.params, expected, atol=1e-6)
    correct = np.argmax(logits, -1) == np.argmax(soft, -1)
    np.testing.assert_allclose(metrics["accuracy"], correct.mean(), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "options"),
    [
        (DataParallel, {}),
        (MeshParallel, {"accumulate_steps": 3}),
    ],
)
def test_devices_and_parts_change_nothing(parallel, options):
    one, one_metrics = run(DataParallel(jax.local_devices()[:1]))
    many, many_metrics = run(parallel(), **options)
    chex.assert_trees_all_close(many, one, atol=1e-6)
    chex.assert_trees_all_close(many_metrics, one_metrics, atol=1e-5)


@pytest.mark.slow
def test_the_configuration_selects_mixing(tiny, config):
    data, losses = make_data(), {}
    batch = data.train.gather(np.arange(12))
    for mix in (None, "none", "mixup"):
        if mix:
            with config.unlocked():
                config.data.mix = mix
        task = Task.build(config, data.info)
        step = quick_jit(task.train_step)
        _, metrics = step(task.create_state(), batch, task.key)
        losses[mix] = float(metrics["loss"])
    assert losses[None] == losses["none"] != losses["mixup"]

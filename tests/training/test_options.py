"""The options of training together, on devices, in parts and with several seeds."""

import jax
import numpy as np
import pytest

from relattn.training import default_config
from relattn.training.mesh import MeshParallel
from relattn.training.pmap import DataParallel
from relattn.training.seeds import make_task
from tests.training.conftest import make_data

SIZES = {"dim": 8, "num_layers": 2, "num_heads": 2, "mlp_dim": 8, "patch_size": 2}


def make_config(**changes):
    config = default_config()
    config.model.update(name="vit", position="learned", **SIZES)
    config.data.update(name="columns", image_size=4, erase="random_erasing")
    config.update(
        batch_size=12,
        label_smoothing=0.1,
        freeze="embedding, layers.0",
        ema_decay=0.9,
        max_skipped_updates=1,
    )
    config.optimizer.update(
        name="adamw", weight_decay=0.1, layer_decay=0.5, clip_norm=1.0
    )
    config.update(changes)
    return config


def train(config, parallel):
    """Trains three updates; returns the first and the last state of each seed."""
    data = make_data(num_train=36)
    task = make_task(config, data.info)
    state = parallel.create(task.create_state)
    first, update = parallel.fetch(state), parallel.compile_train_step(task.train_step)
    key = parallel.place_key(task.key)
    for index in range(3):
        batch = data.train.gather(np.arange(12 * index, 12 * index + 12))
        axis = 0
        if config.num_seeds > 1:
            axis = 1
            batch = {
                name: np.stack([x] * config.num_seeds) for name, x in batch.items()
            }
        state, _ = update(state, parallel.shard(batch, axis=axis), key)
    return [task.unstack(each) for each in (first, parallel.fetch(state))]


@pytest.mark.slow
def test_all_options_give_the_same_on_devices_in_parts_and_with_seeds():
    one = DataParallel(jax.local_devices()[:1])
    (first,), (last,) = train(make_config(), one)
    before, after = first.params, last.params
    np.testing.assert_array_equal(
        before["embedding"]["kernel"], after["embedding"]["kernel"]
    )
    hidden = [
        params["blocks_0"]["feed_forward"]["hidden"]["kernel"]
        for params in (before, after)
    ]
    # Of the stacked layers, the first is frozen.
    moved = np.abs(hidden[1] - hidden[0]).max((1, 2))
    assert moved[0] == 0 < moved[1]
    for changes, parallel in (
        ({}, DataParallel()),
        ({"accumulate_steps": 3}, MeshParallel()),
        ({"num_seeds": 2}, one),
        ({"num_seeds": 2}, MeshParallel(model_axis=2)),
    ):
        _, (found, *_) = train(make_config(**changes), parallel)
        for name in ("params", "ema"):
            jax.tree.map(
                lambda x, y: np.testing.assert_allclose(x, y, atol=2e-6),
                getattr(found, name),
                getattr(last, name),
            )


@pytest.mark.slow
def test_stochastic_depth_is_the_same_on_every_mesh():
    config = make_config()
    config.model.drop_path = 0.5
    one = train(config, MeshParallel(jax.local_devices()[:1]))[1][0]
    many = train(config, MeshParallel())[1][0]
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=2e-6),
        many.params,
        one.params,
    )
    config.model.drop_path = 0.0
    other = train(config, MeshParallel())[1][0]
    assert not np.allclose(other.params["head"]["kernel"], one.params["head"]["kernel"])

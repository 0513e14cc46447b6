"""Tests that models train the same on one device, by pmap and on a mesh."""

import chex
import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

from relattn.kernels.random_projections import redraw
from relattn.models import Performer
from relattn.models.cnn import ResidualBlock
from relattn.training.mesh import MeshParallel
from relattn.training.pmap import DataParallel
from relattn.training.step import create_state, make_train_step
from tests.helpers.specs import with_others

SHAPE = (4, 6, 1)
BATCH, STEPS = 8, 5
# `Residual` has moving averages.
PAIRS = with_others(
    [
        ("favor", "constrained_sincos"),
        # Positions separate the tokens, so that rounding changes no cluster.
        ("routing(clusters=3, decay=0.5)", "learned"),
        ("softmax", "learnable_sincos"),
        ("banded(clip=2)", "none"),
        ("relu(num_features=5)", "sincos_bias"),
        ("gated_positional", "rope2d"),
    ]
)


class Residual(nn.Module):
    """Classifies images with one residual block."""

    @nn.compact
    def __call__(self, images, *, deterministic=True):
        x = ResidualBlock(5, 2)(images, deterministic=deterministic)
        return nn.Dense(3)(x.mean((1, 2)))


def make_performer(attention, position):
    return Performer(
        num_classes=3,
        dim=8,
        num_layers=1,
        num_heads=2,
        mlp_dim=12,
        attention=attention,
        position=position,
    )


# Adam would hide a gradient of the wrong scale.
OPTIMIZER, KEY = optax.sgd(0.1), jax.random.key(3)


def train(parallel, model, state):
    step = make_train_step(
        model,
        OPTIMIZER,
        lambda batch: batch["image"],
    )
    step = parallel.compile_train_step(step)
    state = parallel.place(state)
    generator = np.random.default_rng(0)
    compiled = parallel.compile_redraw(redraw)
    for done in range(1, STEPS + 1):
        batch = {
            "image": generator.random((BATCH, *SHAPE), np.float32),
            "label": generator.integers(0, 3, BATCH).astype(np.int32),
        }
        state, _ = step(state, parallel.shard(batch), KEY)
        if done % 2 == 0 and jax.tree.leaves(state.random_features):
            number = parallel.place(np.int32(done // 2))
            features = compiled(state.random_features, KEY, number)
            state = state.replace(random_features=features)
    return parallel.fetch(state)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        *(pytest.param(make_performer(*pair), id=" ".join(pair)) for pair in PAIRS),
        pytest.param(Residual(), id="residual"),
    ],
)
def test_one_device_pmap_and_a_mesh_give_the_same_parameters(model):
    state = jax.jit(lambda key: create_state(model, OPTIMIZER, key, SHAPE))(KEY)
    one = train(DataParallel(jax.local_devices()[:1]), model, state)
    for parallel in (DataParallel(), MeshParallel(model_axis=2)):
        assert len(parallel.devices) == 4
        four = train(parallel, model, state)
        chex.assert_trees_all_close(one.params, four.params, atol=2e-6)
        chex.assert_trees_all_close(one.batch_stats, four.batch_stats, atol=2e-6)
        chex.assert_trees_all_equal(one.random_features, four.random_features)

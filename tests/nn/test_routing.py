"""Tests routing attention: its heads, and how training updates the centroids."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from relattn import kernels
from relattn.models import build_model
from relattn.nn.registry import build
from relattn.nn.routing import RoutingAttention
from relattn.training.step import create_state, make_eval_step, make_train_step

SIZES = {"dim": 6, "num_heads": 2, "num_layers": 2}
SHAPE = (2, 5, 1)
N, PREFIX = 11, 1


def images_of(batch):
    return batch["image"]


def norms(centroids):
    return np.linalg.norm(centroids, axis=-1)


@pytest.mark.slow
def test_only_training_updates_the_centroids_of_every_layer():
    config = {"name": "vit", "mlp_dim": 5, "patch_size": 1, **SIZES}
    config["attention"] = "routing(clusters=3, decay=0.9)"
    model = build_model(config, num_classes=3, image_shape=SHAPE)
    key, optimizer = jax.random.key(0), optax.sgd(0.1)
    state = jax.jit(lambda key: create_state(model, optimizer, key, SHAPE))(key)
    (start,) = jax.tree.leaves(state.batch_stats)
    assert start.shape == (2, 1, 3, 3)
    np.testing.assert_allclose(norms(start), 1, rtol=1e-5)
    assert not np.allclose(start[0], start[1], atol=0.1)
    batch = {
        "image": np.random.default_rng(0).normal(size=(7, *SHAPE)).astype(np.float32),
        "label": np.arange(7) % 3,
    }
    step = jax.jit(make_train_step(model, optimizer, images_of))
    after, metrics = step(state, batch, key)
    (moved,) = jax.tree.leaves(after.batch_stats)
    assert np.isfinite(metrics["loss"])
    assert (np.abs(moved - start).max(axis=(1, 3)) > 1e-3).any(axis=1).all()
    np.testing.assert_allclose(norms(moved), 1, rtol=1e-5)
    # A write to the collection would raise here.
    batch["weight"] = np.ones(7, np.float32)
    jax.eval_shape(make_eval_step(model, images_of), after.variables, batch)


@pytest.fixture(scope="module")
def layer():
    module = RoutingAttention(dim=6, num_heads=2, clusters=3, local_heads=1, decay=0.5)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, N, 6)), jnp.float32)
    variables = jax.jit(module.init)(jax.random.key(0), x)
    return module, variables, x


def test_the_first_heads_are_local_and_the_rest_routed(layer):
    module, variables, x = layer
    params, centroids = variables["params"], variables["batch_stats"]["centroids"]
    mask = np.arange(N) % 5 != 2
    mask = jnp.asarray(np.stack([mask, ~mask]))

    @jax.jit
    def both(params):
        def project(name):
            y = x @ params[name]["kernel"] + params[name]["bias"]
            return y.reshape(2, N, 2, 3).swapaxes(1, 2)

        q, k, v = map(project, "qkv")
        # 11 tokens of 3 clusters: 4 each.
        options = {"window": 4, "key_mask": mask}
        near = kernels.local_attention(
            q[:, 0], k[:, 0], v[:, 0], num_prefix=PREFIX, **options
        )
        routed = kernels.routing_attention(
            q[:, 1], k[:, 1], v[:, 1], centroids[0], **options
        )
        merged = jnp.concatenate([near, routed], axis=-1)
        expected = merged @ params["out"]["kernel"] + params["out"]["bias"]
        apply = module.apply({**variables, "params": params}, x, **call)
        return apply, expected

    call = {"grid": (2, 5), "num_prefix": PREFIX, "key_mask": mask}
    out, expected = both(params)
    np.testing.assert_allclose(out, expected, atol=1e-6)


def test_centroids_depend_on_queries_and_keys(layer):
    module, variables, x = layer

    @jax.jit
    def move(params):
        _, updated = module.apply(
            {**variables, "params": params}, x, mutable="batch_stats"
        )
        return updated["batch_stats"]["centroids"]

    params = variables["params"]
    moved = move(params)
    for name in ("q", "k"):
        other = {**params, name: jax.tree.map(jnp.negative, params[name])}
        assert np.abs(move(other) - moved).max() > 0.01


def test_centroids_do_not_depend_on_masked_tokens(layer):
    module, variables, x = layer
    mask = jnp.ones((2, N), bool).at[:, 4].set(False)

    @jax.jit
    def move(x):
        _, updated = module.apply(variables, x, key_mask=mask, mutable="batch_stats")
        return updated["batch_stats"]["centroids"]

    moved = move(x)
    np.testing.assert_array_equal(move(x.at[:, 4].set(17.0)), moved)
    assert not np.allclose(moved, variables["batch_stats"]["centroids"], atol=0.01)
    np.testing.assert_allclose(norms(moved), 1, rtol=1e-5)


@pytest.mark.parametrize(
    ("attention", "causal", "message"),
    [
        ("routing(clusters=0)", False, "needs clusters >= 1, got 0"),
        ("routing(window=-1)", False, "window >= 1, or 0 for n / clusters, got -1"),
        ("routing(local_heads=3)", False, "has 2 heads, got local_heads=3"),
        ("routing(decay=2.0)", False, "needs decay from 0 to 1, got 2.0"),
        ("routing", True, "attention 'routing' has no causal form: choose from"),
    ],
)
def test_invalid_options_raise(attention, causal, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build(attention, "none", **SIZES, causal=causal)


def test_a_window_longer_than_the_sequence_raises():
    module = RoutingAttention(dim=6, num_heads=2, window=N + 1, local_heads=0)
    with pytest.raises(ValueError, match="from 1 to 11, the number of tokens, got 12"):
        jax.eval_shape(module.init, jax.random.key(0), jnp.ones((1, N, 6)))

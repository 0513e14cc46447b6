"""Tests batch normalisation, on one device and on several."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn.nn.batch_norm import EPSILON, MOMENTUM, BatchNorm


def make_inputs(*shape):
    rng = np.random.default_rng(0)
    return (3 + 2 * rng.normal(size=shape)).astype(np.float32)


@pytest.mark.parametrize("deterministic", [False, True])
def test_batch_norm_equals_flax(deterministic):
    x, cotangent = make_inputs(5, 2, 3, 7), make_inputs(5, 2, 3, 7)[::-1]
    rng = np.random.default_rng(1)
    params = {name: rng.normal(size=7).astype(np.float32) for name in ("scale", "bias")}
    mean, variance = rng.random((2, 7), np.float32)
    ours, theirs = (
        BatchNorm(),
        nn.BatchNorm(deterministic, momentum=MOMENTUM, epsilon=EPSILON),
    )

    def outcome(apply, names):
        stats = dict(zip(names, (mean, variance), strict=True))

        def loss(params, x):
            y, updated = apply({"params": params, "batch_stats": stats}, x)
            return jnp.sum(y * cotangent), (y, updated["batch_stats"])

        grads, (y, stats) = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, x)
        return grads, y, [stats[name] for name in names]

    mutable = ["batch_stats"]
    one = outcome(
        lambda v, x: ours.apply(v, x, deterministic=deterministic, mutable=mutable),
        ("mean", "variance"),
    )
    other = outcome(lambda v, x: theirs.apply(v, x, mutable=mutable), ("mean", "var"))
    chex.assert_trees_all_close(one, other, rtol=1e-4, atol=1e-4)


def test_float16_inputs_have_float32_moments():
    # In float16 the squares overflow.
    x = jnp.asarray(1000 * make_inputs(5, 2), jnp.float16)
    norm = BatchNorm(jnp.float16)
    y, variables = norm.init_with_output(jax.random.key(0), x, deterministic=False)
    assert y.dtype == jnp.float16
    np.testing.assert_allclose(y.astype(np.float32).std(0), 1, atol=0.01)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(variables))


def test_outputs_are_floats():
    """An integer dtype would round them to a few whole numbers."""
    with pytest.raises(ValueError, match="Dtype must be inexact: int8"):
        BatchNorm(dtype="int8").init(jax.random.key(0), jnp.ones((3, 2)))

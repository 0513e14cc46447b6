"""Linformer's projection of keys and values along the sequence."""

import jax
import jax.numpy as jnp
import numpy as np

from relattn import kernels


def test_without_keys_there_is_nothing():
    x = jax.random.normal(jax.random.key(0), (3, 5, 2))
    matrix = jnp.ones((2, 5))
    mask = jnp.array([[True], [False], [True]]) & jnp.ones((3, 5), bool)
    out = kernels.linformer_attention(x, x, x, matrix, matrix, key_mask=mask)
    assert (out[1] == 0).all() and (out[::2] != 0).all()


def test_the_identity_gives_softmax_attention():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 5, 7))
    out = kernels.linformer_attention(q, k, v, jnp.eye(5), jnp.eye(5))
    np.testing.assert_allclose(out, kernels.softmax_attention(q, k, v), atol=1e-6)

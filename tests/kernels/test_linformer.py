"""Tests Linformer attention."""

import jax
import jax.numpy as jnp
import numpy as np

from relattn import kernels


def test_without_keys_output_is_zero():
    x = np.random.default_rng(0).normal(size=(3, 5, 2)).astype(np.float32)
    matrix = np.ones((2, 5), np.float32)
    mask = np.array([True, False, True])[:, None] & np.ones(5, bool)
    out = jax.jit(kernels.linformer_attention)(x, x, x, matrix, matrix, key_mask=mask)
    assert (out[1] == 0).all() and (out[::2] != 0).all()


def test_identity_projection_gives_softmax_attention():
    q, k, v = np.random.default_rng(0).normal(size=(3, 2, 5, 7)).astype(np.float32)

    @jax.jit
    def both(q, k, v):
        out = kernels.linformer_attention(q, k, v, jnp.eye(5), jnp.eye(5))
        return out, kernels.softmax_attention(q, k, v)

    np.testing.assert_allclose(*both(q, k, v), atol=1e-6)

"""Queries and keys by their direction."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import kernels
from tests import compare


def test_feature_maps_see_unit_vectors():
    x = jax.random.normal(jax.random.key(0), (7, 5)) * jnp.arange(1, 8)[:, None]
    tilde = kernels.unit_norm(x) / 5**0.25
    np.testing.assert_allclose(jnp.linalg.norm(tilde, axis=-1), 1.0, rtol=1e-6)
    np.testing.assert_allclose(
        kernels.unit_norm(17 * x), kernels.unit_norm(x), rtol=1e-5
    )


def test_gradients_equal_the_reference():
    x = jax.random.normal(jax.random.key(0), (2, 7, 5))

    def naive(x):
        return 5**0.25 * x / jnp.sqrt((x**2).sum(-1, keepdims=True))

    compare.expect_equal(kernels.unit_norm, naive, [x])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_short_vectors_stay_short_and_have_no_gradient(dtype):
    x = jnp.array([[0.0, 0.0, 0.0], [1e-5, 0.0, -2e-5], [3.0, 0.0, -4.0]], dtype)
    out, pullback = jax.vjp(kernels.unit_norm, x)
    assert out.dtype == dtype
    norms = jnp.linalg.norm(out.astype(jnp.float32), axis=-1) / 3**0.25
    np.testing.assert_allclose(norms, [0, 5**0.5 * 1e-2, 1], rtol=1e-2)
    (gradient,) = pullback(jnp.ones_like(out))
    np.testing.assert_array_equal(gradient[:2], 0.0)
    expected = 3**0.25 / 5 * np.array([1.12, 1.0, 0.84])
    np.testing.assert_allclose(gradient[2].astype(jnp.float32), expected, rtol=1e-2)

"""Queries and keys by their direction."""

import jax
import jax.numpy as jnp
import numpy as np

from relattn import kernels


def test_feature_maps_see_unit_vectors():
    x = jax.random.normal(jax.random.key(0), (7, 5)) * jnp.arange(1, 8)[:, None]
    tilde = kernels.unit_norm(x) / 5**0.25
    np.testing.assert_allclose(jnp.linalg.norm(tilde, axis=-1), 1.0, rtol=1e-6)
    np.testing.assert_allclose(
        kernels.unit_norm(17 * x), kernels.unit_norm(x), rtol=1e-5
    )


def test_zeros_stay_zeros_with_finite_gradients():
    x = jnp.zeros((2, 3), jnp.bfloat16)
    assert kernels.unit_norm(x).dtype == jnp.bfloat16
    gradient = jax.grad(lambda x: jnp.square(kernels.unit_norm(x)).sum())(x)
    np.testing.assert_array_equal(gradient, 0.0)

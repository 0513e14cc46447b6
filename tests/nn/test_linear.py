"""The linear layer's start."""

import jax
import jax.numpy as jnp
import numpy as np

from relattn.nn.linear import Linear


def test_weights_start_uniform_within_the_inverse_root_of_fan_in():
    layer = Linear(401)
    params = layer.init(jax.random.key(0), jnp.zeros((1, 25)))["params"]
    kernel = np.asarray(params["kernel"])
    assert np.abs(kernel).max() <= 0.2
    # A uniform distribution's standard deviation, within 4 of its standard errors.
    np.testing.assert_allclose(kernel.std(), 0.2 / 3**0.5, rtol=4 * 0.45 / 10025**0.5)
    np.testing.assert_array_equal(params["bias"], 0)

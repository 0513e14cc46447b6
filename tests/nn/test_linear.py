"""The linear layer's start."""

import jax
import jax.numpy as jnp
import numpy as np

from relattn.nn.linear import Linear


def test_weights_and_biases_start_uniform_within_the_inverse_root_of_fan_in():
    layer = Linear(401)
    params = layer.init(jax.random.key(0), jnp.zeros((1, 25)))["params"]
    kernel = np.asarray(params["kernel"])
    assert np.abs(kernel).max() <= 0.2
    # A uniform distribution's standard deviation, within 4 of its standard errors.
    np.testing.assert_allclose(kernel.std(), 0.2 / 3**0.5, rtol=4 * 0.45 / 10025**0.5)
    bias = np.asarray(params["bias"])
    assert np.abs(bias).max() <= 0.2
    np.testing.assert_allclose(bias.std(), 0.2 / 3**0.5, rtol=4 * 0.45 / 401**0.5)


def test_the_layer_is_its_formula_in_the_compute_dtype():
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(2, 3, 5)), rng.normal(size=(5, 7))
    params = {"kernel": jnp.asarray(kernel, jnp.float32), "bias": jnp.arange(7.0)}
    out = Linear(7).apply({"params": params}, jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(out, x @ kernel + np.arange(7), rtol=1e-5, atol=1e-5)
    half = Linear(7, dtype=jnp.bfloat16).apply({"params": params}, jnp.ones((2, 5)))
    assert half.dtype == jnp.bfloat16
    del params["bias"]
    out = Linear(7, use_bias=False).apply(
        {"params": params}, jnp.asarray(x, jnp.float32)
    )
    np.testing.assert_allclose(out, x @ kernel, rtol=1e-5, atol=1e-5)

"""Comparison of a kernel with its naive reference, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np


def expect_equal(kernel, naive, inputs, *, tolerance=2e-5):
    """Checks the outputs, and the gradients of a fixed weighted sum of them.

    Args:
        kernel: A function of the inputs.
        naive: A function of the inputs without their one leading axis, in float64.
        inputs: Arrays ``[heads, ...]``.
        tolerance: Largest error, relative to the largest number of the array.
    """
    results = _value_and_gradients(kernel, inputs)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x), jnp.float64) for x in inputs]
        expected = _value_and_gradients(jax.vmap(naive), wide)
    for ours, theirs in zip(results, expected, strict=True):
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * scale)


def _value_and_gradients(function, inputs):
    @jax.jit
    def compiled(*inputs):
        out, pullback = jax.vjp(function, *inputs)
        cotangent = np.cos(np.arange(out.size)).reshape(out.shape)
        return out, *pullback(cotangent.astype(out.dtype))

    return compiled(*inputs)

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
    names = tuple(range(len(inputs)))
    out = kernel(*inputs)
    cotangent = np.cos(np.arange(out.size)).reshape(out.shape)
    gradients = jax.jit(
        jax.grad(lambda *x: jnp.vdot(kernel(*x), cotangent.astype(out.dtype)), names)
    )(*inputs)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x), jnp.float64) for x in inputs]

        @jax.jit
        def value_and_gradients(*x):
            value, pullback = jax.vjp(jax.vmap(naive), *x)
            return value, pullback(jnp.asarray(cotangent))

        expected, expected_gradients = value_and_gradients(*wide)
    for ours, theirs in zip(
        (out, *gradients), (expected, *expected_gradients), strict=True
    ):
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * scale)

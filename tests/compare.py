"""Comparison of a kernel with its naive reference, values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from relattn.kernels import random_features
from tests import reference
from tests.quick import quick_jit


def feature_map(name, projection):
    """The feature map of the kernels."""
    function = getattr(random_features, f"{name}_features")
    return functools.partial(function, projection=projection)


def naive_map(name, projection):
    """The feature map of the references, of one vector."""
    function = getattr(reference, f"{name}_features")
    return functools.partial(function, projection=np.float64(projection))


def expect_equal(kernel, naive, inputs, *, tolerance=2e-5, double=False):
    """Checks the outputs, and the gradients of a fixed weighted sum of them.

    Args:
        kernel: A function of the inputs.
        naive: A function of the inputs without their one leading axis, in float64.
        inputs: Arrays ``[heads, ...]``.
        tolerance: Largest error, relative to the largest number of the array.
        double: Whether float64 inputs must also give float64 accuracy, 1e-10.
    """
    results = _value_and_gradients(kernel, inputs, jax.jit)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x), jnp.float64) for x in inputs]
        expected = _value_and_gradients(jax.vmap(naive), wide, quick_jit)
        if double:
            accurate = _value_and_gradients(kernel, wide, quick_jit)
            _expect_close(accurate, expected, 1e-10)
    _expect_close(results, expected, tolerance)


def _expect_close(results, expected, tolerance):
    for ours, theirs in zip(results, expected, strict=True):
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * scale)


def expect_equal_second_derivatives(kernel, naive, inputs, *, tolerance=1e-4):
    """Checks the Hessian of a fixed weighted sum of the outputs, times fixed vectors.

    Args:
        kernel: A function of the inputs.
        naive: A function of the inputs without their one leading axis, in float64.
        inputs: Arrays ``[heads, ...]``.
        tolerance: Largest error, relative to the largest number of the array.
    """
    results = _hessian_product(kernel, inputs)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x), jnp.float64) for x in inputs]
        expected = _hessian_product(jax.vmap(naive), wide)
    for ours, theirs in zip(results, expected, strict=True):
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * scale)


def _hessian_product(function, inputs):
    @quick_jit
    def compiled(*inputs):
        def weighted(inputs):
            out = function(*inputs)
            return jnp.vdot(jnp.cos(jnp.arange(out.size)).reshape(out.shape), out)

        tangents = tuple(
            jnp.sin(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape) for x in inputs
        )
        return jax.jvp(jax.grad(weighted), (inputs,), (tangents,))[1]

    return compiled(*inputs)


def _value_and_gradients(function, inputs, jit):
    @jit
    def compiled(*inputs):
        out, pullback = jax.vjp(function, *inputs)
        cotangent = np.cos(np.arange(out.size)).reshape(out.shape)
        return out, *pullback(cotangent.astype(out.dtype))

    return compiled(*inputs)

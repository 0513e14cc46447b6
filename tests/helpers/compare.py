"""Comparison of a kernel with its naive reference, values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from relattn.kernels import feature_maps
from tests import reference
from tests.helpers.quick import quick_jit


def feature_map(name, projection):
    """The feature map of the kernels."""
    function = getattr(feature_maps, f"{name}_features")
    return functools.partial(function, projection=projection)


def naive_map(name, projection):
    """The feature map of the references, of one vector."""
    function = getattr(reference, f"{name}_features")
    return functools.partial(function, projection=np.float64(projection))


def expect_equal(kernel, naive, inputs, *, allowed=None, tolerance=2e-5, double=False):
    """Checks the outputs, and the gradients of a fixed weighted sum of them.

    Args:
        kernel: A function of the inputs.
        naive: A function of the inputs without their one leading axis, in float64.
        inputs: Arrays ``[heads, ...]``.
        allowed: Argument of ``naive``: the keys of each query. It is traced, so that
            all masks share one program.
        tolerance: Largest error, relative to the largest number of the array.
        double: Whether the kernel gets the inputs in float64, with tolerance 1e-10.
    """
    expected = expected_results(naive, inputs, allowed)
    if double:
        with jax.enable_x64(True):
            results = value_and_gradients(kernel, _widen(inputs), quick_jit)
    else:
        results = value_and_gradients(kernel, inputs, jax.jit)
    _expect_close(results, expected, 1e-10 if double else tolerance)


def expected_results(naive, inputs, allowed=None):
    """Returns the reference's outputs, and the gradients of their weighted sum."""
    with jax.enable_x64(True):
        compiled = _compiled_reference(naive, allowed is not None)
        return jax.device_get(compiled(*_widen(inputs), allowed))


def _widen(inputs):
    return [np.asarray(x, np.float64) for x in inputs]


@functools.cache
def _compiled_reference(naive, masked):
    """Compiles ``naive``, over heads, once for all masks."""

    @quick_jit
    def compiled(*inputs_and_allowed):
        *inputs, allowed = inputs_and_allowed
        options = {"allowed": allowed} if masked else {}
        mapped = jax.vmap(functools.partial(naive, **options))
        return _pull_back(mapped, inputs)

    return compiled


def _expect_close(results, expected, tolerance):
    for ours, theirs in zip(results, expected, strict=True):
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * scale)


def expect_equal_second_derivatives(kernel, naive, inputs):
    """Checks the Hessian of a fixed weighted sum of the outputs, times fixed vectors.

    The kernel's is the derivative of its gradient in forward mode and in reverse mode,
    in float64. It agrees with the reference to 1e-10 of the largest number of an array.

    Args:
        kernel: A function of the inputs.
        naive: A function of the inputs without their one leading axis.
        inputs: Arrays ``[heads, ...]``.
    """
    with jax.enable_x64(True):
        wide = _widen(inputs)
        (expected,) = _hessian_products(jax.vmap(naive), wide, reverse=False)
        for results in _hessian_products(kernel, wide, reverse=True):
            _expect_close(results, expected, 1e-10)


def _hessian_products(function, inputs, *, reverse):
    """Differentiates the gradient in forward mode, and with ``reverse`` also in it."""

    @quick_jit
    def compiled(*inputs):
        def weighted(inputs):
            out = function(*inputs)
            return jnp.vdot(jnp.cos(jnp.arange(out.size)).reshape(out.shape), out)

        tangents = tuple(
            jnp.sin(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape) for x in inputs
        )
        gradient = jax.grad(weighted)
        products = [jax.jvp(gradient, (inputs,), (tangents,))[1]]
        if reverse:
            products += jax.vjp(gradient, inputs)[1](tangents)
        return products

    return compiled(*inputs)


def value_and_gradients(function, inputs, jit):
    """Returns the outputs, and the gradients of their weighted sum."""
    return jit(lambda *inputs: _pull_back(function, inputs))(*inputs)


def _pull_back(function, inputs):
    out, pullback = jax.vjp(function, *inputs)
    cotangent = np.cos(np.arange(out.size)).reshape(out.shape)
    return out, *pullback(cotangent.astype(out.dtype))

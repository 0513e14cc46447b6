"""Exponentials, quotients and backward passes that stay finite."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jaxtyping import Array, Float

from relattn.kernels.platform import varying_axes
from relattn.kernels.precision import widen

# If weights cancel to less than this fraction of their magnitudes, the rest is noise.
MIN_SHARE = 1e-4

# The shift before the first key; finite, so that differences of shifts are not NaN.
FLOAT32_MIN = float(jnp.finfo(jnp.float32).min)

# A denominator below this has no weights: they underflowed, or there are no keys.
MIN_DENOMINATOR = 1e-36

# Powers of two, so that scaling is exact, and that float32 holds with their inverses.
_MAX_POWER = 120


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def shifted_exp(
    exponents: Float[Array, "..."], shift: Float[Array, "..."], largest: float = 0.0
) -> Float[Array, "..."]:
    """Computes exp(exponents - shift), at most exp(largest), without gradient of shift.

    A compiler may round exponents differently where it computes their maximum, which
    large exponents then exceed by far. Where the result underflows to zero, so does the
    gradient, whatever the cotangent.
    """
    # Also right by JAX's own rules: second derivatives through a scan use those.
    difference = exponents - jax.lax.stop_gradient(shift)
    return jnp.exp(jnp.where(difference > largest, largest, difference))


@shifted_exp.defjvp
def _shifted_exp_jvp(largest, primals, tangents):
    # JAX traces the rule outside of the kernel, where a loop is differentiated.
    with jax.numpy_rank_promotion("allow"):
        out = shifted_exp(*primals, largest)
        return out, jnp.where(out > 0, out * tangents[0], 0.0)


@jax.custom_jvp
def softmax(scores: Float[Array, "... m"]) -> Float[Array, "... m"]:
    """Computes a softmax over the last axis; see `shifted_exp`."""
    largest = jnp.max(scores, axis=-1, keepdims=True)
    weights = shifted_exp(scores, largest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    # Scores that are rounded differently may all be far below their maximum.
    return weights / jnp.where(total > 0, total, 1.0)


@softmax.defjvp
def _softmax_jvp(primals, tangents):
    # dw_i = w_i (ds_i - sum_j w_j ds_j)
    weights = softmax(*primals)
    weighted = weights * tangents[0]
    return weights, weighted - weights * jnp.sum(weighted, axis=-1, keepdims=True)


def divide_sums(
    sums: Float[Array, "*#batch n width"] | tuple[Array, Array],
    magnitudes: Float[Array, "*#batch n 1"] | None,
    dtype: Any,
    noise: Float[Array, "*#batch n 1"] | None = None,
) -> tuple[Float[Array, "*batch n value_dim"], Float[Array, "*batch n 1"]]:
    """Divides by guarded denominators; also returns them before the guard.

    ``sums`` are the numerators and denominators: a pair, or in one array.
    ``magnitudes`` are sums of absolute weights, None if no weight is negative;
    ``noise`` bounds the rounding errors of the denominators.
    """
    # phi(q_i)^T S and phi(q_i)^T z
    numerator, normalizer = sums if isinstance(sums, tuple) else split_ones(sums)
    denominator = normalizer
    # At least 1e-4 of the sum of magnitudes, or the rounding noise, with its own sign.
    if magnitudes is not None:
        smallest = MIN_SHARE * magnitudes
        smallest = smallest if noise is None else jnp.maximum(smallest, noise)
        guard = jnp.where(normalizer < 0, -smallest, smallest)
        denominator = jnp.where(jnp.abs(normalizer) < smallest, guard, normalizer)
    elif noise is not None:
        denominator = jnp.where(normalizer < noise, noise, normalizer)
    # No weights: the numerator is zero, and so is the result.
    denominator = jnp.where(jnp.abs(denominator) < MIN_DENOMINATOR, 1.0, denominator)
    # Scaled to about one: derivatives divide by powers of the denominator, which could
    # overflow or underflow.
    size = jnp.minimum(jnp.abs(denominator), 1 / MIN_DENOMINATOR)
    scale = jax.lax.stop_gradient(1.0 / size)
    out = numerator * scale / (denominator * scale)
    return out.astype(dtype), normalizer


def append_ones(
    v: Float[Array, "*#batch m value_dim"],
) -> Float[Array, "*batch m width"]:
    """Returns [v, 1], so that one product gives numerators and denominators."""
    v = widen(v)
    return jnp.concatenate([v, jnp.ones((*v.shape[:-1], 1), v.dtype)], axis=-1)


def split_ones(sums: Array) -> tuple[Array, Array]:
    """Splits sums of the columns of `append_ones` into those of v and of the ones."""
    return sums[..., :-1], sums[..., -1:]


def scale_backward(
    function: Callable[..., Any], values: Float[Array, "..."], *arguments: Any
) -> Any:
    """Calls ``function(values, *arguments)``; scales cotangents in its backward pass.

    A backward pass is linear in the cotangents. It divides them by denominators as
    small as 1e-36, and multiplies the quotients by values, before small weights make
    the results moderate again. Their sums stay finite if cotangents times values sum to
    at most one: they do once scaled, by a power of two, and the results are scaled
    back. The result has derivatives in reverse mode only.

    Arrays of float16 reach ``function`` as float32.

    Args:
        function: Computes averages of the values, and may return sums after them, in a
            tuple. It may close over arrays; those of floats get gradients.
        values: Values, shape ``[*batch, n, value_dim]``.
        *arguments: Further arrays, or trees of arrays.

    Returns:
        What ``function`` returns.

    Example:
        >>> scale_backward(lambda v, x: v + x, jnp.ones((1, 2)), jnp.zeros(2)).tolist()
        [[1.0, 1.0]]
    """
    # Scaled cotangents need the exponents of float32.
    values, arguments = jax.tree.map(_without_float16, (values, arguments))
    # `jax.closure_convert` would leave integers and keys in the closure, from where
    # those of a scan's step escape.
    closed, results = jax.make_jaxpr(function, return_shape=True)(values, *arguments)
    # JAX keeps the function that it calls, and all that this one refers to.
    jaxpr, structure, num = closed.jaxpr, jax.tree.structure(results), len(arguments)

    def converted(values, *inputs):
        inputs, constants = inputs[:num], inputs[num:]
        leaves = jax.tree.leaves((values, inputs))
        return jax.tree.unflatten(structure, eval_jaxpr(jaxpr, constants, *leaves))

    return _call(converted, values, arguments, closed.consts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _call(function, values, arguments, constants):
    return function(values, *arguments, *constants)


def _call_forward(function, values, arguments, constants):
    out, pullback = jax.vjp(
        lambda values, arguments, constants: function(values, *arguments, *constants),
        values,
        arguments,
        constants,
    )
    tokens, width = values.shape[-2:]
    # An array: the number of tokens may be symbolic.
    terms = jnp.asarray(2 * tokens * width, jnp.float32)
    # Denominators are sums of ones: cotangents too must be at most one.
    return out, (pullback, jnp.maximum(_power([values]), 1) + _power([terms]))


def _call_backward(function, residuals, cotangents):
    del function
    pullback, power = residuals
    out, *sums = cotangents if isinstance(cotangents, tuple) else (cotangents,)
    largest = _power(jax.tree.leaves(out))
    if jax.tree.leaves(sums):
        # Sums are not divided: their cotangents are quotients already, and as large.
        quotients = _power(jax.tree.leaves(sums))
        largest = jnp.maximum(largest, quotients - _MAX_POWER)
    power = power + largest
    power = jnp.clip(power, -_MAX_POWER, _MAX_POWER)

    def scaled(tree, power):
        def scale(x):
            if not _is_float(x):
                return x
            out = x * jnp.ldexp(jnp.ones((), widen(x).dtype), power).astype(x.dtype)
            # The gradient of a state may be too large, but not its product with the
            # small weights of the keys behind it.
            largest = float(jnp.finfo(x.dtype).max)
            return jnp.where(jnp.isfinite(x), jnp.clip(out, -largest, largest), out)

        return jax.tree.map(scale, tree)

    return scaled(pullback(scaled(cotangents, -power)), power)


_call.defvjp(_call_forward, _call_backward)


def _power(arrays):
    """Returns the power of two above the finite magnitudes, the same on all devices."""
    arrays = [jax.lax.stop_gradient(x) for x in arrays if _is_float(x)]
    largest = [
        jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(widen(x)), 0.0), initial=0.0)
        for x in arrays
    ]
    largest = functools.reduce(jnp.maximum, largest)
    axes = varying_axes(largest)
    return jnp.frexp(jax.lax.pmax(largest, axes) if axes else largest)[1]


def _is_float(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def _without_float16(x):
    return x.astype(jnp.float32) if x.dtype == jnp.float16 else x

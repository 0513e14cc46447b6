"""Linear attention by feature maps, in chunks: time and memory linear in the length.

Exponents stay apart from factors (`Features`) and are shifted before they are
exponentiated. The shifts cancel exactly, so no gradient flows through them, and none
mixes examples. `relattn.kernels.causal_linear` is the causal form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from relattn.kernels.checks import check_arguments
from relattn.kernels.chunks import (
    check_chunk_size,
    join_chunks,
    scan_chunks,
    split_chunks,
)
from relattn.kernels.precision import wide_einsum, widen
from relattn.kernels.random_features import Features

# From [*batch, n, depth] to features; a plain array stands for factors alone.
FeatureMap = Callable[[Array], Features | Array]

# Where a smaller share than this survives when weights cancel, what is left is noise.
_SMALLEST_SHARE = 1e-4

# A denominator below this has no weights left: they underflowed, or there was no key.
_NO_WEIGHT = 1e-36

# The shift before the first key; finite, so that differences of shifts are numbers.
LOWEST = float(jnp.finfo(jnp.float32).min)


class LinearState(NamedTuple):
    """Sums over keys: all that a query needs of them, whatever their number.

    Attributes:
        shift: Subtracted from the keys' exponents: ``[*batch, 1, features]`` or
            ``[*batch, 1, 1]``.
        sums: Sum of phi(k) [v, 1], shape ``[*batch, features, value_depth + 1]``.
        magnitudes: Sum of abs(phi(k)), shape ``[*batch, features, 1]``; None where
            every feature is a plain exponential.
    """

    shift: Float[Array, "*batch 1 features"] | Float[Array, "*batch 1 1"]
    sums: Float[Array, "*batch features width"]
    magnitudes: Float[Array, "*batch features 1"] | None


@check_arguments
def linear_attention(
    q: Float[Array, "*#batch n depth"],
    k: Float[Array, "*#batch m depth"],
    v: Float[Array, "*#batch m value_depth"],
    feature_map: FeatureMap,
    *,
    key_mask: Bool[Array, "*#batch m"] | None = None,
    chunk_size: int = 512,
    precision: jax.lax.PrecisionLike = None,
    return_normalizer: bool = False,
) -> (
    Float[Array, "*batch n value_depth"]
    | tuple[Float[Array, "*batch n value_depth"], Float[Array, "*batch n"]]
):
    """Attention of every query to every key, with weights phi(q_i) . phi(k_j).

    out_i = phi(q_i)^T S / phi(q_i)^T z, S = sum_j phi(k_j) v_j^T, z = sum_j phi(k_j).

    With the exponents a_jf of the keys and b_if of the queries, computed as
    exp(b_if + c_f - r_i) and exp(a_jf - c_f), c_f = max_j a_jf,
    r_i = max_f (b_if + c_f): for positive features the denominator is at least one.

    Trigonometric features can make a denominator near or below zero. Nothing is
    clipped to hide it: a negative one is divided by as it is; one that is smaller than
    1e-4 of the sum of absolute products is set to that size, with its sign, so that
    the result stays finite. ``return_normalizer`` shows where this happens.

    Args:
        q: Queries, shape ``[*batch, n, depth]``.
        k: Keys, shape ``[*batch, m, depth]``.
        v: Values, shape ``[*batch, m, value_depth]``.
        feature_map: From ``[*batch, n, depth]`` to features, token by token.
        key_mask: True for keys that exist, shape ``[*batch, m]``. A query without any
            gives zeros.
        chunk_size: Features are made for so many tokens at a time; beyond one chunk
            they are made anew in the backward pass.
        precision: Passed to einsum.
        return_normalizer: Whether to return the denominators too.

    Returns:
        Shape ``[*batch, n, value_depth]``, in the dtype of ``v``. With
        ``return_normalizer``, also the denominators before the guard, each up to a
        positive factor, shape ``[*batch, n]``: count those that are not positive.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        ValueError: If ``chunk_size`` is less than one.

    Example:
        >>> from relattn.kernels import draw_orthogonal, positive_features
        >>> w = draw_orthogonal(jax.random.key(0), 5, 3)
        >>> x = jnp.ones((7, 3))
        >>> linear_attention(x, x, x, lambda x: positive_features(x, w)).shape
        (7, 3)

    Source:
        Choromanski et al., Rethinking Attention with Performers, section 2.2.
    """
    check_chunk_size(chunk_size)
    k, v, key_mask = clear_masked(k, v, key_mask)
    einsum = wide_einsum(precision)

    def sum_chunk(chunk):
        keys, values, mask = chunk
        return _sum_keys(evaluate(feature_map, keys), values, mask, einsum)

    def attend(queries, state):
        features = evaluate(feature_map, queries)
        return _attend_sums(features, state, einsum, v.dtype)

    if k.shape[-2] <= chunk_size:
        state = sum_chunk((k, v, key_mask))
    else:
        if key_mask is None:
            key_mask = jnp.ones(k.shape[:-1], bool)
        chunks = split_chunks((k, v, key_mask[..., None]), chunk_size)
        chunks = (*chunks[:2], chunks[2][..., 0])
        empty = _empty(jax.eval_shape(sum_chunk, jax.tree.map(lambda x: x[0], chunks)))

        def add_chunk(state, chunk):
            return _merge(state, sum_chunk(chunk)), None

        state, _ = scan_chunks(add_chunk, empty, chunks)

    if q.shape[-2] <= chunk_size:
        out, normalizer = attend(q, state)
    else:

        def attend_chunk(_, queries):
            return None, attend(queries, state)

        _, chunks = scan_chunks(attend_chunk, None, split_chunks(q, chunk_size))
        out, normalizer = join_chunks(chunks, q.shape[-2])
    return (out, normalizer[..., 0]) if return_normalizer else out


def clear_masked(
    k: Float[Array, "*#batch m depth"],
    v: Float[Array, "*#batch m value_depth"],
    key_mask: Bool[Array, "*#batch m"] | None,
) -> tuple[
    Float[Array, "*#batch m depth"],
    Float[Array, "*#batch m value_depth"],
    Bool[Array, "*#batch m"] | None,
]:
    """Zeros for masked keys and values: not even a NaN there reaches the result."""
    if key_mask is None:
        return k, v, None
    kept = key_mask[..., None]
    k, v = jnp.where(kept, k, 0), jnp.where(kept, v, 0)
    return k, v, jnp.broadcast_to(key_mask, k.shape[:-1])


def evaluate(feature_map: FeatureMap, x: Float[Array, "*batch n depth"]) -> Features:
    """Features of tokens; a plain array of features has exponents of zero."""
    features = feature_map(x)
    if isinstance(features, Features):
        return features
    values = widen(features)
    return Features(values, jnp.zeros_like(values[..., :1]))


def append_ones(
    v: Float[Array, "*#batch m value_depth"],
) -> Float[Array, "*batch m width"]:
    """[v, 1], so that one product gives numerators and denominators."""
    v = widen(v)
    return jnp.concatenate([v, jnp.ones((*v.shape[:-1], 1), v.dtype)], axis=-1)


def scale_keys(
    features: Features, mask: Bool[Array, "*batch m"] | None
) -> tuple[
    Float[Array, "*batch m features"],
    Float[Array, "*batch 1 features"] | Float[Array, "*batch 1 1"],
]:
    """Keys' features, largest exponents brought to zero, and the shift that does it."""
    exponents = features.exponents
    if mask is not None:
        exponents = jnp.where(mask[..., None], exponents, -jnp.inf)
    shift = jnp.maximum(jnp.max(exponents, axis=-2, keepdims=True), LOWEST)
    shift = jax.lax.stop_gradient(shift)
    phi = jnp.exp(exponents - shift)
    return (phi if features.values is None else phi * features.values), shift


def _sum_keys(features, v, mask, einsum):
    phi, shift = scale_keys(features, mask)
    magnitudes = None
    if features.values is not None:
        magnitudes = jax.lax.stop_gradient(jnp.sum(jnp.abs(phi), axis=-2)[..., None])
    sums = einsum("...mf,...me->...fe", phi, append_ones(v))
    return LinearState(shift, sums, magnitudes)


def _empty(state):
    """A state of no keys, of the same shapes."""
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)
    return zeros._replace(shift=jnp.full_like(zeros.shift, LOWEST))


def _merge(a, b):
    """The state of the keys of both."""
    shift = jnp.maximum(a.shift, b.shift)

    def rescaled(state):
        factor = jnp.exp(state.shift - shift).swapaxes(-2, -1)
        return jax.tree.map(lambda x: x * factor, (state.sums, state.magnitudes))

    return LinearState(shift, *jax.tree.map(jnp.add, rescaled(a), rescaled(b)))


def scale_queries(
    features: Features, shift: Float[Array, "..."]
) -> Float[Array, "*batch n features"]:
    """Queries' features, their largest exponent brought to zero in every row."""
    exponents = features.exponents + shift
    largest = jnp.max(exponents, axis=-1, keepdims=True)
    phi = jnp.exp(exponents - jax.lax.stop_gradient(largest))
    return phi if features.values is None else phi * features.values


def _attend_sums(features, state, einsum, dtype):
    phi = scale_queries(features, state.shift)
    sums = einsum("...nf,...fe->...ne", phi, state.sums)
    if state.magnitudes is None:
        return divide_sums(sums, None, dtype)
    phi = jax.lax.stop_gradient(jnp.abs(phi))
    magnitudes = einsum("...nf,...fe->...ne", phi, state.magnitudes)
    return divide_sums(sums, magnitudes, dtype)


def divide_sums(
    sums: Float[Array, "*#batch n width"],
    magnitudes: Float[Array, "*#batch n 1"] | None,
    dtype: jnp.dtype,
    noise: Float[Array, "*#batch n 1"] | None = None,
) -> tuple[Float[Array, "*batch n value_depth"], Float[Array, "*batch n 1"]]:
    """Numerators by guarded denominators, and the denominators before the guard.

    ``magnitudes`` are sums of absolute weights, None where no weight is negative;
    ``noise`` is what rounding may have added to a denominator.
    """
    numerator, normalizer = sums[..., :-1], sums[..., -1:]
    denominator = normalizer
    if magnitudes is not None:
        smallest = _SMALLEST_SHARE * magnitudes
        smallest = smallest if noise is None else jnp.maximum(smallest, noise)
        guard = jnp.where(normalizer < 0, -smallest, smallest)
        denominator = jnp.where(jnp.abs(normalizer) < smallest, guard, normalizer)
    elif noise is not None:
        denominator = jnp.where(normalizer < noise, noise, normalizer)
    denominator = jnp.where(jnp.abs(denominator) < _NO_WEIGHT, 1.0, denominator)
    out = _divide(numerator, denominator)
    return out.astype(dtype), normalizer


@jax.custom_jvp
def _divide(numerator, denominator):
    return numerator / denominator


@_divide.defjvp
def _divide_jvp(primals, tangents):
    """JAX's own rule squares the denominator, which could underflow."""
    out = _divide(*primals)
    return out, (tangents[0] - out * tangents[1]) / primals[1]

"""Sums over keys of linear attention: S and z, and the shifts that keep them finite.

Exponents are kept separate from factors (`Features`) and shifted before they are
exponentiated. The shifts cancel exactly, so no gradient flows through them. No shift
mixes examples, and in causal attention none depends on later tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from relattn.kernels.checks import broadcast_batch
from relattn.kernels.feature_maps import Features
from relattn.kernels.guards import FLOAT32_MIN, divide_sums, shifted_exp, split_ones
from relattn.kernels.precision import compute_dtype


class LinearState(NamedTuple):
    """Sums over keys, of a size that does not depend on the number of keys.

    Attributes:
        shift: Subtracted from the keys' exponents: ``[*batch, 1, features]`` or
            ``[*batch, 1, 1]``.
        sums: S and z, the sum of phi(k) [v, 1], shape
            ``[*batch, features, value_dim + 1]``.
        magnitudes: Sum of abs(phi(k)), shape ``[*batch, features, 1]``; None if every
            feature is a plain exponential.
    """

    shift: Float[Array, "*batch 1 features"] | Float[Array, "*batch 1 1"]
    sums: Float[Array, "*batch features width"]
    magnitudes: Float[Array, "*batch features 1"] | None


def scale_keys(
    features: Features, mask: Bool[Array, "*batch m"] | None
) -> tuple[
    Float[Array, "*batch m features"],
    Float[Array, "*batch 1 features"] | Float[Array, "*batch 1 1"],
]:
    """Returns the keys' features, shifted to largest exponent zero, and the shift."""
    # a_jf, -inf for masked keys: their features are zero.
    exponents = features.exponents
    if mask is not None:
        exponents = jnp.where(mask[..., None], exponents, -jnp.inf)
    # c_f = max_j a_jf; finite where all keys are masked.
    shift = jnp.maximum(jnp.max(exponents, axis=-2, keepdims=True), FLOAT32_MIN)
    shift = jax.lax.stop_gradient(shift)
    # e^(a_jf - c_f), at most one, times the factor of the feature.
    phi = shifted_exp(exponents, shift)
    return (phi if features.values is None else phi * features.values), shift


def key_state(
    features: Features,
    v: Float[Array, "*#batch m value_dim"],
    mask: Bool[Array, "*#batch m"] | None,
    einsum: Callable[..., Array],
) -> LinearState:
    """Returns the state of keys: S_f = sum_j e^(a_jf - c_f) v_j^T, and z_f."""
    phi, shift = scale_keys(features, mask)
    # sum_j |phi(k_j)_f|, the scale of rounding errors where features cancel.
    magnitudes = None
    if features.values is not None:
        magnitudes = jax.lax.stop_gradient(jnp.sum(jnp.abs(phi), axis=-2)[..., None])
    # S_f = sum_j phi(k_j)_f v_j^T and z_f = sum_j phi(k_j)_f, side by side.
    sums = einsum("...mf,...me->...fe", phi, v)
    totals = jnp.sum(phi, axis=-2)[..., None]
    sums = jnp.concatenate(broadcast_batch(sums, totals), axis=-1)
    return LinearState(shift, sums, magnitudes)


def empty_state(state: LinearState) -> LinearState:
    """Returns the state of no keys, with the same shapes."""
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)
    return zeros._replace(shift=jnp.full_like(zeros.shift, FLOAT32_MIN))


def merge_states(a: LinearState, b: LinearState) -> LinearState:
    """Adds two states, after bringing them to the same shift."""
    # c = max(c_a, c_b)
    shift = jnp.maximum(a.shift, b.shift)

    def rescaled(state):
        # e^(c_a - c) S_a: sums of e^(a_jf - c) v_j^T instead of e^(a_jf - c_a) v_j^T.
        factor = jnp.exp(state.shift - shift).swapaxes(-2, -1)
        return jax.tree.map(lambda x: x * factor, (state.sums, state.magnitudes))

    return LinearState(shift, *jax.tree.map(jnp.add, rescaled(a), rescaled(b)))


def scale_queries(
    features: Features, shift: Float[Array, "..."]
) -> Float[Array, "*batch n features"]:
    """Returns the queries' features, each row shifted to largest exponent zero."""
    # b_if + c_f: the keys' sums lack the factor e^(c_f).
    exponents = features.exponents + shift
    # r_i = max_f (b_if + c_f), which cancels in the quotient.
    largest = jnp.maximum(jnp.max(exponents, axis=-1, keepdims=True), FLOAT32_MIN)
    phi = shifted_exp(exponents, largest)
    return phi if features.values is None else phi * features.values


def attend_sums(
    features: Features,
    state: LinearState,
    einsum: Callable[..., Array],
    dtype: Any,
) -> tuple[Float[Array, "*batch n value_dim"], Float[Array, "*batch n 1"]]:
    """Returns phi(q_i)^T S / phi(q_i)^T z, and the denominators before the guard."""
    # phi(q_i)_f = e^(b_if + c_f - r_i), times the factor of the feature.
    phi = scale_queries(features, state.shift)
    product = functools.partial(einsum, "...nf,...fe->...ne")
    # phi(q_i)^T S and phi(q_i)^T z, separately: on CPUs a product with one more column
    # takes 1.5 times as long.
    numerator, normalizer = (product(phi, x) for x in split_ones(state.sums))
    # sum_f |phi(q_i)_f| sum_j |phi(k_j)_f|, for the guard.
    magnitudes = None
    if state.magnitudes is not None:
        phi = jax.lax.stop_gradient(jnp.abs(phi))
        magnitudes = product(phi, state.magnitudes)
    return divide_sums((numerator, normalizer), magnitudes, dtype)


def attend_pairs(
    queries: Features,
    keys: Features,
    v: Float[Array, "*#batch m value_dim"],
    mask: Bool[Array, "*#batch m"] | None,
    einsum: Callable[..., Array],
) -> tuple[Float[Array, "*batch n value_dim"], Float[Array, "*batch n 1"]]:
    """Returns what `attend_sums` does, from the weights of all pairs of tokens."""
    phi_k, shift = scale_keys(keys, mask)
    phi_q = scale_queries(queries, shift)
    product = functools.partial(einsum, "...nf,...mf->...nm")
    # phi(q_i) . phi(k_j), times v_j and summed over j.
    weights = product(phi_q, phi_k)
    numerator = einsum("...nm,...me->...ne", weights, v)
    normalizer = jnp.sum(weights, axis=-1, keepdims=True)
    numerator, normalizer = broadcast_batch(numerator, normalizer)
    # sum_j sum_f |phi(q_i)_f| |phi(k_j)_f|, for the guard.
    magnitudes = None
    if keys.values is not None:
        phi_q, phi_k = jax.lax.stop_gradient((jnp.abs(phi_q), jnp.abs(phi_k)))
        magnitudes = jnp.sum(product(phi_q, phi_k), axis=-1, keepdims=True)
    return divide_sums((numerator, normalizer), magnitudes, v.dtype)


def check_state(state: Any) -> None:
    """Raises ValueError unless a state is a `LinearState`, or None."""
    if not isinstance(state, LinearState | None):
        raise ValueError(
            f"the state is a {type(state).__name__}, expected LinearState: restore a "
            "checkpoint with the state or cache of an earlier call as its template"
        )


def check_causal(features: Any) -> None:
    """Raises ValueError if the shift of the features needs later tokens."""
    one_exponent = features.values is not None and features.exponents.shape[-1] == 1
    if features.bound is None and not one_exponent:
        raise ValueError(
            "causal linear attention needs Features with a bound, or with values and "
            "one exponent per token, got no bound and exponents of shape "
            f"{features.exponents.shape}"
        )


def causal_factors(
    queries: Features, keys: Features, mask: Bool[Array, "*#batch n"] | None
) -> tuple[
    Float[Array, "*#batch n features"],
    Float[Array, "*#batch n features"],
    Float[Array, "*#batch n 1"] | None,
]:
    """Returns features of queries and keys, shifted independently of other tokens.

    Without a bound, the features of the keys lack their exponents, one per token, which
    are returned last.
    """
    check_causal(keys)
    # One exponent a_j per token: `_running_decays` multiplies by e^(a_j - r_i) later.
    if keys.bound is None:
        exponents = keys.exponents
        if mask is not None:
            exponents = jnp.where(mask[..., None], exponents, -jnp.inf)
        assert queries.values is not None and keys.values is not None
        return queries.values, keys.values, exponents
    # e^(a_jf - c_f) with c_f from W alone, so that nothing depends on later keys.
    bound = jax.lax.stop_gradient(keys.bound)
    phi = shifted_exp(keys.exponents, bound, math.inf)
    if keys.values is not None:
        phi = phi * keys.values
    if mask is not None:
        phi = jnp.where(mask[..., None], phi, 0.0)
    return scale_queries(queries, bound), phi, None


def empty_causal_state(
    features: Features, v: Array | jax.ShapeDtypeStruct
) -> LinearState:
    """Returns the state before the first token, for features of these shapes."""
    signed = features.values is not None
    widest = features.exponents if features.values is None else features.values
    num_features = widest.shape[-1]
    # Matrices of feature maps may have more batch axes.
    batch = jnp.broadcast_shapes(v.shape[:-2], widest.shape[:-2])
    # With a bound, the bound is the shift and this one stays zero.
    shift = FLOAT32_MIN if features.bound is None else 0.0
    dtype = compute_dtype(v.dtype, *(x.dtype for x in jax.tree.leaves(features)))
    return LinearState(
        shift=jnp.full((*batch, 1, 1), shift, dtype),
        sums=jnp.zeros((*batch, num_features, v.shape[-1] + 1), dtype),
        magnitudes=jnp.zeros((*batch, num_features, 1), dtype) if signed else None,
    )

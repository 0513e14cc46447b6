"""Weights of tokens in sums over keys or queries, in kernels for GPUs.

The weight of a key in the sums of a query is exp(a_j - r_i) if both are of one of the
packed sequences, whose tokens are next to each other; otherwise it is zero. Exponents
of queries are running maxima of those of keys, r_i = max(0, max_{j <= i} a_j), within a
sequence, so that no weight is above one.

Sums are for one token, the edge of the tokens that need them: the first of them if the
sums are over earlier keys, the last if they are over later queries. Other tokens i of
its sequence need the same sums, times exp(r_edge - r_i).

Kernels get the references ``key_exponents``, a_j, which is `NO_KEY` for keys that do
not exist, ``query_exponents``, r_i, and ``sequences``, the number of each token's
sequence. One that is missing is zero.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from relattn.kernels.pallas_gpu.products import MIN_EXPONENT

# The exponent of keys that do not exist, far below that of features without weight.
NO_KEY = 1e2 * MIN_EXPONENT


def find_weights(
    exponents: Float[Array, "heads m"] | None,
    exists: Bool[Array, "heads m"] | None,
    starts: Bool[Array, "heads m"] | None,
    *,
    causal: bool,
) -> dict[str, Array]:
    """Returns what kernels need to know of tokens, as arrays ``[heads, m]``.

    Args:
        exponents: a_j, at least zero; None if all are zero.
        exists: Which keys exist; None if all do.
        starts: Where sequences start; None if there is one.
        causal: Whether a token attends only to itself and earlier tokens. If not, all
            r_i are the largest a_j, which the keys' exponents then lack.

    Returns:
        The arrays that are not all zero, by name.
    """
    tokens = {}
    if starts is not None:
        tokens["sequences"] = jnp.cumsum(starts, axis=1, dtype=jnp.int32)
    if exists is not None:
        given = np.float32(0) if exponents is None else exponents
        tokens["key_exponents"] = jnp.where(exists, given, NO_KEY)
    elif exponents is not None:
        tokens["key_exponents"] = exponents
    if exponents is None:
        return tokens
    if causal:
        tokens["query_exponents"] = _running_maximum(**tokens)
    else:
        largest = jnp.max(tokens["key_exponents"], axis=1, keepdims=True, initial=0.0)
        tokens["key_exponents"] -= largest
    return tokens


def _running_maximum(key_exponents, sequences=None):
    """Returns r_i = max(0, max_{j <= i} a_j), within the token's sequence."""
    exponents = jnp.maximum(key_exponents, 0.0)
    if sequences is None:
        return jax.lax.cummax(exponents, axis=1)

    def merge(first, then):
        largest = jnp.maximum(first[1], then[1])
        return then[0], jnp.where(first[0] == then[0], largest, then[1])

    return jax.lax.associative_scan(merge, (sequences, exponents), axis=1)[1]


def key_weights(refs: Any, rows: Any, edge: Any) -> Any:
    """Returns the weights of keys in sums for the token ``edge``; None if all are 1."""
    exponents = None
    if "key_exponents" in refs:
        exponents = refs["key_exponents"][rows]
    if "query_exponents" in refs:
        exponents = exponents - refs["query_exponents"][edge]
    return _of_sequence(refs, rows, edge, exponents)


def query_weights(refs: Any, rows: Any, edge: Any) -> Any:
    """Returns those of queries, or of sums over queries for the token ``rows``."""
    exponents = None
    if "query_exponents" in refs:
        exponents = refs["query_exponents"][edge] - refs["query_exponents"][rows]
    return _of_sequence(refs, rows, edge, exponents)


def sum_weight(refs: Any, token: Any, edge: Any) -> Any:
    """Returns the weight of a sum over keys for a token in that for ``edge``."""
    return query_weights(refs, edge, token)


def _of_sequence(refs, rows, edge, exponents):
    weights = None if exponents is None else _exp(exponents)
    if "sequences" not in refs:
        return weights
    same = refs["sequences"][rows] == refs["sequences"][edge]
    # Constants of Python would have the type of the condition where that is a scalar.
    one, zero = np.float32(1), np.float32(0)
    return jnp.where(same, one if weights is None else weights, zero)


def weighted(x: Any, weights: Any) -> Any:
    """Multiplies numbers, or rows, by weights, if there are any."""
    if weights is None:
        return x
    return x * (weights if x.ndim == 1 else weights[:, None])


def weighted_pairs(refs: Any, rows: Any, pairs: Any) -> Any:
    """Multiplies [queries, keys] of one chunk by weights, zero for later keys."""
    query, key = (jax.lax.broadcasted_iota(jnp.int32, pairs.shape, i) for i in (0, 1))
    allowed = key <= query
    if "sequences" in refs:
        sequences = refs["sequences"][rows]
        allowed &= sequences[:, None] == sequences[None, :]
    pairs = jnp.where(allowed, pairs, 0.0)
    if "key_exponents" in refs:
        exponents = refs["key_exponents"][rows][None, :]
        if "query_exponents" in refs:
            exponents = exponents - refs["query_exponents"][rows][:, None]
        pairs = pairs * _exp(exponents)
    return pairs


def _exp(exponents):
    """Returns exponentials of at most one, which they are within a sequence."""
    return jnp.exp(jnp.minimum(exponents, 0.0))


def accumulate(
    sums: dict[str, Array],
    tokens: dict[str, Array],
    stretch: int,
    reverse: bool = False,
) -> dict[str, Array]:
    """Adds up sums of stretches over those before each, or after each if ``reverse``.

    Args:
        sums: Sums over keys for the last token of their stretch, or over queries for
            its first token if ``reverse``, shape ``[heads, stretches, ...]``.
        tokens: Arrays ``[heads, n]`` that kernels get as references.
        stretch: Number of tokens of a stretch.
        reverse: Whether to add up those after each.

    Returns:
        Sums for the first token of the stretch, or for its last token.
    """
    # Weights of sums for a stretch's edge, and of its own, in those for the next edge.
    factors = None
    if "query_exponents" in tokens:
        edge, other = _edges(tokens["query_exponents"], stretch, reverse)
        sign = -1.0 if reverse else 1.0
        factors = [_exp(sign * (x[:, :-1] - edge[:, 1:])) for x in (edge, other)]
    if "sequences" in tokens:
        edge, other = _edges(tokens["sequences"], stretch, reverse)
        same = [x[:, :-1] == edge[:, 1:] for x in (edge, other)]
        factors = [a * b for a, b in zip(factors or (1.0, 1.0), same, strict=True)]

    def add_up(x):
        x = (x[:, ::-1] if reverse else x)[:, :-1]
        if factors is None:
            total = jnp.cumsum(x, axis=1)
        else:
            # C_{s+1} = keep_s C_s + add_s x_s
            shape = (*x.shape[:2], *(1,) * (x.ndim - 2))
            keep, add = (y.reshape(shape).astype(x.dtype) for y in factors)
            _, total = jax.lax.associative_scan(_compose, (keep, add * x), axis=1)
        total = jnp.pad(total, [(0, 0), (1, 0)] + [(0, 0)] * (x.ndim - 2))
        return total[:, ::-1] if reverse else total

    return {name: add_up(x) for name, x in sums.items()}


def _edges(x, stretch, reverse):
    """Returns the first and the last of each stretch, or both backwards."""
    first, last = x[:, ::stretch], x[:, stretch - 1 :: stretch]
    return (last[:, ::-1], first[:, ::-1]) if reverse else (first, last)


def _compose(first, then):
    """Returns the function x -> keep x + add that is one such after another."""
    return first[0] * then[0], then[0] * first[1] + then[1]

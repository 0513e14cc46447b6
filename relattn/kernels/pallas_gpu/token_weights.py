"""Weights of tokens in sums over keys or queries, in kernels for GPUs.

A key counts in the sums of a query if it exists, and if both are of one of the packed
sequences, whose tokens are next to each other. Sums are for one token, the edge of the
tokens that need them: the first of them if the sums are over earlier keys, the last if
they are over later queries. Other tokens of its sequence need the same sums.

Kernels get the references ``key_exponents``, zero or `NO_KEY`, and ``sequences``, the
number of each token's sequence; one that is missing changes no weight.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from relattn.kernels.pallas_gpu.products import MIN_EXPONENT

# The exponent of keys that do not exist, far below that of features without weight.
NO_KEY = 1e2 * MIN_EXPONENT


def key_weights(refs: Any, rows: Any, edge: Any) -> Any:
    """Returns the weights of keys in sums for the token ``edge``; None if all are 1."""
    weights = None
    if "key_exponents" in refs:
        weights = jnp.exp(refs["key_exponents"][rows])
    return _of_sequence(refs, rows, edge, weights)


def query_weights(refs: Any, rows: Any, edge: Any) -> Any:
    """Returns those of queries, or of what is a sum for the token ``rows`` already."""
    return _of_sequence(refs, rows, edge, None)


def _of_sequence(refs, rows, edge, weights):
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
        pairs = pairs * jnp.exp(refs["key_exponents"][rows])[None, :]
    return pairs


def accumulate(
    sums: dict[str, Array],
    tokens: dict[str, Array],
    segment: int,
    reverse: bool = False,
) -> dict[str, Array]:
    """Adds up sums of segments over those before each, or after each if ``reverse``.

    Args:
        sums: Sums over keys for the last token of their segment, or over queries for
            its first token if ``reverse``, shape ``[heads, segments, ...]``.
        tokens: Arrays ``[heads, n]`` that kernels get as references.
        segment: Number of tokens of a segment.
        reverse: Whether to add up those after each.

    Returns:
        Sums for the first token of the segment, or for its last token.
    """
    factors = None
    if "sequences" in tokens:
        edge, other = _edges(tokens["sequences"], segment, reverse)
        # Whether sums for a segment's edge, and its own, are for the next edge too.
        factors = [x[:, :-1] == edge[:, 1:] for x in (edge, other)]

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


def _edges(x, segment, reverse):
    """Returns the first and the last of each segment, or both backwards."""
    first, last = x[:, ::segment], x[:, segment - 1 :: segment]
    return (last[:, ::-1], first[:, ::-1]) if reverse else (first, last)


def _compose(first, then):
    """Returns the function x -> keep x + add that is one such after another."""
    return first[0] * then[0], then[0] * first[1] + then[1]

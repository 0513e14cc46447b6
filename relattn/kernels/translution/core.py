"""Attention with tables of projections, whatever their rows are indexed by."""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from relattn.kernels.precision import wide_einsum, widen
from relattn.kernels.softmax import masked_softmax

Precision = jax.lax.PrecisionLike


@runtime_checkable
class Tables(Protocol):
    """What the rows of tables stand for: offsets or pairs of tokens."""

    @property
    def length(self) -> int:
        """The number of tokens."""

    @property
    def allowed(self) -> Array | None:
        """Which keys a query may attend to, ``[n, n]``; None for all."""

    def check(self, name: str, table: Array) -> Array:
        """The table; ValueError if it lacks rows."""

    def scores(
        self, q: Array, k: Array, t_q: Array | None, t_k: Array | None, precision
    ) -> Array:
        """q_ij . k_ji of every pair, float32 or wider, ``[batch, heads, n, n]``.

        ``q`` and ``k`` are tokens ``[batch, n, width]`` to be projected by their
        tables, or without a table ``[batch, n, heads, head_dim]``. Pairs that are not
        allowed have finite scores.
        """

    def values(self, weights: Array, v: Array, t_v: Array, precision) -> Array:
        """sum_j weights_ij v_j T_ij, float32 or wider, ``[*, n, head_dim]``."""


def attend(
    tables: Tables,
    queries: Array,
    keys: Array,
    projections: dict[str, Array],
    key_mask: Array | None,
    precision: Precision,
) -> Array:
    """Attention whose queries, keys and values are projections of tokens.

    Args:
        tables: What tables are indexed by.
        queries: Tokens, ``[*batch, n, dim]``.
        keys: Tokens, the same where all attend to all.
        projections: Of queries, keys and values, in this order, by name: tables, or
            one matrix ``[dim, heads, head_dim]`` for all pairs.
        key_mask: True for keys that exist, ``[*batch, n]``.
        precision: Passed to einsum.

    Returns:
        ``[*batch, heads, n, head_dim]``.
    """
    batch = queries.shape[:-2]
    key_mask = _flat_mask(key_mask, batch, tables.length)
    queries, keys = _one_batch_axis(queries, 1), _one_batch_axis(keys, 1)
    keys = _existing(keys, key_mask)
    tokens = (queries, keys, keys)
    (q, t_q), (k, t_k), (v, t_v) = (
        _operand(tables, x, name, w, precision)
        for x, (name, w) in zip(tokens, projections.items(), strict=True)
    )
    scores = _scores(tables, q, k, t_q, t_k, precision)
    head_dim = next(iter(projections.values())).shape[-1]
    weights = masked_softmax(scores * head_dim**-0.5, _allowed(tables, key_mask))
    out = _values(tables, weights, v, t_v, precision)
    return out.astype(queries.dtype).reshape(*batch, *out.shape[1:])


def check_low_rank(plain: tuple, low: tuple, tables: tuple, scale: float | None) -> int:
    """The number of tokens; ValueError unless the arguments belong together."""
    for names, arrays in (
        ("q, k and v", plain),
        ("low_q, low_k, t_q and t_k", (*low[:2], *tables[:2])),
        ("low_v and t_v", (low[2], tables[2])),
    ):
        if any(x is None for x in arrays) and any(x is not None for x in arrays):
            raise ValueError(f"{names} must be given together, or None together")
    if plain[0] is not None:
        return plain[0].shape[-2]
    if low[0] is None:
        raise ValueError("no scores: give q, k and v, or low_q, low_k, t_q and t_k")
    if scale is None:
        raise ValueError(
            "scale has no default without q: give 1 / sqrt(head_dim), with the "
            "head_dim of the values"
        )
    return low[0].shape[-2]


def attend_low_rank(
    tables: Tables,
    plain: tuple[Array | None, Array | None, Array | None],
    low: dict[str, tuple[Array | None, Array | None]],
    *,
    key_mask: Array | None,
    scale: float | None,
    average: bool,
    precision: Precision,
) -> tuple[Array | None, Array | None]:
    """Attention by plain queries, keys and values and a low-rank part beside them.

    Args:
        tables: What tables are indexed by.
        plain: Queries, keys and values, ``[*batch, heads, n, head_dim]``, or None.
        low: Of queries, keys and values, in this order, by the name of the table:
            tokens ``[*batch, n, inner]`` and the table, or one matrix
            ``[inner, heads, rank]``; or None and None.
        key_mask: True for keys that exist, ``[*batch, n]``.
        scale: Of the scores, by default 1 / sqrt(head_dim).
        average: Whether plain and low-rank parts are averaged, not summed.
        precision: Passed to einsum.

    Returns:
        The plain and the low-rank output, or None in their place.
    """
    first = next(x for x in (plain[0], low["t_q"][0]) if x is not None)
    axes = 2 if plain[0] is not None else 1
    batch = first.shape[: -axes - 1]
    key_mask = _flat_mask(key_mask, batch, tables.length)
    q, k, v = (None if x is None else _one_batch_axis(x, 2) for x in plain)
    # Nothing is halved where there is nothing to average with.
    average = average and q is not None
    half_scores = 0.5 if average and low["t_q"][0] is not None else 1.0
    half_values = 0.5 if average and low["t_v"][0] is not None else 1.0
    if scale is None:
        scale = q.shape[-1] ** -0.5

    scores = 0.0
    if q is not None:
        k, v = (_existing(x, key_mask) for x in (k, v))
        scores = wide_einsum(precision)("bhid,bhjd->bhij", q, k)
    operands = {}
    for name, (tokens, table) in low.items():
        if tokens is not None:
            tokens = _one_batch_axis(tokens, 1)
            tokens = tokens if name == "t_q" else _existing(tokens, key_mask)
            operands[name] = _operand(tables, tokens, name, table, precision)
    if "t_q" in operands:
        (low_q, t_q), (low_k, t_k) = operands["t_q"], operands["t_k"]
        scores = scores + _scores(tables, low_q, low_k, t_q, t_k, precision)
    weights = masked_softmax(scores * (scale * half_scores), _allowed(tables, key_mask))

    def finish(out, dtype):
        return (half_values * out).astype(dtype).reshape(*batch, *out.shape[1:])

    out = low_out = None
    if v is not None:
        out = _sum_values(weights, jnp.moveaxis(v, 1, 2), precision)
        out = finish(out, v.dtype)
    if "t_v" in operands:
        low_v, t_v = operands["t_v"]
        low_out = finish(_values(tables, weights, low_v, t_v, precision), low_v.dtype)
    return out, low_out


def _one_batch_axis(x, trailing):
    """From [*batch, ..., n, width] to [batch, ..., n, width]."""
    axis = x.ndim - trailing - 1
    return x.reshape(math.prod(x.shape[:axis]), *x.shape[axis:])


def _flat_mask(key_mask, batch, length):
    if key_mask is None:
        return None
    key_mask = jnp.broadcast_to(key_mask, (*batch, length))
    return key_mask.reshape(math.prod(batch), length)


def _existing(keys, key_mask):
    """Zeros for keys that do not exist, whatever they hold."""
    if key_mask is None:
        return keys
    mask = key_mask[:, :, None] if keys.ndim == 3 else key_mask[:, None, :, None]
    return jnp.where(mask, keys, 0)


def _allowed(tables, key_mask):
    """Which keys a query may attend to, [batch heads n n]."""
    if key_mask is None:
        return tables.allowed
    key_mask = key_mask[:, None, None, :]
    return key_mask if tables.allowed is None else tables.allowed & key_mask


def _operand(tables, tokens, name, w, precision):
    """Tokens and their table, or projected tokens and None."""
    if w.ndim == 3:
        return jnp.einsum("bnc,che->bnhe", tokens, w, precision=precision), None
    return tokens, tables.check(name, w)


def _scores(tables, q, k, t_q, t_k, precision):
    if t_q is None and t_k is None:
        return wide_einsum(precision)("bihd,bjhd->bhij", q, k)
    return tables.scores(q, k, t_q, t_k, precision)


def _values(tables, weights, v, t_v, precision):
    if t_v is None:
        return _sum_values(weights, v, precision)
    return tables.values(weights, v, t_v, precision)


def _sum_values(weights, v, precision):
    return wide_einsum(precision)("bhij,bjhd->bhid", weights, widen(v))

"""Attention with tables of projections, for any index of their rows."""

from __future__ import annotations

import math
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from relattn.kernels.masks import finite_masked
from relattn.kernels.precision import wide_einsum, widen
from relattn.kernels.softmax import masked_softmax
from relattn.messages import shorten

Precision = jax.lax.PrecisionLike
# Queries, keys and values, or what belongs to them; None for a missing part.
Triple = tuple[Array | None, Array | None, Array | None]


@runtime_checkable
class Index(Protocol):
    """Maps pairs of tokens to rows of tables: `Offsets`, `CausalOffsets` or `Pairs`."""

    @property
    def length(self) -> int:
        """Number of tokens."""
        ...

    @property
    def allowed(self) -> Array | None:
        """Which keys a query may attend to, ``[n, n]``; None for all."""
        ...

    def check_length(self, num_tokens: int) -> None:
        """Raises ValueError if the index is for another number of tokens."""
        ...

    def check_table(self, name: str, table: Array) -> Array:
        """Returns the table; raises ValueError if it lacks rows."""
        ...

    def scores(
        self, q: Array, k: Array, t_q: Array | None, t_k: Array | None, precision
    ) -> Array:
        """Computes q_ij . k_ji of all pairs, ``[batch, heads, n, n]``.

        ``q`` and ``k`` are tokens ``[batch, n, width]``, projected by their tables, or,
        without a table, ``[batch, n, heads, head_dim]``. The scores of pairs that are
        not allowed are finite. The result is float32 or wider.
        """
        ...

    def values(self, weights: Array, v: Array, t_v: Array, precision) -> Array:
        """Computes sum_j weights_ij v_j T_ij, ``[*, n, head_dim]``."""
        ...


def check_num_tokens(index: Index, num_tokens: int) -> None:
    """Raises ValueError if an index is for another number of tokens."""
    if num_tokens != index.length:
        raise ValueError(f"index={index} does not fit {num_tokens} tokens")


def check_index(index: Index, num_tokens: int) -> None:
    """Raises ValueError if an index is none, or is for another number of tokens."""
    if isinstance(index, type) or not hasattr(index, "check_length"):
        raise ValueError(
            "index must be Offsets, CausalOffsets or Pairs, such as Offsets((7, 7)), "
            f"got {shorten(index)}"
        )
    index.check_length(num_tokens)


def attend(
    index: Index,
    queries: Array,
    keys: Array,
    weights: tuple[Array, Array, Array],
    key_mask: Array | None,
    precision: Precision,
) -> Array:
    """Computes attention whose queries, keys and values are projections of tokens.

    Args:
        index: Index of the tables' rows.
        queries: Tokens, ``[*batch, n, dim]``.
        keys: Tokens, ``[*batch, m, dim]``; the queries, except in decoding.
        weights: Tables of queries, keys and values, or one matrix
            ``[dim, heads, head_dim]`` for all pairs.
        key_mask: True for keys that exist, ``[*batch, n]``.
        precision: Passed to einsum.

    Returns:
        ``[*batch, heads, n, head_dim]``.
    """
    batch = queries.shape[:-2]
    key_mask = _flat_mask(key_mask, batch, index.length)
    queries, keys = _flatten_batch(queries, 1), _flatten_batch(keys, 1)
    queries = finite_masked(queries, key_mask)
    keys = _zero_masked(keys, key_mask)
    # Tokens with their tables, or x W without a table.
    (q, t_q), (k, t_k), (v, t_v) = (
        _operand(index, x, name, w, precision)
        for x, name, w in zip(
            (queries, keys, keys), ("w_q", "w_k", "w_v"), weights, strict=True
        )
    )
    # alpha_ij = softmax_j(q_ij . k_ji / sqrt(head_dim))
    scores = _scores(index, q, k, t_q, t_k, precision)
    head_dim = weights[0].shape[-1]
    alpha = masked_softmax(scores * head_dim**-0.5, _allowed(index, key_mask))
    # out_i = sum_j alpha_ij v_ij
    out = _values(index, alpha, v, t_v, precision)
    return out.astype(queries.dtype).reshape(*batch, *out.shape[1:])


def check_low_rank(
    qkv: Triple, low: Triple, tables: Triple, scale: float | None
) -> int:
    """Returns the number of tokens; raises ValueError if arrays are missing."""
    for names, arrays in (
        ("qkv[0], qkv[1] and qkv[2]", qkv),
        ("low[0], low[1], tables[0] and tables[1]", (*low[:2], *tables[:2])),
        ("low[2] and tables[2]", (low[2], tables[2])),
    ):
        if any(x is None for x in arrays) and any(x is not None for x in arrays):
            raise ValueError(f"{names} must all be arrays or all be None")
    if qkv[0] is not None:
        return qkv[0].shape[-2]
    if low[0] is None:
        raise ValueError(
            "no scores: pass qkv, or low[0], low[1], tables[0] and tables[1]"
        )
    if scale is None:
        raise ValueError(
            "scale has no default without qkv: pass 1 / sqrt(head_dim), with the "
            "head_dim of the values"
        )
    return low[0].shape[-2]


def attend_low_rank(
    index: Index,
    qkv: Triple,
    low: Triple,
    tables: Triple,
    *,
    key_mask: Array | None,
    scale: float | None,
    average: bool,
    precision: Precision,
) -> tuple[Array | None, Array | None]:
    """Computes attention with plain queries, keys and values plus a low-rank part.

    Args:
        index: Index of the tables' rows.
        qkv: Queries, keys and values, ``[*batch, heads, n, head_dim]``, or None.
        low: Tokens of the low-rank queries, keys and values, ``[*batch, n, inner]``, or
            None.
        tables: Their tables, or one matrix ``[inner, heads, rank]``, or None.
        key_mask: True for keys that exist, ``[*batch, n]``.
        scale: Factor of the scores; None for 1 / sqrt(head_dim).
        average: Whether to average the plain and low-rank parts instead of adding them.
        precision: Passed to einsum.

    Returns:
        The plain and the low-rank output, each None if its part is not given.
    """
    first, axes = (qkv[0], 2) if qkv[0] is not None else (low[0], 1)
    assert first is not None  # One of the two gives scores.
    batch = first.shape[: -axes - 1]
    key_mask = _flat_mask(key_mask, batch, index.length)
    q, k, v = (None if x is None else _flatten_batch(x, 2) for x in qkv)
    # A part without counterpart is not halved.
    average = average and q is not None
    half_scores = 0.5 if average and low[0] is not None else 1.0
    half_values = 0.5 if average and low[2] is not None else 1.0
    if scale is None:
        assert q is not None  # Or scale has no default.
        scale = math.pow(q.shape[-1], -0.5)

    # q_i . k_j
    scores: Any = 0.0
    if q is not None:
        q = finite_masked(q, key_mask if key_mask is None else key_mask[:, None])
        k, v = (_zero_masked(x, key_mask) for x in (k, v))
        scores = wide_einsum(precision)("bhid,bhjd->bhij", q, k)
    # Tokens with their tables, or low T without a table.
    operands: list[Any] = [None] * 3
    for i, (tokens, table) in enumerate(zip(low, tables, strict=True)):
        if tokens is not None:
            tokens = _flatten_batch(tokens, 1)
            tokens = (finite_masked if i == 0 else _zero_masked)(tokens, key_mask)
            operands[i] = _operand(index, tokens, f"tables[{i}]", table, precision)
    # + low_q_i Tq[d] . low_k_j Tk[-d]
    if operands[0] is not None:
        (low_q, t_q), (low_k, t_k) = operands[:2]
        scores = scores + _scores(index, low_q, low_k, t_q, t_k, precision)
    alpha = masked_softmax(scores * (scale * half_scores), _allowed(index, key_mask))

    def finish(out, dtype):
        return (half_values * out).astype(dtype).reshape(*batch, *out.shape[1:])

    out = low_out = None
    # out_i = sum_j alpha_ij v_j
    if v is not None:
        out = wide_einsum(precision)("bhij,bhjd->bhid", alpha, widen(v))
        out = finish(out, v.dtype)
    # low_out_i = sum_j alpha_ij low_v_j Tv[d]
    if operands[2] is not None:
        low_v, t_v = operands[2]
        low_out = finish(_values(index, alpha, low_v, t_v, precision), low_v.dtype)
    return out, low_out


def _flatten_batch(x: Array, trailing: int) -> Array:
    """Flattens the batch axes: [batch, ..., n, width]."""
    axis = x.ndim - trailing - 1
    return x.reshape(math.prod(x.shape[:axis]), *x.shape[axis:])


def _flat_mask(key_mask, batch, length):
    if key_mask is None:
        return None
    key_mask = jnp.broadcast_to(key_mask, (*batch, length))
    return key_mask.reshape(math.prod(batch), length)


def _zero_masked(keys, key_mask):
    """Zeros the masked keys, even if they hold NaN."""
    if key_mask is None:
        return keys
    mask = key_mask[:, :, None] if keys.ndim == 3 else key_mask[:, None, :, None]
    return jnp.where(mask, keys, 0)


def _allowed(index, key_mask):
    """Combines the index's and the caller's masks, [batch heads n n]."""
    if key_mask is None:
        return index.allowed
    key_mask = key_mask[:, None, None, :]
    return key_mask if index.allowed is None else index.allowed & key_mask


def _operand(index, tokens, name, w, precision):
    """Returns tokens and their table, or projected tokens and None."""
    if w.ndim == 3:
        return jnp.einsum("bnc,che->bnhe", tokens, w, precision=precision), None
    return tokens, index.check_table(name, w)


def _scores(index, q, k, t_q, t_k, precision):
    if t_q is None and t_k is None:
        return wide_einsum(precision)("bihd,bjhd->bhij", q, k)
    return index.scores(q, k, t_q, t_k, precision)


def _values(index, weights, v, t_v, precision):
    if t_v is None:
        return wide_einsum(precision)("bhij,bjhd->bhid", weights, widen(v))
    return index.values(weights, v, t_v, precision)

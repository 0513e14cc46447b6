"""Softmax attention with tables of offsets: biases, and vectors for keys and values.

A table has a row for every offset of `relattn.offsets.offset_index`. Memory is n^2
numbers a head, as softmax attention's: no vector is made for a pair of tokens.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from relattn.kernels.checks import check_arguments, zero_masked
from relattn.kernels.positions.bias import (
    past_rows,
    rows_of_token,
    skew,
    with_prefix_rows,
)
from relattn.kernels.precision import wide_einsum, widen
from relattn.kernels.softmax import softmax_weights, weighted_sum
from relattn.offsets import Grid, check_grid, num_offsets, offset_index


@check_arguments
def relative_attention(
    q: Float[Array, "*#batch n head_dim"],
    k: Float[Array, "*#batch n head_dim"],
    v: Float[Array, "*#batch n value_dim"],
    *,
    grid: Grid,
    num_prefix: int = 0,
    key_table: Float[Array, "*#batch key_rows head_dim"] | None = None,
    value_table: Float[Array, "*#batch value_rows value_dim"] | None = None,
    bias: Float[Array, "*#batch bias_rows"] | None = None,
    key_mask: Bool[Array, "*#batch n"] | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch n value_dim"]:
    """Softmax attention whose keys, values and scores know the offset.

    a_ij = q_i . (k_j + r_d) / sqrt(head_dim) + b_d, out_i = sum_j softmax_j(a_ij)
    (v_j + s_d), with d = p_i - p_j, ``key_table`` r, ``value_table`` s and ``bias`` b.

    A table has a row for every offset, and three more, where there are prefix tokens,
    for pairs with a prefix token: "in", "self", "out" as in
    `relattn.offsets.offset_index`. Without these three, such pairs add nothing.

    Args:
        q: Queries, shape ``[*batch, n, head_dim]``.
        k: Keys, shape ``[*batch, n, head_dim]``.
        v: Values, shape ``[*batch, n, value_dim]``.
        grid: Height and width, or length, of the tokens after the prefix.
        num_prefix: Number of prefix tokens.
        key_table: r, shape ``[*batch, rows, head_dim]``.
        value_table: s, shape ``[*batch, rows, value_dim]``.
        bias: b, shape ``[*batch, rows]``.
        key_mask: True for keys that exist, shape ``[*batch, n]``.
        precision: Passed to einsum.

    Returns:
        Shape ``[*batch, n, value_dim]``, in the dtype of ``v``.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        ValueError: If the grid does not hold the tokens or a table has not the rows.

    Example:
        >>> x = jnp.zeros((3, 1))
        >>> far = jnp.array([0.0, 0.0, 0.0, 50.0, 0.0])  # the key one to the left
        >>> out = relative_attention(x, x, jnp.eye(3), grid=(3,), bias=far)
        >>> out[1].round(3).tolist()
        [1.0, 0.0, 0.0]

    Source:
        Shaw et al., Self-Attention with Relative Position Representations, section
        3.2; bias: Liu et al., Swin Transformer, section 3.2.
    """
    check_grid(q.shape[-2], grid, num_prefix)
    rows = num_offsets(grid)
    key_table, value_table = (
        with_prefix_rows(table, name, rows, num_prefix, axis=-2)
        for name, table in (("key_table", key_table), ("value_table", value_table))
    )
    bias = with_prefix_rows(bias, "bias", rows, num_prefix, axis=-1)
    total = None
    if bias is not None:
        # Wide first: its gradient is a sum over many pairs.
        total = widen(bias)[..., offset_index(grid, num_prefix)]

    def to_pairs(per_row):
        return _to_pairs(per_row, grid, num_prefix)

    if key_table is not None:
        total = _add(total, to_pairs(_score(q, key_table, precision)))
    k, v, key_mask = zero_masked(k, v, key_mask)
    weights = softmax_weights(q, k, key_mask=key_mask, bias=total, precision=precision)
    out = weighted_sum(weights, v, precision)
    if value_table is not None:
        per_row = _from_pairs(to_pairs, weights, value_table.shape[-2])
        out = out + weighted_sum(per_row, value_table, precision)
    return out.astype(v.dtype)


@check_arguments
def causal_relative_attention(
    q: Float[Array, "*#batch n head_dim"],
    k: Float[Array, "*#batch n head_dim"],
    v: Float[Array, "*#batch n value_dim"],
    *,
    key_table: Float[Array, "*#batch key_rows head_dim"] | None = None,
    value_table: Float[Array, "*#batch value_rows value_dim"] | None = None,
    bias: Float[Array, "*#batch bias_rows"] | None = None,
    key_mask: Bool[Array, "*#batch n"] | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch n value_dim"]:
    """`relative_attention` of every token to itself and those before it, on a line.

    Tables are those of a line of ``length >= n`` tokens, 2 length - 1 rows, of which
    the offsets 0 .. n - 1 are used.

    Args:
        q: Queries, shape ``[*batch, n, head_dim]``.
        k: Keys, shape ``[*batch, n, head_dim]``.
        v: Values, shape ``[*batch, n, value_dim]``.
        key_table: r, shape ``[*batch, rows, head_dim]``.
        value_table: s, shape ``[*batch, rows, value_dim]``.
        bias: b, shape ``[*batch, rows]``.
        key_mask: True for keys that exist, shape ``[*batch, n]``.
        precision: Passed to einsum.

    Returns:
        Shape ``[*batch, n, value_dim]``, in the dtype of ``v``.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        ValueError: If there are more tokens than a table has offsets for.

    Example:
        >>> x = jnp.zeros((3, 1))
        >>> far = jnp.array([0.0, 0.0, 0.0, 0.0, 50.0])  # the key two to the left
        >>> causal_relative_attention(x, x, jnp.eye(3), bias=far)[2].round(3).tolist()
        [1.0, 0.0, 0.0]

    Source:
        Shaw et al., Self-Attention with Relative Position Representations, section
        3.2; bias: Liu et al., Swin Transformer, section 3.2.
    """
    length = q.shape[-2]
    key_table, value_table = (
        past_rows(table, name, length, axis=-2)
        for name, table in (("key_table", key_table), ("value_table", value_table))
    )
    bias = past_rows(bias, "bias", length, axis=-1)

    def to_pairs(past):
        future = [(0, 0)] * (past.ndim - 1) + [(length - 1, 0)]
        return _to_pairs(jnp.pad(past, future), (length,), 0)

    total = None
    if bias is not None:
        # Wide first: its gradient is a sum over many pairs.
        bias = widen(bias)[..., None, :]
        shape = (*bias.shape[:-2], length, length)
        total = to_pairs(jnp.broadcast_to(bias, shape))
    if key_table is not None:
        total = _add(total, to_pairs(_score(q, key_table, precision)))
    past = jnp.tril(jnp.ones((length, length), bool))
    k, v, key_mask = zero_masked(k, v, key_mask)
    weights = softmax_weights(
        q, k, mask=past, key_mask=key_mask, bias=total, precision=precision
    )
    out = weighted_sum(weights, v, precision)
    if value_table is not None:
        per_row = _from_pairs(to_pairs, weights, length)
        out = out + weighted_sum(per_row, value_table, precision)
    return out.astype(v.dtype)


@check_arguments
def causal_relative_attention_step(
    q_i: Float[Array, "*#batch head_dim"],
    k: Float[Array, "*#batch length head_dim"],
    v: Float[Array, "*#batch length value_dim"],
    *,
    index: Int[Array, ""] | int,
    key_table: Float[Array, "*#batch key_rows head_dim"] | None = None,
    value_table: Float[Array, "*#batch value_rows value_dim"] | None = None,
    bias: Float[Array, "*#batch bias_rows"] | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch value_dim"]:
    """One token of `causal_relative_attention`, for decoding.

    Args:
        q_i: The token's query, shape ``[*batch, head_dim]``.
        k: Keys so far, its own too; those after it do not matter.
        v: Values so far.
        index: The token's place in the sequence; may be traced.
        key_table: r, shape ``[*batch, 2 length - 1, head_dim]``.
        value_table: s, shape ``[*batch, 2 length - 1, value_dim]``.
        bias: b, shape ``[*batch, 2 length - 1]``.
        precision: Passed to einsum.

    Returns:
        The token's output, shape ``[*batch, value_dim]``, in the dtype of ``v``.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        ValueError: If a table has not 2 length - 1 rows.

    Example:
        >>> x = jnp.zeros((3, 1))
        >>> far = jnp.array([0.0, 0.0, 0.0, 0.0, 50.0])
        >>> out = causal_relative_attention_step(
        ...     x[2], x, jnp.eye(3), index=2, bias=far)
        >>> out.round(3).tolist()
        [1.0, 0.0, 0.0]
    """
    length = k.shape[-2]
    key_table = rows_of_token(key_table, "key_table", length, index, -2)
    value_table = rows_of_token(value_table, "value_table", length, index, -2)
    bias = rows_of_token(bias, "bias", length, index, -1)
    q = q_i[..., None, :]
    total = None if bias is None else widen(bias)[..., None, :]
    if key_table is not None:
        total = _add(total, _score(q, key_table, precision))
    k, v, past = zero_masked(k, v, jnp.arange(length) <= index)
    weights = softmax_weights(q, k, key_mask=past, bias=total, precision=precision)
    out = weighted_sum(weights, v, precision)
    if value_table is not None:
        out = out + weighted_sum(weights, value_table, precision)
    return out[..., 0, :].astype(v.dtype)


def _add(total, scores):
    return scores if total is None else total + scores


def _score(q, keys, precision):
    """q_i . r / sqrt(head_dim) for every row r of a table, in float32 or wider."""
    scores = wide_einsum(precision)("...nd,...rd->...nr", q, keys)
    return scores * q.shape[-1] ** -0.5


def _to_pairs(per_row, grid, num_prefix):
    """From a number for every token and table row to one for every pair of tokens.

    y_ij = x_i,row(i, j): linear, and without a gather, whose derivative is slow.

    Args:
        per_row: Shape ``[*batch, n, rows]``, with the rows of prefix tokens if any.
        grid: As in `relative_attention`.
        num_prefix: As in `relative_attention`.

    Returns:
        Shape ``[*batch, n, n]``.
    """
    axes, rows = len(grid), num_offsets(grid)
    leading = per_row.shape[:-2]
    x = per_row[..., num_prefix:, :rows]
    x = x.reshape(*leading, *grid, *(2 * size - 1 for size in grid))
    for axis in range(axes):
        pair = (len(leading) + axis, len(leading) + axes + axis)
        x = jnp.moveaxis(skew(jnp.moveaxis(x, pair, (-2, -1))), (-2, -1), pair)
    num_tokens = math.prod(grid)
    x = x.reshape(*leading, num_tokens, num_tokens)
    if not num_prefix:
        return x

    def column(tokens, row, width):
        part = per_row[..., tokens, row : row + 1]
        return jnp.broadcast_to(part, (*part.shape[:-1], width))

    prefix, others = slice(0, num_prefix), slice(num_prefix, None)
    x = jnp.concatenate([column(others, rows, num_prefix), x], axis=-1)
    top = [column(prefix, rows + 1, num_prefix), column(prefix, rows + 2, num_tokens)]
    return jnp.concatenate([jnp.concatenate(top, axis=-1), x], axis=-2)


def _from_pairs(to_pairs, weights, rows):
    """The adjoint of ``to_pairs``: sums of weights by table row, [*batch n rows]."""
    shape = (*weights.shape[:-1], rows)
    (per_row,) = jax.linear_transpose(
        to_pairs, jax.ShapeDtypeStruct(shape, weights.dtype)
    )(weights)
    return per_row

"""Softmax attention with biases, key vectors and value vectors for each offset.

A table has a row for every offset of `relattn.offsets.offset_index`. Memory is n^2
numbers per head, as for softmax attention: no vector is stored per pair of tokens.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from relattn.kernels.checks import check_arguments, zero_masked
from relattn.kernels.positions.bias import (
    bias_of_pairs,
    past_rows,
    rows_of_token,
    skew,
    with_prefix_rows,
)
from relattn.kernels.precision import wide_einsum, widen
from relattn.kernels.softmax import softmax_weights, weighted_sum
from relattn.offsets import (
    Grid,
    Torus,
    check_grid,
    num_offsets,
    offsets_per_axis,
)


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
    mask: Bool[Array, "*#batch n n"] | None = None,
    key_mask: Bool[Array, "*#batch n"] | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch n value_dim"]:
    """Computes softmax attention with a key vector, value vector and bias per offset.

    a_ij = q_i . (k_j + r_d) / sqrt(head_dim) + b_d, out_i = sum_j softmax_j(a_ij)
    (v_j + s_d), with d = p_i - p_j, ``key_table`` r, ``value_table`` s and ``bias`` b.

    A table has a row for every offset. With prefix tokens it may have three more rows,
    "in", "self" and "out" as in `relattn.offsets.offset_index`, for pairs with a prefix
    token. Without these rows such pairs add nothing.

    Args:
        q: Queries, shape ``[*batch, n, head_dim]``.
        k: Keys, shape ``[*batch, n, head_dim]``.
        v: Values, shape ``[*batch, n, value_dim]``.
        grid: Height and width, or length, of the tokens after the prefix.
        num_prefix: Number of prefix tokens.
        key_table: r, shape ``[*batch, rows, head_dim]``.
        value_table: s, shape ``[*batch, rows, value_dim]``.
        bias: b, shape ``[*batch, rows]``.
        mask: True where query i may attend to key j, shape ``[*batch, n, n]``.
        key_mask: True for keys that exist, shape ``[*batch, n]``.
        precision: Passed to einsum.

    Returns:
        Shape ``[*batch, n, value_dim]``, in the dtype of ``v``.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        ValueError: If the grid does not hold the tokens, or a table has the wrong
            number of rows.

    Example:
        >>> x = jnp.zeros((3, 1))
        >>> left = jnp.array([0.0, 0.0, 0.0, 50.0, 0.0])  # favours offset 1
        >>> out = relative_attention(x, x, jnp.eye(3), grid=(3,), bias=left)
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
    # The scores added to q_i . k_j / sqrt(head_dim): b_d, then q_i . r_d.
    scores = None
    if bias is not None:
        scores = bias_of_pairs(bias, grid, num_prefix)

    def to_pairs(per_row):
        return _to_pairs(per_row, grid, num_prefix)

    if key_table is not None:
        scores = _add_scores(scores, to_pairs(_score_rows(q, key_table, precision)))
    k, v, key_mask = zero_masked(k, v, key_mask)
    weights = softmax_weights(
        q, k, mask=mask, key_mask=key_mask, bias=scores, precision=precision
    )
    out = weighted_sum(weights, v, precision)
    if value_table is not None:
        # sum_j weight_ij s_d: the weights are summed by row first.
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
    mask: Bool[Array, "*#batch n n"] | None = None,
    key_mask: Bool[Array, "*#batch n"] | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch n value_dim"]:
    """Computes `relative_attention` of every token to itself and earlier tokens.

    a_ij = q_i . (k_j + r_(i - j)) / sqrt(head_dim) + b_(i - j),
    out_i = sum_{j <= i} softmax_{j <= i}(a_ij) (v_j + s_(i - j)).

    Tables are those of a line of ``length >= n`` tokens: 2 length - 1 rows, of which
    the offsets 0 .. n - 1 are used.

    Args:
        q: Queries, shape ``[*batch, n, head_dim]``.
        k: Keys, shape ``[*batch, n, head_dim]``.
        v: Values, shape ``[*batch, n, value_dim]``.
        key_table: r, shape ``[*batch, rows, head_dim]``.
        value_table: s, shape ``[*batch, rows, value_dim]``.
        bias: b, shape ``[*batch, rows]``.
        mask: True where query i may attend to key j, shape ``[*batch, n, n]``.
        key_mask: True for keys that exist, shape ``[*batch, n]``.
        precision: Passed to einsum.

    Returns:
        Shape ``[*batch, n, value_dim]``, in the dtype of ``v``.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        ValueError: If a table has fewer offsets than there are tokens, or an even
            number of rows.

    Example:
        >>> x = jnp.zeros((3, 1))
        >>> left = jnp.array([0.0, 0.0, 0.0, 0.0, 50.0])  # favours offset 2
        >>> causal_relative_attention(x, x, jnp.eye(3), bias=left)[2].round(3).tolist()
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

    def to_pairs(per_row):
        # Zeros for the offsets of later keys, which the mask excludes.
        future = [(0, 0)] * (per_row.ndim - 1) + [(length - 1, 0)]
        return _to_pairs(jnp.pad(per_row, future), (length,), 0)

    # The scores added to q_i . k_j / sqrt(head_dim): b_(i - j), then q_i . r_(i - j).
    scores = None
    if bias is not None:
        # Widened before indexing: the gradient is a sum over many pairs.
        bias = widen(bias)[..., None, :]
        shape = (*bias.shape[:-2], length, length)
        scores = to_pairs(jnp.broadcast_to(bias, shape))
    if key_table is not None:
        scores = _add_scores(scores, to_pairs(_score_rows(q, key_table, precision)))
    past = jnp.tril(jnp.ones((length, length), bool))
    mask = past if mask is None else mask & past
    k, v, key_mask = zero_masked(k, v, key_mask)
    weights = softmax_weights(
        q, k, mask=mask, key_mask=key_mask, bias=scores, precision=precision
    )
    out = weighted_sum(weights, v, precision)
    if value_table is not None:
        # sum_j weight_ij s_(i - j): the weights are summed by row first.
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
    """Computes `causal_relative_attention` for one token, for decoding.

    out_i = sum_{j <= i} softmax_{j <= i}(a_ij) (v_j + s_(i - j)), i = ``index``, with
    a_ij as in `causal_relative_attention`.

    Args:
        q_i: The token's query, shape ``[*batch, head_dim]``.
        k: Keys up to and including the token's, shape ``[*batch, length, head_dim]``;
            later ones are ignored.
        v: Values, shape ``[*batch, length, value_dim]``, same as `k`.
        index: The token's position in the sequence; may be traced.
        key_table: r, shape ``[*batch, 2 length - 1, head_dim]``.
        value_table: s, shape ``[*batch, 2 length - 1, value_dim]``.
        bias: b, shape ``[*batch, 2 length - 1]``.
        precision: Passed to einsum.

    Returns:
        The token's output, shape ``[*batch, value_dim]``, in the dtype of ``v``.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        ValueError: If a table does not have 2 length - 1 rows.

    Example:
        >>> x = jnp.zeros((3, 1))
        >>> left = jnp.array([0.0, 0.0, 0.0, 0.0, 50.0])  # favours offset 2
        >>> out = causal_relative_attention_step(
        ...     x[2], x, jnp.eye(3), index=2, bias=left)
        >>> out.round(3).tolist()
        [1.0, 0.0, 0.0]

    Source:
        Shaw et al., Self-Attention with Relative Position Representations, section
        3.2; bias: Liu et al., Swin Transformer, section 3.2.
    """
    length = k.shape[-2]
    key_table = rows_of_token(key_table, "key_table", length, index, -2)
    value_table = rows_of_token(value_table, "value_table", length, index, -2)
    bias = rows_of_token(bias, "bias", length, index, -1)
    q = q_i[..., None, :]
    scores = None if bias is None else widen(bias)[..., None, :]
    if key_table is not None:
        scores = _add_scores(scores, _score_rows(q, key_table, precision))
    k, v, past = zero_masked(k, v, jnp.arange(length) <= index)
    weights = softmax_weights(q, k, key_mask=past, bias=scores, precision=precision)
    out = weighted_sum(weights, v, precision)
    if value_table is not None:
        out = out + weighted_sum(weights, value_table, precision)
    return out[..., 0, :].astype(v.dtype)


def _add_scores(total, scores):
    """Adds scores to a sum that may be None."""
    return scores if total is None else total + scores


def _score_rows(q, key_table, precision):
    """Computes q_i . r / sqrt(head_dim) for every table row r, float32 or wider."""
    scores = wide_einsum(precision)("...nd,...rd->...nr", q, key_table)
    return scores * q.shape[-1] ** -0.5


def _to_pairs(per_row, grid, num_prefix):
    """Maps x_i,row ``[*batch, n, rows]`` to y_ij = x_i,row(i, j) ``[*batch, n, n]``.

    Linear, and without a gather, whose derivative is slow.
    """
    axes, rows = len(grid), num_offsets(grid)
    leading = per_row.shape[:-2]
    # Grid tokens and offsets as separate axes: [*batch, *grid, *offsets].
    x = per_row[..., num_prefix:, :rows]
    x = x.reshape(*leading, *grid, *offsets_per_axis(grid))
    # Along each axis: from (query position, offset) to (query, key position).
    for axis in range(axes):
        pair = (len(leading) + axis, len(leading) + axes + axis)
        x = jnp.moveaxis(x, pair, (-2, -1))
        x = skew(x, periodic=isinstance(grid, Torus))
        x = jnp.moveaxis(x, (-2, -1), pair)
    num_tokens = math.prod(grid)
    x = x.reshape(*leading, num_tokens, num_tokens)
    if not num_prefix:
        return x

    def repeat_row(tokens, row, width):
        part = per_row[..., tokens, row : row + 1]
        return jnp.broadcast_to(part, (*part.shape[:-1], width))

    prefix, others = slice(0, num_prefix), slice(num_prefix, None)
    # Grid queries: "in" for prefix keys, then the offsets.
    x = jnp.concatenate([repeat_row(others, rows, num_prefix), x], axis=-1)
    # Prefix queries: "self" for prefix keys, "out" for grid keys.
    top = [
        repeat_row(prefix, rows + 1, num_prefix),
        repeat_row(prefix, rows + 2, num_tokens),
    ]
    return jnp.concatenate([jnp.concatenate(top, axis=-1), x], axis=-2)


def _from_pairs(to_pairs, weights, rows):
    """Sums weights by table row, the adjoint of ``to_pairs``: [*batch, n, rows]."""
    shape = (*weights.shape[:-1], rows)
    (per_row,) = jax.linear_transpose(
        to_pairs, jax.ShapeDtypeStruct(shape, weights.dtype)
    )(weights)
    return per_row

"""Softmax attention with biases, key vectors and value vectors for each offset.

A table has a row for every offset of `relattn.offsets.offset_index`. No vector is
stored per pair of tokens. Long sequences are computed in blocks, as softmax attention.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from relattn.kernels.checks import check_arguments, check_position
from relattn.kernels.flash import fused_branches
from relattn.kernels.masks import combine_masks, finite_masked, zero_masked
from relattn.kernels.positions.bias import (
    bias_of_pairs,
    longer_axes,
    past_rows,
    rows_of_token,
    skew,
    unwrap_axes,
    with_prefix_rows,
)
from relattn.kernels.precision import widen
from relattn.kernels.segments import mask_segments, segment_numbers
from relattn.kernels.softmax import (
    block_size,
    causal_mask,
    causal_softmax_attention,
    check_window,
    map_blocks,
    scaled_products,
    softmax_weights,
    weighted_sum,
    zero_unseen,
)
from relattn.offsets import (
    Grid,
    PrefixRow,
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
    segment_ids: Int[Array, "*#batch n"] | None = None,
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
        grid: Size of each axis of the tokens after the prefix.
        num_prefix: Number of prefix tokens.
        key_table: r, shape ``[*batch, rows, head_dim]``.
        value_table: s, shape ``[*batch, rows, value_dim]``.
        bias: b, shape ``[*batch, rows]``.
        mask: True where query i may attend to key j, shape ``[*batch, n, n]``. A key
            that no query may attend to is ignored, whatever it holds.
        key_mask: True for keys that exist, shape ``[*batch, n]``.
        segment_ids: For packed sequences: a token attends only to tokens of its segment
            (`relattn.kernels.segment_mask`), shape ``[*batch, n]``.
        precision: Passed to einsum.

    Returns:
        Shape ``[*batch, n, value_dim]``, in the dtype of ``v``.

    Raises:
        ValueError: If shapes or dtypes do not fit together, the grid does not hold the
            tokens, or a table has the wrong number of rows.

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
    # A block of queries is at least a row.
    grid = longer_axes(grid)
    # r, s and b, with the rows of prefix tokens.
    rows = num_offsets(grid)
    key_table, value_table = (
        with_prefix_rows(table, name, rows, num_prefix, axis=-2)
        for name, table in (("key_table", key_table), ("value_table", value_table))
    )
    bias = with_prefix_rows(bias, "bias", rows, num_prefix, axis=-1)
    q = finite_masked(q, key_mask)
    # Keys that the mask shows to tokens of other segments only are unseen.
    seen = None if mask is None else mask_segments(mask, segment_ids)
    k, v, key_mask = zero_unseen(k, v, key_mask, seen)

    def in_blocks(q, k, v, key_mask, segments, bias):
        del segments
        within = mask_segments(mask, segment_ids)
        attend = functools.partial(
            _attend, k=k, v=v, key_mask=key_mask, precision=precision
        )
        # All queries at once, or rows of the grid, to save memory.
        size = _block_size((q, k, v, key_table, value_table), bias)
        if size < q.shape[-2]:
            blocks = _Blocks(grid, num_prefix, size)
            out = blocks.attend(attend, q, within, key_table, value_table, bias)
        else:
            out = attend(
                q,
                mask=within,
                bias=None if bias is None else bias_of_pairs(bias, grid, num_prefix),
                key_table=key_table,
                value_table=value_table,
                to_pairs=lambda per_row: _to_pairs(per_row, grid, num_prefix),
            )
        return out.astype(v.dtype)

    arguments = (q, k, v, key_mask, segment_ids, bias)
    if mask is not None or key_table is not None or value_table is not None:
        return in_blocks(*arguments)
    return _attend_fused(
        arguments,
        in_blocks,
        causal=False,
        grid=grid,
        num_prefix=num_prefix,
        precision=precision,
    )


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
    segment_ids: Int[Array, "*#batch n"] | None = None,
    window: int | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch n value_dim"]:
    """Computes `relative_attention` of every token to itself and earlier tokens.

    a_ij = q_i . (k_j + r_(i - j)) / sqrt(head_dim) + b_(i - j),
    out_i = sum_{j <= i} softmax_{j <= i}(a_ij) (v_j + s_(i - j)), or the sum over
    i - window < j <= i. With tables, a window is a mask and saves no time.

    A table belongs to a line of ``length >= n`` tokens and has 2 length - 1 rows; the
    rows of the offsets 0 .. n - 1 are used.

    Args:
        q: Queries, shape ``[*batch, n, head_dim]``.
        k: Keys, shape ``[*batch, n, head_dim]``.
        v: Values, shape ``[*batch, n, value_dim]``.
        key_table: r, shape ``[*batch, rows, head_dim]``.
        value_table: s, shape ``[*batch, rows, value_dim]``.
        bias: b, shape ``[*batch, rows]``.
        mask: True where query i may attend to key j, shape ``[*batch, n, n]``. A key
            that no query may attend to is ignored, whatever it holds.
        key_mask: True for keys that exist, shape ``[*batch, n]``.
        segment_ids: For packed sequences: a token attends only to tokens of its segment
            (`relattn.kernels.segment_mask`), shape ``[*batch, n]``.
        window: Number of tokens, itself included, that a token attends to; None for
            all.
        precision: Passed to einsum.

    Returns:
        Shape ``[*batch, n, value_dim]``, in the dtype of ``v``.

    Raises:
        ValueError: If shapes or dtypes do not fit together, a table has fewer offsets
            than there are tokens, or an even number of rows, or ``window`` is less than
            one.

    Example:
        >>> x = jnp.zeros((3, 1))
        >>> left = jnp.array([0.0, 0.0, 0.0, 0.0, 50.0])  # favours offset 2
        >>> causal_relative_attention(x, x, jnp.eye(3), bias=left)[2].round(3).tolist()
        [1.0, 0.0, 0.0]

    Source:
        Shaw et al., Self-Attention with Relative Position Representations, section
        3.2; bias: Liu et al., Swin Transformer, section 3.2.
    """
    if mask is None and key_table is None and value_table is None and bias is None:
        options = {"key_mask": key_mask, "segment_ids": segment_ids, "window": window}
        return causal_softmax_attention(q, k, v, **options, precision=precision)
    check_window(window)
    # r_d, s_d and b_d of the offsets d = 0 .. n - 1.
    length = q.shape[-2]
    key_table, value_table = (
        past_rows(table, name, length, axis=-2)
        for name, table in (("key_table", key_table), ("value_table", value_table))
    )
    bias = past_rows(bias, "bias", length, axis=-1)

    q = finite_masked(q, key_mask)
    seen = None
    if mask is not None:
        # Keys that it shows to earlier tokens, or beyond the window, only are unseen.
        past = causal_mask(0, length, length, window)
        seen = combine_masks(mask_segments(mask, segment_ids), past)
    k, v, key_mask = zero_unseen(k, v, key_mask, seen)
    # Zeros for the offsets of later keys, which the mask excludes.
    future = (length - 1, 0)

    def to_pairs(per_row):
        return _to_pairs(_pad(per_row, future, -1), (length,), 0)

    def in_blocks(q, k, v, key_mask, segments, bias):
        del segments
        within = mask_segments(mask, segment_ids)
        attend = functools.partial(
            _attend, k=k, v=v, key_mask=key_mask, precision=precision
        )
        size = _block_size((q, k, v, key_table, value_table), bias)
        if size < length:
            blocks = _Blocks((length,), 0, size, causal=True, window=window)
            tables = (_pad(key_table, future, -2), _pad(value_table, future, -2))
            out = blocks.attend(attend, q, within, *tables, bias)
            return out.astype(v.dtype)
        if bias is not None:
            # Widened before indexing: the gradient is a sum over many pairs.
            bias = widen(bias)[..., None, :]
            shape = (*bias.shape[:-2], length, bias.shape[-1])
            bias = _to_pairs(jnp.broadcast_to(bias, shape), (length,), 0)
        # i - window < j <= i
        past = causal_mask(0, length, length, window)
        out = attend(
            q,
            mask=combine_masks(within, past),
            bias=bias,
            key_table=key_table,
            value_table=value_table,
            to_pairs=to_pairs,
        )
        return out.astype(v.dtype)

    arguments = (q, k, v, key_mask, segment_ids, _pad(bias, future, -1))
    by_blocks = (mask, key_table, value_table, window)
    if any(x is not None for x in by_blocks):
        return in_blocks(*arguments)
    return _attend_fused(
        arguments, in_blocks, causal=True, grid=(length,), precision=precision
    )


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
    window: int | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch value_dim"]:
    """Computes `causal_relative_attention` for one token, for decoding.

    out_i = sum_{j <= i} softmax_{j <= i}(a_ij) (v_j + s_(i - j)), i = ``index``, with
    a_ij as in `causal_relative_attention`.

    Args:
        q_i: The token's query, shape ``[*batch, head_dim]``.
        k: Keys up to and including the token's, shape ``[*batch, length, head_dim]``;
            later ones are ignored.
        v: Values up to and including the token's, shape
            ``[*batch, length, value_dim]``; later ones are ignored.
        index: The token's position in the sequence; may be traced.
        key_table: r, shape ``[*batch, 2 length - 1, head_dim]``.
        value_table: s, shape ``[*batch, 2 length - 1, value_dim]``.
        bias: b, shape ``[*batch, 2 length - 1]``.
        window: Number of tokens, itself included, that a token attends to; None for
            all.
        precision: Passed to einsum.

    Returns:
        The token's output, shape ``[*batch, value_dim]``, in the dtype of ``v``.

    Raises:
        ValueError: If shapes or dtypes do not fit together, a table does not have 2
            length - 1 rows, ``index`` is negative or, with a table, not below
            ``length``, or ``window`` is less than one.

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
    check_window(window)
    # r_(i - j), s_(i - j) and b_(i - j) for every key j.
    length = k.shape[-2]
    has_table = any(table is not None for table in (key_table, value_table, bias))
    # Without tables, a cache may hold fewer tokens than there are positions.
    check_position(index, length if has_table else math.inf)
    key_table = rows_of_token(key_table, "key_table", length, index, -2)
    value_table = rows_of_token(value_table, "value_table", length, index, -2)
    bias = rows_of_token(bias, "bias", length, index, -1)
    q = q_i[..., None, :]
    # b_(i - j) + q_i . r_(i - j) / sqrt(head_dim), added to q_i . k_j / sqrt(head_dim).
    scores = None if bias is None else widen(bias)[..., None, :]
    if key_table is not None:
        scores = _add_scores(scores, scaled_products(q, key_table, precision))
    k, v, past = zero_masked(k, v, causal_mask(index, 1, length, window)[0])
    weights = softmax_weights(q, k, key_mask=past, bias=scores, precision=precision)
    # sum_j weight_j v_j, then + sum_j weight_j s_(i - j).
    out = weighted_sum(weights, v, precision)
    if value_table is not None:
        out = out + weighted_sum(weights, value_table, precision)
    return out[..., 0, :].astype(v.dtype)


def _attend_fused(arguments, in_blocks, **options):
    """Computes attention by kernels of the platform, where it has them."""
    q, k, v, key_mask, segment_ids, bias = arguments
    branches = fused_branches(q, k, v, bias=bias, **options)
    if not branches:
        return in_blocks(*arguments)
    segments = None if segment_ids is None else segment_numbers(segment_ids)
    return jax.lax.platform_dependent(
        q, k, v, key_mask, segments, bias, **branches, default=in_blocks
    )


def _attend(
    q, k, v, *, mask, key_mask, bias, key_table, value_table, to_pairs, precision
):
    """Computes `relative_attention` of some queries, given the bias of their pairs.

    ``to_pairs`` maps x_i,row of the tables' rows to x_i,row(i, j).
    """
    # The scores added to q_i . k_j / sqrt(head_dim): b_d, then q_i . r_d.
    if key_table is not None:
        scores = to_pairs(scaled_products(q, key_table, precision))
        bias = _add_scores(bias, scores)
    # softmax_j(a_ij), a_ij = q_i . k_j / sqrt(head_dim) + scores_ij.
    weights = softmax_weights(
        q, k, mask=mask, key_mask=key_mask, bias=bias, precision=precision
    )
    # sum_j weight_ij v_j
    out = weighted_sum(weights, v, precision)
    if value_table is not None:
        # + sum_j weight_ij s_d = sum_row (sum of weight_ij with this row) s_row.
        per_row = _from_pairs(to_pairs, weights, value_table.shape[-2])
        out = out + weighted_sum(per_row, value_table, precision)
    return out


def _block_size(arrays, bias):
    """Returns the number of queries that attend at once."""
    batch: list[tuple[int, ...]] = [x.shape[:-2] for x in arrays if x is not None]
    batch += [] if bias is None else [bias.shape[:-1]]
    n = arrays[0].shape[-2]
    return block_size(jnp.broadcast_shapes(*batch), n, n)


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """Attention in blocks of whole rows of the grid, or of tokens of a line.

    Attributes:
        grid: Size of each axis of the tokens after the prefix.
        num_prefix: Number of prefix tokens.
        size: Largest number of queries in a block, which has at least a row.
        causal: Whether a token attends only to itself and earlier tokens.
        window: Number of tokens, itself included, that a token attends to; None for
            all.
    """

    grid: Grid
    num_prefix: int
    size: int
    causal: bool = False
    window: int | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows in a block."""
        return min(self.grid[0], max(1, self.size // math.prod(self.grid[1:])))

    def attend(self, attend, q, mask, key_table, value_table, bias):
        """Computes `relative_attention`: the prefix's queries, then the grid's."""
        prefix, rows = self.num_prefix, num_offsets(self.grid)
        bias = None if bias is None else widen(bias)[..., None]
        tables = (key_table, value_table, bias)
        mask = None if mask is None else (mask[..., :prefix, :], mask[..., prefix:, :])
        queries = (q[..., prefix:, :], mask and mask[1])
        size = self.num_rows * math.prod(self.grid[1:])
        padded = [self._pad_rows(table) for table in tables]

        def attend_block(index, q, mask):
            first = index * self.num_rows
            rows = [self._rows_of_block(table, first) for table in padded]
            if self.causal:
                past = causal_mask(first, size, self.grid[0], self.window)
                mask = combine_masks(mask, past)
            return self._attend(attend, q, mask, *rows, to_pairs=self._to_pairs)

        out = map_blocks(attend_block, queries, size)
        if not prefix:
            return out
        rows = [None if table is None else table[..., rows:, :] for table in tables]
        top = self._attend(
            attend,
            q[..., :prefix, :],
            mask and mask[0],
            *rows,
            to_pairs=self._prefix_to_pairs,
        )
        return jnp.concatenate([top, out], axis=-2)

    def _attend(self, attend, q, mask, key_table, value_table, bias, to_pairs):
        if bias is not None:
            bias = jnp.swapaxes(bias, -2, -1)
            bias = jnp.broadcast_to(
                bias, (*bias.shape[:-2], q.shape[-2], bias.shape[-1])
            )
            bias = to_pairs(bias)
        return attend(
            q,
            mask=mask,
            bias=bias,
            key_table=key_table,
            value_table=value_table,
            to_pairs=to_pairs,
        )

    def _pad_rows(self, table):
        """Returns the rows of the offsets, [*batch, *offsets, width], and "in".

        The last block can be of rows beyond the grid: it reads zeros.
        """
        if table is None:
            return None
        rows = num_offsets(self.grid)
        *leading, _, width = table.shape
        offsets = table[..., :rows, :].reshape(
            *leading, *offsets_per_axis(self.grid), width
        )
        offsets = unwrap_axes(offsets, self.grid, first_axis=len(leading))
        offsets = _pad(offsets, (0, self.num_rows), len(leading))
        return offsets, table[..., rows : rows + 1, :]

    def _rows_of_block(self, table, first):
        """Returns the rows for the queries of a block, [*batch, rows, width]."""
        if table is None:
            return None
        offsets, into = table
        axis = into.ndim - 2
        size = self.grid[0] + self.num_rows - 1
        offsets = jax.lax.dynamic_slice_in_dim(offsets, first, size, axis)
        offsets = offsets.reshape(*into.shape[:-2], -1, into.shape[-1])
        return jnp.concatenate([offsets, into], axis=-2)

    def _to_pairs(self, per_row):
        """Maps x_i,row of a block's queries and rows to x_i,row(i, j)."""
        leading, others = per_row.shape[:-2], self.grid[1:]
        prefix = 1 if self.num_prefix else 0
        offsets = per_row[..., : per_row.shape[-1] - prefix].reshape(
            *leading,
            self.num_rows,
            *others,
            self.grid[0] + self.num_rows - 1,
            *(2 * size - 1 for size in others),
        )
        pairs = _skew_axes(offsets, len(self.grid))
        pairs = pairs.reshape(*per_row.shape[:-1], math.prod(self.grid))
        into = jnp.broadcast_to(
            per_row[..., -1:], (*per_row.shape[:-1], self.num_prefix)
        )
        return jnp.concatenate([into, pairs], axis=-1)

    def _prefix_to_pairs(self, per_row):
        """Maps x_i,row of the prefix's queries and rows to x_i,row(i, j)."""
        return _prefix_pairs(per_row, self.num_prefix, math.prod(self.grid))


def _pad(x, width, axis):
    """Pads an axis with zeros; None stays None."""
    if x is None:
        return None
    widths = [(0, 0)] * x.ndim
    widths[axis] = width
    return jnp.pad(x, widths)


def _add_scores(total, scores):
    """Adds scores to a sum that may be None."""
    return scores if total is None else total + scores


def _to_pairs(per_row, grid, num_prefix):
    """Maps x_i,row ``[*batch, n, rows]`` to y_ij = x_i,row(i, j) ``[*batch, n, n]``.

    Linear, and without a gather, whose derivative is slow.
    """
    rows, num_tokens = num_offsets(grid), math.prod(grid)
    # [*batch, *query, *offset] to [*batch, *query, *key], axis by axis of the grid.
    x = per_row[..., num_prefix:, :rows]
    x = x.reshape(*x.shape[:-2], *grid, *offsets_per_axis(grid))
    x = _skew_axes(x, len(grid), periodic=isinstance(grid, Torus))
    x = x.reshape(*per_row.shape[:-2], num_tokens, num_tokens)
    if not num_prefix:
        return x
    # Grid queries: "in" for prefix keys, then the offsets.
    into = per_row[..., num_prefix:, rows : rows + 1]
    x = jnp.concatenate([_repeat(into, num_prefix), x], axis=-1)
    top = _prefix_pairs(per_row[..., :num_prefix, rows:], num_prefix, num_tokens)
    return jnp.concatenate([top, x], axis=-2)


def _prefix_pairs(per_row, num_prefix, num_tokens):
    """Returns the pairs of prefix queries: "self" for prefix keys, "out" for others."""
    within, out = (
        per_row[..., row : row + 1] for row in (PrefixRow.SELF, PrefixRow.OUT)
    )
    pairs = [_repeat(within, num_prefix), _repeat(out, num_tokens)]
    return jnp.concatenate(pairs, axis=-1)


def _repeat(x, width):
    return jnp.broadcast_to(x, (*x.shape[:-1], width))


def _skew_axes(x, axes, *, periodic=False):
    """Maps ``[*batch, *queries, *offsets]`` to ``[*batch, *queries, *keys]``."""
    leading = x.ndim - 2 * axes
    for axis in range(axes):
        pair = (leading + axis, leading + axes + axis)
        x = skew(jnp.moveaxis(x, pair, (-2, -1)), periodic=periodic)
        x = jnp.moveaxis(x, (-2, -1), pair)
    return x


def _from_pairs(to_pairs, weights, rows):
    """Sums weights by table row, the adjoint of ``to_pairs``: [*batch, n, rows].

    ``to_pairs`` is linear and copies x_i,row to all pairs (i, j) of the row, so its
    transpose adds up the weights of those pairs.
    """
    # Has the axes of shard_map along which the weights vary, too.
    like = jax.eval_shape(lambda x: _repeat(x[..., :1], rows), weights)
    (per_row,) = jax.linear_transpose(to_pairs, like)(weights)
    return per_row

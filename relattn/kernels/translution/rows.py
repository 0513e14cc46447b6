"""Scores and values with a projection for every offset, by rows of queries.

For TPUs, which need few and large instructions: a step takes a row of queries, along
the last axis, and all keys. A query in row y and column x and a key in row y' and
column x' need the matrix of the offset (y - y', x - x'); with more than two axes, y has
several coordinates. The matrices of all column offsets, or the projections by them, are
shifted by x, which brings each to its pair. This takes slices and pads only: the
transpose of a gather would be a scatter.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array

from relattn.kernels.checks import at_most
from relattn.kernels.positions.bias import unwrap_axes
from relattn.kernels.precision import widen
from relattn.offsets import Grid, num_offsets, offsets_per_axis

# The backward pass keeps the tables, not the matrices made of them.
_remat = functools.partial(jax.checkpoint, static_argnums=0)


@dataclasses.dataclass(frozen=True)
class RowLoop:
    """Static sizes, and the loop over rows of queries.

    Attributes:
        grid: Size of each axis of the tokens, without prefix.
        causal: Whether tables have the offsets 0, 1, ... of a line only.
        num_heads: Number of heads.
        precision: Precision of the products.
    """

    grid: Grid
    causal: bool
    num_heads: int
    precision: jax.lax.PrecisionLike

    @property
    def is_line(self) -> bool:
        """Whether the tokens are on a line, which is folded into rows."""
        return math.prod(self.grid[:-1]) == 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The axes of rows, and their width; a line may end within the last one."""
        if not self.is_line:
            return tuple(self.grid)
        width = math.isqrt(self.grid[-1] - 1) + 1
        return -(-self.grid[-1] // width), width

    @_remat
    def scores(self, q: Array, k: Array, t_q: Array | None, t_k: Array | None) -> Array:
        """Computes q_ij . k_ji of all pairs, ``[batch, heads, n, n]``.

        Args:
            q: Tokens or, without a table, queries, ``[batch, n, width]``.
            k: Tokens or, without a table, keys, ``[batch, n, width]``.
            t_q: Table of the queries, ``[rows, width, heads, head_dim]``, or None.
            t_k: Table of the keys, ``[rows, width, heads, head_dim]``, or None.
        """
        batch, length, _ = q.shape
        # What all steps share is wide, since its gradient is their sum.
        rows_k = self._to_rows(jnp.moveaxis(widen(k), 1, 0), 0)
        # Rows by that of the key minus that of the query, columns as for `_align`.
        *rows, columns = range(len(self.shape))
        if t_q is not None:
            matrices_q = jnp.flip(self._by_offset(t_q), (*rows, columns))
            matrices_q = self._align_if_smaller(matrices_q, batch)
        if t_k is not None:
            matrices_k = self._by_offset(t_k)
            matrices_k = jnp.flip(matrices_k, rows if self.causal else columns)
            matrices_k = self._align_if_smaller(matrices_k, batch)

        def step(row, q):
            # [query column, key column, key row, batch, width]
            if t_q is None:
                q = q[:, None, None]
            else:
                # x_i Tq[d], d = p_i - p_j
                window = self._window(matrices_q, row).astype(t_q.dtype)
                q = self._project("xbc", q, window)
            keys = rows_k.astype(k.dtype)
            if t_k is None:
                keys = keys.swapaxes(0, 1)[:, None]
            else:
                # x_j Tk[-d], or x_j Tk[d] if causal
                window = self._window(matrices_k, row).astype(t_k.dtype)
                keys = self._project("yxbc", keys, window)
            # q_ij . k_ji
            products = widen(q) * widen(keys).swapaxes(0, 1)
            return self._split_heads(products).sum(axis=-1)

        scores = self._map_rows(step, self._to_rows(jnp.moveaxis(q, 1, 0), 0))
        # From [query row, query column, key column, key row, batch, heads].
        scores = scores.transpose(4, 5, 0, 1, 3, 2)
        num_tokens = math.prod(self.shape)
        scores = scores.reshape(*scores.shape[:2], num_tokens, num_tokens)
        return scores[:, :, :length, :length]

    @_remat
    def values(self, weights: Array, v: Array, t_v: Array) -> Array:
        """Computes sum_j weights_ij v_j T[d], ``[batch, n, heads * head_dim]``.

        Args:
            weights: ``[batch, heads, n, n]``.
            v: Tokens, ``[batch, n, width]``.
            t_v: Table ``[rows, width, heads, head_dim]``.
        """
        batch, length, _ = v.shape
        rows_v = self._to_rows(jnp.moveaxis(widen(v), 1, 0), 0)
        matrices = jnp.flip(self._by_offset(t_v), range(len(self.shape) - 1))
        matrices = self._align_if_smaller(matrices, batch)

        def step(row, weights):
            window = self._window(matrices, row).astype(t_v.dtype)
            # [key column, query column, key row, batch, heads, head_dim]
            values = self._project("yxbc", rows_v.astype(v.dtype), window)
            # sum_j weights_ij x_j T[d] over key columns and rows.
            values = self._split_heads(widen(values))
            return (weights.transpose(2, 0, 1, 3, 4)[..., None] * values).sum((0, 2))

        weights = self._to_rows(self._to_rows(weights, 3), 2)
        # [query row, query column, key row, key column, batch, heads]
        out = self._map_rows(step, jnp.moveaxis(weights, (0, 1), (4, 5)))
        out = jnp.moveaxis(out, 2, 0)
        shape = batch, math.prod(self.shape), math.prod(out.shape[-2:])
        return out.reshape(shape)[:, :length]

    def _to_rows(self, x, axis):
        """Splits an axis of tokens into rows and columns, with zeros after a line."""
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, math.prod(self.shape) - x.shape[axis])
        x = jnp.pad(x, widths)
        shape = math.prod(self.shape[:-1]), self.shape[-1]
        return x.reshape(*x.shape[:axis], *shape, *x.shape[axis + 1 :])

    def _by_offset(self, table):
        """Returns the matrices by the offset along all axes, from 1 - size on.

        The result is ``[*(2 size - 1), width, heads * head_dim]``, with zeros for
        offsets that no pair has.
        """
        table = widen(table).reshape(*table.shape[:2], -1)
        rest = [(0, 0)] * 2
        if self.causal:
            length = self.grid[0]
            table = jnp.pad(table[:length], [(length - 1, 0), *rest])
        else:
            table = table[: num_offsets(self.grid)]
            table = table.reshape(*offsets_per_axis(self.grid), *table.shape[1:])
            table = unwrap_axes(table, self.grid, first_axis=0)
        if self.is_line:
            # Offset dy * width + dx, for dx < 0 in the second half of the row before.
            height, width = self.shape
            missing = height * width - self.grid[-1]
            table = table.reshape(-1, *table.shape[-2:])
            table = jnp.pad(table, [(missing + 1, missing), *rest])
            table = table.reshape(2 * height, width, *table.shape[1:])
            table = jnp.concatenate([table[:-1, 1:], table[1:]], axis=1)
        return table

    def _align_if_smaller(self, matrices, batch):
        """Aligns matrices ``[*row, column offset, ...]`` if the projections are larger.

        The result is then ``[*row, column, column of the other, ...]``.
        """
        if at_most(2 * batch + 1, matrices.shape[-2]):
            return matrices
        matrices = jnp.moveaxis(matrices, -3, 0)
        matrices = jnp.broadcast_to(matrices, (self.shape[-1], *matrices.shape))
        return jnp.moveaxis(self._align(matrices), (0, 1), (-4, -3))

    def _align(self, x):
        """Returns x[i, width - 1 - i + j] as [i, j], for x of 2 width - 1 columns.

        Rows read as one line from column width - 1 on, and cut one column narrower,
        start one column further left each, as in `relattn.kernels.positions.bias.skew`.
        """
        width = self.shape[-1]
        if width == 1:
            return x
        rest = x.shape[2:]
        x = x.reshape(math.prod(x.shape[:2]), *rest)
        x = x[width - 1 :][: width * (2 * width - 2)]
        return x.reshape(width, 2 * width - 2, *rest)[:, :width]

    def _window(self, matrices, row):
        """Slices the matrices of a row of queries and all rows of keys."""
        *sizes, _ = self.shape
        for axis in range(len(sizes) - 1, -1, -1):
            # The coordinate of the row, and the number of the row without it.
            size, place = sizes[axis], row
            if axis:
                row, place = jnp.divmod(row, size)
            matrices = jax.lax.dynamic_slice_in_dim(
                matrices, size - 1 - place, size, axis, allow_negative_indices=False
            )
        rows = math.prod(sizes)
        return matrices.reshape(rows, *matrices.shape[len(sizes) :])

    def _project(self, axes, tokens, window):
        """Projects tokens to ``[column, column of the other, key row, batch, width]``.

        Args:
            axes: Names of the axes of the tokens, "xbc" or with key rows "yxbc".
            tokens: Tokens.
            window: Result of `_window`.
        """
        if window.ndim == 5:
            return self._einsum(f"{axes},yxocd->xoybd", tokens, window)
        return self._align(self._einsum(f"{axes},yocd->xoybd", tokens, window))

    def _einsum(self, equation, *operands):
        return jnp.einsum(equation, *operands, precision=self.precision)

    def _split_heads(self, x):
        return x.reshape(*x.shape[:-1], self.num_heads, x.shape[-1] // self.num_heads)

    def _map_rows(self, step, x):
        """Maps the rows of queries; the backward pass computes their steps again."""
        step = jax.checkpoint(step, prevent_cse=False)
        return jax.lax.map(lambda scanned: step(*scanned), (jnp.arange(len(x)), x))

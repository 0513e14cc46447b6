"""Scores and values with a projection for every offset, from matrices of the pairs.

For GPUs, which need few launches and few bytes: a step takes a block of queries and all
keys. It gathers the matrix of every pair once, and one product projects each token by
those of all its pairs. The gradient of a table sums the pairs of each of its rows: the
transpose of a gather would be a scatter.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim
from jaxtyping import Array

from relattn.kernels.precision import widen
from relattn.offsets import Grid, pair_rows


class Rows(NamedTuple):
    """Rows of a table for the pairs of each block of queries.

    Attributes:
        of_pair: Row of every pair, ``[blocks, size, n]``.
        pairs: The pairs of every row, ``[blocks, rows, most]``; ``size * n`` for none.
    """

    of_pair: Array | np.ndarray
    pairs: Array | np.ndarray


@dataclasses.dataclass(frozen=True)
class PairBlocks:
    """Static sizes, and the loop over blocks of queries.

    Attributes:
        grid: Size of each axis of the tokens after the prefix.
        num_prefix: Number of prefix tokens.
        num_heads: Number of heads.
        precision: Precision of the products.
        max_bytes: Largest number of bytes of the matrices and projections of a block's
            pairs; a block has at least one query.
    """

    grid: Grid
    num_prefix: int
    num_heads: int
    precision: jax.lax.PrecisionLike
    max_bytes: int

    def scores(self, q: Array, k: Array, t_q: Array | None, t_k: Array | None) -> Array:
        """Computes q_ij . k_ji of all pairs; see `RowLoop.scores`."""
        batch, length, _ = q.shape
        size = self._block_size(batch, length, t_q, t_k)
        # What all blocks share is wide, since its gradient is their sum.
        wide = widen(jnp.moveaxis(k, 1, 0))
        wide_q, wide_k = (None if t is None else widen(t) for t in (t_q, t_k))

        def step(q, rows_q, rows_k):
            # x_i Tq[d], [query, batch, key, width]
            q = self._project(q, _matrices(wide_q, rows_q, t_q))
            # x_j Tk[-d], [key, batch, query, width]
            matrices = _matrices(wide_k, rows_k, t_k, by_key=True)
            keys = self._project(wide.astype(k.dtype), matrices)
            # q_ij . k_ji
            products = widen(q) * widen(keys).transpose(2, 1, 0, 3)
            return self._split_heads(products).sum(axis=-1)

        queries = jnp.moveaxis(q, 1, 0)
        rows = self._rows(size)
        scores = self._map_blocks(step, size, queries, rows["q"], rows["k"])
        return scores.transpose(1, 3, 0, 2)

    def values(self, weights: Array, v: Array, t_v: Array) -> Array:
        """Computes sum_j weights_ij v_j T[d]; see `RowLoop.values`."""
        batch, length, _ = v.shape
        size = self._block_size(batch, length, t_v)
        wide, wide_t = widen(jnp.moveaxis(v, 1, 0)), widen(t_v)

        def step(weights, rows):
            # x_j T[d], [key, batch, query, heads, head_dim]
            matrices = _matrices(wide_t, rows, t_v, by_key=True)
            values = self._project(wide.astype(v.dtype), matrices)
            values = self._split_heads(widen(values))
            # sum_j weights_ij x_j T[d]
            out = (weights.transpose(3, 1, 0, 2)[..., None] * values).sum(axis=0)
            return out.swapaxes(0, 1)

        weights = weights.transpose(2, 0, 1, 3)
        out = self._map_blocks(step, size, weights, self._rows(size)["v"])
        return out.swapaxes(0, 1).reshape(batch, length, math.prod(t_v.shape[2:]))

    def _project(self, tokens, matrices):
        """Projects tokens, [token, batch, other, width], if matrices are given."""
        if matrices is None:
            return tokens[:, :, None]
        num, others, width, out_width = matrices.shape
        # Three axes, so that XLA copies no operand of the gradients' products.
        matrices = matrices.swapaxes(1, 2).reshape(num, width, others * out_width)
        projected = jnp.einsum(
            "ibc,icf->ibf", tokens, matrices, precision=self.precision
        )
        return projected.reshape(*projected.shape[:2], others, out_width)

    def _block_size(self, batch, length, *tables):
        """Returns the number of queries of a block; blocks are as equal as can be."""
        batch = 1 if is_symbolic_dim(batch) else batch
        bytes_of_pair = sum(
            (table.shape[1] + batch) * math.prod(table.shape[2:]) * table.dtype.itemsize
            for table in tables
            if table is not None
        )
        most = max(1, self.max_bytes // max(1, bytes_of_pair * length))
        return -(-length // -(-length // most))

    def _rows(self, size):
        return _block_rows(self.grid, self.num_prefix, size)

    def _split_heads(self, x):
        return x.reshape(*x.shape[:-1], self.num_heads, x.shape[-1] // self.num_heads)

    def _map_blocks(self, step, size, queries, *rows):
        """Maps blocks of queries; the backward pass computes their steps again."""
        length = len(queries)
        num = -(-length // size)
        if num == 1:
            step = jax.checkpoint(step)
            return step(queries, *jax.tree.map(lambda x: x[0], rows))
        # Zeros fill the last block.
        widths = [(0, num * size - length)] + [(0, 0)] * (queries.ndim - 1)
        queries = jnp.pad(queries, widths).reshape(num, size, *queries.shape[1:])
        step = jax.checkpoint(step, prevent_cse=False)
        out = jax.lax.map(lambda block: step(*block), (queries, *rows))
        return out.reshape(num * size, *out.shape[2:])[:length]


def _matrices(wide, rows, table, *, by_key=False):
    """Returns the matrices of pairs in the table's dtype, the query or key first."""
    if table is None:
        return None
    matrices = _gather(wide, rows).astype(table.dtype)
    return matrices.swapaxes(0, 1) if by_key else matrices


def _gather_pairs(table: Array, rows: Rows) -> Array:
    """Returns the matrices of pairs, ``[size, n, width, heads * head_dim]``."""
    table = table.reshape(*table.shape[:2], -1)
    return table.at[rows.of_pair].get(mode="promise_in_bounds")


_gather = jax.custom_vjp(_gather_pairs)


def _gather_forward(table, rows):
    # The plain function: forward mode, as in `jax.hessian`, refuses the other.
    return _gather_pairs(table, rows), (rows.pairs, table.shape)


def _gather_backward(residuals, cotangent):
    pairs, shape = residuals
    cotangent = cotangent.reshape(-1, *cotangent.shape[2:])
    # Rows with fewer pairs read zeros.
    cotangent = jnp.pad(cotangent, [(0, 1), (0, 0), (0, 0)])
    cotangent = cotangent.at[pairs].get(mode="promise_in_bounds")
    return cotangent.sum(axis=1).reshape(shape), None


_gather.defvjp(_gather_forward, _gather_backward)


@functools.lru_cache(maxsize=64)
def _block_rows(grid: Grid, num_prefix: int, size: int) -> dict[str, Rows]:
    """Returns `pair_rows` by block."""
    by_name = pair_rows(grid, num_prefix)
    return {name: _split(x, size) for name, x in by_name.items()}


def _split(rows, size):
    length, num_rows = len(rows), rows.max() + 1
    num = -(-length // size)
    blocks, counts = [], []
    for block in np.split(rows, range(size, length, size)):
        pairs = np.argsort(block, axis=None, kind="stable")
        count = np.bincount(block.ravel(), minlength=num_rows)
        blocks.append(np.split(pairs, np.cumsum(count)[:-1]))
        counts.append(count)
    pairs = np.full((num, num_rows, np.max(counts)), size * length)
    for i, block in enumerate(blocks):
        for row, of_row in enumerate(block):
            pairs[i, row, : len(of_row)] = of_row
    rows = np.pad(rows, [(0, num * size - length), (0, 0)])
    rows = rows.reshape(num, size, length)
    return Rows(rows.astype(np.int32), pairs.astype(np.int32))

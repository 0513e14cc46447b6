"""Scores and values with a projection for every offset, which never reach memory.

With the projections a_ij = q_i Tq[d] and b_ij = k_j Tk[-d] of the two tokens of a pair,
scores, values and their gradients are the derivatives of one sum,

    sum_ij w_ij a_ij . b_ij:

by w_ij the scores a_ij . b_ij; by q_i, without a table of its own, the values
sum_j w_ij b_ij. So three kernels are enough: `_products` is the derivative by the
weights, `_sums` that by tokens, `_table_sums` that by a table. Programs of the first
two have a token and loop over its pairs, those of the third have a row of the table and
loop over the pairs of that row. Every program has a head and computes projections
again: the matrices of a head are small where the projections of all pairs are not.

Products of half-precision arrays are in half precision, with sums in float32, those of
float32 arrays in TF32 or as ``precision`` says.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.export import is_symbolic_dim
from jaxtyping import Array

from relattn.kernels.pallas_gpu.products import (
    dot,
    kernel_dtype,
    power_of_2,
    precision_name,
)
from relattn.kernels.platform import has_program_per_device
from relattn.kernels.precision import compute_dtype
from relattn.offsets import Grid, pair_rows

# Largest number of sequences of a program, and of components of its tokens and heads.
_BLOCK = 64
_MAX_WIDTH = 128
_MAX_HEAD_DIM = 64


class _Tokens(NamedTuple):
    """The tokens of one side of the pairs, with what projects them.

    Attributes:
        x: Tokens of all heads, ``[1, n, batch, width]``, or, without a table, of each,
            ``[heads, n, batch, head_dim]``.
        table: Matrices ``[heads, rows, width, head_dim]``, or None.
        rows: Row of the table for this and the other token, ``[n, n]``, or None.
    """

    x: Any
    table: Any
    rows: Any

    def project(self, head: Any, token: Any, other: Any, block: Any, precision: str):
        """Returns the projections of a token for another one, [block, head_dim]."""
        x = self.load(head, token, block)
        if self.table is None:
            return x.astype(jnp.float32)
        return dot(x, self.table[head, self.rows[token, other]], precision)

    def load(self, head: Any, token: Any, block: Any):
        """Loads a token of a block of sequences, [block, width]."""
        return self.x[0 if self.x.shape[0] == 1 else head, token, block]


@dataclasses.dataclass(frozen=True)
class FusedPairs:
    """Static sizes; computes what `PairBlocks` and `DiagonalBlocks` do.

    Attributes:
        grid: Size of each axis of the tokens after the prefix.
        num_prefix: Number of prefix tokens.
        causal: Whether a key is its query or earlier.
        num_heads: Number of heads.
        precision: Precision of the products.
    """

    grid: Grid
    num_prefix: int
    causal: bool
    num_heads: int
    precision: jax.lax.PrecisionLike

    def fits_gpu(self, tokens: Sequence[Array], tables: Sequence[Array | None]) -> bool:
        """Returns whether the kernels take tokens and tables.

        They take arrays of float32 or narrower, tokens of at most 128 components and
        heads of at most 64. The compiler cannot divide a kernel: there must be one
        device, or each device its own program, as in `jax.pmap`.

        Args:
            tokens: Tokens, ``[batch, n, width]``, or weights of pairs.
            tables: Tables ``[rows, width, heads, head_dim]``, or None.
        """
        given = [table for table in tables if table is not None]
        sizes = [size for x in (*tokens, *given) for size in x.shape]
        if any(map(is_symbolic_dim, sizes)) or not all(sizes):
            return False
        if any(x.shape[1] > _MAX_WIDTH or x.shape[3] > _MAX_HEAD_DIM for x in given):
            return False
        if compute_dtype(*tokens, *given) != jnp.float32:
            return False
        return has_program_per_device() and bool(self._precision)

    def scores(self, q: Array, k: Array, t_q: Array | None, t_k: Array | None) -> Array:
        """Computes q_ij . k_ji, or zeros for later keys; see `RowLoop.scores`."""
        dtype = self._dtype(q, k, t_q, t_k)
        tokens = self._tokens(q, t_q, dtype), self._tokens(k, t_k, dtype)
        tables = self._table(t_q, dtype), self._table(t_k, dtype)
        scores = cast(Array, _scores(*tokens, *tables, self))
        return jnp.moveaxis(scores, -1, 0)[: len(q)]

    def values(self, weights: Array, v: Array, t_v: Array) -> Array:
        """Computes sum_j weights_ij v_j T[d]; see `RowLoop.values`.

        The weights are zeros for later keys.
        """
        dtype = self._dtype(v, t_v)
        tokens, table = self._tokens(v, t_v, dtype), self._table(t_v, dtype)
        missing = tokens.shape[2] - len(v)
        weights = jnp.moveaxis(weights.astype(jnp.float32), 0, -1)
        weights = jnp.pad(weights, [(0, 0)] * 3 + [(0, missing)])
        out = cast(Array, _values(weights, tokens, table, self))
        out = out[:, :, : len(v), : t_v.shape[-1]].transpose(2, 1, 0, 3)
        return out.reshape(*out.shape[:2], math.prod(out.shape[2:]))

    @property
    def _precision(self) -> str:
        return precision_name(self.precision) or ""

    def _dtype(self, *arrays):
        """Returns the dtype of the products."""
        return kernel_dtype(self._precision, *(x for x in arrays if x is not None))

    def _tokens(self, x, table, dtype):
        """Moves [batch, n, width] to [heads or 1, n, batch, width], with zeros."""
        batch, n, width = x.shape
        heads = self.num_heads if table is None else 1
        x = x.astype(dtype).reshape(batch, n, heads, width // heads)
        x = x.transpose(2, 1, 0, 3)
        longer = -batch % min(_BLOCK, power_of_2(batch))
        wider = power_of_2(x.shape[-1]) - x.shape[-1]
        return jnp.pad(x, [(0, 0), (0, 0), (0, longer), (0, wider)])

    def _table(self, table, dtype):
        """Moves [rows, width, heads, head_dim] to [heads, rows, width, head_dim]."""
        if table is None:
            return None
        if self.causal:
            table = table[: math.prod(self.grid)]
        table = table.astype(dtype).transpose(2, 0, 1, 3)
        widths = [(0, power_of_2(size) - size) for size in table.shape[2:]]
        return jnp.pad(table, [(0, 0), (0, 0), *widths])


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _scores(q, k, t_q, t_k, sizes):
    """Computes a_ij . b_ij, [heads, n, n, batch]."""
    return _products(_side("q", q, t_q, sizes), _side("k", k, t_k, sizes), sizes)


def _scores_forward(q, k, t_q, t_k, sizes):
    return _scores(q, k, t_q, t_k, sizes), (q, k, t_q, t_k)


def _scores_backward(sizes, residuals, g):
    q, k, t_q, t_k = residuals
    queries, keys = _side("q", q, t_q, sizes), _side("k", k, t_k, sizes)
    of_q, of_t_q = _gradients(queries, keys, g, "q", sizes)
    of_k, of_t_k = _gradients(keys, queries, g.swapaxes(1, 2), "k", sizes)
    return of_q, of_k, of_t_q, of_t_k


_scores.defvjp(_scores_forward, _scores_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _values(weights, v, t_v, sizes):
    """Computes sum_j w_ij b_ij, [heads, n, batch, head_dim]."""
    return _sums(None, None, _side("v", v, t_v, sizes), weights, sizes)


def _values_forward(weights, v, t_v, sizes):
    return _values(weights, v, t_v, sizes), (weights, v, t_v)


def _values_backward(sizes, residuals, g):
    weights, v, t_v = residuals
    cotangents, values = _Tokens(g, None, None), _side("v", v, t_v, sizes)
    of_weights = _products(cotangents, values, sizes)
    weights = weights.swapaxes(1, 2)
    return of_weights, *_gradients(values, cotangents, weights, "v", sizes)


_values.defvjp(_values_forward, _values_backward)


def _side(name, x, table, sizes):
    rows = None if table is None else jnp.asarray(_index(name, sizes).rows)
    return _Tokens(x, table, rows)


def _gradients(own, other, weights, name, sizes):
    """Returns the gradients of tokens and of their table."""
    of_keys = name != "q"
    of_tokens = _sums(own.table, own.rows, other, weights, sizes, of_keys=of_keys)
    if own.table is None:
        return of_tokens.astype(own.x.dtype), None
    of_tokens = of_tokens.sum(axis=0, keepdims=True).astype(own.x.dtype)
    of_table = _table_sums(own, other, weights, _index(name, sizes), sizes)
    return of_tokens, of_table.astype(own.table.dtype)


class _Index(NamedTuple):
    """Rows of a table.

    Attributes:
        rows: Row of every pair, first the token that is projected, ``[n, n]``.
        pairs: The pairs, as ``n * first + second``, in the order of their rows.
        starts: Number of the first pair of every row, and of all pairs.
    """

    rows: np.ndarray
    pairs: np.ndarray
    starts: np.ndarray


def _index(name: str, sizes: FusedPairs) -> _Index:
    return _make_index(name, sizes.grid, sizes.num_prefix, sizes.causal)


@functools.lru_cache(maxsize=64)
def _make_index(name, grid, num_prefix, causal):
    if causal:
        n = math.prod(grid)
        rows = np.arange(n)[:, None] - np.arange(n)
        order_by = np.where(rows < 0, n, rows)
        rows, num_rows = np.maximum(rows, 0), n
    else:
        order_by = rows = pair_rows(grid, num_prefix)[name]
        num_rows = rows.max() + 1
    if name != "q":
        rows, order_by = rows.T, order_by.T
    pairs = np.argsort(order_by, axis=None, kind="stable")
    starts = np.searchsorted(order_by.ravel()[pairs], np.arange(num_rows + 1))
    return _Index(*(x.astype(np.int32) for x in (rows, pairs, starts)))


def _products(queries, keys, sizes):
    """Computes a_ij . b_ij, [heads, n, n, batch]; zeros for later keys."""
    n, batch = queries.x.shape[1:3]

    def kernel(refs, out, head, i, block):
        queries, keys = refs["queries"], refs["keys"]

        def step(j, _):
            a = queries.project(head, i, j, block, sizes._precision)
            b = keys.project(head, j, i, block, sizes._precision)
            out[head, i, j, block] = jnp.sum(a * b, axis=1)

        def skip(j, _):
            out[head, i, j, block] = jnp.zeros(block.size, jnp.float32)

        jax.lax.fori_loop(0, i + 1 if sizes.causal else n, step, None)
        if sizes.causal:
            jax.lax.fori_loop(i + 1, n, skip, None)

    inputs = {"queries": queries, "keys": keys}
    return _call(kernel, inputs, (sizes.num_heads, n, n, batch), n, batch, sizes)


def _sums(table, rows, other, weights, sizes, of_keys=False):
    """Computes sum_j w_ij b_ij, times the transpose of the pair's own matrix.

    Args:
        table: Table of the own tokens, or None without it.
        rows: Its row for every pair, or None.
        other: The other tokens.
        weights: [heads, n, n, batch], first the own token.
        sizes: Static sizes.
        of_keys: Whether the own tokens are keys.

    Returns:
        [heads, n, batch, width].
    """
    n, batch = other.x.shape[1:3]
    inputs = {"other": other, "weights": weights}
    width = (other.x if other.table is None else other.table).shape[-1]
    if table is not None:
        inputs |= {"table": table, "rows": rows}
        width = table.shape[-2]

    def kernel(refs, out, head, i, block):
        def step(j, total):
            b = refs["other"].project(head, j, i, block, sizes._precision)
            product = refs["weights"][head, i, j, block][:, None] * b
            if "table" in refs:
                matrix = refs["table"][head, refs["rows"][i, j]]
                product = product.astype(matrix.dtype)
                product = dot(product, matrix.T, sizes._precision)
            return total + product

        first, last = 0, n
        if sizes.causal:
            first, last = (i, n) if of_keys else (0, i + 1)
        total = jnp.zeros((block.size, width), jnp.float32)
        out[head, i, block] = jax.lax.fori_loop(first, last, step, total)

    return _call(kernel, inputs, (sizes.num_heads, n, batch, width), n, batch, sizes)


def _table_sums(own, other, weights, index, sizes):
    """Computes the sum of q_i^T w_ij b_ij over the pairs of every row.

    Args:
        own: The tokens that the table projects.
        other: The other tokens.
        weights: [heads, n, n, batch], first the own token.
        index: Rows of the table.
        sizes: Static sizes.

    Returns:
        [heads, rows, width, head_dim].
    """
    n, batch = own.x.shape[1:3]
    shape = own.table.shape

    def kernel(refs, out, head, row, _):
        def step(slot, total):
            pair = refs["pairs"][slot]
            i, j = jax.lax.div(pair, np.int32(n)), jax.lax.rem(pair, np.int32(n))

            def add_block(number, total):
                block = _block(number, batch)
                x = refs["own"][0, i, block]
                b = refs["other"].project(head, j, i, block, sizes._precision)
                product = refs["weights"][head, i, j, block][:, None] * b
                return total + dot(x.T, product.astype(x.dtype), sizes._precision)

            return jax.lax.fori_loop(0, _num_blocks(batch), add_block, total)

        total = jnp.zeros(shape[2:], jnp.float32)
        first, last = refs["starts"][row], refs["starts"][row + 1]
        out[head, row] = jax.lax.fori_loop(first, last, step, total)

    inputs = {"own": own.x, "other": other, "weights": weights}
    inputs |= {"pairs": jnp.asarray(index.pairs), "starts": jnp.asarray(index.starts)}
    return _call(kernel, inputs, shape, shape[1], None, sizes)


def _num_blocks(batch):
    return -(-batch // _BLOCK)


def _block(number, batch):
    """Returns the slice of a block of sequences."""
    size = min(_BLOCK, batch)
    return pl.ds(number * size, size)


def _call(kernel, inputs, shape, length, batch, sizes):
    """Calls a kernel for every head, token or row, and block of sequences.

    Args:
        kernel: A function of references to the inputs and the output, of the head, of
            the token or row, and of a slice of the batch.
        inputs: Arrays by name.
        shape: Shape of the output.
        length: Number of tokens or rows.
        batch: Number of sequences; None if a program loops over them.
        sizes: Static sizes.

    Returns:
        The output, float32.
    """
    num_blocks = 1 if batch is None else _num_blocks(batch)

    def run(refs, out):
        # One axis, so that two `jax.vmap` can add theirs to the three of a GPU.
        program = pl.program_id(0)
        rest = jax.lax.div(program, np.int32(num_blocks))
        number = jax.lax.rem(program, np.int32(num_blocks))
        token = jax.lax.div(rest, np.int32(sizes.num_heads))
        head = jax.lax.rem(rest, np.int32(sizes.num_heads))
        block = None if batch is None else _block(number, batch)
        kernel(refs, out, head, token, block)

    return pl.pallas_call(
        run,
        grid=(sizes.num_heads * length * num_blocks,),
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
    )(inputs)

"""Scores and values with a projection for every offset between tokens.

Loops run over the offsets of a bucket (`relattn.kernels.translution.schedule`). A step
slices the rectangles of tokens and the matrices of one offset; no larger projection is
materialised. The backward pass runs the same loops, computes the projections again, and
writes the gradient of each matrix once. Accelerators loop over rows of queries instead
(`relattn.kernels.translution.rows`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array

from relattn.kernels.checks import check_static
from relattn.kernels.platform import choices, first_carry, vary_alike
from relattn.kernels.precision import (
    compute_dtype,
    current_precision,
    wide_einsum,
    widen,
)
from relattn.kernels.translution.core import check_num_tokens
from relattn.kernels.translution.rows import RowLoop
from relattn.kernels.translution.schedule import Plan, plan
from relattn.offsets import Grid, check_grid, num_offsets, num_table_rows


class _OffsetIndex:
    """Base of `Offsets` and `CausalOffsets`: loops over the offsets, or over rows."""

    grid: Grid
    num_prefix: int
    causal: ClassVar[bool]

    def scores(
        self, q: Array, k: Array, t_q: Array | None, t_k: Array | None, precision
    ) -> Array:
        """Computes q_ij . k_ji of all pairs; see `Index`."""
        shape = (q if t_q is None else t_q).shape[-2:]
        scan = self._scan(shape, precision)
        q, k = (x.reshape(*x.shape[:2], math.prod(x.shape[2:])) for x in (q, k))
        if not choices().translution_by_rows:
            return _scores(scan, *vary_alike(q, k, t_q, t_k))
        prefix = self.num_prefix
        inner = self._row_loop(scan).scores(q[:, prefix:], k[:, prefix:], t_q, t_k)
        rows = _prefix_rows(scan, t_q), _prefix_rows(scan, t_k)
        return _prefix_scores(scan, inner, q, k, *rows)

    def values(self, weights: Array, v: Array, t_v: Array, precision) -> Array:
        """Computes sum_j weights_ij v_j T_ij; see `Index`."""
        shape = t_v.shape[-2:]
        scan, prefix = self._scan(shape, precision), self.num_prefix
        if not choices().translution_by_rows:
            out = cast(Array, _values(scan, *vary_alike(weights, v, t_v)))
        else:
            inner = weights[:, :, prefix:, prefix:]
            out = self._row_loop(scan).values(inner, v[:, prefix:], t_v)
            out = _prefix_values(scan, out, weights, v, _prefix_rows(scan, t_v))
        return out.reshape(*out.shape[:2], *shape).swapaxes(1, 2)

    def _scan(self, shape, precision) -> OffsetScan:
        """Returns the loop for projections of ``shape``, heads and head_dim."""
        precision = current_precision(precision)
        return OffsetScan(
            self.grid, self.num_prefix, self.causal, *shape, precision=precision
        )

    def _row_loop(self, scan) -> RowLoop:
        return RowLoop(self.grid, self.causal, scan.num_heads, scan.precision)


@dataclasses.dataclass(frozen=True)
class Offsets(_OffsetIndex):
    """Index of tables by the offset on a grid: d = p_i - p_j, and -d for the keys.

    Tables have the rows of `relattn.offsets.offset_index`: one for every offset and,
    with prefix tokens, three more. A pair with a prefix token takes the row of the
    token that is projected: "in" for a grid token paired with a prefix token, "out" for
    a prefix token paired with a grid token, "self" for two prefix tokens.

    Attributes:
        grid: Height and width, or length, of the tokens after the prefix.
        num_prefix: Number of prefix tokens.

    Example:
        >>> index = Offsets((2, 3), num_prefix=1)
        >>> index.length, index.rows
        (7, 18)

    Source:
        Translution: Unifying Self-attention and Convolution, section 3.3, appendix H.
    """

    grid: Grid
    num_prefix: int = 0
    causal: ClassVar[bool] = False
    allowed = None  # Without annotation, or it is no property for type checkers.

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.num_prefix + math.prod(self.grid)

    @property
    def rows(self) -> int:
        """Number of rows of a table."""
        return num_table_rows(self.grid, self.num_prefix)

    def check_length(self, num_tokens: int) -> None:
        """Raises ValueError unless the grid and the prefix hold the tokens."""
        check_grid(num_tokens, self.grid, self.num_prefix)

    def check_table(self, name: str, table: Array) -> Array:
        """Returns the table; raises ValueError if its rows do not fit the grid."""
        _check_axes(name, table)
        if table.shape[0] != self.rows:
            raise ValueError(
                f"{name} needs a row for every offset of the grid {self.grid}, and "
                f"three for prefix tokens where there are any (num_prefix="
                f"{self.num_prefix}): expected {self.rows} rows, got {table.shape[0]}"
            )
        return table


@dataclasses.dataclass(frozen=True)
class CausalOffsets(_OffsetIndex):
    """Index of tables by the offset to earlier tokens: d = i - j, for j <= i.

    Queries, keys and values all take row d. Tables have rows for the offsets 0, 1, ...,
    at least as many as there are tokens.

    Attributes:
        length: Number of tokens.

    Example:
        >>> from relattn.kernels import translution
        >>> x, w = jnp.ones((2, 1)), jnp.zeros((2, 1, 1, 1))
        >>> w_v = w.at[:, 0, 0, 0].set(jnp.array([2.0, 4.0]))  # d = 0, 1
        >>> translution(x, w, w, w_v, index=CausalOffsets(2)).tolist()
        [[[2.0], [3.0]]]

    Source:
        Translution: Unifying Self-attention and Convolution, appendix C.
    """

    length: int
    num_prefix: ClassVar[int] = 0
    causal: ClassVar[bool] = True

    @property
    def grid(self) -> Grid:
        """The line of the tokens."""
        return (self.length,)

    @property
    def allowed(self) -> Array:
        """True for keys up to the query, ``[n, n]``."""
        return jnp.tril(jnp.ones((self.length, self.length), bool))

    def check_length(self, num_tokens: int) -> None:
        """Raises ValueError if the index is for another number of tokens."""
        check_static(num_tokens, "Translution")
        check_num_tokens(self, num_tokens)

    def check_table(self, name: str, table: Array) -> Array:
        """Returns the table; raises ValueError if it has too few rows."""
        _check_axes(name, table)
        if table.shape[0] < self.length:
            raise ValueError(
                f"{name} has weights for {table.shape[0]} offsets, too few for a "
                f"sequence of {self.length} tokens; shorten the sequence or build the "
                "model for a longer one"
            )
        return table


def _check_axes(name, table):
    if table.ndim != 4:
        raise ValueError(
            f"{name} needs one axis of rows, [rows, width, heads, head_dim], got shape "
            f"{table.shape}: a table of pairs needs index=Pairs({table.shape[0]})"
        )


def _project(x, table, precision):
    return x if table is None else jnp.matmul(x, table, precision=precision)


def _pair_scores(scan, q, k, t_q, t_k):
    """Computes q . k of pairs, [pairs heads], from their tokens and matrices."""
    q, k = _project(q, t_q, scan.precision), _project(k, t_k, scan.precision)
    products = widen(q) * widen(k)
    shape = (products.shape[0], scan.num_heads, scan.head_dim)
    return products.reshape(shape).sum(axis=-1)


def _pair_values(scan, weights, v, t_v):
    """Computes weighted values of pairs, [pairs heads * head_dim]."""
    v = widen(_project(v, t_v, scan.precision))
    shape = (v.shape[0], scan.num_heads, scan.head_dim)
    weighted = weights[..., None] * v.reshape(shape)
    return weighted.reshape(v.shape)


def _wide_zeros(grid):
    """Returns zeros, float32 or wider, to accumulate gradients of a grid."""
    return jnp.zeros(grid.shape, compute_dtype(grid))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scores(scan, q, k, t_q, t_k):
    """Computes q_ij . k_ji of all pairs, offset by offset, [batch heads n n]."""
    grid_q, grid_k = scan.to_grid(q), scan.to_grid(k)

    def step(carry, rows, corners, shape, _):
        rectangles = (
            rectangle(grid_q, corners[:2], shape),
            rectangle(grid_k, corners[2:], shape),
        )
        matrices = get_row(t_q, rows[0]), get_row(t_k, rows[1])
        return carry, _pair_scores(scan, *rectangles, *matrices)

    _, slots = scan.over_offsets(step, None, [None] * len(scan.plan.buckets))
    scores = scan.from_slots(slots, q.shape[0])
    rows = _prefix_rows(scan, t_q), _prefix_rows(scan, t_k)
    return _prefix_scores(scan, scores, q, k, *rows)


def _scores_forward(scan, q, k, t_q, t_k):
    return _scores(scan, q, k, t_q, t_k), (q, k, t_q, t_k)


def _scores_backward(scan, residuals, cotangent):
    q, k, t_q, t_k = residuals
    grid_q, grid_k = scan.to_grid(q), scan.to_grid(k)

    def step(carry, rows, corners, shape, slots):
        dq, dk, dt_q, dt_k = carry
        _, pull_back = jax.vjp(
            functools.partial(_pair_scores, scan),
            rectangle(grid_q, corners[:2], shape),
            rectangle(grid_k, corners[2:], shape),
            get_row(t_q, rows[0]),
            get_row(t_k, rows[1]),
        )
        add_q, add_k, row_q, row_k = pull_back(slots)
        carry = (
            add_rectangle(dq, corners[:2], shape, add_q),
            add_rectangle(dk, corners[2:], shape, add_k),
            set_row(dt_q, rows[0], row_q),
            set_row(dt_k, rows[1], row_k),
        )
        return carry, None

    # Gradients of the pairs with a prefix token.
    inner = cotangent[:, :, scan.num_prefix :, scan.num_prefix :]
    rows = _prefix_rows(scan, t_q), _prefix_rows(scan, t_k)
    if scan.num_prefix:
        _, pull_back = jax.vjp(
            functools.partial(_prefix_scores, scan, inner), q, k, *rows
        )
        add_q, add_k, *rows = pull_back(cotangent)
    # Gradients of the pairs of the grid, offset by offset.
    carry = (
        _wide_zeros(grid_q),
        _wide_zeros(grid_k),
        _start_gradient(scan, t_q, rows[0]),
        _start_gradient(scan, t_k, rows[1]),
    )
    (dq, dk, dt_q, dt_k), _ = scan.over_offsets(step, carry, scan.to_slots(inner))
    dq, dk = scan.from_grid(dq), scan.from_grid(dk)
    if scan.num_prefix:
        prefix = [(0, 0), (scan.num_prefix, 0), (0, 0)]
        dq, dk = jnp.pad(dq, prefix) + add_q, jnp.pad(dk, prefix) + add_k
    return dq.astype(q.dtype), dk.astype(k.dtype), dt_q, dt_k


_scores.defvjp(_scores_forward, _scores_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _values(scan, weights, v, t_v):
    """Computes sum_j weights_ij v_j T[d], offset by offset, [batch n width]."""
    grid_v = scan.to_grid(v)

    def step(out, rows, corners, shape, slots):
        tokens = rectangle(grid_v, corners[2:], shape)
        values = _pair_values(scan, slots, tokens, get_row(t_v, rows[0]))
        return add_rectangle(out, corners[:2], shape, values), None

    inner = weights[:, :, scan.num_prefix :, scan.num_prefix :]
    width = scan.num_heads * scan.head_dim
    out = jnp.zeros((*grid_v.shape[:-1], width), compute_dtype(weights, v, t_v))
    out, _ = scan.over_offsets(step, out, scan.to_slots(inner))
    out = scan.from_grid(out)
    return _prefix_values(scan, out, weights, v, _prefix_rows(scan, t_v))


def _values_forward(scan, weights, v, t_v):
    return _values(scan, weights, v, t_v), (weights, v, t_v)


def _values_backward(scan, residuals, cotangent):
    weights, v, t_v = residuals
    prefix = scan.num_prefix
    grid_v, grid_out = scan.to_grid(v), scan.to_grid(cotangent)

    def step(carry, rows, corners, shape, slots):
        dv, dt_v = carry
        _, pull_back = jax.vjp(
            functools.partial(_pair_values, scan),
            slots,
            rectangle(grid_v, corners[2:], shape),
            get_row(t_v, rows[0]),
        )
        slots, add, row = pull_back(rectangle(grid_out, corners[:2], shape))
        dv = add_rectangle(dv, corners[2:], shape, add)
        return (dv, set_row(dt_v, rows[0], row)), slots

    # Gradients of the pairs with a prefix token.
    rows = _prefix_rows(scan, t_v)
    if prefix:
        grid_part = cotangent[:, prefix:]
        _, pull_back = jax.vjp(
            functools.partial(_prefix_values, scan, grid_part), weights, v, rows
        )
        add_weights, add, rows = pull_back(cotangent)
    # Gradients of the pairs of the grid, offset by offset.
    carry = _wide_zeros(grid_v), _start_gradient(scan, t_v, rows)
    slots = scan.to_slots(weights[:, :, prefix:, prefix:])
    (dv, dt_v), slots = scan.over_offsets(step, carry, slots)
    dv, dweights = scan.from_grid(dv), scan.from_slots(slots, v.shape[0])
    if prefix:
        dweights = jnp.pad(dweights, [(0, 0)] * 2 + [(prefix, 0)] * 2) + add_weights
        dv = jnp.pad(dv, [(0, 0), (prefix, 0), (0, 0)]) + add
    return dweights, dv.astype(v.dtype), dt_v


_values.defvjp(_values_forward, _values_backward)


def _prefix_rows(scan, table):
    """Returns the rows "in", "self" and "out"."""
    if table is None:
        return None
    rows = table[num_offsets(scan.grid) :]
    return rows.reshape(*rows.shape[:2], scan.num_heads * scan.head_dim)


def _start_gradient(scan, table, rows):
    """Returns a table's gradient: that of the prefix rows, zeros for the offsets."""
    if table is None:
        return None
    if not scan.num_prefix:
        return jnp.zeros_like(table)
    rows = rows.reshape(-1, *table.shape[1:])
    return jnp.pad(rows, [(num_offsets(scan.grid), 0)] + 3 * [(0, 0)])


def _prefix_scores(scan, inner, q, k, rows_q, rows_k):
    """Adds the scores of the prefix tokens to those of the grid, ``inner``."""
    n = scan.num_prefix
    if not n:
        return inner

    def scores(q, row_q, k, row_k):
        pairs = []
        for x, rows, row in ((q, rows_q, row_q), (k, rows_k, row_k)):
            x = _project(x, None if rows is None else rows[row], scan.precision)
            pairs.append(x.reshape(*x.shape[:2], scan.num_heads, scan.head_dim))
        return wide_einsum(scan.precision)("bihd,bjhd->bhij", *pairs)

    into, within, out = range(3)
    top = scores(q[:, :n], within, k[:, :n], within)
    right = scores(q[:, :n], out, k[:, n:], into)
    left = scores(q[:, n:], into, k[:, :n], out)
    top = jnp.concatenate([top, right], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([left, inner], axis=-1)], axis=-2)


def _prefix_values(scan, inner, weights, v, rows):
    """Adds the terms of the prefix tokens to the grid's sums, ``inner``."""
    n = scan.num_prefix
    if not n:
        return inner

    def values(weights, v, row):
        v = widen(_project(v, rows[row], scan.precision))
        v = v.reshape(*v.shape[:2], scan.num_heads, scan.head_dim)
        out = jnp.einsum("bhij,bjhd->bihd", weights, v, precision=scan.precision)
        return out.reshape(*out.shape[:2], scan.num_heads * scan.head_dim)

    into, within, out = range(3)
    top = values(weights[:, :, :n, :n], v[:, :n], within)
    top = top + values(weights[:, :, :n, n:], v[:, n:], into)
    bottom = inner + values(weights[:, :, n:, :n], v[:, :n], out)
    return jnp.concatenate([top, bottom], axis=1)


class OffsetScan(NamedTuple):
    """Static sizes, the layouts of arrays that follow from them, and the loops.

    Attributes:
        grid: Height and width, or length, of the tokens after the prefix.
        num_prefix: Number of prefix tokens.
        causal: Whether to use the offsets 0, 1, ... only.
        num_heads: Number of heads.
        head_dim: Width of a projection's head.
        precision: Precision of the products.
    """

    grid: Grid
    num_prefix: int
    causal: bool
    num_heads: int
    head_dim: int
    precision: jax.lax.PrecisionLike

    @property
    def plan(self) -> Plan:
        """Returns the buckets of the grid."""
        return plan(self.grid, causal=self.causal)

    def to_grid(self, x: Array) -> Array:
        """Moves [batch n width] without its prefix to [rows columns batch width].

        Zeros pad the rows and columns; on a torus the rows and columns themselves.
        """
        x = jnp.moveaxis(x[:, self.num_prefix :], 1, 0)
        x = x.reshape(*self.plan.shape, *x.shape[1:])
        widths = [(0, size) for size in self.plan.padding] + [(0, 0)] * 2
        return jnp.pad(x, widths, mode="wrap" if self.plan.periodic else "constant")

    def from_grid(self, x: Array) -> Array:
        """Returns sums over a grid as [batch n width] without prefix.

        On a torus the sums of the rows and columns that pad it belong to their origins.
        """
        height, width = self.plan.shape
        if self.plan.periodic:
            x = x[:height] + jnp.pad(x[height:], [(0, 1)] + [(0, 0)] * 3)
            x = x[:, :width] + jnp.pad(x[:, width:], [(0, 0), (0, 1)] + [(0, 0)] * 2)
        x = x[:height, :width].reshape(height * width, *x.shape[2:])
        return jnp.moveaxis(x, 0, 1)

    def to_slots(self, pairs: Array) -> list[Array]:
        """Moves [batch heads n n] without prefix to [offsets pairs heads] by bucket."""
        batch = pairs.shape[0]
        length = math.prod(self.grid)
        pairs = pairs.transpose(2, 3, 0, 1).reshape(length**2, batch * self.num_heads)
        # Slots without a pair read a zero.
        pairs = jnp.pad(pairs, [(0, 1), (0, 0)])
        slots = _take(pairs, self.plan.pair_of_slot)
        slots = slots.reshape(len(slots) * batch, self.num_heads)
        result, start = [], 0
        for bucket in self.plan.buckets:
            size = math.prod(bucket.shape) * batch
            stop = start + len(bucket.rows) * size
            shape = (len(bucket.rows), size, self.num_heads)
            result.append(slots[start:stop].reshape(shape))
            start = stop
        return result

    def from_slots(self, slots: list[Array], batch: int) -> Array:
        """Inverts `to_slots`."""
        joined = jnp.concatenate(
            [
                x.reshape(len(x) * math.prod(bucket.shape), batch * self.num_heads)
                for x, bucket in zip(slots, self.plan.buckets, strict=True)
            ]
        )
        if self.causal:
            joined = jnp.pad(joined, [(0, 1), (0, 0)])
        pairs = _take(joined, self.plan.slot_of_pair)
        length = math.prod(self.plan.shape)
        pairs = pairs.reshape(length, length, batch, self.num_heads)
        return pairs.transpose(2, 3, 0, 1)

    def over_offsets(
        self, step: Callable, carry: Any, slots: list[Array | None]
    ) -> tuple[Any, list[Any]]:
        """Scans over the offsets of all buckets.

        Args:
            step: Maps a carry, an offset's rows and corners (see `Bucket`), the shape
                of its rectangles and its slots to a carry and an output.
            carry: The first carry.
            slots: Result of `to_slots`, or a None for every bucket.

        Returns:
            The last carry, and the stacked outputs of each bucket.
        """
        results = []
        for bucket, slots_of_bucket in zip(self.plan.buckets, slots, strict=True):

            def body(carry, offset, shape=bucket.shape):
                return step(carry, *offset[:2], shape, offset[2])

            scanned = (bucket.rows, bucket.corners, slots_of_bucket)
            carry = first_carry(body, carry, scanned)
            carry, result = jax.lax.scan(body, carry, scanned)
            results.append(result)
        return carry, results


def _take(x, rows):
    return x.at[rows].get(mode="promise_in_bounds")


def rectangle(x: Array, corner: Array, shape: tuple[int, int]) -> Array:
    """Slices the tokens of a rectangle, [height * width * batch, width]."""
    x = jax.lax.dynamic_slice(x, _start(corner), (*shape, *x.shape[2:]))
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def add_rectangle(
    x: Array, corner: Array, shape: tuple[int, int], tokens: Array
) -> Array:
    """Adds tokens to a rectangle of a grid, the transpose of `rectangle`."""
    old = jax.lax.dynamic_slice(x, _start(corner), (*shape, *x.shape[2:]))
    new = old + tokens.reshape(old.shape).astype(x.dtype)
    return jax.lax.dynamic_update_slice(x, new, _start(corner))


def _start(corner):
    """Returns the start of a slice; all indices must have the same dtype."""
    return (*corner, *jnp.zeros(2, corner.dtype))


def get_row(table: Array | None, index: Array) -> Array | None:
    """Returns the matrix [width, heads * head_dim] of a row, None without a table."""
    if table is None:
        return None
    row = jax.lax.dynamic_index_in_dim(table, index, keepdims=False)
    return row.reshape(len(row), -1)


def set_row(table: Array | None, index: Array, row: Array | None) -> Array | None:
    """Writes a row of a table, the inverse of `get_row`."""
    if table is None:
        return None
    assert row is not None
    row = row.reshape(table.shape[1:])
    return jax.lax.dynamic_update_index_in_dim(table, row, index, axis=0)

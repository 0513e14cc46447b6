"""Scores and values of pairs with a prefix token, which have a matrix for each kind."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from relattn.kernels.precision import wide_einsum, widen
from relattn.kernels.translution.layouts import OffsetScan
from relattn.offsets import PrefixRow


def prefix_rows(scan: OffsetScan, table: Array | None) -> Any:
    """Returns the rows "in", "self" and "out" of a table; None without one."""
    if table is None:
        return None
    rows = table[scan.num_offset_rows :]
    return rows.reshape(*rows.shape[:2], scan.num_heads * scan.head_dim)


def add_prefix_scores(
    scan: OffsetScan,
    inner: Array,
    q: Array,
    k: Array,
    rows_q: Array | None,
    rows_k: Array | None,
) -> Array:
    """Adds the scores of the prefix tokens to those of the grid, ``inner``."""
    n = scan.num_prefix
    if not n:
        return inner

    def scores(q, row_q, k, row_k):
        pairs = []
        for x, rows, row in ((q, rows_q, row_q), (k, rows_k, row_k)):
            x = project(x, None if rows is None else rows[row], scan.precision)
            pairs.append(x.reshape(*x.shape[:2], scan.num_heads, scan.head_dim))
        return wide_einsum(scan.precision)("bihd,bjhd->bhij", *pairs)

    # A token takes the row of its own pair: "in" and "out" swap between q and k.
    top = scores(q[:, :n], PrefixRow.SELF, k[:, :n], PrefixRow.SELF)
    right = scores(q[:, :n], PrefixRow.OUT, k[:, n:], PrefixRow.IN)
    left = scores(q[:, n:], PrefixRow.IN, k[:, :n], PrefixRow.OUT)
    top = jnp.concatenate([top, right], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([left, inner], axis=-1)], axis=-2)


def add_prefix_values(
    scan: OffsetScan, inner: Array, weights: Array, v: Array, rows: Array
) -> Array:
    """Adds the terms of the prefix tokens to the grid's sums, ``inner``."""
    n = scan.num_prefix
    if not n:
        return inner

    def values(weights, v, row):
        v = widen(project(v, rows[row], scan.precision))
        v = v.reshape(*v.shape[:2], scan.num_heads, scan.head_dim)
        out = jnp.einsum("bhij,bjhd->bihd", weights, v, precision=scan.precision)
        return out.reshape(*out.shape[:2], scan.num_heads * scan.head_dim)

    # Prefix queries: sum_j weights_ij v_j T over prefix keys, then over grid keys.
    top = values(weights[:, :, :n, :n], v[:, :n], PrefixRow.SELF)
    top = top + values(weights[:, :, :n, n:], v[:, n:], PrefixRow.IN)
    # Grid queries: the sum over prefix keys, added to that over grid keys.
    bottom = inner + values(weights[:, :, n:, :n], v[:, :n], PrefixRow.OUT)
    return jnp.concatenate([top, bottom], axis=1)


def project(x: Array, table: Array | None, precision: jax.lax.PrecisionLike) -> Array:
    """Computes x T; x itself without a table."""
    return x if table is None else jnp.matmul(x, table, precision=precision)

"""Scores and values with a projection for every pair of tokens.

Scans over the queries hold the projections of one query's pairs at a time. The backward
pass computes them again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from relattn.kernels.precision import widen
from relattn.kernels.translution.core import check_num_tokens


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Index of tables by the pair of tokens: W[i, j], the query first.

    Tables have a matrix for every pair, ``[n, n, width, heads, head_dim]``. Their first
    axis is the query and the second the key, in the tables of keys and values too.

    Attributes:
        length: n, the number of tokens.

    Example:
        >>> from relattn.kernels import translution
        >>> x, w = jnp.ones((2, 3)), jnp.ones((2, 2, 3, 1, 1))
        >>> translution(x, w, w, w, index=Pairs(2)).tolist()
        [[[3.0], [3.0]]]

    Source:
        Translution: Unifying Self-attention and Convolution, table 5.
    """

    length: int
    allowed = None  # With an annotation, type checkers would see no property.

    def check_length(self, num_tokens: int) -> None:
        """Raises ValueError if the index is for another number of tokens."""
        check_num_tokens(self, num_tokens)

    def check_table(self, name: str, table: Array) -> Array:
        """Returns the table; raises ValueError if it does not hold all pairs."""
        if table.ndim != 5 or table.shape[:2] != (self.length, self.length):
            raise ValueError(
                f"{name} needs a matrix for every pair of tokens: expected "
                f"[{self.length}, {self.length}, width, heads, head_dim], got "
                f"{table.shape}"
            )
        return table

    def scores(
        self, q: Array, k: Array, t_q: Array | None, t_k: Array | None, precision
    ) -> Array:
        """Computes q_ij . k_ji of all pairs; see `Index`."""

        def score(rows):
            # x_i Wq[i, j] . x_j Wk[i, j] for one query i and all keys j.
            q_i, t_q, t_k = rows
            if t_q is None:
                q_i = q_i[:, None]
            else:
                q_i = jnp.einsum("bc,jche->bjhe", q_i, t_q, precision=precision)
            k_i = _project(k, t_k, precision)
            # Widened before the product, which could overflow.
            return jnp.sum(widen(q_i) * widen(k_i), axis=-1)

        scores = _map(score, (jnp.moveaxis(q, 1, 0), t_q, t_k))
        return scores.transpose(1, 3, 0, 2)

    def values(self, weights: Array, v: Array, t_v: Array, precision) -> Array:
        """Computes sum_j weights_ij v_j T_ij; see `Index`."""

        def add(rows):
            # sum_j weights_ij x_j Wv[i, j] for one query i.
            weights_i, t_v = rows
            v_i = widen(_project(v, t_v, precision))
            return jnp.einsum("bhj,bjhe->bhe", weights_i, v_i, precision=precision)

        out = _map(add, (jnp.moveaxis(weights, 2, 0), t_v))
        return out.transpose(1, 2, 0, 3)


def _project(tokens: Array, table: Array | None, precision) -> Array:
    """Projects tokens [batch, n, width] by [n, width, heads, head_dim], if given."""
    if table is None:
        return tokens
    return jnp.einsum("bjc,jche->bjhe", tokens, table, precision=precision)


def _map(function: Callable, rows: tuple) -> Array:
    def body(_, rows):
        return None, function(rows)

    return jax.lax.scan(jax.checkpoint(body, prevent_cse=False), None, rows)[1]

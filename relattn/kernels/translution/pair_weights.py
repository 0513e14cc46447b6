"""Scores and values of projections that every pair of tokens has for itself.

Scans over the queries hold the projections of one query's pairs at a time, and make
them anew in the backward pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from relattn.kernels.precision import widen


@dataclasses.dataclass(frozen=True)
class PairTables:
    """Tables ``[n, n, width, heads, head_dim]``, one matrix a (query, key).

    Attributes:
        length: n, the number of tokens.
    """

    length: int
    allowed: ClassVar[None] = None

    def check(self, name: str, table: Array) -> Array:
        """The table, if it holds all pairs; ValueError otherwise."""
        if table.shape[:2] != (self.length, self.length):
            raise ValueError(
                f"{name} needs a matrix for every pair of {self.length} tokens: "
                f"expected [{self.length}, {self.length}, ...], got {table.shape}"
            )
        return table

    def scores(
        self, q: Array, k: Array, t_q: Array | None, t_k: Array | None, precision
    ) -> Array:
        """q_ij . k_ji of every pair, float32 or wider, ``[batch, heads, n, n]``.

        ``q`` and ``k`` are tokens ``[batch, n, width]`` to be projected by their
        tables, or without a table ``[batch, n, heads, head_dim]``.
        """

        def score(rows):
            q_i, t_q, t_k = rows
            if t_q is None:
                q_i = q_i[:, None]
            else:
                q_i = jnp.einsum("bc,jche->bjhe", q_i, t_q, precision=precision)
            k_i = _project(k, t_k, precision)
            # Wide before the product, which could overflow.
            return jnp.sum(widen(q_i) * k_i, axis=-1)

        scores = _map(score, (jnp.moveaxis(q, 1, 0), t_q, t_k))
        return scores.transpose(1, 3, 0, 2)

    def values(self, weights: Array, v: Array, t_v: Array, precision) -> Array:
        """sum_j weights_ij v_j T[i, j] of pairs, wide ``[*, n, head_dim]``."""

        def add(rows):
            weights_i, t_v = rows
            v_i = widen(_project(v, t_v, precision))
            return jnp.einsum("bhj,bjhe->bhe", weights_i, v_i, precision=precision)

        out = _map(add, (jnp.moveaxis(weights, 2, 0), t_v))
        return out.transpose(1, 2, 0, 3)


def _project(tokens: Array, table: Array | None, precision) -> Array:
    """Tokens [batch, n, width] by their rows [n, width, heads, head_dim], if any."""
    if table is None:
        return tokens
    return jnp.einsum("bjc,jche->bjhe", tokens, table, precision=precision)


def _map(function: Callable, rows: tuple) -> Array:
    def body(_, rows):
        return None, function(rows)

    return jax.lax.scan(jax.checkpoint(body, prevent_cse=False), None, rows)[1]

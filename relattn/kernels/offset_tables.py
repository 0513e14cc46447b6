"""Scores and values of projections that every offset between tokens has for itself."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from relattn.kernels.pair_tables import PairTables
from relattn.offsets import Grid, is_prefix, num_table_rows, offset_index


@dataclasses.dataclass(frozen=True)
class OffsetTables:
    """Tables ``[rows, width, heads, depth]``, one matrix an offset.

    Attributes:
        grid: Of the tokens after the prefix.
        num_prefix: Number of prefix tokens; they have three rows after the offsets'.
        causal: Whether a token meets only itself and those before it.
    """

    grid: Grid
    num_prefix: int = 0
    causal: bool = False

    @property
    def length(self) -> int:
        """The number of tokens."""
        return self.num_prefix + int(np.prod(self.grid))

    @property
    def allowed(self) -> Array | None:
        """Which keys a query may attend to; None for all."""
        if not self.causal:
            return None
        return jnp.tril(jnp.ones((self.length, self.length), bool))

    def check(self, name: str, table: Array) -> Array:
        """The rows of the table that are used; ValueError if there are too few."""
        rows = num_table_rows(self.grid, self.num_prefix, causal=self.causal)
        if self.causal:
            if table.shape[0] < rows:
                raise ValueError(
                    f"{name} has weights for {table.shape[0]} offsets, too few for a "
                    f"sequence of {rows} tokens; shorten the sequence or build the "
                    "model for a longer one"
                )
        elif table.shape[0] != rows:
            raise ValueError(
                f"{name} needs a row for every offset of the grid {self.grid}, and "
                f"three for prefix tokens where there are any (num_prefix="
                f"{self.num_prefix}): expected {rows} rows, got {table.shape[0]}"
            )
        return table[:rows]

    def scores(
        self, q: Array, k: Array, t_q: Array | None, t_k: Array | None, precision
    ) -> Array:
        """q_ij . k_ji of every pair, float32 ``[batch, heads, n, n]``.

        ``q`` and ``k`` are tokens ``[batch, n, width]`` to be projected by their
        tables, or without a table ``[batch, n, heads, depth]``.
        """
        index = self._index()
        t_q = None if t_q is None else t_q[index]
        other = index if self.causal else index.T
        t_k = None if t_k is None else t_k[other]
        return PairTables(self.length).scores(q, k, t_q, t_k, precision)

    def values(self, weights: Array, v: Array, t_v: Array, precision) -> Array:
        """sum_j weights_ij v_j T[i, j], float32 ``[batch, heads, n, depth]``."""
        index = self._index()
        prefix = is_prefix(self.grid, self.num_prefix)
        index = np.where(prefix | prefix[:, None], index.T, index)
        return PairTables(self.length).values(weights, v, t_v[index], precision)

    def _index(self):
        if self.causal:
            offsets = np.arange(self.length)[:, None] - np.arange(self.length)
            return np.maximum(offsets, 0)
        return offset_index(self.grid, self.num_prefix)

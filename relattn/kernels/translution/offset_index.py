"""Indices of tables by the offset between tokens, on a grid or in a sequence."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array

from relattn.kernels import pallas_gpu
from relattn.kernels.checks import check_static
from relattn.kernels.platform import platform_defaults, vary_alike
from relattn.kernels.precision import current_precision, wide_einsum, widen
from relattn.kernels.translution.core import check_num_tokens
from relattn.kernels.translution.diagonals import DiagonalBlocks
from relattn.kernels.translution.gathered import PairBlocks
from relattn.kernels.translution.gradients import scan_scores, scan_values
from relattn.kernels.translution.layouts import OffsetScan
from relattn.kernels.translution.prefix import (
    add_prefix_scores,
    add_prefix_values,
    prefix_rows,
    project,
)
from relattn.kernels.translution.rows import RowLoop
from relattn.offsets import Grid, check_grid, num_table_rows


class _OffsetIndex:
    """Base of `Offsets` and `CausalOffsets`, which computes in the platform's form."""

    grid: Grid
    num_prefix: int
    clip: int | None
    causal: ClassVar[bool]

    def scores(
        self, q: Array, k: Array, t_q: Array | None, t_k: Array | None, precision
    ) -> Array:
        """Computes q_ij . k_ji of all pairs; see `Index`."""
        shape = (q if t_q is None else t_q).shape[-2:]
        scan = self._scan(shape, precision)
        q, k = (x.reshape(*x.shape[:2], math.prod(x.shape[2:])) for x in (q, k))
        if self.clip is not None:
            near = cast(Array, scan_scores(scan, *vary_alike(q, k, t_q, t_k)))
            # x_i Tq[far] . x_j Tk[far]
            heads = (self._project_far(scan, x, t) for x, t in ((q, t_q), (k, t_k)))
            far = wide_einsum(precision)("bihd,bjhd->bhij", *heads)
            return jnp.where(scan.is_far, far, near)
        form = platform_defaults().translution
        if form == "offsets":
            return scan_scores(scan, *vary_alike(q, k, t_q, t_k))
        if form == "pairs":
            gpu, other = self._on_gpu(scan, (q, k), (t_q, t_k))
            arrays = vary_alike(q, k, t_q, t_k)
            return _on_platform(gpu.scores, other.scores, *arrays)
        # Pairs of grid tokens by rows of queries, then those with a prefix token.
        prefix = self.num_prefix
        inner = self._row_loop(scan).scores(q[:, prefix:], k[:, prefix:], t_q, t_k)
        rows = prefix_rows(scan, t_q), prefix_rows(scan, t_k)
        return add_prefix_scores(scan, inner, q, k, *rows)

    def values(self, weights: Array, v: Array, t_v: Array, precision) -> Array:
        """Computes sum_j weights_ij v_j T_ij; see `Index`."""
        shape = t_v.shape[-2:]
        scan, prefix = self._scan(shape, precision), self.num_prefix
        form = platform_defaults().translution
        if form == "offsets" or self.clip is not None:
            out = cast(Array, scan_values(scan, *vary_alike(weights, v, t_v)))
        elif form == "pairs":
            gpu, other = self._on_gpu(scan, (weights, v), (t_v,))
            arrays = vary_alike(weights, v, t_v)
            out = _on_platform(gpu.values, other.values, *arrays)
        else:
            inner = weights[:, :, prefix:, prefix:]
            out = self._row_loop(scan).values(inner, v[:, prefix:], t_v)
            out = add_prefix_values(scan, out, weights, v, prefix_rows(scan, t_v))
        out = out.reshape(*out.shape[:2], *shape).swapaxes(1, 2)
        if self.clip is not None:
            # sum_j weights_ij x_j T[far] over the keys at far offsets.
            weights = jnp.where(scan.is_far, weights, 0)
            v = widen(self._project_far(scan, v, t_v))
            out = out + jnp.einsum("bhij,bjhd->bhid", weights, v, precision=precision)
        return out

    def _project_far(self, scan, tokens, table) -> Array:
        """Projects tokens by the matrix of far offsets, if there is a table."""
        if table is not None:
            # The last row before those of prefix tokens.
            matrix = table[scan.num_offset_rows - 1].reshape(table.shape[1], -1)
            tokens = project(tokens, matrix, scan.precision)
        shape = *tokens.shape[:2], scan.num_heads, scan.head_dim
        return tokens.reshape(shape)

    def _scan(self, shape, precision) -> OffsetScan:
        """Returns the loop for projections of ``shape``, heads and head_dim."""
        precision = current_precision(precision)
        where = self.grid, self.num_prefix, self.causal
        return OffsetScan(*where, *shape, precision=precision, clip=self.clip)

    def _row_loop(self, scan) -> RowLoop:
        return RowLoop(self.grid, self.causal, scan.num_heads, scan.precision)

    def _on_gpu(self, scan, tokens, tables) -> tuple[Any, Any]:
        """Returns the form for GPUs, and that which XLA compiles for any platform."""
        sizes = scan.num_heads, scan.precision
        max_bytes = platform_defaults().pair_bytes
        blocks: Any = PairBlocks(self.grid, self.num_prefix, *sizes, max_bytes)
        if self.causal:
            blocks = DiagonalBlocks(math.prod(self.grid), *sizes, max_bytes)
        if platform_defaults().fused_translution and pallas_gpu.is_available():
            from relattn.kernels.pallas_gpu.translution import FusedPairs

            fused = FusedPairs(self.grid, self.num_prefix, self.causal, *sizes)
            if fused.fits_gpu(tokens, tables):
                return fused, blocks
        return blocks, blocks


@dataclasses.dataclass(frozen=True)
class Offsets(_OffsetIndex):
    """Index of tables by the offset on a grid: d = p_i - p_j, and -d for the keys.

    Tables have the rows of `relattn.offsets.offset_index`: one for every offset and,
    with prefix tokens, three more. A pair with a prefix token takes the row of the
    token that is projected: "in" for a grid token paired with a prefix token, "out" for
    a prefix token paired with a grid token, "self" for two prefix tokens.

    Attributes:
        grid: Size of each axis of the tokens after the prefix.
        num_prefix: Number of prefix tokens.
        clip: Largest component of an offset with a row of its own; all others share a
            row, in the order of `relattn.kernels.expand_clipped_table`. Time and
            parameters then grow with the number of near offsets, not with that of all.
            None for a row for every offset.

    Example:
        >>> index = Offsets((2, 3), num_prefix=1)
        >>> index.length, index.rows
        (7, 18)
        >>> Offsets((14, 14), num_prefix=1, clip=2).rows
        29

    Source:
        Translution: Unifying Self-attention and Convolution, section 3.3, appendix H.
    """

    grid: Grid
    num_prefix: int = 0
    clip: int | None = None
    causal: ClassVar[bool] = False
    allowed = None  # With an annotation, type checkers would see no property.

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.num_prefix + math.prod(self.grid)

    @property
    def rows(self) -> int:
        """Number of rows of a table."""
        return num_table_rows(self.grid, self.num_prefix, clip=self.clip)

    def check_length(self, num_tokens: int) -> None:
        """Raises ValueError unless the grid and the prefix hold the tokens."""
        check_grid(num_tokens, self.grid, self.num_prefix)

    def check_table(self, name: str, table: Array) -> Array:
        """Returns the table; raises ValueError if its rows do not fit the grid."""
        _check_axes(name, table)
        if table.shape[0] != self.rows:
            near = f" up to clip={self.clip}, one for all others"
            near = "" if self.clip is None else near
            raise ValueError(
                f"{name} needs a row for every offset of the grid {self.grid}{near}, "
                "and three for prefix tokens where there are any (num_prefix="
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
        clip: Largest offset with a row of its own, as of `Offsets`; tables then have
            clip + 2 rows.

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
    clip: int | None = None
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
        if self.clip is not None:
            rows = num_table_rows(self.grid, causal=True, clip=self.clip)
            if table.shape[0] != rows:
                raise ValueError(
                    f"{name} needs a row for each of the offsets 0 .. {self.clip}, and "
                    f"one for larger ones: expected {rows} rows, got {table.shape[0]}"
                )
        elif table.shape[0] < self.length:
            raise ValueError(
                f"{name} has weights for {table.shape[0]} offsets, too few for a "
                f"sequence of {self.length} tokens: shorten the sequence or build the "
                "model for a longer one"
            )
        return table


def _on_platform(on_gpu: Callable, other: Callable, *arrays: Array | None) -> Array:
    """Calls ``on_gpu``, or ``other`` where the program is compiled for another one."""
    if on_gpu == other:
        return other(*arrays)
    return jax.lax.platform_dependent(*arrays, cuda=on_gpu, default=other)


def _check_axes(name, table):
    if table.ndim != 4:
        raise ValueError(
            f"{name} needs one axis of rows, [rows, width, heads, head_dim], got shape "
            f"{table.shape}: a table of pairs needs index=Pairs({table.shape[0]})"
        )

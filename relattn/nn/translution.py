"""Translution and LoR-Translution: attention whose projections depend on the offset.

`OffsetAttention` has the tables of both; `TranslutionAttention` is the full form,
`LorTranslutionAttention` adds a low-rank form to softmax attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from relattn import kernels, offsets
from relattn.kernels.platform import platform_defaults
from relattn.messages import check_choice
from relattn.nn.attention import ATTENTION_WEIGHTS, Context, MultiHeadAttention
from relattn.nn.blocks import Linear, uniform
from relattn.nn.positions.base import grid_table

# Why a grid must be given.
_NEED = "Translution's tables have a row for each offset of a grid"
_SUBSETS = ("q", "k", "v", "qk", "qv", "kv", "qkv")


class OffsetAttention(MultiHeadAttention):
    """Base class of Translution and LoR-Translution, with their tables.

    Attributes:
        relative: The projections that depend on the offset, a subset of ``"qkv"``.
        absolute: Whether they depend on the pair of tokens (query, key) instead.
        clip: Largest number of rows and columns of an offset with a matrix of its own;
            all larger offsets share one, so that the parameters fit a grid of any size.
            None for a matrix for each offset of one grid.
    """

    relative: str = "qkv"
    absolute: bool = False
    clip: int | None = None
    has_causal_form: ClassVar[bool] = True
    scannable: ClassVar[bool] = True
    # [..., offsets, width, heads, head_dim] and [..., width, heads, head_dim]
    split_axes: ClassVar[Mapping[str, tuple[int, ...]]] = {
        **{f"{name}_table": (-4, -2, -3) for name in "qkv"},
        **{f"{name}_matrix": (-2, -3) for name in "qkv"},
    }

    @classmethod
    def expensive_to_compile(cls) -> bool:
        """Returns whether the platform's form is a loop with many instructions."""
        return platform_defaults().translution != "pairs"

    @property
    def periodic(self) -> bool:
        """Whether the tables depend on offsets, not on pairs."""
        return not self.absolute

    @property
    def has_grid_tables(self) -> bool:
        """Whether the tables have a row for each offset of one grid."""
        return self.clip is None

    @nn.nowrap
    def check(self) -> None:
        """Raises ValueError if the attributes are invalid."""
        super().check()
        check_choice("relative", self.relative, _SUBSETS)
        if self.clip is not None and (self.absolute or self.clip < 0):
            raise ValueError(
                "Translution needs clip >= 0, the largest number of rows and columns "
                "of a near offset, or None, and None with absolute=True, got "
                f"clip={self.clip} and absolute={self.absolute}"
            )

    def rows(self, context: Context) -> tuple[int, ...]:
        """Returns the leading axes of a table."""
        grid, num_prefix = context.grid_for(_NEED), context.num_prefix
        if not self.absolute:
            where = {"causal": self.causal, "clip": self.clip}
            return (offsets.num_table_rows(grid, num_prefix, **where),)
        if self.causal:
            raise ValueError(
                "Translution with absolute=True has no causal form: choose "
                "absolute=False"
            )
        return (len(offsets.is_prefix(grid, num_prefix)),) * 2

    def table_index(
        self, length: int, context: Context
    ) -> kernels.Offsets | kernels.CausalOffsets | kernels.Pairs:
        """Returns the index of the tables' rows, for the kernels."""
        if self.absolute:
            return kernels.Pairs(length)
        if self.causal:
            return kernels.CausalOffsets(length, self.clip)
        return kernels.Offsets(context.grid_for(_NEED), context.num_prefix, self.clip)

    def projection_tables(
        self,
        shape: tuple[int, int, int],
        bound: float,
        context: Context,
    ) -> list[Array]:
        """Returns a table for each projection in ``relative``, a matrix for the rest.

        Args:
            shape: Shape of a matrix, ``(width, heads, head_dim)``.
            bound: Tables start uniform in +-``bound``, single matrices in
                +-1 / sqrt(width), like those of `Linear`.
            context: Grid, position and other inputs of the call, see `Context`.

        Returns:
            Parameters ``[*rows, *shape]`` or ``shape``, in the compute dtype.
        """
        found = []
        for name in "qkv":
            if name in self.relative:
                found.append(self.offset_table(name, shape, bound, context))
            else:
                init = uniform(shape[0] ** -0.5)
                matrix = self.param(f"{name}_matrix", init, shape, jnp.float32)
                found.append(matrix.astype(self.dtype))
        return found

    @property
    def sows_weights(self) -> bool:
        """Whether `relattn.models.attention_weights` asks for the weights."""
        asked = self.is_mutable_collection(ATTENTION_WEIGHTS)
        return asked and not self.is_initializing()

    def sow_low_rank_weights(
        self, q: Any, k: Any, low: tuple, tables: tuple, index: Any, options: dict
    ) -> None:
        """Sows the weights: the outputs of LoR-Translution for identity values."""
        n = q.shape[-2]
        identity = jnp.broadcast_to(jnp.eye(n, dtype=q.dtype), (*q.shape[:-1], n))
        qkv = (q, k, identity)
        weights, _ = kernels.lor_translution(qkv, low, tables, index=index, **options)
        assert weights is not None  # qkv has values.
        self.sow_weights(weights)

    def offset_table(
        self, name: str, shape: tuple[int, int, int], bound: float, context: Context
    ) -> Array:
        """Returns the table of a projection: the parameter ``[*rows, *shape]``.

        Args:
            name: ``"q"``, ``"k"`` or ``"v"``.
            shape: Shape of a matrix, ``(width, heads, head_dim)``.
            bound: The table starts uniform in +-``bound``.
            context: Grid, position and other inputs of the call, see `Context`.

        Returns:
            The table, in the compute dtype.
        """
        return grid_table(
            self,
            f"{name}_table",
            uniform(bound),
            (*self.rows(context), *shape),
            context.grid_for(_NEED),
            whose="Translution's",
            remedy=", since its matrices are not resized",
        ).astype(self.dtype)

    def expand(self, table: Array, context: Context) -> Array:
        """Returns a table with a row for each offset, for one token of decoding."""
        # A matrix for all pairs has no rows.
        if self.clip is None or table.ndim == 3:
            return table
        grid = context.grid_for(_NEED)
        return kernels.expand_clipped_table(
            table, grid=grid, clip=self.clip, causal=True
        )


class TranslutionAttention(OffsetAttention):
    """Projects queries, keys and values with a matrix for each offset (Translution).

    out_i = sum_j softmax_j(x_i Wq[d] . x_j Wk[-d] / sqrt(head_dim)) x_j Wv[d],
    d = p_i - p_j.

    Tables have a matrix for each offset on the grid, and three for prefix tokens;
    causal tables have one for each offset 0, 1, ..., which keys take too: Wk[d]. With
    ``absolute`` there is one for each pair. They start uniform in +-1/dim, as in the
    authors' code, and have no biases. No position is needed; one at the site ``tokens``
    is possible.

    Example:
        >>> import jax
        >>> x = jnp.ones((1, 7, 8))
        >>> module = TranslutionAttention(dim=8, num_heads=2)
        >>> init = lambda key: module.init(key, x, grid=(2, 3), num_prefix=1)
        >>> params = jax.eval_shape(init, jax.random.key(0))["params"]
        >>> params["q_table"].shape
        (18, 8, 2, 4)

    Source:
        Translution: Unifying Self-attention and Convolution, section 3.3, appendices C
        and H.
    """

    def mix(
        self, x: Float[Array, "batch n dim"], context: Context
    ) -> Float[Array, "batch heads n head_dim"]:
        """Computes the heads' outputs."""
        x = x.astype(self.dtype)
        shape = (self.dim, self.num_heads, self.head_dim)
        tables = self.projection_tables(shape, 1 / self.dim, context)
        if context.index is not None:
            past = self.update_cache("tokens", x, context)
            if x.shape[-2] == 1:
                tables = [self.expand(table, context) for table in tables]
                out = kernels.causal_translution_step(
                    past, *tables, index=context.index
                )
                return out[..., None, :]
        key_mask = None if context.key_mask is None else context.key_mask[:, 0]
        index = self.table_index(x.shape[-2], context)
        if self.sows_weights:
            zeros = jnp.zeros((x.shape[0], self.num_heads, x.shape[1], 1), x.dtype)
            options = {"scale": self.head_dim**-0.5, "key_mask": key_mask}
            scores = (x, x, None), (*tables[:2], None)
            self.sow_low_rank_weights(zeros, zeros, *scores, index, options)
        return kernels.translution(x, *tables, index=index, key_mask=key_mask)


class LorTranslutionAttention(OffsetAttention):
    """Adds low-rank Translution to softmax attention (LoR-Translution).

    a_ij = (q_i . k_j + (x_i Wq1) Wq2[d] . (x_j Wk1) Wk2[-d]) / sqrt(head_dim),
    out_i = sum_j softmax_j(a_ij) (x_j Wv + x_j Wv1 Wv2[d] Wv3), d = p_i - p_j. Causal
    keys have Wk2[d].

    Tables start uniform in +-1/(rank num_heads), as in the authors' code. Without ``v``
    in ``relative`` there is no low-rank value, without ``q`` and ``k`` no low-rank
    score; with one of the two, the other is x Wq1 or x Wk1 alone. A position of the
    site ``heads``, such as ``rope2d``, acts on the plain queries and keys, one of the
    site ``values`` on the plain values. ``fourier_scores`` and ``fourier_mask`` add a
    term to the scores; with ``constrained_sincos``, head_dim in a_ij is the width with
    its sinusoids.

    Attributes:
        rank: Width of a head of the low-rank part.
        base: Whether to include the plain queries, keys and values. Without them
            ``relative`` must be ``"qv"``, ``"kv"`` or ``"qkv"``.
        average: Whether to average the plain and low-rank parts of scores and outputs,
            as the authors' code does, instead of adding them, as their paper does.

    Example:
        >>> import jax
        >>> x = jnp.ones((1, 7, 8))
        >>> module = LorTranslutionAttention(dim=8, num_heads=2, rank=3)
        >>> init = lambda key: module.init(key, x, grid=(2, 3), num_prefix=1)
        >>> params = jax.eval_shape(init, jax.random.key(0))["params"]
        >>> params["q_table"].shape
        (18, 6, 2, 3)

    Source:
        Translution: Unifying Self-attention and Convolution, section 3.4 and
        appendix D.
    """

    rank: int = 8
    base: bool = True
    average: bool = False
    sites: ClassVar[tuple[str, ...]] = ("none", "tokens", "heads", "values")

    @nn.nowrap
    def check(self) -> None:
        """Raises ValueError if the attributes are invalid."""
        super().check()
        if not self.base and self.relative not in ("qv", "kv", "qkv"):
            raise ValueError(
                "attention 'lor_translution' with base=False and "
                f"relative={self.relative!r} has no scores or no values: choose "
                "relative='qv', 'kv' or 'qkv'"
            )
        if self.rank < 1:
            raise ValueError(
                f"attention 'lor_translution' needs rank >= 1, got {self.rank}"
            )

    def mix(
        self, x: Float[Array, "batch n dim"], context: Context
    ) -> Float[Array, "batch heads n head_dim"]:
        """Computes the heads' outputs."""
        plain, head_dim = self._project_plain(x, context)
        low, tables = self._project_low(x, context)
        position = context.position
        if low[0] is not None and position is not None and position.keeps_scores:
            # q . k has this factor too, against the root of its width in the scale.
            low = (low[0] * (head_dim / self.head_dim) ** 0.5, *low[1:])
        options = {"scale": head_dim**-0.5, "average": self.average}
        out, low_out = self._attend_both(plain, low, tables, options, context)
        if out is not None:
            out = self.combine_values(out, context)
        if low_out is None:
            assert out is not None
            return out
        low_out = self._widen_low(low_out)
        return low_out if out is None else out + low_out

    def _project_plain(self, x: Array, context: Context) -> tuple[tuple, int]:
        """Returns the plain queries, keys and values, or None, and the queries' width.

        Their position has been applied.
        """
        if self.base:
            q, k, v = (self.project(x, self.num_heads, name) for name in "qkv")
            q, k = self.with_position(q, k, x, context)
            return (q, k, self.widen_values(v, x, context)), q.shape[-1]
        if context.position is not None:
            raise ValueError(
                "attention 'lor_translution' with base=False has no plain queries, "
                "keys and values for the position to act on: choose base=True or "
                "position='none'"
            )
        return (None, None, None), self.head_dim

    def _project_low(self, x: Array, context: Context) -> tuple[tuple, tuple]:
        """Returns the tokens of the low-rank part, x W1, and its tables W2.

        Each is for queries, keys and values, or None. A table that does not depend on
        the offset is the identity.
        """
        inner = self.rank * self.num_heads
        shape = (inner, self.num_heads, self.rank)
        scored = "q" in self.relative or "k" in self.relative
        parts = {"q": scored, "k": scored, "v": "v" in self.relative}
        low = tuple(
            self._linear(inner, f"low_{name}")(x) if parts[name] else None
            for name in "qkv"
        )
        same = jnp.eye(inner, dtype=self.dtype).reshape(shape)
        tables = tuple(
            self.offset_table(name, shape, 1 / inner, context)
            if name in self.relative
            else (same if parts[name] else None)
            for name in "qkv"
        )
        return low, tables

    def _attend_both(
        self,
        plain: tuple,
        low: tuple,
        tables: tuple,
        options: dict[str, Any],
        context: Context,
    ) -> tuple[Array | None, Array | None]:
        """Computes the plain and the low-rank outputs; caches and sows, if asked to."""
        given = low[0] if plain[0] is None else plain[0]
        num_tokens = given.shape[-2]
        if context.index is not None:
            past = self.update_caches(plain, low, context)
            if num_tokens == 1:
                return self.attend_one(past, tables, options, context)
        if context.key_mask is not None:
            options = options | {"key_mask": context.key_mask[:, 0]}
        index = self.table_index(num_tokens, context)
        if self.sows_weights:
            shape = (given.shape[0], self.num_heads, num_tokens, 1)
            zeros = jnp.zeros(shape, self.dtype)
            q, k = plain[:2] if self.base else (zeros, zeros)
            scaled = options | {"average": self.average and self.base}
            scores = (*low[:2], None), (*tables[:2], None)
            self.sow_low_rank_weights(q, k, *scores, index, scaled)
        return kernels.lor_translution(plain, low, tables, index=index, **options)

    def _widen_low(
        self, low_out: Float[Array, "batch heads n rank"]
    ) -> Float[Array, "batch heads n head_dim"]:
        """Applies W3 to the low-rank outputs of all heads."""
        low_out = low_out.swapaxes(-2, -3)
        low_out = low_out.reshape(*low_out.shape[:-2], self.num_heads * self.rank)
        low_out = self._linear(self.num_heads * self.head_dim, "low_out")(low_out)
        low_out = low_out.reshape(*low_out.shape[:-1], self.num_heads, self.head_dim)
        return low_out.swapaxes(-2, -3)

    def update_caches(self, plain: tuple, low: tuple, context: Context) -> tuple:
        """Caches keys and values; returns (q_i, k, v), plain and low-rank."""
        past = []
        for part, (q, k, v) in (("plain", plain), ("low", low)):
            if k is not None:
                k = self.update_cache(f"{part}_keys", k, context)
            if v is not None:
                v = self.update_cache(f"{part}_values", v, context)
            past.append((None if q is None else q[..., 0, :], k, v))
        return tuple(past)

    def attend_one(
        self, past: tuple, tables: tuple, options: dict, context: Context
    ) -> tuple[Array | None, Array | None]:
        """Computes the outputs of one token, in decoding."""
        assert context.index is not None
        tables = tuple(x if x is None else self.expand(x, context) for x in tables)
        outs = kernels.causal_lor_translution_step(
            past[0], past[1], tables, index=context.index, **options
        )
        out, low_out = (x if x is None else x[..., None, :] for x in outs)
        return out, low_out

    def _linear(self, width: int, name: str) -> nn.Module:
        return Linear(width, use_bias=False, dtype=self.dtype, name=name)

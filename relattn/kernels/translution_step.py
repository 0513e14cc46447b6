"""Translution and LoR-Translution of one token with those before it, for decoding."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from relattn.kernels.checks import check_arguments
from relattn.kernels.low_rank_offset import Table
from relattn.kernels.offset_tables import OffsetTables
from relattn.kernels.precision import widen
from relattn.kernels.tables import attend, attend_low_rank, check_low_rank


@check_arguments
def causal_translution_step(
    x: Float[Array, "*batch length dim"],
    w_q: Float[Array, "rows dim heads depth"] | Float[Array, "dim heads depth"],
    w_k: Float[Array, "rows dim heads depth"] | Float[Array, "dim heads depth"],
    w_v: Float[Array, "rows dim heads depth"] | Float[Array, "dim heads depth"],
    *,
    index: Int[Array, ""] | int,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch heads depth"]:
    """One token of `relattn.kernels.offset_projection.causal_translution`.

    Keys and values depend on the offset, so what is kept of earlier tokens is the
    tokens. The work is that of n pairs.

    Args:
        x: Tokens, the one at ``index`` and those before it; what comes after them does
            not matter. Shape ``[*batch, n, dim]``.
        w_q: As in `causal_translution`: at least n rows, or one matrix.
        w_k: Likewise.
        w_v: Likewise.
        index: The token's place in the sequence, below n; may be traced.
        precision: Passed to einsum.

    Returns:
        The token's output, shape ``[*batch, heads, depth]``, in the dtype of ``x``.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        ValueError: If a table has fewer than n rows.

    Example:
        >>> x, w = jnp.ones((2, 1)), jnp.zeros((2, 1, 1, 1))
        >>> w_v = w.at[:, 0, 0, 0].set(jnp.array([2.0, 4.0]))  # d = 0, 1
        >>> causal_translution_step(x, w, w, w_v, index=1).tolist()
        [[3.0]]

    Source:
        Translution: Unifying Self-attention and Convolution, appendix C.
    """
    tables = _StepTables(x.shape[-2], index)
    token = jax.lax.dynamic_slice_in_dim(x, index, 1, axis=-2)
    projections = {"w_q": w_q, "w_k": w_k, "w_v": w_v}
    return attend(tables, token, x, projections, None, precision)[..., 0, :]


@check_arguments
def causal_lor_translution_step(
    q_i: Float[Array, "*batch heads key_depth"] | None,
    k: Float[Array, "*batch heads n key_depth"] | None,
    v: Float[Array, "*batch heads n depth"] | None,
    low_q_i: Float[Array, "*batch inner"] | None,
    low_k: Float[Array, "*batch n inner"] | None,
    low_v: Float[Array, "*batch n inner"] | None,
    t_q: Table | None,
    t_k: Table | None,
    t_v: Table | None,
    *,
    index: Int[Array, ""] | int,
    scale: float | None = None,
    average: bool = False,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[
    Float[Array, "*batch heads depth"] | None, Float[Array, "*batch heads rank"] | None
]:
    """One token of `relattn.kernels.low_rank_offset.causal_lor_translution`.

    Args:
        q_i: The token's plain query, shape ``[*batch, heads, key_depth]``, or None as
            in `causal_lor_translution`, so everywhere.
        k: Plain keys of the token at ``index`` and those before it; what comes after
            them does not matter. Shape ``[*batch, heads, n, key_depth]``.
        v: Plain values, likewise, ``[*batch, heads, n, depth]``.
        low_q_i: The token's own tokens for the low-rank query, ``[*batch, inner]``.
        low_k: Tokens for the low-rank keys, ``[*batch, n, inner]``, like ``k``.
        low_v: Tokens for the low-rank values, likewise.
        t_q: As in `causal_lor_translution`: at least n rows, or one matrix.
        t_k: Likewise.
        t_v: Likewise.
        index: The token's place in the sequence, below n; may be traced.
        scale: As in `causal_lor_translution`.
        average: As in `causal_lor_translution`.
        precision: Passed to einsum.

    Returns:
        The token's ``out``, ``[*batch, heads, depth]``, and ``low_out``,
        ``[*batch, heads, rank]``.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        ValueError: If a table has fewer than n rows, or arguments that belong together
            are not given together.

    Example:
        >>> x = jnp.zeros((1, 2, 3))
        >>> low, t = jnp.ones((2, 1)), jnp.zeros((2, 1, 1, 1))
        >>> t_v = t.at[:, 0, 0, 0].set(jnp.array([2.0, 4.0]))  # d = 0, 1
        >>> causal_lor_translution_step(
        ...     x[:, 1], x, x, low[1], low, low, t, t, t_v, index=1
        ... )[1].tolist()
        [[3.0]]

    Source:
        Translution: Unifying Self-attention and Convolution, section 3.4, appendix C.
    """
    q = None if q_i is None else q_i[..., None, :]
    low_q = None if low_q_i is None else low_q_i[..., None, :]
    check_low_rank((q, k, v), (low_q, low_k, low_v), (t_q, t_k, t_v), scale)
    length = next(x.shape[-2] for x in (k, low_k) if x is not None)
    outputs = attend_low_rank(
        _StepTables(length, index),
        (q, k, v),
        {"t_q": (low_q, t_q), "t_k": (low_k, t_k), "t_v": (low_v, t_v)},
        key_mask=None,
        scale=scale,
        average=average,
        precision=precision,
    )
    out, low_out = (None if x is None else x[..., 0, :] for x in outputs)
    return out, low_out


@dataclasses.dataclass(frozen=True)
class _StepTables:
    """Tables of offsets 0, 1, ..., for the one query at ``index``.

    Tokens are brought into the order of the offsets, so that tables stay where they
    are.
    """

    length: int
    index: Array | int

    @property
    def allowed(self) -> Array:
        return jnp.arange(self.length) <= self.index

    def check(self, name: str, table: Array) -> Array:
        tables = OffsetTables((self.length,), causal=True)
        return tables.check(name, table)[: self.length]

    def scores(self, q, k, t_q, t_k, precision):
        if t_q is not None:
            q = jnp.einsum("bnc,rche->brhe", q, t_q, precision=precision)
        k = self._reverse(k)
        if t_k is not None:
            k = jnp.einsum("brc,rche->brhe", k, t_k, precision=precision)
        # Wide before the product, which could overflow.
        scores = jnp.sum(widen(q) * k, axis=-1)
        return jnp.moveaxis(self._reverse(scores), 1, 2)[:, :, None]

    def values(self, weights, v, t_v, precision):
        v = jnp.einsum("brc,rche->brhe", self._reverse(v), t_v, precision=precision)
        weights = jnp.where(self.allowed, self._reverse(weights, axis=3), 0.0)
        v = widen(v)
        return jnp.einsum("bhnr,brhe->bhne", weights, v, precision=precision)

    def _reverse(self, x, axis=1):
        """From the order of keys to that of offsets, and back."""
        places = jnp.maximum(self.index - jnp.arange(self.length), 0)
        return jnp.take(x, places, axis=axis)

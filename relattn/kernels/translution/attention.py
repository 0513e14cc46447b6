"""Translution and LoR-Translution: attention whose projections depend on the offset."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from relattn.kernels.checks import check_arguments
from relattn.kernels.precision import widen
from relattn.kernels.translution.core import attend, attend_low_rank, check_low_rank
from relattn.kernels.translution.offset_weights import OffsetTables
from relattn.kernels.translution.pair_weights import PairTables
from relattn.offsets import Grid, check_grid


@check_arguments
def translution(
    x: Float[Array, "*batch n dim"],
    w_q: Float[Array, "rows dim heads head_dim"] | Float[Array, "dim heads head_dim"],
    w_k: Float[Array, "rows dim heads head_dim"] | Float[Array, "dim heads head_dim"],
    w_v: Float[Array, "rows dim heads head_dim"] | Float[Array, "dim heads head_dim"],
    *,
    grid: Grid,
    num_prefix: int = 0,
    key_mask: Bool[Array, "*#batch n"] | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch heads n head_dim"]:
    """Translution on a grid.

    out_i = sum_j softmax_j(x_i Wq[d] . x_j Wk[-d] / sqrt(head_dim)) x_j Wv[d],
    d = p_i - p_j.

    A pair with a prefix token has the row of the token that is projected: "in" for a
    grid token that meets a prefix token, "out" for a prefix token that meets a grid
    token, "self" for prefix tokens among themselves.

    Scores, softmax and sums are float32 or wider. A query without keys gives zeros.
    Memory is that of scores for every pair, and of queries, keys and values for the
    pairs of one offset. Derivatives are reverse-mode only.

    Args:
        x: Tokens, shape ``[*batch, n, dim]``.
        w_q: Of queries: a table with the rows of `relattn.offsets.offset_index`,
            ``[rows, dim, heads, head_dim]``, or one matrix for all offsets,
            ``[dim, heads, head_dim]``.
        w_k: Of keys, likewise.
        w_v: Of values, likewise.
        grid: Height and width, or length, of the tokens after the prefix.
        num_prefix: Number of prefix tokens.
        key_mask: True for keys that exist, shape ``[*batch, n]``.
        precision: Passed to einsum.

    Returns:
        Shape ``[*batch, heads, n, head_dim]``, in the dtype of ``x``.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        ValueError: If the grid does not hold the tokens, or a table its rows.

    Example:
        >>> import jax.numpy as jnp
        >>> x, w = jnp.ones((2, 1)), jnp.zeros((3, 1, 1, 1))
        >>> w_v = w.at[:, 0, 0, 0].set(jnp.array([2.0, 4.0, 6.0]))  # d = -1, 0, 1
        >>> translution(x, w, w, w_v, grid=(1, 2)).tolist()
        [[[3.0], [5.0]]]

    Source:
        Translution: Unifying Self-attention and Convolution, section 3.3, appendix H.
    """
    check_grid(x.shape[-2], grid, num_prefix)
    tables = OffsetTables(grid, num_prefix)
    projections = {"w_q": w_q, "w_k": w_k, "w_v": w_v}
    return attend(tables, x, x, projections, key_mask, precision)


@check_arguments
def causal_translution(
    x: Float[Array, "*batch n dim"],
    w_q: Float[Array, "rows dim heads head_dim"] | Float[Array, "dim heads head_dim"],
    w_k: Float[Array, "rows dim heads head_dim"] | Float[Array, "dim heads head_dim"],
    w_v: Float[Array, "rows dim heads head_dim"] | Float[Array, "dim heads head_dim"],
    *,
    key_mask: Bool[Array, "*#batch n"] | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch heads n head_dim"]:
    """Translution of every token with itself and those before it.

    out_i = sum_{j <= i} softmax_{j <= i}(a_ij) x_j Wv[d],
    a_ij = x_i Wq[d] . x_j Wk[d] / sqrt(head_dim), d = i - j.

    Args:
        x: Tokens, shape ``[*batch, n, dim]``.
        w_q: Of queries: a table of the offsets 0, 1, ..., at least n of them,
            ``[rows, dim, heads, head_dim]``, or one matrix for all offsets,
            ``[dim, heads, head_dim]``.
        w_k: Of keys, likewise.
        w_v: Of values, likewise.
        key_mask: True for keys that exist, shape ``[*batch, n]``.
        precision: Passed to einsum.

    Returns:
        Shape ``[*batch, heads, n, head_dim]``, in the dtype of ``x``.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        ValueError: If a table has fewer rows than there are tokens.

    Example:
        >>> import jax.numpy as jnp
        >>> x, w = jnp.ones((2, 1)), jnp.zeros((2, 1, 1, 1))
        >>> w_v = w.at[:, 0, 0, 0].set(jnp.array([2.0, 4.0]))  # d = 0, 1
        >>> causal_translution(x, w, w, w_v).tolist()
        [[[2.0], [3.0]]]

    Source:
        Translution: Unifying Self-attention and Convolution, appendix C.
    """
    tables = OffsetTables((x.shape[-2],), causal=True)
    projections = {"w_q": w_q, "w_k": w_k, "w_v": w_v}
    return attend(tables, x, x, projections, key_mask, precision)


Heads = Float[Array, "*batch heads n value_dim"]
Low = Float[Array, "*batch n inner"]
Table = Float[Array, "rows inner heads rank"] | Float[Array, "inner heads rank"]


@check_arguments
def lor_translution(
    q: Float[Array, "*batch heads n head_dim"] | None,
    k: Float[Array, "*batch heads n head_dim"] | None,
    v: Float[Array, "*batch heads n value_dim"] | None,
    low_q: Float[Array, "*batch n inner"] | None,
    low_k: Float[Array, "*batch n inner"] | None,
    low_v: Float[Array, "*batch n inner"] | None,
    t_q: Table | None,
    t_k: Table | None,
    t_v: Table | None,
    *,
    grid: Grid,
    num_prefix: int = 0,
    key_mask: Bool[Array, "*#batch n"] | None = None,
    scale: float | None = None,
    average: bool = False,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[Heads | None, Float[Array, "*batch heads n rank"] | None]:
    """LoR-Translution on a grid.

    a_ij = (q_i . k_j + low_q_i Tq[d] . low_k_j Tk[-d]) scale, d = p_i - p_j,
    out_i = sum_j softmax_j(a_ij) v_j, low_out_i = sum_j softmax_j(a_ij) low_v_j Tv[d].

    The caller multiplies ``low_out``, its heads side by side, by a matrix and adds it
    to ``out``. Prefix tokens, masks, numerics and memory are those of
    `relattn.kernels.translution.attention.translution`.

    Args:
        q: Plain queries, shape ``[*batch, heads, n, head_dim]``, or None with ``k``
            and ``v``: the low-rank part alone.
        k: Plain keys, likewise.
        v: Plain values, shape ``[*batch, heads, n, value_dim]``, likewise.
        low_q: Tokens for the low-rank queries, shape ``[*batch, n, inner]``, or None
            with ``low_k``, ``t_q`` and ``t_k``: no low-rank score.
        low_k: Tokens for the low-rank keys, likewise.
        low_v: Tokens for the low-rank values, likewise, or None with ``t_v``.
        t_q: Of low-rank queries: a table with the rows of
            `relattn.offsets.offset_index`, ``[rows, inner, heads, rank]``, or one
            matrix for all offsets, ``[inner, heads, rank]``.
        t_k: Of low-rank keys, likewise.
        t_v: Of low-rank values, likewise.
        grid: Height and width, or length, of the tokens after the prefix.
        num_prefix: Number of prefix tokens.
        key_mask: True for keys that exist, shape ``[*batch, n]``.
        scale: Of the scores; 1 / sqrt(head_dim) by default, to be given without ``q``.
        average: Whether plain and low-rank parts of scores and outputs are averaged,
            as in the authors' code, not summed, as in their paper. Without plain part
            or without low-rank part nothing is halved.
        precision: Passed to einsum.

    Returns:
        ``out``, shape ``[*batch, heads, n, value_dim]`` in the dtype of ``v``, and
        ``low_out``, shape ``[*batch, heads, n, rank]`` in the dtype of ``low_v``; None
        for the part that is not there.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        ValueError: If the grid does not hold the tokens, a table its rows, or arguments
            that belong together are not given together.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.zeros((1, 2, 3))
        >>> low, t = jnp.ones((2, 1)), jnp.zeros((3, 1, 1, 1))
        >>> t_v = t.at[:, 0, 0, 0].set(jnp.array([2.0, 4.0, 6.0]))  # d = -1, 0, 1
        >>> out = lor_translution(x, x, x, low, low, low, t, t, t_v, grid=(1, 2))
        >>> out[1].tolist()
        [[[3.0], [5.0]]]

    Source:
        Translution: Unifying Self-attention and Convolution, section 3.4.
    """
    length = check_low_rank((q, k, v), (low_q, low_k, low_v), (t_q, t_k, t_v), scale)
    check_grid(length, grid, num_prefix)
    return attend_low_rank(
        OffsetTables(grid, num_prefix),
        (q, k, v),
        {"t_q": (low_q, t_q), "t_k": (low_k, t_k), "t_v": (low_v, t_v)},
        key_mask=key_mask,
        scale=scale,
        average=average,
        precision=precision,
    )


@check_arguments
def causal_lor_translution(
    q: Float[Array, "*batch heads n head_dim"] | None,
    k: Float[Array, "*batch heads n head_dim"] | None,
    v: Float[Array, "*batch heads n value_dim"] | None,
    low_q: Float[Array, "*batch n inner"] | None,
    low_k: Float[Array, "*batch n inner"] | None,
    low_v: Float[Array, "*batch n inner"] | None,
    t_q: Table | None,
    t_k: Table | None,
    t_v: Table | None,
    *,
    key_mask: Bool[Array, "*#batch n"] | None = None,
    scale: float | None = None,
    average: bool = False,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[Heads | None, Float[Array, "*batch heads n rank"] | None]:
    """LoR-Translution of every token with itself and those before it.

    a_ij = (q_i . k_j + low_q_i Tq[d] . low_k_j Tk[d]) scale, d = i - j,
    out_i = sum_{j <= i} softmax_{j <= i}(a_ij) v_j, and low_out_i likewise of
    low_v_j Tv[d].

    Args:
        q: Plain queries, or None, as in `lor_translution`.
        k: Plain keys, likewise.
        v: Plain values, likewise.
        low_q: Tokens for the low-rank queries, or None, likewise.
        low_k: Tokens for the low-rank keys, likewise.
        low_v: Tokens for the low-rank values, likewise.
        t_q: Of low-rank queries: a table of the offsets 0, 1, ..., at least n of them,
            ``[rows, inner, heads, rank]``, or one matrix for all offsets.
        t_k: Of low-rank keys, likewise.
        t_v: Of low-rank values, likewise.
        key_mask: True for keys that exist, shape ``[*batch, n]``.
        scale: Of the scores, as in `lor_translution`.
        average: As in `lor_translution`.
        precision: Passed to einsum.

    Returns:
        ``out`` and ``low_out``, as in `lor_translution`.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        ValueError: If a table has fewer rows than there are tokens, or arguments that
            belong together are not given together.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.zeros((1, 2, 3))
        >>> low, t = jnp.ones((2, 1)), jnp.zeros((2, 1, 1, 1))
        >>> t_v = t.at[:, 0, 0, 0].set(jnp.array([2.0, 4.0]))  # d = 0, 1
        >>> causal_lor_translution(x, x, x, low, low, low, t, t, t_v)[1].tolist()
        [[[2.0], [3.0]]]

    Source:
        Translution: Unifying Self-attention and Convolution, section 3.4, appendix C.
    """
    length = check_low_rank((q, k, v), (low_q, low_k, low_v), (t_q, t_k, t_v), scale)
    return attend_low_rank(
        OffsetTables((length,), causal=True),
        (q, k, v),
        {"t_q": (low_q, t_q), "t_k": (low_k, t_k), "t_v": (low_v, t_v)},
        key_mask=key_mask,
        scale=scale,
        average=average,
        precision=precision,
    )


PairTable = Float[Array, "n n inner heads rank"] | Float[Array, "inner heads rank"]


@check_arguments
def pair_translution(
    x: Float[Array, "*batch n dim"],
    w_q: Float[Array, "n n dim heads head_dim"] | Float[Array, "dim heads head_dim"],
    w_k: Float[Array, "n n dim heads head_dim"] | Float[Array, "dim heads head_dim"],
    w_v: Float[Array, "n n dim heads head_dim"] | Float[Array, "dim heads head_dim"],
    *,
    key_mask: Bool[Array, "*#batch n"] | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch heads n head_dim"]:
    """Self-attention whose projections belong to the pair of tokens.

    out_i = sum_j softmax_j(x_i Wq[i, j] . x_j Wk[i, j] / sqrt(head_dim)) x_j Wv[i, j]

    Masks, numerics and memory are those of
    `relattn.kernels.translution.attention.translution`.

    Args:
        x: Tokens, shape ``[*batch, n, dim]``.
        w_q: Of queries: a table, first axis the query, second the key,
            ``[n, n, dim, heads, head_dim]``, or one matrix for all pairs,
            ``[dim, heads, head_dim]``.
        w_k: Of keys, likewise; the query first here too.
        w_v: Of values, likewise.
        key_mask: True for keys that exist, shape ``[*batch, n]``.
        precision: Passed to einsum.

    Returns:
        Shape ``[*batch, heads, n, head_dim]``, in the dtype of ``x``.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        ValueError: If a table does not hold all pairs.

    Example:
        >>> import jax.numpy as jnp
        >>> x, w = jnp.ones((2, 3)), jnp.ones((2, 2, 3, 1, 1))
        >>> pair_translution(x, w, w, w).tolist()
        [[[3.0], [3.0]]]

    Source:
        Translution: Unifying Self-attention and Convolution, table 5.
    """
    projections = {"w_q": w_q, "w_k": w_k, "w_v": w_v}
    tables = PairTables(x.shape[-2])
    return attend(tables, x, x, projections, key_mask, precision)


@check_arguments
def pair_lor_translution(
    q: Float[Array, "*batch heads n head_dim"] | None,
    k: Float[Array, "*batch heads n head_dim"] | None,
    v: Float[Array, "*batch heads n value_dim"] | None,
    low_q: Float[Array, "*batch n inner"] | None,
    low_k: Float[Array, "*batch n inner"] | None,
    low_v: Float[Array, "*batch n inner"] | None,
    t_q: PairTable | None,
    t_k: PairTable | None,
    t_v: PairTable | None,
    *,
    key_mask: Bool[Array, "*#batch n"] | None = None,
    scale: float | None = None,
    average: bool = False,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[
    Float[Array, "*batch heads n value_dim"] | None,
    Float[Array, "*batch heads n rank"] | None,
]:
    """LoR-Translution whose low-rank projections belong to the pair of tokens.

    a_ij = (q_i . k_j + low_q_i Tq[i, j] . low_k_j Tk[i, j]) scale,
    out_i = sum_j softmax_j(a_ij) v_j,
    low_out_i = sum_j softmax_j(a_ij) low_v_j Tv[i, j].

    Args:
        q: Plain queries, or None, as in
            `relattn.kernels.translution.attention.lor_translution`, so everywhere.
        k: Plain keys, likewise.
        v: Plain values, likewise.
        low_q: Tokens for the low-rank queries, likewise.
        low_k: Tokens for the low-rank keys, likewise.
        low_v: Tokens for the low-rank values, likewise.
        t_q: Of low-rank queries: a table, first axis the query, second the key,
            ``[n, n, inner, heads, rank]``, or one matrix for all pairs.
        t_k: Of low-rank keys, likewise.
        t_v: Of low-rank values, likewise.
        key_mask: True for keys that exist, shape ``[*batch, n]``.
        scale: As in `lor_translution`.
        average: As in `lor_translution`.
        precision: Passed to einsum.

    Returns:
        ``out`` and ``low_out``, as in `lor_translution`.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        ValueError: If a table does not hold all pairs, or arguments that belong
            together are not given together.

    Example:
        >>> import jax.numpy as jnp
        >>> x, low = jnp.zeros((1, 2, 3)), jnp.ones((2, 1))
        >>> t = jnp.ones((2, 2, 1, 1, 1))
        >>> pair_lor_translution(x, x, x, low, low, low, t, t, t)[1].tolist()
        [[[1.0], [1.0]]]

    Source:
        Translution: Unifying Self-attention and Convolution, table 5.
    """
    length = check_low_rank((q, k, v), (low_q, low_k, low_v), (t_q, t_k, t_v), scale)
    return attend_low_rank(
        PairTables(length),
        (q, k, v),
        {"t_q": (low_q, t_q), "t_k": (low_k, t_k), "t_v": (low_v, t_v)},
        key_mask=key_mask,
        scale=scale,
        average=average,
        precision=precision,
    )


@check_arguments
def causal_translution_step(
    x: Float[Array, "*batch length dim"],
    w_q: Float[Array, "rows dim heads head_dim"] | Float[Array, "dim heads head_dim"],
    w_k: Float[Array, "rows dim heads head_dim"] | Float[Array, "dim heads head_dim"],
    w_v: Float[Array, "rows dim heads head_dim"] | Float[Array, "dim heads head_dim"],
    *,
    index: Int[Array, ""] | int,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch heads head_dim"]:
    """One token of `relattn.kernels.translution.attention.causal_translution`.

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
        The token's output, shape ``[*batch, heads, head_dim]``, in the dtype of ``x``.

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
    q_i: Float[Array, "*batch heads head_dim"] | None,
    k: Float[Array, "*batch heads n head_dim"] | None,
    v: Float[Array, "*batch heads n value_dim"] | None,
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
    Float[Array, "*batch heads value_dim"] | None,
    Float[Array, "*batch heads rank"] | None,
]:
    """One token of `relattn.kernels.translution.attention.causal_lor_translution`.

    Args:
        q_i: The token's plain query, shape ``[*batch, heads, head_dim]``, or None as
            in `causal_lor_translution`, so everywhere.
        k: Plain keys of the token at ``index`` and those before it; what comes after
            them does not matter. Shape ``[*batch, heads, n, head_dim]``.
        v: Plain values, likewise, ``[*batch, heads, n, value_dim]``.
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
        The token's ``out``, ``[*batch, heads, value_dim]``, and ``low_out``,
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

"""Translution and LoR-Translution: attention with a projection for each offset."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from relattn.kernels.checks import check_arguments, check_position
from relattn.kernels.precision import widen
from relattn.kernels.translution.core import (
    Index,
    attend,
    attend_low_rank,
    check_index,
    check_low_rank,
)
from relattn.kernels.translution.offset_index import CausalOffsets

Weights = (
    Float[Array, "rows dim heads head_dim"]
    | Float[Array, "n n dim heads head_dim"]
    | Float[Array, "dim heads head_dim"]
)


@check_arguments
def translution(
    x: Float[Array, "*batch n dim"],
    w_q: Weights,
    w_k: Weights,
    w_v: Weights,
    *,
    index: Index,
    key_mask: Bool[Array, "*#batch n"] | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch heads n head_dim"]:
    """Computes Translution: attention whose projections depend on the pair of tokens.

    out_i = sum_j softmax_j(x_i Wq[d] . x_j Wk[-d] / sqrt(head_dim)) x_j Wv[d]

    ``index`` selects the matrices of a pair:

    - `Offsets`: d = p_i - p_j, the offset on a grid, as above.
    - `CausalOffsets`: d = i - j for j <= i, for queries, keys and values alike.
    - `Pairs`: W[i, j], for queries, keys and values alike.

    Scores, softmax and sums are float32 or wider. A query without keys gives zeros.
    Memory holds the scores of every pair, and the queries, keys and values of the pairs
    of one offset, on TPUs of a row of queries, on GPUs of as many pairs as take a fixed
    number of bytes (with `Pairs`, of one query). Derivatives are in reverse mode
    only.

    Args:
        x: Tokens, shape ``[*batch, n, dim]``.
        w_q: Weights of the queries: a table ``[rows, dim, heads, head_dim]`` with the
            rows of ``index`` (with `Pairs`, ``[n, n, dim, heads, head_dim]``), or one
            matrix for all pairs, ``[dim, heads, head_dim]``.
        w_k: Weights of the keys, same shapes as ``w_q``.
        w_v: Weights of the values, same shapes as ``w_q``.
        index: `Offsets`, `CausalOffsets` or `Pairs`, of n tokens.
        key_mask: True for keys that exist, shape ``[*batch, n]``.
        precision: Passed to einsum.

    Returns:
        Shape ``[*batch, heads, n, head_dim]``, in the dtype of ``x``.

    Raises:
        ValueError: If shapes or dtypes do not fit together, ``index`` is for another
            number of tokens, or a table lacks rows.

    Example:
        >>> from relattn.kernels import Offsets
        >>> x, w = jnp.ones((2, 1)), jnp.zeros((3, 1, 1, 1))
        >>> w_v = w.at[:, 0, 0, 0].set(jnp.array([2.0, 4.0, 6.0]))  # d = -1, 0, 1
        >>> translution(x, w, w, w_v, index=Offsets((1, 2))).tolist()
        [[[3.0], [5.0]]]

    Source:
        Translution: Unifying Self-attention and Convolution, section 3.3, appendices C
        (causal) and H, table 5 (pairs).
    """
    check_index(index, x.shape[-2])
    return attend(index, x, x, (w_q, w_k, w_v), key_mask, precision)


Heads = Float[Array, "*batch heads n head_dim"] | None
Values = Float[Array, "*batch heads n value_dim"] | None
Low = Float[Array, "*batch n inner"] | None
Table = (
    Float[Array, "rows inner heads rank"]
    | Float[Array, "n n inner heads rank"]
    | Float[Array, "inner heads rank"]
    | None
)


@check_arguments
def lor_translution(
    qkv: tuple[Heads, Heads, Values],
    low: tuple[Low, Low, Low],
    tables: tuple[Table, Table, Table],
    *,
    index: Index,
    key_mask: Bool[Array, "*#batch n"] | None = None,
    scale: float | None = None,
    average: bool = False,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[Values, Float[Array, "*batch heads n rank"] | None]:
    """Computes LoR-Translution: attention plus a low-rank Translution.

    a_ij = (q_i . k_j + low_q_i Tq[d] . low_k_j Tk[-d]) scale,
    out_i = sum_j softmax_j(a_ij) v_j, low_out_i = sum_j softmax_j(a_ij) low_v_j Tv[d].

    The caller multiplies ``low_out``, its heads concatenated, by a matrix and adds it
    to ``out``. ``index``, masks, numerics and memory are those of `translution`.

    Args:
        qkv: Queries and keys ``[*batch, heads, n, head_dim]`` and values
            ``[*batch, heads, n, value_dim]``, or three None for the low-rank part
            alone.
        low: Tokens for the low-rank queries, keys and values, each
            ``[*batch, n, inner]``. The first two and their tables may be None together
            (no low-rank score), and the last and its table (no low-rank value).
        tables: Tables of the low-rank queries, keys and values, each
            ``[rows, inner, heads, rank]`` with the rows of ``index`` (with `Pairs`,
            ``[n, n, inner, heads, rank]``), or one matrix for all pairs,
            ``[inner, heads, rank]``.
        index: `Offsets`, `CausalOffsets` or `Pairs`, of n tokens.
        key_mask: True for keys that exist, shape ``[*batch, n]``.
        scale: Factor of the scores; None for 1 / sqrt(head_dim). Required without
            queries in ``qkv``.
        average: Whether to average the plain and low-rank parts of scores and outputs,
            as the authors' code does, instead of adding them, as their paper does. A
            part without counterpart is not halved.
        precision: Passed to einsum.

    Returns:
        ``out``, shape ``[*batch, heads, n, value_dim]`` in the dtype of the values, and
        ``low_out``, shape ``[*batch, heads, n, rank]`` in the dtype of ``low[2]``; None
        for a part that is not given.

    Raises:
        ValueError: If shapes or dtypes do not fit together, ``index`` is for another
            number of tokens, a table lacks rows, or arrays that belong together are not
            given together.

    Example:
        >>> from relattn.kernels import Offsets
        >>> x = jnp.zeros((1, 2, 3))
        >>> low, t = jnp.ones((2, 1)), jnp.zeros((3, 1, 1, 1))
        >>> t_v = t.at[:, 0, 0, 0].set(jnp.array([2.0, 4.0, 6.0]))  # d = -1, 0, 1
        >>> out, low_out = lor_translution(
        ...     (x, x, x), (low, low, low), (t, t, t_v), index=Offsets((1, 2)))
        >>> low_out.tolist()
        [[[3.0], [5.0]]]

    Source:
        Translution: Unifying Self-attention and Convolution, section 3.4, appendix C
        (causal), table 5 (pairs).
    """
    check_index(index, check_low_rank(qkv, low, tables, scale))
    return attend_low_rank(
        index,
        qkv,
        low,
        tables,
        key_mask=key_mask,
        scale=scale,
        average=average,
        precision=precision,
    )


StepWeights = (
    Float[Array, "rows dim heads head_dim"] | Float[Array, "dim heads head_dim"]
)


@check_arguments
def causal_translution_step(
    x: Float[Array, "*batch length dim"],
    w_q: StepWeights,
    w_k: StepWeights,
    w_v: StepWeights,
    *,
    index: Int[Array, ""] | int,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch heads head_dim"]:
    """Computes `translution` with `CausalOffsets` for one token, for decoding.

    out_i = sum_{j <= i} softmax_{j <= i}(x_i Wq[d] . x_j Wk[d] / sqrt(head_dim))
    x_j Wv[d], d = i - j, i = ``index``.

    Keys and values depend on the offset, so the cache holds the tokens themselves. A
    step costs the projections of ``length`` pairs.

    Args:
        x: Tokens, shape ``[*batch, length, dim]``; only rows up to ``index`` matter.
        w_q: Weights of the queries: a table with at least ``length`` rows,
            ``[rows, dim, heads, head_dim]``, or one matrix ``[dim, heads, head_dim]``.
        w_k: Weights of the keys, same shapes as ``w_q``.
        w_v: Weights of the values, same shapes as ``w_q``.
        index: The token's position in the sequence; may be traced.
        precision: Passed to einsum.

    Returns:
        The token's output, shape ``[*batch, heads, head_dim]``, in the dtype of ``x``.

    Raises:
        ValueError: If shapes or dtypes do not fit together, a table has fewer than
            ``length`` rows, or ``index`` is not below ``length``.

    Example:
        >>> x, w = jnp.ones((2, 1)), jnp.zeros((2, 1, 1, 1))
        >>> w_v = w.at[:, 0, 0, 0].set(jnp.array([2.0, 4.0]))  # d = 0, 1
        >>> causal_translution_step(x, w, w, w_v, index=1).tolist()
        [[3.0]]

    Source:
        Translution: Unifying Self-attention and Convolution, appendix C.
    """
    check_position(index, x.shape[-2])
    step = _CausalStep(x.shape[-2], index)
    x = step.zero_later(x)
    token = jax.lax.dynamic_slice_in_dim(x, index, 1, axis=-2)
    return attend(step, token, x, (w_q, w_k, w_v), None, precision)[..., 0, :]


CachedKeys = Float[Array, "*batch heads length head_dim"] | None
CachedValues = Float[Array, "*batch heads length value_dim"] | None
CachedLow = Float[Array, "*batch length inner"] | None
StepTable = (
    Float[Array, "rows inner heads rank"] | Float[Array, "inner heads rank"] | None
)


@check_arguments
def causal_lor_translution_step(
    qkv: tuple[Float[Array, "*batch heads head_dim"] | None, CachedKeys, CachedValues],
    low: tuple[Float[Array, "*batch inner"] | None, CachedLow, CachedLow],
    tables: tuple[StepTable, StepTable, StepTable],
    *,
    index: Int[Array, ""] | int,
    scale: float | None = None,
    average: bool = False,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[
    Float[Array, "*batch heads value_dim"] | None,
    Float[Array, "*batch heads rank"] | None,
]:
    """Computes `lor_translution` with `CausalOffsets` for one token, for decoding.

    a_ij = (q_i . k_j + low_q_i Tq[d] . low_k_j Tk[d]) scale,
    out_i = sum_{j <= i} softmax_{j <= i}(a_ij) v_j,
    low_out_i = sum_{j <= i} softmax_{j <= i}(a_ij) low_v_j Tv[d], d = i - j,
    i = ``index``. Keys and values after ``index`` have no effect.

    Args:
        qkv: The token's query ``[*batch, heads, head_dim]``, the keys
            ``[*batch, heads, length, head_dim]`` and the values
            ``[*batch, heads, length, value_dim]`` of all tokens; or three None for
            the low-rank part alone.
        low: The token's row for the low-rank query, ``[*batch, inner]``, and the tokens
            for the low-rank keys and values, ``[*batch, length, inner]``; or None, as
            in `lor_translution`.
        tables: Tables of the low-rank queries, keys and values, each
            ``[rows, inner, heads, rank]`` with at least ``length`` rows, or one matrix
            ``[inner, heads, rank]``, or None.
        index: The token's position in the sequence; may be traced.
        scale: Factor of the scores; None for 1 / sqrt(head_dim). Required without
            queries in ``qkv``.
        average: Whether to average the plain and low-rank parts of scores and outputs
            instead of adding them. A part without counterpart is not halved.
        precision: Passed to einsum.

    Returns:
        The token's ``out``, ``[*batch, heads, value_dim]``, and ``low_out``,
        ``[*batch, heads, rank]``.

    Raises:
        ValueError: If shapes or dtypes do not fit together, a table has fewer than
            ``length`` rows, ``index`` is not below ``length``, or arrays that belong
            together are not given together.

    Example:
        >>> x = jnp.zeros((1, 2, 3))
        >>> low, t = jnp.ones((2, 1)), jnp.zeros((2, 1, 1, 1))
        >>> t_v = t.at[:, 0, 0, 0].set(jnp.array([2.0, 4.0]))  # d = 0, 1
        >>> causal_lor_translution_step(
        ...     (x[:, 1], x, x), (low[1], low, low), (t, t, t_v), index=1
        ... )[1].tolist()
        [[3.0]]

    Source:
        Translution: Unifying Self-attention and Convolution, section 3.4, appendix C.
    """
    # The token's rows get an axis of one query.
    qkv, low = (
        (None if arrays[0] is None else arrays[0][..., None, :], *arrays[1:])
        for arrays in (qkv, low)
    )
    check_low_rank(qkv, low, tables, scale)
    length = next(x.shape[-2] for x in (qkv[1], low[1]) if x is not None)
    check_position(index, length)
    step = _CausalStep(length, index)
    outputs = attend_low_rank(
        step,
        (qkv[0], *step.zero_later(qkv[1:])),
        (low[0], *step.zero_later(low[1:])),
        tables,
        key_mask=None,
        scale=scale,
        average=average,
        precision=precision,
    )
    out, low_out = (None if x is None else x[..., 0, :] for x in outputs)
    return out, low_out


@dataclasses.dataclass(frozen=True)
class _CausalStep:
    """`CausalOffsets` of the one query at a position.

    The tokens are permuted into the order of the offsets, so the tables are not copied.
    """

    length: int
    position: Array | int

    @property
    def allowed(self) -> Array:
        return jnp.arange(self.length) <= self.position

    def zero_later(self, tokens):
        """Sets later tokens to zero, so that even a NaN there has no effect."""
        return jax.tree.map(lambda x: jnp.where(self.allowed[:, None], x, 0), tokens)

    def check_length(self, num_tokens: int) -> None:
        CausalOffsets(self.length).check_length(num_tokens)

    def check_table(self, name: str, table: Array) -> Array:
        return CausalOffsets(self.length).check_table(name, table)[: self.length]

    def scores(self, q, k, t_q, t_k, precision):
        # x_i Wq[d] . x_j Wk[d] by row d = i - j, then by key j.
        if t_q is not None:
            q = jnp.einsum("bnc,rche->brhe", q, t_q, precision=precision)
        k = self._reverse(k)
        if t_k is not None:
            k = jnp.einsum("brc,rche->brhe", k, t_k, precision=precision)
        # Widened before the product, which could overflow.
        scores = jnp.sum(widen(q) * widen(k), axis=-1)
        return jnp.moveaxis(self._reverse(scores), 1, 2)[:, :, None]

    def values(self, weights, v, t_v, precision):
        # sum_d weight_(i, i - d) x_(i - d) Wv[d]; rows d > i have no key.
        v = jnp.einsum("brc,rche->brhe", self._reverse(v), t_v, precision=precision)
        weights = jnp.where(self.allowed, self._reverse(weights, axis=3), 0.0)
        v = widen(v)
        return jnp.einsum("bhnr,brhe->bhne", weights, v, precision=precision)

    def _reverse(self, x, axis=1):
        """Permutes from the order of the keys to that of the offsets, and back."""
        positions = jnp.maximum(self.position - jnp.arange(self.length), 0)
        return jnp.take(x, positions, axis=axis)

"""Translution with a matrix for every pair of tokens: an absolute position encoding."""

from __future__ import annotations

import jax
from jaxtyping import Array, Bool, Float

from relattn.kernels.checks import check_arguments
from relattn.kernels.pair_tables import PairTables
from relattn.kernels.tables import attend, attend_low_rank, check_low_rank

PairTable = Float[Array, "n n inner heads rank"] | Float[Array, "inner heads rank"]


@check_arguments
def pair_translution(
    x: Float[Array, "*batch n dim"],
    w_q: Float[Array, "n n dim heads depth"] | Float[Array, "dim heads depth"],
    w_k: Float[Array, "n n dim heads depth"] | Float[Array, "dim heads depth"],
    w_v: Float[Array, "n n dim heads depth"] | Float[Array, "dim heads depth"],
    *,
    key_mask: Bool[Array, "*#batch n"] | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch heads n depth"]:
    """Self-attention whose projections belong to the pair of tokens.

    out_i = sum_j softmax_j(x_i Wq[i, j] . x_j Wk[i, j] / sqrt(depth)) x_j Wv[i, j]

    Masks, numerics and memory are those of
    `relattn.kernels.offset_projection.translution`.

    Args:
        x: Tokens, shape ``[*batch, n, dim]``.
        w_q: Of queries: a table, first axis the query, second the key,
            ``[n, n, dim, heads, depth]``, or one matrix for all pairs,
            ``[dim, heads, depth]``.
        w_k: Of keys, likewise; the query first here too.
        w_v: Of values, likewise.
        key_mask: True for keys that exist, shape ``[*batch, n]``.
        precision: Passed to einsum.

    Returns:
        Shape ``[*batch, heads, n, depth]``, in the dtype of ``x``.

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
    q: Float[Array, "*batch heads n key_depth"] | None,
    k: Float[Array, "*batch heads n key_depth"] | None,
    v: Float[Array, "*batch heads n depth"] | None,
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
    Float[Array, "*batch heads n depth"] | None,
    Float[Array, "*batch heads n rank"] | None,
]:
    """LoR-Translution whose low-rank projections belong to the pair of tokens.

    a_ij = (q_i . k_j + low_q_i Tq[i, j] . low_k_j Tk[i, j]) scale,
    out_i = sum_j softmax_j(a_ij) v_j,
    low_out_i = sum_j softmax_j(a_ij) low_v_j Tv[i, j].

    Args:
        q: Plain queries, or None, as in
            `relattn.kernels.low_rank_offset.lor_translution`, so everywhere.
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

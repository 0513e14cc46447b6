"""LoR-Translution: plain attention and a low-rank part that depends on the offset."""

from __future__ import annotations

import jax
from jaxtyping import Array, Bool, Float

from relattn.kernels.checks import check_arguments
from relattn.kernels.offset_tables import OffsetTables
from relattn.kernels.tables import attend_low_rank, check_low_rank
from relattn.offsets import Grid, check_grid

Heads = Float[Array, "*batch heads n depth"]
Low = Float[Array, "*batch n inner"]
Table = Float[Array, "rows inner heads rank"] | Float[Array, "inner heads rank"]


@check_arguments
def lor_translution(
    q: Float[Array, "*batch heads n key_depth"] | None,
    k: Float[Array, "*batch heads n key_depth"] | None,
    v: Float[Array, "*batch heads n depth"] | None,
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
    `relattn.kernels.offset_projection.translution`.

    Args:
        q: Plain queries, shape ``[*batch, heads, n, key_depth]``, or None with ``k``
            and ``v``: the low-rank part alone.
        k: Plain keys, likewise.
        v: Plain values, shape ``[*batch, heads, n, depth]``, likewise.
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
        scale: Of the scores; 1 / sqrt(key_depth) by default, to be given without ``q``.
        average: Whether plain and low-rank parts of scores and outputs are averaged,
            as in the authors' code, not summed, as in their paper. Without plain part
            or without low-rank part nothing is halved.
        precision: Passed to einsum.

    Returns:
        ``out``, shape ``[*batch, heads, n, depth]`` in the dtype of ``v``, and
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
    q: Float[Array, "*batch heads n key_depth"] | None,
    k: Float[Array, "*batch heads n key_depth"] | None,
    v: Float[Array, "*batch heads n depth"] | None,
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

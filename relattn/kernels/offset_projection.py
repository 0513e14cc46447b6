"""Translution: self-attention whose projections depend on the offset of the pair."""

from __future__ import annotations

import jax
from jaxtyping import Array, Bool, Float

from relattn.kernels.checks import check_arguments
from relattn.kernels.offset_tables import OffsetTables
from relattn.kernels.tables import attend
from relattn.offsets import Grid, check_grid


@check_arguments
def translution(
    x: Float[Array, "*batch n dim"],
    w_q: Float[Array, "rows dim heads depth"] | Float[Array, "dim heads depth"],
    w_k: Float[Array, "rows dim heads depth"] | Float[Array, "dim heads depth"],
    w_v: Float[Array, "rows dim heads depth"] | Float[Array, "dim heads depth"],
    *,
    grid: Grid,
    num_prefix: int = 0,
    key_mask: Bool[Array, "*#batch n"] | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch heads n depth"]:
    """Translution on a grid.

    out_i = sum_j softmax_j(x_i Wq[d] . x_j Wk[-d] / sqrt(depth)) x_j Wv[d],
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
            ``[rows, dim, heads, depth]``, or one matrix for all offsets,
            ``[dim, heads, depth]``.
        w_k: Of keys, likewise.
        w_v: Of values, likewise.
        grid: Height and width, or length, of the tokens after the prefix.
        num_prefix: Number of prefix tokens.
        key_mask: True for keys that exist, shape ``[*batch, n]``.
        precision: Passed to einsum.

    Returns:
        Shape ``[*batch, heads, n, depth]``, in the dtype of ``x``.

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
    w_q: Float[Array, "rows dim heads depth"] | Float[Array, "dim heads depth"],
    w_k: Float[Array, "rows dim heads depth"] | Float[Array, "dim heads depth"],
    w_v: Float[Array, "rows dim heads depth"] | Float[Array, "dim heads depth"],
    *,
    key_mask: Bool[Array, "*#batch n"] | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch heads n depth"]:
    """Translution of every token with itself and those before it.

    out_i = sum_{j <= i} softmax_{j <= i}(a_ij) x_j Wv[d],
    a_ij = x_i Wq[d] . x_j Wk[d] / sqrt(depth), d = i - j.

    Args:
        x: Tokens, shape ``[*batch, n, dim]``.
        w_q: Of queries: a table of the offsets 0, 1, ..., at least n of them,
            ``[rows, dim, heads, depth]``, or one matrix for all offsets,
            ``[dim, heads, depth]``.
        w_k: Of keys, likewise.
        w_v: Of values, likewise.
        key_mask: True for keys that exist, shape ``[*batch, n]``.
        precision: Passed to einsum.

    Returns:
        Shape ``[*batch, heads, n, depth]``, in the dtype of ``x``.

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

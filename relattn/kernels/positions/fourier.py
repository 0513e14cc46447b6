"""Projections that are sums of waves of the offset: Translution in linear time.

W[d] = W_0 + sum_r cos(w_r . d) A_r + sin(w_r . d) B_r, for the offset d = p_i - p_j of
query i and key j. By the addition theorems each wave is a sum of two products, each of
a factor of the query and a factor of the key. So attention with wider values, or
wider queries and keys, computes what Translution computes with a table of W[d].
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from relattn.kernels.checks import check_arguments
from relattn.kernels.masks import zero_prefix
from relattn.kernels.positions.sinusoids import turns
from relattn.kernels.precision import wide_einsum, widen
from relattn.messages import shorten
from relattn.offsets import (
    Torus,
    check_prefix,
    check_torus,
    is_whole,
    table_offsets,
)


def torus_frequencies(
    torus: Torus, num_frequencies: int | None = None
) -> Float[np.ndarray, "waves axes"]:
    """Returns the frequency vectors of the waves that fit a torus.

    w = 2 pi k / size with whole numbers k of periods along each axis, the longest waves
    first. Only one of k and -k, modulo the sizes, is included, and k = 0 is not. With
    all of them, every table of offsets is a constant plus a sum of waves: its discrete
    Fourier transform.

    Args:
        torus: Size of each axis, in tokens.
        num_frequencies: Number of vectors; by default all. If there are fewer, all.

    Returns:
        Frequencies in radians per token, float32, shape ``[waves, axes]``.

    Raises:
        ValueError: If ``torus`` is a plain grid, or ``num_frequencies`` is negative.

    Example:
        >>> (torus_frequencies(Torus((5,))) * 5 / (2 * np.pi)).round(3).tolist()
        [[1.0], [2.0]]

    Source:
        The discrete Fourier transform.
    """
    waves = _torus_periods(torus, num_frequencies) * turns(torus)
    return waves.astype(np.float32)


def _torus_periods(torus, num_frequencies):
    """Returns whole numbers of periods, [waves, axes], the longest waves first."""
    check_torus(torus)
    if num_frequencies is not None and not (
        is_whole(num_frequencies) and num_frequencies >= 0
    ):
        raise ValueError(
            "num_frequencies must be a whole number of at least 0, or None, got "
            f"{shorten(num_frequencies)}"
        )
    # The shortest offsets: k, and in the same order -k.
    periods = table_offsets(torus)
    index = np.ravel_multi_index(tuple((-periods % np.array(torus)).T), torus)
    kept = [
        k > opposite or (k == opposite and any(k))
        for k, opposite in zip(periods.tolist(), periods[index].tolist(), strict=True)
    ]
    periods = periods[kept]
    order = np.argsort(np.linalg.norm(periods * turns(torus), axis=1), kind="stable")
    return periods[order[:num_frequencies]]


def same_waves(old: Torus, new: Torus, num_frequencies: int) -> bool:
    """Returns whether the longest waves of two tori are the same, in the same order.

    They are the same if as many periods fit each axis, and if they have a sine on both.

    Args:
        old: Size of each axis, in tokens.
        new: Size of each axis of the other torus.
        num_frequencies: Number of waves.

    Example:
        >>> same_waves(Torus((7, 7)), Torus((9, 9)), 8)
        True
        >>> same_waves(Torus((4, 4)), Torus((4, 8)), 8)
        False
    """

    def waves(torus):
        periods = _torus_periods(torus, num_frequencies)
        return periods.tolist(), _own_opposite(periods, torus).tolist()

    return waves(old) == waves(new)


def _own_opposite(periods, torus):
    """Returns which waves equal their opposites, so that their sine is 0."""
    return (2 * periods % np.array(torus) == 0).all(axis=1)


def _table_waves(torus, num_frequencies):
    """Returns cos(w . d) and sin(w . d), [waves, 2, rows]; and twice their mean square.

    The mean square is 1/2, or 1 of a wave that equals its opposite, whose sine is 0.
    """
    periods = _torus_periods(torus, num_frequencies)
    # Exact in whole numbers, before the division.
    parts = periods[:, None] * table_offsets(torus) % np.array(torus)
    angles = 2 * np.pi * (parts / np.array(torus)).sum(axis=-1)
    waves = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    return waves, 1.0 + _own_opposite(periods, torus)


def table_spectrum(
    table: Float[Array | np.ndarray, " rows *matrix"],
    *,
    torus: Torus,
    num_frequencies: int | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[Float[Array, "*matrix"], Float[Array, "waves 2 *matrix"]]:
    """Computes the waves that sum to a table of offsets on a torus.

    A_r = 2 mean_d cos(w_r . d) W[d] and B_r = 2 mean_d sin(w_r . d) W[d]; half of them,
    if w_r and -w_r have the same waves. They are the real and imaginary parts of the
    discrete Fourier transform. With fewer than all frequencies, `spectrum_table` makes
    the low-pass form of the table of them, and the projections x A_r, x B_r of
    `widen_values` or `widen_queries` apply it in any attention.

    Args:
        table: W, a number or matrix for each offset, in the order of
            `relattn.offsets.table_offsets`, shape ``[rows, *matrix]``.
        torus: Size of each axis, in tokens.
        num_frequencies: Number of waves, those of `torus_frequencies`; by default all.
        precision: Passed to einsum.

    Returns:
        The mean W_0, ``[*matrix]``, and A and B, ``[waves, 2, *matrix]``, float32 or
        wider.

    Raises:
        ValueError: If ``torus`` is a plain grid, the table has another number of rows
            than it, or ``num_frequencies`` is negative.

    Example:
        >>> table = jnp.array([14.0, 6.0, 2.0, 6.0])  # d = 0, 1, 2, -1
        >>> mean, waves = table_spectrum(table, torus=Torus((4,)))
        >>> float(mean.round()), waves[:, 0].round().tolist()
        (7.0, [6.0, 1.0])

    Source:
        The discrete Fourier transform; the tables: Translution: Unifying Self-attention
        and Convolution, section 3.3.
    """
    check_torus(torus)
    num_rows = math.prod(torus)
    if table.shape[0] != num_rows:
        raise ValueError(
            f"a torus of {'x'.join(map(str, torus))} tokens has {num_rows} offsets, "
            f"but the table {table.shape[0]} rows: leave out those of prefix tokens"
        )
    waves, counts = _table_waves(torus, num_frequencies)
    table = widen(table)
    shares = jnp.asarray(waves * (2 / counts / num_rows)[:, None, None], table.dtype)
    parts = wide_einsum(precision)("wtr,r...->wt...", shares, table)
    return jnp.mean(table, axis=0), parts


def spectrum_table(
    mean: Float[Array | np.ndarray, "*matrix"],
    spectrum: Float[Array | np.ndarray, "waves 2 *matrix"],
    *,
    torus: Torus,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, " rows *matrix"]:
    """Computes the table of offsets that is the sum of waves on a torus.

    W[d] = W_0 + sum_r cos(w_r . d) A_r + sin(w_r . d) B_r, the inverse of
    `table_spectrum`.

    Args:
        mean: W_0, a number or matrix, shape ``[*matrix]``.
        spectrum: A and B of the waves of `torus_frequencies`, from the first on, shape
            ``[waves, 2, *matrix]``.
        torus: Size of each axis, in tokens.
        precision: Passed to einsum.

    Returns:
        W, in the order of `relattn.offsets.table_offsets`, shape ``[rows, *matrix]``,
        float32 or wider.

    Raises:
        ValueError: If shapes do not fit together, ``torus`` is a plain grid, or it has
            fewer waves.

    Example:
        >>> torus, table = Torus((4,)), jnp.array([14.0, 6.0, 2.0, 6.0])
        >>> mean, waves = table_spectrum(table, torus=torus)
        >>> spectrum_table(mean, waves[:1], torus=torus).round().tolist()
        [13.0, 7.0, 1.0, 7.0]

    Source:
        The discrete Fourier transform.
    """
    num_waves = spectrum.shape[0]
    if spectrum.shape[1:] != (2, *mean.shape):
        raise ValueError(
            f"the spectrum of matrices of shape {mean.shape} must have shape [waves, "
            f"{', '.join(map(str, (2, *mean.shape)))}], got {spectrum.shape}"
        )
    waves, _ = _table_waves(torus, num_waves)
    if len(waves) < num_waves:
        raise ValueError(
            f"a torus of {'x'.join(map(str, torus))} tokens has {len(waves)} waves, "
            f"but the spectrum {num_waves}: leave out the last"
        )
    mean, spectrum = widen(mean), widen(spectrum)
    waves = jnp.asarray(waves, spectrum.dtype)
    return mean + wide_einsum(precision)("wtr,wt...->r...", waves, spectrum)


@check_arguments
def position_waves(
    positions: Float[Array | np.ndarray, "*#batch n axes"],
    frequencies: Float[Array | np.ndarray, "*#batch waves axes"],
    *,
    num_prefix: int = 0,
) -> Float[Array, "*batch n waves 2"]:
    """Computes the cosine and sine of every wave at every position.

    [cos(w_r . p_i), sin(w_r . p_i)]; zeros for prefix tokens. Positions may be any real
    vectors, and differ between examples.

    Args:
        positions: p, in tokens, shape ``[*batch, n, axes]``.
        frequencies: w, radians per token, shape ``[*batch, waves, axes]``.
        num_prefix: Number of prefix tokens.

    Returns:
        Waves, float32 or wider, shape ``[*batch, n, waves, 2]``.

    Raises:
        ValueError: If shapes or dtypes do not fit together, or ``num_prefix`` is
            negative or exceeds n.

    Example:
        >>> waves = position_waves(jnp.array([[0.0], [1.0]]), jnp.array([[jnp.pi / 2]]))
        >>> abs(waves[:, 0]).round(3).tolist()
        [[1.0, 0.0], [0.0, 1.0]]

    Source:
        See `widen_values`, `widen_queries` and `append_waves`, which take the waves.
    """
    num_tokens = positions.shape[-2]
    check_prefix(num_tokens, num_prefix)
    # A product and a sum, not a matmul, which accelerators compute in lower precision.
    positions = widen(positions)[..., :, None, :]
    angles = jnp.sum(positions * widen(frequencies)[..., None, :, :], axis=-1)
    waves = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)
    waves = zero_prefix(waves, num_prefix)
    return waves.reshape(*angles.shape[:-1], 2, angles.shape[-1]).swapaxes(-1, -2)


@check_arguments
def widen_values(
    v: Float[Array, "*batch n value_dim"],
    projections: Float[Array, "*batch n waves 2 width"],
    waves: Float[Array, "*#batch n waves 2"],
) -> Float[Array, "*batch n wider"]:
    """Widens values so that attention can apply a matrix that depends on the offset.

    With a_j = x_j A_r, b_j = x_j B_r and the waves c_j, s_j of key j:
    v'_j = [v_j, c_j a_j - s_j b_j, s_j a_j + c_j b_j, ...] for every wave r. Attention
    to v' with any weights alpha, followed by `combine_values`, gives
    sum_j alpha_ij (v_j + sum_r cos(w_r . d) x_j A_r + sin(w_r . d) x_j B_r),
    d = p_i - p_j.

    Args:
        v: Values, shape ``[*batch, n, value_dim]``.
        projections: a and b, shape ``[*batch, n, waves, 2, width]``. ``width`` is
            ``value_dim``, or the rank of the matrices, see `combine_values`.
        waves: c and s from `position_waves`, shape ``[*batch, n, waves, 2]``.

    Returns:
        Shape ``[*batch, n, value_dim + 2 * waves * width]``, in the dtype of ``v``;
        computed in float32 or wider.

    Raises:
        ValueError: If shapes or dtypes do not fit together.

    Example:
        >>> waves = position_waves(jnp.arange(3.0)[:, None], jnp.array([[0.3]]))
        >>> widen_values(jnp.ones((3, 5)), jnp.ones((3, 1, 2, 5)), waves).shape
        (3, 15)

    Source:
        Translution: Unifying Self-attention and Convolution, section 3.3, with a table
        that is a sum of waves; rotated values: Garcia-Castellanos et al., RoVE.
    """
    (a, b), (c, s) = _pairs(projections), _pairs(waves[..., None])
    return _append(v, jnp.stack([c * a - s * b, s * a + c * b], axis=-2))


@check_arguments
def combine_values(
    out: Float[Array, "*batch n wider"],
    waves: Float[Array, "*#batch n waves 2"],
    *,
    basis: Float[Array, "*#batch waves rank value_dim"] | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch n value_dim"]:
    """Combines the outputs of attention to the values of `widen_values`.

    out_i + sum_r (c_i o_ir + s_i o'_ir) V_r, where c_i, s_i are the waves of query i,
    o_ir and o'_ir the outputs for the two parts of wave r, and V_r = 1 without
    ``basis``.

    With ``basis``, the matrices of wave r are A_r = U_r V_r and B_r = U'_r V_r, of the
    rank of ``basis``; the projections are x U_r and x U'_r, and the values as much
    narrower.

    Args:
        out: Outputs, shape ``[*batch, n, value_dim + 2 * waves * width]``.
        waves: c and s of the queries, shape ``[*batch, n, waves, 2]``.
        basis: V, shape ``[*batch, waves, rank, value_dim]``.
        precision: Passed to einsum.

    Returns:
        Shape ``[*batch, n, value_dim]``, in the dtype of ``out``; computed in float32
        or wider.

    Raises:
        ValueError: If shapes or dtypes do not fit together.

    Example:
        >>> waves = position_waves(jnp.arange(3.0)[:, None], jnp.array([[0.3]]))
        >>> v, a_and_b = jnp.ones((3, 5)), jnp.zeros((3, 1, 2, 5)).at[:, :, 0].set(1.0)
        >>> wide = widen_values(v, a_and_b, waves)
        >>> combine_values(wide[:1], waves[:1])[0, 0]  # 1 + cos(0)
        Array(2., dtype=float32)

    Source:
        See `widen_values`.
    """
    num_waves, wider = waves.shape[-2], out.shape[-1]
    if basis is None:
        rank = value_dim = wider // (1 + 2 * num_waves)
    else:
        rank, value_dim = basis.shape[-2:]
    if wider != value_dim + 2 * num_waves * rank:
        needed = f"{value_dim} + 2 * {num_waves} * {rank}"
        if basis is None:
            needed = f"a multiple of {1 + 2 * num_waves}"
        raise ValueError(
            f"outputs for {num_waves} waves need a width of {needed}, got {wider}"
        )
    parts = widen(out[..., value_dim:])
    parts = parts.reshape(*out.shape[:-1], num_waves, 2, rank)
    # c_i o_ir + s_i o'_ir
    sums = jnp.sum(parts * waves[..., None], axis=-2)
    if basis is None:
        added = jnp.sum(sums, axis=-2)
    else:
        added = wide_einsum(precision)("...nwr,...wrd->...nd", sums, basis)
    return (widen(out[..., :value_dim]) + added).astype(out.dtype)


@check_arguments
def widen_queries(
    q: Float[Array, "*batch n head_dim"],
    projections: Float[Array, "*batch n waves 2 width"],
    waves: Float[Array, "*#batch n waves 2"],
) -> Float[Array, "*batch n wider"]:
    """Widens queries, for scores with a query that depends on the offset.

    With a_i = x_i A_r, b_i = x_i B_r and the waves c_i, s_i of query i:
    q'_i = [q_i, c_i a_i + s_i b_i, s_i a_i - c_i b_i, ...] for every wave r, times
    (wider / head_dim)^(1/4). With the keys of `widen_keys`, q'_i . k'_j / sqrt(wider) =
    (q_i + sum_r cos(w_r . d) x_i A_r + sin(w_r . d) x_i B_r) . k_j / sqrt(head_dim),
    d = p_i - p_j. These are the scores of softmax attention, and what random features
    estimate.

    Where the keys depend on the offset instead, as x_j Wk[-d], swap the two: widen the
    keys by this function, with projections of the keys' tokens, and the queries by
    `widen_keys`.

    Args:
        q: Queries, shape ``[*batch, n, head_dim]``.
        projections: a and b, shape ``[*batch, n, waves, 2, width]``. ``width`` is
            ``head_dim``, or the rank of the matrices, see `widen_keys`.
        waves: c and s from `position_waves`, shape ``[*batch, n, waves, 2]``.

    Returns:
        Shape ``[*batch, n, head_dim + 2 * waves * width]``, in the dtype of ``q``;
        computed in float32 or wider.

    Raises:
        ValueError: If shapes or dtypes do not fit together.

    Example:
        >>> waves = position_waves(jnp.arange(3.0)[:, None], jnp.array([[0.3]]))
        >>> widen_queries(jnp.ones((3, 5)), jnp.ones((3, 1, 2, 5)), waves).shape
        (3, 15)

    Source:
        Translution: Unifying Self-attention and Convolution, section 3.3, with a table
        that is a sum of waves.
    """
    (a, b), (c, s) = _pairs(projections), _pairs(waves[..., None])
    return _append(q, jnp.stack([c * a + s * b, s * a - c * b], axis=-2), scaled=True)


@check_arguments
def widen_keys(
    k: Float[Array, "*batch n head_dim"],
    waves: Float[Array, "*#batch n waves 2"],
    *,
    basis: Float[Array, "*#batch waves rank head_dim"] | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch n wider"]:
    """Widens keys, for the queries of `widen_queries`.

    k'_j = [k_j, c_j V_r k_j, s_j V_r k_j, ...] for every wave r, times
    (wider / head_dim)^(1/4), with V_r = 1 without ``basis``. With ``basis``, the
    matrices of wave r are A_r = U_r V_r and B_r = U'_r V_r, and the projections of
    `widen_queries` are x U_r and x U'_r.

    Args:
        k: Keys, shape ``[*batch, n, head_dim]``.
        waves: c and s from `position_waves`, shape ``[*batch, n, waves, 2]``.
        basis: V, shape ``[*batch, waves, rank, head_dim]``.
        precision: Passed to einsum.

    Returns:
        Shape ``[*batch, n, head_dim + 2 * waves * width]``, in the dtype of ``k``;
        computed in float32 or wider.

    Raises:
        ValueError: If shapes or dtypes do not fit together.

    Example:
        >>> waves = position_waves(jnp.arange(3.0)[:, None], jnp.array([[0.3]]))
        >>> widen_keys(jnp.ones((3, 5)), waves).shape
        (3, 15)
        >>> widen_keys(jnp.ones((3, 5)), waves, basis=jnp.ones((1, 2, 5))).shape
        (3, 9)

    Source:
        See `widen_queries`.
    """
    if basis is None:
        projected = widen(k)[..., None, :]
    else:
        projected = wide_einsum(precision)("...nd,...wrd->...nwr", k, basis)
    parts = projected[..., None, :] * waves[..., None]
    return _append(k, parts, scaled=True)


@check_arguments
def append_waves(
    q: Float[Array, "*batch n head_dim"],
    k: Float[Array, "*batch n head_dim"],
    coefficients: Float[Array, "*#batch waves 2"],
    waves: Float[Array, "*#batch n waves 2"],
) -> tuple[Float[Array, "*batch n wider"], Float[Array, "*batch n wider"]]:
    """Appends waves to queries and keys, which add a bias of the offset to the scores.

    With the coefficients (a, b) and the waves (c, s) of each token,
    q'_i = [q_i, a c_i - b s_i, a s_i + b c_i, ...] and
    k'_j = [k_j, a c_j + b s_j, a s_j - b c_j, ...], the waves times head_dim^(1/4), and
    all times (wider / head_dim)^(1/4). Then q'_i . k'_j / sqrt(wider) =
    q_i . k_j / sqrt(head_dim) + sum_r (a^2 - b^2) cos(w_r . d) - 2 a b sin(w_r . d),
    d = p_i - p_j: any sum of waves, split equally between queries and keys. These are
    the scores of softmax attention, and what random features estimate, in time linear
    in n, for positions that need no grid.

    Args:
        q: Queries, shape ``[*batch, n, head_dim]``.
        k: Keys, shape ``[*batch, n, head_dim]``.
        coefficients: (a, b), shape ``[*batch, waves, 2]``.
        waves: c and s from `position_waves`, shape ``[*batch, n, waves, 2]``.

    Returns:
        Queries and keys, shape ``[*batch, n, head_dim + 2 * waves]``, in their dtypes;
        computed in float32 or wider.

    Raises:
        ValueError: If shapes or dtypes do not fit together.

    Example:
        >>> waves = position_waves(jnp.arange(3.0)[:, None], jnp.array([[0.3]]))
        >>> q, k = append_waves(*jnp.ones((2, 3, 5)), jnp.ones((1, 2)), waves)
        >>> q.shape
        (3, 7)

    Source:
        Choromanski et al., Learning a Fourier Transform for Linear Relative Positional
        Encodings in Transformers, section 3; the equal split between queries and keys
        is ours.
    """
    (c, s), scale = _pairs(waves[..., None]), q.shape[-1] ** 0.25
    a, b = _pairs(scale * widen(coefficients)[..., None, :, :, None])

    def append(x, *pair):
        parts = jnp.stack(pair, axis=-2)
        parts = jnp.broadcast_to(parts, (*x.shape[:-1], *parts.shape[-3:]))
        return _append(x, parts, scaled=True)

    queries = append(q, a * c - b * s, a * s + b * c)
    return queries, append(k, a * c + b * s, a * s - b * c)


def _pairs(x):
    """Splits [..., waves, 2, width] along the axis of 2, in float32 or wider."""
    x = widen(x)
    return x[..., 0, :], x[..., 1, :]


def _append(x, parts, *, scaled=False):
    """Appends [..., waves, 2, width] to x, in its dtype.

    ``scaled`` makes up for the division of scores by sqrt(wider).
    """
    num_waves, _, width = parts.shape[-3:]
    parts = parts.reshape(*x.shape[:-1], 2 * num_waves * width)
    wide = jnp.concatenate([widen(x), parts], axis=-1)
    if scaled:
        wide = wide * (wide.shape[-1] / x.shape[-1]) ** 0.25
    return wide.astype(x.dtype)

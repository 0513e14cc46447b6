"""Sinusoids of positions: absolute, or constrained so that scores depend on offsets."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from relattn.kernels.checks import check_arguments
from relattn.kernels.masks import zero_prefix
from relattn.kernels.precision import widen
from relattn.offsets import Grid, check_prefix


@check_arguments
def length_scale_frequencies(
    num_scales: int, base: float = 64.0
) -> Float[Array, " num_scales"]:
    """Computes the initial frequencies of the constrained sinusoids.

    w_s = base^(-s / num_scales), s = 0 .. num_scales - 1

    Args:
        num_scales: Number of length scales, shared by the axes.
        base: Base of the geometric series.

    Returns:
        Frequencies in radians per token, float32, shape ``[num_scales]``.

    Raises:
        ValueError: If ``num_scales`` is less than 1 or no whole number, or ``base`` is
            not positive.

    Example:
        >>> [round(float(w), 4) for w in length_scale_frequencies(4)]
        [1.0, 0.3536, 0.125, 0.0442]

    Source:
        Horn et al., Translational Equivariance in Kernelizable Attention, the authors'
        code; appendix A.2 only says "as conventional absolute positional encodings".
    """
    if num_scales < 1 or not base > 0:
        raise ValueError(
            "length scales need num_scales >= 1 and base > 0, got "
            f"num_scales={num_scales} and base={base}"
        )
    return _geometric_frequencies(num_scales, base, jnp.float32)


@check_arguments
def absolute_frequencies(
    num: int, base: float = 32000.0, dtype: jax.typing.DTypeLike = jnp.float32
) -> Float[Array, " num"]:
    """Computes the initial frequencies of the absolute sinusoids added to the tokens.

    w_i = base^(-i / num), i = 0 .. num - 1. For a grid num is dim / 4, so that
    `sinusoids` of its two axes has width dim.

    Args:
        num: Number of frequencies, shared by the axes.
        base: Base of the geometric series.
        dtype: Dtype of the result.

    Returns:
        Frequencies in radians per token, shape ``[num]``.

    Raises:
        ValueError: If ``num`` is less than 1 or no whole number, ``base`` is not
            positive or ``dtype`` is not one of floats.

    Example:
        >>> absolute_frequencies(2, base=100.0).round(3).tolist()[0]
        1.0

    Source:
        Vaswani et al., Attention Is All You Need, section 3.5.
    """
    if num < 1:
        raise ValueError(
            "absolute sinusoids need num >= 1, a width of at least 2 features per "
            f"axis, got num={num}"
        )
    if not base > 0:
        raise ValueError(f"the base of a series of frequencies must be > 0, got {base}")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"frequencies need a dtype of floats, got {jnp.dtype(dtype)}")
    return _geometric_frequencies(num, base, dtype)


def turns(grid: Grid) -> Float[np.ndarray, " axes"]:
    """Computes the frequency of one turn around a torus, 2 pi / size for each axis.

    Args:
        grid: Size of each axis, in tokens.

    Returns:
        Frequencies in radians per token, float32, shape ``[axes]``.

    Example:
        >>> turns((2, 4)).round(2).tolist()
        [3.140000104904175, 1.5700000524520874]
    """
    return (2 * np.pi / np.array(grid)).astype(np.float32)


@check_arguments
def sinusoids(
    positions: Float[Array | np.ndarray, "n axes"],
    frequencies: Float[Array | np.ndarray, " scales"],
    *,
    num_prefix: int = 0,
) -> Float[Array, "n 2*axes*scales"]:
    """Computes sines and cosines of positions, with frequencies shared by the axes.

    u(p) = [sin w_s p_axis, cos w_s p_axis] for every axis and, within it, every scale
    s; zeros for prefix tokens.

    Args:
        positions: Positions in tokens, possibly fractional, shape ``[n, axes]``.
        frequencies: w, radians per token, shape ``[scales]``.
        num_prefix: Number of prefix tokens.

    Returns:
        Features, float32 or wider, shape ``[n, 2 * axes * scales]``.

    Raises:
        ValueError: If shapes or dtypes do not fit together, or ``num_prefix`` is
            negative or exceeds n.

    Example:
        >>> u = sinusoids(jnp.array([[0.0], [1.0]]), jnp.array([1.0]))
        >>> np.asarray(u, float).round(2).tolist()
        [[0.0, 1.0], [0.84, 0.54]]

    Source:
        Horn et al., Translational Equivariance in Kernelizable Attention, section 2.3.
    """
    num_tokens = positions.shape[0]
    check_prefix(num_tokens, num_prefix)
    # In half precision, large angles lose their phase.
    # w_s p_axis
    angles = widen(positions)[:, :, None] * widen(frequencies)
    # [sin w_s p_axis, cos w_s p_axis]
    pairs = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return zero_prefix(pairs.reshape(num_tokens, -1), num_prefix)


@check_arguments
def constrained_sinusoids(
    u: Float[Array, "n width"],
    coefficients: Float[Array, "*leading pairs 2"],
    *,
    per_token: bool = False,
) -> Float[Array, "*heads n width"]:
    """Computes the query side of sinusoids whose scores depend only on the offset.

    q_i = u_i B with B = blockdiag([[a, b], [-b, a]]) acting on row vectors. With the
    keys k_j = u_j the scores are (Lemma 1)
    q_i . k_j = sum_s a_s cos w_s (p_i - p_j) + b_s sin w_s (p_i - p_j).

    Args:
        u: Result of `sinusoids`, shape ``[n, 2 * pairs]``.
        coefficients: The pair (a, b) of every axis and scale, in the order of ``u``,
            shape ``[*heads, pairs, 2]``, or ``[*heads, n, pairs, 2]`` with
            ``per_token``.
        per_token: Whether every query token has separate coefficients.

    Returns:
        Position part of the queries, float32 or wider, shape
        ``[*heads, n, 2 * pairs]``.

    Raises:
        ValueError: If shapes or dtypes do not fit together, or ``coefficients`` do not
            have one pair for each sine and cosine of ``u``.

    Example:
        >>> u = sinusoids(jnp.array([[0.0], [1.0]]), jnp.array([0.5]))
        >>> constrained_sinusoids(u, jnp.array([[1.0, 0.0]])).shape
        (2, 2)

    Source:
        Horn et al., Translational Equivariance in Kernelizable Attention, section 2.3,
        Lemma 1.
    """
    num_tokens, width = u.shape
    *leading, num_pairs, _ = coefficients.shape
    if width != 2 * num_pairs:
        raise ValueError(
            f"{num_pairs} pairs of coefficients need sinusoids of width "
            f"{2 * num_pairs}, got u of width {width}"
        )
    if per_token and (not leading or leading[-1] != num_tokens):
        raise ValueError(
            f"coefficients per token need shape [*heads, {num_tokens}, {num_pairs}, 2]"
            f", got {list(coefficients.shape)}"
        )
    if not per_token:
        coefficients = coefficients[..., None, :, :]
    a, b = jnp.moveaxis(widen(coefficients), -1, 0)
    sines, cosines = jnp.moveaxis(widen(u).reshape(num_tokens, num_pairs, 2), -1, 0)
    # [sin, cos] B for every pair.
    rotated = jnp.stack([a * sines - b * cosines, b * sines + a * cosines], axis=-1)
    return rotated.reshape(*rotated.shape[:-2], width)


def _geometric_frequencies(
    num: int, base: float, dtype: jax.typing.DTypeLike
) -> Float[Array, " num"]:
    """Computes base^(-i / num), i = 0 .. num - 1."""
    return jnp.asarray(float(base) ** (-np.arange(num) / num), dtype)

"""Rotates queries and keys by position-dependent angles (RoPE)."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from relattn.kernels.checks import check_arguments, check_size
from relattn.kernels.masks import zero_prefix
from relattn.kernels.positions.sinusoids import absolute_frequencies, turns
from relattn.kernels.precision import widen
from relattn.kernels.random_projections import draw_orthogonal
from relattn.offsets import Torus, check_prefix, check_torus


@check_arguments
def rotary_angles(
    positions: Float[Array | np.ndarray, "n axes"],
    head_dim: int,
    *,
    base: float = 10000.0,
    factor: float = 1.0,
    original_length: int = 0,
    num_prefix: int = 0,
    torus: Torus | None = None,
) -> Float[Array, "n {head_dim//2}"]:
    """Computes the angles of every token, one for each pair of a head's components.

    angle = w_t p_axis with w_t = base^(-t / num), t = 0 .. num - 1, and num =
    head_dim / (2 axes) frequencies for each axis; the axes are concatenated. If the
    number of axes does not divide the number of pairs, the last axes have one more.
    Prefix tokens have angle zero.

    For texts that are longer than those of training, w_t is replaced by w_t / factor
    (position interpolation) or, with ``original_length`` = L, by
    w_t (s + (1 - s) / factor) with s = clip((L w_t / (2 pi) - 1) / 3, 0, 1), so that
    frequencies of at least 4 turns in L tokens stay.

    Args:
        positions: Positions in tokens, shape ``[n, axes]``.
        head_dim: Width of a head.
        base: Base of the geometric series of frequencies.
        factor: Divisor of the frequencies.
        original_length: Length of the texts of training, in tokens; 0 to divide all
            frequencies.
        num_prefix: Number of prefix tokens.
        torus: A torus, on which frequencies are rounded to whole turns, multiples of
            2 pi / size; the first of an axis is at least one turn.

    Returns:
        Angles in radians, float32 or wider, shape ``[n, head_dim / 2]``.

    Raises:
        ValueError: If shapes or dtypes do not fit together, ``head_dim`` is odd or less
            than twice the number of axes, ``base`` or ``factor`` is not positive,
            ``original_length`` is negative, ``torus`` is a plain grid or has other
            axes, or ``num_prefix`` is negative or exceeds n.

    Example:
        >>> rotary_angles(np.array([[0.0], [5.0]]), 4, base=100.0).tolist()
        [[0.0, 0.0], [5.0, 0.5]]

    Source:
        Su et al., RoFormer, section 3.2.2; axes: Heo et al., Rotary Position Embedding
        for Vision Transformer, section 3.2; factor: Chen et al., Extending Context
        Window of Large Language Models via Positional Interpolation, section 2.3;
        original_length: Llama 3.1 as in transformers, ``rope_type="llama3"``.
    """
    num_tokens, axes = positions.shape
    check_prefix(num_tokens, num_prefix)
    if head_dim % 2 or head_dim < 2 * axes:
        raise ValueError(
            "rotary positions need an even head_dim (dim / num_heads) of at least 2 "
            f"for each axis, here {2 * axes}, got {head_dim}"
        )
    if not (0 < factor < math.inf and original_length >= 0):
        raise ValueError(
            "rotary positions need a finite factor > 0 and original_length >= 0, got "
            f"{factor} and {original_length}"
        )
    if torus is not None:
        check_torus(torus)
    if torus is not None and len(torus) != axes:
        raise ValueError(
            f"positions of {axes} axes need a torus of as many, got {torus}"
        )
    # In half precision, large angles lose their phase.
    positions, angles = widen(positions), []
    for axis in range(axes):
        # w_t = base^(-t / num)
        num = (head_dim // 2 + axis) // axes
        frequencies = absolute_frequencies(num, base, positions.dtype)
        # s: 1 from 4 turns in original_length tokens on, 0 below one.
        turned = original_length * frequencies / (2 * math.pi)
        kept = jnp.clip((turned - 1) / 3, 0.0, 1.0)
        frequencies = frequencies * (kept + (1 - kept) / factor)
        if torus is not None:
            turn = turns(torus)[axis]
            # On an axis of up to 3 tokens, all would be rounded to zero.
            least = np.arange(num) == 0
            frequencies = jnp.maximum(jnp.round(frequencies / turn), least) * turn
        # w_t p_axis
        angles.append(positions[:, axis, None] * frequencies)
    return zero_prefix(jnp.concatenate(angles, axis=-1), num_prefix)


def draw_mixed_frequencies(
    key: Key[Array, ""],
    num_frequencies: int,
    axes: int,
    *,
    leading: tuple[int, ...] = (),
    base: float = 0.0,
) -> Float[Array, "*leading {num_frequencies} {axes}"]:
    """Draws the initial frequency vectors of learned rotations.

    The vectors lie along the directions of a cross, one direction for each axis, at
    right angles to each other. The rotation of the cross is uniform, and drawn for each
    index of ``leading``. Along each direction u, w_t = base^(-t / num) u for t = 0 ..
    num - 1, with num = num_frequencies / axes, rounded up; the last directions have one
    vector fewer if num_frequencies is not a multiple of axes. With one axis,
    w_t = base^(-t / num_frequencies).

    Args:
        key: A PRNG key.
        num_frequencies: Number of vectors.
        axes: Number of axes of the positions.
        leading: Sizes of leading axes, such as layers and heads.
        base: Base of the geometric series of lengths; 0 for 10,000 with one axis and
            10 with more.

    Returns:
        Frequencies in radians per token, float32, shape
        ``[*leading, num_frequencies, axes]``.

    Raises:
        ValueError: If ``num_frequencies`` or ``axes`` is less than one or no whole
            number, or ``base`` is negative.

    Example:
        >>> w = draw_mixed_frequencies(jax.random.key(0), 4, 2, base=100.0)
        >>> jnp.linalg.norm(w, axis=-1).round(3).tolist()
        [1.0, 0.10000000149011612, 1.0, 0.10000000149011612]

    Source:
        Heo et al., Rotary Position Embedding for Vision Transformer, section 3.3;
        initialisation: the authors' code, for two axes.
    """
    check_size("num_frequencies", num_frequencies)
    check_size("axes", axes)
    base = base or (10000.0 if axes == 1 else 10.0)
    # base^(-t / num) for each direction of the cross.
    counts = [len(part) for part in np.array_split(np.arange(num_frequencies), axes)]
    lengths = absolute_frequencies(counts[0], base)
    lengths = jnp.concatenate([lengths[:count] for count in counts])
    # u, and the directions at right angles to it.
    cross = _draw_cross(key, axes, leading)
    lengths = jnp.expand_dims(lengths, (*range(len(leading)), -1))
    return lengths * cross[..., np.repeat(np.arange(axes), counts), :]


def _draw_cross(key, axes, leading):
    """Draws orthogonal unit vectors, [*leading, axes, axes]; that of one axis is 1."""
    if axes == 1:
        return jnp.ones((*leading, 1, 1), jnp.float32)
    if axes == 2:
        angles = jax.random.uniform(key, (*leading, 1), jnp.float32, maxval=2 * np.pi)
        angles = jnp.concatenate([angles, angles + np.float32(np.pi / 2)], axis=-1)
        return jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=-1)
    draw = functools.partial(
        draw_orthogonal, num_features=axes, head_dim=axes, norms="fixed"
    )
    for _ in leading:
        draw = jax.vmap(draw)
    return draw(jax.random.split(key, leading)) / axes**0.5


@check_arguments
def mixed_rotary_angles(
    positions: Float[Array | np.ndarray, "n axes"],
    frequencies: Float[Array, "*batch pairs frequency_axes"],
    *,
    num_prefix: int = 0,
) -> Float[Array, "*batch n pairs"]:
    """Computes the angles of every token from frequencies that mix the axes.

    angle_it = w_t . p_i = sum_axis w_t,axis p_i,axis for token i and pair t, so
    diagonal offsets differ too. Prefix tokens have angle zero.

    Args:
        positions: Positions in tokens, shape ``[n, axes]``.
        frequencies: w, radians per token, shape ``[*batch, pairs, axes]``.
        num_prefix: Number of prefix tokens.

    Returns:
        Angles in radians, float32 or wider, shape ``[*batch, n, pairs]``, for `rotate`.

    Raises:
        ValueError: If shapes or dtypes do not fit together, positions and frequencies
            differ in their number of axes, or ``num_prefix`` is negative or exceeds n.

    Example:
        >>> w = jnp.array([[1.0, 0.0], [0.5, 0.5]])
        >>> mixed_rotary_angles(np.array([[2.0, 4.0]]), w).tolist()
        [[2.0, 3.0]]

    Source:
        Heo et al., Rotary Position Embedding for Vision Transformer, section 3.3.
    """
    check_prefix(positions.shape[0], num_prefix)
    if positions.shape[-1] != frequencies.shape[-1]:
        raise ValueError(
            f"frequencies of {frequencies.shape[-1]} axes do not fit positions of "
            f"{positions.shape[-1]}"
        )
    # A product and a sum, not a matmul, which accelerators compute in lower precision.
    positions = widen(positions)[:, None]
    frequencies = widen(frequencies)[..., None, :, :]
    angles = jnp.sum(positions * frequencies, axis=-1)
    return zero_prefix(angles, num_prefix)


@check_arguments
def rotate(
    x: Float[Array, "*batch n head_dim"],
    angles: Float[Array, "*#batch n pairs"],
    *,
    interleaved: bool = False,
) -> Float[Array, "*batch n head_dim"]:
    """Rotates pairs of a head's components by angles.

    (a, b) -> (a cos t - b sin t, a sin t + b cos t). The product of a rotated query and
    a rotated key depends only on the difference of their angles.

    Args:
        x: Queries or keys, shape ``[*batch, n, head_dim]``.
        angles: Angles in radians from `rotary_angles` or `mixed_rotary_angles`, shape
            ``[*batch, n, head_dim / 2]``.
        interleaved: Whether pairs are (2 t, 2 t + 1) instead of (t, t + head_dim / 2).

    Returns:
        Shape and dtype of ``x``; computed in float32 or wider.

    Raises:
        ValueError: If shapes or dtypes do not fit together, or there is not one angle
            for each pair.

    Example:
        >>> quarter = jnp.full((1, 1), jnp.pi / 2)
        >>> rotate(jnp.array([[1.0, 1.0]]), quarter).round(3).tolist()
        [[-1.0, 1.0]]

    Source:
        Su et al., RoFormer, section 3.2.2.
    """
    head_dim = x.shape[-1]
    if head_dim != 2 * angles.shape[-1]:
        raise ValueError(
            f"head_dim {head_dim} needs {head_dim / 2:g} angles per token, got "
            f"{angles.shape[-1]}"
        )
    # The pairs (a, b).
    wide, angles = widen(x), widen(angles)
    if interleaved:
        first, second = wide[..., ::2], wide[..., 1::2]
    else:
        first, second = jnp.split(wide, 2, axis=-1)
    # (a cos t - b sin t, a sin t + b cos t)
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    rotated = [first * cosine - second * sine, first * sine + second * cosine]
    join = jnp.stack if interleaved else jnp.concatenate
    return join(rotated, axis=-1).reshape(x.shape).astype(x.dtype)


@check_arguments
def widen_rotary_values(
    v: Float[Array, "*batch n value_dim"],
    angles: Float[Array, "*#batch n pairs"],
    *,
    num_prefix: int = 0,
    interleaved: bool = False,
) -> Float[Array, "*batch n wider"]:
    """Rotates values, so that attention rotates them by the offset.

    v'_j = R(p_j) v_j. Attention to v' with any weights alpha, followed by
    `combine_rotary_values`, gives sum_j alpha_ij R(p_j - p_i) v_j. Prefix tokens have
    no position: in pairs with one, R is the identity. So with prefix tokens the values
    are three times as wide: v'_j = [R(p_j) v_j, v_j, 0] of a grid token, [0, 0, v_j] of
    a prefix token.

    Args:
        v: Values, shape ``[*batch, n, value_dim]``.
        angles: Angles in radians from `rotary_angles` or `mixed_rotary_angles`, shape
            ``[*batch, n, value_dim / 2]``.
        num_prefix: Number of prefix tokens.
        interleaved: Whether pairs are (2 t, 2 t + 1) instead of (t, t + value_dim / 2).

    Returns:
        Shape ``[*batch, n, value_dim]``, or ``[*batch, n, 3 * value_dim]`` with prefix
        tokens, in the dtype of ``v``.

    Raises:
        ValueError: If shapes or dtypes do not fit together, there is not one angle for
            each pair, or ``num_prefix`` is negative or exceeds n.

    Example:
        >>> quarter = jnp.full((1, 1), jnp.pi / 2)
        >>> v = widen_rotary_values(jnp.array([[1.0, 1.0]]), quarter)
        >>> combine_rotary_values(v, 2 * quarter).round(3).tolist()
        [[1.0, -1.0]]

    Source:
        Garcia-Castellanos et al., RoVE, without prefix tokens.
    """
    check_prefix(v.shape[-2], num_prefix)
    rotated = rotate(v, angles, interleaved=interleaved)
    if not num_prefix:
        return rotated
    is_prefix = np.arange(v.shape[-2])[:, None] < num_prefix
    parts = [jnp.where(is_prefix, 0.0, x) for x in (rotated, v)]
    return jnp.concatenate([*parts, jnp.where(is_prefix, v, 0.0)], axis=-1)


@check_arguments
def combine_rotary_values(
    out: Float[Array, "*batch n wider"],
    angles: Float[Array, "*#batch n pairs"],
    *,
    num_prefix: int = 0,
    interleaved: bool = False,
) -> Float[Array, "*batch n value_dim"]:
    """Rotates the outputs of attention to the values of `widen_rotary_values` back.

    R(-p_i) out_i. With prefix tokens, the three parts of an output are combined:
    R(-p_i) out_i1 + out_i3 for a grid token, out_i2 + out_i3 for a prefix token.

    Args:
        out: Outputs, shape ``[*batch, n, value_dim]``, or
            ``[*batch, n, 3 * value_dim]`` with prefix tokens.
        angles: Angles in radians of the queries, shape ``[*batch, n, value_dim / 2]``.
        num_prefix: Number of prefix tokens.
        interleaved: Whether pairs are (2 t, 2 t + 1) instead of (t, t + value_dim / 2).

    Returns:
        Shape ``[*batch, n, value_dim]``, in the dtype of ``out``.

    Raises:
        ValueError: If shapes or dtypes do not fit together, there is not one angle for
            each pair, or ``num_prefix`` is negative or exceeds n.

    Example:
        >>> half = jnp.full((1, 1), jnp.pi)
        >>> combine_rotary_values(jnp.array([[1.0, 0.5]]), half).round(3).tolist()
        [[-1.0, -0.5]]

    Source:
        Garcia-Castellanos et al., RoVE, without prefix tokens.
    """
    check_prefix(out.shape[-2], num_prefix)
    if not num_prefix:
        return rotate(out, -angles, interleaved=interleaved)
    if out.shape[-1] != 6 * angles.shape[-1]:
        raise ValueError(
            f"with prefix tokens, outputs for {angles.shape[-1]} angles per token need "
            f"a width of {6 * angles.shape[-1]}, three parts, got {out.shape[-1]}"
        )
    rotated, plain, prefix = jnp.split(widen(out), 3, axis=-1)
    rotated = rotate(rotated, -angles, interleaved=interleaved)
    is_prefix = np.arange(out.shape[-2])[:, None] < num_prefix
    return (jnp.where(is_prefix, plain, rotated) + prefix).astype(out.dtype)

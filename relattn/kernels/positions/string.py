"""Rotates queries and keys by learned commuting generators, one per axis (STRING)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from relattn.kernels.checks import check_arguments
from relattn.kernels.positions.rotary import mixed_rotary_angles, rotate
from relattn.kernels.precision import wide_einsum, widen


@check_arguments
def cayley_matrix(
    entries: Float[Array, "*batch entries"],
) -> Float[Array, "*batch head_dim head_dim"]:
    """Computes an orthogonal matrix from a skew-symmetric one (Cayley transform).

    P = (I - S) (I + S)^-1 with S = -S^T

    Args:
        entries: Entries of S below its diagonal, row by row, shape
            ``[*batch, head_dim (head_dim - 1) / 2]``.

    Returns:
        P, float32 or wider, shape ``[*batch, head_dim, head_dim]``; the identity if all
        entries are zero.

    Raises:
        ValueError: If shapes or dtypes do not fit together, or the number of entries is
            not head_dim (head_dim - 1) / 2.

    Example:
        >>> cayley_matrix(jnp.ones(1)).round(3).tolist()  # S = [[0, -1], [1, 0]]
        [[0.0, 1.0], [-1.0, 0.0]]

    Source:
        Schenck et al., Learning the RoPEs: Better 2D and 3D Position Encodings with
        STRING, section 3 (Cayley-STRING).
    """
    num_entries = entries.shape[-1]
    head_dim = (1 + math.isqrt(1 + 8 * num_entries)) // 2
    if num_entries < 1 or head_dim * (head_dim - 1) != 2 * num_entries:
        raise ValueError(
            "a skew-symmetric matrix needs head_dim (head_dim - 1) / 2 entries below "
            f"its diagonal, got {num_entries}"
        )
    entries = widen(entries)
    # Row i has i entries; no scatter, which is slow on accelerators.
    rows = jnp.split(entries, np.cumsum(np.arange(head_dim - 1)), axis=-1)
    zeros = [(0, 0)] * (entries.ndim - 1)
    rows = [jnp.pad(row, [*zeros, (0, head_dim - i)]) for i, row in enumerate(rows)]
    lower = jnp.stack(rows, axis=-2)
    # S = -S^T
    skew = lower - lower.swapaxes(-2, -1)
    identity = jnp.eye(head_dim, dtype=entries.dtype)
    # (I + S)^-1 (I - S) = P: functions of S commute.
    return jnp.linalg.solve(identity + skew, identity - skew)


@check_arguments
def cayley_string(
    x: Float[Array, "*batch n head_dim"],
    angles: Float[Array, "*#batch n pairs"],
    matrix: Float[Array, "*#batch matrix_dim matrix_dim"],
    *,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch n head_dim"]:
    """Rotates queries and keys in a learned basis (Cayley-STRING).

    x' = R(p) x with R(p) = P RoPE(p) P^T = exp(sum_axis p_axis L_axis). R(p_i) q .
    R(p_j) k depends only on p_i - p_j, and tokens with angle zero do not change.

    Args:
        x: Queries or keys, shape ``[*batch, n, head_dim]``.
        angles: Angles in radians from `mixed_rotary_angles`, shape
            ``[*batch, n, head_dim / 2]``.
        matrix: P, from `cayley_matrix`, shape ``[*batch, head_dim, head_dim]``.
        precision: Passed to einsum.

    Returns:
        Shape and dtype of ``x``; computed in float32 or wider.

    Raises:
        ValueError: If shapes or dtypes do not fit together, there is not one angle for
            each pair of components, or P and ``x`` differ in head_dim.

    Example:
        >>> quarter = jnp.full((1, 1), jnp.pi / 2)
        >>> x = jnp.ones((1, 2))
        >>> cayley_string(x, quarter, cayley_matrix(jnp.ones(1))).round().tolist()
        [[-1.0, 1.0]]

    Source:
        Schenck et al., Learning the RoPEs: Better 2D and 3D Position Encodings with
        STRING, section 3 (Cayley-STRING).
    """
    head_dim = x.shape[-1]
    if matrix.shape[-1] != head_dim:
        raise ValueError(
            f"head_dim {head_dim} needs a matrix of {head_dim}x{head_dim}, got "
            f"{matrix.shape[-2]}x{matrix.shape[-1]}"
        )
    einsum = wide_einsum(precision)
    # P RoPE(p) P^T x
    rotated = rotate(einsum("...nd,...de->...ne", widen(x), matrix), angles)
    return einsum("...ne,...de->...nd", rotated, matrix).astype(x.dtype)


@check_arguments
def circulant_angles(
    positions: Float[Array | np.ndarray, "n axes"],
    circulants: Float[Array, "*batch circulant_axes head_dim"],
    *,
    num_prefix: int = 0,
) -> Float[Array, "*batch n {circulants.shape[-1]//2+1}"]:
    """Computes the angles by which Circulant-STRING rotates Fourier components.

    angle_f = sum_axis p_axis 2 Im FFT(c_axis)_f for component f: the circulant matrix C
    with first column c has the eigenvalues FFT(c), so L = C - C^T has 2 i Im FFT(c).
    Prefix tokens have angle zero.

    Args:
        positions: Positions in tokens, shape ``[n, axes]``.
        circulants: c of every axis, shape ``[*batch, axes, head_dim]``.
        num_prefix: Number of prefix tokens.

    Returns:
        Angles in radians, float32 or wider, shape ``[*batch, n, head_dim // 2 + 1]``;
        zero for component 0 and, if head_dim is even, for the last one.

    Raises:
        ValueError: If shapes or dtypes do not fit together, head_dim is less than 3,
            positions and circulants differ in their number of axes, or ``num_prefix``
            is negative or exceeds n.

    Example:
        >>> c = jnp.array([[0.0, 1.0, 0.0, 0.0]])
        >>> circulant_angles(np.array([[3.0]]), c).round().astype(int).tolist()
        [[0, -6, 0]]

    Source:
        Schenck et al., Learning the RoPEs: Better 2D and 3D Position Encodings with
        STRING, section 3 (Circulant-STRING).
    """
    head_dim = circulants.shape[-1]
    if head_dim < 3:
        raise ValueError(
            "circulant generators rotate nothing where head_dim (dim / num_heads) is "
            f"below 3, got {head_dim}"
        )
    # 2 Im FFT(c_axis)_f, then the sum over axes of p_axis times it.
    frequencies = 2 * jnp.fft.rfft(widen(circulants)).imag
    return mixed_rotary_angles(
        positions, frequencies.swapaxes(-2, -1), num_prefix=num_prefix
    )


@check_arguments
def circulant_string(
    x: Float[Array, "*batch n head_dim"],
    angles: Float[Array, "*#batch n components"],
) -> Float[Array, "*batch n head_dim"]:
    """Rotates the Fourier components of queries and keys (Circulant-STRING).

    x' = R(p) x with R(p) = exp(sum_axis p_axis L_axis), L = C - C^T. Circulant matrices
    commute, so R(p_i) q . R(p_j) k depends only on p_i - p_j. The FFT takes
    O(head_dim log head_dim) time per token.

    Args:
        x: Queries or keys, shape ``[*batch, n, head_dim]``.
        angles: Angles in radians from `circulant_angles`, shape
            ``[*batch, n, head_dim // 2 + 1]``.

    Returns:
        Shape and dtype of ``x``; computed in float32 or wider.

    Raises:
        ValueError: If shapes or dtypes do not fit together, or there is not one angle
            for each component.

    Example:
        >>> c = jnp.array([[0.0, 1.0, 0.0, 0.0]])
        >>> angles = circulant_angles(np.zeros((1, 1)), c)
        >>> circulant_string(jnp.array([[1.0, 2.0, 3.0, 4.0]]), angles).tolist()
        [[1.0, 2.0, 3.0, 4.0]]

    Source:
        Schenck et al., Learning the RoPEs: Better 2D and 3D Position Encodings with
        STRING, section 3 (Circulant-STRING).
    """
    head_dim = x.shape[-1]
    if angles.shape[-1] != head_dim // 2 + 1:
        raise ValueError(
            f"head_dim {head_dim} has {head_dim // 2 + 1} Fourier components, got "
            f"{angles.shape[-1]} angles per token"
        )
    # Fourier components of x.
    components = jnp.fft.rfft(widen(x))
    # Times e^(i angle_f).
    angles = widen(angles)
    rotated = components * jax.lax.complex(jnp.cos(angles), jnp.sin(angles))
    return jnp.fft.irfft(rotated, n=head_dim).astype(x.dtype)


@check_arguments
def circulants_of(
    frequencies: Float[Array, "*batch components axes"], head_dim: int
) -> Float[Array, "*batch axes {head_dim}"]:
    """Computes circulants that rotate Fourier component f = 1, 2, .. by w_f . p.

    c = IFFT(i w / 2), the inverse of `circulant_angles`

    Args:
        frequencies: w, radians per token, shape
            ``[*batch, (head_dim - 1) // 2, axes]``.
        head_dim: Width of a head.

    Returns:
        c, float32 or wider, shape ``[*batch, axes, head_dim]``.

    Raises:
        ValueError: If shapes or dtypes do not fit together, or there is not one
            frequency for each component that can rotate.

    Example:
        >>> (8 * circulants_of(jnp.ones((1, 1)), 4)).round().astype(int).tolist()
        [[0, -2, 0, 2]]

    Source:
        Schenck et al., Learning the RoPEs: Better 2D and 3D Position Encodings with
        STRING, section 3 (Circulant-STRING).
    """
    components = (head_dim - 1) // 2
    if components < 1 or frequencies.shape[-2] != components:
        raise ValueError(
            f"head_dim {head_dim} has {max(components, 0)} Fourier components that can "
            f"rotate, got {frequencies.shape[-2]} frequencies"
        )
    # Component 0 and, if head_dim is even, the last one do not rotate.
    num_last = head_dim // 2 - components
    spectrum = jnp.pad(
        widen(frequencies).swapaxes(-2, -1),
        [(0, 0)] * (frequencies.ndim - 1) + [(1, num_last)],
    )
    # IFFT(i w / 2)
    return jnp.fft.irfft(
        jax.lax.complex(jnp.zeros_like(spectrum), spectrum / 2), head_dim
    )

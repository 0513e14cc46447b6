"""STRING: queries and keys turn by learned commuting generators, one for each axis."""

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
    """The orthogonal matrix P = (I - S) (I + S)^-1 of a skew-symmetric S.

    Args:
        entries: Of S below its diagonal, row by row, head_dim (head_dim - 1) / 2 of
            them.

    Returns:
        P, float32 or wider, shape ``[*batch, head_dim, head_dim]``; the identity where
        all are zero.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        ValueError: If no matrix has that many entries below its diagonal.

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
            "a skew-symmetric matrix has head_dim (head_dim - 1) / 2 entries below its "
            f"diagonal, got {num_entries}"
        )
    entries = widen(entries)
    lower = jnp.zeros((*entries.shape[:-1], head_dim, head_dim), entries.dtype)
    rows, columns = np.tril_indices(head_dim, -1)
    lower = lower.at[..., rows, columns].set(entries)
    skew = lower - lower.swapaxes(-2, -1)
    identity = jnp.eye(head_dim, dtype=entries.dtype)
    # Both factors are functions of S, so their order does not matter.
    return jnp.linalg.solve(identity + skew, identity - skew)


@check_arguments
def cayley_string(
    x: Float[Array, "*batch n head_dim"],
    angles: Float[Array, "*#batch n pairs"],
    matrix: Float[Array, "*#batch matrix_depth matrix_depth"],
    *,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch n head_dim"]:
    """Cayley-STRING: rotary positions in a learned basis.

    R(p) x with R(p) = P RoPE(p) P^T = exp(sum_axis p_axis L_axis), so that
    R(p_i) q . R(p_j) k depends on p_i - p_j only, and a token of angle zero stays.

    Args:
        x: Queries or keys, shape ``[*batch, n, head_dim]``.
        angles: Of `mixed_rotary_angles`, shape ``[*batch, n, head_dim / 2]``.
        matrix: P, of `cayley_matrix`, shape ``[*batch, head_dim, head_dim]``.
        precision: Passed to einsum.

    Returns:
        Shape and dtype of ``x``; computed in float32 or wider.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        ValueError: If there is not one angle for each pair of a head's numbers, or P is
            of another head_dim.

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
    turned = rotate(einsum("...nd,...de->...ne", widen(x), matrix), angles)
    return einsum("...ne,...de->...nd", turned, matrix).astype(x.dtype)


@check_arguments
def circulant_angles(
    positions: Float[Array | np.ndarray, "n axes"],
    circulants: Float[Array, "*batch circulant_axes head_dim"],
    *,
    num_prefix: int = 0,
) -> Float[Array, "*batch n {circulants.shape[-1]//2+1}"]:
    """Angles by which Circulant-STRING turns the Fourier components of a head.

    The circulant matrix C with first column c has the eigenvalues c^ = FFT(c), so
    L = C - C^T has 2 i Im c^; the angle of component f is
    sum_axis p_axis 2 Im c^_axis,f. Prefix tokens have angle zero.

    Args:
        positions: Positions in tokens, shape ``[n, axes]``.
        circulants: c of every axis, shape ``[*batch, axes, head_dim]``.
        num_prefix: Number of leading tokens that have no position.

    Returns:
        Angles, float32 or wider, shape ``[*batch, n, head_dim // 2 + 1]``; of component
        0 and, at an even head_dim, of the last one they are zero.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        ValueError: If a head is too narrow to turn, or the axes differ.

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
    frequencies = 2 * jnp.fft.rfft(widen(circulants)).imag
    return mixed_rotary_angles(
        positions, frequencies.swapaxes(-2, -1), num_prefix=num_prefix
    )


@check_arguments
def circulant_string(
    x: Float[Array, "*batch n head_dim"],
    angles: Float[Array, "*#batch n components"],
) -> Float[Array, "*batch n head_dim"]:
    """Circulant-STRING: turns the Fourier components of queries and keys.

    R(p) x with R(p) = exp(sum_axis p_axis L_axis), L = C - C^T: circulant matrices
    commute, so that R(p_i) q . R(p_j) k depends on p_i - p_j only. By FFT in
    O(head_dim log head_dim) a token.

    Args:
        x: Queries or keys, shape ``[*batch, n, head_dim]``.
        angles: Of `circulant_angles`, shape ``[*batch, n, head_dim // 2 + 1]``.

    Returns:
        Shape and dtype of ``x``; computed in float32 or wider.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        ValueError: If there is not one angle for each component.

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
            f"{angles.shape[-1]} angles a token"
        )
    components = jnp.fft.rfft(widen(x))
    turned = components * jax.lax.complex(jnp.cos(angles), jnp.sin(angles))
    return jnp.fft.irfft(turned, n=head_dim).astype(x.dtype)


@check_arguments
def circulants_of(
    frequencies: Float[Array, "*batch components axes"], head_dim: int
) -> Float[Array, "*batch axes {head_dim}"]:
    """The circulants that turn Fourier component f = 1, 2, .. by w_f . p.

    c = IFFT(i w / 2), so that the angles of `circulant_angles` are w . p.

    Args:
        frequencies: w, radians a token, shape ``[*batch, (head_dim - 1) // 2, axes]``.
        head_dim: Width of a head.

    Returns:
        c, float32 or wider, shape ``[*batch, axes, head_dim]``.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        ValueError: If there is not one frequency for each component that can turn.

    Example:
        >>> (8 * circulants_of(jnp.ones((1, 1)), 4)).round().astype(int).tolist()
        [[0, -2, 0, 2]]
    """
    components = (head_dim - 1) // 2
    if components < 1 or frequencies.shape[-2] != components:
        raise ValueError(
            f"head_dim {head_dim} has {max(components, 0)} Fourier components that can "
            f"rotate, got {frequencies.shape[-2]} frequencies"
        )
    unturned = head_dim // 2 + 1 - components - 1
    spectrum = jnp.pad(
        widen(frequencies).swapaxes(-2, -1),
        [(0, 0)] * (frequencies.ndim - 1) + [(1, unturned)],
    )
    return jnp.fft.irfft(
        jax.lax.complex(jnp.zeros_like(spectrum), spectrum / 2), head_dim
    )

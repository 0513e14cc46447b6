"""Gates: the numbers of queries and keys are scaled by functions of their position."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from relattn.kernels.checks import check_arguments
from relattn.kernels.positions.rotary import mixed_rotary_angles
from relattn.kernels.precision import wide_einsum, widen


@check_arguments
def apply_gate(
    x: Float[Array, "*batch n head_dim"],
    exponents: Float[Array, "*#batch n exponents_depth"],
) -> Float[Array, "*batch n head_dim"]:
    """Scales queries or keys: x_i * exp(e_i), number by number.

    Args:
        x: Queries or keys, shape ``[*batch, n, head_dim]``.
        exponents: e, of `irpe_exponents` or `string_exponents`.

    Returns:
        Shape and dtype of ``x``; computed in float32 or wider.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        ValueError: If ``x`` and the exponents differ in head_dim.

    Example:
        >>> exponents = jnp.log(jnp.array([[2.0, 1.0]]))
        >>> apply_gate(jnp.array([[3.0, 5.0]]), exponents).tolist()
        [[6.0, 5.0]]

    Source:
        Guoji, Improving efficient Vision Transformers with RPEs, section 5.
    """
    if x.shape[-1] != exponents.shape[-1]:
        raise ValueError(
            f"head_dim {x.shape[-1]} needs as many exponents, got {exponents.shape[-1]}"
        )
    scaled = widen(x) * jnp.exp(widen(exponents))
    return scaled.astype(x.dtype)


@check_arguments
def irpe_exponents(
    *embeddings: Float[Array, "*batch _ head_dim"], num_prefix: int = 0
) -> Float[Array, "*batch n head_dim"]:
    """Exponents of the iRPE gate: the embedding of a token's row and of its column.

    e_i = r[row of i] + c[column of i], in float32 or wider; zeros for prefix tokens. A
    function of the absolute position, whatever its name.

    Args:
        *embeddings: r ``[*batch, height, head_dim]`` and c
            ``[*batch, width, head_dim]``, or one ``[*batch, length, head_dim]`` for a
            line.
        num_prefix: Number of leading tokens that have no position.

    Returns:
        Shape ``[*batch, num_prefix + height * width, head_dim]``.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        ValueError: If there are not one or two embeddings.

    Example:
        >>> rows, columns = jnp.array([[0.0], [1.0]]), jnp.array([[2.0], [4.0]])
        >>> irpe_exponents(rows, columns, num_prefix=1)[:, 0].tolist()
        [0.0, 2.0, 4.0, 3.0, 5.0]

    Source:
        Guoji, Improving efficient Vision Transformers with RPEs, section 5.1.
    """
    if len(embeddings) not in (1, 2):
        raise ValueError(
            "the iRPE gate has embeddings of rows and columns, or of a line, got "
            f"{len(embeddings)} of them"
        )
    exponents = widen(embeddings[0])
    if len(embeddings) == 2:
        columns = widen(embeddings[1])
        exponents = exponents[..., :, None, :] + columns[..., None, :, :]
        *batch, height, width, head_dim = exponents.shape
        exponents = exponents.reshape(*batch, height * width, head_dim)
    prefix = [(0, 0)] * (exponents.ndim - 2) + [(num_prefix, 0), (0, 0)]
    return jnp.pad(exponents, prefix)


@check_arguments
def string_exponents(
    positions: Float[Array | np.ndarray, "n axes"],
    frequencies: Float[Array, "*#batch rank frequency_axes"],
    phases: Float[Array, "*#batch rank"],
    coefficients: Float[Array, "*batch features head_dim"],
    *,
    num_prefix: int = 0,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch n head_dim"]:
    """Exponents of the STRING gate: a low rank of Fourier features of the position.

    e_i = g(p_i) A with g(p) = [cos(w_r . p + b_r), sin(w_r . p + b_r)], r = 1 .. rank,
    in float32 or wider; zeros for prefix tokens. A function of the absolute position,
    whatever its name.

    Args:
        positions: Positions in tokens, shape ``[n, axes]``.
        frequencies: w, radians a token, shape ``[*batch, rank, axes]``.
        phases: b, shape ``[*batch, rank]``.
        coefficients: A, shape ``[*batch, 2 rank, head_dim]``.
        num_prefix: Number of leading tokens that have no position.
        precision: Passed to einsum.

    Returns:
        Shape ``[*batch, n, head_dim]``.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        ValueError: If A has not a row for each cosine and sine.

    Example:
        >>> w, b = jnp.array([[jnp.pi]]), jnp.zeros(1)
        >>> places = np.arange(3, dtype=np.float32)[:, None]
        >>> string_exponents(places, w, b, jnp.eye(2))[:, 0].tolist()
        [1.0, -1.0, 1.0]

    Source:
        Guoji, Improving efficient Vision Transformers with RPEs, section 5.3.
    """
    rank = frequencies.shape[-2]
    if coefficients.shape[-2] != 2 * rank:
        raise ValueError(
            f"{rank} frequencies have {2 * rank} cosines and sines, got coefficients "
            f"of {coefficients.shape[-2]}"
        )
    angles = mixed_rotary_angles(positions, frequencies)
    angles = angles + widen(phases)[..., None, :]
    features = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)
    exponents = wide_einsum(precision)("...nr,...rd->...nd", features, coefficients)
    return exponents.at[..., :num_prefix, :].set(0.0)

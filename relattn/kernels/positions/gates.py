"""Gates: scale queries and keys by functions of their position."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from relattn.kernels.checks import check_arguments
from relattn.kernels.masks import zero_prefix
from relattn.kernels.positions.rotary import mixed_rotary_angles
from relattn.kernels.precision import wide_einsum, widen
from relattn.offsets import check_prefix


@check_arguments
def apply_gate(
    x: Float[Array, "*batch n head_dim"],
    exponents: Float[Array, "*#batch n exponents_dim"],
) -> Float[Array, "*batch n head_dim"]:
    """Scales the components of queries or keys by exp(exponents).

    x'_i = x_i * exp(e_i)

    Args:
        x: Queries or keys, shape ``[*batch, n, head_dim]``.
        exponents: e, from `irpe_exponents` or `string_exponents`, shape
            ``[*batch, n, head_dim]``.

    Returns:
        Shape and dtype of ``x``; computed in float32 or wider.

    Raises:
        ValueError: If shapes or dtypes do not fit together, or ``x`` and ``exponents``
            differ in head_dim.

    Example:
        >>> exponents = jnp.log(jnp.array([[2.0, 1.0]]))
        >>> apply_gate(jnp.array([[3.0, 5.0]]), exponents).tolist()
        [[6.0, 5.0]]

    Source:
        Guoji, Improving efficient Vision Transformers with RPEs, section 5.
    """
    if x.shape[-1] != exponents.shape[-1]:
        raise ValueError(
            f"head_dim {x.shape[-1]} needs {x.shape[-1]} exponents for each token, got "
            f"{exponents.shape[-1]}"
        )
    # x_i * exp(e_i)
    scaled = widen(x) * jnp.exp(widen(exponents))
    return scaled.astype(x.dtype)


@check_arguments
def irpe_exponents(
    *embeddings: Float[Array, "*batch _ head_dim"], num_prefix: int = 0
) -> Float[Array, "*batch n head_dim"]:
    """Computes the exponents of the iRPE gate from row and column embeddings.

    e_i = r[row of i] + c[column of i], in float32 or wider, a term for each axis of the
    grid; zeros for prefix tokens. Despite its name, the gate is a function of the
    absolute position.

    Args:
        *embeddings: One for each axis of the grid, shape ``[*batch, size, head_dim]``:
            r and c for a grid of rows and columns.
        num_prefix: Number of prefix tokens.

    Returns:
        Shape ``[*batch, num_prefix + product of the sizes, head_dim]``.

    Raises:
        ValueError: If shapes or dtypes do not fit together, there is no embedding, or
            ``num_prefix`` is negative.

    Example:
        >>> rows, columns = jnp.array([[0.0], [1.0]]), jnp.array([[2.0], [4.0]])
        >>> irpe_exponents(rows, columns, num_prefix=1)[:, 0].tolist()
        [0.0, 2.0, 4.0, 3.0, 5.0]

    Source:
        Guoji, Improving efficient Vision Transformers with RPEs, section 5.1.
    """
    if not embeddings:
        raise ValueError(
            "the iRPE gate needs embeddings for each axis of the grid, got none"
        )
    # r[row of i] + c[column of i]
    exponents = widen(embeddings[0])
    for embedding in embeddings[1:]:
        exponents = exponents[..., :, None, :] + widen(embedding)[..., None, :, :]
        *batch, before, size, head_dim = exponents.shape
        exponents = exponents.reshape(*batch, before * size, head_dim)
    check_prefix(num_prefix + exponents.shape[-2], num_prefix)
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
    """Computes the exponents of the STRING gate from Fourier features of positions.

    e_i = g(p_i) A with g(p) = [cos(w_r . p + b_r), sin(w_r . p + b_r)], r = 1 .. rank,
    in float32 or wider; zeros for prefix tokens. Despite its name, the gate is a
    function of the absolute position.

    Args:
        positions: Positions in tokens, shape ``[n, axes]``.
        frequencies: w, radians per token, shape ``[*batch, rank, axes]``.
        phases: b, in radians, shape ``[*batch, rank]``.
        coefficients: A, shape ``[*batch, 2 rank, head_dim]``.
        num_prefix: Number of prefix tokens.
        precision: Passed to einsum.

    Returns:
        Shape ``[*batch, n, head_dim]``.

    Raises:
        ValueError: If shapes or dtypes do not fit together, A does not have one row for
            each cosine and sine, or ``num_prefix`` is negative or exceeds n.

    Example:
        >>> w, b = jnp.array([[jnp.pi]]), jnp.zeros(1)
        >>> p = np.arange(3, dtype=np.float32)[:, None]
        >>> string_exponents(p, w, b, jnp.eye(2))[:, 0].tolist()
        [1.0, -1.0, 1.0]

    Source:
        Guoji, Improving efficient Vision Transformers with RPEs, section 5.3.
    """
    rank = frequencies.shape[-2]
    if coefficients.shape[-2] != 2 * rank:
        raise ValueError(
            f"{rank} frequencies need {2 * rank} rows of coefficients, one for each "
            f"cosine and sine, got {coefficients.shape[-2]}"
        )
    # w_r . p_i + b_r
    angles = mixed_rotary_angles(positions, frequencies, num_prefix=num_prefix)
    angles = angles + widen(phases)[..., None, :]
    # g(p_i) = [cos(w_r . p_i + b_r), sin(w_r . p_i + b_r)], then g(p_i) A.
    features = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)
    exponents = wide_einsum(precision)("...nr,...rd->...nd", features, coefficients)
    return zero_prefix(exponents, num_prefix)

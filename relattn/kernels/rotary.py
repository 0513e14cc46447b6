"""Rotary position encoding: queries and keys turn by angles of their positions."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from relattn.kernels.sinusoids import absolute_frequencies


def rotary_angles(
    positions: Float[Array | np.ndarray, "n axes"],
    depth: int,
    *,
    base: float = 10000.0,
    num_prefix: int = 0,
) -> Float[Array, "n {depth//2}"]:
    """Angles of every token, one for each pair of a head's numbers.

    An axis has depth / (2 axes) frequencies w_t = base^(-t / (depth / (2 axes))), and
    the angle of an axis and frequency is w_t p_axis; the axes follow each other.
    Prefix tokens have angle zero.

    Args:
        positions: Positions in tokens, shape ``[n, axes]``.
        depth: Width of a head.
        base: Base of the geometric series of frequencies.
        num_prefix: Number of leading tokens that have no position.

    Returns:
        Angles, float32, shape ``[n, depth / 2]``.

    Raises:
        ValueError: If ``depth`` is no multiple of twice the number of axes.

    Example:
        >>> rotary_angles(np.array([[0.0], [5.0]]), 4, base=100.0).tolist()
        [[0.0, 0.0], [5.0, 0.5]]

    Source:
        Su et al., RoFormer, section 3.2.2; axes: Heo et al., Rotary Position Embedding
        for Vision Transformer, section 3.2.
    """
    num_tokens, axes = positions.shape
    if depth < 1 or depth % (2 * axes):
        raise ValueError(
            f"rotary positions of {axes} axes need a head depth (dim / heads) "
            f"divisible by {2 * axes}, got {depth}"
        )
    # The angles of far tokens lose their phase in half precision.
    positions = jnp.asarray(positions, jnp.float32)
    frequencies = absolute_frequencies(depth // (2 * axes), base)
    angles = (positions[:, :, None] * frequencies).reshape(num_tokens, -1)
    return angles.at[:num_prefix].set(0.0)


def rotate(
    x: Float[Array, "*batch n depth"],
    angles: Float[Array, "*#batch n pairs"],
    *,
    interleaved: bool = False,
) -> Float[Array, "*batch n depth"]:
    """Turns pairs of a head's numbers by angles.

    (a, b) -> (a cos t - b sin t, a sin t + b cos t), so that the product of a turned
    query and a turned key depends on the difference of their angles only.

    Args:
        x: Queries or keys, shape ``[*batch, n, depth]``.
        angles: What `rotary_angles` returns, shape ``[n, depth / 2]``.
        interleaved: Pairs are neighbours (2 t, 2 t + 1), not (t, t + depth / 2).

    Returns:
        Shape and dtype of ``x``; computed in float32.

    Raises:
        ValueError: If there is not one angle for each pair.

    Example:
        >>> quarter = jnp.full((1, 1), jnp.pi / 2)
        >>> rotate(jnp.array([[1.0, 1.0]]), quarter).round(3).tolist()
        [[-1.0, 1.0]]

    Source:
        Su et al., RoFormer, section 3.2.2.
    """
    depth = x.shape[-1]
    if depth != 2 * angles.shape[-1]:
        raise ValueError(
            f"a head of depth {depth} needs {depth / 2:g} angles a token, got "
            f"{angles.shape[-1]}"
        )
    wide = x.astype(jnp.float32)
    if interleaved:
        first, second = wide[..., ::2], wide[..., 1::2]
    else:
        first, second = jnp.split(wide, 2, axis=-1)
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    turned = [first * cosine - second * sine, first * sine + second * cosine]
    join = jnp.stack if interleaved else jnp.concatenate
    return join(turned, axis=-1).reshape(x.shape).astype(x.dtype)

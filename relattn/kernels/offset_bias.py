"""Biases that are functions of the offset, for any grid: buckets and waves."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from relattn.kernels.checks import check_arguments
from relattn.kernels.precision import widen


def offset_buckets(
    offsets: Int[np.ndarray, "..."],
    *,
    num_buckets: int = 32,
    max_distance: int = 128,
    bidirectional: bool = True,
) -> Int[np.ndarray, "..."]:
    """The bucket of every offset along an axis: narrow near by, wide far away.

    Distances below half of the buckets have one each; the other half grows as the
    logarithm of the distance up to ``max_distance``, beyond which there is one.

    Args:
        offsets: Query position minus key position, whole tokens.
        num_buckets: Number of buckets.
        max_distance: From this distance on, all share the last bucket.
        bidirectional: Whether half of the buckets are those of later keys; else all
            later keys are in the bucket of offset zero.

    Returns:
        Buckets, of the shape of ``offsets``.

    Raises:
        ValueError: If there are too few buckets, or ``max_distance`` is within those of
            a single distance.

    Example:
        >>> offset_buckets(np.array([0, 1, 7, 8, 16, 127, 999, -1])).tolist()
        [0, 1, 7, 8, 10, 15, 15, 17]

    Source:
        Raffel et al., Exploring the Limits of Transfer Learning (T5), section 2.1; the
        boundaries: its published code.
    """
    sides = 2 if bidirectional else 1
    num_exact = num_buckets // sides // 2
    if num_buckets % (2 * sides) or num_exact < 1 or max_distance <= num_exact:
        raise ValueError(
            f"offset buckets need num_buckets divisible by {2 * sides} and max_distance"
            f" > num_buckets / {2 * sides}, got num_buckets={num_buckets} and "
            f"max_distance={max_distance}"
        )
    distances = np.abs(offsets) if bidirectional else np.maximum(offsets, 0)
    growth = np.log(np.maximum(distances, num_exact) / num_exact)
    growth = growth / math.log(max_distance / num_exact) * num_exact
    # A boundary must not fall into the bucket below it by rounding.
    far = num_exact + np.floor(growth + 1e-6).astype(int)
    buckets = np.where(distances < num_exact, distances, far)
    buckets = np.minimum(buckets, num_buckets // sides - 1)
    return buckets + num_buckets // 2 * (offsets < 0) if bidirectional else buckets


@check_arguments
def wave_bias(
    offsets: Int[np.ndarray, "rows axes"],
    frequencies: Float[Array, "waves axes"],
    coefficients: Float[Array, "*heads waves 2"],
) -> Float[Array, "*heads rows"]:
    """A sum of plane waves of the offset.

    b(d) = sum_r a_r cos(w_r . d) + b_r sin(w_r . d).

    Args:
        offsets: Offsets d in tokens, shape ``[rows, axes]``.
        frequencies: Vectors w_r in radians a token, shape ``[waves, axes]``.
        coefficients: (a_r, b_r), shape ``[*heads, waves, 2]``.

    Returns:
        Biases, float32 or wider, shape ``[*heads, rows]``.

    Raises:
        ValueError: If shapes or dtypes do not fit together.

    Example:
        >>> d = np.array([[-1], [0], [1]])
        >>> wave = jnp.array([[jnp.pi / 2]]), jnp.array([[0.0, 1.0]])
        >>> wave_bias(d, *wave).round(3).tolist()
        [-1.0, 0.0, 1.0]

    Source:
        Horn et al., Translational Equivariance in Kernelizable Attention, lemma 1, for
        waves along the axes.
    """
    # The angles of far tokens lose their phase in half precision.
    angles = jnp.sum(offsets[:, None] * widen(frequencies), axis=-1)
    waves = jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=-1)
    coefficients = widen(coefficients)
    return jnp.sum(coefficients[..., None, :, :] * waves, axis=(-2, -1))

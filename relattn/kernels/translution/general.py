"""General Translution: scores and values by functions of continuous offsets."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from relattn.kernels.checks import check_arguments
from relattn.kernels.masks import finite_masked, zero_masked
from relattn.kernels.precision import widen
from relattn.kernels.softmax import masked_softmax


@check_arguments
def general_translution(
    x: Float[Array, "*batch n dim"],
    positions: Float[Array, "*#batch n axes"],
    weight_fn: Callable[[Array, Array, Array], Array],
    value_fn: Callable[[Array, Array], Array],
    *,
    key_mask: Bool[Array, "*#batch n"] | None = None,
) -> Float[Array, "*batch n width"]:
    """Computes attention by functions of the offsets between continuous positions.

    out_i = sum_j softmax_j(weight_fn(p_i - p_j, x_i, x_j)) value_fn(p_i - p_j, x_j)

    A scan over the queries evaluates both functions for all pairs of one query at a
    time; the backward pass evaluates them again. The softmax is float32 or wider. A
    query without keys gives zeros.

    Args:
        x: Tokens, shape ``[*batch, n, dim]``.
        positions: Positions of the tokens, in any number of dimensions, shape
            ``[*batch, n, axes]``.
        weight_fn: Maps offsets ``[*batch, n, axes]``, queries ``[*batch, 1, dim]`` and
            keys ``[*batch, n, dim]`` to scores ``[*batch, n]``.
        value_fn: Maps offsets ``[*batch, n, axes]`` and keys ``[*batch, n, dim]`` to
            values ``[*batch, n, width]``. Both functions must act on each pair alone.
        key_mask: True for keys that exist, shape ``[*batch, n]``.

    Returns:
        Shape ``[*batch, n, width]``, in the dtype of the values.

    Raises:
        ValueError: If shapes or dtypes do not fit together.

    Example:
        Points in space attend to nearby points and sum their offsets:

        >>> points = jnp.array([[0.0, 0.0, 0.0], [0.5, 0.0, 0.0], [9.0, 9.0, 9.0]])
        >>> features = jnp.zeros((3, 2))
        >>> def score(offset, query, key):
        ...     return jnp.sum(query * key, axis=-1) - jnp.sum(offset**2, axis=-1)
        >>> def value(offset, key):
        ...     return jnp.concatenate([offset, key], axis=-1)
        >>> out = general_translution(features, points, score, value)
        >>> out.shape, out[2].tolist()
        ((3, 5), [0.0, 0.0, 0.0, 0.0, 0.0])
        >>> moved = general_translution(features, points + 1.0, score, value)
        >>> bool(jnp.allclose(moved, out))
        True

    Source:
        Translution: Unifying Self-attention and Convolution, appendix B.
    """
    batch = x.shape[:-2]
    positions = jnp.broadcast_to(positions, (*batch, *positions.shape[-2:]))
    x, positions = (finite_masked(y, key_mask) for y in (x, positions))
    keys, key_positions, _ = zero_masked(x, positions, key_mask)

    def attend(_, query):
        # weight_fn(p_i - p_j, x_i, x_j) and value_fn(p_i - p_j, x_j) of one query i.
        x_i, position = query
        offsets = position[..., None, :] - key_positions
        scores = widen(weight_fn(offsets, x_i[..., None, :], keys))
        values = value_fn(offsets, keys)
        # sum_j softmax_j(score_ij) value_ij
        weights = masked_softmax(scores, key_mask)
        out = jnp.einsum("...j,...je->...e", weights, widen(values))
        return None, out.astype(values.dtype)

    queries = jnp.moveaxis(x, -2, 0), jnp.moveaxis(positions, -2, 0)
    body = jax.checkpoint(attend, prevent_cse=False)
    return jnp.moveaxis(jax.lax.scan(body, None, queries)[1], 0, -2)

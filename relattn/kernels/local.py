"""Attention to the neighbours in the sequence: linear in the length."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from relattn.kernels.checks import broadcast_leading, check_arguments
from relattn.kernels.linear import clear_masked
from relattn.kernels.softmax import softmax_attention
from relattn.offsets import check_prefix


@check_arguments
def local_attention(
    q: Float[Array, "*#batch n depth"],
    k: Float[Array, "*#batch n depth"],
    v: Float[Array, "*#batch n value_depth"],
    *,
    window: int,
    num_prefix: int = 0,
    key_mask: Bool[Array, "*#batch n"] | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch n value_depth"]:
    """Softmax attention to the tokens at most half a window away, on either side.

    out_i = sum_{|i - j| <= window // 2} softmax_j(q_i . k_j / sqrt(depth)) v_j

    Prefix tokens have no place in the sequence: they attend to all tokens, and all
    attend to them. A block of queries takes the keys of its own and the two next
    blocks, under the exact mask.

    Args:
        q: Queries, shape ``[*batch, n, depth]``.
        k: Keys, shape ``[*batch, n, depth]``.
        v: Values, shape ``[*batch, n, value_depth]``.
        window: Number of tokens that a query sees, itself in their middle.
        num_prefix: Number of prefix tokens.
        key_mask: True for keys that exist, shape ``[*batch, n]``.
        precision: Passed to einsum.

    Returns:
        Shape ``[*batch, n, value_depth]``, in the dtype of ``v``.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        ValueError: If the window holds no token, or there are fewer tokens than
            ``num_prefix``.

    Example:
        >>> x = jnp.zeros((5, 1))
        >>> v = jnp.arange(5.0)[:, None]
        >>> local_attention(x, x, v, window=3)[:, 0].tolist()
        [0.5, 1.0, 2.0, 3.0, 3.5]

    Source:
        Roy et al., Efficient Content-Based Sparse Attention with Routing Transformers,
        section 4 (local attention); prefix tokens: Beltagy et al., Longformer, section
        3.1 (global attention).
    """
    if window < 1:
        raise ValueError(f"local attention needs window >= 1, got {window}")
    n = q.shape[-2]
    check_prefix(n, num_prefix)
    length = n - num_prefix
    q, k, v = broadcast_leading(q, k, v)
    k, v, key_mask = clear_masked(k, v, key_mask)
    exists = jnp.ones(k.shape[:-1], bool) if key_mask is None else key_mask
    prefix = softmax_attention(
        q[..., :num_prefix, :], k, v, key_mask=exists, precision=precision
    )
    reach = window // 2
    size = max(1, min(reach, length))
    blocks = -(-length // size)
    padding = (0, blocks * size - length)

    def split(x: Array) -> Array:
        """From [*batch n width] to [*batch blocks size width]."""
        x = jnp.pad(x[..., num_prefix:, :], [(0, 0)] * (x.ndim - 2) + [padding, (0, 0)])
        return x.reshape(*x.shape[:-2], blocks, size, x.shape[-1])

    def neighbours(x: Array) -> Array:
        """The prefix, and the tokens of a block and of those beside it."""
        parts = split(x)
        edges = [(0, 0)] * (parts.ndim - 3) + [(1, 1), (0, 0), (0, 0)]
        parts = jnp.pad(parts, edges)
        before = jnp.broadcast_to(
            x[..., None, :num_prefix, :],
            (*x.shape[:-2], blocks, num_prefix, x.shape[-1]),
        )
        shifted = [parts[..., s : s + blocks, :, :] for s in range(3)]
        return jnp.concatenate([before, *shifted], axis=-2)

    places = np.arange(3 * size) - size
    near = np.abs(np.arange(size)[:, None] - places) <= reach
    near = np.pad(near, [(0, 0), (num_prefix, 0)], constant_values=True)
    allowed = neighbours(exists[..., None]).swapaxes(-1, -2) & near
    out = softmax_attention(
        split(q), neighbours(k), neighbours(v), mask=allowed, precision=precision
    )
    out = out.reshape(*out.shape[:-3], blocks * size, out.shape[-1])
    return jnp.concatenate([prefix, out[..., :length, :]], axis=-2)

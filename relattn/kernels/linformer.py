"""Linformer: attention to keys and values projected along the sequence."""

from __future__ import annotations

import functools

import jax
from jaxtyping import Array, Bool, Float

from relattn.kernels.checks import check_arguments
from relattn.kernels.masks import zero_masked
from relattn.kernels.precision import wide_einsum
from relattn.kernels.softmax import softmax_attention


@check_arguments
def linformer_attention(
    q: Float[Array, "*#batch n head_dim"],
    k: Float[Array, "*#batch m head_dim"],
    v: Float[Array, "*#batch m value_dim"],
    key_projection: Float[Array, "*#batch projected m"],
    value_projection: Float[Array, "*#batch projected m"],
    *,
    key_mask: Bool[Array, "*#batch m"] | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch n value_dim"]:
    """Computes softmax attention to projected keys and values, linear in the length.

    out_i = sum_j softmax_j(q_i . (E k)_j / sqrt(head_dim)) (F v)_j

    E and F mix tokens, so they fit a single sequence length. A masked key adds nothing
    to E k and F v. Sums are float32 or wider.

    Args:
        q: Queries, shape ``[*batch, n, head_dim]``.
        k: Keys, shape ``[*batch, m, head_dim]``.
        v: Values, shape ``[*batch, m, value_dim]``.
        key_projection: E, shape ``[*batch, projected, m]``.
        value_projection: F, shape ``[*batch, projected, m]``.
        key_mask: True for keys that exist, shape ``[*batch, m]``.
        precision: Passed to einsum.

    Returns:
        Shape ``[*batch, n, value_dim]``, in the dtype of ``v``; zeros if every key is
        masked.

    Raises:
        ValueError: If shapes or dtypes do not fit together.

    Example:
        >>> import jax.numpy as jnp
        >>> v = jnp.array([[1.0], [2.0], [6.0]])
        >>> mean = jnp.array([[0.25, 0.5, 0.25]])
        >>> linformer_attention(v, v, v, mean, mean)[:, 0].tolist()
        [2.75, 2.75, 2.75]

    Source:
        Wang et al., Linformer: Self-Attention with Linear Complexity, section 4,
        equation 7.
    """
    k, v, _ = zero_masked(k, v, key_mask)
    # E k and F v
    project = functools.partial(wide_einsum(precision), "...pm,...md->...pd")
    keys, values = project(key_projection, k), project(value_projection, v)
    # sum_j softmax_j(q_i . (E k)_j / sqrt(head_dim)) (F v)_j
    out = softmax_attention(q, keys, values, precision=precision)
    return out.astype(v.dtype)

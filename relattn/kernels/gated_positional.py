"""Gated positional attention: a gate mixes content and position weights (ConViT)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from relattn.kernels.checks import check_arguments, check_position, check_static
from relattn.kernels.flash import fused_branches
from relattn.kernels.masks import combine_masks, finite_masked, zero_masked
from relattn.kernels.positions.bias import bias_of_pairs
from relattn.kernels.precision import widen
from relattn.kernels.softmax import (
    causal_mask,
    masked_softmax,
    softmax_weights,
    weighted_sum,
)
from relattn.offsets import Grid, check_grid, table_offsets


@check_arguments
def gated_positional_attention(
    q: Float[Array, "*#batch n head_dim"],
    k: Float[Array, "*#batch n head_dim"],
    v: Float[Array, "*#batch n value_dim"],
    gate: Float[Array, "*#batch"],
    coefficients: Float[Array, "*#batch features"],
    *,
    grid: Grid,
    num_prefix: int = 0,
    key_mask: Bool[Array, "*#batch n"] | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch n value_dim"]:
    """Computes gated positional attention (ConViT).

    out_i = sum_j ((1 - g) alpha_ij + g beta_ij) v_j with g = sigmoid(gate),
    alpha_ij = softmax_j(q_i . k_j / sqrt(head_dim)), beta_ij = softmax_j(w . r_d) and
    r_d = (|d|^2, d) of the offset d = p_i - p_j.

    With prefix tokens, r has three more components: indicators of "in", "self" and
    "out" pairs as in `relattn.offsets.offset_index`. The weights sum to one, so the
    published renormalisation is left out.

    Args:
        q: Queries, shape ``[*batch, n, head_dim]``.
        k: Keys, shape ``[*batch, n, head_dim]``.
        v: Values, shape ``[*batch, n, value_dim]``.
        gate: Gate before the sigmoid, shape ``[*batch]``.
        coefficients: w, shape ``[*batch, 1 + axes]``, or ``[*batch, 4 + axes]`` with
            prefix tokens.
        grid: Size of each axis of the tokens after the prefix.
        num_prefix: Number of prefix tokens.
        key_mask: True for keys that exist, shape ``[*batch, n]``.
        precision: Passed to einsum.

    Returns:
        Shape ``[*batch, n, value_dim]``, in the dtype of ``v``.

    Raises:
        ValueError: If shapes or dtypes do not fit together, the grid does not hold the
            tokens, or w and r differ in width.

    Example:
        >>> x = jnp.zeros((3, 1))
        >>> w = jnp.array([-9.0, 18.0])  # w . r_d is largest at d = 1
        >>> gated_positional_attention(
        ...     x, x, jnp.eye(3), jnp.array(99.0), w, grid=(3,))[1].round(3).tolist()
        [1.0, 0.0, 0.0]

    Source:
        d'Ascoli et al., ConViT, section 3; Translution, appendix E, 5.
    """
    check_grid(q.shape[-2], grid, num_prefix)
    return _attend(
        q,
        k,
        v,
        gate,
        coefficients,
        key_mask,
        grid=grid,
        num_prefix=num_prefix,
        causal=False,
        precision=precision,
    )


@check_arguments
def causal_gated_positional_attention(
    q: Float[Array, "*#batch n head_dim"],
    k: Float[Array, "*#batch n head_dim"],
    v: Float[Array, "*#batch n value_dim"],
    gate: Float[Array, "*#batch"],
    coefficients: Float[Array, "*#batch features"],
    *,
    key_mask: Bool[Array, "*#batch n"] | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch n value_dim"]:
    """Computes `gated_positional_attention` of tokens to themselves and earlier ones.

    out_i = sum_{j <= i} ((1 - g) alpha_ij + g beta_ij) v_j with g = sigmoid(gate),
    alpha_ij = softmax_{j <= i}(q_i . k_j / sqrt(head_dim)),
    beta_ij = softmax_{j <= i}(w . r_d) and r_d = (d^2, d) of the offset d = i - j.

    Args:
        q: Queries, shape ``[*batch, n, head_dim]``.
        k: Keys, shape ``[*batch, n, head_dim]``.
        v: Values, shape ``[*batch, n, value_dim]``.
        gate: Gate before the sigmoid, shape ``[*batch]``.
        coefficients: w, shape ``[*batch, 2]``.
        key_mask: True for keys that exist, shape ``[*batch, n]``.
        precision: Passed to einsum.

    Returns:
        Shape ``[*batch, n, value_dim]``, in the dtype of ``v``.

    Raises:
        ValueError: If shapes or dtypes do not fit together, or w and r differ in width.

    Example:
        >>> x, w = jnp.zeros((3, 1)), jnp.array([-9.0, 18.0])
        >>> causal_gated_positional_attention(
        ...     x, x, jnp.eye(3), jnp.array(99.0), w)[2].round(3).tolist()
        [0.0, 1.0, 0.0]

    Source:
        d'Ascoli et al., ConViT, section 3; Translution, appendix E, 5.
    """
    length = q.shape[-2]
    check_static(length, "Causal gated positional attention")
    return _attend(
        q,
        k,
        v,
        gate,
        coefficients,
        key_mask,
        grid=(length,),
        num_prefix=0,
        causal=True,
        precision=precision,
    )


@check_arguments
def causal_gated_positional_attention_step(
    q_i: Float[Array, "*#batch head_dim"],
    k: Float[Array, "*#batch length head_dim"],
    v: Float[Array, "*#batch length value_dim"],
    gate: Float[Array, "*#batch"],
    coefficients: Float[Array, "*#batch features"],
    *,
    index: Int[Array, ""] | int,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch value_dim"]:
    """Computes `causal_gated_positional_attention` for one token, for decoding.

    out_i = sum_{j <= i} ((1 - g) alpha_ij + g beta_ij) v_j, i = ``index``, with
    weights as in `causal_gated_positional_attention`.

    Args:
        q_i: The token's query, shape ``[*batch, head_dim]``.
        k: Keys up to and including the token's, shape ``[*batch, length, head_dim]``;
            later ones are ignored.
        v: Values up to and including the token's, shape
            ``[*batch, length, value_dim]``; later ones are ignored.
        gate: Gate before the sigmoid, shape ``[*batch]``.
        coefficients: w, shape ``[*batch, 2]``.
        index: The token's position in the sequence; may be traced.
        precision: Passed to einsum.

    Returns:
        The token's output, shape ``[*batch, value_dim]``, in the dtype of ``v``.

    Raises:
        ValueError: If shapes or dtypes do not fit together, w and r differ in width, or
            ``index`` is not below ``length``.

    Example:
        >>> x, w = jnp.zeros((3, 1)), jnp.array([-9.0, 18.0])
        >>> causal_gated_positional_attention_step(
        ...     x[2], x, jnp.eye(3), jnp.array(99.0), w, index=2).round(3).tolist()
        [0.0, 1.0, 0.0]

    Source:
        d'Ascoli et al., ConViT, section 3; Translution, appendix E, 5.
    """
    length = k.shape[-2]
    check_position(index, length)
    past = jnp.arange(length) <= index
    scores = _offset_scores(coefficients, (length,), 0)
    # w . r_(index - j) for every key j.
    scores = jax.lax.dynamic_slice_in_dim(
        jnp.flip(scores, -1), length - 1 - index, length, axis=-1
    )[..., None, :]
    k, v, exists = zero_masked(k, v, past)
    q = q_i[..., None, :]
    # alpha_ij and beta_ij over j <= i.
    content = softmax_weights(q, k, key_mask=exists, precision=precision)
    out = _mix(content, masked_softmax(scores, past), gate, v, precision)
    return out[..., 0, :]


def _attend(
    q, k, v, gate, coefficients, key_mask, *, grid, num_prefix, causal, precision
):
    """Computes both forms of the attention, by kernels of the platform if it has them.

    A kernel computes the sums with alpha_ij and with beta_ij, and the gate mixes them.
    """
    # w . r_d of every table row.
    scores = _offset_scores(coefficients, grid, num_prefix)
    q = finite_masked(q, key_mask)
    k, v, key_mask = zero_masked(k, v, key_mask)

    def all_pairs(q, k, v, key_mask, gate, scores):
        # j <= i
        past = causal_mask(0, grid[0], grid[0]) if causal else None
        allowed = None if key_mask is None else key_mask[..., None, :]
        # alpha_ij = softmax_j(q_i . k_j / sqrt(head_dim)), beta_ij = softmax_j(w . r_d)
        content = softmax_weights(
            q, k, mask=past, key_mask=key_mask, precision=precision
        )
        position = bias_of_pairs(scores, grid, num_prefix)
        position = masked_softmax(position, combine_masks(past, allowed))
        return _mix(content, position, gate, v, precision)

    arguments = (q, k, v, key_mask, gate, scores)
    branches = fused_branches(
        q,
        k,
        v,
        causal=causal,
        precision=precision,
        bias=scores,
        grid=grid,
        num_prefix=num_prefix,
    )
    if not branches:
        return all_pairs(*arguments)

    def mix(attend, q, k, v, key_mask, gate, scores):
        content = attend(q, k, v, key_mask, None, None)
        # Queries and keys of zero: scores are those of the offsets alone.
        none = jnp.zeros((v.shape[-2], 1), v.dtype)
        position = attend(none, none, v, key_mask, None, scores)
        gate = jax.nn.sigmoid(widen(gate))[..., None, None]
        out = (1 - gate) * widen(content) + gate * position
        return out.astype(v.dtype)

    forms = {
        platform: functools.partial(mix, attend)
        for platform, attend in branches.items()
    }
    return jax.lax.platform_dependent(*arguments, **forms, default=all_pairs)


def _offset_scores(coefficients, grid, num_prefix):
    """Computes w . r for every table row of `offset_index`, in float32 or wider."""
    # r_d = (|d|^2, d).
    d = table_offsets(grid)
    features = np.concatenate([(d**2).sum(-1, keepdims=True), d], axis=-1)
    if num_prefix:
        # Indicators of the rows "in", "self" and "out".
        features = np.pad(features, [(0, 3), (0, 3)])
        features[-3:, -3:] = np.eye(3)
    width = features.shape[-1]
    if coefficients.shape[-1] != width:
        raise ValueError(
            f"gated positional attention on a grid of {len(grid)} axes and "
            f"num_prefix={num_prefix} needs {width} coefficients, got "
            f"{coefficients.shape[-1]}"
        )
    # Squares of offsets soon exceed what half precision can represent.
    coefficients = widen(coefficients)
    features = jnp.asarray(features, coefficients.dtype)
    return (coefficients[..., None, :] * features).sum(axis=-1)


def _mix(content, position, gate, v, precision):
    """Computes sum_j ((1 - g) alpha_ij + g beta_ij) v_j with g = sigmoid(gate)."""
    gate = jax.nn.sigmoid(widen(gate))[..., None, None]
    weights = (1 - gate) * content + gate * position
    return weighted_sum(weights, v, precision).astype(v.dtype)

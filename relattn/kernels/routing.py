"""Routing Transformer: attention within clusters of tokens, and local attention."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float

from relattn.kernels.checks import (
    at_most,
    bound_hint,
    broadcast_batch,
    check_arguments,
    check_size,
)
from relattn.kernels.masks import finite_masked, zero_masked
from relattn.kernels.precision import wide_einsum, widen
from relattn.kernels.softmax import softmax_attention
from relattn.offsets import check_prefix

_EPSILON = 1e-5


@check_arguments
def routing_attention(
    q: Float[Array, "*#batch n head_dim"],
    k: Float[Array, "*#batch n head_dim"],
    v: Float[Array, "*#batch n value_dim"],
    centroids: Float[Array, "*#batch clusters head_dim"],
    *,
    window: int,
    key_mask: Bool[Array, "*#batch n"] | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch n value_dim"]:
    """Computes softmax attention within clusters of queries and keys.

    out_i = mean_{c : i in Q_c} sum_{j in K_c} softmax_j(q'_i . k'_j / sqrt(head_dim))
    v_j

    with q' and k' layer-normalised (mean 0, variance 1), and Q_c and K_c the ``window``
    queries and keys with the largest q'_i . mu_c and k'_j . mu_c. A token may be in
    several clusters; a query in none gives zeros. Queries and keys are assigned
    separately, by the same centroids. The assignment depends on all tokens, so there is
    no causal form, and it has no gradient. Masked tokens are never assigned.

    Args:
        q: Queries, shape ``[*batch, n, head_dim]``.
        k: Keys, shape ``[*batch, n, head_dim]``.
        v: Values, shape ``[*batch, n, value_dim]``.
        centroids: mu, shape ``[*batch, clusters, head_dim]``.
        window: Number of queries and of keys in a cluster, at most n.
        key_mask: True for tokens that exist, shape ``[*batch, n]``.
        precision: Passed to einsum.

    Returns:
        Shape ``[*batch, n, value_dim]``, in the dtype of ``v``.

    Raises:
        ValueError: If shapes or dtypes do not fit together, or ``window`` is not
            from 1 to n.

    Example:
        >>> x = jnp.array([[2.0, -2.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, 2.0]])
        >>> centroids = jnp.array([[1.0, -1.0], [-1.0, 1.0]])
        >>> v = jnp.array([[1.0], [3.0], [5.0], [9.0]])
        >>> routing_attention(x, x, v, centroids, window=2)[:, 0].round().tolist()
        [2.0, 2.0, 7.0, 7.0]

    Source:
        Roy et al., Efficient Content-Based Sparse Attention with Routing Transformers,
        section 4.1 and algorithm 1 (not causal); the mean over clusters: the authors'
        code.
    """
    n = q.shape[-2]
    if not (window >= 1 and at_most(window, n)):
        raise ValueError(
            f"window must be from 1 to {n}, the number of tokens, got {window}"
            + bound_hint(n, f">= {window}")
        )
    q, k, v, _ = broadcast_batch(q, k, v, centroids)
    if key_mask is not None:
        q = jnp.where(key_mask[..., None], q, 0)
    k, v, key_mask = zero_masked(k, v, key_mask)
    # q' and k'
    q, k = _layer_norm(q), _layer_norm(k)
    # Q_c and K_c, the largest q'_i . mu_c and k'_j . mu_c.
    queries, query_exists = _assign(q, centroids, window, key_mask)
    keys, key_exists = _assign(k, centroids, window, key_mask)
    # sum_{j in K_c} softmax_j(q'_i . k'_j / sqrt(head_dim)) v_j of every i in Q_c.
    out = softmax_attention(
        _gather(q, queries),
        _gather(k, keys),
        _gather(widen(v), keys),
        key_mask=key_exists,
        precision=precision,
    )
    # mean_{c : i in Q_c}; a column of ones counts the clusters of a query.
    out = jnp.concatenate([out, jnp.ones_like(out[..., :1])], axis=-1)
    total = _sum_by_token(jnp.where(query_exists[..., None], out, 0.0), queries, n)
    return (total[..., :-1] / jnp.maximum(total[..., -1:], 1.0)).astype(v.dtype)


@check_arguments
def local_attention(
    q: Float[Array, "*#batch n head_dim"],
    k: Float[Array, "*#batch n head_dim"],
    v: Float[Array, "*#batch n value_dim"],
    *,
    window: int,
    num_prefix: int = 0,
    key_mask: Bool[Array, "*#batch n"] | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch n value_dim"]:
    """Computes softmax attention to tokens at most half a window away on either side.

    out_i = sum_{|i - j| <= window // 2} softmax_j(q_i . k_j / sqrt(head_dim)) v_j

    Prefix tokens have no position: they attend to all tokens, and all tokens attend to
    them. Each block of queries is compared with the keys of its own block and of the
    two neighbouring blocks, with an exact mask.

    Args:
        q: Queries, shape ``[*batch, n, head_dim]``.
        k: Keys, shape ``[*batch, n, head_dim]``.
        v: Values, shape ``[*batch, n, value_dim]``.
        window: Window size: a query attends to ``window // 2`` tokens on either side.
        num_prefix: Number of prefix tokens.
        key_mask: True for keys that exist, shape ``[*batch, n]``.
        precision: Passed to einsum.

    Returns:
        Shape ``[*batch, n, value_dim]``, in the dtype of ``v``.

    Raises:
        ValueError: If shapes or dtypes do not fit together, ``window`` is less than
            one, or ``num_prefix`` is negative or exceeds n.

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
    check_size("window", window)
    n = q.shape[-2]
    check_prefix(n, num_prefix)
    length = n - num_prefix
    q, k, v = broadcast_batch(finite_masked(q, key_mask), k, v)
    k, v, key_mask = zero_masked(k, v, key_mask)
    exists = jnp.ones(k.shape[:-1], bool) if key_mask is None else key_mask
    # Prefix queries attend to all tokens.
    prefix = []
    if num_prefix:
        prefix_q = q[..., :num_prefix, :]
        prefix = [
            softmax_attention(prefix_q, k, v, key_mask=exists, precision=precision)
        ]
    # Blocks of `size` tokens reach their window within the neighbouring blocks.
    reach = window // 2
    size = max(1, reach if is_symbolic_dim(n) else min(reach, length))
    blocks = -(-length // size)
    padding = (0, blocks * size - length)

    def split(x: Array) -> Array:
        """Splits [*batch, n, width] into [*batch, blocks, size, width]."""
        x = jnp.pad(x[..., num_prefix:, :], [(0, 0)] * (x.ndim - 2) + [padding, (0, 0)])
        return x.reshape(*x.shape[:-2], blocks, size, x.shape[-1])

    def neighbours(x: Array) -> Array:
        """Joins the prefix, the previous, own and next block of every block."""
        parts = split(x)
        edges = [(0, 0)] * (parts.ndim - 3) + [(1, 1), (0, 0), (0, 0)]
        parts = jnp.pad(parts, edges)
        shared = jnp.broadcast_to(
            x[..., None, :num_prefix, :],
            (*x.shape[:-2], blocks, num_prefix, x.shape[-1]),
        )
        shifted = [parts[..., s : s + blocks, :, :] for s in range(3)]
        return jnp.concatenate([shared, *shifted], axis=-2)

    # |i - j| <= reach within the three blocks; the prefix is always allowed.
    positions = np.arange(3 * size) - size
    near = np.abs(np.arange(size)[:, None] - positions) <= reach
    near = np.pad(near, [(0, 0), (num_prefix, 0)], constant_values=True)
    allowed = neighbours(exists[..., None]).swapaxes(-1, -2) & near
    # sum_{|i - j| <= window // 2} softmax_j(q_i . k_j / sqrt(head_dim)) v_j
    out = softmax_attention(
        split(q), neighbours(k), neighbours(v), mask=allowed, precision=precision
    )
    out = out.reshape(*out.shape[:-3], blocks * size, out.shape[-1])
    return jnp.concatenate([*prefix, out[..., :length, :]], axis=-2)


@check_arguments
def cluster_sums(
    x: Float[Array, "*batch n head_dim"],
    centroids: Float[Array, "*#batch clusters head_dim"],
    *,
    key_mask: Bool[Array, "*#batch n"] | None = None,
) -> tuple[Float[Array, "*batch clusters head_dim"], Float[Array, "*batch clusters"]]:
    """Computes the sum and the number of the tokens nearest to each centroid.

    sum_c = sum_{j : c = argmax_c mu_c . x'_j} x'_j / sqrt(head_dim)

    with x' layer-normalised, so that x' / sqrt(head_dim) has norm 1.

    Args:
        x: Queries or keys, shape ``[*batch, n, head_dim]``.
        centroids: mu, shape ``[*batch, clusters, head_dim]``.
        key_mask: True for tokens that exist, shape ``[*batch, n]``.

    Returns:
        Sums, shape ``[*batch, clusters, head_dim]``, and counts, shape
        ``[*batch, clusters]``; float32 or wider, without gradients.

    Raises:
        ValueError: If shapes or dtypes do not fit together.

    Example:
        >>> x = jnp.array([[1.0, -1.0], [-1.0, 1.0], [-3.0, 3.0]])
        >>> sums, counts = cluster_sums(x, jnp.array([[1.0, 0.0], [0.0, 1.0]]))
        >>> counts.tolist()
        [1.0, 2.0]

    Source:
        Roy et al., Efficient Content-Based Sparse Attention with Routing Transformers,
        section 4.1.
    """
    if key_mask is not None:
        x = jnp.where(key_mask[..., None], x, 0)
    x = jax.lax.stop_gradient(_layer_norm(x))
    # c = argmax_c mu_c . x'_j of every token, as one-hot rows.
    clusters = centroids.shape[-2]
    nearest = wide_einsum(None)("...nd,...cd->...nc", x, centroids).argmax(axis=-1)
    members = jax.nn.one_hot(nearest, clusters, dtype=x.dtype)
    if key_mask is not None:
        members = jnp.where(key_mask[..., None], members, 0.0)
    # sum_{j : c} x'_j / sqrt(head_dim)
    sums = jnp.einsum("...nc,...nd->...cd", members, x) * x.shape[-1] ** -0.5
    return sums, members.sum(axis=-2)


@check_arguments
def update_centroids(
    centroids: Float[Array, "*batch clusters head_dim"],
    sums: Float[Array, "*batch clusters head_dim"],
    counts: Float[Array, "*batch clusters"],
    *,
    decay: float,
) -> Float[Array, "*batch clusters head_dim"]:
    """Moves centroids towards the means of their clusters on the unit sphere.

    mu'_c = u / |u| with u = decay mu_c + (1 - decay) sum_c / count_c

    The centroid of an empty cluster does not change.

    Args:
        centroids: mu, of norm 1, shape ``[*batch, clusters, head_dim]``.
        sums: Sums from `cluster_sums`, added up over queries, keys and examples, shape
            ``[*batch, clusters, head_dim]``.
        counts: Counts from `cluster_sums`, added up in the same way, shape
            ``[*batch, clusters]``. A common factor of sums and counts cancels.
        decay: Weight of the old centroids, from 0 to 1.

    Returns:
        The new centroids, of norm 1, shape ``[*batch, clusters, head_dim]``.

    Raises:
        ValueError: If shapes or dtypes do not fit together, or ``decay`` is not from 0
            to 1.

    Example:
        >>> mu = jnp.array([[1.0, 0.0], [0.0, 1.0]])
        >>> sums, counts = jnp.array([[0.0, 4.0], [0.0, 0.0]]), jnp.array([4.0, 0.0])
        >>> moved = update_centroids(mu, sums, counts, decay=0.5)
        >>> (moved[0, 0] == moved[0, 1]).item(), moved[1].tolist()
        (True, [0.0, 1.0])

    Source:
        Roy et al., Efficient Content-Based Sparse Attention with Routing Transformers,
        algorithm 1; the mean instead of the sum, which grows with the sequence length,
        and the norm 1 are ours.
    """
    if not isinstance(decay, Tracer) and not 0 <= decay <= 1:
        raise ValueError(f"decay must be from 0 to 1, got {decay}")
    # u = decay mu_c + (1 - decay) sum_c / count_c, then u / |u|.
    counts = counts[..., None]
    means = sums / jnp.where(counts > 0, counts, 1.0)
    moved = unit_vectors(decay * centroids + (1 - decay) * means)
    return jnp.where(counts > 0, moved, centroids)


def unit_vectors(x: Float[Array, "*batch head_dim"]) -> Float[Array, "*batch head_dim"]:
    """Scales vectors to norm 1; zeros stay zeros."""
    # In float16, 1e-12 would be zero.
    wide = widen(x)
    squared = jnp.maximum(jnp.square(wide).sum(-1, keepdims=True), 1e-12)
    return (wide * jax.lax.rsqrt(squared)).astype(x.dtype)


def _layer_norm(x: Array) -> Array:
    """Normalises to mean 0 and variance 1 (norm sqrt(head_dim)), float32 or wider."""
    x = widen(x)
    x = x - x.mean(axis=-1, keepdims=True)
    variance = jnp.square(x).mean(axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(variance + _EPSILON)


def _assign(
    x: Array, centroids: Array, window: int, exists: Array | None
) -> tuple[Array, Array]:
    """Returns the tokens of every cluster and whether they exist.

    Both have shape ``[*batch, clusters, window]``.
    """
    x = jax.lax.stop_gradient(x)
    scores = wide_einsum(None)("...nd,...cd->...cn", x, centroids)
    if exists is None:
        exists = jnp.ones((1,) * (x.ndim - 2) + (x.shape[-2],), bool)
    exists = jnp.broadcast_to(exists[..., None, :], scores.shape)
    _, tokens = jax.lax.top_k(jnp.where(exists, scores, -jnp.inf), window)
    return tokens, jnp.take_along_axis(exists, tokens, axis=-1)


def _flatten(tokens: Array) -> Array:
    """Reshapes [*batch, clusters, window] to [*batch, clusters * window]."""
    *batch, clusters, window = tokens.shape
    return tokens.reshape(*batch, clusters * window)


def _gather(x: Array, tokens: Array) -> Array:
    """Gathers rows of [*batch, n, width]: [*batch, clusters, window, width]."""
    rows = jnp.take_along_axis(
        x, _flatten(tokens)[..., None], axis=-2, mode="promise_in_bounds"
    )
    return rows.reshape(*tokens.shape, x.shape[-1])


def _sum_by_token(rows: Array, tokens: Array, n: int) -> Array:
    """Sums [*batch, clusters, window, width] by token: [*batch, n, width]."""
    batch, width = tokens.shape[:-2], rows.shape[-1]

    def add(rows: Array, tokens: Array) -> Array:
        return jax.ops.segment_sum(rows, tokens, n)

    tokens = _flatten(tokens)
    size = math.prod(batch), tokens.shape[-1]
    total = jax.vmap(add)(rows.reshape(*size, width), tokens.reshape(size))
    return total.reshape(*batch, n, width)

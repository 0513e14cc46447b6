"""Attention within clusters of tokens (Routing Transformer), and local attention."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from relattn.kernels.checks import broadcast_leading, check_arguments, zero_masked
from relattn.kernels.precision import widen
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
    """Softmax attention within clusters of queries and keys.

    out_i = mean_{c : i in Q_c} sum_{j in K_c} softmax_j(q'_i . k'_j / sqrt(head_dim))
    v_j

    with q' and k' layer-normalised (mean 0, variance 1), and Q_c and K_c the ``window``
    queries and keys with the largest q'_i . mu_c and k'_j . mu_c. A token may be in
    several clusters, or in none: then its output is zero. Queries and keys choose
    apart, by the same centroids. The choice depends on all tokens, so that there is no
    causal form; it has no gradient. A masked token is never chosen.

    Args:
        q: Queries, shape ``[*batch, n, head_dim]``.
        k: Keys, shape ``[*batch, n, head_dim]``.
        v: Values, shape ``[*batch, n, value_dim]``.
        centroids: mu, shape ``[*batch, clusters, head_dim]``.
        window: Number of queries, and of keys, of a cluster, at most n.
        key_mask: True for tokens that exist, shape ``[*batch, n]``.
        precision: Passed to einsum.

    Returns:
        Shape ``[*batch, n, value_dim]``, in the dtype of ``v``.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        ValueError: If the window holds no token, or more than there are.

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
    if not 1 <= window <= n:
        raise ValueError(
            f"routing needs a window of 1 to n={n} tokens, got window={window}"
        )
    q, k, v = broadcast_leading(q, k, v)
    k, v, key_mask = zero_masked(k, v, key_mask)
    q, k = _layer_norm(q), _layer_norm(k)
    queries, answered = _choose(q, centroids, window, key_mask)
    keys, exist = _choose(k, centroids, window, key_mask)
    out = softmax_attention(
        _gather(q, queries),
        _gather(k, keys),
        _gather(widen(v), keys),
        key_mask=exist,
        precision=precision,
    )
    # A column of ones counts the clusters that a query is in.
    out = jnp.concatenate([out, jnp.ones_like(out[..., :1])], axis=-1)
    total = _scatter(jnp.where(answered[..., None], out, 0.0), queries, n)
    return (total[..., :-1] / jnp.maximum(total[..., -1:], 1.0)).astype(v.dtype)


@check_arguments
def cluster_sums(
    x: Float[Array, "*batch n head_dim"],
    centroids: Float[Array, "*#batch clusters head_dim"],
    *,
    key_mask: Bool[Array, "*#batch n"] | None = None,
) -> tuple[Float[Array, "*batch clusters head_dim"], Float[Array, "*batch clusters"]]:
    """Sums and counts of the tokens whose nearest centroid is that of a cluster.

    sum_c = sum_{j : c = argmax_c mu_c . x'_j} x'_j / sqrt(head_dim)

    with x' layer-normalised, so that x' / sqrt(head_dim) has the norm 1.

    Args:
        x: Queries or keys, shape ``[*batch, n, head_dim]``.
        centroids: mu, shape ``[*batch, clusters, head_dim]``.
        key_mask: True for tokens that exist, shape ``[*batch, n]``.

    Returns:
        The sums and the counts, float32 or wider, without gradients.

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
    x = jax.lax.stop_gradient(_layer_norm(x))
    clusters = centroids.shape[-2]
    nearest = jnp.einsum("...nd,...cd->...nc", x, centroids).argmax(axis=-1)
    members = jax.nn.one_hot(nearest, clusters, dtype=x.dtype)
    if key_mask is not None:
        members = jnp.where(key_mask[..., None], members, 0.0)
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
    """Moves centroids towards the means of their clusters, on the unit sphere.

    mu'_c = u / |u| with u = decay mu_c + (1 - decay) sum_c / count_c

    The centroid of a cluster without tokens stays.

    Args:
        centroids: mu, of norm 1, shape ``[*batch, clusters, head_dim]``.
        sums: Of `cluster_sums`, over queries, keys and examples.
        counts: Likewise, shape ``[*batch, clusters]``; a scale that both have in
            common does not matter.
        decay: Weight of the past, from 0 to 1.

    Returns:
        The new centroids, of norm 1.

    Raises:
        ValueError: If shapes or dtypes do not fit together.

    Example:
        >>> mu = jnp.array([[1.0, 0.0], [0.0, 1.0]])
        >>> sums, counts = jnp.array([[0.0, 4.0], [0.0, 0.0]]), jnp.array([4.0, 0.0])
        >>> moved = update_centroids(mu, sums, counts, decay=0.5)
        >>> (moved[0, 0] == moved[0, 1]).item(), moved[1].tolist()
        (True, [0.0, 1.0])

    Source:
        Roy et al., Efficient Content-Based Sparse Attention with Routing Transformers,
        algorithm 1, with the mean in place of the sum, whose size goes with the length
        of the sequence, and kept at norm 1.
    """
    counts = counts[..., None]
    means = sums / jnp.where(counts > 0, counts, 1.0)
    moved = unit_vectors(decay * centroids + (1 - decay) * means)
    return jnp.where(counts > 0, moved, centroids)


def unit_vectors(x: Float[Array, "*batch head_dim"]) -> Float[Array, "*batch head_dim"]:
    """Scales vectors to the norm 1; zeros stay zeros."""
    return x * jax.lax.rsqrt(jnp.maximum(jnp.square(x).sum(-1, keepdims=True), 1e-12))


def _layer_norm(x: Array) -> Array:
    """Mean 0 and variance 1 in wide floats: directions, of norm sqrt(head_dim)."""
    x = widen(x)
    x = x - x.mean(axis=-1, keepdims=True)
    variance = jnp.square(x).mean(axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(variance + _EPSILON)


def _choose(
    x: Array, centroids: Array, window: int, exists: Array | None
) -> tuple[Array, Array]:
    """The tokens of every cluster, ``[*batch clusters window]``, and which exist."""
    scores = jnp.einsum("...nd,...cd->...cn", jax.lax.stop_gradient(x), centroids)
    if exists is None:
        exists = jnp.ones((1,) * (x.ndim - 2) + (x.shape[-2],), bool)
    exists = jnp.broadcast_to(exists[..., None, :], scores.shape)
    _, chosen = jax.lax.top_k(jnp.where(exists, scores, -jnp.inf), window)
    return chosen, jnp.take_along_axis(exists, chosen, axis=-1)


def _flat(chosen: Array) -> Array:
    """From [*batch clusters window] to one axis of the tokens of all clusters."""
    *batch, clusters, window = chosen.shape
    return chosen.reshape(*batch, clusters * window)


def _gather(x: Array, chosen: Array) -> Array:
    """From [*batch n width] to [*batch clusters window width]."""
    rows = jnp.take_along_axis(
        x, _flat(chosen)[..., None], axis=-2, mode="promise_in_bounds"
    )
    return rows.reshape(*chosen.shape, x.shape[-1])


def _scatter(rows: Array, chosen: Array, n: int) -> Array:
    """Adds up [*batch clusters window width] by token: [*batch n width]."""
    batch, width = chosen.shape[:-2], rows.shape[-1]

    def add(rows: Array, chosen: Array) -> Array:
        return jax.ops.segment_sum(rows, chosen, n)

    chosen = _flat(chosen)
    size = math.prod(batch), chosen.shape[-1]
    total = jax.vmap(add)(rows.reshape(*size, width), chosen.reshape(size))
    return total.reshape(*batch, n, width)


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
    """Softmax attention to the tokens at most half a window away, on either side.

    out_i = sum_{|i - j| <= window // 2} softmax_j(q_i . k_j / sqrt(head_dim)) v_j

    Prefix tokens have no place in the sequence: they attend to all tokens, and all
    attend to them. A block of queries takes the keys of its own and the two next
    blocks, under the exact mask.

    Args:
        q: Queries, shape ``[*batch, n, head_dim]``.
        k: Keys, shape ``[*batch, n, head_dim]``.
        v: Values, shape ``[*batch, n, value_dim]``.
        window: Number of tokens that a query sees, itself in their middle.
        num_prefix: Number of prefix tokens.
        key_mask: True for keys that exist, shape ``[*batch, n]``.
        precision: Passed to einsum.

    Returns:
        Shape ``[*batch, n, value_dim]``, in the dtype of ``v``.

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
    k, v, key_mask = zero_masked(k, v, key_mask)
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

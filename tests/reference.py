"""Naive float64 references of every kernel, written to be read.

Each function takes and returns arrays without leading axes and forms all n x m weights.
Run them under ``jax.enable_x64(True)``.
"""

import jax
import jax.numpy as jnp
import numpy as np


def sinusoids(positions, frequencies):
    """[sin w p, cos w p] for every axis of a position, then every frequency."""
    rows = []
    for position in positions:
        row = []
        for coordinate in position:
            for frequency in frequencies:
                angle = frequency * coordinate
                row += [jnp.sin(angle), jnp.cos(angle)]
        rows.append(jnp.stack(row))
    return jnp.stack(rows)


def constrained_scores(query_positions, key_positions, frequencies, coefficients):
    """Lemma 1: sum of a cos w (p_i - p_j) + b sin w (p_i - p_j); [n, m] scores.

    ``coefficients`` holds (a, b) for every axis, then every frequency.
    """
    rows = []
    for query in query_positions:
        row = []
        for key in key_positions:
            pairs = iter(coefficients)
            score = 0.0
            for axis in range(len(query)):
                for frequency in frequencies:
                    a, b = next(pairs)
                    angle = frequency * (query[axis] - key[axis])
                    score += a * jnp.cos(angle) + b * jnp.sin(angle)
            row.append(score)
        rows.append(jnp.stack(row))
    return jnp.stack(rows)


def softmax_attention(q, k, v, allowed, bias=0.0):
    """Over the keys that ``allowed [n, m]`` lets a query see."""
    weights = jnp.exp(q @ k.T / q.shape[1] ** 0.5 + bias)
    return _weighted_mean(jnp.where(allowed, weights, 0.0), v)


def positive_features(x, projection):
    """exp(w x~ - |x~|^2 / 2) / sqrt(features) of one vector."""
    x = x / len(x) ** 0.25
    return jnp.exp(projection @ x - x @ x / 2) / len(projection) ** 0.5


def trigonometric_features(x, projection):
    """exp(|x~|^2 / 2) [cos w x~, sin w x~] / sqrt(features) of one vector."""
    x = x / len(x) ** 0.25
    waves = jnp.concatenate([jnp.cos(projection @ x), jnp.sin(projection @ x)])
    return jnp.exp(x @ x / 2) * waves / len(projection) ** 0.5


def relu_features(x, projection, bias=0.0, eps=1e-3):
    """max(w x~ + b, 0) + eps of one vector."""
    return jnp.maximum(projection @ (x / len(x) ** 0.25) + bias, 0) + eps


def linear_attention(q, k, v, feature_map, allowed):
    """Weights phi(q_i) . phi(k_j), for a map of single vectors."""
    weights = jax.vmap(feature_map)(q) @ jax.vmap(feature_map)(k).T
    return _weighted_mean(jnp.where(allowed, weights, 0.0), v)


def _weighted_mean(weights, v):
    """Zeros where there is nothing to weigh."""
    total = weights.sum(axis=1, keepdims=True)
    return weights @ v / jnp.where(total == 0, 1.0, total)


def banded_attention(q, v, table, log_phi, grid, num_prefix=0, key_mask=None):
    """Weights phi(q_i) . phi(w_distance) of every key, normalised; positive features.

    ``log_phi`` maps [n, depth] to the logarithms of features, [n, features].
    """
    n, clip = len(q), len(table) - 1
    distances = np.full((n, n), clip)
    for i in range(num_prefix, n):
        for j in range(num_prefix, n):
            (a, b), (c, d) = (divmod(token - num_prefix, grid[1]) for token in (i, j))
            distances[i, j] = min(abs(a - c) + abs(b - d), clip)
    allowed = np.ones(n, bool) if key_mask is None else np.asarray(key_mask)
    products = log_phi(q)[:, None] + log_phi(table)[distances[:, allowed]]
    scores = jax.nn.logsumexp(products, axis=-1)
    return jax.nn.softmax(scores, axis=-1) @ v[allowed]

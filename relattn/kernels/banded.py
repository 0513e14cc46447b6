"""Attention whose weights depend on the query and on the distance of the key only.

All keys at one distance share a weight, so the values are summed over rings of equal
distance first. The rings do not depend on the queries, and each follows from the one
inside it: time and memory are O(n clip).
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from relattn.kernels.checks import broadcast_leading, check_arguments
from relattn.kernels.feature_maps import Features
from relattn.kernels.linear import FeatureMap, divide_sums, evaluate
from relattn.kernels.precision import wide_einsum, widen
from relattn.offsets import Grid, check_grid


@check_arguments
def banded_attention(
    q: Float[Array, "*#batch n head_dim"],
    v: Float[Array, "*#batch n value_dim"],
    table: Float[Array, "rows head_dim"],
    feature_map: FeatureMap,
    *,
    grid: Grid,
    num_prefix: int = 0,
    key_mask: Bool[Array, "*#batch n"] | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch n value_dim"]:
    """Banded relative-distance attention (strategy 2).

    out_i = sum_j phi(q_i) . phi(w_dist(i,j)) v_j / sum_j phi(q_i) . phi(w_dist(i,j)),
    dist the Manhattan distance on the grid, clipped at ``clip = rows - 1``. Prefix
    tokens are at distance ``clip`` from every token, themselves included.

    Features, weights and sums are float32 or wider. Exponents are shifted before they
    are exponentiated, by maxima over the rows that the query meets, so that a query's
    sum of positive weights is at least one. Where weights of both signs (trigonometric
    features) nearly cancel in a query's sum, the denominator is held at 1e-4 of the sum
    of their magnitudes, with its sign. A query without keys gives zeros. Derivatives
    are reverse-mode only.

    Args:
        q: Queries, shape ``[*batch, n, head_dim]``.
        v: Values, shape ``[*batch, n, value_dim]``.
        table: w, one row a distance from 0 to ``clip``, shape ``[clip + 1, head_dim]``.
        feature_map: phi, as in `relattn.kernels.linear.linear_attention`.
        grid: Height and width, or length, of the tokens after the prefix.
        num_prefix: Number of prefix tokens.
        key_mask: True for keys that exist, shape ``[*batch, n]``.
        precision: Passed to einsum.

    Returns:
        Shape ``[*batch, n, value_dim]``, in the dtype of ``v``.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        ValueError: If the table has fewer than two rows, or the grid does not hold the
            tokens.

    Example:
        >>> phi = lambda x: jnp.exp(x)
        >>> v = jnp.array([[0.0], [1.0], [5.0]])
        >>> table = jnp.array([[0.0], [-30.0]])
        >>> banded_attention(v, v, table, phi, grid=(1, 3)).round(3).tolist()
        [[0.0], [1.0], [5.0]]

    Source:
        Horn et al., Translational Equivariance in Kernelizable Attention, section 2.3,
        strategy 2; normalised, as their code is and their equation is not.
    """
    check_grid(v.shape[-2], grid, num_prefix)
    if len(table) < 2:
        raise ValueError(
            "table has one row for each distance from 0 to clip, with clip >= 1: "
            f"expected at least 2 rows, got {len(table)}"
        )
    grid = (1, *grid) if len(grid) == 1 else grid
    q, v = broadcast_leading(q, v)
    values = widen(v)
    keys = jnp.ones((v.shape[-2], 1), values.dtype)
    if key_mask is not None:
        values = jnp.where(key_mask[..., None], values, 0.0)
        keys = key_mask[..., None].astype(values.dtype)

    # Rings further out than the grid is wide are empty: their rows meet no query.
    num_rings = min(len(table) - 1, sum(grid) - 1)
    table = jnp.concatenate([table[:num_rings], table[-1:]])
    counts, num_keys = _count(keys, grid, num_prefix, num_rings)
    total = values.sum(axis=-2, keepdims=True)
    image = _to_grid(values, grid, num_prefix)

    weights, magnitudes = _weighted_sum(
        evaluate(feature_map, q[..., num_prefix:, :]),
        evaluate(feature_map, table),
        counts > 0,
        # Without a mask every query of a grid this large meets every row.
        shared_shift=key_mask is None and num_rings <= grid[0] // 2 + grid[1] // 2,
        precision=precision,
    )
    near, far = weights[..., :-1], weights[..., -1:]
    # Far values are all values less the rings, so a ring weighs by the difference.
    correction = _ring_sum(_to_grid(near - far, grid), image)
    num_tokens = math.prod(grid)
    correction = correction.reshape(*v.shape[:-2], num_tokens, v.shape[-1])
    numerator = correction + far * total
    denominator = (weights * counts).sum(axis=-1, keepdims=True)
    if magnitudes is not None:
        magnitudes = (magnitudes * counts).sum(axis=-1, keepdims=True)
    sums = jnp.concatenate([numerator, denominator], axis=-1)
    out, _ = divide_sums(sums, magnitudes, v.dtype)
    if num_prefix:
        # A prefix query weighs all keys alike, whatever the weight.
        mean = total / jnp.maximum(num_keys, 1.0)
        shape = (*v.shape[:-2], num_prefix, v.shape[-1])
        prefix = jnp.broadcast_to(mean, shape).astype(v.dtype)
        out = jnp.concatenate([prefix, out], axis=-2)
    return out


def _to_grid(x, grid, num_prefix=0):
    return x[..., num_prefix:, :].reshape(*x.shape[:-2], *grid, x.shape[-1])


def _count(keys, grid, num_prefix, num_rings):
    """Numbers of keys at every distance, [*batch n rows], and of all keys."""
    rings = jnp.concatenate(_rings(_to_grid(keys, grid, num_prefix), num_rings), -1)
    rings = rings.reshape(*keys.shape[:-2], math.prod(grid), num_rings)
    num_keys = keys.sum(axis=-2, keepdims=True)
    far = num_keys - rings.sum(axis=-1, keepdims=True)
    return jnp.concatenate([rings, far], axis=-1), num_keys


def _weighted_sum(queries, rows, present, *, shared_shift, precision):
    """Weights phi(q_i) . phi(w_d), up to a factor a query; zero where d is absent.

    Returns:
        Weights and, where the features may be negative, their magnitudes; shape
        ``[*batch n rows]``.
    """
    dot = functools.partial(wide_einsum(precision), "...nf,df->...nd")
    if queries.values is None and shared_shift:
        shift = jax.lax.stop_gradient(rows.exponents.max(axis=0))
        exponents = queries.exponents + shift
        largest = jax.lax.stop_gradient(exponents.max(axis=-1, keepdims=True))
        keys = jnp.exp(rows.exponents - shift)
        return dot(jnp.exp(exponents - largest), keys), None

    if queries.values is not None and queries.exponents.shape[-1] == 1:
        # The exponent of a query is a factor of all its weights: it cancels.
        exponents = rows.exponents[:, 0]
        pair = (queries.values, rows.values)
        weights, magnitudes = dot(*pair), dot(*map(jnp.abs, pair))
    else:
        weights, magnitudes, exponents = _exact_weighted_sum(queries, rows)
    exponents = jnp.where(present, exponents, -jnp.inf)
    largest = jax.lax.stop_gradient(exponents.max(axis=-1, keepdims=True))
    # Finite, so that a query that meets no row has weights of zero, not NaN.
    scale = jnp.exp(exponents - jnp.maximum(largest, jnp.finfo(exponents.dtype).min))
    if magnitudes is not None:
        magnitudes = jax.lax.stop_gradient(magnitudes * scale)
    return weights * scale, magnitudes


def _exact_weighted_sum(queries, rows):
    """Weights, magnitudes and the exponents to scale them by, row by row.

    Each pair of a query and a row has a shift of its own, so that rows whose exponents
    lie far apart, of which a query may meet the smaller only, do not underflow.
    """

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def weighted_sum(row):
        exponents = queries.exponents + row.exponents
        largest = jax.lax.stop_gradient(exponents.max(axis=-1, keepdims=True))
        products = jnp.exp(exponents - largest)
        if row.values is None:
            return products.sum(axis=-1), None, largest[..., 0]
        products = products * queries.values * row.values
        return products.sum(axis=-1), jnp.abs(products).sum(axis=-1), largest[..., 0]

    scanned = Features(rows.values, rows.exponents)
    results = jax.lax.map(weighted_sum, scanned)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, -1), results)


def _pad(x, margin):
    """Zeros around the grid, [*batch height width e]."""
    pads = [(0, 0)] * (x.ndim - 3) + [(margin, margin)] * 2 + [(0, 0)]
    # Recomputing the padding for every slice would cost more than all the sums.
    return jax.lax.optimization_barrier(jnp.pad(x, pads))


def _rings(x, num):
    """Sums over the tokens at distance 0 .. num - 1, each [*batch height width e].

    The ring at distance d is the pair of tokens d columns away, the part below and the
    part above; below_d at row r is pair_{d-1} + below_{d-1} at row r + 1.
    """
    height, width = x.shape[-3:-1]
    margin = num - 1
    padded = _pad(x, margin)
    num_rows = height + 2 * margin

    def inner(part, start):
        return part[..., start : start + height, :, :]

    rings = [x]
    pair = padded[..., margin : margin + width, :]
    below = above = jnp.zeros_like(pair)
    for d in range(1, num):
        # below holds the padded rows 0 .. num_rows - d, above d .. num_rows.
        below = (pair[..., : num_rows - d + 1, :, :] + below)[..., 1:, :, :]
        above = (pair[..., d - 1 :, :, :] + above)[..., :-1, :, :]
        left = padded[..., margin - d : margin - d + width, :]
        pair = left + padded[..., margin + d : margin + d + width, :]
        rings.append(
            inner(pair, margin) + inner(below, margin) + inner(above, margin - d)
        )
    return rings


@jax.custom_vjp
def _ring_sum(weights, x):
    """Sum over d of weights_d times the ring at distance d of x, [*batch h w e]."""
    rings = _rings(x, weights.shape[-1])
    return sum(weights[..., d, None] * ring for d, ring in enumerate(rings))


def _ring_sum_forward(weights, x):
    return _ring_sum(weights, x), (weights, x)


def _ring_sum_backward(residuals, cotangent):
    weights, x = residuals
    rings = jnp.stack(_rings(x, weights.shape[-1]), axis=-2)
    # XLA would sum the rings anew for every weight.
    rings = jax.lax.optimization_barrier(rings)
    return (
        jnp.einsum("...de,...e->...d", rings, cotangent),
        _sum_of_rings(weights, cotangent),
    )


_ring_sum.defvjp(_ring_sum_forward, _ring_sum_backward)


def _sum_of_rings(weights, x):
    """Sum over d of the ring at distance d of weights_d x, the adjoint in x.

    A ring operator is its own adjoint. The sum runs from the outermost ring inwards,
    `_rings` in reverse: what is d rows away moves one row nearer at every step.
    """
    height, width = x.shape[-3:-1]
    num = weights.shape[-1]
    margin = num - 1
    weights, x = _pad(weights, margin), _pad(x, margin)
    num_rows = height + 2 * margin

    def inner(part, start):
        return part[..., start : start + height, :, :]

    result = 0.0
    below = above = jnp.zeros_like(x)
    for step in range(num):
        d = margin - step
        ring = weights[..., d, None] * x
        # below holds the padded rows 0 .. num_rows - step, above step .. num_rows.
        row = inner(ring, margin) + inner(below, margin) + inner(above, margin - step)
        left = row[..., margin - d : margin - d + width, :]
        right = row[..., margin + d : margin + d + width, :]
        result = result + (left + right if d else left)
        below = (ring[..., : num_rows - step, :, :] + below)[..., 1:, :, :]
        above = (ring[..., step:, :, :] + above)[..., :-1, :, :]
    return result

"""Banded attention: weights depend on the query and the clipped distance of the key.

All keys at the same distance share a weight, so values are first summed over rings of
equal distance. The rings do not depend on the queries, and each is computed from the
next smaller one. Time and memory are O(n clip).
"""

from __future__ import annotations

import functools
import math
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from relattn.kernels.checks import broadcast_batch, check_arguments
from relattn.kernels.feature_maps import (
    FeatureMap,
    Features,
    check_feature_maps,
    key_features,
    query_features,
)
from relattn.kernels.guards import (
    FLOAT32_MIN,
    divide_sums,
    shifted_exp,
)
from relattn.kernels.masks import finite_masked
from relattn.kernels.platform import vary_alike
from relattn.kernels.positions.bias import longer_axes
from relattn.kernels.precision import wide_einsum, widen
from relattn.messages import check_choice
from relattn.offsets import Grid, Torus, check_grid, max_distance

# Where prefix queries stand: at distance clip from all keys, or at (height, 0).
PLACES = ("far", "corner")


@check_arguments
def banded_attention(
    q: Float[Array, "*#batch n head_dim"],
    v: Float[Array, "*#batch n value_dim"],
    table: Float[Array, "rows head_dim"],
    feature_map: FeatureMap,
    *,
    grid: Grid,
    num_prefix: int = 0,
    cls: str = "far",
    key_mask: Bool[Array, "*#batch n"] | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch n value_dim"]:
    """Computes banded relative-distance attention (strategy 2).

    out_i = sum_j phi(q_i) . phi(w_dist(i,j)) v_j / sum_j phi(q_i) . phi(w_dist(i,j)),
    with dist the Manhattan distance on the grid, clipped at ``clip = rows - 1``. Prefix
    tokens are at distance ``clip`` from every token, including themselves. With
    ``cls="corner"`` prefix queries stand at (height, 0) instead, below the bottom left
    token: the token in row r and column c is at distance height - r + c from them. As
    keys, prefix tokens remain at ``clip`` for all queries. A volume has no such place.

    Features, weights and sums are float32 or wider. Exponents are shifted by their
    maximum over the table rows at which the query has keys, so that positive weights
    sum to at least one for each query. If weights of both signs (trigonometric
    features) nearly cancel, the denominator is clamped to 1e-4 of the sum of their
    magnitudes and keeps its sign. A query without keys gives zeros. Derivatives
    are in reverse mode only.

    Args:
        q: Queries, shape ``[*batch, n, head_dim]``.
        v: Values, shape ``[*batch, n, value_dim]``.
        table: w, a row for each distance 0 .. ``clip``, shape ``[clip + 1, head_dim]``.
        feature_map: phi, from ``[*batch, n, head_dim]`` to features, token by token; or
            a pair of such functions, of queries and of the table.
        grid: Size of each axis of the tokens after the prefix.
        num_prefix: Number of prefix tokens.
        cls: Where prefix queries stand, ``"far"`` or ``"corner"``. A torus has no row
            below the last, and so no corner; nor has a grid of more than two axes. A
            length is one row.
        key_mask: True for keys that exist, shape ``[*batch, n]``.
        precision: Passed to einsum.

    Returns:
        Shape ``[*batch, n, value_dim]``, in the dtype of ``v``.

    Raises:
        ValueError: If shapes or dtypes do not fit together, the table has fewer than
            two rows, its features have batch axes, the grid does not hold the tokens,
            or ``cls`` is unknown or does not fit the grid.

    Example:
        >>> phi = lambda x: jnp.exp(x)
        >>> v = jnp.array([[0.0], [1.0], [5.0]])
        >>> table = jnp.array([[0.0], [-30.0]])
        >>> banded_attention(v, v, table, phi, grid=(1, 3)).round(3).tolist()
        [[0.0], [1.0], [5.0]]

    Source:
        Horn et al., Translational Equivariance in Kernelizable Attention, section 2.3,
        strategy 2; normalised as in their code, not their equation. The paper does not
        say where CLS stands; ``"corner"`` is what their code computes.
    """
    check_grid(v.shape[-2], grid, num_prefix)
    check_feature_maps(feature_map, q, table)
    if len(table) < 2:
        raise ValueError(
            "table needs one row for each distance from 0 to clip, with clip >= 1: "
            f"expected at least 2 rows, got {len(table)}"
        )
    check_choice("cls", cls, PLACES)
    if cls == "corner" and (isinstance(grid, Torus) or len(grid) > 2):
        raise ValueError(
            f"cls='corner' needs a grid with a last row, got {grid}: use cls='far'"
        )
    # Rings pad each axis.
    given, grid = grid, longer_axes(grid)
    q, v = broadcast_batch(finite_masked(q, key_mask), v)
    values = widen(v)
    keys = jnp.ones((v.shape[-2], 1), values.dtype)
    if key_mask is not None:
        values = jnp.where(key_mask[..., None], values, 0.0)
        keys = key_mask[..., None].astype(values.dtype)

    # Drop rows that have no keys.
    farthest = max_distance(grid) + (cls == "corner")
    num_rings = min(len(table) - 1, farthest + 1)
    table = jnp.concatenate([table[:num_rings], table[-1:]])
    # Number of keys at each distance of each query, and sum_j v_j.
    counts, num_keys = _count_keys(keys, grid, num_prefix, num_rings)
    total = values.sum(axis=-2, keepdims=True)
    image = _to_grid(values, grid, num_prefix)

    # phi(q_i) . phi(w_d) for every query of the grid and distance d.
    rows = key_features(feature_map, table)
    shapes = [x.shape for x in jax.tree.leaves(rows[:2])]
    if max(map(len, shapes)) > 2:
        raise ValueError(
            "all batch axes share a table, and must share its features [rows, "
            f"features], got shape {max(shapes, key=len)}: use jax.vmap for heads with "
            "feature maps of their own"
        )
    weights, magnitudes = _row_weights(
        query_features(feature_map, q[..., num_prefix:, :]),
        rows,
        counts > 0,
        # Without a mask, each query of such a grid has keys at every distance.
        shared_shift=key_mask is None and num_rings <= sum(side // 2 for side in grid),
        precision=precision,
    )
    near, far = weights[..., :-1], weights[..., -1:]
    # sum_j far v_j, corrected by (near_d - far) times the ring sum of each distance d.
    sum_rings = _meeting_ring_sum if _rings_meet(grid, num_rings) else _ring_sum
    by_ring = vary_alike(_to_grid(near - far, grid), image)
    correction = cast(Array, sum_rings(grid, *by_ring))
    num_tokens = math.prod(grid)
    correction = correction.reshape(*v.shape[:-2], num_tokens, v.shape[-1])
    numerator = correction + far * total
    # sum_d weight_d (number of keys at d), and the same with magnitudes, for the guard.
    denominator = (weights * counts).sum(axis=-1, keepdims=True)
    if magnitudes is not None:
        magnitudes = (magnitudes * counts).sum(axis=-1, keepdims=True)
    # sum_j weight_ij v_j / sum_j weight_ij of the grid's queries; prefix queries next.
    out, _ = divide_sums((numerator, denominator), magnitudes, v.dtype)
    if num_prefix and cls == "corner":
        queries = query_features(feature_map, q[..., :num_prefix, :])
        prefix = _attend_from_corner(queries, rows, keys, values, given, precision)
        out = jnp.concatenate([prefix.astype(v.dtype), out], axis=-2)
    elif num_prefix:
        # All keys have the same distance from a prefix query: their mean.
        mean = total / jnp.maximum(num_keys, 1.0)
        shape = (*v.shape[:-2], num_prefix, v.shape[-1])
        prefix = jnp.broadcast_to(mean, shape).astype(v.dtype)
        out = jnp.concatenate([prefix, out], axis=-2)
    return out


def _attend_from_corner(queries, rows, keys, values, grid, precision):
    """Attends from (height, 0), the place below the bottom left token."""
    height, width = grid if len(grid) == 2 else (1, *grid)
    num_rows = rows.exponents.shape[0]
    # Every distance without a ring, like that of prefix keys, has the last row.
    row, column = np.indices((height, width)).reshape(2, -1)
    distances = np.full(keys.shape[-2], num_rows - 1)
    distances[-row.size :] = np.minimum(height - row + column, num_rows - 1)
    select = (distances == np.arange(num_rows)[:, None]).astype(values.dtype)

    def sum_by_distance(x):
        # As exact as the sums of `_rings`, which have no matrix product.
        return jnp.einsum("dm,...me->...de", select, x, precision="highest")

    # Number of keys at each distance d, and phi(q_i) . phi(w_d).
    counts = jnp.swapaxes(sum_by_distance(keys), -1, -2)
    weights, magnitudes = _row_weights(
        queries, rows, counts > 0, shared_shift=False, precision=precision
    )
    # sum_d weight_d (sum of v_j at d), and the denominator.
    sums = sum_by_distance(values)
    numerator = jnp.einsum("...nd,...de->...ne", weights, sums, precision="highest")
    denominator = (weights * counts).sum(axis=-1, keepdims=True)
    if magnitudes is not None:
        magnitudes = (magnitudes * counts).sum(axis=-1, keepdims=True)
    return divide_sums((numerator, denominator), magnitudes, values.dtype)[0]


def _to_grid(x, grid, num_prefix=0):
    """Reshapes grid tokens from [*batch, n, e] to [*batch, *grid, e]."""
    return x[..., num_prefix:, :].reshape(*x.shape[:-2], *grid, x.shape[-1])


def _count_keys(keys, grid, num_prefix, num_rings):
    """Counts keys by distance, [*batch, n, rows], and all keys, [*batch, 1, 1]."""
    find_rings = _meeting_rings if _rings_meet(grid, num_rings) else _rings
    rings = find_rings(grid, _to_grid(keys, grid, num_prefix), num_rings)
    rings = jnp.concatenate(rings, axis=-1)
    rings = rings.reshape(*keys.shape[:-2], math.prod(grid), num_rings)
    num_keys = keys.sum(axis=-2, keepdims=True)
    far = num_keys - rings.sum(axis=-1, keepdims=True)
    return jnp.concatenate([rings, far], axis=-1), num_keys


def _row_weights(queries, rows, present, *, shared_shift, precision):
    """Computes phi(q_i) . phi(w_d) up to a factor per query; zero if no key is at d.

    Also returns the weights' magnitudes, or None if no feature is negative. Both have
    shape ``[*batch, n, rows]``.
    """
    dot = functools.partial(wide_einsum(precision), "...nf,df->...nd")
    # phi(q_i) . phi(w_d) = sum_f e^(b_if + a_df): one shift c_f = max_d a_df for each
    # feature, then one for each query, r_i = max_f (b_if + c_f).
    if queries.values is None and shared_shift:
        shift = jax.lax.stop_gradient(rows.exponents.max(axis=0))
        exponents = queries.exponents + shift
        largest = exponents.max(axis=-1, keepdims=True)
        keys = shifted_exp(rows.exponents, shift)
        return dot(shifted_exp(exponents, largest), keys), None

    if queries.values is not None and queries.exponents.shape[-1] == 1:
        # A query's single exponent scales all its weights, so it cancels.
        exponents = rows.exponents[:, 0]
        pair = (queries.values, rows.values)
        weights, magnitudes = dot(*pair), dot(*map(jnp.abs, pair))
    else:
        weights, magnitudes, exponents = _exact_row_weights(queries, rows)
    # Shift by the maximum over the rows with keys.
    exponents = jnp.where(present, exponents, -jnp.inf)
    largest = exponents.max(axis=-1, keepdims=True)
    # Finite, so that a query without keys has zero weights, not NaN.
    scale = shifted_exp(exponents, jnp.maximum(largest, FLOAT32_MIN))
    if magnitudes is not None:
        magnitudes = jax.lax.stop_gradient(magnitudes * scale)
    return weights * scale, magnitudes


def _exact_row_weights(queries, rows):
    """Computes weights, magnitudes and the exponents that scale them, row by row.

    Each pair of a query and a row is shifted separately. Otherwise a query that has
    keys only at the rows with small exponents would underflow.
    """

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def row_weights(row):
        # sum_f e^(b_if + a_df - max_f (b_if + a_df)), times the factors.
        exponents = queries.exponents + row.exponents
        largest = jax.lax.stop_gradient(exponents.max(axis=-1, keepdims=True))
        products = shifted_exp(exponents, largest)
        if row.values is None:
            return products.sum(axis=-1), None, largest[..., 0]
        products = products * queries.values * row.values
        return products.sum(axis=-1), jnp.abs(products).sum(axis=-1), largest[..., 0]

    scanned = Features(rows.values, rows.exponents)
    results = jax.lax.map(row_weights, scanned)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, -1), results)


def _pad(grid, x, margin):
    """Pads the grid of [*batch, *grid, e] with zeros; a torus with its other side."""
    axes = len(grid)
    pads = [(0, 0)] * (x.ndim - axes - 1) + [(margin, margin)] * axes + [(0, 0)]
    mode = "wrap" if isinstance(grid, Torus) else "constant"
    # Without the barrier XLA recomputes the padding for every slice, which costs more
    # than all the sums.
    return jax.lax.optimization_barrier(jnp.pad(x, pads, mode))


def _slice(x, axis, start, stop):
    """Slices an axis, counted from the last."""
    return jax.lax.slice_in_dim(x, start, stop, axis=x.ndim + axis)


def _pair(x, d, margin):
    """Sums the two tokens d away along the last, padded axis; x itself for d = 0."""
    size = x.shape[-2] - 2 * margin
    before, after = (
        _slice(x, -2, first, first + size) for first in (margin - d, margin + d)
    )
    return before + after if d else after


def _rings_meet(grid, num):
    """Returns whether a ring goes round a torus so far that it meets itself."""
    return isinstance(grid, Torus) and 2 * (num - 1) >= min(grid)


def _rings(grid, x, num):
    """Sums x over the tokens at distance 0 .. num - 1, each [*batch, *grid, e].

    Rings grow axis by axis, the last axis first. In rows and columns,
    ring_d[r] = pair_d[r] + below_d[r] + above_d[r], where pair_d sums the two tokens d
    columns away in the same row, below_d[r] = (pair_{d-1} + below_{d-1})[r + 1] and
    above_d[r] = (pair_{d-1} + above_{d-1})[r - 1]. A further axis does the same with
    the rings so far in place of the pairs.
    """
    margin = num - 1
    padded = _pad(grid, x, margin)
    rings = [_pair(padded, d, margin) for d in range(num)]
    for axis in range(-3, -len(grid) - 2, -1):
        rings = _grow_rings(rings, axis)
    return rings


def _grow_rings(rings, axis):
    """Extends rings of the later axes to one more axis, and removes its padding."""
    num, padded_size = len(rings), rings[0].shape[axis]
    margin = num - 1
    size = padded_size - 2 * margin

    def on_grid(part, start):
        return _slice(part, axis, start, start + size)

    grown = [on_grid(rings[0], margin)]
    below = above = jnp.zeros_like(rings[0])
    for d in range(1, num):
        # below holds the padded rows 0 .. padded_size - d - 1, above d ..
        # padded_size - 1.
        length = padded_size - d + 1
        below = _slice(_slice(rings[d - 1], axis, 0, length) + below, axis, 1, length)
        above = _slice(rings[d - 1], axis, d - 1, padded_size) + above
        above = _slice(above, axis, 0, length - 1)
        grown.append(
            on_grid(rings[d], margin)
            + on_grid(below, margin)
            + on_grid(above, margin - d)
        )
    return grown


def _meeting_rings(grid, x, num):
    """Does what `_rings` does on a torus, where distances go the shortest way round.

    ring_d[r] = sum_s over the two rows s away (one if 2 s = height) of pair_{d-s}.
    """

    def both_ways(x, d, axis):
        """Sums the two tokens d away along an axis, once if they are the same."""
        ahead = jnp.roll(x, d, axis)
        return ahead if 2 * d in (0, x.shape[axis]) else ahead + jnp.roll(x, -d, axis)

    rings = [both_ways(x, d, -2) for d in range(min(num, x.shape[-2] // 2 + 1))]
    for axis in range(-3, -len(grid) - 2, -1):
        half = x.shape[axis] // 2
        rings = [
            sum(
                both_ways(rings[d - s], s, axis)
                for s in range(min(d, half) + 1)
                if d - s < len(rings)
            )
            for d in range(min(num, len(rings) + half))
        ]
    return rings


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=0)
def _meeting_ring_sum(grid, weights, x):
    """Computes `_ring_sum` of `_meeting_rings`."""
    rings = _meeting_rings(grid, x, weights.shape[-1])
    return sum(weights[..., d, None] * ring for d, ring in enumerate(rings))


def _weigh_rings(grid, weights, x):
    """Computes sum_d weights_d ring_d(x): [*batch, *grid, e]."""
    rings = _rings(grid, x, weights.shape[-1])
    return sum(weights[..., d, None] * ring for d, ring in enumerate(rings))


_ring_sum = jax.custom_vjp(_weigh_rings, nondiff_argnums=(0,))


def _ring_sum_forward(grid, weights, x):
    # The plain function: forward mode, as in `jax.hessian`, refuses the other.
    return _weigh_rings(grid, weights, x), (weights, x)


def _ring_sum_backward(grid, residuals, cotangent):
    weights, x = residuals
    rings = jnp.stack(_rings(grid, x, weights.shape[-1]), axis=-2)
    # Without the barrier XLA recomputes the rings for every weight.
    rings = jax.lax.optimization_barrier(rings)
    # As exact as the forward pass, which has no matrix product.
    of_weights = jnp.einsum("...de,...e->...d", rings, cotangent, precision="highest")
    of_x = _ring_sum_adjoint(grid, weights, cotangent)
    return of_weights.astype(weights.dtype), jnp.asarray(of_x, x.dtype)


_ring_sum.defvjp(_ring_sum_forward, _ring_sum_backward)


def _ring_sum_adjoint(grid, weights, x):
    """Computes sum_d ring_d(weights_d x), the adjoint of `_ring_sum` in x.

    ring_d is self-adjoint. The loops are those of `_rings` in reverse.
    """
    num = weights.shape[-1]
    margin = num - 1
    weights, x = _pad(grid, weights, margin), _pad(grid, x, margin)
    rings = [weights[..., d, None] * x for d in range(num)]
    for axis in range(-len(grid) - 1, -2):
        rings = _shrink_rings(rings, axis)
    return sum(_pair(rings[d], d, margin) for d in range(margin, -1, -1))


def _shrink_rings(rings, axis):
    """Sums along an axis what the rings of the later axes need of it.

    result_d = rings_d + sum_s rings_{d+s} over the rows s above and s below, for s > 0,
    without the padding. The loop runs from d = num - 1 down to 0: each step moves the
    partial sums below and above one row nearer.
    """
    num, padded_size = len(rings), rings[0].shape[axis]
    margin = num - 1
    size = padded_size - 2 * margin

    def on_grid(part, start):
        return _slice(part, axis, start, start + size)

    shrunk = []
    below = above = jnp.zeros_like(rings[0])
    for step, ring in enumerate(reversed(rings)):
        # below holds the padded rows 0 .. padded_size - step - 1, above step ..
        # padded_size - 1.
        shrunk.append(
            on_grid(ring, margin)
            + on_grid(below, margin)
            + on_grid(above, margin - step)
        )
        length = padded_size - step
        below = _slice(_slice(ring, axis, 0, length) + below, axis, 1, length)
        above = _slice(ring, axis, step, padded_size) + above
        above = _slice(above, axis, 0, length - 1)
    return shrunk[::-1]

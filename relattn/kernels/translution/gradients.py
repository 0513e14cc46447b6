"""Scores and values, offset by offset, with gradients written by hand.

No projection larger than that of one offset is materialised. The backward pass runs the
same loops, computes the projections again, and writes the gradient of each matrix once.
TPUs loop over rows of queries instead (`relattn.kernels.translution.rows`), GPUs over
blocks of pairs (`relattn.kernels.translution.gathered`) or, if causal, of diagonals
(`relattn.kernels.translution.diagonals`).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array

from relattn.kernels.precision import compute_dtype, widen
from relattn.kernels.translution.layouts import (
    OffsetScan,
    add_rectangle,
    get_row,
    rectangle,
    set_row,
)
from relattn.kernels.translution.prefix import (
    add_prefix_scores,
    add_prefix_values,
    prefix_rows,
    project,
)


def _pair_scores(scan, q, k, t_q, t_k):
    """Computes q . k of pairs, [pairs heads], from their tokens and matrices."""
    # q_ij = x_i Tq[d] and k_ji = x_j Tk[-d], then their product in every head.
    q, k = project(q, t_q, scan.precision), project(k, t_k, scan.precision)
    products = widen(q) * widen(k)
    shape = (products.shape[0], scan.num_heads, scan.head_dim)
    return products.reshape(shape).sum(axis=-1)


def _pair_values(scan, weights, v, t_v):
    """Computes weighted values of pairs, [pairs heads * head_dim]."""
    # weights_ij x_j T[d]
    v = widen(project(v, t_v, scan.precision))
    shape = (v.shape[0], scan.num_heads, scan.head_dim)
    weighted = weights[..., None] * v.reshape(shape)
    return weighted.reshape(v.shape)


def _scores_by_offset(
    scan: OffsetScan, q: Array, k: Array, t_q: Array | None, t_k: Array | None
) -> Array:
    """Computes q_ij . k_ji of all pairs, offset by offset, [batch heads n n]."""
    grid_q, grid_k = scan.to_grid(q), scan.to_grid(k)

    def step(carry, rows, corners, shape, _):
        rectangles = (
            rectangle(grid_q, corners[0], shape),
            rectangle(grid_k, corners[1], shape),
        )
        # x_i Tq[d] . x_j Tk[-d] of the pairs at offset d; Tk[d] if causal.
        matrices = get_row(t_q, rows[0]), get_row(t_k, rows[1])
        return carry, _pair_scores(scan, *rectangles, *matrices)

    # Scores by offset and pair, then [batch heads n n].
    _, slots = scan.over_offsets(step, None, [None] * len(scan.plan.buckets))
    scores = scan.from_slots(slots, q.shape[0])
    rows = prefix_rows(scan, t_q), prefix_rows(scan, t_k)
    return add_prefix_scores(scan, scores, q, k, *rows)


scan_scores = jax.custom_vjp(_scores_by_offset, nondiff_argnums=(0,))


def _scores_forward(scan, q, k, t_q, t_k):
    # The plain function: forward mode, as in `jax.hessian`, refuses the other.
    return _scores_by_offset(scan, q, k, t_q, t_k), (q, k, t_q, t_k)


def _scores_backward(scan, residuals, cotangent):
    q, k, t_q, t_k = residuals
    grid_q, grid_k = scan.to_grid(q), scan.to_grid(k)

    def step(carry, rows, corners, shape, slots):
        # With g_ij the gradient of a score, tokens get dx_i += g_ij x_j Tk[-d] Tq[d]^T
        # and dx_j likewise. A matrix belongs to this offset alone, so its gradient
        # dTq[d] = sum_ij x_i^T g_ij x_j Tk[-d] is complete after this step.
        dq, dk, dt_q, dt_k = carry
        _, pull_back = jax.vjp(
            functools.partial(_pair_scores, scan),
            rectangle(grid_q, corners[0], shape),
            rectangle(grid_k, corners[1], shape),
            get_row(t_q, rows[0]),
            get_row(t_k, rows[1]),
        )
        add_q, add_k, row_q, row_k = pull_back(slots)
        carry = (
            add_rectangle(dq, corners[0], shape, add_q),
            add_rectangle(dk, corners[1], shape, add_k),
            set_row(dt_q, rows[0], row_q),
            set_row(dt_k, rows[1], row_k),
        )
        return carry, None

    # Gradients of the pairs with a prefix token.
    inner = cotangent[:, :, scan.num_prefix :, scan.num_prefix :]
    rows = prefix_rows(scan, t_q), prefix_rows(scan, t_k)
    if scan.num_prefix:
        _, pull_back = jax.vjp(
            functools.partial(add_prefix_scores, scan, inner), q, k, *rows
        )
        add_q, add_k, *rows = pull_back(cotangent)
    # Gradients of the pairs of the grid, offset by offset.
    carry = (
        _wide_zeros(grid_q),
        _wide_zeros(grid_k),
        _start_gradient(scan, t_q, rows[0]),
        _start_gradient(scan, t_k, rows[1]),
    )
    (dq, dk, dt_q, dt_k), _ = scan.over_offsets(step, carry, scan.to_slots(inner))
    dq, dk = scan.from_grid(dq), scan.from_grid(dk)
    if scan.num_prefix:
        prefix = [(0, 0), (scan.num_prefix, 0), (0, 0)]
        add_q, add_k = widen(add_q), widen(add_k)
        dq, dk = jnp.pad(dq, prefix) + add_q, jnp.pad(dk, prefix) + add_k
    return dq.astype(q.dtype), dk.astype(k.dtype), dt_q, dt_k


scan_scores.defvjp(_scores_forward, _scores_backward)


def _values_by_offset(scan: OffsetScan, weights: Array, v: Array, t_v: Array) -> Array:
    """Computes sum_j weights_ij v_j T[d], offset by offset, [batch n width]."""
    grid_v = scan.to_grid(v)

    def step(out, rows, corners, shape, slots):
        # out_i += weights_ij x_j T[d] for the pairs at offset d.
        tokens = rectangle(grid_v, corners[1], shape)
        values = _pair_values(scan, slots, tokens, get_row(t_v, rows[0]))
        return add_rectangle(out, corners[0], shape, values), None

    inner = weights[:, :, scan.num_prefix :, scan.num_prefix :]
    width = scan.num_heads * scan.head_dim
    out = jnp.zeros((*grid_v.shape[:-1], width), compute_dtype(weights, v, t_v))
    out, _ = scan.over_offsets(step, out, scan.to_slots(inner))
    out = scan.from_grid(out)
    return add_prefix_values(scan, out, weights, v, prefix_rows(scan, t_v))


scan_values = jax.custom_vjp(_values_by_offset, nondiff_argnums=(0,))


def _values_forward(scan, weights, v, t_v):
    return _values_by_offset(scan, weights, v, t_v), (weights, v, t_v)


def _values_backward(scan, residuals, cotangent):
    weights, v, t_v = residuals
    prefix = scan.num_prefix
    grid_v, grid_out = scan.to_grid(v), scan.to_grid(cotangent)

    def step(carry, rows, corners, shape, slots):
        # With g_i the gradient of an output: dweights_ij = g_i . x_j T[d], dx_j +=
        # weights_ij g_i T[d]^T, and dT[d] = sum_ij weights_ij x_j^T g_i is complete.
        dv, dt_v = carry
        _, pull_back = jax.vjp(
            functools.partial(_pair_values, scan),
            slots,
            rectangle(grid_v, corners[1], shape),
            get_row(t_v, rows[0]),
        )
        slots, add, row = pull_back(rectangle(grid_out, corners[0], shape))
        dv = add_rectangle(dv, corners[1], shape, add)
        return (dv, set_row(dt_v, rows[0], row)), slots

    # Gradients of the pairs with a prefix token.
    rows = prefix_rows(scan, t_v)
    if prefix:
        grid_part = cotangent[:, prefix:]
        _, pull_back = jax.vjp(
            functools.partial(add_prefix_values, scan, grid_part), weights, v, rows
        )
        add_weights, add, rows = pull_back(cotangent)
    # Gradients of the pairs of the grid, offset by offset.
    carry = _wide_zeros(grid_v), _start_gradient(scan, t_v, rows)
    slots = scan.to_slots(weights[:, :, prefix:, prefix:])
    (dv, dt_v), slots = scan.over_offsets(step, carry, slots)
    dv, dweights = scan.from_grid(dv), scan.from_slots(slots, v.shape[0])
    if prefix:
        dweights = jnp.pad(dweights, [(0, 0)] * 2 + [(prefix, 0)] * 2) + add_weights
        dv = jnp.pad(dv, [(0, 0), (prefix, 0), (0, 0)]) + widen(add)
    return dweights, dv.astype(v.dtype), dt_v


scan_values.defvjp(_values_forward, _values_backward)


def _start_gradient(scan, table, rows):
    """Returns a table's gradient: that of the prefix rows, zeros for the offsets."""
    if table is None:
        return None
    if not scan.num_prefix:
        return jnp.zeros_like(table)
    rows = rows.reshape(-1, *table.shape[1:])
    return jnp.pad(rows, [(scan.num_offset_rows, 0)] + 3 * [(0, 0)])


def _wide_zeros(grid):
    """Returns zeros, float32 or wider, to accumulate gradients of a grid."""
    return jnp.zeros(grid.shape, compute_dtype(grid))

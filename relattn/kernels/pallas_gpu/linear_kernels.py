"""The kernels of `relattn.kernels.pallas_gpu.linear`, on arrays of padded sizes.

Every kernel is called for all heads and, for each, for

- every stretch and block of features: `sum_features`, `map_gradients`;
- every chunk of tokens, with a loop over blocks of features: `outputs`,
  `query_gradients`, `key_gradients`.

If causal, the sums that a chunk gets are those of other stretches, and its program adds
the chunks of its own stretch: see `_sums_at`.

`relattn.kernels.pallas_gpu.linear_plan.AXES` lists the arrays of kernels, which get
references to them in a dictionary. In equations, i is a query, j a key and f a feature.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from relattn.kernels.guards import MIN_DENOMINATOR, MIN_SHARE
from relattn.kernels.pallas_gpu.features import PositiveMap, shifted_exp
from relattn.kernels.pallas_gpu.linear_plan import Plan, call_kernel
from relattn.kernels.pallas_gpu.products import MIN_EXPONENT, dot
from relattn.kernels.pallas_gpu.token_weights import (
    key_weights,
    query_weights,
    sum_weight,
    weighted,
    weighted_pairs,
)


def sum_features(inputs, plan):
    """Sums over the tokens of every stretch.

    With ``g`` it sums over queries, dS_f = sum_i phi(q_i)_f g_i^T / total_i and dz_f,
    otherwise over keys, S_f = sum_j phi(k_j)_f v_j^T and z_f.

    Args:
        inputs: Those of `_add_queries`, of `_add_keys` or, without biases, of
            `_add_keys_online`.
        plan: The plan.

    Returns:
        ``sums``, ``totals`` and, of keys, ``magnitudes`` if features may be negative
        and ``largest_keys`` if there are no biases.
    """
    names = ["sums", "totals"]
    if "g" in inputs:
        # Sums are for the token next to those that need them, see `token_weights`.
        add, values, size, edge = _add_queries, "g", plan.query_stretch, 0
    else:
        add, values, size = _add_keys, "v", plan.key_stretch
        edge = size - 1
        names += ["magnitudes"] if plan.block_map.is_signed else []
    if not {"key_bias", "query_bias"} & inputs.keys():
        add, names = _add_keys_online, [*names, "largest_keys"]
    heads, n, width = inputs[values].shape
    num_features = inputs["ws"][0].shape[1]

    def kernel(refs, out, _):
        ws = [w[...] for w in refs["ws"]]

        def step(index, carry):
            rows = pl.ds(index * plan.step, plan.step)
            return add(refs, ws, slice(None), rows, edge, carry, plan)

        carry = tuple(
            jnp.full(
                (plan.block, width) if name == "sums" else (plan.block,),
                MIN_EXPONENT if name == "largest_keys" else 0.0,
                jnp.float32,
            )
            for name in names
        )
        carry = jax.lax.fori_loop(0, size // plan.step, step, carry)
        for name, x in zip(names, carry, strict=True):
            out[name][...] = x

    shape = (heads, n // size, num_features)
    shapes = {name: (*shape, width) if name == "sums" else shape for name in names}
    grid = (*shape[:2], num_features // plan.block)
    return call_kernel(kernel, grid, size, inputs, shapes, plan)


def outputs(inputs, plan):
    """Computes ``out``, ``total`` and, where the map needs them, what gradients need.

    These are ``largest`` if features are exponentials, and ``unguarded`` if weights may
    be negative.
    """
    heads, n, _ = inputs["q"].shape
    num_features, width = inputs["sums"].shape[-2:]
    block_map = plan.block_map

    def kernel(refs, out, chunk):
        # Loaded before the loop, and only blocks of features in it.
        rows = _rows(chunk, plan)
        q = refs["q"][rows, :]
        k = refs["k"][rows, :] if plan.causal else None

        def step(index, carry):
            return _add_block(refs, index, chunk, q, k, carry, plan)

        carry = _empty_outputs(width, plan)
        carry = jax.lax.fori_loop(0, num_features // plan.block, step, carry)
        numerator, total, magnitude = _finish_outputs(refs, chunk, carry, plan)
        if block_map.is_signed:
            total, unguarded = _guard(total, magnitude)
            out["unguarded"][...] = jnp.where(unguarded, 1.0, 0.0)
        total = jnp.where(jnp.abs(total) < MIN_DENOMINATOR, 1.0, total)
        out["out"][...] = (numerator / total[:, None]).astype(q.dtype)
        out["total"][...] = total
        if block_map.is_positive:
            out["largest"][...] = carry["largest"]

    shapes = {"out": (heads, n, width), "total": (heads, n)}
    if block_map.is_positive:
        shapes["largest"] = heads, n
    if block_map.is_signed:
        shapes["unguarded"] = heads, n
    return call_kernel(
        kernel, (heads, n // plan.chunk), plan.chunk, inputs, shapes, plan
    )


def query_gradients(inputs, plan):
    """Computes the gradient ``q``, and ``g1`` and ``largest_g`` for other kernels."""
    shape, num_features = inputs["q"].shape, inputs["sums"].shape[-2]
    dtype = inputs["q"].dtype

    def kernel(refs, out, chunk):
        rows = _rows(chunk, plan)
        # A scale for every query, whose gradient depends on no other cotangent.
        wide = refs["g"][rows, :].astype(jnp.float32)
        g1 = -jnp.sum(wide * refs["out"][rows, :].astype(jnp.float32), axis=1)
        if "unguarded" in refs:
            # A guard has no gradient.
            g1 = g1 * refs["unguarded"][rows]
        finite = jnp.where(jnp.isfinite(wide), jnp.abs(wide), 0.0)
        largest_g = jnp.max(finite, axis=1)
        out["g1"][...], out["largest_g"][...] = g1, largest_g
        scale = cotangent_scale(largest_g)
        inverse = 1.0 / refs["total"][rows]
        wide = wide * scale[:, None] * inverse[:, None]
        quotients = wide.astype(dtype), g1 * scale * inverse
        loaded = _load_queries(refs, chunk, plan, quotients)

        def step(index, projected):
            block = pl.ds(index * plan.block, plan.block)
            ws = [w[:, block] for w in refs["ws"]]
            # dq_i = sum_f du_if w_f / head_dim^(1/4)
            gradient, *_ = _query_slopes(refs, ws, block, chunk, loaded, plan)
            return projected + _dot(gradient.astype(dtype), ws[0].T, plan)

        projected = jnp.zeros(loaded["q"].shape, jnp.float32)
        projected = jax.lax.fori_loop(0, num_features // plan.block, step, projected)
        out["q"][...] = (projected / scale[:, None]).astype(dtype)

    shapes = {"q": shape, "g1": shape[:2], "largest_g": shape[:2]}
    grid = shape[0], shape[1] // plan.chunk
    return call_kernel(kernel, grid, plan.chunk, inputs, shapes, plan)


def key_gradients(inputs, plan):
    """Computes the gradients ``k`` and ``v``."""
    num_features, width = inputs["sums"].shape[-2:]
    dtype, norm_sign = inputs["k"].dtype, plan.block_map.norm_sign

    def kernel(refs, out, chunk):
        loaded, scale = _load_keys(refs, chunk, plan), refs["scale"][...]
        k, g, future = loaded["k"], loaded["g"], loaded["future"]

        def step(index, carry):
            projected, total, of_values, weights = carry
            block = pl.ds(index * plan.block, plan.block)
            ws = [w[:, block] for w in refs["ws"]]
            gradient, of_phi, phi, phi_q, sums = _key_slopes(
                refs, ws, block, chunk, loaded, plan
            )
            projected = projected + _dot(gradient.astype(dtype), ws[0].T, plan)
            if norm_sign:
                total = total + jnp.sum(of_phi * phi, axis=1)
            # dv_j = sum_f phi(k_j)_f dS_f
            of_values = of_values + _dot(phi.astype(dtype), sums, plan)
            if plan.causal:
                weights = weights + _dot(phi_q, phi.astype(dtype).T, plan)
            return projected, total, of_values, weights

        size = plan.chunk
        shapes = k.shape, (size,), (size, width), (size, size) if plan.causal else ()
        carry = tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)
        carry = jax.lax.fori_loop(0, num_features // plan.block, step, carry)
        projected, total, of_values, weights = carry
        # dk_j = (sum_f du_jf w_f +- sum_f dphi(k_j)_f phi(k_j)_f k~_j) / head_dim^(1/4)
        if norm_sign:
            total = total[:, None] * (norm_sign * plan.head_dim**-0.5)
            projected = projected + total * k.astype(jnp.float32)
        out["k"][...] = (projected / scale).astype(dtype)
        of_values = weighted(of_values, future)
        # dv_j += sum_{i >= j} weight_ij g_i / total_i within the chunk.
        if plan.causal:
            weights = weighted_pairs(refs, _rows(chunk, plan), weights).astype(dtype)
            of_values = of_values + _dot(weights.T, g, plan)
        out["v"][...] = (of_values / scale).astype(dtype)

    heads, n, _ = inputs["k"].shape
    shapes = {"k": inputs["k"].shape, "v": inputs["v"].shape}
    return call_kernel(
        kernel, (heads, n // plan.chunk), plan.chunk, inputs, shapes, plan
    )


def map_gradients(inputs, plan, name):
    """Computes the gradients ``w`` and ``b``, through the tokens "q" or "k".

    The program of a stretch and a block of features adds up its chunks: gradients of
    every chunk would be as large as the features.
    """
    heads, n, width = inputs[name].shape
    num_features = inputs["sums"].shape[-2]
    load, slopes, size = {
        "q": (_load_queries, _query_slopes, plan.query_stretch),
        "k": (_load_keys, _key_slopes, plan.key_stretch),
    }[name]

    def kernel(refs, out, _):
        ws = [w[...] for w in refs["ws"]]

        def step(chunk, carry):
            # dW_f = sum_i du_if x_i, db_f = sum_i du_if
            of_w, of_b = carry
            loaded = load(refs, chunk, plan)
            gradient, *_ = slopes(refs, ws, slice(None), chunk, loaded, plan)
            x = loaded[name]
            of_w = of_w + _dot(x.T, gradient.astype(x.dtype), plan)
            return of_w, of_b + jnp.sum(gradient, axis=0)

        shapes = (width, plan.block), (plan.block,)
        carry = tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)
        of_w, of_b = jax.lax.fori_loop(0, size // plan.chunk, step, carry)
        scale = refs["scale"][...]
        out["w"][...], out["b"][...] = of_w / scale, of_b / scale

    grid = heads, n // size, num_features // plan.block
    shapes = {
        "w": (*grid[:2], width, num_features),
        "b": (*grid[:2], num_features),
    }
    out = call_kernel(kernel, grid, size, inputs, shapes, plan)
    return {name: x.sum(axis=(0, 1)) for name, x in out.items()}


def half_norm(k, plan):
    """Returns |k~_j|^2 / 2."""
    wide = k.astype(jnp.float32)
    return jnp.sum(wide * wide, axis=-1) * (0.5 * plan.head_dim**-0.5)


def cotangent_scale(largest):
    """Returns powers of two that cotangents get before they are divided.

    Denominators may be as small as `MIN_DENOMINATOR`, some 2^-120. Quotients of scaled
    cotangents, and their products with values, stay far from the limits of float32.

    Args:
        largest: Largest magnitudes of cotangents.

    Returns:
        2^-60 / largest, up to a factor of two, for magnitudes of 2^-60 to 2^60.
    """
    # The bits of 2^e are e + 127 times 2^23.
    bits = jnp.clip(largest, 2.0**-60, 2.0**60)
    exponent = jax.lax.bitcast_convert_type(bits, jnp.int32) & np.int32(255 << 23)
    scale = np.int32((2 * 127 - 60) << 23) - exponent
    return jax.lax.bitcast_convert_type(scale, jnp.float32)


def _dot(a, b, plan):
    return dot(a, b, plan.precision)


def _rows(chunk, plan):
    """Returns the rows of a chunk in its stretch."""
    return pl.ds(_first(chunk, plan), plan.chunk)


def _first(chunk, plan):
    """Returns the place of a chunk's first token in its stretch."""
    return chunk * plan.chunk


def _last(chunk, plan):
    """Returns the place of a chunk's last token in its stretch."""
    return chunk * plan.chunk + (plan.chunk - 1)


def _project(x, ws, plan):
    """Returns W x~, [tokens, features]."""
    if plan.precision == "default":
        plan = dataclasses.replace(plan, precision="high")
    return sum(_dot(x, w, plan) for w in ws)


def _query_features(refs, ws, block, q, largest, plan):
    """Returns phi(q) of a block of features, and its derivative by W q~."""
    bias = refs["query_bias"][block]
    return plan.block_map.queries(_project(q, ws, plan), bias, largest)


def _key_features(refs, ws, block, k, plan):
    """Returns phi(k) of a block of features, and its derivative by W k~."""
    bias = refs["key_bias"][block]
    return plan.block_map.keys(_project(k, ws, plan), half_norm(k, plan), bias)


def _largest(refs, rows):
    """Returns r_i of queries, None if features are not exponentials."""
    return refs["largest"][rows] if "largest" in refs else None


def _quotients(refs, rows):
    """Returns scaled g_i / total_i and g1_i / total_i."""
    g, scale = refs["g"][rows, :], refs["scale"][...]
    # The quotient of a small scale and a large total may underflow.
    inverse = 1.0 / refs["total"][rows]
    wide = g.astype(jnp.float32) * scale * inverse[:, None]
    return wide.astype(g.dtype), refs["g1"][rows] * scale * inverse


def _add_keys(refs, ws, block, rows, edge, carry, plan):
    """Adds tokens to S_f = sum_j phi(k_j)_f v_j^T and z_f, and magnitudes to theirs."""
    sums, totals, *magnitudes = carry
    k, v = refs["k"][rows, :], refs["v"][rows, :]
    phi, _ = _key_features(refs, ws, block, k, plan)
    phi = weighted(phi, key_weights(refs, rows, edge)).astype(v.dtype)
    sums, wide = sums + _dot(phi.T, v, plan), phi.astype(jnp.float32)
    magnitudes = (x + jnp.sum(jnp.abs(wide), axis=0) for x in magnitudes)
    return sums, totals + jnp.sum(wide, axis=0), *magnitudes


def _add_keys_online(refs, ws, block, rows, edge, carry, plan):
    """Adds tokens to S_f and z_f, relative to the running maximum c_f."""
    del block, edge
    sums, totals, shift = carry
    k, v = refs["k"][rows, :], refs["v"][rows, :]
    block_map = cast(PositiveMap, plan.block_map)
    exponents = block_map.key_exponents(_project(k, ws, plan), half_norm(k, plan))
    if "key_exponents" in refs:
        exponents = exponents + refs["key_exponents"][rows][:, None]
    # Sums so far move to the new maximum: times e^(c_f - c'_f).
    before, shift = shift, jnp.maximum(shift, jnp.max(exponents, axis=0))
    decay = jnp.exp(before - shift)
    phi = shifted_exp(exponents, shift[None, :]).astype(v.dtype)
    sums = sums * decay[:, None] + _dot(phi.T, v, plan)
    totals = totals * decay + jnp.sum(phi.astype(jnp.float32), axis=0)
    return sums, totals, shift


def _add_queries(refs, ws, block, rows, edge, carry, plan):
    """Adds tokens to dS_f and dz_f, sums of phi(q_i)_f [g_i, g1_i] / total_i."""
    sums, totals = carry
    g, g1 = _quotients(refs, rows)
    q, largest = refs["q"][rows, :], _largest(refs, rows)
    phi, _ = _query_features(refs, ws, block, q, largest, plan)
    phi = weighted(phi, query_weights(refs, rows, edge)).astype(g.dtype)
    sums = sums + _dot(phi.T, g, plan)
    return sums, totals + jnp.sum(phi.astype(jnp.float32) * g1[:, None], axis=0)


def _sums_at(refs, ws, block, chunk, plan, *, later=False):
    """Returns sums of a block of features at a chunk.

    They are those of the chunk's stretch and, if causal, those of the stretch's chunks
    before it, or after it if ``later``. All are for the chunk's first token, or last.
    """
    sums = refs["sums"][block, :]
    totals = [refs[x][block] for x in ("totals", "magnitudes") if x in refs]
    if not plan.causal:
        return sums, *totals
    if later:
        add, span = _add_queries, (chunk + 1, plan.query_stretch // plan.chunk)
        edge = _last(chunk, plan)
        weight = query_weights(refs, plan.query_stretch - 1, edge)
    else:
        add, span, edge = _add_keys, (0, chunk), _first(chunk, plan)
        weight = sum_weight(refs, 0, edge)

    def step(index, carry):
        return add(refs, ws, block, _rows(index, plan), edge, carry, plan)

    carry = sums.astype(jnp.float32), *totals
    if weight is not None:
        carry = tuple(x * weight for x in carry)
    total, *totals = jax.lax.fori_loop(*span, step, carry)
    return total.astype(sums.dtype), *totals


def _empty_outputs(width, plan):
    """Returns what `_add_block` adds to: sums over features, for each query of a chunk.

    ``numerator`` and ``total`` are phi(q_i)^T S and phi(q_i)^T z, ``weights`` the
    phi(q_i) . phi(k_j) of the chunk's own keys if causal, ``magnitude`` and
    ``weight_magnitudes`` the same as ``total`` and ``weights`` of absolute features,
    and ``largest`` is r_i so far.
    """
    per_query, per_pair = (plan.chunk,), (plan.chunk, plan.chunk)
    shapes = {"numerator": (plan.chunk, width), "total": per_query}
    if plan.causal:
        shapes["weights"] = per_pair
    if plan.block_map.is_signed:
        shapes["magnitude"] = per_query
        if plan.causal:
            shapes["weight_magnitudes"] = per_pair
    carry = {name: jnp.zeros(shape, jnp.float32) for name, shape in shapes.items()}
    if plan.block_map.is_positive:
        carry["largest"] = jnp.full(per_query, MIN_EXPONENT, jnp.float32)
    return carry


def _add_block(refs, index, chunk, q, k, carry, plan):
    """Adds a block of features to the sums of `_empty_outputs`."""
    block = pl.ds(index * plan.block, plan.block)
    ws = [w[:, block] for w in refs["ws"]]
    phi, largest, decay = plan.block_map.queries_online(
        _project(q, ws, plan), refs["query_bias"][block], carry.get("largest")
    )
    phi = phi.astype(q.dtype)
    # total_i += sum_f phi(q_i)_f z_f, numerator_i += sum_f phi(q_i)_f S_f.
    sums, totals, *magnitudes = _sums_at(refs, ws, block, chunk, plan)
    wide = phi.astype(jnp.float32)
    added = {
        "numerator": _dot(phi, sums, plan),
        "total": jnp.sum(wide * totals[None, :], axis=1),
    }
    for x in magnitudes:
        added["magnitude"] = jnp.sum(jnp.abs(wide) * x[None, :], axis=1)
    if plan.causal:
        # weight_ij += sum_f phi(q_i)_f phi(k_j)_f of the chunk's own keys.
        phi_k, _ = _key_features(refs, ws, block, k, plan)
        phi_k = phi_k.astype(q.dtype)
        added["weights"] = _dot(phi, phi_k.T, plan)
        if magnitudes:
            product = _dot(jnp.abs(phi), jnp.abs(phi_k).T, plan)
            added["weight_magnitudes"] = product
    carry = {name: weighted(carry[name], decay) + x for name, x in added.items()}
    return carry if decay is None else carry | {"largest": largest}


def _finish_outputs(refs, chunk, carry, plan):
    """Returns numerators, denominators and their magnitudes, with the chunk's own keys.

    numerator_i + sum_{j <= i} weight_ij v_j within the chunk, and so the others.
    Magnitudes are None if no weight is negative.
    """
    rows = _rows(chunk, plan)
    past = query_weights(refs, rows, _first(chunk, plan))
    numerator, total = (weighted(carry[x], past) for x in ("numerator", "total"))
    if plan.causal:
        weights = weighted_pairs(refs, rows, carry["weights"])
        weights = weights.astype(refs["v"].dtype)
        total = total + jnp.sum(weights.astype(jnp.float32), axis=1)
        numerator = numerator + _dot(weights, refs["v"][rows, :], plan)
    if not plan.block_map.is_signed:
        return numerator, total, None
    magnitude = weighted(carry["magnitude"], past)
    if plan.causal:
        pairs = weighted_pairs(refs, rows, carry["weight_magnitudes"])
        magnitude = magnitude + jnp.sum(pairs, axis=1)
    return numerator, total, magnitude


def _guard(total, magnitude):
    """Returns denominators of at least `MIN_SHARE` of magnitudes, and which pass.

    See `guards.divide_sums`.
    """
    smallest = MIN_SHARE * magnitude
    unguarded = jnp.abs(total) >= smallest
    guard = jnp.where(total < 0, -smallest, smallest)
    return jnp.where(unguarded, total, guard), unguarded


def _load_queries(refs: Any, chunk: Any, plan: Plan, quotients: Any = None) -> Any:
    """Returns what `_query_slopes` needs of a chunk, for all features."""
    rows = _rows(chunk, plan)
    g, g1 = quotients or _quotients(refs, rows)
    past = query_weights(refs, rows, _first(chunk, plan))
    return {
        "q": refs["q"][rows, :],
        "k": refs["k"][rows, :] if plan.causal else None,
        "largest": _largest(refs, rows),
        "g": weighted(g, past).astype(g.dtype),
        "g1": weighted(g1, past),
        "pairs": _pair_gradients(refs, rows, g, g1, plan),
    }


def _query_slopes(refs, ws, block, chunk, loaded, plan):
    """Returns du_if = dphi(q_i)_f phi'(q_i)_f of a block of features, u_i = W q~_i."""
    q, g, g1 = loaded["q"], loaded["g"], loaded["g1"]
    # dphi(q_i)_f = (g_i . S_f + g1_i z_f) / total_i
    sums, totals = _sums_at(refs, ws, block, chunk, plan)
    gradient = _dot(g, sums.T, plan) + g1[:, None] * totals[None, :]
    if plan.causal:
        # + sum_{j <= i} (g_i . v_j + g1_i) / total_i phi(k_j)_f in the chunk.
        phi, _ = _key_features(refs, ws, block, loaded["k"], plan)
        gradient = gradient + _dot(loaded["pairs"], phi.astype(g.dtype), plan)
    _, slope = _query_features(refs, ws, block, q, loaded["largest"], plan)
    return (gradient * slope,)


def _load_keys(refs: Any, chunk: Any, plan: Plan) -> Any:
    """Returns what `_key_slopes` needs of a chunk, for all features."""
    rows = _rows(chunk, plan)
    g, g1 = _quotients(refs, rows) if plan.causal else (None, None)
    return {
        "k": refs["k"][rows, :],
        "v": refs["v"][rows, :],
        "q": refs["q"][rows, :] if plan.causal else None,
        "largest": _largest(refs, rows),
        "g": g,
        "pairs": _pair_gradients(refs, rows, g, g1, plan),
        "future": key_weights(refs, rows, _last(chunk, plan)),
    }


def _key_slopes(refs, ws, block, chunk, loaded, plan):
    """Returns du_jf = dphi(k_j)_f phi'(k_j)_f of a block of features, u_j = W k~_j.

    After it come dphi(k_j)_f, the features of keys and queries, and the sums of later
    queries.
    """
    v, dtype, phi_q = loaded["v"], loaded["v"].dtype, None
    sums, totals = _sums_at(refs, ws, block, chunk, plan, later=True)
    phi, slope = _key_features(refs, ws, block, loaded["k"], plan)
    # dphi(k_j)_f = dS_f . v_j + dz_f
    of_phi = weighted(_dot(v, sums.T, plan) + totals[None, :], loaded["future"])
    if plan.causal:
        # + sum_{i >= j} (g_i . v_j + g1_i) / total_i phi(q_i)_f in the chunk.
        q, largest = loaded["q"], loaded["largest"]
        phi_q = _query_features(refs, ws, block, q, largest, plan)[0].astype(dtype)
        of_phi = of_phi + _dot(loaded["pairs"].T, phi_q, plan)
    return of_phi * slope, of_phi, phi, phi_q, sums


def _pair_gradients(refs: Any, rows: Any, g: Any, g1: Any, plan: Plan) -> Any:
    """Returns the gradients of a chunk's weights, [queries, keys]; None if not causal.

    The weight of a pair is phi(q_i) . phi(k_j), and its gradient g_i . v_j + g1_i.
    """
    if not plan.causal:
        return None
    pairs = _dot(g, refs["v"][rows, :].T, plan) + g1[:, None]
    return weighted_pairs(refs, rows, pairs).astype(g.dtype)

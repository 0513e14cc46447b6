"""Linear attention with positive features, whose features never reach memory.

Kernels loop over blocks of features, as flash attention loops over blocks of keys. The
sums over the keys of a chunk are parallel over chunks and blocks; XLA adds them up over
chunks; the outputs of a chunk are computed online in the features, with a running
maximum of the queries' exponents. The backward pass computes features again.

Products of half-precision arrays are in half precision, with sums in float32, as in
flash attention, those of float32 arrays in TF32 or as ``precision`` says. Exponents are
nearly as precise as in float32: their errors multiply the features.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float

from relattn.kernels.checks import broadcast_leading
from relattn.kernels.feature_maps import FeatureMap, positive_features
from relattn.kernels.guards import MIN_DENOMINATOR, scale_backward
from relattn.kernels.pallas_gpu.products import (
    MAX_HEAD_DIM,
    MIN_EXPONENT,
    dot,
    kernel_dtype,
    power_of_2,
    precision_name,
)
from relattn.kernels.platform import has_program_per_device
from relattn.kernels.precision import compute_dtype

# Most tokens of a chunk, and of those whose sums are added up in one program.
_CHUNK = 128
_SEGMENT = 1024
# Most tokens, and features, of a step.
_STEP = 64
# Bytes of a chunk of queries: with keys, values, gradients and weights of pairs they
# fill the shared memory of an H100.
_CHUNK_BYTES = 2**14
# Most features.
_MAX_FEATURES = 512
# A component of masked keys, which are so long that they get no weight.
_MASKED_KEY = 1e15


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How kernels divide their work.

    Attributes:
        causal: Whether a token attends only to itself and earlier tokens.
        head_dim: Width of the heads before they are padded.
        chunk: Number of tokens of a chunk.
        block: Number of features of a block.
        precision: A key of `products.ALGORITHMS`.
    """

    causal: bool
    head_dim: int
    chunk: int
    block: int
    precision: str


def fits_gpu(
    q: Array,
    k: Array,
    v: Array,
    feature_map: FeatureMap,
    precision: jax.lax.PrecisionLike = None,
) -> bool:
    """Returns whether `attend_on_gpu` takes these arguments and this feature map.

    It takes `positive_features` without ``eps``, as a `functools.partial` with the
    projection, arrays of float32 or narrower, heads of at most 128 components, and at
    most 512 features. The compiler cannot divide a kernel: there must be one device, or
    each device its own program, as in `jax.pmap`.

    Args:
        q: Queries, shape ``[*batch, n, head_dim]``.
        k: Keys, shape ``[*batch, m, head_dim]``.
        v: Values, shape ``[*batch, m, value_dim]``.
        feature_map: From ``[*batch, n, head_dim]`` to features, token by token; or a
            pair of such functions, of queries and of keys.
        precision: Precision of the products of float32 arrays, TF32 by default.

    Returns:
        True if it does.
    """
    sizes = [size for x in (q, k, v) for size in x.shape]
    if any(map(is_symbolic_dim, sizes)) or not (q.size and k.size and v.size):
        return False
    projection = _projection(feature_map)
    if projection is None or not has_program_per_device(q):
        return False
    if compute_dtype(q, k, v, projection) != jnp.float32:
        return False
    if max(q.shape[-1], v.shape[-1]) > MAX_HEAD_DIM or len(projection) > _MAX_FEATURES:
        return False
    return projection.shape[-1] == q.shape[-1] and precision_name(precision) is not None


def _projection(feature_map):
    """Returns the projection of positive features, or None for other feature maps."""
    if not isinstance(feature_map, functools.partial) or feature_map.args:
        return None
    options = dict(feature_map.keywords)
    projection = options.pop("projection", None)
    if feature_map.func is not positive_features or jnp.ndim(projection) != 2:
        return None
    # Other options, and eps, change the features.
    return None if any(options.values()) else jnp.asarray(projection)


def attend_on_gpu(
    q: Float[Array, "*#batch n head_dim"],
    k: Float[Array, "*#batch m head_dim"],
    v: Float[Array, "*#batch m value_dim"],
    key_mask: Bool[Array, "*#batch m"] | None = None,
    *,
    feature_map: FeatureMap,
    causal: bool,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch n value_dim"]:
    """Computes linear attention with positive features, and its gradient.

    out_i = phi(q_i)^T S / phi(q_i)^T z, S = sum_j phi(k_j) v_j^T, z = sum_j phi(k_j),
    with sums over j <= i if it is causal.

    Args:
        q: Queries, shape ``[*batch, n, head_dim]``.
        k: Keys, shape ``[*batch, m, head_dim]``.
        v: Values, shape ``[*batch, m, value_dim]``.
        key_mask: True for keys that exist, shape ``[*batch, m]``.
        feature_map: One that `fits_gpu`.
        causal: Whether a token attends only to itself and earlier tokens; then m is n.
        precision: Precision of the products of float32 arrays, TF32 by default.

    Returns:
        Shape ``[*batch, n, value_dim]``, in the dtype of ``v``. It has first
        derivatives in reverse mode, also of the projection, and no others.
    """
    # `fits_gpu` refuses what has no precision or projection.
    dtype, name = v.dtype, cast(str, precision_name(precision))
    q, k, v = (x.astype(kernel_dtype(name, q, k, v)) for x in (q, k, v))
    if key_mask is not None:
        k = jnp.where(key_mask[..., None], k, _MASKED_KEY)
        v = jnp.where(key_mask[..., None], v, 0)
    q, k, v = broadcast_leading(q, k, v)
    *batch, n, head_dim = q.shape
    m, value_dim = v.shape[-2:]
    width = max(power_of_2(head_dim), power_of_2(value_dim))
    projection = cast(Array, _projection(feature_map))
    chunk = min(_CHUNK, _CHUNK_BYTES // (width * v.dtype.itemsize))
    chunk = min(chunk, power_of_2(max(n, m)))
    block = min(_STEP, power_of_2(len(projection)))
    plan = _Plan(causal, head_dim, chunk, block, name)

    def pad(x, value=0.0):
        length, width = x.shape[-2:]
        size = chunk if causal else _segment(length, chunk)
        x = x.reshape(math.prod(batch), length, width)
        x = jnp.pad(x, [(0, 0), (0, 0), (0, power_of_2(width) - width)])
        rows = [(0, 0), (0, -length % size), (0, 0)]
        return jnp.pad(x, rows, constant_values=value)

    def attend(v, q, k):
        out: Any = _attend(pad(q), pad(k, _MASKED_KEY), pad(v), projection, plan)
        return out[:, :n, :value_dim].reshape(*batch, n, value_dim)

    out = scale_backward(attend, v, q, k) if causal else attend(v, q, k)
    return out.astype(dtype)


def _segment(length, chunk):
    """Returns how many tokens one program sums, a multiple of the chunk."""
    segments = -(-length // _SEGMENT)
    return -(-length // (segments * chunk)) * chunk


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q, k, v, projection, plan):
    """Computes attention of arrays [heads, n, width] of padded sizes."""
    return _attend_forward(q, k, v, projection, plan)[0]


def _attend_forward(q, k, v, projection, plan):
    # S_f = sum_j e^(a_jf - c_f) v_j^T and z_f, a_jf = w_f . k~_j - |k~_j|^2 / 2.
    ws, key_shift, query_shift = _prepare(projection, q, plan)
    if plan.causal:
        # Of each chunk, then of all chunks before each.
        sums, totals, _ = _sum_features(k, v, ws, plan, shift=key_shift)
        sums, totals = _earlier(sums), _earlier(totals)
    else:
        # Of each segment relative to its own maximum, then of all, c_f = max_j a_jf.
        sums, totals, shifts = _sum_features(k, v, ws, plan)
        key_shift = jnp.max(shifts, axis=1)
        query_shift = jnp.maximum(key_shift + query_shift, MIN_EXPONENT)
        decays = jnp.exp(shifts - key_shift[:, None])
        sums = jnp.sum(sums * decays[..., None], axis=1, keepdims=True)
        totals = jnp.sum(totals * decays, axis=1, keepdims=True)
    # phi(q_i)^T S / phi(q_i)^T z, with the keys of the query's own chunk if causal.
    features = {"ws": ws, "key_shift": key_shift, "query_shift": query_shift}
    sums = {"sums": sums.astype(v.dtype), "totals": totals}
    inputs = features | sums | {"q": q}
    out = _outputs(inputs | {"k": k, "v": v} if plan.causal else inputs, plan)
    return out["out"], (q, k, v, projection, features, sums, out)


def _attend_backward(plan, residuals, g):
    q, k, v, projection, features, sums, out = residuals
    # Cotangents of numerators, g_i / total_i, and of denominators, g1_i = -g_i . out_i
    # / total_i, for out_i = numerator_i / total_i.
    g = g.astype(jnp.float32) / out["total"][..., None]
    g1 = -jnp.sum(g * out["out"].astype(jnp.float32), axis=-1)
    g = g.astype(v.dtype)
    queries = {"q": q, "g": g, "g1": g1, "largest": out["largest"]}
    keys = {"k": k, "v": v}
    # Cotangents of S_f and z_f: sum_i phi(q_i)_f [g_i, g1_i], over later queries i if
    # causal.
    *later, _ = _sum_features(
        q,
        g,
        features["ws"],
        plan,
        y1=g1,
        shift=features["query_shift"],
        largest=out["largest"],
    )
    if plan.causal:
        later = [_earlier(x, reverse=True) for x in later]
        queries = keys = queries | keys
    else:
        later = [x.sum(axis=1, keepdims=True) for x in later]
    later = {"sums": later[0].astype(v.dtype), "totals": later[1]}
    # dphi(q_i) = S g_i + z g1_i and dphi(k_j) = dS v_j + dz, then through the
    # exponentials to q, k and W.
    queries, keys = features | queries | sums, features | keys | later
    gradients = _query_gradients(queries, plan) | _key_gradients(keys, plan)
    # By kernels of their own: the compiler drops them where nobody needs the result.
    of_projection = _query_gradients(queries, plan, of_projection=True)
    of_projection += _key_gradients(keys, plan, of_projection=True)
    w = of_projection[: plan.head_dim, : len(projection)].T * plan.head_dim**-0.25
    return *(gradients[x] for x in "qkv"), w.astype(projection.dtype)


_attend.defvjp(_attend_forward, _attend_backward)


def _prepare(projection, q, plan):
    """Returns W^T / head_dim^(1/4) as arrays that sum to it, and shifts of exponents.

    Keys' exponents are less their shifts, as in `positive_features`; those of queries
    more, where features that fill the last block get no weight.
    """
    heads, num_features = len(q), len(projection)
    w = projection.astype(jnp.float32)
    bound = cast(Array, positive_features(jnp.zeros((1, plan.head_dim)), w).bound)
    w = w.T * plan.head_dim**-0.25
    padding = -num_features % plan.block
    w = jnp.pad(w, [(0, q.shape[-1] - plan.head_dim), (0, padding)])
    key_shift = jnp.pad(bound + 0.5 * math.log(num_features), (0, padding))
    query_shift = jnp.pad(
        bound if plan.causal else jnp.zeros_like(bound),
        (0, padding),
        constant_values=MIN_EXPONENT,
    )
    shifts = (jnp.broadcast_to(x, (heads, x.size)) for x in (key_shift, query_shift))
    if q.dtype == jnp.float32:
        return [w], *shifts
    high = w.astype(q.dtype)
    return [high, (w - high.astype(jnp.float32)).astype(q.dtype)], *shifts


def _earlier(x, reverse=False):
    """Returns the sums over the chunks before each, or after each."""
    total = jnp.cumsum(x[:, ::-1] if reverse else x, axis=1)
    total = jnp.pad(total[:, :-1], [(0, 0), (1, 0)] + [(0, 0)] * (x.ndim - 2))
    return total[:, ::-1] if reverse else total


def _dot(a, b, plan):
    return dot(a, b, plan.precision)


def _exponents(x, ws, plan):
    """Returns W x~, [tokens, features]."""
    if plan.precision == "default":
        plan = dataclasses.replace(plan, precision="high")
    return sum(_dot(x, w, plan) for w in ws)


def _exp(exponents, largest):
    """Returns exp(exponents - largest), at most one; see `guards.shifted_exp`."""
    return jnp.exp(jnp.minimum(exponents - largest, 0.0))


def _query_features(q, ws, shift, largest, plan):
    """Returns phi(q), without |q~|^2 / 2, which cancels in the outputs."""
    return _exp(_exponents(q, ws, plan) + shift[None, :], largest[:, None])


def _key_exponents(k, ws, plan):
    # a_jf = w_f . k~_j - |k~_j|^2 / 2
    wide = k.astype(jnp.float32)
    half_norm = jnp.sum(wide * wide, axis=1) * (0.5 * plan.head_dim**-0.5)
    return _exponents(k, ws, plan) - half_norm[:, None]


def _key_features(k, ws, shift, plan):
    exponents, shift = _key_exponents(k, ws, plan), shift[None, :]
    # If not causal, the shift is the largest exponent.
    return jnp.exp(exponents - shift) if plan.causal else _exp(exponents, shift)


def _sum_features(x, y, ws, plan, *, y1=None, shift=None, largest=None):
    """Sums phi(x) [y, 1] over the tokens of every chunk or, if not causal, segment.

    Args:
        x: Keys, or queries if ``largest`` is given, [heads, n, head_dim].
        y: Values, or cotangents of numerators, [heads, n, width].
        ws: W^T / head_dim^(1/4) as arrays that sum to it, [head_dim, features].
        plan: The plan.
        y1: Cotangents of denominators, instead of the ones, [heads, n].
        shift: Shifts of the exponents, [heads, features]; None for the largest ones of
            keys so far, which are then returned.
        largest: Largest exponents of queries, [heads, n].

    Returns:
        The sums, [heads, segments, features, width] and [heads, segments, features],
        and their shifts.
    """
    heads, n, _ = x.shape
    num_features, width = ws[0].shape[1], y.shape[-1]
    size = plan.chunk if plan.causal else _segment(n, plan.chunk)
    step_size = min(_STEP, plan.chunk)
    inputs = {"x": x, "y": y, "y1": y1, "ws": ws, "shift": shift, "largest": largest}
    inputs = {name: value for name, value in inputs.items() if value is not None}

    def kernel(refs, out):
        ws = [w[...] for w in refs["ws"]]

        def step(index, carry):
            sums, totals, shift = carry
            # phi(x_j) of the step's tokens.
            rows = pl.ds(index * step_size, step_size)
            tokens, values = refs["x"][rows, :], refs["y"][rows, :]
            if largest is not None:
                phi = _query_features(tokens, ws, shift, refs["largest"][rows], plan)
            elif "shift" in refs:
                phi = _key_features(tokens, ws, shift, plan)
            else:
                # Sums so far move to the new running maximum c_f: times e^(c_f - c'_f).
                exponents = _key_exponents(tokens, ws, plan)
                before, shift = shift, jnp.maximum(shift, jnp.max(exponents, axis=0))
                decay = jnp.exp(before - shift)
                sums, totals = sums * decay[:, None], totals * decay
                phi = _exp(exponents, shift[None, :])
            # S_f += sum_j phi(x_j)_f y_j^T and z_f += sum_j phi(x_j)_f y1_j.
            phi = phi.astype(values.dtype)
            sums = sums + _dot(phi.T, values, plan)
            phi = phi.astype(jnp.float32)
            if y1 is not None:
                phi = phi * refs["y1"][rows][:, None]
            return sums, totals + jnp.sum(phi, axis=0), shift

        lowest = jnp.full((plan.block,), MIN_EXPONENT, jnp.float32)
        carry = (
            jnp.zeros((plan.block, width), jnp.float32),
            jnp.zeros((plan.block,), jnp.float32),
            refs["shift"][...] if "shift" in refs else lowest,
        )
        carry = jax.lax.fori_loop(0, size // step_size, step, carry)
        out["sums"][...], out["totals"][...], out["shifts"][...] = carry

    shape = (heads, n // size, num_features)
    shapes = {"sums": (*shape, width), "totals": shape, "shifts": shape}
    grid = (heads, n // size, num_features // plan.block)
    out = _call(kernel, grid, size, inputs, shapes, plan)
    return out["sums"], out["totals"], out["shifts"]


def _outputs(inputs, plan):
    """Returns the outputs, and the largest exponents and denominators of queries."""
    heads, n, _ = inputs["q"].shape
    num_features, width = inputs["sums"].shape[-2:]
    dtype = inputs["sums"].dtype

    def kernel(refs, out):
        # Loaded before the loop, and only blocks of features in it.
        q = refs["q"][...]
        k = refs["k"][...] if plan.causal else None

        def step(index, carry):
            numerator, total, largest, weights = carry
            block = pl.ds(index * plan.block, plan.block)
            ws = [w[:, block] for w in refs["ws"]]
            # b_if + c_f of the block; numerators move to the new running maximum r_i.
            exponents = _exponents(q, ws, plan) + refs["query_shift"][block][None, :]
            before, largest = largest, jnp.maximum(largest, jnp.max(exponents, axis=1))
            decay = jnp.exp(before - largest)
            phi = _exp(exponents, largest[:, None]).astype(dtype)
            # total_i += sum_f phi(q_i)_f z_f, numerator_i += sum_f phi(q_i)_f S_f.
            weighted = phi.astype(jnp.float32) * refs["totals"][block][None, :]
            total = total * decay + jnp.sum(weighted, axis=1)
            product = _dot(phi, refs["sums"][block, :], plan)
            numerator = numerator * decay[:, None] + product
            if plan.causal:
                # weight_ij += sum_f phi(q_i)_f phi(k_j)_f of the chunk's own keys.
                shift = refs["key_shift"][block]
                phi_k = _key_features(k, ws, shift, plan).astype(dtype)
                weights = weights * decay[:, None] + _dot(phi, phi_k.T, plan)
            return numerator, total, largest, weights

        carry = (
            jnp.zeros((plan.chunk, width), jnp.float32),
            jnp.zeros((plan.chunk,), jnp.float32),
            jnp.full((plan.chunk,), MIN_EXPONENT, jnp.float32),
            jnp.zeros((plan.chunk, plan.chunk) if plan.causal else (), jnp.float32),
        )
        steps = num_features // plan.block
        numerator, total, largest, weights = jax.lax.fori_loop(0, steps, step, carry)
        # + sum_{j <= i} weight_ij [v_j, 1] within the chunk, then the quotient.
        if plan.causal:
            weights = _lower(weights).astype(dtype)
            total = total + jnp.sum(weights.astype(jnp.float32), axis=1)
            numerator = numerator + _dot(weights, refs["v"][...], plan)
        total = jnp.where(total < MIN_DENOMINATOR, 1.0, total)
        out["out"][...] = (numerator / total[:, None]).astype(dtype)
        out["largest"][...], out["total"][...] = largest, total

    shapes = {"out": (heads, n, width), "largest": (heads, n), "total": (heads, n)}
    return _call(kernel, (heads, n // plan.chunk), plan.chunk, inputs, shapes, plan)


def _query_gradients(inputs, plan, of_projection=False):
    """Returns the gradient of queries, or of W^T / head_dim^(1/4) through them."""
    shape, num_features = inputs["q"].shape, inputs["sums"].shape[-2]
    dtype = inputs["q"].dtype

    def kernel(refs, out):
        q, g, g1, largest = (refs[x][...] for x in ("q", "g", "g1", "largest"))
        k = refs["k"][...] if plan.causal else None
        pairs = _pair_gradients(refs, plan)

        def step(index, projected):
            block = pl.ds(index * plan.block, plan.block)
            ws = [w[:, block] for w in refs["ws"]]
            # dphi(q_i)_f = g_i . S_f + g1_i z_f
            gradient = _dot(g, refs["sums"][block, :].T, plan)
            gradient = gradient + g1[:, None] * refs["totals"][block][None, :]
            if plan.causal:
                # + sum_{j <= i} (g_i . v_j + g1_i) phi(k_j)_f within the chunk.
                shift = refs["key_shift"][block]
                phi = _key_features(k, ws, shift, plan).astype(dtype)
                gradient = gradient + _dot(pairs, phi, plan)
            # db_if = dphi(q_i)_f phi(q_i)_f; dq_i = sum_f db_if w_f / head_dim^(1/4)
            phi = _query_features(q, ws, refs["query_shift"][block], largest, plan)
            gradient = (gradient * phi).astype(dtype)
            if of_projection:
                out["w"][:, block] = _dot(q.T, gradient, plan)
                return projected
            return projected + _dot(gradient, ws[0].T, plan)

        start = jnp.zeros(() if of_projection else q.shape, jnp.float32)
        projected = jax.lax.fori_loop(0, num_features // plan.block, step, start)
        if not of_projection:
            out["q"][...] = projected.astype(dtype)

    return _gradients(kernel, inputs, {"q": shape}, plan, of_projection)


def _key_gradients(inputs, plan, of_projection=False):
    """Returns the gradients of keys and values, or that of `_query_gradients`."""
    num_features, width = inputs["sums"].shape[-2:]
    dtype = inputs["k"].dtype

    def kernel(refs, out):
        k, v = refs["k"][...], refs["v"][...]
        q, largest = (refs[x][...] if plan.causal else None for x in ("q", "largest"))
        pairs = _pair_gradients(refs, plan)

        def step(index, carry):
            projected, total, of_values, weights = carry
            block = pl.ds(index * plan.block, plan.block)
            ws, sums = [w[:, block] for w in refs["ws"]], refs["sums"][block, :]
            phi = _key_features(k, ws, refs["key_shift"][block], plan)
            # dphi(k_j)_f = dS_f . v_j + dz_f
            gradient = _dot(v, sums.T, plan) + refs["totals"][block][None, :]
            if plan.causal:
                # + sum_{i >= j} (g_i . v_j + g1_i) phi(q_i)_f within the chunk.
                shift = refs["query_shift"][block]
                phi_q = _query_features(q, ws, shift, largest, plan).astype(dtype)
                gradient = gradient + _dot(pairs.T, phi_q, plan)
                if not of_projection:
                    product = _dot(phi_q, phi.astype(dtype).T, plan)
                    weights = weights + product
            # da_jf = dphi(k_j)_f phi(k_j)_f, and dv_j = sum_f phi(k_j)_f dS_f.
            gradient = gradient * phi
            if of_projection:
                out["w"][:, block] = _dot(k.T, gradient.astype(dtype), plan)
                return carry
            projected = projected + _dot(gradient.astype(dtype), ws[0].T, plan)
            total = total + jnp.sum(gradient, axis=1)
            of_values = of_values + _dot(phi.astype(dtype), sums, plan)
            return projected, total, of_values, weights

        chunk = plan.chunk
        shapes = k.shape, (chunk,), (chunk, width), (chunk, chunk)
        if of_projection:
            shapes = ((),) * 4
        elif not plan.causal:
            shapes = (*shapes[:3], ())
        carry = tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)
        carry = jax.lax.fori_loop(0, num_features // plan.block, step, carry)
        if of_projection:
            return
        projected, total, of_values, weights = carry
        # dk_j = sum_f da_jf (w_f - k~_j) / head_dim^(1/4)
        total = total[:, None] * plan.head_dim**-0.5
        out["k"][...] = (projected - total * k.astype(jnp.float32)).astype(dtype)
        # dv_j += sum_{i >= j} weight_ij g_i within the chunk.
        if plan.causal:
            weights = _lower(weights).astype(dtype)
            of_values = of_values + _dot(weights.T, refs["g"][...], plan)
        out["v"][...] = of_values.astype(dtype)

    shapes = {"k": inputs["k"].shape, "v": inputs["v"].shape}
    return _gradients(kernel, inputs, shapes, plan, of_projection)


def _gradients(kernel, inputs, shapes, plan, of_projection):
    (heads, n, width), *_ = shapes.values()
    grid = heads, n // plan.chunk
    if of_projection:
        shapes = {"w": (*grid, width, inputs["sums"].shape[-2])}
    out = _call(kernel, grid, plan.chunk, inputs, shapes, plan)
    return out["w"].sum(axis=(0, 1)) if of_projection else out


def _pair_gradients(refs: Any, plan: _Plan) -> Any:
    """Returns the gradients of a chunk's weights, [queries, keys]; None if not causal.

    The weight of a pair is phi(q_i) . phi(k_j), and its gradient g_i . v_j + g1_i.
    """
    if not plan.causal:
        return None
    pairs = _dot(refs["g"][...], refs["v"][...].T, plan) + refs["g1"][...][:, None]
    return _lower(pairs).astype(refs["v"].dtype)


def _lower(pairs):
    """Returns [queries, keys] with zeros for later keys."""
    query, key = (jax.lax.broadcasted_iota(jnp.int32, pairs.shape, i) for i in (0, 1))
    return jnp.where(key <= query, pairs, 0.0)


# Axes of arrays: heads, segments, tokens, features, and others.
_AXES = (
    dict.fromkeys(("q", "k", "v", "g", "x", "y", "out"), "hnd")
    | dict.fromkeys(("g1", "y1", "largest", "total"), "hn")
    | dict.fromkeys(("shift", "query_shift", "key_shift"), "hf")
    | {"ws": "df", "sums": "hsfd", "totals": "hsf", "shifts": "hsf", "w": "hsdf"}
)


def _call(kernel, grid, size, inputs, shapes, plan):
    """Calls a kernel for heads, segments of ``size`` tokens and blocks of features.

    Without blocks of features in the grid, a program gets all of them.

    Args:
        kernel: A function of references to inputs and outputs.
        grid: Number of heads, of segments, and perhaps of blocks of features.
        size: Number of tokens of a segment.
        inputs: Arrays by name, see `_AXES`.
        shapes: Shapes of outputs by name. Those of tokens have the dtype of the
            inputs' tokens, others are float32.
        plan: The plan.

    Returns:
        Outputs by name.
    """

    def index(axes, shape, program):
        # One axis, so that two `jax.vmap` can add theirs to the three of a GPU.
        blocks = math.prod(grid[2:])
        rest = jax.lax.div(program, np.int32(blocks))
        places = {
            "h": jax.lax.div(rest, np.int32(grid[1])),
            "s": jax.lax.rem(rest, np.int32(grid[1])),
            "f": jax.lax.rem(program, np.int32(blocks)),
        }
        places["n"] = places["s"]
        return tuple(
            0 if length == 1 else places.get(axis, 0)
            for axis, length in zip(axes, shape, strict=True)
        )

    def spec(axes, x):
        sizes = {"h": None, "s": None, "n": size}
        if grid[2:]:
            sizes["f"] = plan.block
        block = [
            sizes.get(axis, length) for axis, length in zip(axes, x.shape, strict=True)
        ]
        return pl.BlockSpec(block, functools.partial(index, axes, x.shape))

    def specs(arrays):
        return {
            name: jax.tree.map(functools.partial(spec, _AXES[name]), x)
            for name, x in arrays.items()
        }

    tokens = inputs["ws"][0].dtype
    outputs = {
        name: jax.ShapeDtypeStruct(
            shape, tokens if _AXES[name] == "hnd" else jnp.float32
        )
        for name, shape in shapes.items()
    }
    return pl.pallas_call(
        kernel,
        grid=(math.prod(grid),),
        in_specs=[specs(inputs)],
        out_specs=specs(outputs),
        out_shape=outputs,
        compiler_params=triton.CompilerParams(
            num_warps=8 if plan.chunk >= _STEP else 4, num_stages=2
        ),
    )(inputs)

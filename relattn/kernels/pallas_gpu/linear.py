"""Linear attention by a feature map, whose features never reach memory.

Kernels loop over blocks of features, as flash attention loops over blocks of keys. The
sums over the keys of a segment are parallel over segments and blocks; XLA adds them up
over segments; the outputs of a chunk are sums over the blocks of features, if these are
exponentials with a running maximum of the queries' exponents. If causal, a segment has
a few chunks, and each adds the keys before it in its segment to the sums: sums of every
chunk would be as large as keys and values. The backward pass computes features again.

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
from relattn.kernels.feature_maps import FeatureMap
from relattn.kernels.guards import MIN_DENOMINATOR, MIN_SHARE
from relattn.kernels.pallas_gpu.features import (
    BlockMap,
    Found,
    PositiveMap,
    find_map,
    shifted_exp,
)
from relattn.kernels.pallas_gpu.products import (
    MAX_HEAD_DIM,
    MIN_EXPONENT,
    dot,
    kernel_dtype,
    power_of_2,
    precision_name,
)
from relattn.kernels.pallas_gpu.token_weights import (
    accumulate,
    find_weights,
    key_weights,
    query_weights,
    sum_weight,
    weighted,
    weighted_pairs,
)
from relattn.kernels.platform import has_program_per_device
from relattn.kernels.precision import compute_dtype

# Most tokens of a chunk, and of a segment, whose sums one program adds up.
_CHUNK = 128
_SEGMENT = 1024
# Most chunks of a segment if causal.
_CAUSAL_CHUNKS = 4
# Most tokens, and features, of a step.
_STEP = 64
# Bytes of a chunk of queries: with keys, values, gradients and weights of pairs they
# fill the shared memory of an H100. Three products of TF32 instead of one need twice as
# much: each operand in two parts.
_CHUNK_BYTES = 2**14
# Most features.
_MAX_FEATURES = 512


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How kernels divide their work.

    Attributes:
        causal: Whether a token attends only to itself and earlier tokens.
        head_dim: Width of the heads before they are padded.
        chunk: Number of tokens of a chunk.
        segment: Number of tokens of a segment if causal; otherwise it depends on the
            number of tokens.
        block: Number of features of a block.
        precision: A key of `products.ALGORITHMS`.
        block_map: The feature map.
    """

    causal: bool
    head_dim: int
    chunk: int
    segment: int
    block: int
    precision: str
    block_map: BlockMap


def fits_gpu(
    q: Array,
    k: Array,
    v: Array,
    feature_map: FeatureMap,
    precision: jax.lax.PrecisionLike = None,
) -> bool:
    """Returns whether `attend_on_gpu` takes these arguments and this feature map.

    It takes `positive_features` without ``eps``, `trigonometric_features` and
    `relu_features`, as a `functools.partial` with the projection, arrays of float32 or
    narrower, heads of at most 128 components, and at most 512 features. The compiler
    cannot divide a kernel: there must be one device, or each device its own program, as
    in `jax.pmap`.

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
    found = find_map(feature_map)
    if found is None or not has_program_per_device():
        return False
    w = found.projection
    if compute_dtype(q, k, v, w, found.bias) != jnp.float32:
        return False
    if max(q.shape[-1], v.shape[-1]) > MAX_HEAD_DIM or len(w) > _MAX_FEATURES:
        return False
    return w.shape[-1] == q.shape[-1] and precision_name(precision) is not None


def attend_on_gpu(
    q: Float[Array, "*#batch n head_dim"],
    k: Float[Array, "*#batch m head_dim"],
    v: Float[Array, "*#batch m value_dim"],
    key_mask: Bool[Array, "*#batch m"] | None = None,
    starts: Bool[Array, "*#batch n"] | None = None,
    *,
    feature_map: FeatureMap,
    causal: bool,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch n value_dim"]:
    """Computes linear attention by a feature map, and its gradient.

    out_i = phi(q_i)^T S / phi(q_i)^T z, S = sum_j phi(k_j) v_j^T, z = sum_j phi(k_j),
    with sums over j <= i if it is causal.

    Args:
        q: Queries, shape ``[*batch, n, head_dim]``.
        k: Keys, shape ``[*batch, m, head_dim]``.
        v: Values, shape ``[*batch, m, value_dim]``.
        key_mask: True for keys that exist, shape ``[*batch, m]``.
        starts: Where a packed sequence starts, whose tokens attend to each other only,
            shape ``[*batch, n]``; if it is causal.
        feature_map: One that `fits_gpu`.
        causal: Whether a token attends only to itself and earlier tokens; then m is n.
        precision: Precision of the products of float32 arrays, TF32 by default.

    Returns:
        Shape ``[*batch, n, value_dim]``, in the dtype of ``v``. It has first
        derivatives in reverse mode, also of the projection and bias of the feature map,
        and no others.
    """
    # `fits_gpu` refuses what has no precision, and other feature maps.
    dtype, name = v.dtype, cast(str, precision_name(precision))
    q, k, v = (x.astype(kernel_dtype(name, q, k, v)) for x in (q, k, v))
    block_map, w, b = cast(Found, find_map(feature_map, causal=causal))
    masks = {"exists": key_mask, "starts": starts}
    masks = {name: x[..., None] for name, x in masks.items() if x is not None}
    if key_mask is not None:
        k, v = (jnp.where(key_mask[..., None], x, 0) for x in (k, v))
    q, k, v, *per_token = broadcast_leading(q, k, v, *masks.values())
    masks = dict(zip(masks, per_token, strict=True))
    *batch, n, head_dim = q.shape
    m, value_dim = v.shape[-2:]
    width = max(power_of_2(head_dim), power_of_2(value_dim))
    size = _CHUNK_BYTES // 2 if name == "high" else _CHUNK_BYTES
    chunk = min(_CHUNK, size // (width * v.dtype.itemsize))
    chunk = min(chunk, power_of_2(max(n, m)))
    segment = _segment(n, chunk, _CAUSAL_CHUNKS * chunk)
    block = min(_STEP, power_of_2(len(w)))
    plan = _Plan(causal, head_dim, chunk, segment, block, name, block_map)

    def pad_length(x, value=0.0):
        length, width = x.shape[-2:]
        size = segment if causal else _segment(length, chunk)
        x = x.reshape(math.prod(batch), length, width)
        rows = [(0, 0), (0, -length % size), (0, 0)]
        return jnp.pad(x, rows, constant_values=value)

    def pad(x):
        x, width = pad_length(x), x.shape[-1]
        return jnp.pad(x, [(0, 0), (0, 0), (0, power_of_2(width) - width)])

    q, k, v = (pad(x) for x in (q, k, v))
    masks = {name: pad_length(x, False)[..., 0] for name, x in masks.items()}
    if key_mask is None and not causal and k.shape[1] > m:
        # Causal queries do not see the zeros after the last key.
        masks["exists"] = jnp.broadcast_to(np.arange(k.shape[1]) < m, k.shape[:2])
    tokens = find_weights(
        _half_norm(k, plan) if block_map.is_signed else None,
        masks.get("exists"),
        masks.get("starts"),
        causal=causal,
    )
    out: Any = _attend(q, k, v, w, b, tokens, plan)
    return out[:, :n, :value_dim].reshape(*batch, n, value_dim).astype(dtype)


def _segment(length, chunk, most=None):
    """Returns how many tokens one program sums, a multiple of the chunk."""
    segments = -(-length // (most or _SEGMENT))
    return -(-length // (segments * chunk)) * chunk


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attend(q, k, v, w, b, tokens, plan):
    """Computes attention of arrays [heads, n, width] of padded sizes."""
    return _attend_forward(q, k, v, w, b, tokens, plan)[0]


def _attend_forward(q, k, v, w, b, tokens, plan):
    # S_f = sum_j phi(k_j)_f v_j^T and z_f, of exponentials e^(a_jf - c_f).
    ws, key_bias, query_bias = _prepare(w, b, q, plan)
    keys = {"k": k, "v": v} | tokens
    inputs = keys | {"ws": ws, "key_bias": key_bias}
    if plan.causal:
        # Of each segment, then of all segments before each.
        sums = accumulate(_sum_features(inputs, plan), tokens, plan.segment)
    elif plan.block_map.is_positive:
        # Of each segment relative to its own maximum, then of all, c_f = max_j a_jf.
        sums = _sum_features(keys | {"ws": ws}, plan)
        largest = sums.pop("largest_keys")
        shift = jnp.max(largest, axis=1)
        key_bias, query_bias = -shift, jnp.maximum(shift + query_bias, MIN_EXPONENT)
        decays = jnp.exp(largest - shift[:, None])
        sums = {
            "sums": jnp.sum(sums["sums"] * decays[..., None], axis=1, keepdims=True),
            "totals": jnp.sum(sums["totals"] * decays, axis=1, keepdims=True),
        }
    else:
        sums = _add_segments(_sum_features(inputs, plan))
    # phi(q_i)^T S / phi(q_i)^T z, with the keys of the query's own segment if causal.
    features = {"ws": ws, "key_bias": key_bias, "query_bias": query_bias}
    sums["sums"] = sums["sums"].astype(v.dtype)
    inputs = features | sums | {"q": q}
    out = _outputs(inputs | keys if plan.causal else inputs, plan)
    sums.pop("magnitudes", None)
    return out["out"], (q, k, v, w, b, tokens, features, sums, out)


def _attend_backward(plan, residuals, cotangent):
    q, k, v, w, b, tokens, features, sums, out = residuals
    # Of out_i = numerator_i / total_i: g_i / total_i is the cotangent of the numerator,
    # g1_i / total_i that of the denominator, g1_i = -g_i . out_i.
    keys = {"k": k, "v": v} | tokens
    of_queries = tokens if plan.causal else {}
    out = dict(out)
    forward = {"out": out.pop("out")}
    queries = {"q": q, "g": cotangent} | out
    inputs = features | queries | sums | (keys if plan.causal else {})
    # dphi(q_i) = (S g_i + z g1_i) / total_i, then through the features to q, W and b.
    gradients = _query_gradients(inputs | forward, plan)
    # One scale for the tokens of a head, whose gradients add up.
    scale = _scale(jnp.max(gradients["magnitude"], axis=1))
    added = {"g1": gradients["g1"], "scale": scale}
    queries, inputs = queries | added, inputs | added
    # By kernels of their own: the compiler drops them where nobody needs the result.
    of_map = _map_gradients(inputs, plan, "q")
    # Cotangents of S_f and z_f: sum_i phi(q_i)_f [g_i, g1_i] / total_i, over later
    # queries i if causal.
    biases = {"ws": features["ws"], "query_bias": features["query_bias"]}
    later = _sum_features(queries | biases | of_queries, plan)
    if plan.causal:
        later = accumulate(later, tokens, plan.segment, reverse=True)
        inputs = features | keys | queries
    else:
        later = _add_segments(later)
        inputs = features | keys | {"scale": scale}
    later["sums"] = later["sums"].astype(v.dtype)
    inputs |= later
    # dphi(k_j) = dS v_j + dz, then through the features to k, W and b.
    gradients |= _key_gradients(inputs, plan)
    of_map = jax.tree.map(jnp.add, of_map, _map_gradients(inputs, plan, "k"))
    of_w = of_map["w"][: plan.head_dim, : len(w)].T * plan.head_dim**-0.25
    of_b = of_map["b"][: len(w)]
    of_map = of_w.astype(w.dtype), of_b.astype(b.dtype)
    return *(gradients[x] for x in "qkv"), *of_map, None


_attend.defvjp(_attend_forward, _attend_backward)


def _prepare(w, b, q, plan):
    """Returns W^T / head_dim^(1/4) as arrays that sum to it, and biases of heads."""
    heads, num_features = len(q), len(w)
    w, b = w.astype(jnp.float32), b.astype(jnp.float32)
    biases = plan.block_map.biases(w, b, causal=plan.causal)
    w = w.T * plan.head_dim**-0.25
    fill = (0, -num_features % plan.block)
    w = jnp.pad(w, [(0, q.shape[-1] - plan.head_dim), fill])

    def repeat(bias, value):
        bias = jnp.pad(bias, [fill], constant_values=value)
        return jnp.broadcast_to(bias, (heads, bias.size))

    of_keys = repeat(biases.keys, biases.fill_keys)
    of_queries = repeat(biases.queries, biases.fill_queries)
    if q.dtype == jnp.float32:
        return [w], of_keys, of_queries
    high = w.astype(q.dtype)
    return [high, (w - high.astype(jnp.float32)).astype(q.dtype)], of_keys, of_queries


def _add_segments(sums):
    """Returns the sums of all segments."""
    return {name: x.sum(axis=1, keepdims=True) for name, x in sums.items()}


def _dot(a, b, plan):
    return dot(a, b, plan.precision)


def _project(x, ws, plan):
    """Returns W x~, [tokens, features]."""
    if plan.precision == "default":
        plan = dataclasses.replace(plan, precision="high")
    return sum(_dot(x, w, plan) for w in ws)


def _half_norm(k, plan):
    """Returns |k~_j|^2 / 2."""
    wide = k.astype(jnp.float32)
    return jnp.sum(wide * wide, axis=-1) * (0.5 * plan.head_dim**-0.5)


def _query_features(refs, ws, block, q, largest, plan):
    """Returns phi(q) of a block of features, and its derivative by W q~."""
    bias = refs["query_bias"][block]
    return plan.block_map.queries(_project(q, ws, plan), bias, largest)


def _key_features(refs, ws, block, k, plan):
    """Returns phi(k) of a block of features, and its derivative by W k~."""
    bias = refs["key_bias"][block]
    return plan.block_map.keys(_project(k, ws, plan), _half_norm(k, plan), bias)


def _largest(refs, rows):
    """Returns the queries' largest exponents, None if features are not exponentials."""
    return refs["largest"][rows] if "largest" in refs else None


def _scale(magnitude):
    """Returns powers of two that cotangents get before they are divided.

    Denominators may be as small as `MIN_DENOMINATOR`, some 2^-120. Quotients of scaled
    cotangents, and their products with values, stay far from the limits of float32.

    Args:
        magnitude: Largest magnitudes of cotangents.

    Returns:
        2^-60 / magnitude, up to a factor of two, for magnitudes of 2^-60 to 2^60.
    """
    # The bits of 2^e are e + 127 times 2^23.
    bits = jnp.clip(magnitude, 2.0**-60, 2.0**60)
    exponent = jax.lax.bitcast_convert_type(bits, jnp.int32) & np.int32(255 << 23)
    scale = np.int32((2 * 127 - 60) << 23) - exponent
    return jax.lax.bitcast_convert_type(scale, jnp.float32)


def _quotients(refs, rows):
    """Returns scaled g_i / total_i and g1_i / total_i."""
    g, scale = refs["g"][rows, :], refs["scale"][...]
    # The quotient of a small scale and a large total may underflow.
    inverse = 1.0 / refs["total"][rows]
    wide = g.astype(jnp.float32) * scale * inverse[:, None]
    return wide.astype(g.dtype), refs["g1"][rows] * scale * inverse


def _add_keys(refs, ws, features, rows, edge, carry, plan):
    """Adds tokens to S_f = sum_j phi(k_j)_f v_j^T and z_f, and magnitudes to theirs."""
    sums, totals, *magnitudes = carry
    k, v = refs["k"][rows, :], refs["v"][rows, :]
    phi, _ = _key_features(refs, ws, features, k, plan)
    phi = weighted(phi, key_weights(refs, rows, edge)).astype(v.dtype)
    sums, wide = sums + _dot(phi.T, v, plan), phi.astype(jnp.float32)
    magnitudes = (x + jnp.sum(jnp.abs(wide), axis=0) for x in magnitudes)
    return sums, totals + jnp.sum(wide, axis=0), *magnitudes


def _add_keys_online(refs, ws, features, rows, edge, carry, plan):
    """Adds tokens to S_f and z_f, relative to the running maximum c_f."""
    del features, edge
    sums, totals, shift = carry
    k, v = refs["k"][rows, :], refs["v"][rows, :]
    block_map = cast(PositiveMap, plan.block_map)
    exponents = block_map.key_exponents(_project(k, ws, plan), _half_norm(k, plan))
    if "key_exponents" in refs:
        exponents = exponents + refs["key_exponents"][rows][:, None]
    # Sums so far move to the new maximum: times e^(c_f - c'_f).
    before, shift = shift, jnp.maximum(shift, jnp.max(exponents, axis=0))
    decay = jnp.exp(before - shift)
    phi = shifted_exp(exponents, shift[None, :]).astype(v.dtype)
    sums = sums * decay[:, None] + _dot(phi.T, v, plan)
    totals = totals * decay + jnp.sum(phi.astype(jnp.float32), axis=0)
    return sums, totals, shift


def _add_queries(refs, ws, features, rows, edge, carry, plan):
    """Adds tokens to dS_f and dz_f, sums of phi(q_i)_f [g_i, g1_i] / total_i."""
    sums, totals = carry
    g, g1 = _quotients(refs, rows)
    q, largest = refs["q"][rows, :], _largest(refs, rows)
    phi, _ = _query_features(refs, ws, features, q, largest, plan)
    phi = weighted(phi, query_weights(refs, rows, edge)).astype(g.dtype)
    sums = sums + _dot(phi.T, g, plan)
    return sums, totals + jnp.sum(phi.astype(jnp.float32) * g1[:, None], axis=0)


def _sum_features(inputs, plan):
    """Sums over the tokens of every segment.

    Args:
        inputs: Those of `_add_queries`, of `_add_keys` or, without biases, of
            `_add_keys_online`.
        plan: The plan.

    Returns:
        By name, the sums, [heads, segments, features, width] and [heads, segments,
        features], those of magnitudes of keys' features that may be negative, and the
        largest exponents of keys if there are no biases.
    """
    add, values = (_add_queries, "g") if "g" in inputs else (_add_keys, "v")
    names = ["sums", "totals"]
    if plan.block_map.is_signed and "g" not in inputs:
        names = [*names, "magnitudes"]
    if not {"key_bias", "query_bias"} & inputs.keys():
        add, names = _add_keys_online, [*names, "largest_keys"]
    heads, n, width = inputs[values].shape
    num_features = inputs["ws"][0].shape[1]
    size = plan.segment if plan.causal else _segment(n, plan.chunk)
    step_size = min(_STEP, plan.chunk)
    # The token next to those that need the sums.
    edge = 0 if "g" in inputs else size - 1

    def kernel(refs, out, _):
        ws = [w[...] for w in refs["ws"]]

        def step(index, carry):
            rows = pl.ds(index * step_size, step_size)
            return add(refs, ws, slice(None), rows, edge, carry, plan)

        carry = tuple(
            jnp.full(
                (plan.block, width) if name == "sums" else (plan.block,),
                MIN_EXPONENT if name == "largest_keys" else 0.0,
                jnp.float32,
            )
            for name in names
        )
        carry = jax.lax.fori_loop(0, size // step_size, step, carry)
        for name, x in zip(names, carry, strict=True):
            out[name][...] = x

    shape = (heads, n // size, num_features)
    shapes = {name: (*shape, width) if name == "sums" else shape for name in names}
    grid = (*shape[:2], num_features // plan.block)
    return _call(kernel, grid, size, inputs, shapes, plan)


def _sums_at(refs, ws, block, chunk, plan, *, later=False):
    """Returns sums of a block of features at a chunk.

    They are those of the chunk's segment and, if causal, those of the segment's chunks
    before it, or after it if ``later``. All are for the chunk's first token, or last.
    """
    sums = refs["sums"][block, :]
    totals = [refs[x][block] for x in ("totals", "magnitudes") if x in refs]
    if not plan.causal:
        return sums, *totals
    if later:
        add, span = _add_queries, (chunk + 1, plan.segment // plan.chunk)
        edge = _last(chunk, plan)
        weight = query_weights(refs, plan.segment - 1, edge)
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


def _rows(chunk, plan):
    """Returns the rows of a chunk in its segment."""
    return pl.ds(_first(chunk, plan), plan.chunk)


def _first(chunk, plan):
    """Returns the place of a chunk's first token in its segment."""
    return chunk * plan.chunk


def _last(chunk, plan):
    """Returns the place of a chunk's last token in its segment."""
    return chunk * plan.chunk + (plan.chunk - 1)


def _outputs(inputs, plan):
    """Returns the outputs, and the largest exponents and denominators of queries.

    Where weights may be negative, also zero for guarded denominators, and one for
    others.
    """
    heads, n, _ = inputs["q"].shape
    num_features, width = inputs["sums"].shape[-2:]
    dtype, block_map = inputs["sums"].dtype, plan.block_map

    def kernel(refs, out, chunk):
        # Loaded before the loop, and only blocks of features in it.
        rows = _rows(chunk, plan)
        q = refs["q"][rows, :]
        k = refs["k"][rows, :] if plan.causal else None

        def step(index, carry):
            block = pl.ds(index * plan.block, plan.block)
            ws = [w[:, block] for w in refs["ws"]]
            projected, bias = _project(q, ws, plan), refs["query_bias"][block]
            phi, largest, decay = block_map.queries_online(
                projected, bias, carry.get("largest")
            )
            phi = phi.astype(dtype)
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
                phi_k = phi_k.astype(dtype)
                added["weights"] = _dot(phi, phi_k.T, plan)
                if magnitudes:
                    product = _dot(jnp.abs(phi), jnp.abs(phi_k).T, plan)
                    added["magnitudes"] = product
            carry = {
                name: weighted(carry[name], decay) + x for name, x in added.items()
            }
            return carry | ({} if decay is None else {"largest": largest})

        chunk_size, signed = (plan.chunk,), block_map.is_signed
        shapes = {"numerator": (plan.chunk, width), "total": chunk_size}
        if plan.causal:
            shapes["weights"] = chunk_size * 2
        if signed:
            shapes |= {"magnitude": chunk_size}
            shapes |= {"magnitudes": chunk_size * 2} if plan.causal else {}
        carry = {name: jnp.zeros(x, jnp.float32) for name, x in shapes.items()}
        if block_map.is_positive:
            carry["largest"] = jnp.full(chunk_size, MIN_EXPONENT, jnp.float32)
        carry = jax.lax.fori_loop(0, num_features // plan.block, step, carry)
        past = query_weights(refs, rows, _first(chunk, plan))
        numerator, total = (weighted(carry[x], past) for x in ("numerator", "total"))
        # + sum_{j <= i} weight_ij [v_j, 1] within the chunk, then the quotient.
        if plan.causal:
            weights = weighted_pairs(refs, rows, carry["weights"]).astype(dtype)
            total = total + jnp.sum(weights.astype(jnp.float32), axis=1)
            numerator = numerator + _dot(weights, refs["v"][rows, :], plan)
        if signed:
            # At least a share of the sum of magnitudes, see `guards.divide_sums`.
            magnitude = weighted(carry["magnitude"], past)
            if plan.causal:
                pairs = weighted_pairs(refs, rows, carry["magnitudes"])
                magnitude = magnitude + jnp.sum(pairs, axis=1)
            smallest = MIN_SHARE * magnitude
            free = jnp.abs(total) >= smallest
            guard = jnp.where(total < 0, -smallest, smallest)
            total = jnp.where(free, total, guard)
            out["free"][...] = jnp.where(free, 1.0, 0.0)
        total = jnp.where(jnp.abs(total) < MIN_DENOMINATOR, 1.0, total)
        out["out"][...] = (numerator / total[:, None]).astype(dtype)
        out["total"][...] = total
        if block_map.is_positive:
            out["largest"][...] = carry["largest"]

    shapes = {"out": (heads, n, width), "total": (heads, n)}
    if block_map.is_positive:
        shapes["largest"] = heads, n
    if block_map.is_signed:
        shapes["free"] = heads, n
    return _call(kernel, (heads, n // plan.chunk), plan.chunk, inputs, shapes, plan)


def _query_gradients(inputs, plan):
    """Returns the gradient of queries.

    With it come g1_i and the largest magnitudes of g_i, which no other kernel needs to
    find again.
    """
    shape, num_features = inputs["q"].shape, inputs["sums"].shape[-2]
    dtype = inputs["q"].dtype

    def kernel(refs, out, chunk):
        rows = _rows(chunk, plan)
        # A scale for every query, whose gradient depends on no other cotangent.
        wide = refs["g"][rows, :].astype(jnp.float32)
        g1 = -jnp.sum(wide * refs["out"][rows, :].astype(jnp.float32), axis=1)
        if "free" in refs:
            # A guard has no gradient.
            g1 = g1 * refs["free"][rows]
        finite = jnp.where(jnp.isfinite(wide), jnp.abs(wide), 0.0)
        magnitude = jnp.max(finite, axis=1)
        out["g1"][...], out["magnitude"][...] = g1, magnitude
        scale = _scale(magnitude)
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

    shapes = {"q": shape, "g1": shape[:2], "magnitude": shape[:2]}
    grid = shape[0], shape[1] // plan.chunk
    return _call(kernel, grid, plan.chunk, inputs, shapes, plan)


def _load_queries(refs: Any, chunk: Any, plan: _Plan, quotients: Any = None) -> Any:
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


def _key_gradients(inputs, plan):
    """Returns the gradients of keys and values."""
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
    return _call(kernel, (heads, n // plan.chunk), plan.chunk, inputs, shapes, plan)


def _load_keys(refs: Any, chunk: Any, plan: _Plan) -> Any:
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


def _map_gradients(inputs, plan, name):
    """Returns the gradients of W^T / head_dim^(1/4) and b, through "q" or "k".

    The program of a segment and a block of features adds up its chunks: gradients of
    every chunk would be as large as the features.
    """
    heads, n, width = inputs[name].shape
    num_features = inputs["sums"].shape[-2]
    size = plan.segment if plan.causal else _segment(n, plan.chunk)
    load, slopes = {
        "q": (_load_queries, _query_slopes),
        "k": (_load_keys, _key_slopes),
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
    out = _call(kernel, grid, size, inputs, shapes, plan)
    return {name: x.sum(axis=(0, 1)) for name, x in out.items()}


def _pair_gradients(refs: Any, rows: Any, g: Any, g1: Any, plan: _Plan) -> Any:
    """Returns the gradients of a chunk's weights, [queries, keys]; None if not causal.

    The weight of a pair is phi(q_i) . phi(k_j), and its gradient g_i . v_j + g1_i.
    """
    if not plan.causal:
        return None
    pairs = _dot(g, refs["v"][rows, :].T, plan) + g1[:, None]
    return weighted_pairs(refs, rows, pairs).astype(g.dtype)


# Axes of arrays: heads, segments, tokens, features, and others.
_AXES = (
    dict.fromkeys(("q", "k", "v", "g", "out"), "hnd")
    | dict.fromkeys(("g1", "magnitude", "largest", "total", "free"), "hn")
    | dict.fromkeys(("key_exponents", "query_exponents", "sequences"), "hn")
    | dict.fromkeys(("query_bias", "key_bias"), "hf")
    | dict.fromkeys(("totals", "magnitudes", "largest_keys", "b"), "hsf")
    | {"ws": "df", "sums": "hsfd", "scale": "h", "w": "hsdf"}
)


def _call(kernel, grid, size, inputs, shapes, plan):
    """Calls a kernel for heads, parts of ``size`` tokens and blocks of features.

    Parts are segments or chunks. The program of a chunk gets the inputs of the whole
    segment if it is causal. Without blocks of features in the grid, a program gets all
    of them.

    Args:
        kernel: A function of references to inputs and outputs, and of the place of the
            program's part in its segment.
        grid: Number of heads, of parts, and perhaps of blocks of features.
        size: Number of tokens of a part.
        inputs: Arrays by name, see `_AXES`.
        shapes: Shapes of outputs by name. Those of tokens have the dtype of the
            inputs' tokens, others are float32.
        plan: The plan.

    Returns:
        Outputs by name.
    """
    # One axis, so that two `jax.vmap` can add theirs to the three of a GPU.
    blocks, parts = math.prod(grid[2:]), grid[1]
    segment = plan.segment if plan.causal else size

    def part(program):
        return jax.lax.rem(jax.lax.div(program, np.int32(blocks)), np.int32(parts))

    def index(axes, shape, length, program):
        place = jax.lax.div(part(program), np.int32(length // size))
        places = {
            "h": jax.lax.div(program, np.int32(blocks * parts)),
            "s": place,
            "n": place,
            "f": jax.lax.rem(program, np.int32(blocks)),
        }
        return tuple(
            0 if x == 1 else places.get(axis, 0)
            for axis, x in zip(axes, shape, strict=True)
        )

    def spec(axes, length, x):
        sizes = {"h": None, "s": None, "n": length}
        if grid[2:]:
            sizes["f"] = plan.block
        block = [sizes.get(axis, x) for axis, x in zip(axes, x.shape, strict=True)]
        return pl.BlockSpec(block, functools.partial(index, axes, x.shape, length))

    def specs(arrays, length):
        return {
            name: jax.tree.map(functools.partial(spec, _AXES[name], length), x)
            for name, x in arrays.items()
        }

    def run(refs, out):
        place = 0
        if segment > size:
            place = jax.lax.rem(part(pl.program_id(0)), np.int32(segment // size))
        kernel(refs, out, place)

    tokens = inputs["ws"][0].dtype
    outputs = {
        name: jax.ShapeDtypeStruct(
            shape, tokens if _AXES[name] == "hnd" else jnp.float32
        )
        for name, shape in shapes.items()
    }
    return pl.pallas_call(
        run,
        grid=(math.prod(grid),),
        in_specs=[specs(inputs, segment)],
        out_specs=specs(outputs, size),
        out_shape=outputs,
        compiler_params=triton.CompilerParams(
            num_warps=8 if plan.chunk >= _STEP else 4, num_stages=2
        ),
    )(inputs)

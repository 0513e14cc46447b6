"""Linear attention by a feature map, whose features never reach memory.

Kernels loop over blocks of features, as flash attention loops over blocks of keys, and
compute the features of a block from queries and keys wherever they need them. With
S_f = sum_j phi(k_j)_f v_j^T and z_f = sum_j phi(k_j)_f, the forward pass is

1. `sum_features`: S and z of every stretch of keys;
2. in XLA, their sum over stretches; if causal, over those before each stretch;
3. `outputs`: phi(q_i)^T S / phi(q_i)^T z, online in the features if these are
   exponentials, with a running maximum of the exponents of each query.

The backward pass is

1. `query_gradients`, and `map_gradients` through the queries, from S and z;
2. `sum_features` of queries, and the sum over stretches: the cotangents dS and dz;
3. `key_gradients`, and `map_gradients` through the keys, from dS and dz.

If causal, a stretch has a few chunks only, and the program of a chunk adds the keys
before it in its stretch to the sums: sums for every chunk would be as large as keys and
values.

Products of half-precision arrays are in half precision, with sums in float32, as in
flash attention, those of float32 arrays in TF32 or as ``precision`` says. Exponents are
nearly as precise as in float32: their errors multiply the features.
"""

from __future__ import annotations

import functools
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float

from relattn.kernels.checks import broadcast_batch
from relattn.kernels.feature_maps import FeatureMap
from relattn.kernels.pallas_gpu.features import Found, find_map
from relattn.kernels.pallas_gpu.linear_kernels import (
    cotangent_scale,
    half_norm,
    key_gradients,
    map_gradients,
    outputs,
    query_gradients,
    sum_features,
)
from relattn.kernels.pallas_gpu.linear_plan import Plan
from relattn.kernels.pallas_gpu.products import (
    MAX_HEAD_DIM,
    MIN_EXPONENT,
    kernel_dtype,
    power_of_2,
    precision_name,
)
from relattn.kernels.pallas_gpu.token_weights import accumulate, find_weights
from relattn.kernels.platform import has_program_per_device
from relattn.kernels.precision import compute_dtype

# Largest number of tokens of a chunk, and of a stretch, whose sums one program adds.
_CHUNK = 128
_STRETCH = 1024
# Largest number of chunks of a stretch if causal.
_CAUSAL_CHUNKS = 4
# Largest number of tokens, and of features, of a step.
_STEP = 64
# Bytes of a chunk of queries: with keys, values, gradients and weights of pairs they
# fill the shared memory of an H100. Three products of TF32 instead of one need twice as
# much: each operand in two parts.
_CHUNK_BYTES = 2**14
# Largest number of features.
_MAX_FEATURES = 512


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
        Shape ``[*batch, n, value_dim]``, in the dtype of ``v``. It has only first
        derivatives, in reverse mode, including those of the projection and bias of the
        feature map.
    """
    # `fits_gpu` refuses what has no precision, and other feature maps.
    dtype, name = v.dtype, cast(str, precision_name(precision))
    q, k, v = (x.astype(kernel_dtype(name, q, k, v)) for x in (q, k, v))
    block_map, w, b = cast(Found, find_map(feature_map, causal=causal))
    masks = {"exists": key_mask, "starts": starts}
    masks = {key: x[..., None] for key, x in masks.items() if x is not None}
    if key_mask is not None:
        k, v = (jnp.where(key_mask[..., None], x, 0) for x in (k, v))
    q, k, v, *per_token = broadcast_batch(q, k, v, *masks.values())
    masks = dict(zip(masks, per_token, strict=True))
    *batch, n, head_dim = q.shape
    m, value_dim = v.shape[-2:]
    width = max(power_of_2(head_dim), power_of_2(value_dim))
    chunk_bytes = _CHUNK_BYTES // 2 if name == "high" else _CHUNK_BYTES
    chunk = min(_CHUNK, chunk_bytes // (width * v.dtype.itemsize))
    chunk = min(chunk, power_of_2(max(n, m)))
    most = _CAUSAL_CHUNKS * chunk if causal else _STRETCH
    plan = Plan(
        causal=causal,
        head_dim=head_dim,
        chunk=chunk,
        query_stretch=_stretch_size(n, chunk, most),
        key_stretch=_stretch_size(m, chunk, most),
        step=min(_STEP, chunk),
        block=min(_STEP, power_of_2(len(w))),
        num_warps=8 if chunk >= _STEP else 4,
        precision=name,
        block_map=block_map,
    )

    def pad_length(x, stretch, value=0.0):
        length, width = x.shape[-2:]
        x = x.reshape(math.prod(batch), length, width)
        rows = [(0, 0), (0, -length % stretch), (0, 0)]
        return jnp.pad(x, rows, constant_values=value)

    def pad(x, stretch):
        x, width = pad_length(x, stretch), x.shape[-1]
        return jnp.pad(x, [(0, 0), (0, 0), (0, power_of_2(width) - width)])

    q, k, v = (
        pad(q, plan.query_stretch),
        pad(k, plan.key_stretch),
        pad(v, plan.key_stretch),
    )
    masks = {
        key: pad_length(x, plan.key_stretch, value=False)[..., 0]
        for key, x in masks.items()
    }
    if key_mask is None and not causal and k.shape[1] > m:
        # Causal queries do not see the zeros after the last key.
        masks["exists"] = jnp.broadcast_to(np.arange(k.shape[1]) < m, k.shape[:2])
    tokens = find_weights(
        half_norm(k, plan) if block_map.is_signed else None,
        masks.get("exists"),
        masks.get("starts"),
        causal=causal,
    )
    out: Any = _attend(q, k, v, w, b, tokens, plan)
    return out[:, :n, :value_dim].reshape(*batch, n, value_dim).astype(dtype)


def _stretch_size(length, chunk, most):
    """Returns how many tokens one program sums: whole chunks, at most ``most``."""
    stretches = -(-length // most)
    return -(-length // (stretches * chunk)) * chunk


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attend(q, k, v, w, b, tokens, plan):
    """Computes attention of arrays [heads, n, width] of padded sizes."""
    return _attend_forward(q, k, v, w, b, tokens, plan)[0]


def _attend_forward(q, k, v, w, b, tokens, plan):
    ws, key_bias, query_bias = _prepare(w, b, q, plan)
    keys = {"k": k, "v": v} | tokens
    if plan.block_map.is_positive and not plan.causal:
        # Features e^(a_jf - c_f) with c_f = max_j a_jf, which the sums show.
        sums, shift = _merge_stretches(sum_features(keys | {"ws": ws}, plan))
        key_bias, query_bias = -shift, jnp.maximum(shift + query_bias, MIN_EXPONENT)
    else:
        sums = sum_features(keys | {"ws": ws, "key_bias": key_bias}, plan)
        sums = _add_stretches(sums, tokens, plan)
    features = {"ws": ws, "key_bias": key_bias, "query_bias": query_bias}
    sums["sums"] = sums["sums"].astype(v.dtype)
    # phi(q_i)^T S / phi(q_i)^T z, with the keys of the query's own stretch if causal.
    inputs = features | sums | {"q": q}
    out = outputs(inputs | keys if plan.causal else inputs, plan)
    sums.pop("magnitudes", None)
    return out["out"], (q, k, v, w, b, tokens, features, sums, out)


def _attend_backward(plan, residuals, cotangent):
    q, k, v, w, b, tokens, features, sums, found = residuals
    found = dict(found)
    out = found.pop("out")
    # Of out_i = numerator_i / total_i: g_i / total_i is the cotangent of the numerator,
    # g1_i / total_i that of the denominator, g1_i = -g_i . out_i.
    keys = {"k": k, "v": v} | tokens
    queries = {"q": q, "g": cotangent} | found
    inputs = features | queries | sums | (keys if plan.causal else {})
    # dphi(q_i) = (S g_i + z g1_i) / total_i, then through the features to q, W and b.
    gradients = query_gradients(inputs | {"out": out}, plan)
    # One scale for the tokens of a head, whose gradients add up.
    scale = cotangent_scale(jnp.max(gradients["largest_g"], axis=1))
    queries |= {"g1": gradients["g1"], "scale": scale}
    # By kernels of their own: the compiler drops them where nobody needs the result.
    of_map = map_gradients(inputs | queries, plan, "q")
    # Cotangents of S_f and z_f: sum_i phi(q_i)_f [g_i, g1_i] / total_i, over later
    # queries i if causal.
    biases = {"ws": features["ws"], "query_bias": features["query_bias"]}
    of_queries = queries | biases | (tokens if plan.causal else {})
    later = _add_stretches(sum_features(of_queries, plan), tokens, plan, reverse=True)
    later["sums"] = later["sums"].astype(v.dtype)
    # dphi(k_j) = dS v_j + dz, then through the features to k, W and b.
    inputs = features | keys | later | (queries if plan.causal else {"scale": scale})
    gradients |= key_gradients(inputs, plan)
    of_map = jax.tree.map(jnp.add, of_map, map_gradients(inputs, plan, "k"))
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


def _add_stretches(sums, tokens, plan, *, reverse=False):
    """Adds up the sums of stretches: of all, or if causal of those before each.

    If ``reverse``, of those after each.
    """
    if plan.causal:
        return accumulate(sums, tokens, plan.key_stretch, reverse=reverse)
    return {name: x.sum(axis=1, keepdims=True) for name, x in sums.items()}


def _merge_stretches(sums):
    """Adds up sums that are relative to each stretch's maximum; returns them and c_f.

    S_f = sum_s e^(c_fs - c_f) S_fs with c_f = max_s c_fs of the stretches s.
    """
    largest = sums["largest_keys"]
    shift = jnp.max(largest, axis=1)
    decays = jnp.exp(largest - shift[:, None])
    merged = {
        "sums": jnp.sum(sums["sums"] * decays[..., None], axis=1, keepdims=True),
        "totals": jnp.sum(sums["totals"] * decays, axis=1, keepdims=True),
    }
    return merged, shift

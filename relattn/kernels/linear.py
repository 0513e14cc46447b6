"""Linear attention by feature maps, also causal: linear time and memory, in chunks.

Exponents are kept separate from factors (`Features`) and shifted before they are
exponentiated. The shifts cancel exactly, so no gradient flows through them. No shift
mixes examples, and in causal attention none depends on later tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float, Int

from relattn.kernels.checks import (
    at_most,
    broadcast_leading,
    check_arguments,
    finite_masked,
    zero_masked,
)
from relattn.kernels.feature_maps import Features
from relattn.kernels.guards import (
    append_ones,
    divide_sums,
    scale_backward,
    shifted_exp,
    split_ones,
)
from relattn.kernels.platform import choices, first_carry
from relattn.kernels.precision import compute_dtype, wide_einsum, widen
from relattn.kernels.segments import segment_starts

# Maps [*batch, n, head_dim] to features; a plain array gets exponents of zero. A
# pair has a map of queries and one of keys.
_Map = Callable[[Array], Features | Array]
FeatureMap = _Map | tuple[_Map, _Map]

# The shift before the first key; finite, so that differences of shifts are not NaN.
LOWEST = float(jnp.finfo(jnp.float32).min)

# Number of chunks that are computed in parallel, so that products are large enough to
# be fast.
_PARALLEL_CHUNKS = 8

# Name (`jax.ad_checkpoint.checkpoint_name`) of arrays that the forward pass keeps: they
# are small and expensive to compute again.
KEPT = "kept"


class LinearState(NamedTuple):
    """Sums over keys, of a size that does not depend on the number of keys.

    Attributes:
        shift: Subtracted from the keys' exponents: ``[*batch, 1, features]`` or
            ``[*batch, 1, 1]``.
        sums: S and z, the sum of phi(k) [v, 1], shape
            ``[*batch, features, value_dim + 1]``.
        magnitudes: Sum of abs(phi(k)), shape ``[*batch, features, 1]``; None if every
            feature is a plain exponential.
    """

    shift: Float[Array, "*batch 1 features"] | Float[Array, "*batch 1 1"]
    sums: Float[Array, "*batch features width"]
    magnitudes: Float[Array, "*batch features 1"] | None


@overload
def linear_attention(
    q: Float[Array, "*#batch n head_dim"],
    k: Float[Array, "*#batch m head_dim"],
    v: Float[Array, "*#batch m value_dim"],
    feature_map: FeatureMap,
    *,
    key_mask: Bool[Array, "*#batch m"] | None = None,
    chunk_size: int | None = None,
    precision: jax.lax.PrecisionLike = None,
    return_normalizer: Literal[False] = False,
) -> Float[Array, "*batch n value_dim"]: ...
@overload
def linear_attention(
    q: Float[Array, "*#batch n head_dim"],
    k: Float[Array, "*#batch m head_dim"],
    v: Float[Array, "*#batch m value_dim"],
    feature_map: FeatureMap,
    *,
    key_mask: Bool[Array, "*#batch m"] | None = None,
    chunk_size: int | None = None,
    precision: jax.lax.PrecisionLike = None,
    return_normalizer: Literal[True],
) -> tuple[Float[Array, "*batch n value_dim"], Float[Array, "*batch n"]]: ...
@check_arguments
def linear_attention(
    q: Float[Array, "*#batch n head_dim"],
    k: Float[Array, "*#batch m head_dim"],
    v: Float[Array, "*#batch m value_dim"],
    feature_map: FeatureMap,
    *,
    key_mask: Bool[Array, "*#batch m"] | None = None,
    chunk_size: int | None = None,
    precision: jax.lax.PrecisionLike = None,
    return_normalizer: bool = False,
) -> (
    Float[Array, "*batch n value_dim"]
    | tuple[Float[Array, "*batch n value_dim"], Float[Array, "*batch n"]]
):
    """Computes linear attention, with weights phi(q_i) . phi(k_j).

    out_i = phi(q_i)^T S / phi(q_i)^T z, S = sum_j phi(k_j) v_j^T, z = sum_j phi(k_j).

    Keys have exponents a_jf and queries b_if. Their features are computed as
    exp(a_jf - c_f) and exp(b_if + c_f - r_i), c_f = max_j a_jf,
    r_i = max_f (b_if + c_f): for positive features the denominator is at least one.

    Trigonometric features can give a denominator near or below zero. A negative
    denominator is used unchanged. One smaller than 1e-4 of the sum of absolute products
    is set to that size and keeps its sign, so that the result stays finite.
    ``return_normalizer`` shows where this happens.

    Args:
        q: Queries, shape ``[*batch, n, head_dim]``.
        k: Keys, shape ``[*batch, m, head_dim]``.
        v: Values, shape ``[*batch, m, value_dim]``.
        feature_map: From ``[*batch, n, head_dim]`` to features, token by token; or a
            pair of such functions, of queries and of keys.
        key_mask: True for keys that exist, shape ``[*batch, m]``. A query without keys
            gives zeros.
        chunk_size: Number of tokens whose features are computed at a time; None for the
            choice of `relattn.kernels.platform`, which may be a kernel, or all tokens
            where their number is symbolic. With more than one chunk, the backward pass
            computes them again.
        precision: Passed to einsum.
        return_normalizer: Whether to also return the denominators.

    Returns:
        Shape ``[*batch, n, value_dim]``, in the dtype of ``v``. With
        ``return_normalizer``, also the denominators before the guard, each up to a
        positive factor, shape ``[*batch, n]``: count those that are not positive.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        ValueError: If ``chunk_size`` is less than one.

    Example:
        >>> from relattn.kernels import draw_orthogonal, positive_features
        >>> w = draw_orthogonal(jax.random.key(0), 5, 3)
        >>> x = jnp.ones((7, 3))
        >>> linear_attention(x, x, x, lambda x: positive_features(x, w)).shape
        (7, 3)

    Source:
        Choromanski et al., Rethinking Attention with Performers, section 2.2.
    """
    takes_all = chunk_size is None
    chunk_size = choices().linear_chunk if takes_all else chunk_size
    check_chunk_size(chunk_size)
    check_feature_maps(feature_map, q, k)

    def is_one_chunk(x):
        n = x.shape[-2]
        return at_most(n, chunk_size) or takes_all and is_symbolic_dim(n)

    k, v, key_mask = zero_masked(k, v, key_mask)
    einsum = wide_einsum(precision)

    def sum_chunk(chunk):
        keys, values, mask = chunk
        return _sum_keys(key_features(feature_map, keys), values, mask, einsum)

    def sum_keys(k, v, key_mask):
        # S and z, chunk by chunk.
        if is_one_chunk(k):
            return sum_chunk((k, v, key_mask))
        if key_mask is None:
            key_mask = jnp.ones(k.shape[:-1], bool)
        chunks = split_chunks((k, v, key_mask[..., None]), chunk_size)
        chunks = (*chunks[:2], chunks[2][..., 0])
        empty = _empty(jax.eval_shape(sum_chunk, jax.tree.map(lambda x: x[0], chunks)))

        def add_chunk(state, chunk):
            return _merge(state, sum_chunk(chunk)), None

        return scan_chunks(add_chunk, empty, chunks)[0]

    def in_chunks(q, k, v, key_mask):
        state = sum_keys(k, v, key_mask)

        def attend(queries):
            features = query_features(feature_map, queries)
            return _attend_sums(features, state, einsum, v.dtype)

        # phi(q_i)^T S / phi(q_i)^T z, chunk by chunk.
        if is_one_chunk(q):
            return attend(q)
        _, chunks = scan_chunks(
            lambda _, queries: (None, attend(queries)),
            None,
            split_chunks(q, chunk_size),
        )
        return join_chunks(chunks, q.shape[-2])

    branches = {}
    if takes_all and not return_normalizer:
        branches = _fused_branches(q, k, v, feature_map, precision, causal=False)
    if branches:
        return jax.lax.platform_dependent(
            q, k, v, key_mask, **branches, default=lambda *x: in_chunks(*x)[0]
        )
    out, normalizer = in_chunks(q, k, v, key_mask)
    return (out, normalizer[..., 0]) if return_normalizer else out


@overload
def causal_linear_attention(
    q: Float[Array, "*#batch n head_dim"],
    k: Float[Array, "*#batch n head_dim"],
    v: Float[Array, "*#batch n value_dim"],
    feature_map: FeatureMap,
    *,
    key_mask: Bool[Array, "*#batch n"] | None = None,
    segment_ids: Int[Array, "*#batch n"] | None = None,
    state: LinearState | None = None,
    return_state: Literal[False] = False,
    chunk_size: int | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch n value_dim"]: ...
@overload
def causal_linear_attention(
    q: Float[Array, "*#batch n head_dim"],
    k: Float[Array, "*#batch n head_dim"],
    v: Float[Array, "*#batch n value_dim"],
    feature_map: FeatureMap,
    *,
    key_mask: Bool[Array, "*#batch n"] | None = None,
    segment_ids: Int[Array, "*#batch n"] | None = None,
    state: LinearState | None = None,
    return_state: Literal[True],
    chunk_size: int | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[Float[Array, "*batch n value_dim"], LinearState]: ...
@check_arguments
def causal_linear_attention(
    q: Float[Array, "*#batch n head_dim"],
    k: Float[Array, "*#batch n head_dim"],
    v: Float[Array, "*#batch n value_dim"],
    feature_map: FeatureMap,
    *,
    key_mask: Bool[Array, "*#batch n"] | None = None,
    segment_ids: Int[Array, "*#batch n"] | None = None,
    state: LinearState | None = None,
    return_state: bool = False,
    chunk_size: int | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> (
    Float[Array, "*batch n value_dim"]
    | tuple[Float[Array, "*batch n value_dim"], LinearState]
):
    """Computes linear attention of every token to itself and earlier tokens.

    out_i = phi(q_i)^T S_i / phi(q_i)^T z_i, S_i = sum_{j <= i} phi(k_j) v_j^T,
    z_i = sum_{j <= i} phi(k_j): masked products within a chunk, sums between chunks.

    The state holds S and z, and its size does not depend on the number of tokens. A
    call with n tokens, and one with m more tokens that continues from the returned
    state, give the outputs of one call with n + m tokens. With the whole prompt the
    call fills a decoder's state, with one token it is a decoding step.

    Nothing depends on later tokens, bit for bit, if they are finite. Keys' exponents
    are shifted by `Features.bound`, which does not depend on the data, or, where a
    token has one exponent, by the largest exponent so far. Denominators are guarded as
    in `linear_attention`; where all weights underflow, the result is zero. Gradients
    stay finite: the backward pass runs on cotangents scaled by a power of two.

    Positive features of long keys underflow: no query gives such a key any weight. The
    median norm of a key from which this happens (50 draws of 110, 266 and 621 features)
    is 38 at head_dim 32, 46 at head_dim 64 and 56 at head_dim 128; where there is no
    other key, normal queries get zeros from a norm of 36, 43 and 51 on. These norms are
    a CPU's, which rounds subnormal numbers to zero; a GPU keeps them, and its norms are
    larger. With head_dim above about 224, features of ordinary keys underflow too,
    since the bound grows with head_dim. `underflowed` returns which keys are affected.
    Features with ``eps`` do not underflow.

    Args:
        q: Queries, shape ``[*batch, n, head_dim]``.
        k: Keys, shape ``[*batch, n, head_dim]``.
        v: Values, shape ``[*batch, n, value_dim]``.
        feature_map: From ``[*batch, n, head_dim]`` to features, token by token; or a
            pair of such functions, of queries and of keys.
        key_mask: True for keys that exist, shape ``[*batch, n]``.
        segment_ids: For packed sequences: a token attends only to tokens since the id
            last changed, shape ``[*batch, n]``. An id that comes back after another one
            starts a new sequence, as in `relattn.kernels.segment_mask`. The first token
            continues the sequence of ``state``.
        state: The state that an earlier call returned for the tokens before these; None
            if there are none.
        return_state: Whether to also return the state after these tokens.
        chunk_size: Number of tokens in a chunk; None for the choice of
            `relattn.kernels.platform`. More tokens than that are taken by a kernel
            where one exists, in chunks of its own.
        precision: Passed to einsum.

    Returns:
        Shape ``[*batch, n, value_dim]``, in the dtype of ``v``. With ``return_state``,
        also the state. The kernel has first derivatives in reverse mode only.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        ValueError: If ``chunk_size`` is less than one, the features have neither a
            bound nor one exponent per token, or the state has other shapes.

    Example:
        >>> from relattn.kernels import draw_orthogonal, positive_features
        >>> w = draw_orthogonal(jax.random.key(0), 5, 3)
        >>> x, feature_map = jnp.eye(3), lambda x: positive_features(x, w)
        >>> out = causal_linear_attention(x, x, x, feature_map)
        >>> out[0]
        Array([1., 0., 0.], dtype=float32)
        >>> prompt, last = x[:2], x[2:]
        >>> _, state = causal_linear_attention(
        ...     prompt, prompt, prompt, feature_map, return_state=True)
        >>> out_2 = causal_linear_attention(last, last, last, feature_map, state=state)
        >>> bool(jnp.allclose(out_2, out[2:], atol=1e-6))
        True

    Source:
        Choromanski et al., Rethinking Attention with Performers, section 2.5; chunks:
        Hua et al., Transformer Quality in Linear Time, section 3.2; state:
        Katharopoulos et al., Transformers are RNNs, section 3.4.
    """
    chunk_size = choices().causal_chunk if chunk_size is None else chunk_size
    check_chunk_size(chunk_size)
    check_feature_maps(feature_map, q, k)
    q, k, v = broadcast_leading(finite_masked(q, key_mask), k, v)
    k, v, key_mask = zero_masked(k, v, key_mask)
    starts = None
    if segment_ids is not None:
        starts = segment_starts(jnp.broadcast_to(segment_ids, k.shape[:-1]))

    def in_chunks(q, k, v, key_mask=None, starts=None, state=None, return_state=False):
        attend = functools.partial(
            _attend_in_chunks,
            return_state=return_state,
            feature_map=feature_map,
            chunk_size=chunk_size,
            precision=precision,
        )
        out, state = scale_backward(attend, v, q, k, key_mask, starts, state)
        return out.astype(v.dtype), state

    branches = {}
    plain = starts is None and state is None and not return_state
    if plain and not at_most(q.shape[-2], chunk_size):
        branches = _fused_branches(q, k, v, feature_map, precision, causal=True)
        if key_mask is None:
            branches |= _vmem_branches(q, k, v, feature_map, precision)
    if branches:
        return jax.lax.platform_dependent(
            q, k, v, key_mask, **branches, default=lambda *x: in_chunks(*x)[0]
        )
    out, state = in_chunks(q, k, v, key_mask, starts, state, return_state)
    return out if state is None else (out, state)


def _fused_branches(q, k, v, feature_map, precision, *, causal):
    """Finds kernels for GPUs: branches of `jax.lax.platform_dependent`, or none."""
    if not choices().fused_linear:
        return {}
    from relattn.kernels import pallas_gpu

    if not pallas_gpu.is_available():
        return {}
    from relattn.kernels.pallas_gpu import linear as fused

    if not fused.fits_gpu(q, k, v, feature_map, precision):
        return {}
    attend = functools.partial(
        fused.attend_on_gpu,
        feature_map=feature_map,
        causal=causal,
        precision=precision,
    )
    return {"cuda": attend}


def _vmem_branches(q, k, v, feature_map, precision):
    """Finds kernels for TPUs that take no mask, as `_fused_branches`."""
    if not choices().causal_in_vmem:
        return {}
    from relattn.kernels import pallas_linear

    if not pallas_linear.fits_vmem(q, k, v, feature_map, precision):
        return {}

    def attend(q, k, v, key_mask):
        del key_mask
        return pallas_linear.attend_in_vmem(q, k, v, feature_map, precision=precision)

    return {"tpu": attend}


def underflowed(keys: Features) -> Bool[Array, "*batch n"]:
    """Finds keys that get no weight in `causal_linear_attention`, by underflow.

    Args:
        keys: Features of the keys, with a bound.

    Returns:
        True where every feature, shifted by its bound, is below the smallest normal
        float32, shape ``[*batch, n]``.

    Raises:
        ValueError: If the features have no bound.

    Example:
        >>> from relattn.kernels import draw_orthogonal, positive_features
        >>> w = draw_orthogonal(jax.random.key(0), 5, 3)
        >>> underflowed(positive_features(jnp.array([[1.0] * 3, [50.0] * 3]), w))
        Array([False,  True], dtype=bool)
    """
    if keys.bound is None:
        raise ValueError(
            "only features with a bound underflow, got Features with bound=None"
        )
    largest = jnp.max(keys.exponents - keys.bound, axis=-1)
    return largest < math.log(jnp.finfo(jnp.float32).tiny)


def query_features(
    feature_map: FeatureMap, q: Float[Array, "*batch n head_dim"]
) -> Features:
    """Computes the features of queries; a plain array gets exponents of zero."""
    query_map = feature_map[0] if isinstance(feature_map, tuple) else feature_map
    return _evaluate(query_map, q)


def key_features(
    feature_map: FeatureMap, k: Float[Array, "*batch m head_dim"]
) -> Features:
    """Computes the features of keys, as `query_features`."""
    key_map = feature_map[1] if isinstance(feature_map, tuple) else feature_map
    return _evaluate(key_map, k)


def check_feature_maps(feature_map: FeatureMap, q: Array, k: Array) -> None:
    """Checks that a pair of feature maps returns features of one kind and number."""
    if not isinstance(feature_map, tuple):
        return
    token = [jax.ShapeDtypeStruct((1, x.shape[-1]), x.dtype) for x in (q, k)]
    maps = [functools.partial(f, feature_map) for f in (query_features, key_features)]
    shapes = [
        jax.tree.map(jnp.shape, jax.eval_shape(*each))
        for each in zip(maps, token, strict=True)
    ]
    # Only the keys' bound is used.
    if shapes[0][:2] != shapes[1][:2]:
        raise ValueError(
            "the feature maps of queries and keys must return features of the same "
            f"shape, got {shapes[0]} and {shapes[1]} for one token"
        )


def _evaluate(feature_map, x):
    features = feature_map(x)
    if isinstance(features, Features):
        return features
    values = widen(features)
    return Features(values, jnp.zeros_like(values[..., :1]))


def scale_keys(
    features: Features, mask: Bool[Array, "*batch m"] | None
) -> tuple[
    Float[Array, "*batch m features"],
    Float[Array, "*batch 1 features"] | Float[Array, "*batch 1 1"],
]:
    """Returns the keys' features, shifted to largest exponent zero, and the shift."""
    exponents = features.exponents
    if mask is not None:
        exponents = jnp.where(mask[..., None], exponents, -jnp.inf)
    shift = jnp.maximum(jnp.max(exponents, axis=-2, keepdims=True), LOWEST)
    shift = jax.lax.stop_gradient(shift)
    phi = shifted_exp(exponents, shift)
    return (phi if features.values is None else phi * features.values), shift


def _sum_keys(features, v, mask, einsum):
    """Returns the state of keys: S_f = sum_j e^(a_jf - c_f) v_j^T, and z_f."""
    phi, shift = scale_keys(features, mask)
    magnitudes = None
    if features.values is not None:
        magnitudes = jax.lax.stop_gradient(jnp.sum(jnp.abs(phi), axis=-2)[..., None])
    sums = einsum("...mf,...me->...fe", phi, v)
    totals = jnp.sum(phi, axis=-2)[..., None]
    sums = jnp.concatenate(broadcast_leading(sums, totals), axis=-1)
    return LinearState(shift, sums, magnitudes)


def _empty(state):
    """Returns the state of no keys, with the same shapes."""
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)
    return zeros._replace(shift=jnp.full_like(zeros.shift, LOWEST))


def _merge(a, b):
    """Adds two states, after bringing them to the same shift."""
    shift = jnp.maximum(a.shift, b.shift)

    def rescaled(state):
        factor = jnp.exp(state.shift - shift).swapaxes(-2, -1)
        return jax.tree.map(lambda x: x * factor, (state.sums, state.magnitudes))

    return LinearState(shift, *jax.tree.map(jnp.add, rescaled(a), rescaled(b)))


def scale_queries(
    features: Features, shift: Float[Array, "..."]
) -> Float[Array, "*batch n features"]:
    """Returns the queries' features, each row shifted to largest exponent zero."""
    exponents = features.exponents + shift
    largest = jnp.maximum(jnp.max(exponents, axis=-1, keepdims=True), LOWEST)
    phi = shifted_exp(exponents, largest)
    return phi if features.values is None else phi * features.values


def _attend_sums(features, state, einsum, dtype):
    """Returns phi(q_i)^T S / phi(q_i)^T z, and the denominators before the guard."""
    phi = scale_queries(features, state.shift)
    product = functools.partial(einsum, "...nf,...fe->...ne")
    # Apart: a product that is wider by a column takes half as long again on CPUs.
    numerator, normalizer = (product(phi, x) for x in split_ones(state.sums))
    magnitudes = None
    if state.magnitudes is not None:
        phi = jax.lax.stop_gradient(jnp.abs(phi))
        magnitudes = product(phi, state.magnitudes)
    return divide_sums((numerator, normalizer), magnitudes, dtype)


def check_causal(features: Any) -> None:
    """Raises ValueError if the shift of the features needs later tokens."""
    one_exponent = features.values is not None and features.exponents.shape[-1] == 1
    if features.bound is None and not one_exponent:
        raise ValueError(
            "causal linear attention needs Features with a bound, or with values and "
            "one exponent per token, got no bound and exponents of shape "
            f"{features.exponents.shape}"
        )


def causal_factors(
    queries: Features, keys: Features, mask: Bool[Array, "*batch n"] | None
) -> tuple[
    Float[Array, "*batch n features"],
    Float[Array, "*batch n features"],
    Float[Array, "*batch n 1"] | None,
]:
    """Returns features of queries and keys, shifted independently of other tokens.

    Without a bound, the features of the keys lack their exponents, one per token, which
    are returned last.
    """
    check_causal(keys)
    if keys.bound is None:
        exponents = keys.exponents
        if mask is not None:
            exponents = jnp.where(mask[..., None], exponents, -jnp.inf)
        assert queries.values is not None and keys.values is not None
        return queries.values, keys.values, exponents
    bound = jax.lax.stop_gradient(keys.bound)
    phi = shifted_exp(keys.exponents, bound, math.inf)
    if keys.values is not None:
        phi = phi * keys.values
    if mask is not None:
        phi = jnp.where(mask[..., None], phi, 0.0)
    return scale_queries(queries, bound), phi, None


def feature_shapes(feature_map: FeatureMap, k: Array) -> Features:
    """Returns the shapes and dtypes of one token's features."""
    return jax.eval_shape(
        functools.partial(key_features, feature_map),
        jax.ShapeDtypeStruct((*k.shape[:-2], 1, k.shape[-1]), k.dtype),
    )


def empty_causal(features: Features, v: Array | jax.ShapeDtypeStruct) -> LinearState:
    """Returns the state before the first token, for features of these shapes."""
    batch = v.shape[:-2]
    signed = features.values is not None
    widest = features.exponents if features.values is None else features.values
    num_features = widest.shape[-1]
    # With a bound, the bound is the shift and this one stays zero.
    shift = LOWEST if features.bound is None else 0.0
    dtype = compute_dtype(v.dtype, *(x.dtype for x in jax.tree.leaves(features)))
    return LinearState(
        shift=jnp.full((*batch, 1, 1), shift, dtype),
        sums=jnp.zeros((*batch, num_features, v.shape[-1] + 1), dtype),
        magnitudes=jnp.zeros((*batch, num_features, 1), dtype) if signed else None,
    )


def _attend_in_chunks(
    v,
    q,
    k,
    key_mask,
    starts,
    state,
    *,
    return_state,
    feature_map,
    chunk_size,
    precision,
) -> tuple[Array, LinearState | None]:
    """Computes causal linear attention by a scan over chunks; returns its state."""
    einsum = wide_einsum(precision)
    length, parallel = q.shape[-2], 1
    is_one_chunk = at_most(length, chunk_size)
    if state is None or not is_one_chunk:
        features = feature_shapes(feature_map, k)
        check_causal(features)
        if state is None:
            state = empty_causal(features, v)
        # With a bound, only sums pass between chunks: several are computed in parallel.
        bounded = features.bound is not None and starts is None
        if bounded and not is_one_chunk and not is_symbolic_dim(length):
            parallel = _PARALLEL_CHUNKS

    def attend(state, tokens):
        state, *sums = sum_causally(state, tokens, feature_map, einsum, parallel)
        out, _ = divide_sums(*checkpoint_name(sums, KEPT), dtype=v.dtype)
        return state, out.reshape(tokens[2].shape)

    if is_one_chunk:
        state, out = attend(state, (q, k, v, key_mask, starts))
    else:
        if return_state and key_mask is None:
            # Masks the zeros that fill the last chunk, which have features too.
            key_mask = jnp.ones(k.shape[:-1], bool)
        size = parallel * chunk_size
        tokens = split_chunks((q, k, v), size, multiple=parallel)
        masks = [
            None
            if mask is None
            else split_chunks(mask[..., None], size, parallel)[..., 0]
            for mask in (key_mask, starts)
        ]
        state, chunks = scan_chunks(attend, state, (*tokens, *masks))
        out = join_chunks(chunks, length)
    return out, state if return_state else None


def sum_causally(
    state: LinearState,
    tokens: tuple[Array, Array, Array, Array | None, Array | None],
    feature_map: FeatureMap,
    einsum: Callable[..., Array],
    parallel: int = 1,
) -> tuple[LinearState, Array, Array | None]:
    """Computes the sums over earlier keys of a scan's next tokens.

    ``tokens`` are queries, keys, values, mask and segment starts, each of the last two
    or None. Returns the state after them, and sums and magnitudes for `divide_sums`, of
    shape ``[*batch, parallel, n / parallel, width]``.
    """
    q, k, v, mask, starts = tokens
    phi_q, phi_k, exponents = causal_factors(
        query_features(feature_map, q), key_features(feature_map, k), mask
    )
    expected = (*phi_k.shape[:-2], phi_k.shape[-1], v.shape[-1] + 1)
    if state.sums.shape != expected:
        raise ValueError(
            f"the state has sums of shape {state.sums.shape}, but these tokens and "
            f"features need {expected}: give the state that causal_linear_attention "
            "returned for the tokens before, or None for the first tokens"
        )
    # Factors of the pairs j <= i of a chunk, and of the sums before it.
    size = q.shape[-2] // parallel
    # Compared, not jnp.tril: old versions of Mosaic select no booleans.
    query, key = (jax.lax.broadcasted_iota(jnp.int32, (size, size), i) for i in (0, 1))
    allowed, continues = key <= query, None
    if starts is not None:
        # Number of segments that start in the chunk, up to each token.
        segment = jnp.cumsum(starts, axis=-1)
        allowed &= segment[..., :, None] == segment[..., None, :]
        continues = (segment == 0)[..., None]
    if exponents is not None:
        decays, shift = _running_decays(state.shift, exponents, allowed, continues)
    elif starts is not None:
        decays, shift = _decays(phi_k.dtype, allowed, continues), state.shift
    else:
        decays, shift = _Decays(allowed.astype(phi_k.dtype), 1.0, 1.0, 1.0), state.shift

    def chunks(x):
        return x.reshape(*x.shape[:-2], parallel, size, x.shape[-1])

    def attend(phi_q, phi_k, v, before):
        phi_q, phi_k, v = chunks(phi_q), chunks(phi_k), chunks(v)
        # S and z of each chunk, then of all keys before each chunk.
        sums = einsum("...jf,...je->...fe", phi_k * decays.keys, v)
        if parallel == 1:
            earlier = before[..., None, :, :]
            after = decays.state * before + sums[..., 0, :, :]
        else:
            totals = jnp.concatenate([before[..., None, :, :], sums], axis=-3)
            totals = jnp.cumsum(totals, axis=-3)
            earlier, after = totals[..., :-1, :, :], totals[..., -1, :, :]
        # sum_{j <= i} phi(q_i) . phi(k_j) [v_j, 1] within the chunk, + phi(q_i)^T S.
        weights = decays.pairs * einsum("...if,...jf->...ij", phi_q, phi_k)
        within = einsum("...ij,...je->...ie", weights, v)
        past = einsum("...if,...fe->...ie", phi_q, earlier)
        return after, within + decays.past * past

    after, sums = attend(phi_q, phi_k, append_ones(v), state.sums)
    if state.magnitudes is None:
        magnitudes_after = magnitudes = None
    else:
        magnitudes_after, magnitudes = jax.lax.stop_gradient(
            attend(
                jnp.abs(phi_q),
                jnp.abs(phi_k),
                append_ones(v)[..., -1:],
                state.magnitudes,
            )
        )
    return LinearState(shift, after, magnitudes_after), sums, magnitudes


class _Decays(NamedTuple):
    """Factors that bring sums with different shifts to the same shift."""

    pairs: Array  # Keys of the chunk, to each query's shift; 0 for later keys.
    past: Array | float  # The state before the chunk, to each query's shift.
    keys: Array | float  # Keys of the chunk, to the shift after it.
    state: Array | float  # The state before the chunk, to the shift after it.


def _decays(dtype, pairs, past):
    """Returns the decays of keys and state, which are those of the last query."""
    pairs, past = pairs.astype(dtype), past.astype(dtype)
    return _Decays(
        pairs=pairs[..., None, :, :],
        past=past[..., None, :, :],
        keys=pairs[..., None, -1, :, None],
        state=past[..., -1:, :],
    )


def _running_decays(shift, exponents, allowed, continues):
    """Computes decays that shift each query by the largest exponent of its keys."""
    earlier = jnp.where(allowed, exponents.swapaxes(-2, -1), -jnp.inf)
    largest = jax.lax.stop_gradient(jnp.max(earlier, axis=-1, keepdims=True))
    if continues is not None:
        shift = jnp.where(continues, shift, LOWEST)
    largest = jnp.maximum(largest, shift)
    past = jnp.exp(shift - largest)
    if continues is not None:
        past = jnp.where(continues, past, 0.0)
    decays = _decays(exponents.dtype, shifted_exp(earlier, largest), past)
    return decays, largest[..., -1:, :]


def check_chunk_size(chunk_size: int, name: str = "chunk_size") -> None:
    """Raises ValueError if a chunk size is less than one."""
    if chunk_size < 1:
        raise ValueError(f"{name} must be at least 1, got {chunk_size}")


def scan_chunks(body: Callable, state: Any, chunks: Any) -> tuple[Any, Any]:
    """Scans over chunks; the backward pass computes all but `KEPT` arrays again."""
    policy = jax.checkpoint_policies.save_only_these_names(KEPT)
    body = jax.checkpoint(body, prevent_cse=False, policy=policy)
    return jax.lax.scan(body, first_carry(body, state, chunks), chunks)


def split_chunks(tree: Any, chunk_size: int, multiple: int = 1) -> Any:
    """Splits [*batch, n, width] into [chunks, *batch, chunk, width].

    Chunks have equal lengths: a multiple of ``multiple``, at most ``chunk_size``, which
    is one too. Zeros fill the last chunk. Where n is symbolic, chunks have
    ``chunk_size`` tokens.
    """

    def split(x):
        length = x.shape[-2]
        num_chunks, size = -(-length // chunk_size), chunk_size
        if not is_symbolic_dim(length):
            size = -(-length // (num_chunks * multiple)) * multiple
        padding = [(0, 0)] * x.ndim
        padding[-2] = (0, num_chunks * size - length)
        x = jnp.pad(x, padding)
        x = x.reshape(*x.shape[:-2], num_chunks, size, x.shape[-1])
        return jnp.moveaxis(x, -3, 0)

    return jax.tree.map(split, tree)


def join_chunks(tree: Any, length: Any) -> Any:
    """Joins [chunks, *batch, chunk, width] to [*batch, length, width]."""

    def join(x):
        x = jnp.moveaxis(x, 0, -3)
        *batch, num_chunks, size, width = x.shape
        return x.reshape(*batch, num_chunks * size, width)[..., :length, :]

    return jax.tree.map(join, tree)

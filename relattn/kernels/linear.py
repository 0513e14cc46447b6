"""Linear attention by feature maps, also causal: linear time and memory, in chunks.

`relattn.kernels.sums` has the sums over keys, `relattn.kernels.chunks` the loops over
chunks.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float, Int

from relattn.kernels.checks import (
    at_most,
    broadcast_batch,
    check_arguments,
    check_size,
)
from relattn.kernels.chunks import (
    SAVED,
    join_chunks,
    scan_chunks,
    split_chunks,
    sum_causally,
)
from relattn.kernels.feature_maps import (
    FeatureMap,
    Features,
    check_feature_maps,
    feature_shapes,
    key_features,
    query_features,
)
from relattn.kernels.guards import divide_sums, scale_backward
from relattn.kernels.masks import finite_masked, zero_masked
from relattn.kernels.platform import platform_defaults
from relattn.kernels.precision import wide_einsum
from relattn.kernels.segments import segment_starts
from relattn.kernels.sums import (
    LinearState,
    attend_pairs,
    attend_sums,
    check_causal,
    check_state,
    empty_causal_state,
    empty_state,
    key_state,
    merge_states,
)

# Number of chunks that are computed in parallel, so that products are large enough to
# be fast.
_PARALLEL_CHUNKS = 8


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

    A few tokens are summed pair by pair, sum_j (phi(q_i) . phi(k_j)) v_j: this takes
    fewer multiplications where the harmonic mean of n and m is less than that of the
    number of features and value_dim.

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
            pair of such functions, of queries and of keys. Exponents returned as
            `Features` neither overflow nor underflow. Features returned as an array may
            overflow, and weights that sum to less than 1e-36 give zeros.
        key_mask: True for keys that exist, shape ``[*batch, m]``. A query without keys
            gives zeros.
        chunk_size: Number of tokens whose features are computed at a time; None for the
            default of `relattn.kernels.platform`, which may be a kernel, or all tokens
            where their number is symbolic. With more than one chunk, the backward pass
            computes them again.
        precision: Passed to einsum.
        return_normalizer: Whether to also return the denominators.

    Returns:
        Shape ``[*batch, n, value_dim]``, in the dtype of ``v``. With
        ``return_normalizer``, also the denominators before the guard, each up to a
        positive factor, shape ``[*batch, n]``: count those that are not positive.

    Raises:
        ValueError: If shapes or dtypes do not fit together, or ``chunk_size`` is less
            than one.

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
    chunk_size = platform_defaults().linear_chunk if takes_all else chunk_size
    check_size("chunk_size", chunk_size)
    check_feature_maps(feature_map, q, k)

    def is_one_chunk(x):
        n = x.shape[-2]
        return at_most(n, chunk_size) or takes_all and is_symbolic_dim(n)

    # Masked keys add nothing: NaN in them must not reach a product.
    k, v, key_mask = zero_masked(k, v, key_mask)
    einsum = wide_einsum(precision)

    def sum_chunk(chunk):
        # S_f = sum_j e^(a_jf - c_f) v_j^T, z_f and c_f of the keys of a chunk.
        keys, values, mask = chunk
        return key_state(key_features(feature_map, keys), values, mask, einsum)

    def sum_keys(k, v, key_mask):
        # S and z of all keys, chunk by chunk.
        if is_one_chunk(k):
            return sum_chunk((k, v, key_mask))
        if key_mask is None:
            key_mask = jnp.ones(k.shape[:-1], bool)
        chunks = split_chunks((k, v, key_mask[..., None]), chunk_size)
        chunks = (*chunks[:2], chunks[2][..., 0])
        empty = empty_state(
            jax.eval_shape(sum_chunk, jax.tree.map(lambda x: x[0], chunks))
        )

        # S <- S e^(c - c') + S_chunk e^(c_chunk - c'), c' = max(c, c_chunk); and so z.
        def add_chunk(state, chunk):
            return merge_states(state, sum_chunk(chunk)), None

        return scan_chunks(add_chunk, empty, chunks)[0]

    def in_chunks(q, k, v, key_mask):
        if is_one_chunk(q) and is_one_chunk(k):
            keys, queries = key_features(feature_map, k), query_features(feature_map, q)
            if _pairs_take_less(q.shape[-2], k.shape[-2], keys, v):
                return attend_pairs(queries, keys, v, key_mask, einsum)
            state = key_state(keys, v, key_mask, einsum)
            return attend_sums(queries, state, einsum, v.dtype)
        state = sum_keys(k, v, key_mask)

        def attend(queries):
            # e^(b_if + c_f - r_i) times S_f and z_f, summed over f, and their quotient.
            features = query_features(feature_map, queries)
            return attend_sums(features, state, einsum, v.dtype)

        # phi(q_i)^T S / phi(q_i)^T z, chunk by chunk.
        if is_one_chunk(q):
            return attend(q)
        _, chunks = scan_chunks(
            lambda _, queries: (None, attend(queries)),
            None,
            split_chunks(q, chunk_size),
        )
        return join_chunks(chunks, q.shape[-2])

    # A kernel of the platform computes the same function, where it has one.
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
    Derivatives are in reverse mode only, and only first ones where a kernel of the
    platform computes the function.

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
        k: Keys, shape ``[*batch, n, head_dim]``. Along axes of size 1, queries share
            keys, whose state has the size 1 too.
        v: Values, shape ``[*batch, n, value_dim]``.
        feature_map: From ``[*batch, n, head_dim]`` to features, token by token; or a
            pair of such functions, of queries and of keys.
        key_mask: True for keys that exist, shape ``[*batch, n]``.
        segment_ids: For packed sequences: a token attends only to tokens since the id
            last changed, shape ``[*batch, n]``. An id that comes back after another one
            starts a new segment, as in `relattn.kernels.segment_mask`. The first token
            continues the segment of ``state``.
        state: The state that an earlier call returned for the tokens before these; None
            if there are none.
        return_state: Whether to also return the state after these tokens.
        chunk_size: Number of tokens in a chunk; None for the default of
            `relattn.kernels.platform`, or all tokens where no state is passed or
            returned and one chunk takes fewer multiplications. More tokens than the
            default are taken by a kernel where one exists, in chunks of its own.
        precision: Passed to einsum.

    Returns:
        Shape ``[*batch, n, value_dim]``, in the dtype of ``v``. With ``return_state``,
        also the state.

    Raises:
        ValueError: If shapes or dtypes do not fit together, ``chunk_size`` is less than
            one, the features have neither a bound nor one exponent per token, or the
            state is no `LinearState` or has other shapes.

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
        Choromanski et al., Rethinking Attention with Performers, appendix B.1; chunks:
        Hua et al., Transformer Quality in Linear Time, section 3.2; state:
        Katharopoulos et al., Transformers are RNNs, section 3.4.
    """
    is_default = chunk_size is None
    chunk_size = platform_defaults().causal_chunk if is_default else chunk_size
    check_size("chunk_size", chunk_size)
    check_feature_maps(feature_map, q, k)
    check_state(state)
    q = finite_masked(q, key_mask)
    # Queries may have more batch axes: sums of keys that they share exist once.
    per_token = [x for x in (key_mask, segment_ids) if x is not None]
    k, v, *_ = broadcast_batch(k, v, *(x[..., None] for x in per_token))
    k, v, key_mask = zero_masked(k, v, key_mask)
    # Where S_i and z_i begin again from zero.
    starts = None
    if segment_ids is not None:
        starts = segment_starts(jnp.broadcast_to(segment_ids, k.shape[:-1]))

    def in_chunks(q, k, v, key_mask=None, starts=None, state=None, return_state=False):
        size = chunk_size
        if is_default and state is None and not return_state:
            # In chunks of c tokens, pairs take c (F + value_dim) multiplications for
            # each token and sums 2 F value_dim; pairs alone n (F + value_dim).
            n, features = q.shape[-2], feature_shapes(feature_map, k)
            if _pairs_take_less(n - size, n - size, features, v):
                size = n
        attend = functools.partial(
            _attend_in_chunks,
            return_state=return_state,
            feature_map=feature_map,
            chunk_size=size,
            precision=precision,
        )
        out, state = scale_backward(attend, v, q, k, key_mask, starts, state)
        return out.astype(v.dtype), state

    # A kernel of the platform computes the same function, where it has one.
    branches = {}
    if state is None and not return_state and not at_most(q.shape[-2], chunk_size):
        branches = _fused_branches(q, k, v, feature_map, precision, causal=True)
        if key_mask is None and starts is None:
            branches |= _tpu_branches(q, k, v, feature_map, precision)
    if branches:
        return jax.lax.platform_dependent(
            q, k, v, key_mask, starts, **branches, default=lambda *x: in_chunks(*x)[0]
        )
    out, state = in_chunks(q, k, v, key_mask, starts, state, return_state)
    return out if state is None else (out, state)


def _pairs_take_less(n: Any, m: Any, features: Features, v: Array) -> bool:
    """Returns whether weights of all pairs take no more multiplications than sums.

    n m (F + value_dim) <= (n + m) F value_dim, with F features.
    """
    width, value_dim = features.num_features, v.shape[-1]
    return at_most(n * m * (width + value_dim), (n + m) * width * value_dim)


def _fused_branches(q, k, v, feature_map, precision, *, causal):
    """Finds kernels for GPUs: branches of `jax.lax.platform_dependent`, or none."""
    if not platform_defaults().fused_linear:
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


def _tpu_branches(q, k, v, feature_map, precision):
    """Finds kernels for TPUs that take no masks, as `_fused_branches`."""
    if not platform_defaults().causal_in_vmem:
        return {}
    from relattn.kernels import pallas_tpu

    if not pallas_tpu.fits_tpu(q, k, v, feature_map, precision):
        return {}

    def attend(q, k, v, key_mask, starts):
        del key_mask, starts
        q, k, v = broadcast_batch(q, k, v)
        return pallas_tpu.attend_on_tpu(q, k, v, feature_map, precision=precision)

    return {"tpu": attend}


@check_arguments
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
    # max_f (a_jf - c_f), the exponent of the key's largest feature.
    largest = jnp.max(keys.exponents - keys.bound, axis=-1)
    return largest < math.log(jnp.finfo(jnp.float32).tiny)


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
    is_first = is_one_chunk and state is None
    if state is None or not is_one_chunk:
        features = feature_shapes(feature_map, k)
        check_causal(features)
        if state is None:
            state = empty_causal_state(features, v)
        # With a bound, only sums pass between chunks: several are computed in parallel.
        bounded = features.bound is not None and starts is None
        if bounded and not is_one_chunk and not is_symbolic_dim(length):
            parallel = min(_PARALLEL_CHUNKS, -(-length // chunk_size))

    def attend(state, tokens):
        # [phi(q_i)^T S_i, phi(q_i)^T z_i] and S, z after the chunk; then the quotient.
        state, *sums = sum_causally(
            state, tokens, feature_map, einsum, parallel, is_first
        )
        out, _ = divide_sums(*checkpoint_name(sums, SAVED), dtype=v.dtype)
        return state, out

    # The scan carries S and z from chunk to chunk.
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

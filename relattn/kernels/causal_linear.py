"""Causal linear attention: chunk by chunk, or token by token for decoding.

Nothing depends on later tokens, not even a stabiliser: see `causal_linear_attention`.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from relattn.kernels.checks import broadcast_leading, check_arguments
from relattn.kernels.chunks import (
    KEPT,
    check_chunk_size,
    join_chunks,
    scan_chunks,
    split_chunks,
)
from relattn.kernels.linear import (
    LOWEST,
    FeatureMap,
    LinearState,
    append_ones,
    clear_masked,
    divide_sums,
    evaluate,
    scale_queries,
)
from relattn.kernels.precision import compute_dtype, wide_einsum
from relattn.kernels.random_features import Features

# Chunks that are worked on at once, for products large enough to be fast.
_PARALLEL_CHUNKS = 8


@check_arguments
def causal_linear_attention(
    q: Float[Array, "*#batch n depth"],
    k: Float[Array, "*#batch n depth"],
    v: Float[Array, "*#batch n value_depth"],
    feature_map: FeatureMap,
    *,
    key_mask: Bool[Array, "*#batch n"] | None = None,
    chunk_size: int = 64,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch n value_depth"]:
    """Attention of every token to itself and those before it, by features.

    out_i = phi(q_i)^T S_i / phi(q_i)^T z_i, S_i = sum_{j <= i} phi(k_j) v_j^T,
    z_i = sum_{j <= i} phi(k_j): masked products within a chunk, sums between chunks.

    Nothing depends on later tokens, bit for bit. Keys' exponents are shifted by
    `Features.bound`, which looks at no token, or, where a token has one exponent, by
    the largest so far. Denominators are guarded as in `linear_attention`; where all
    weights underflow, the result is zero.

    Positive features of long keys underflow: no query gives such a key any weight. The
    median norm of a key from which this happens (50 draws of 110, 266 and 621 features)
    is 38 at depth 32, 46 at depth 64 and 56 at depth 128; where there is no other key,
    normal queries get zeros from a norm of 36, 43 and 51 on. In heads deeper than about
    224 features of ordinary keys underflow too, since the bound grows with the depth.
    `underflowed` tells which keys are affected. Features with ``eps`` do not underflow.

    Args:
        q: Queries, shape ``[*batch, n, depth]``.
        k: Keys, shape ``[*batch, n, depth]``.
        v: Values, shape ``[*batch, n, value_depth]``.
        feature_map: From ``[*batch, n, depth]`` to features, token by token.
        key_mask: True for keys that exist, shape ``[*batch, n]``.
        chunk_size: Tokens a chunk.
        precision: Passed to einsum.

    Returns:
        Shape ``[*batch, n, value_depth]``, in the dtype of ``v``.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        ValueError: If ``chunk_size`` is less than one, or the features have neither a
            bound nor one exponent a token.

    Example:
        >>> from relattn.kernels import draw_orthogonal, positive_features
        >>> w = draw_orthogonal(jax.random.key(0), 5, 3)
        >>> x = jnp.eye(3)
        >>> causal_linear_attention(x, x, x, lambda x: positive_features(x, w))[0]
        Array([1., 0., 0.], dtype=float32)

    Source:
        Choromanski et al., Rethinking Attention with Performers, section 2.5; chunks:
        Hua et al., Transformer Quality in Linear Time, section 3.2.
    """
    check_chunk_size(chunk_size)
    q, k, v = broadcast_leading(q, k, v)
    k, v, key_mask = clear_masked(k, v, key_mask)
    einsum = wide_einsum(precision)
    state = init_linear_state(k[..., 0, :], v[..., 0, :], feature_map)
    length = q.shape[-2]
    # With a bound, chunks need nothing of each other but sums: some go side by side.
    bounded = _feature_shapes(feature_map, k[..., 0, :]).bound is not None
    parallel = _PARALLEL_CHUNKS if bounded and length > chunk_size else 1

    def attend(state, tokens):
        return _attend_causally(state, tokens, feature_map, einsum, parallel)

    if length <= chunk_size:
        return attend(state, (q, k, v, key_mask))[1]
    size = parallel * chunk_size
    tokens = split_chunks((q, k, v), size, multiple=parallel)
    if key_mask is not None:
        key_mask = split_chunks(key_mask[..., None], size, multiple=parallel)[..., 0]
    _, out = scan_chunks(attend, state, (*tokens, key_mask))
    return join_chunks(out, length)


def underflowed(keys: Features) -> Bool[Array, "*batch n"]:
    """Which keys `causal_linear_attention` gives no weight: all features underflow.

    Args:
        keys: Their features, with a bound.

    Returns:
        True where every feature, shifted by its bound, is below the smallest normal
        float32, shape ``[*batch, n]``.

    Example:
        >>> from relattn.kernels import draw_orthogonal, positive_features
        >>> w = draw_orthogonal(jax.random.key(0), 5, 3)
        >>> underflowed(positive_features(jnp.array([[1.0] * 3, [50.0] * 3]), w))
        Array([False,  True], dtype=bool)
    """
    largest = jnp.max(keys.exponents - keys.bound, axis=-1)
    return largest < math.log(jnp.finfo(jnp.float32).tiny)


@check_arguments
def init_linear_state(
    k_i: Float[Array, "*#batch depth"],
    v_i: Float[Array, "*#batch value_depth"],
    feature_map: FeatureMap,
) -> LinearState:
    """The state before the first token, for `causal_linear_attention_step`.

    Args:
        k_i: Any key; only its shape matters.
        v_i: Any value; only its shape matters.
        feature_map: From ``[*batch, n, depth]`` to features.

    Returns:
        A state of no keys.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        ValueError: If the features have neither a bound nor one exponent a token.

    Example:
        >>> init_linear_state(jnp.ones((2, 3)), jnp.ones((2, 5)), jnp.exp).sums.shape
        (2, 3, 6)
    """
    batch = jnp.broadcast_shapes(k_i.shape[:-1], v_i.shape[:-1])
    features = _feature_shapes(feature_map, k_i)
    check_causal(features)
    plain = features.values is None
    num_features = (features.exponents if plain else features.values).shape[-1]
    # With a bound, the bound is the shift and this one stays zero.
    shift = LOWEST if features.bound is None else 0.0
    dtype = compute_dtype(v_i, *(x.dtype for x in jax.tree.leaves(features)))
    return LinearState(
        shift=jnp.full((*batch, 1, 1), shift, dtype),
        sums=jnp.zeros((*batch, num_features, v_i.shape[-1] + 1), dtype),
        magnitudes=None if plain else jnp.zeros((*batch, num_features, 1), dtype),
    )


@check_arguments
def causal_linear_attention_step(
    state: LinearState,
    q_i: Float[Array, "*#batch depth"],
    k_i: Float[Array, "*#batch depth"],
    v_i: Float[Array, "*#batch value_depth"],
    feature_map: FeatureMap,
    *,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[LinearState, Float[Array, "*batch value_depth"]]:
    """One token of `causal_linear_attention`, for decoding.

    S_i = S_{i-1} + phi(k_i) v_i^T, z_i = z_{i-1} + phi(k_i),
    out_i = phi(q_i)^T S_i / phi(q_i)^T z_i.

    Args:
        state: From `init_linear_state` or the token before; its size is constant.
        q_i: The token's query, shape ``[*batch, depth]``.
        k_i: Its key, shape ``[*batch, depth]``.
        v_i: Its value, shape ``[*batch, value_depth]``.
        feature_map: As everywhere in the sequence.
        precision: Passed to einsum.

    Returns:
        The state after the token, and its output, ``[*batch, value_depth]``.

    Raises:
        ValueError: If shapes or dtypes do not fit together.

    Example:
        >>> x = jnp.ones((2, 3))
        >>> state = init_linear_state(x, x, jax.nn.relu)
        >>> causal_linear_attention_step(state, x, x, x, jax.nn.relu)[1].tolist()
        [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]

    Source:
        Katharopoulos et al., Transformers are RNNs, section 3.4.
    """
    q, k, v = broadcast_leading(*(x[..., None, :] for x in (q_i, k_i, v_i)))
    found = state.sums.shape
    expected = (*k.shape[:-2], found[-2], v.shape[-1] + 1)
    if found != expected:
        raise ValueError(
            f"the state has sums of shape {found}, but the token needs {expected}: "
            "start with init_linear_state of keys and values of its shapes"
        )
    einsum = wide_einsum(precision)
    state, out = _attend_causally(state, (q, k, v, None), feature_map, einsum)
    return state, out[..., 0, :]


def check_causal(features: Any) -> None:
    """Raises ValueError unless features can be shifted without the future."""
    one_exponent = features.values is not None and features.exponents.shape[-1] == 1
    if features.bound is None and not one_exponent:
        raise ValueError(
            "causal linear attention needs Features with a bound, or with values and "
            f"one exponent a token, got exponents of shape {features.exponents.shape} "
            "and no bound"
        )


def causal_factors(
    queries: Features, keys: Features, mask: Bool[Array, "*batch n"] | None
) -> tuple[
    Float[Array, "*batch n features"],
    Float[Array, "*batch n features"],
    Float[Array, "*batch n 1"] | None,
]:
    """Features of queries and keys, shifted by nothing that looks at other tokens.

    The last are exponents that the keys' still lack, where they have one a token.
    """
    if keys.bound is None:
        exponents = keys.exponents
        if mask is not None:
            exponents = jnp.where(mask[..., None], exponents, -jnp.inf)
        return queries.values, keys.values, exponents
    bound = jax.lax.stop_gradient(keys.bound)
    phi = jnp.exp(keys.exponents - bound)
    if keys.values is not None:
        phi = phi * keys.values
    if mask is not None:
        phi = jnp.where(mask[..., None], phi, 0.0)
    return scale_queries(queries, bound), phi, None


def _feature_shapes(feature_map, k_i):
    """The shapes of one token's features."""
    return jax.eval_shape(
        functools.partial(evaluate, feature_map),
        jax.ShapeDtypeStruct((*k_i.shape[:-1], 1, k_i.shape[-1]), k_i.dtype),
    )


def _attend_causally(state, tokens, feature_map, einsum, parallel=1):
    """The state after some tokens, and their outputs, in chunks side by side."""
    q, k, v, mask = tokens
    phi_q, phi_k, exponents = causal_factors(
        evaluate(feature_map, q), evaluate(feature_map, k), mask
    )
    size = q.shape[-2] // parallel
    causal = jnp.tril(jnp.ones((size, size), bool))
    if exponents is None:
        decays, shift = _Decays(causal.astype(phi_k.dtype), 1.0, 1.0, 1.0), state.shift
    else:
        decays, shift = _running_decays(state.shift, exponents, causal)

    def chunks(x):
        return x.reshape(*x.shape[:-2], parallel, size, x.shape[-1])

    def attend(phi_q, phi_k, v, before):
        phi_q, phi_k, v = chunks(phi_q), chunks(phi_k), chunks(v)
        sums = einsum("...jf,...je->...fe", phi_k * decays.keys, v)
        totals = jnp.concatenate([before[..., None, :, :], sums], axis=-3)
        totals = jnp.cumsum(totals, axis=-3)
        earlier, after = totals[..., :-1, :, :], totals[..., -1, :, :]
        if exponents is not None:
            after = decays.state * before + sums[..., 0, :, :]
        weights = decays.pairs * einsum("...if,...jf->...ij", phi_q, phi_k)
        within = einsum("...ij,...je->...ie", weights, v)
        past = einsum("...if,...fe->...ie", phi_q, earlier)
        return after, checkpoint_name(within + decays.past * past, KEPT)

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
    out, _ = divide_sums(sums, magnitudes, v.dtype)
    return LinearState(shift, after, magnitudes_after), out.reshape(v.shape)


class _Decays(NamedTuple):
    """Factors that bring sums with different shifts to the same one."""

    pairs: Array  # Keys of the chunk, to each query's shift; zero for later keys.
    past: Array | float  # The state before the chunk, to each query's shift.
    keys: Array | float  # Keys of the chunk, to the shift after it.
    state: Array | float  # The state before the chunk, to the shift after it.


def _running_decays(shift, exponents, causal):
    """Shifts every query by the largest exponent among the keys up to it."""
    earlier = jnp.where(causal, exponents.swapaxes(-2, -1), -jnp.inf)
    largest = jax.lax.stop_gradient(jnp.max(earlier, axis=-1, keepdims=True))
    largest = jnp.maximum(largest, shift)
    last = largest[..., -1:, :]
    decays = _Decays(
        pairs=jnp.exp(earlier - largest)[..., None, :, :],
        past=jnp.exp(shift - largest)[..., None, :, :],
        keys=jnp.exp(exponents - last)[..., None, :, :],
        state=jnp.exp(shift - last),
    )
    return decays, last

"""Linear attention with an offset bias, by FFT or by pairs; also causal.

The weight of key j for query i is e^(b_d) phi(q_i) . phi(k_j) with the offset
d = p_i - p_j. Sums over keys are products with Toeplitz matrices e^(b_d), one for each
feature and value: long sequences use FFTs, short ones the weights of all pairs. The
causal form splits the sequence into blocks, and decoding takes one query at a time.
"""

from __future__ import annotations

from typing import Literal, cast, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from relattn.kernels.checks import (
    broadcast_batch,
    check_arguments,
    check_position,
    check_size,
    check_static,
)
from relattn.kernels.feature_maps import (
    FeatureMap,
    check_feature_maps,
    key_features,
    query_features,
)
from relattn.kernels.guards import append_ones, divide_sums, scale_backward, shifted_exp
from relattn.kernels.masks import finite_masked, zero_masked
from relattn.kernels.platform import platform_defaults
from relattn.kernels.positions.bias import (
    longer_axes,
    past_rows,
    rows_of_token,
    with_prefix_rows,
)
from relattn.kernels.precision import wide_einsum, widen
from relattn.kernels.sums import causal_factors, check_causal, scale_keys, scale_queries
from relattn.kernels.toeplitz_sums import (
    fft_sums,
    pair_sums,
    rounding_noise,
    sum_blocks,
    sum_halves,
)
from relattn.offsets import Grid, check_grid, num_offsets


@overload
def toeplitz_linear_attention(
    q: Float[Array, "*#batch n head_dim"],
    k: Float[Array, "*#batch n head_dim"],
    v: Float[Array, "*#batch n value_dim"],
    feature_map: FeatureMap,
    bias: Float[Array, "*#batch rows"],
    *,
    grid: Grid,
    num_prefix: int = 0,
    key_mask: Bool[Array, "*#batch n"] | None = None,
    dense_size: int | None = None,
    chunk_size: int = 128,
    block_size: int = 4,
    precision: jax.lax.PrecisionLike = None,
    return_normalizer: Literal[False] = False,
) -> Float[Array, "*batch n value_dim"]: ...
@overload
def toeplitz_linear_attention(
    q: Float[Array, "*#batch n head_dim"],
    k: Float[Array, "*#batch n head_dim"],
    v: Float[Array, "*#batch n value_dim"],
    feature_map: FeatureMap,
    bias: Float[Array, "*#batch rows"],
    *,
    grid: Grid,
    num_prefix: int = 0,
    key_mask: Bool[Array, "*#batch n"] | None = None,
    dense_size: int | None = None,
    chunk_size: int = 128,
    block_size: int = 4,
    precision: jax.lax.PrecisionLike = None,
    return_normalizer: Literal[True],
) -> tuple[Float[Array, "*batch n value_dim"], Float[Array, "*batch n"]]: ...
@check_arguments
def toeplitz_linear_attention(
    q: Float[Array, "*#batch n head_dim"],
    k: Float[Array, "*#batch n head_dim"],
    v: Float[Array, "*#batch n value_dim"],
    feature_map: FeatureMap,
    bias: Float[Array, "*#batch rows"],
    *,
    grid: Grid,
    num_prefix: int = 0,
    key_mask: Bool[Array, "*#batch n"] | None = None,
    dense_size: int | None = None,
    chunk_size: int = 128,
    block_size: int = 4,
    precision: jax.lax.PrecisionLike = None,
    return_normalizer: bool = False,
) -> (
    Float[Array, "*batch n value_dim"]
    | tuple[Float[Array, "*batch n value_dim"], Float[Array, "*batch n"]]
):
    """Computes linear attention whose weights are multiplied by exp(b) of the offset.

    out_i = phi(q_i)^T S_i / phi(q_i)^T z_i, S_i = sum_j e^(b_d) phi(k_j) v_j^T,
    z_i = sum_j e^(b_d) phi(k_j), d = p_i - p_j.

    For every feature, S and z are products with a Toeplitz matrix. By FFT they take
    O(n log n) time for each pair of a feature and a value, and O(n (features +
    block_size value_dim)) memory. Short sequences are faster pair by pair, in O(n^2)
    time and O(n chunk_size) memory.

    Exponents are shifted as in `relattn.kernels.linear_attention`, and the largest b is
    subtracted. The FFT is float32 or wider. In float32 its error is about 1e-7 of the
    largest terms of a feature, not of the sums: the contribution of weights 1e-6 times
    smaller than others of the same feature is noise. A denominator below its rounding
    error is set to that error. Trigonometric features are guarded as in
    `linear_attention`. Derivatives are in reverse mode only.

    Args:
        q: Queries, shape ``[*batch, n, head_dim]``.
        k: Keys, shape ``[*batch, n, head_dim]``.
        v: Values, shape ``[*batch, n, value_dim]``.
        feature_map: From ``[*batch, n, head_dim]`` to features, token by token; or a
            pair of such functions, of queries and of keys.
        bias: b, shape ``[*batch, rows]``, a table as in
            `relattn.kernels.relative_attention`: a row for every offset. With prefix
            tokens it may have three more rows for pairs with one; otherwise their b is
            zero.
        grid: Size of each axis of the tokens after the prefix.
        num_prefix: Number of prefix tokens.
        key_mask: True for keys that exist, shape ``[*batch, n]``. A query without keys
            gives zeros.
        dense_size: Largest number of grid tokens for which sums go pair by pair; None
            for the default of `relattn.kernels.platform`.
        chunk_size: Number of queries at a time, pair by pair; at least those at one
            index of the grid's first axis that has more than one.
        block_size: Number of features at a time, by FFT.
        precision: Passed to einsum.
        return_normalizer: Whether to also return the denominators.

    Returns:
        Shape ``[*batch, n, value_dim]``, in the dtype of ``v``. With
        ``return_normalizer``, also the denominators before the guard, each up to a
        positive factor, shape ``[*batch, n]``.

    Raises:
        ValueError: If shapes or dtypes do not fit together, the grid does not hold the
            tokens, the table has the wrong number of rows, or ``chunk_size`` or
            ``block_size`` is less than one.

    Example:
        >>> x = jnp.zeros((3, 1))
        >>> left = jnp.array([0.0, 0.0, 0.0, 50.0, 0.0])  # favours offset 1
        >>> out = toeplitz_linear_attention(
        ...     x, x, jnp.eye(3), jnp.exp, left, grid=(3,))
        >>> out[1].round(3).tolist()
        [1.0, 0.0, 0.0]

    Source:
        Luo et al., Stable, Fast and Accurate: Kernelized Attention with Relative
        Positional Encoding, section 3.2; grids and prefix tokens are ours.
    """
    check_grid(q.shape[-2], grid, num_prefix)
    # A chunk of queries is at least a row.
    grid = longer_axes(grid)
    check_size("chunk_size", chunk_size)
    check_size("block_size", block_size)
    check_feature_maps(feature_map, q, k)
    dense_size = platform_defaults().pairs_size if dense_size is None else dense_size
    rows, dense = num_offsets(grid), q.shape[-2] - num_prefix <= dense_size
    bias = cast(Array, with_prefix_rows(bias, "bias", rows, num_prefix, axis=-1))
    q, k, v = broadcast_batch(finite_masked(q, key_mask), k, v)
    k, v, key_mask = zero_masked(k, v, key_mask)
    einsum = wide_einsum(precision)

    def attend(v, q, k, bias, key_mask):
        # e^(b_d) for every table row.
        decay = _exp_bias(bias)
        # e^(a_jf - c_f) and e^(b_if + c_f - r_i).
        features = query_features(feature_map, q)
        phi_k, shift = scale_keys(key_features(feature_map, k), key_mask)
        phi_q = scale_queries(features, shift)

        def split(x):
            # Prefix tokens, then the tokens of the grid.
            return x[..., :num_prefix, :], x[..., num_prefix:, :]

        def weighted_sum(phi_q, phi_k, v):
            prefix_q, grid_q = split(phi_q)
            (prefix_k, grid_k), (prefix_v, grid_v) = split(phi_k), split(v)
            # phi(q_i)^T [S_i, z_i] of the grid: sum_f phi(q_i)_f sum_j e^(b_d)
            # phi(k_j)_f [v_j, 1].
            inputs = (grid_q, grid_k, grid_v, decay[..., :rows], grid)
            if dense:
                sums = pair_sums(*inputs, chunk_size, einsum)
            else:
                sums = fft_sums(*inputs, block_size)
            if not num_prefix:
                return sums
            # e^b of "in", "self" and "out" pairs, in the order of `PrefixRow`.
            inward, own, outward = jnp.moveaxis(decay[..., rows:, None, None], -3, 0)

            def pair_sum(decay, queries, keys, values):
                # sum_j e^b phi(q_i) . phi(k_j) [v_j, 1]: the few prefix tokens make
                # few pairs.
                weights = decay * einsum("...if,...jf->...ij", queries, keys)
                return einsum("...ij,...je->...ie", weights, values)

            # Grid queries: add the prefix keys. Prefix queries: prefix and grid keys.
            sums += pair_sum(inward, grid_q, prefix_k, prefix_v)
            prefix_sums = pair_sum(own, prefix_q, prefix_k, prefix_v)
            prefix_sums += pair_sum(outward, prefix_q, grid_k, grid_v)
            return jnp.concatenate([prefix_sums, sums], axis=-2)

        # [phi(q_i)^T S_i, phi(q_i)^T z_i], from the columns [v, 1].
        columns = append_ones(v)
        sums = weighted_sum(phi_q, phi_k, columns)
        # The same sums of |phi(q_i)_f| |phi(k_j)_f|, for the guard.
        magnitudes = None
        if features.values is not None:
            absolute = (jnp.abs(phi_q), jnp.abs(phi_k), columns[..., -1:])
            magnitudes = jax.lax.stop_gradient(weighted_sum(*absolute))
        noise = None
        if not dense:
            # The prefix tokens are summed without FFTs: no rounding noise.
            noise = rounding_noise(split(phi_q)[1], split(phi_k)[1], decay[..., :rows])
            noise = jnp.pad(
                noise, [(0, 0)] * (noise.ndim - 2) + [(num_prefix, 0), (0, 0)]
            )
        return divide_sums(sums, magnitudes, v.dtype, noise)

    out, normalizer = scale_backward(attend, v, q, k, bias, key_mask)
    out = out.astype(v.dtype)
    return (out, normalizer[..., 0]) if return_normalizer else out


@check_arguments
def causal_toeplitz_linear_attention(
    q: Float[Array, "*#batch n head_dim"],
    k: Float[Array, "*#batch n head_dim"],
    v: Float[Array, "*#batch n value_dim"],
    feature_map: FeatureMap,
    bias: Float[Array, "*#batch rows"],
    *,
    key_mask: Bool[Array, "*#batch n"] | None = None,
    dense_size: int | None = None,
    chunk_size: int = 128,
    block_size: int = 4,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch n value_dim"]:
    """Computes `toeplitz_linear_attention` of every token to itself and earlier ones.

    out_i = phi(q_i)^T S_i / phi(q_i)^T z_i, S_i = sum_{j <= i} e^(b_(i - j)) phi(k_j)
    v_j^T, z_i = sum_{j <= i} e^(b_(i - j)) phi(k_j).

    Time is O(n log^2 n) for each pair of a feature and a value. Outputs do not depend
    on later tokens, bit for bit, if they are finite: sums within a block go pair by
    pair, and each FFT adds earlier tokens to later ones. Exponents are shifted as in
    `relattn.kernels.causal_linear_attention`. Precision, guards and derivatives are
    those of `toeplitz_linear_attention`.

    Args:
        q: Queries, shape ``[*batch, n, head_dim]``.
        k: Keys, shape ``[*batch, n, head_dim]``.
        v: Values, shape ``[*batch, n, value_dim]``.
        feature_map: From ``[*batch, n, head_dim]`` to features, token by token; or a
            pair of such functions, of queries and of keys.
        bias: b, shape ``[*batch, rows]``, the table of a line of ``length >= n``
            tokens, with 2 length - 1 rows; those of the offsets 0 .. n - 1 are used.
        key_mask: True for keys that exist, shape ``[*batch, n]``.
        dense_size: Largest number of tokens in a block; None for the default of
            `relattn.kernels.platform`.
        chunk_size: Number of queries of a block at a time, pair by pair.
        block_size: Number of features at a time, by FFT.
        precision: Passed to einsum.

    Returns:
        Shape ``[*batch, n, value_dim]``, in the dtype of ``v``.

    Raises:
        ValueError: If shapes or dtypes do not fit together, the table has fewer offsets
            than there are tokens or an even number of rows, the features have neither a
            bound nor one exponent per token, or a size is less than one.

    Example:
        >>> x = jnp.zeros((3, 1))
        >>> left = jnp.array([0.0, 0.0, 0.0, 0.0, 50.0])  # favours offset 2
        >>> out = causal_toeplitz_linear_attention(
        ...     x, x, jnp.eye(3), jax.nn.softplus, left)
        >>> out[2].round(3).tolist()
        [1.0, 0.0, 0.0]

    Source:
        Luo et al., Stable, Fast and Accurate: Kernelized Attention with Relative
        Positional Encoding, section 3.2; the blocks: van der Hoeven, Relax, but Don't
        be Too Lazy, section 3.
    """
    dense_size = platform_defaults().pairs_size if dense_size is None else dense_size
    check_size("dense_size", dense_size)
    check_size("chunk_size", chunk_size)
    check_size("block_size", block_size)
    check_feature_maps(feature_map, q, k)
    length = q.shape[-2]
    check_static(length, "Causal linear attention with an offset bias")
    bias = cast(Array, past_rows(bias, "bias", length, axis=-1))
    q, k, v = broadcast_batch(finite_masked(q, key_mask), k, v)
    k, v, key_mask = zero_masked(k, v, key_mask)
    einsum = wide_einsum(precision)

    def attend(v, q, k, bias, key_mask):
        # e^(b_d) for d = 0 .. n - 1.
        decay = _exp_bias(bias)
        # phi(q_i) and phi(k_j); without a bound, phi(k_j) lacks its factor e^(a_j).
        keys = key_features(feature_map, k)
        check_causal(keys)
        phi_q, phi_k, exponents = causal_factors(
            query_features(feature_map, q), keys, key_mask
        )
        # 2^num_levels blocks of equal size, at most dense_size, after padding: the
        # halves of every level are whole blocks.
        num_levels = (-(-length // dense_size) - 1).bit_length()
        size = -(-length // 2**num_levels)
        padding = size * 2**num_levels - length
        decay = jnp.pad(decay, [(0, 0)] * (decay.ndim - 1) + [(0, padding)])
        phi_q, phi_k, columns = (
            _pad(x, padding) for x in (phi_q, phi_k, append_ones(v))
        )
        if exponents is not None:
            exponents = _pad(exponents, padding, -jnp.inf)

        def weighted_sum(phi_q, phi_k, v):
            """Computes sums of values, and the rounding noise of sums of ones."""
            # Keys in the query's own block, pair by pair.
            sums = sum_blocks(
                phi_q, phi_k, v, exponents, decay, size, chunk_size, einsum
            )
            noise = jnp.zeros_like(sums[..., :1])
            # Keys in the left half of the query's pair of halves, by FFT, level by
            # level.
            for level in range(num_levels):
                part = sum_halves(
                    phi_q, phi_k, v, exponents, decay, size << level, block_size
                )
                sums, noise = jax.tree.map(jnp.add, (sums, noise), part)
            return sums[..., :length, :], noise[..., :length, :]

        # [phi(q_i)^T S_i, phi(q_i)^T z_i], from the columns [v, 1].
        sums, noise = weighted_sum(phi_q, phi_k, columns)
        # The same sums of |phi(q_i)_f| |phi(k_j)_f|, for the guard.
        magnitudes = None
        if keys.values is not None:
            magnitudes, _ = weighted_sum(
                jnp.abs(phi_q), jnp.abs(phi_k), columns[..., -1:]
            )
            magnitudes = jax.lax.stop_gradient(magnitudes)
        return divide_sums(sums, magnitudes, v.dtype, noise)[0]

    return scale_backward(attend, v, q, k, bias, key_mask).astype(v.dtype)


@check_arguments
def causal_toeplitz_linear_attention_step(
    q_i: Float[Array, "*#batch head_dim"],
    k: Float[Array, "*#batch length head_dim"],
    v: Float[Array, "*#batch length value_dim"],
    feature_map: FeatureMap,
    bias: Float[Array, "*#batch rows"],
    *,
    index: Int[Array, ""] | int,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch value_dim"]:
    """Computes `causal_toeplitz_linear_attention` for one token, for decoding.

    out_i = phi(q_i)^T S_i / phi(q_i)^T z_i, i = ``index``, with S_i and z_i as in
    `causal_toeplitz_linear_attention`.

    Every weight changes with the offset, so there is no state of constant size: a token
    costs O(length). Derivatives are in reverse mode only.

    Args:
        q_i: The token's query, shape ``[*batch, head_dim]``.
        k: Keys up to and including the token's, shape ``[*batch, length, head_dim]``;
            later ones are ignored.
        v: Values up to and including the token's, shape
            ``[*batch, length, value_dim]``; later ones are ignored.
        feature_map: From ``[*batch, n, head_dim]`` to features, token by token; or a
            pair of such functions, of queries and of keys.
        bias: b, shape ``[*batch, 2 length - 1]``.
        index: The token's position in the sequence; may be traced.
        precision: Passed to einsum.

    Returns:
        The token's output, shape ``[*batch, value_dim]``, in the dtype of ``v``.

    Raises:
        ValueError: If shapes or dtypes do not fit together, the table does not have 2
            length - 1 rows, or ``index`` is not below ``length``.

    Example:
        >>> x = jnp.zeros((3, 1))
        >>> left = jnp.array([0.0, 0.0, 0.0, 0.0, 50.0])  # favours offset 2
        >>> causal_toeplitz_linear_attention_step(
        ...     x[2], x, jnp.eye(3), jnp.exp, left, index=2).round(3).tolist()
        [1.0, 0.0, 0.0]

    Source:
        Luo et al., Stable, Fast and Accurate: Kernelized Attention with Relative
        Positional Encoding, section 3.2.
    """
    check_feature_maps(feature_map, q_i, k)
    length = k.shape[-2]
    check_position(index, length)
    past = jnp.broadcast_to(jnp.arange(length) <= index, k.shape[:-1])
    bias = cast(Array, rows_of_token(bias, "bias", length, index, axis=-1))
    k, v, _ = zero_masked(k, v, past)
    einsum = wide_einsum(precision)

    def attend(v, q, k, bias, past):
        # e^(b_(index - j)), zero for later keys.
        decay = _exp_bias(jnp.where(past, bias, -jnp.inf))[..., None, :]
        # e^(a_jf - c_f) and e^(b_if + c_f - r_i).
        features = query_features(feature_map, q)
        phi_k, shift = scale_keys(key_features(feature_map, k), past)
        phi_q = scale_queries(features, shift)
        columns = append_ones(v)

        def weighted_sum(phi_q, phi_k, v):
            # sum_j e^(b_(i - j)) phi(q_i) . phi(k_j) [v_j, 1]
            weights = decay * einsum("...if,...jf->...ij", phi_q, phi_k)
            return einsum("...ij,...je->...ie", weights, v)

        sums = weighted_sum(phi_q, phi_k, columns)
        magnitudes = None
        if features.values is not None:
            magnitudes = weighted_sum(jnp.abs(phi_q), jnp.abs(phi_k), columns[..., -1:])
        return divide_sums(sums, magnitudes, v.dtype)[0]

    out = scale_backward(attend, v, q_i[..., None, :], k, bias, past)
    return out[..., 0, :].astype(v.dtype)


def _exp_bias(bias: Float[Array, "*batch rows"]) -> Float[Array, "*batch rows"]:
    """Computes exp(b - max b) in float32 or wider; the maximum cancels."""
    bias = widen(bias)
    return shifted_exp(bias, jnp.max(bias, axis=-1, keepdims=True))


def _pad(x, padding, value=0.0):
    """Pads the end of the token axis of [*batch, n, width]."""
    widths = [(0, 0)] * (x.ndim - 2) + [(0, padding), (0, 0)]
    return jnp.pad(x, widths, constant_values=value)

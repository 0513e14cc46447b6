"""Linear attention with a bias of the offset, by FFT or by pairs; also causal.

The weight of key j for query i is e^(b_d) phi(q_i) . phi(k_j) with the offset
d = p_i - p_j. Sums over keys are products with Toeplitz matrices e^(b_d), one for each
feature and value: long sequences use FFTs, short ones the weights of all pairs. The
causal form splits the sequence into blocks, and decoding takes one query at a time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Literal, cast, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from relattn.kernels.checks import (
    broadcast_leading,
    check_arguments,
    check_static,
    finite_masked,
    zero_masked,
)
from relattn.kernels.chunks import (
    check_chunk_size,
    join_chunks,
    scan_chunks,
    split_chunks,
)
from relattn.kernels.feature_maps import (
    FeatureMap,
    check_feature_maps,
    key_features,
    query_features,
)
from relattn.kernels.guards import (
    FLOAT32_MIN,
    append_ones,
    divide_sums,
    scale_backward,
    shifted_exp,
)
from relattn.kernels.platform import choices
from relattn.kernels.positions.bias import (
    past_rows,
    rows_of_token,
    skew,
    unwrap_offsets,
    with_prefix_rows,
)
from relattn.kernels.precision import wide_einsum, widen
from relattn.kernels.sums import (
    causal_factors,
    check_causal,
    scale_keys,
    scale_queries,
)
from relattn.offsets import Grid, Torus, check_grid, num_offsets, offsets_per_axis


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
    `linear_attention`.

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
        grid: Height and width, or length, of the tokens after the prefix.
        num_prefix: Number of prefix tokens.
        key_mask: True for keys that exist, shape ``[*batch, n]``. A query without keys
            gives zeros.
        dense_size: Largest number of grid tokens for which sums go pair by pair; None
            for the choice of `relattn.kernels.platform`.
        chunk_size: Number of queries at a time, pair by pair.
        block_size: Number of features at a time, by FFT.
        precision: Passed to einsum.
        return_normalizer: Whether to also return the denominators.

    Returns:
        Shape ``[*batch, n, value_dim]``, in the dtype of ``v``. With
        ``return_normalizer``, also the denominators before the guard, each up to a
        positive factor, shape ``[*batch, n]``. The kernel has derivatives in reverse
        mode only.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        ValueError: If the grid does not hold the tokens, the table has the wrong number
            of rows, or ``chunk_size`` or ``block_size`` is less than one.

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
    check_chunk_size(chunk_size)
    check_chunk_size(block_size, "block_size")
    check_feature_maps(feature_map, q, k)
    dense_size = choices().pairs_size if dense_size is None else dense_size
    rows, dense = num_offsets(grid), q.shape[-2] - num_prefix <= dense_size
    bias = cast(Array, with_prefix_rows(bias, "bias", rows, num_prefix, axis=-1))
    q, k, v = broadcast_leading(finite_masked(q, key_mask), k, v)
    k, v, key_mask = zero_masked(k, v, key_mask)
    einsum = wide_einsum(precision)

    def attend(v, q, k, bias):
        # e^(b_d) for every table row.
        decay = _exp_bias(bias)
        features = query_features(feature_map, q)
        phi_k, shift = scale_keys(key_features(feature_map, k), key_mask)
        phi_q = scale_queries(features, shift)

        def split(x):
            return x[..., :num_prefix, :], x[..., num_prefix:, :]

        def weighted_sum(phi_q, phi_k, v):
            prefix_q, grid_q = split(phi_q)
            (prefix_k, grid_k), (prefix_v, grid_v) = split(phi_k), split(v)
            inputs = (grid_q, grid_k, grid_v, decay[..., :rows], grid)
            if dense:
                sums = pair_sums(*inputs, chunk_size, einsum)
            else:
                sums = fft_sums(*inputs, block_size)
            if not num_prefix:
                return sums
            # S of the prefix keys and of the grid keys, without e^b; e^b of "in",
            # "self" and "out" pairs.
            prefix_state = einsum("...mf,...me->...fe", prefix_k, prefix_v)
            grid_state = einsum("...mf,...me->...fe", grid_k, grid_v)
            inward, own, outward = jnp.moveaxis(decay[..., rows:, None, None], -3, 0)
            # Grid queries: add the prefix keys. Prefix queries: prefix and grid keys.
            sums = sums + inward * einsum("...nf,...fe->...ne", grid_q, prefix_state)
            prefix_sums = own * prefix_state + outward * grid_state
            prefix_sums = einsum("...nf,...fe->...ne", prefix_q, prefix_sums)
            return jnp.concatenate([prefix_sums, sums], axis=-2)

        columns = append_ones(v)
        sums = weighted_sum(phi_q, phi_k, columns)
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

    out, normalizer = scale_backward(attend, v, q, k, bias)
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
    `relattn.kernels.causal_linear_attention`. Precision and guards are those of
    `toeplitz_linear_attention`.

    Args:
        q: Queries, shape ``[*batch, n, head_dim]``.
        k: Keys, shape ``[*batch, n, head_dim]``.
        v: Values, shape ``[*batch, n, value_dim]``.
        feature_map: From ``[*batch, n, head_dim]`` to features, token by token; or a
            pair of such functions, of queries and of keys.
        bias: b, shape ``[*batch, rows]``, the table of a line of ``length >= n``
            tokens: 2 length - 1 rows, of which the offsets 0 .. n - 1 are used.
        key_mask: True for keys that exist, shape ``[*batch, n]``.
        dense_size: Largest number of tokens in a block; None
            for the choice of `relattn.kernels.platform`.
        chunk_size: Number of queries of a block at a time, pair by pair.
        block_size: Number of features at a time, by FFT.
        precision: Passed to einsum.

    Returns:
        Shape ``[*batch, n, value_dim]``, in the dtype of ``v``. The kernel has
        derivatives in reverse mode only.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        ValueError: If the table has fewer offsets than there are tokens or an even
            number of rows, the features have neither a bound nor one exponent per
            token, or a size is less than one.

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
    dense_size = choices().pairs_size if dense_size is None else dense_size
    check_chunk_size(dense_size, "dense_size")
    check_chunk_size(chunk_size)
    check_chunk_size(block_size, "block_size")
    check_feature_maps(feature_map, q, k)
    length = q.shape[-2]
    check_static(length, "Causal linear attention with an offset bias")
    bias = cast(Array, past_rows(bias, "bias", length, axis=-1))
    q, k, v = broadcast_leading(finite_masked(q, key_mask), k, v)
    k, v, key_mask = zero_masked(k, v, key_mask)
    einsum = wide_einsum(precision)

    def attend(v, q, k, bias):
        # e^(b_d) for d = 0 .. n - 1.
        decay = _exp_bias(bias)
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
            sums = _sum_blocks(
                phi_q, phi_k, v, exponents, decay, size, chunk_size, einsum
            )
            noise = jnp.zeros_like(sums[..., :1])
            # Keys in the left half of the query's pair of halves, by FFT, level by
            # level.
            for level in range(num_levels):
                part = _sum_halves(
                    phi_q, phi_k, v, exponents, decay, size << level, block_size
                )
                sums, noise = jax.tree.map(jnp.add, (sums, noise), part)
            return sums[..., :length, :], noise[..., :length, :]

        sums, noise = weighted_sum(phi_q, phi_k, columns)
        magnitudes = None
        if keys.values is not None:
            magnitudes, _ = weighted_sum(
                jnp.abs(phi_q), jnp.abs(phi_k), columns[..., -1:]
            )
            magnitudes = jax.lax.stop_gradient(magnitudes)
        return divide_sums(sums, magnitudes, v.dtype, noise)[0]

    return scale_backward(attend, v, q, k, bias).astype(v.dtype)


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
    costs O(length).

    Args:
        q_i: The token's query, shape ``[*batch, head_dim]``.
        k: Keys up to and including the token's, shape ``[*batch, length, head_dim]``;
            later ones are ignored.
        v: Values, shape ``[*batch, length, value_dim]``, same as `k`.
        feature_map: From ``[*batch, n, head_dim]`` to features, token by token; or a
            pair of such functions, of queries and of keys.
        bias: b, shape ``[*batch, 2 length - 1]``.
        index: The token's position in the sequence; may be traced.
        precision: Passed to einsum.

    Returns:
        The token's output, shape ``[*batch, value_dim]``, in the dtype of ``v``. The
        kernel has derivatives in reverse mode only.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        ValueError: If the table does not have 2 length - 1 rows.

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
    past = jnp.broadcast_to(jnp.arange(length) <= index, k.shape[:-1])
    bias = cast(Array, rows_of_token(bias, "bias", length, index, axis=-1))
    k, v, _ = zero_masked(k, v, past)
    einsum = wide_einsum(precision)

    def attend(v, q, k, bias):
        # e^(b_(index - j)), zero for later keys.
        decay = _exp_bias(jnp.where(past, bias, -jnp.inf))[..., None, :]
        features = query_features(feature_map, q)
        phi_k, shift = scale_keys(key_features(feature_map, k), past)
        phi_q = scale_queries(features, shift)
        columns = append_ones(v)

        def weighted_sum(phi_q, phi_k, v):
            weights = decay * einsum("...if,...jf->...ij", phi_q, phi_k)
            return einsum("...ij,...je->...ie", weights, v)

        sums = weighted_sum(phi_q, phi_k, columns)
        magnitudes = None
        if features.values is not None:
            magnitudes = weighted_sum(jnp.abs(phi_q), jnp.abs(phi_k), columns[..., -1:])
        return divide_sums(sums, magnitudes, v.dtype)[0]

    out = scale_backward(attend, v, q_i[..., None, :], k, bias)
    return out[..., 0, :].astype(v.dtype)


def fft_sums(
    phi_q: Float[Array, "*batch n features"],
    phi_k: Float[Array, "*batch n features"],
    v: Float[Array, "*batch n width"],
    decay: Float[Array, "*#batch rows"],
    grid: Grid,
    block_size: int,
) -> Float[Array, "*batch n width"]:
    """Computes sum_f phi(q_i)_f sum_j decay_(i - j) phi(k_j)_f v_j by FFT.

    Args:
        phi_q: Features of the queries, shape ``[*batch, n, features]``.
        phi_k: Features of the keys, shape ``[*batch, n, features]``.
        v: Values, shape ``[*batch, n, width]``.
        decay: A factor for every offset, in the order of
            `relattn.offsets.offset_index`, shape ``[*batch, rows]``.
        grid: Grid of the n tokens.
        block_size: Number of features at a time. The backward pass recomputes their
            transforms.

    Returns:
        Shape ``[*batch, n, width]``.
    """
    # Query i is at index i + size - 1 of the convolution, where nothing wraps around;
    # on a torus at index i, and everything does.
    axes = tuple(range(-len(grid), 0))
    lengths, kept = grid, ...
    if not isinstance(grid, Torus):
        lengths = tuple(fft_length(2 * size - 1) for size in grid)
        kept = (..., *(slice(size - 1, 2 * size - 1) for size in grid))
    transform = functools.partial(jnp.fft.rfftn, s=lengths, axes=axes)
    rows = offsets_per_axis(grid)
    spectrum = transform(decay.reshape(*decay.shape[:-1], 1, 1, *rows))
    # Tokens come last: FFTs are fastest along the last axes.
    v = v.swapaxes(-2, -1)
    factors = (phi_q.swapaxes(-2, -1), phi_k.swapaxes(-2, -1))

    def add_block(sums, block):
        queries, keys = block
        # phi(k_j)_f v_j, convolved with decay over the grid.
        x = keys[..., :, None, :] * v[..., None, :, :]
        x = transform(x.reshape(*x.shape[:-1], *grid)) * spectrum
        x = jnp.fft.irfftn(x, s=lengths, axes=axes)[kept]
        x = x.reshape(*x.shape[: -len(grid)], math.prod(grid))
        # Times phi(q_i)_f, summed over the features of the block.
        return sums + jnp.sum(queries[..., :, None, :] * x, axis=-3), None

    sums, _ = scan_chunks(
        add_block, jnp.zeros_like(v), split_chunks(factors, block_size)
    )
    return sums.swapaxes(-2, -1)


def pair_sums(
    phi_q: Float[Array, "*batch n features"],
    phi_k: Float[Array, "*batch n features"],
    v: Float[Array, "*batch n width"],
    decay: Float[Array, "*#batch rows"],
    grid: Grid,
    chunk_size: int,
    einsum: Callable[..., Array],
    exponents: tuple[Float[Array, "*batch n 1"], Float[Array, "*batch n 1"]]
    | None = None,
) -> Float[Array, "*batch n width"]:
    """Computes the sums of `fft_sums` from the weights of all pairs of tokens.

    sum_j weight_ij v_j with weight_ij = decay_(i - j) phi(q_i) . phi(k_j), multiplied
    by exp(min(a_j - r_i, 0)) if ``exponents`` (a, r) are given.

    Args:
        phi_q: As in `fft_sums`.
        phi_k: As in `fft_sums`.
        v: As in `fft_sums`.
        decay: As in `fft_sums`.
        grid: As in `fft_sums`.
        chunk_size: Number of queries at a time, at least one row of the grid. The
            backward pass recomputes their weights.
        einsum: Computes the products.
        exponents: a and r, or None.

    Returns:
        Shape ``[*batch, n, width]``.
    """
    height, width = grid if len(grid) == 2 else (*grid, 1)
    periodic = isinstance(grid, Torus)
    leading, num_tokens = decay.shape[:-1], v.shape[-2]
    queries = (phi_q,) if exponents is None else (phi_q, exponents[1])
    size = max(1, chunk_size // width) * width
    chunks = split_chunks(queries, size, multiple=width)
    num_chunks, num_rows = len(chunks[0]), chunks[0].shape[-2] // width
    # decay by pair of columns: [*batch, query column, key column, row offset].
    rows, columns = offsets_per_axis(type(grid)((height, width)))
    bands = decay.reshape(*leading, rows, 1, columns)
    bands = jnp.broadcast_to(bands, (*leading, rows, width, columns))
    bands = jnp.moveaxis(skew(bands, periodic=periodic), -3, -1)
    if periodic:
        bands = unwrap_offsets(bands)
    # Zeros for the rows that pad the last chunk.
    bands = jnp.pad(
        bands, [(0, 0)] * (bands.ndim - 1) + [(0, num_chunks * num_rows - height)]
    )

    def attend(_, chunk):
        first, queries, *shift = chunk
        # decay by pair of tokens: the row offsets of the chunk, then pairs of rows.
        num_row_offsets = num_rows + height - 1
        factors = jax.lax.dynamic_slice_in_dim(bands, first, num_row_offsets, axis=-1)
        shape = (*factors.shape[:-1], num_rows, num_row_offsets)
        factors = skew(jnp.broadcast_to(factors[..., None, :], shape))
        # From [query column, key column, query row, key row] to [queries, keys].
        axes = len(leading) + np.array([2, 0, 3, 1])
        factors = factors.transpose(*range(len(leading)), *axes)
        factors = factors.reshape(*leading, num_rows * width, num_tokens)
        if exponents is not None:
            # Times exp(min(a_j - r_i, 0)).
            factors *= shifted_exp(exponents[0].swapaxes(-2, -1), shift[0])
        # Times phi(q_i) . phi(k_j), then the sum over keys.
        weights = factors * einsum("...if,...jf->...ij", queries, phi_k)
        return None, einsum("...ij,...je->...ie", weights, v)

    first = num_rows * jnp.arange(num_chunks)
    if num_chunks == 1:
        return attend(None, (0, phi_q, *queries[1:]))[1]
    _, sums = scan_chunks(attend, None, (first, *chunks))
    return join_chunks(sums, num_tokens)


def rounding_noise(
    phi_q: Float[Array, "*batch n features"],
    phi_k: Float[Array, "*batch m features"],
    decay: Float[Array, "*#batch rows"],
) -> Float[Array, "*batch n 1"]:
    """Bounds the rounding error of `fft_sums` of ones: about five standard deviations.

    In float32 it is about 1e-6 |decay| sum_f |phi(q_i)_f| |phi(k)_f|, with norms over
    offsets and keys.
    """
    phi_q, phi_k, decay = jax.lax.stop_gradient((phi_q, phi_k, decay))
    keys = jnp.linalg.norm(phi_k, axis=-2)
    noise = jnp.einsum("...nf,...f->...n", jnp.abs(phi_q), keys)
    unit = _ROUNDING * jnp.finfo(noise.dtype).eps
    noise = unit * jnp.linalg.norm(decay, axis=-1, keepdims=True) * noise
    return noise[..., None]


# Rounding error of an FFT convolution relative to the norms of its inputs, in units of
# the dtype's eps. Measured errors in float32 are up to 2e-7 and grow as the square root
# of the logarithm of the length.
_ROUNDING = 8.4


def fft_length(size: int) -> int:
    """Computes the smallest 2^a 3^b 5^c >= ``size``, for fast FFTs.

    Example:
        >>> fft_length(7), fft_length(121), fft_length(2047)
        (8, 125, 2048)
    """

    def is_smooth(length):
        for factor in (2, 3, 5):
            while length % factor == 0:
                length //= factor
        return length == 1

    while not is_smooth(size):
        size += 1
    return size


def _exp_bias(bias: Float[Array, "*batch rows"]) -> Float[Array, "*batch rows"]:
    """Computes exp(b - max b) in float32 or wider; the maximum cancels."""
    bias = widen(bias)
    return shifted_exp(bias, jnp.max(bias, axis=-1, keepdims=True))


def _sum_blocks(phi_q, phi_k, v, exponents, decay, size, chunk_size, einsum):
    """Sums over the keys of a query's own block, up to the query."""
    # Zeros for the offsets of later keys.
    future = [(0, 0)] * (decay.ndim - 1) + [(size - 1, 0)]
    decay = jnp.pad(decay[..., :size], future)[..., None, :]
    if exponents is not None:
        largest = _running_max(exponents)
        exponents = _split_blocks(exponents, size), _split_blocks(largest, size)
    q, k, values = (_split_blocks(x, size) for x in (phi_q, phi_k, v))
    sums = pair_sums(q, k, values, decay, (size,), chunk_size, einsum, exponents)
    return sums.reshape(v.shape)


def _sum_halves(phi_q, phi_k, v, exponents, decay, size, block_size):
    """Sums over the keys of left halves for the queries of right halves.

    A half has ``size`` tokens. Also returns the rounding noise of sums of ones. Both
    are zero for the queries of left halves.
    """
    queries = _split_blocks(phi_q, 2 * size)[..., size:, :]
    keys, v_left = (_split_blocks(x, 2 * size)[..., :size, :] for x in (phi_k, v))
    # Offsets from a right to a left half: 1 .. 2 size - 1.
    decay = decay[..., None, 1 : 2 * size]
    scale = 1.0
    if exponents is not None:
        # Keys times e^(a_j - shift), sums times e^(shift - r_i), r the running maximum.
        left = _split_blocks(exponents, 2 * size)[..., :size, :]
        shift = jnp.maximum(jnp.max(left, axis=-2, keepdims=True), FLOAT32_MIN)
        shift = jax.lax.stop_gradient(shift)
        keys = keys * shifted_exp(left, shift)
        running_max = _split_blocks(_running_max(exponents), 2 * size)
        scale = jnp.exp(shift - running_max[..., size:, :])
    sums = fft_sums(queries, keys, v_left, decay, (size,), block_size)
    noise = rounding_noise(queries, keys, decay)

    def join(x):
        # Zeros for the left halves, then one axis of tokens again.
        x = jnp.pad(x * scale, [(0, 0)] * (x.ndim - 2) + [(size, 0), (0, 0)])
        return x.reshape(*v.shape[:-1], x.shape[-1])

    return join(sums), join(noise)


def _pad(x, padding, value=0.0):
    """Pads the end of the token axis of [*batch, n, width]."""
    widths = [(0, 0)] * (x.ndim - 2) + [(0, padding), (0, 0)]
    return jnp.pad(x, widths, constant_values=value)


def _split_blocks(x, size):
    """Reshapes [*batch, n, width] to [*batch, blocks, size, width]."""
    return x.reshape(*x.shape[:-2], x.shape[-2] // size, size, x.shape[-1])


def _running_max(exponents):
    """Computes r_i = max_{j <= i} a_j of the keys' exponents a."""
    largest = jax.lax.cummax(exponents, axis=exponents.ndim - 2)
    return jax.lax.stop_gradient(jnp.maximum(largest, FLOAT32_MIN))

"""Linear attention weighted by a function of the offset; O(n log n), by FFT.

`relattn.kernels.toeplitz` is the causal form.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from relattn.kernels.checks import broadcast_leading, check_arguments, zero_masked
from relattn.kernels.linear import (
    LOWEST,
    FeatureMap,
    append_ones,
    causal_factors,
    check_causal,
    check_chunk_size,
    divide_sums,
    evaluate,
    join_chunks,
    scale_keys,
    scale_queries,
    scan_chunks,
    split_chunks,
)
from relattn.kernels.positions.bias import (
    past_rows,
    rows_of_token,
    skew,
    with_prefix_rows,
)
from relattn.kernels.precision import wide_einsum, widen
from relattn.offsets import Grid, check_grid, num_offsets


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
    dense_size: int = 8192,
    chunk_size: int = 128,
    block_size: int = 4,
    precision: jax.lax.PrecisionLike = None,
    return_normalizer: bool = False,
) -> (
    Float[Array, "*batch n value_dim"]
    | tuple[Float[Array, "*batch n value_dim"], Float[Array, "*batch n"]]
):
    """Linear attention whose weights are multiplied by exp(b) of the offset.

    out_i = phi(q_i)^T S_i / phi(q_i)^T z_i, S_i = sum_j e^(b_d) phi(k_j) v_j^T,
    z_i = sum_j e^(b_d) phi(k_j), d = p_i - p_j: for every feature, S and z are products
    with a Toeplitz matrix, made by FFT. Time is O(n log n) for each product of a
    feature and a value, memory O(n (features + block_size value_dim)). Since these
    products are many, short sequences are faster pair by pair, in O(n^2) time and O(n
    chunk_size) memory.

    Exponents are shifted as in `relattn.kernels.linear_attention`, and the largest b is
    taken out. The FFT is float32 or wider, its error in float32 about 1e-7 of the
    largest terms of a feature, not of the sums: what a query receives from weights 1e-6
    times smaller than others of the same feature is noise. A denominator that is
    smaller than its rounding error is set to that size. Trigonometric features are
    guarded as in `linear_attention` too.

    Args:
        q: Queries, shape ``[*batch, n, head_dim]``.
        k: Keys, shape ``[*batch, n, head_dim]``.
        v: Values, shape ``[*batch, n, value_dim]``.
        feature_map: From ``[*batch, n, head_dim]`` to features, token by token.
        bias: b, shape ``[*batch, rows]``, a table as in
            `relattn.kernels.relative_attention`: a row for every offset and, where
            there are prefix tokens, three more for pairs with one, which are zero
            without these.
        grid: Height and width, or length, of the tokens after the prefix.
        num_prefix: Number of prefix tokens.
        key_mask: True for keys that exist, shape ``[*batch, n]``. A query without any
            gives zeros.
        dense_size: Grids of at most so many tokens are weighed pair by pair.
        chunk_size: Queries that are weighed at a time, pair by pair.
        block_size: Features that are transformed at a time, by FFT.
        precision: Passed to einsum.
        return_normalizer: Whether to return the denominators too.

    Returns:
        Shape ``[*batch, n, value_dim]``, in the dtype of ``v``. With
        ``return_normalizer``, also the denominators before the guard, each up to a
        positive factor, shape ``[*batch, n]``.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        ValueError: If the grid does not hold the tokens, the table has not the rows, or
            ``chunk_size`` or ``block_size`` is less than one.

    Example:
        >>> x = jnp.zeros((3, 1))
        >>> far = jnp.array([0.0, 0.0, 0.0, 50.0, 0.0])  # the key one to the left
        >>> out = toeplitz_linear_attention(
        ...     x, x, jnp.eye(3), jnp.exp, far, grid=(3,))
        >>> out[1].round(3).tolist()
        [1.0, 0.0, 0.0]

    Source:
        Luo et al., Stable, Fast and Accurate: Kernelized Attention with Relative
        Positional Encoding, section 3.2; two axes and prefix tokens are ours.
    """
    check_grid(q.shape[-2], grid, num_prefix)
    check_chunk_size(chunk_size)
    check_chunk_size(block_size, "block_size")
    rows, dense = num_offsets(grid), q.shape[-2] - num_prefix <= dense_size
    bias = with_prefix_rows(bias, "bias", rows, num_prefix, axis=-1)
    decay = decay_of(bias)
    q, k, v = broadcast_leading(q, k, v)
    k, v, key_mask = zero_masked(k, v, key_mask)
    einsum = wide_einsum(precision)
    features = evaluate(feature_map, q)
    phi_k, shift = scale_keys(evaluate(feature_map, k), key_mask)
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
        of_prefix = einsum("...mf,...me->...fe", prefix_k, prefix_v)
        of_grid = einsum("...mf,...me->...fe", grid_k, grid_v)
        of_in, of_self, of_out = jnp.moveaxis(decay[..., rows:, None, None], -3, 0)
        sums = sums + of_in * einsum("...nf,...fe->...ne", grid_q, of_prefix)
        to_prefix = of_self * of_prefix + of_out * of_grid
        to_prefix = einsum("...nf,...fe->...ne", prefix_q, to_prefix)
        return jnp.concatenate([to_prefix, sums], axis=-2)

    columns = append_ones(v)
    sums = weighted_sum(phi_q, phi_k, columns)
    magnitudes = None
    if features.values is not None:
        absolute = (jnp.abs(phi_q), jnp.abs(phi_k), columns[..., -1:])
        magnitudes = jax.lax.stop_gradient(weighted_sum(*absolute))
    noise = None
    if not dense:
        # No FFT reaches the prefix tokens.
        noise = rounding_noise(split(phi_q)[1], split(phi_k)[1], decay[..., :rows])
        noise = jnp.pad(noise, [(0, 0)] * (noise.ndim - 2) + [(num_prefix, 0), (0, 0)])
    out, normalizer = divide_sums(sums, magnitudes, v.dtype, noise)
    return (out, normalizer[..., 0]) if return_normalizer else out


def decay_of(bias: Float[Array, "*batch rows"]) -> Float[Array, "*batch rows"]:
    """exp(b), float32 or wider, the largest b taken out, which cancels."""
    bias = widen(bias)
    largest = jnp.max(bias, axis=-1, keepdims=True)
    return jnp.exp(bias - jax.lax.stop_gradient(largest))


@check_arguments
def causal_toeplitz_linear_attention(
    q: Float[Array, "*#batch n head_dim"],
    k: Float[Array, "*#batch n head_dim"],
    v: Float[Array, "*#batch n value_dim"],
    feature_map: FeatureMap,
    bias: Float[Array, "*#batch rows"],
    *,
    key_mask: Bool[Array, "*#batch n"] | None = None,
    dense_size: int = 8192,
    chunk_size: int = 128,
    block_size: int = 4,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch n value_dim"]:
    """`toeplitz_linear_attention` of every token to itself and those before it.

    out_i = phi(q_i)^T S_i / phi(q_i)^T z_i, S_i = sum_{j <= i} e^(b_(i - j)) phi(k_j)
    v_j^T, z_i = sum_{j <= i} e^(b_(i - j)) phi(k_j). Time is O(n log^2 n) for each
    product of a feature and a value.

    Nothing depends on later tokens, bit for bit: blocks of tokens are weighed pair by
    pair within, and each FFT transforms tokens earlier than all that it reaches.
    Exponents are shifted as in `relattn.kernels.causal_linear_attention`; precision
    and guards are those of `toeplitz_linear_attention`.

    Args:
        q: Queries, shape ``[*batch, n, head_dim]``.
        k: Keys, shape ``[*batch, n, head_dim]``.
        v: Values, shape ``[*batch, n, value_dim]``.
        feature_map: From ``[*batch, n, head_dim]`` to features, token by token.
        bias: b, shape ``[*batch, rows]``, the table of a line of ``length >= n``
            tokens, 2 length - 1 rows, of which the offsets 0 .. n - 1 are used.
        key_mask: True for keys that exist, shape ``[*batch, n]``.
        dense_size: Largest number of tokens a block.
        chunk_size: Queries of a block that are weighed at a time.
        block_size: Features that are transformed at a time, by FFT.
        precision: Passed to einsum.

    Returns:
        Shape ``[*batch, n, value_dim]``, in the dtype of ``v``.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        ValueError: If there are more tokens than the table has offsets for, the
            features have neither a bound nor one exponent a token, or a size is less
            than one.

    Example:
        >>> x = jnp.zeros((3, 1))
        >>> far = jnp.array([0.0, 0.0, 0.0, 0.0, 50.0])  # the key two to the left
        >>> out = causal_toeplitz_linear_attention(
        ...     x, x, jnp.eye(3), jax.nn.softplus, far)
        >>> out[2].round(3).tolist()
        [1.0, 0.0, 0.0]

    Source:
        Luo et al., Stable, Fast and Accurate: Kernelized Attention with Relative
        Positional Encoding, section 3.2; the squares: van der Hoeven, Relax, but Don't
        be Too Lazy, section 3.
    """
    check_chunk_size(dense_size, "dense_size")
    check_chunk_size(chunk_size)
    check_chunk_size(block_size, "block_size")
    length = q.shape[-2]
    decay = decay_of(past_rows(bias, "bias", length, axis=-1))
    q, k, v = broadcast_leading(q, k, v)
    k, v, key_mask = zero_masked(k, v, key_mask)
    keys = evaluate(feature_map, k)
    check_causal(keys)
    phi_q, phi_k, exponents = causal_factors(evaluate(feature_map, q), keys, key_mask)
    # Equal blocks, so that the squares, twice as large each, end where they do.
    num_levels = (-(-length // dense_size) - 1).bit_length()
    size = -(-length // 2**num_levels)
    padding = size * 2**num_levels - length
    decay = jnp.pad(decay, [(0, 0)] * (decay.ndim - 1) + [(0, padding)])
    phi_q, phi_k, columns = (_pad(x, padding) for x in (phi_q, phi_k, append_ones(v)))
    if exponents is not None:
        exponents = _pad(exponents, padding, -jnp.inf)
    einsum = wide_einsum(precision)

    def weighted_sum(phi_q, phi_k, v):
        """Sums of values, and what rounding may add to those of ones."""
        sums = _sum_blocks(phi_q, phi_k, v, exponents, decay, size, chunk_size, einsum)
        noise = jnp.zeros_like(sums[..., :1])
        for level in range(num_levels):
            part = _sum_halves(
                phi_q, phi_k, v, exponents, decay, size << level, block_size
            )
            sums, noise = jax.tree.map(jnp.add, (sums, noise), part)
        return sums[..., :length, :], noise[..., :length, :]

    sums, noise = weighted_sum(phi_q, phi_k, columns)
    magnitudes = None
    if keys.values is not None:
        magnitudes, _ = weighted_sum(jnp.abs(phi_q), jnp.abs(phi_k), columns[..., -1:])
        magnitudes = jax.lax.stop_gradient(magnitudes)
    return divide_sums(sums, magnitudes, v.dtype, noise)[0]


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
    """One token of `causal_toeplitz_linear_attention`, for decoding.

    There is no state of constant size, since every weight changes with the offset: a
    token costs O(length).

    Args:
        q_i: The token's query, shape ``[*batch, head_dim]``.
        k: Keys so far, its own too; those after it do not matter.
        v: Values so far.
        feature_map: As everywhere in the sequence.
        bias: b, shape ``[*batch, 2 length - 1]``.
        index: The token's place in the sequence; may be traced.
        precision: Passed to einsum.

    Returns:
        The token's output, shape ``[*batch, value_dim]``, in the dtype of ``v``.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        ValueError: If the table has not 2 length - 1 rows.

    Example:
        >>> x = jnp.zeros((3, 1))
        >>> far = jnp.array([0.0, 0.0, 0.0, 0.0, 50.0])
        >>> causal_toeplitz_linear_attention_step(
        ...     x[2], x, jnp.eye(3), jnp.exp, far, index=2).round(3).tolist()
        [1.0, 0.0, 0.0]
    """
    length = k.shape[-2]
    past = jnp.arange(length) <= index
    bias = rows_of_token(bias, "bias", length, index, axis=-1)
    decay = decay_of(jnp.where(past, bias, -jnp.inf))[..., None, :]
    k, v, past = zero_masked(k, v, past)
    features = evaluate(feature_map, q_i[..., None, :])
    phi_k, shift = scale_keys(evaluate(feature_map, k), past)
    phi_q = scale_queries(features, shift)
    einsum = wide_einsum(precision)
    columns = append_ones(v)

    def weighted_sum(phi_q, phi_k, v):
        weights = decay * einsum("...if,...jf->...ij", phi_q, phi_k)
        return einsum("...ij,...je->...ie", weights, v)

    sums = weighted_sum(phi_q, phi_k, columns)
    magnitudes = None
    if features.values is not None:
        magnitudes = weighted_sum(jnp.abs(phi_q), jnp.abs(phi_k), columns[..., -1:])
    return divide_sums(sums, magnitudes, v.dtype)[0][..., 0, :]


def _sum_blocks(phi_q, phi_k, v, exponents, decay, size, chunk_size, einsum):
    """Sums over the keys of a query's own block, up to it."""
    future = [(0, 0)] * (decay.ndim - 1) + [(size - 1, 0)]
    decay = jnp.pad(decay[..., :size], future)[..., None, :]
    if exponents is not None:
        exponents = (exponents, _running_largest(exponents))
        exponents = tuple(_blocks(x, size) for x in exponents)
    blocks = (_blocks(x, size) for x in (phi_q, phi_k, v))
    sums = pair_sums(*blocks, decay, (size,), chunk_size, einsum, exponents)
    return sums.reshape(v.shape)


def _sum_halves(phi_q, phi_k, v, exponents, decay, size, block_size):
    """Sums over left halves for the queries of right ones, ``size`` tokens a half.

    And what rounding may add to those of ones; zeros for the left halves.
    """
    queries = _blocks(phi_q, 2 * size)[..., size:, :]
    keys, v_left = (_blocks(x, 2 * size)[..., :size, :] for x in (phi_k, v))
    decay = decay[..., None, 1 : 2 * size]
    scale = 1.0
    if exponents is not None:
        left = _blocks(exponents, 2 * size)[..., :size, :]
        shift = jnp.maximum(jnp.max(left, axis=-2, keepdims=True), LOWEST)
        shift = jax.lax.stop_gradient(shift)
        keys = keys * jnp.exp(left - shift)
        largest = _blocks(_running_largest(exponents), 2 * size)
        scale = jnp.exp(shift - largest[..., size:, :])
    sums = fft_sums(queries, keys, v_left, decay, (size,), block_size)
    noise = rounding_noise(queries, keys, decay)

    def join(x):
        x = jnp.pad(x * scale, [(0, 0)] * (x.ndim - 2) + [(size, 0), (0, 0)])
        return x.reshape(*v.shape[:-1], x.shape[-1])

    return join(sums), join(noise)


def _pad(x, padding, value=0.0):
    widths = [(0, 0)] * (x.ndim - 2) + [(0, padding), (0, 0)]
    return jnp.pad(x, widths, constant_values=value)


def _blocks(x, size):
    """From [*batch, n, width] to [*batch, blocks, size, width]."""
    return x.reshape(*x.shape[:-2], x.shape[-2] // size, size, x.shape[-1])


def _running_largest(exponents):
    """The largest exponent among the keys up to each."""
    largest = jax.lax.cummax(exponents, axis=exponents.ndim - 2)
    return jax.lax.stop_gradient(jnp.maximum(largest, LOWEST))


# What an FFT's rounding adds, relative to the norms of what it convolves, in units of
# the dtype's eps: measured at up to 2e-7 in float32, and growing as the square root of
# the logarithm of the length.
_ROUNDING = 8.4


def fft_sums(
    phi_q: Float[Array, "*batch n features"],
    phi_k: Float[Array, "*batch n features"],
    v: Float[Array, "*batch n width"],
    decay: Float[Array, "*#batch rows"],
    grid: Grid,
    block_size: int,
) -> Float[Array, "*batch n width"]:
    """sum_f phi(q_i)_f sum_j decay_(i - j) phi(k_j)_f v_j for the tokens of a grid.

    Args:
        phi_q: Features of the queries, shape ``[*batch, n, features]``.
        phi_k: Features of the keys, of the same shape.
        v: Values, shape ``[*batch, n, width]``.
        decay: A factor for every offset, in the order of the rows of
            `relattn.offsets.offset_index`.
        grid: Of the n tokens.
        block_size: Features that are worked on at a time; in the backward pass their
            transforms are made anew.

    Returns:
        Shape ``[*batch, n, width]``.
    """
    axes = tuple(range(-len(grid), 0))
    lengths = tuple(fft_length(2 * size - 1) for size in grid)
    kept = (..., *(slice(size - 1, 2 * size - 1) for size in grid))
    transform = functools.partial(jnp.fft.rfftn, s=lengths, axes=axes)
    rows = tuple(2 * size - 1 for size in grid)
    spectrum = transform(decay.reshape(*decay.shape[:-1], 1, 1, *rows))
    # Tokens come last: that is where transforms are fast.
    v = v.swapaxes(-2, -1)
    factors = (phi_q.swapaxes(-2, -1), phi_k.swapaxes(-2, -1))

    def add_block(sums, block):
        queries, keys = block
        x = keys[..., :, None, :] * v[..., None, :, :]
        x = transform(x.reshape(*x.shape[:-1], *grid)) * spectrum
        x = jnp.fft.irfftn(x, s=lengths, axes=axes)[kept]
        x = x.reshape(*x.shape[: -len(grid)], math.prod(grid))
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
    """What `fft_sums` computes, by the weights of all pairs of tokens.

    Args:
        phi_q: As in `fft_sums`.
        phi_k: As in `fft_sums`.
        v: As in `fft_sums`.
        decay: As in `fft_sums`.
        grid: As in `fft_sums`.
        chunk_size: Queries that are weighed at a time, but at least one row of the
            grid; in the backward pass their weights are made anew.
        einsum: Makes the products.
        exponents: a and r, where weights are also multiplied by exp(min(a_j - r_i, 0)).

    Returns:
        Shape ``[*batch, n, width]``.
    """
    height, width = grid if len(grid) == 2 else (*grid, 1)
    leading, num_tokens = decay.shape[:-1], v.shape[-2]
    queries = (phi_q,) if exponents is None else (phi_q, exponents[1])
    size = max(1, chunk_size // width) * width
    chunks = split_chunks(queries, size, multiple=width)
    num_chunks, num_rows = len(chunks[0]), chunks[0].shape[-2] // width
    # What a query of each column meets: [*batch, columns, columns, offsets of rows].
    bands = decay.reshape(*leading, 2 * height - 1, 1, 2 * width - 1)
    bands = jnp.broadcast_to(bands, (*bands.shape[:-2], width, 2 * width - 1))
    bands = jnp.moveaxis(skew(bands), -3, -1)
    bands = jnp.pad(
        bands, [(0, 0)] * (bands.ndim - 1) + [(0, num_chunks * num_rows - height)]
    )

    def attend(_, chunk):
        first, queries, *shift = chunk
        seen = num_rows + height - 1
        factors = jax.lax.dynamic_slice_in_dim(bands, first, seen, axis=-1)
        factors = factors[..., None, :]
        factors = skew(jnp.broadcast_to(factors, (*factors.shape[:-2], num_rows, seen)))
        # From [columns, columns of keys, rows, rows of keys] to [queries, keys].
        axes = len(leading) + np.array([2, 0, 3, 1])
        factors = factors.transpose(*range(len(leading)), *axes)
        factors = factors.reshape(*leading, num_rows * width, num_tokens)
        if exponents is not None:
            differences = exponents[0].swapaxes(-2, -1) - shift[0]
            factors *= jnp.exp(jnp.where(differences > 0, 0.0, differences))
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
    """What rounding may add to `fft_sums` of ones: about five standard deviations.

    About 1e-6, in float32, of |decay| sum_f |phi(q_i)_f| |phi(k)_f|, with the norms
    over offsets and keys.
    """
    phi_q, phi_k, decay = jax.lax.stop_gradient((phi_q, phi_k, decay))
    keys = jnp.linalg.norm(phi_k, axis=-2)
    noise = jnp.einsum("...nf,...f->...n", jnp.abs(phi_q), keys)
    unit = _ROUNDING * jnp.finfo(noise.dtype).eps
    noise = unit * jnp.linalg.norm(decay, axis=-1, keepdims=True) * noise
    return noise[..., None]


def fft_length(size: int) -> int:
    """The smallest 2^a 3^b 5^c that is at least ``size``: FFTs of it are fast.

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

"""Sums over keys with a factor for every offset, by FFT or by pairs; also causal.

They are products with Toeplitz matrices, one for each feature and value. A causal sum
is split into blocks of tokens, and into halves of pairs of blocks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from relattn.kernels.chunks import join_chunks, scan_chunks, split_chunks
from relattn.kernels.guards import FLOAT32_MIN, shifted_exp
from relattn.kernels.positions.bias import pairs_of_offsets, skew, unwrap_axes
from relattn.kernels.precision import compute_dtype
from relattn.offsets import Grid, Torus, offsets_per_axis

# Rounding error of an FFT convolution relative to the norms of its inputs, in units of
# the dtype's eps. Measured errors in float32 are up to 2e-7 and grow as the square root
# of the logarithm of the length.
_ROUNDING = 8.4


def fft_sums(
    phi_q: Float[Array, "*#batch n features"],
    phi_k: Float[Array, "*#batch n features"],
    v: Float[Array, "*#batch n width"],
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
    # y_i = sum_j decay_(i - j) x_j is a convolution of x with decay, whose first offset
    # is 1 - size: query i is at index i + size - 1, where nothing wraps around. On a
    # torus it is at index i, and everything does.
    axes = tuple(range(-len(grid), 0))
    lengths, kept = grid, ...
    if not isinstance(grid, Torus):
        lengths = tuple(fft_length(2 * size - 1) for size in grid)
        kept = (..., *(slice(size - 1, 2 * size - 1) for size in grid))
    transform = functools.partial(jnp.fft.rfftn, s=lengths, axes=axes)
    rows = offsets_per_axis(grid)
    # FFT(y) = FFT(decay) FFT(x), axis by axis.
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

    arrays = (*factors, v, decay[..., None])
    batch = jnp.broadcast_shapes(*(x.shape[:-2] for x in arrays))
    first = jnp.zeros((*batch, *v.shape[-2:]), compute_dtype(*arrays))
    sums, _ = scan_chunks(add_block, first, split_chunks(factors, block_size))
    return sums.swapaxes(-2, -1)


def pair_sums(
    phi_q: Float[Array, "*#batch n features"],
    phi_k: Float[Array, "*#batch n features"],
    v: Float[Array, "*#batch n width"],
    decay: Float[Array, "*#batch rows"],
    grid: Grid,
    chunk_size: int,
    einsum: Callable[..., Array],
    exponents: tuple[Float[Array, "*#batch n 1"], Float[Array, "*#batch n 1"]]
    | None = None,
) -> Float[Array, "*batch n width"]:
    """Computes the sums of `fft_sums` from the weights of all pairs of tokens.

    sum_j weight_ij v_j with weight_ij = decay_(i - j) phi(q_i) . phi(k_j), multiplied
    by exp(min(a_j - r_i, 0)) if ``exponents`` (a, r) are given.

    With the query i in row y and column x, and the key j in row y' and column x', the
    factors of pairs are made of decay by slices and pads, not by a gather, whose
    derivative is slow. Rows are the first axis, a column is a position on all others:

        decay [y - y', x - x']
        -> pairs of columns: [x, x', y - y'], once
        -> skew rows: [x, x', y, y'], for each chunk of rows y
        -> transpose: [(y, x), (y', x')], which is [i, j]

    Args:
        phi_q: Features of the queries, shape ``[*batch, n, features]``.
        phi_k: Features of the keys, shape ``[*batch, n, features]``.
        v: Values, shape ``[*batch, n, width]``.
        decay: A factor for every offset, in the order of
            `relattn.offsets.offset_index`, shape ``[*batch, rows]``.
        grid: Grid of the n tokens.
        chunk_size: Number of queries at a time, at least one row of the grid. The
            backward pass recomputes their weights.
        einsum: Computes the products.
        exponents: a and r, or None.

    Returns:
        Shape ``[*batch, n, width]``.
    """
    height, *others = grid
    width = math.prod(others)
    leading, num_tokens = decay.shape[:-1], v.shape[-2]
    queries = (phi_q,) if exponents is None else (phi_q, exponents[1])
    size = max(1, chunk_size // width) * width
    chunks = split_chunks(queries, size, multiple=width)
    num_chunks, num_rows = len(chunks[0]), chunks[0].shape[-2] // width
    # Pairs of columns: [*batch, query column, key column, row offset].
    bands = unwrap_axes(decay.reshape(*leading, *offsets_per_axis(grid)), grid)
    bands = jnp.moveaxis(pairs_of_offsets(bands, tuple(others)), -3, -1)
    # Zeros for the rows that pad the last chunk.
    bands = jnp.pad(
        bands, [(0, 0)] * (bands.ndim - 1) + [(0, num_chunks * num_rows - height)]
    )

    def attend(_, chunk):
        first, queries, *shift = chunk
        # skew rows: the row offsets of the chunk, then pairs of rows.
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
    phi_q: Float[Array, "*#batch n features"],
    phi_k: Float[Array, "*#batch m features"],
    decay: Float[Array, "*#batch rows"],
) -> Float[Array, "*batch n 1"]:
    """Bounds the rounding error of `fft_sums` of ones: about five standard deviations.

    In float32 it is about 1e-6 |decay| sum_f |phi(q_i)_f| |phi(k)_f|, with norms over
    offsets and keys.
    """
    # |decay| sum_f |phi(q_i)_f| |phi(k)_f|
    phi_q, phi_k, decay = jax.lax.stop_gradient((phi_q, phi_k, decay))
    keys = jnp.linalg.norm(phi_k, axis=-2)
    noise = jnp.einsum("...nf,...f->...n", jnp.abs(phi_q), keys)
    unit = _ROUNDING * jnp.finfo(noise.dtype).eps
    noise = unit * jnp.linalg.norm(decay, axis=-1, keepdims=True) * noise
    return noise[..., None]


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


def sum_blocks(
    phi_q: Float[Array, "*#batch n features"],
    phi_k: Float[Array, "*#batch n features"],
    v: Float[Array, "*#batch n width"],
    exponents: Float[Array, "*#batch n 1"] | None,
    decay: Float[Array, "*#batch n"],
    size: int,
    chunk_size: int,
    einsum: Callable[..., Array],
) -> Float[Array, "*batch n width"]:
    """Sums over the keys of a query's own block, up to the query."""
    # Zeros for the offsets of later keys.
    future = [(0, 0)] * (decay.ndim - 1) + [(size - 1, 0)]
    decay = jnp.pad(decay[..., :size], future)[..., None, :]
    # a_j and r_i of the pairs in a block.
    pairs = None
    if exponents is not None:
        largest = _running_max(exponents)
        pairs = _split_blocks(exponents, size), _split_blocks(largest, size)
    q, k, values = (_split_blocks(x, size) for x in (phi_q, phi_k, v))
    sums = pair_sums(q, k, values, decay, (size,), chunk_size, einsum, pairs)
    return sums.reshape(*sums.shape[:-3], *v.shape[-2:])


def sum_halves(
    phi_q: Float[Array, "*#batch n features"],
    phi_k: Float[Array, "*#batch n features"],
    v: Float[Array, "*#batch n width"],
    exponents: Float[Array, "*#batch n 1"] | None,
    decay: Float[Array, "*#batch n"],
    size: int,
    block_size: int,
) -> tuple[Float[Array, "*batch n width"], Float[Array, "*batch n 1"]]:
    """Sums over the keys of left halves for the queries of right halves.

    A half has ``size`` tokens. Also returns the rounding noise of sums of ones. Both
    are zero for the queries of left halves.

    A causal sum over 2 size tokens is that of each half, and for the queries of the
    right half a sum over all keys of the left one, which needs no mask:

                        left keys   right keys
        left queries    [ causal       0     ]
        right queries   [  here      causal  ]

    The causal halves are those of the next lower level, down to blocks (`sum_blocks`).
    Right query i and left key j, numbered within their halves, are at the offset
    d = size + i - j, from 1 to 2 size - 1: in a convolution of halves at i - j.

    Keys with one exponent a_j per token are taken relative to the largest of their
    half, c, and the sums brought to the running maximum r_i of their query, which is
    at least c, so that no exponential is larger than one:

    sum_j e^(a_j - r_i) x_ij = e^(c - r_i) sum_j e^(a_j - c) x_ij,
    x_ij = decay_d phi(q_i) . phi(k_j) v_j
    """
    # phi(q_i) of the right halves, phi(k_j) and v_j of the left ones.
    queries = _split_blocks(phi_q, 2 * size)[..., size:, :]
    keys, v_left = (_split_blocks(x, 2 * size)[..., :size, :] for x in (phi_k, v))
    # decay_d of the offsets from a right to a left half: 1 .. 2 size - 1.
    decay = decay[..., None, 1 : 2 * size]
    scale = 1.0
    if exponents is not None:
        # phi(k_j) e^(a_j - c) here, and the factor e^(c - r_i) of the sums.
        left = _split_blocks(exponents, 2 * size)[..., :size, :]
        shift = jnp.maximum(jnp.max(left, axis=-2, keepdims=True), FLOAT32_MIN)
        shift = jax.lax.stop_gradient(shift)
        keys = keys * shifted_exp(left, shift)
        running_max = _split_blocks(_running_max(exponents), 2 * size)
        scale = jnp.exp(shift - running_max[..., size:, :])
    # sum_f phi(q_i)_f sum_j decay_d phi(k_j)_f v_j
    sums = fft_sums(queries, keys, v_left, decay, (size,), block_size)
    noise = rounding_noise(queries, keys, decay)

    def join(x):
        # Zeros for the left halves, then one axis of tokens again.
        x = jnp.pad(x * scale, [(0, 0)] * (x.ndim - 2) + [(size, 0), (0, 0)])
        return x.reshape(*x.shape[:-3], v.shape[-2], x.shape[-1])

    return join(sums), join(noise)


def _split_blocks(x, size):
    """Reshapes [*batch, n, width] to [*batch, blocks, size, width]."""
    return x.reshape(*x.shape[:-2], x.shape[-2] // size, size, x.shape[-1])


def _running_max(exponents):
    """Computes r_i = max_{j <= i} a_j of the keys' exponents a."""
    largest = jax.lax.cummax(exponents, axis=exponents.ndim - 2)
    return jax.lax.stop_gradient(jnp.maximum(largest, FLOAT32_MIN))

"""Sums over keys that are weighted by a function of the offset: by FFT, or by pairs.

For every feature f and column of the values, the sum over the keys of a grid is a
product with a Toeplitz matrix (of Toeplitz blocks, for two axes), which is a part of a
circular convolution. An FFT spreads its rounding over the grid: an error is relative
to the largest terms that it transforms, not to the sum that it reaches. It needs a
transform for every feature and column, so that up to some length it is faster to make
the weights of all pairs, some queries at a time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from relattn.kernels.bias import skew
from relattn.kernels.chunks import join_chunks, scan_chunks, split_chunks
from relattn.offsets import Grid

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

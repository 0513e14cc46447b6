"""Causal linear attention weighted by a function of the offset, by FFT of the past.

One FFT of a whole sequence rounds the past by what the future holds. So the pairs of
tokens are cut into dense blocks along the diagonal, and squares below them that double
in size, in each of which a left half of tokens reaches the right half by an FFT of the
left half alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from relattn.kernels.bias import past_rows, rows_of_token
from relattn.kernels.causal_linear import causal_factors, check_causal
from relattn.kernels.checks import broadcast_leading, check_arguments
from relattn.kernels.chunks import check_chunk_size
from relattn.kernels.linear import (
    LOWEST,
    FeatureMap,
    append_ones,
    clear_masked,
    divide_sums,
    evaluate,
    scale_keys,
    scale_queries,
)
from relattn.kernels.offset_sums import fft_sums, pair_sums, rounding_noise
from relattn.kernels.precision import wide_einsum
from relattn.kernels.toeplitz import decay_of


@check_arguments
def causal_toeplitz_linear_attention(
    q: Float[Array, "*#batch n depth"],
    k: Float[Array, "*#batch n depth"],
    v: Float[Array, "*#batch n value_depth"],
    feature_map: FeatureMap,
    bias: Float[Array, "*#batch rows"],
    *,
    key_mask: Bool[Array, "*#batch n"] | None = None,
    dense_size: int = 8192,
    chunk_size: int = 128,
    block_size: int = 4,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch n value_depth"]:
    """`toeplitz_linear_attention` of every token to itself and those before it.

    out_i = phi(q_i)^T S_i / phi(q_i)^T z_i, S_i = sum_{j <= i} e^(b_(i - j)) phi(k_j)
    v_j^T, z_i = sum_{j <= i} e^(b_(i - j)) phi(k_j). Time is O(n log^2 n) for each
    product of a feature and a value.

    Nothing depends on later tokens, bit for bit: blocks of tokens are weighed pair by
    pair within, and each FFT transforms tokens earlier than all that it reaches.
    Exponents are shifted as in `relattn.kernels.causal_linear_attention`; precision
    and guards are those of `toeplitz_linear_attention`.

    Args:
        q: Queries, shape ``[*batch, n, depth]``.
        k: Keys, shape ``[*batch, n, depth]``.
        v: Values, shape ``[*batch, n, value_depth]``.
        feature_map: From ``[*batch, n, depth]`` to features, token by token.
        bias: b, shape ``[*batch, rows]``, the table of a line of ``length >= n``
            tokens, 2 length - 1 rows, of which the offsets 0 .. n - 1 are used.
        key_mask: True for keys that exist, shape ``[*batch, n]``.
        dense_size: Largest number of tokens a block.
        chunk_size: Queries of a block that are weighed at a time.
        block_size: Features that are transformed at a time, by FFT.
        precision: Passed to einsum.

    Returns:
        Shape ``[*batch, n, value_depth]``, in the dtype of ``v``.

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
    k, v, key_mask = clear_masked(k, v, key_mask)
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

    def weigh(phi_q, phi_k, v):
        """Sums of values, and what rounding may add to those of ones."""
        sums = _sum_blocks(phi_q, phi_k, v, exponents, decay, size, chunk_size, einsum)
        noise = jnp.zeros_like(sums[..., :1])
        for level in range(num_levels):
            part = _sum_halves(
                phi_q, phi_k, v, exponents, decay, size << level, block_size
            )
            sums, noise = jax.tree.map(jnp.add, (sums, noise), part)
        return sums[..., :length, :], noise[..., :length, :]

    sums, noise = weigh(phi_q, phi_k, columns)
    magnitudes = None
    if keys.values is not None:
        magnitudes, _ = weigh(jnp.abs(phi_q), jnp.abs(phi_k), columns[..., -1:])
        magnitudes = jax.lax.stop_gradient(magnitudes)
    return divide_sums(sums, magnitudes, v.dtype, noise)[0]


@check_arguments
def causal_toeplitz_linear_attention_step(
    q_i: Float[Array, "*#batch depth"],
    k: Float[Array, "*#batch length depth"],
    v: Float[Array, "*#batch length value_depth"],
    feature_map: FeatureMap,
    bias: Float[Array, "*#batch rows"],
    *,
    index: Int[Array, ""] | int,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch value_depth"]:
    """One token of `causal_toeplitz_linear_attention`, for decoding.

    There is no state of constant size, since every weight changes with the offset: a
    token costs O(length).

    Args:
        q_i: The token's query, shape ``[*batch, depth]``.
        k: Keys so far, its own too; those after it do not matter.
        v: Values so far.
        feature_map: As everywhere in the sequence.
        bias: b, shape ``[*batch, 2 length - 1]``.
        index: The token's place in the sequence; may be traced.
        precision: Passed to einsum.

    Returns:
        The token's output, shape ``[*batch, value_depth]``, in the dtype of ``v``.

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
    k, v, past = clear_masked(k, v, past)
    features = evaluate(feature_map, q_i[..., None, :])
    phi_k, shift = scale_keys(evaluate(feature_map, k), past)
    phi_q = scale_queries(features, shift)
    einsum = wide_einsum(precision)
    columns = append_ones(v)

    def weigh(phi_q, phi_k, v):
        weights = decay * einsum("...if,...jf->...ij", phi_q, phi_k)
        return einsum("...ij,...je->...ie", weights, v)

    sums = weigh(phi_q, phi_k, columns)
    magnitudes = None
    if features.values is not None:
        magnitudes = weigh(jnp.abs(phi_q), jnp.abs(phi_k), columns[..., -1:])
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

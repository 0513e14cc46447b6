"""Linear attention weighted by a function of the offset; O(n log n), by FFT.

`relattn.kernels.causal_toeplitz` is the causal form.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from relattn.kernels.bias import with_prefix_rows
from relattn.kernels.checks import broadcast_leading, check_arguments
from relattn.kernels.chunks import check_chunk_size
from relattn.kernels.linear import (
    FeatureMap,
    append_ones,
    clear_masked,
    divide_sums,
    evaluate,
    scale_keys,
    scale_queries,
)
from relattn.kernels.offset_sums import fft_sums, pair_sums, rounding_noise
from relattn.kernels.precision import wide_einsum, widen
from relattn.offsets import Grid, check_grid, num_offsets


@check_arguments
def toeplitz_linear_attention(
    q: Float[Array, "*#batch n depth"],
    k: Float[Array, "*#batch n depth"],
    v: Float[Array, "*#batch n value_depth"],
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
    Float[Array, "*batch n value_depth"]
    | tuple[Float[Array, "*batch n value_depth"], Float[Array, "*batch n"]]
):
    """Linear attention whose weights are multiplied by exp(b) of the offset.

    out_i = phi(q_i)^T S_i / phi(q_i)^T z_i, S_i = sum_j e^(b_d) phi(k_j) v_j^T,
    z_i = sum_j e^(b_d) phi(k_j), d = p_i - p_j: for every feature, S and z are products
    with a Toeplitz matrix, made by FFT. Time is O(n log n) for each product of a
    feature and a value, memory O(n (features + block_size value_depth)). Since these
    products are many, short sequences are faster pair by pair, in O(n^2) time and O(n
    chunk_size) memory.

    Exponents are shifted as in `relattn.kernels.linear_attention`, and the largest b is
    taken out. The FFT is float32 or wider, its error in float32 about 1e-7 of the
    largest terms of a feature, not of the sums: what a query receives from weights 1e-6
    times smaller than others of the same feature is noise. A denominator that is
    smaller than its rounding error is set to that size. Trigonometric features are
    guarded as in `linear_attention` too.

    Args:
        q: Queries, shape ``[*batch, n, depth]``.
        k: Keys, shape ``[*batch, n, depth]``.
        v: Values, shape ``[*batch, n, value_depth]``.
        feature_map: From ``[*batch, n, depth]`` to features, token by token.
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
        Shape ``[*batch, n, value_depth]``, in the dtype of ``v``. With
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
    k, v, key_mask = clear_masked(k, v, key_mask)
    einsum = wide_einsum(precision)
    features = evaluate(feature_map, q)
    phi_k, shift = scale_keys(evaluate(feature_map, k), key_mask)
    phi_q = scale_queries(features, shift)

    def split(x):
        return x[..., :num_prefix, :], x[..., num_prefix:, :]

    def weigh(phi_q, phi_k, v):
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
    sums = weigh(phi_q, phi_k, columns)
    magnitudes = None
    if features.values is not None:
        absolute = (jnp.abs(phi_q), jnp.abs(phi_k), columns[..., -1:])
        magnitudes = jax.lax.stop_gradient(weigh(*absolute))
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

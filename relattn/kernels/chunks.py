"""Chunks of tokens: splitting, scans over them, and the causal sums of a chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jaxtyping import Array

from relattn.kernels.feature_maps import FeatureMap, key_features, query_features
from relattn.kernels.guards import FLOAT32_MIN, append_ones, shifted_exp
from relattn.kernels.platform import first_carry
from relattn.kernels.sums import LinearState, causal_factors

# Name (`jax.ad_checkpoint.checkpoint_name`) of arrays that the forward pass saves: they
# are small and expensive to compute again.
SAVED = "saved"


def scan_chunks(body: Callable, state: Any, chunks: Any) -> tuple[Any, Any]:
    """Scans over chunks; the backward pass computes all but `SAVED` arrays again."""
    policy = jax.checkpoint_policies.save_only_these_names(SAVED)
    body = jax.checkpoint(body, prevent_cse=False, policy=policy)
    return jax.lax.scan(body, first_carry(body, state, chunks), chunks)


def split_chunks(tree: Any, chunk_size: int, multiple: int = 1) -> Any:
    """Splits [*batch, n, width] into [chunks, *batch, chunk, width].

    ``chunk_size`` must be a multiple of ``multiple``. All chunks have the same length,
    at most ``chunk_size`` and a multiple of ``multiple`` too; zeros fill the last one.
    Where n is symbolic, chunks have ``chunk_size`` tokens.
    """

    def split(x):
        length = x.shape[-2]
        num_chunks, size = -(-length // chunk_size), chunk_size
        if not is_symbolic_dim(length):
            size = -(-length // (num_chunks * multiple)) * multiple
        # Zeros after the last token, then one axis of chunks, the first.
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


def sum_causally(
    state: LinearState,
    tokens: tuple[Array, Array, Array, Array | None, Array | None],
    feature_map: FeatureMap,
    einsum: Callable[..., Array],
    parallel: int = 1,
    is_first: bool = False,
) -> tuple[LinearState, Array, Array | None]:
    """Computes the sums over earlier keys of a scan's next tokens.

    ``tokens`` are queries, keys, values, mask and segment starts; the last two may be
    None. With ``is_first``, they are one chunk and no keys come before it: products
    with the state are left out. Returns the state after them, and sums and magnitudes
    for `divide_sums`.
    """
    q, k, v, mask, starts = tokens
    # phi(q_i) and phi(k_j); without a bound, phi(k_j) lacks its factor e^(a_j).
    phi_q, phi_k, exponents = causal_factors(
        query_features(feature_map, q), key_features(feature_map, k), mask
    )
    expected = (*phi_k.shape[:-2], phi_k.shape[-1], v.shape[-1] + 1)
    if state.sums.shape != expected:
        raise ValueError(
            f"the state has sums of shape {state.sums.shape}, but these tokens and "
            f"features need {expected}: pass the state that causal_linear_attention "
            "returned for the earlier tokens, or None if there are none"
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
        # On CPUs an axis of size one makes the backward pass slower.
        if parallel == 1:
            return x
        return x.reshape(*x.shape[:-2], parallel, size, x.shape[-1])

    def join(x):
        if parallel == 1:
            return x
        return x.reshape(*x.shape[:-3], parallel * size, x.shape[-1])

    def attend(phi_q, phi_k, v, before):
        phi_q, phi_k, v = chunks(phi_q), chunks(phi_k), chunks(v)
        # [S, z] of each chunk: sum_j phi(k_j) [v_j, 1]^T.
        sums = einsum("...jf,...je->...fe", phi_k * decays.keys, v)
        # [S, z] of all keys before each chunk, and of those up to its end.
        if parallel == 1:
            earlier, after = before, decays.state * before + sums
        else:
            totals = jnp.concatenate([before[..., None, :, :], sums], axis=-3)
            totals = jnp.cumsum(totals, axis=-3)
            earlier, after = totals[..., :-1, :, :], totals[..., -1, :, :]
        # sum_{j <= i} phi(q_i) . phi(k_j) [v_j, 1] within the chunk.
        weights = decays.pairs * einsum("...if,...jf->...ij", phi_q, phi_k)
        within = einsum("...ij,...je->...ie", weights, v)
        if is_first:
            return after, within
        # + phi(q_i)^T [S, z] of the keys before it.
        past = einsum("...if,...fe->...ie", phi_q, earlier)
        return after, join(within + decays.past * past)

    after, sums = attend(phi_q, phi_k, append_ones(v), state.sums)
    # The same sums of |phi(q_i)_f| |phi(k_j)_f|, for the guard.
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
    return _Decays(pairs, past, keys=pairs[..., -1, :, None], state=past[..., -1:, :])


def _running_decays(shift, exponents, allowed, continues):
    """Computes decays that shift each query by the largest exponent of its keys.

    Features of a token share the exponent a_j. The state before the chunk holds sums of
    e^(a_j - c) phi(k_j) [v_j, 1]^T, and query i needs those of all keys j <= i with
    e^(a_j - r_i) instead, r_i = max(c, max_{j <= i} a_j), so that no exponential is
    larger than one and the largest is one:

    sum_{j <= i} e^(a_j - r_i) x_j = e^(c - r_i) sum_{j before} e^(a_j - c) x_j
        + sum_{j <= i in the chunk} e^(a_j - r_i) x_j, x_j = phi(k_j) [v_j, 1]^T

    The state after the chunk is that of its last query n, with the shift r_n.
    """
    # a_j for the keys j <= i of query i.
    earlier = jnp.where(allowed, exponents.swapaxes(-2, -1), -jnp.inf)
    # r_i; a new segment forgets c.
    largest = jax.lax.stop_gradient(jnp.max(earlier, axis=-1, keepdims=True))
    if continues is not None:
        shift = jnp.where(continues, shift, FLOAT32_MIN)
    largest = jnp.maximum(largest, shift)
    # e^(c - r_i), zero where a segment has started: it does not see the state.
    past = jnp.exp(shift - largest)
    if continues is not None:
        past = jnp.where(continues, past, 0.0)
    # e^(a_j - r_i) of the pairs.
    decays = _decays(exponents.dtype, shifted_exp(earlier, largest), past)
    return decays, largest[..., -1:, :]

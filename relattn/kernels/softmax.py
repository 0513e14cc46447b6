"""Softmax attention, with time quadratic in the length.

Long sequences are computed by flash attention (`relattn.kernels.flash`) or in blocks of
queries, in memory linear in the length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float, Int

from relattn.kernels.checks import at_most, broadcast_batch, check_arguments
from relattn.kernels.flash import flash_branches, fused_branches
from relattn.kernels.guards import softmax
from relattn.kernels.masks import combine_masks, finite_masked, zero_masked
from relattn.kernels.platform import platform_defaults
from relattn.kernels.precision import compute_dtype, wide_einsum, widen
from relattn.kernels.segments import mask_segments, segment_numbers

# Fewest queries in a block of `causal_softmax_attention` with a window: smaller blocks
# compute fewer scores, but each adds to the gradient of all keys.
_WINDOW_BLOCK = 256
# The score of a masked key in sums, as in jax.nn.
MASKED_SCORE = -0.7 * float(jnp.finfo(jnp.float32).max)


@overload
def softmax_attention(
    q: Float[Array, "*#batch n head_dim"],
    k: Float[Array, "*#batch m head_dim"],
    v: Float[Array, "*#batch m value_dim"],
    *,
    bias: Float[Array, "*#batch n m"] | None = None,
    mask: Bool[Array, "*#batch n m"] | None = None,
    key_mask: Bool[Array, "*#batch m"] | None = None,
    segment_ids: Int[Array, "*#batch n"] | None = None,
    precision: jax.lax.PrecisionLike = None,
    return_logsumexp: Literal[False] = False,
) -> Float[Array, "*batch n value_dim"]: ...
@overload
def softmax_attention(
    q: Float[Array, "*#batch n head_dim"],
    k: Float[Array, "*#batch m head_dim"],
    v: Float[Array, "*#batch m value_dim"],
    *,
    bias: Float[Array, "*#batch n m"] | None = None,
    mask: Bool[Array, "*#batch n m"] | None = None,
    key_mask: Bool[Array, "*#batch m"] | None = None,
    segment_ids: Int[Array, "*#batch n"] | None = None,
    precision: jax.lax.PrecisionLike = None,
    return_logsumexp: Literal[True],
) -> tuple[Float[Array, "*batch n value_dim"], Float[Array, "*batch n"]]: ...
@check_arguments
def softmax_attention(
    q: Float[Array, "*#batch n head_dim"],
    k: Float[Array, "*#batch m head_dim"],
    v: Float[Array, "*#batch m value_dim"],
    *,
    bias: Float[Array, "*#batch n m"] | None = None,
    mask: Bool[Array, "*#batch n m"] | None = None,
    key_mask: Bool[Array, "*#batch m"] | None = None,
    segment_ids: Int[Array, "*#batch n"] | None = None,
    precision: jax.lax.PrecisionLike = None,
    return_logsumexp: bool = False,
) -> (
    Float[Array, "*batch n value_dim"]
    | tuple[Float[Array, "*batch n value_dim"], Float[Array, "*batch n"]]
):
    """Computes softmax attention, with masks and a dense bias.

    out_i = sum_j softmax_j(q_i . k_j / sqrt(head_dim) + bias_ij) v_j

    Scores, softmax and sums are float32 or wider. A query without allowed keys gives
    zeros. On GPUs and TPUs it is flash attention where that pays: without masks,
    segments, bias, ``precision`` and ``return_logsumexp``; then it has only first
    derivatives, in reverse mode, and its weights have the dtype of the values.

    Args:
        q: Queries, shape ``[*batch, n, head_dim]``.
        k: Keys, shape ``[*batch, m, head_dim]``.
        v: Values, shape ``[*batch, m, value_dim]``.
        bias: Added to the scores, shape ``[*batch, n, m]``; must be finite.
        mask: True where query i may attend to key j, shape ``[*batch, n, m]``. A key
            that no query may attend to is ignored, whatever it holds.
        key_mask: True for keys that exist, shape ``[*batch, m]``. Other keys and their
            values are ignored, whatever they hold.
        segment_ids: For packed sequences: a token attends only to tokens of its segment
            (`relattn.kernels.segment_mask`), shape ``[*batch, n]``; then m is n.
        precision: Passed to einsum.
        return_logsumexp: Whether to also return log sum_j exp(score_ij), by which
            attention to several sets of keys is combined.

    Returns:
        Shape ``[*batch, n, value_dim]``, in the dtype of ``v``. With
        ``return_logsumexp``, also the logarithms, shape ``[*batch, n]``, in float32 or
        wider; -0.7 times the largest float32 without allowed keys.

    Raises:
        ValueError: If shapes or dtypes do not fit together, or ``segment_ids`` are
            given, but not as many queries as keys.

    Example:
        >>> x = jnp.eye(3)
        >>> softmax_attention(x, x, x, key_mask=x[0] > 0)[2].tolist()
        [1.0, 0.0, 0.0]

    Source:
        Vaswani et al., Attention Is All You Need, section 3.2.1.
    """
    n, m = q.shape[-2], k.shape[-2]
    if segment_ids is not None and n != m:
        raise ValueError(
            f"segment_ids number the tokens of one sequence, but there are {n} queries "
            f"and {m} keys: pass a mask"
        )
    if not return_logsumexp:
        return _attend(q, k, v, mask, key_mask, segment_ids, bias, precision)
    mask = mask_segments(mask, segment_ids)
    return _attend_in_blocks(
        q, k, v, mask, key_mask, bias, precision=precision, logsumexp=True
    )


@check_arguments
def causal_softmax_attention(
    q: Float[Array, "*#batch n head_dim"],
    k: Float[Array, "*#batch n head_dim"],
    v: Float[Array, "*#batch n value_dim"],
    *,
    bias: Float[Array, "*#batch n n"] | None = None,
    key_mask: Bool[Array, "*#batch n"] | None = None,
    segment_ids: Int[Array, "*#batch n"] | None = None,
    window: int | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch n value_dim"]:
    """Computes softmax attention of every token to itself and earlier tokens.

    out_i = sum_{j <= i} softmax_{j <= i}(q_i . k_j / sqrt(head_dim) + bias_ij) v_j, or
    over i - window < j <= i. With a window and without bias, time and memory are linear
    in n: a block of queries is compared only with the keys that it sees. Numerics and,
    without a window, flash attention are those of `softmax_attention`.

    Args:
        q: Queries, shape ``[*batch, n, head_dim]``.
        k: Keys, shape ``[*batch, n, head_dim]``.
        v: Values, shape ``[*batch, n, value_dim]``.
        bias: Added to the scores, shape ``[*batch, n, n]``; must be finite.
        key_mask: True for keys that exist, shape ``[*batch, n]``.
        segment_ids: For packed sequences: a token attends only to tokens of its segment
            (`relattn.kernels.segment_mask`), shape ``[*batch, n]``.
        window: Number of tokens, itself included, that a token attends to; None for
            all.
        precision: Passed to einsum.

    Returns:
        Shape ``[*batch, n, value_dim]``, in the dtype of ``v``.

    Raises:
        ValueError: If shapes or dtypes do not fit together, or ``window`` is less than
            one.

    Example:
        >>> x = jnp.eye(3)
        >>> causal_softmax_attention(x, x, x)[0].tolist()
        [1.0, 0.0, 0.0]
        >>> causal_softmax_attention(x, x, x, window=1).tolist() == x.tolist()
        True

    Source:
        Vaswani et al., Attention Is All You Need, section 3.2.3; window: Beltagy et
        al., Longformer, section 3.1, and Jiang et al., Mistral 7B, section 2.
    """
    check_window(window)
    q = finite_masked(q, key_mask)
    if window is None or at_most(q.shape[-2], window):
        options = (None, key_mask, segment_ids, bias, precision)
        return _attend(q, k, v, *options, causal=True)
    return _attend_to_window(
        q, k, v, key_mask, segment_ids, bias, window=window, precision=precision
    )


def check_window(window: int | None) -> None:
    """Raises ValueError if a window is less than one."""
    if window is not None and window < 1:
        raise ValueError(
            f"window must be at least 1, or None for all earlier tokens, got {window}"
        )


def _attend(q, k, v, mask, key_mask, segment_ids, bias, precision, *, causal=False):
    """Computes `softmax_attention` by flash attention, or in blocks of queries."""

    def blocks(q, k, v, key_mask=None, segments=None, bias=None):
        del segments
        within = mask_segments(mask, segment_ids)
        return _attend_in_blocks(
            q, k, v, within, key_mask, bias, causal=causal, precision=precision
        )

    if mask is None and bias is None:
        options = {"causal": causal, "precision": precision}
        if key_mask is None and segment_ids is None:
            # Flash attention has no keys that queries share.
            like = broadcast_batch(q, k, v)
            flash = flash_branches(*like, **options)
            if flash:
                return jax.lax.platform_dependent(*like, **flash, default=blocks)
        fused = fused_branches(q, k, v, **options)
        if fused:
            segments = None if segment_ids is None else segment_numbers(segment_ids)
            return jax.lax.platform_dependent(
                q, k, v, key_mask, segments, bias, **fused, default=blocks
            )
    return blocks(q, k, v, key_mask, bias=bias)


def _attend_to_window(q, k, v, key_mask, segment_ids, bias, *, window, precision):
    """Computes attention to the last ``window`` tokens, in blocks of queries."""
    arrays = [x for x in (q, k, v, bias) if x is not None]
    batch = jnp.broadcast_shapes(*(x.shape[:-2] for x in arrays))
    n: Any = q.shape[-2]
    before, span = window - 1, max(window, _WINDOW_BLOCK)
    symbolic = is_symbolic_dim(n)
    size: Any = n if symbolic else min(span, block_size(batch, n, 2 * span))
    if bias is not None or symbolic or n <= size + before:
        options = {"causal": True, "window": window, "precision": precision}
        within = mask_segments(None, segment_ids)
        return _attend_in_blocks(q, k, v, within, key_mask, bias, **options)
    k, v, key_mask = zero_masked(k, v, key_mask)
    exists = jnp.ones(n, bool) if key_mask is None else key_mask
    numbers = None if segment_ids is None else segment_numbers(segment_ids)[..., None]
    past = causal_mask(before, size, size + before, window)

    def pad(x):
        widths = [(0, 0)] * (x.ndim - 2) + [(before, -n % size), (0, 0)]
        return jnp.pad(x, widths)

    rows = jax.tree.map(pad, (k, v, exists[..., None], numbers))

    def attend(index, q, numbers):
        # The block's own keys and those before it: query i stands at before + i.
        keys, values, exists, theirs = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(
                x, index * size, size + before, axis=-2
            ),
            rows,
        )
        mask = past
        if numbers is not None:
            mask = past & (numbers == jnp.swapaxes(theirs, -2, -1))
        options = (mask, exists[..., 0], None, precision)
        weights = masked_softmax(*_masked_scores(q, keys, *options))
        return weighted_sum(weights, values, precision)

    return map_blocks(attend, (q, numbers), size).astype(v.dtype)


def _attend_in_blocks(
    q,
    k,
    v,
    mask=None,
    key_mask=None,
    bias=None,
    *,
    causal=False,
    window=None,
    precision,
    logsumexp=False,
) -> Any:
    """Computes `softmax_attention` in blocks of queries."""
    # Masked keys have weight zero, and NaN there must not reach a product.
    k, v, key_mask = zero_unseen(k, v, key_mask, mask)
    arrays = [x for x in (q, k, v, mask, bias) if x is not None]
    batch = jnp.broadcast_shapes(*(x.shape[:-2] for x in arrays))
    size = block_size(batch, q.shape[-2], k.shape[-2])

    def attend(index, q, mask, bias):
        # j <= i, for the queries of the block.
        if causal:
            past = causal_mask(index * size, q.shape[-2], k.shape[-2], window)
            mask = combine_masks(mask, past)
        # q_i . k_j / sqrt(head_dim) + bias_ij
        scores, allowed = _masked_scores(q, k, mask, key_mask, bias, precision)
        # sum_j softmax_j(score_ij) v_j
        out = weighted_sum(masked_softmax(scores, allowed), v, precision)
        if not logsumexp:
            return out
        # log sum_j exp(score_ij)
        if allowed is not None:
            scores = jnp.where(allowed, scores, MASKED_SCORE)
        total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
        total = jnp.broadcast_to(total, (*out.shape[:-1], 1))
        return jnp.concatenate([out, total], axis=-1)

    out = map_blocks(attend, (q, mask, bias), size)
    if logsumexp:
        return out[..., :-1].astype(v.dtype), out[..., -1]
    return out.astype(v.dtype)


def zero_unseen(
    k: Float[Array, "*#batch m head_dim"],
    v: Float[Array, "*#batch m value_dim"],
    key_mask: Bool[Array, "*#batch m"] | None,
    mask: Bool[Array, "*#batch n m"] | None,
) -> tuple[Array, Array, Array | None]:
    """Does `zero_masked`, also for the keys that ``mask`` hides from all queries."""
    if mask is not None:
        key_mask = combine_masks(mask.any(axis=-2), key_mask)
    return zero_masked(k, v, key_mask)


def causal_mask(
    first: Array | int, n: int, m: int, window: int | None = None
) -> Bool[Array, "n m"]:
    """Returns which of m keys the queries first .. first + n - 1 see.

    A query sees the keys that are not later, or the last ``window`` of these.

    Example:
        >>> causal_mask(1, 2, 3, window=2).astype(int).tolist()
        [[1, 1, 0], [0, 1, 1]]
    """
    queries, keys = first + jnp.arange(n)[:, None], jnp.arange(m)[None]
    past = queries >= keys
    return past if window is None else past & (queries - keys < window)


def block_size(batch: tuple[Any, ...], n: Any, m: Any) -> Any:
    """Returns the number of queries that attend at once: n, or fewer to save memory.

    All n where a length is symbolic; a symbolic axis of the batch counts as one.
    """
    if is_symbolic_dim(n) or is_symbolic_dim(m):
        return n
    scores_of_query = math.prod(x for x in batch if not is_symbolic_dim(x)) * m
    return min(n, max(1, platform_defaults().block_scores // max(1, scores_of_query)))


def map_blocks(attend: Callable[..., Array], queries: Any, size: int) -> Array:
    """Computes outputs of blocks of queries, one after the other.

    The backward pass computes the scores of a block again, so that those of one block
    are in memory.

    Args:
        attend: Maps the index of a block and the block's queries to outputs
            ``[*batch, size, width]``.
        queries: A tree of arrays ``[*batch, n, width]``.
        size: Number of queries in a block; zeros fill the last one.

    Returns:
        Shape ``[*batch, n, width]``.

    Example:
        >>> x = jnp.arange(5.0)[:, None]
        >>> map_blocks(lambda index, x: x + 10 * index, (x,), 2)[:, 0].tolist()
        [0.0, 1.0, 12.0, 13.0, 24.0]
    """
    n = jax.tree.leaves(queries)[0].shape[-2]
    if size >= n:
        return attend(0, *queries)
    num = -(-n // size)

    def split(x):
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, num * size - n), (0, 0)])
        x = x.reshape(*x.shape[:-2], num, size, x.shape[-1])
        return jnp.moveaxis(x, -3, 0)

    # In a loop nothing else can compute the scores before the backward pass.
    attend = jax.checkpoint(attend, prevent_cse=False)
    blocks = jax.tree.map(split, queries)
    out = jax.lax.map(lambda block: attend(*block), (jnp.arange(num), *blocks))
    out = jnp.moveaxis(out, 0, -3)
    return out.reshape(*out.shape[:-3], num * size, out.shape[-1])[..., :n, :]


def softmax_weights(
    q: Float[Array, "*#batch n head_dim"],
    k: Float[Array, "*#batch m head_dim"],
    *,
    mask: Bool[Array, "*#batch n m"] | None = None,
    key_mask: Bool[Array, "*#batch m"] | None = None,
    bias: Float[Array, "*#batch n m"] | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch n m"]:
    """Computes the weights of `softmax_attention` in float32 or wider.

    Masked keys must be finite: see `relattn.kernels.masks.zero_masked`.
    """
    return masked_softmax(*_masked_scores(q, k, mask, key_mask, bias, precision))


def _masked_scores(q, k, mask, key_mask, bias, precision):
    """Returns the scores in float32 or wider, and which of them are allowed."""
    if key_mask is not None:
        key_mask = key_mask[..., None, :]
    # q_i . k_j / sqrt(head_dim) + bias_ij
    scores = scaled_products(q, k, precision)
    if bias is not None:
        scores = scores + widen(bias)
    return scores, combine_masks(mask, key_mask)


def scaled_products(
    q: Float[Array, "*#batch n head_dim"],
    k: Float[Array, "*#batch m head_dim"],
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch n m"]:
    """Computes q_i . k_j / sqrt(head_dim) in float32 or wider."""
    scale, product = q.shape[-1] ** -0.5, wide_einsum(precision)
    if q.dtype == compute_dtype(q):
        # Scaled scores are rounded differently where a compiler fuses the scaling into
        # sums: in the softmax, into the difference from their maximum.
        return product("...nd,...md->...nm", q * scale, k)
    return product("...nd,...md->...nm", q, k) * scale


def weighted_sum(
    weights: Float[Array, "*#batch n m"],
    v: Float[Array, "*#batch m value_dim"],
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch n value_dim"]:
    """Computes sum_j weights_ij v_j in float32 or wider."""
    return wide_einsum(precision)("...nm,...md->...nd", weights, widen(v))


def masked_softmax(scores: Array, allowed: Array | None) -> Array:
    """Computes a softmax over the allowed entries of the last axis; zeros elsewhere.

    A row without allowed entries is zero.
    """
    if allowed is None:
        return softmax(scores)
    # The lowest finite number, not -inf: a row without keys must not give NaN.
    scores = jnp.where(allowed, scores, jnp.finfo(scores.dtype).min)
    return jnp.where(allowed, softmax(scores), 0.0)

"""Attention kernels behind the interfaces of `jax.nn` and of Flax's attention layers.

`dot_product_attention` has the layout and arguments of `jax.nn.dot_product_attention`;
`attention_fn` makes the hook of the same name in
`flax.linen.MultiHeadDotProductAttention` and `flax.nnx.MultiHeadAttention`, and
`split_attention_mask` splits Flax's masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, cast, overload

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.dtypes import promote_dtype as promote
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from relattn.nn.implementations import (
    JAX_NN,
    USE_SOFTMAX,
    Kernel,
    call_kernel,
    check_shapes,
    name_of,
    resolve,
    takes,
    to_scores,
)


@overload
def dot_product_attention(
    query: Float[ArrayLike, "*batch n heads head_dim"],
    key: Float[ArrayLike, "*batch m key_heads head_dim"],
    value: Float[ArrayLike, "*batch m key_heads value_dim"],
    bias: Float[ArrayLike, "..."] | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | Float[Array, ""] | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | Sequence[int] | None = None,
    implementation: str | Kernel | None = None,
    return_residual: Literal[False] = False,
    **options: Any,
) -> Float[Array, "*batch n heads value_dim"]: ...
@overload
def dot_product_attention(
    query: Float[ArrayLike, "*batch n heads head_dim"],
    key: Float[ArrayLike, "*batch m key_heads head_dim"],
    value: Float[ArrayLike, "*batch m key_heads value_dim"],
    bias: Float[ArrayLike, "..."] | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | Float[Array, ""] | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | Sequence[int] | None = None,
    implementation: str | Kernel | None = None,
    return_residual: Literal[True],
    **options: Any,
) -> tuple[
    Float[Array, "*batch n heads value_dim"], Float[Array, "*batch n heads"]
]: ...
def dot_product_attention(
    query: Float[ArrayLike, "*batch n heads head_dim"],
    key: Float[ArrayLike, "*batch m key_heads head_dim"],
    value: Float[ArrayLike, "*batch m key_heads value_dim"],
    bias: Float[ArrayLike, "..."] | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | Float[Array, ""] | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | Sequence[int] | None = None,
    implementation: str | Kernel | None = None,
    return_residual: bool = False,
    **options: Any,
) -> (
    Float[Array, "*batch n heads value_dim"]
    | tuple[Float[Array, "*batch n heads value_dim"], Float[Array, "*batch n heads"]]
):
    """Computes attention with a kernel of relattn, as `jax.nn.dot_product_attention`.

    out_i = sum_j w(scale q_i, k_j) v_j / sum_j w(scale q_i, k_j), where w is the
    implementation's weight; "softmax" has w = exp(q . k + bias).

    The arguments mean what they mean in `jax.nn`, also where there are more keys than
    queries or fewer: ``is_causal`` and ``local_window_size`` place query i at key i.

    A mask of keys, ``[batch, 1, 1, m]``, or of queries, ``[batch, 1, n, 1]``, and
    lengths of sequences suit every implementation. Other masks, a bias, windows and
    the residual need scores, which linear attention never computes: they raise where
    they are unsupported. A query without allowed keys gives zeros; `jax.nn`,
    which computes the implementations None, ``"xla"`` and ``"cudnn"``, gives the mean
    of all values unless ``query_seq_lengths`` excludes the query.

    Args:
        query: Queries, shape ``[*batch, n, heads, head_dim]``.
        key: Keys, shape ``[*batch, m, key_heads, head_dim]``; ``key_heads`` divides
            ``heads`` (grouped-query attention).
        value: Values, shape ``[*batch, m, key_heads, value_dim]``.
        bias: Added to the scores; broadcasts to ``[*batch, heads, n, m]``.
        mask: True where query i may attend to key j; broadcasts to
            ``[*batch, heads, n, m]``.
        scale: Factor of the scores; None for 1 / sqrt(head_dim).
        is_causal: Whether query i attends only to keys j <= i.
        query_seq_lengths: Number of queries of each example, shape ``[*batch]``; later
            ones give zeros.
        key_value_seq_lengths: Number of keys of each example, shape ``[*batch]``; later
            ones are ignored.
        local_window_size: ``(left, right)``, or one number for both: query i attends
            only to keys i - left <= j <= i + right.
        implementation: None, ``"xla"`` or ``"cudnn"``, softmax attention by `jax.nn`;
            ``"softmax"``, by `relattn.kernels.softmax_attention`; ``"favor"`` and
            ``"relu"``, linear attention with random features; or a kernel
            ``(q, k, v, **options)`` of `relattn.kernels` on ``[..., n, head_dim]``,
            such as `linear_attention` with the option ``feature_map``. With fewer key
            heads, its tables for each head are
            ``[key_heads, heads / key_heads, offsets]``.
        return_residual: Whether to also return the logarithm of the sum of exp(scores),
            without gradient.
        **options: Options of the implementation. Those of "favor" and "relu" are
            ``projection``, W of shape ``[features, head_dim]`` (default: drawn from a
            fixed seed, with the default number of features); ``features``,
            ``"positive"`` (default of "favor"), ``"trigonometric"`` or ``"relu"``; and
            those of `linear_attention`.

    Returns:
        Shape ``[*batch, n, heads, value_dim]``, in the dtype of ``value``. With
        ``return_residual``, also the residual, shape ``[*batch, n, heads]``.

    Raises:
        ValueError: If shapes or dtypes do not fit together, or the implementation
            does not support an argument.
        RuntimeError: If the implementation is ``"cudnn"`` and there is no cuDNN.

    Example:
        >>> x = jax.random.normal(jax.random.key(0), (1, 7, 2, 4))
        >>> ours = dot_product_attention(
        ...     x, x, x, is_causal=True, implementation="softmax")
        >>> theirs = jax.nn.dot_product_attention(x, x, x, is_causal=True)
        >>> bool(jnp.allclose(ours, theirs, atol=1e-5))
        True
        >>> dot_product_attention(x, x, x, implementation="favor").shape
        (1, 7, 2, 4)

    Source:
        Vaswani et al., Attention Is All You Need, section 3.2; grouped queries: Ainslie
        et al., GQA, section 2.2.
    """
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    check_shapes(query, key, value)
    *batch, n, heads, _ = query.shape
    scores = (*batch, heads, n, key.shape[-3])
    mask = to_scores(mask, "mask", scores)
    bias = to_scores(bias, "bias", scores)
    if implementation in JAX_NN:
        if query.ndim > 4 or options:
            raise ValueError(
                f"implementation {implementation!r} is jax.nn's, which takes at most "
                f"one batch axis and no options, got query of shape {query.shape} and "
                f"options {sorted(options)}: {USE_SOFTMAX}"
            )
        # Its annotations leave out traced scales and windows in lists.
        attend = cast(Any, jax.nn.dot_product_attention)
        return attend(
            query,
            key,
            value,
            bias,
            mask,
            scale=scale,
            is_causal=is_causal,
            query_seq_lengths=_as_int32(query_seq_lengths),
            key_value_seq_lengths=_as_int32(key_value_seq_lengths),
            local_window_size=local_window_size,
            implementation=implementation,
            return_residual=return_residual,
        )
    masks = [
        mask,
        _mask_of_lengths(query_seq_lengths, "query_seq_lengths", scores, -2),
        _mask_of_lengths(key_value_seq_lengths, "key_value_seq_lengths", scores, -1),
    ]
    kernel = resolve(implementation, query.shape[-1], options)
    if local_window_size is not None:
        window, is_causal = _read_window(local_window_size, scores, is_causal)
        if window is not None and not takes(kernel, "mask"):
            raise ValueError(
                f"{name_of(kernel)} cannot compute local_window_size="
                f"{local_window_size} exactly, but only a causal window without end "
                f"on the left: {USE_SOFTMAX}"
            )
        masks.append(window)
    return call_kernel(
        kernel,
        query,
        key,
        value,
        bias,
        masks,
        scale=scale,
        is_causal=is_causal,
        first=0,
        return_residual=return_residual,
    )


def attention_fn(
    implementation: str | Kernel,
    *,
    is_causal: bool = False,
    key_mask: ArrayLike | None = None,
    **options: Any,
) -> Callable[..., Array]:
    """Makes the argument ``attention_fn`` of Flax's attention layers.

    The result serves `flax.linen.MultiHeadDotProductAttention`,
    `flax.linen.MultiHeadAttention` and `flax.nnx.MultiHeadAttention`. It takes masks as
    Flax makes them, in which other than zero means allowed. Linear attention takes
    masks of keys only: pass ``mask=key_mask[:, None, None]`` to the layer, or
    ``key_mask`` and ``is_causal`` here; `split_attention_mask` makes them of a mask of
    `flax.linen.make_attention_mask`.

    Dropout acts on the heads' outputs, not on attention weights, which linear attention
    never computes. ``broadcast_dropout`` drops the same elements in all examples and
    heads. Softmax is always in float32 or wider.

    Args:
        implementation: ``"softmax"``, which the names of `jax.nn` also select here;
            ``"favor"`` or ``"relu"``, linear attention with random features; or a
            kernel ``(q, k, v, **options)`` of `relattn.kernels`.
        is_causal: Whether a token attends only to itself and earlier tokens. If there
            are fewer queries than keys, they are the last tokens, as in decoding.
            Linear attention needs it here instead of a causal mask.
        key_mask: True, or other than zero, for keys that exist; broadcasts to
            ``[*batch, m]``. In decoding m is the length of the cache.
        **options: Options of the implementation, the same as those of
            `dot_product_attention`.

    Returns:
        A function ``(query, key, value, bias=None, mask=None, **settings)`` with the
        settings of `flax.linen.dot_product_attention` and
        `flax.nnx.dot_product_attention`. It raises ValueError for those that no kernel
        supports: sown weights, custom einsums and positions.

    Example:
        >>> import flax.linen as nn
        >>> layer = nn.MultiHeadDotProductAttention(
        ...     num_heads=2, attention_fn=attention_fn("favor"))
        >>> x = jnp.ones((1, 7, 8))
        >>> out, _ = layer.init_with_output(jax.random.key(0), x)
        >>> out.shape
        (1, 7, 8)
    """
    if implementation in JAX_NN:
        implementation = "softmax"
    causal_here, keys_here = is_causal, key_mask

    # Linen leaves out the settings that this signature does not name.
    def attend(
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None = None,
        mask: ArrayLike | Sequence[Any] | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: jax.lax.PrecisionLike = None,
        module: Any = None,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: Callable[..., Array] | None = None,
        qk_attn_weights_einsum: Callable[..., Array] | None = None,
        attn_weights_value_einsum: Callable[..., Array] | None = None,
        promote_dtype: Callable[..., Any] | None = None,
        is_causal: bool = False,
        input_positions: Array | None = None,
        key_mask: Array | None = None,
    ) -> Array:
        del force_fp32_for_softmax
        if module is not None:
            raise ValueError(
                "kernels return no attention weights: leave out sow_weights=True"
            )
        for name, given in {
            "einsum_dot_general": einsum_dot_general,
            "qk_attn_weights_einsum": qk_attn_weights_einsum,
            "attn_weights_value_einsum": attn_weights_value_einsum,
            "input_positions": input_positions,
        }.items():
            if given is not None:
                raise ValueError(
                    f"the kernels of attention_fn take no {name}: leave it out"
                )
        if promote_dtype is None:
            query, key, value = promote(query, key, value, dtype=dtype)
        else:
            query, key, value = promote_dtype((query, key, value), dtype=dtype)
        check_shapes(query, key, value)
        *batch, n, heads, head_dim = query.shape
        m = key.shape[-3]
        scores = (*batch, heads, n, m)
        first = 0
        if (is_causal or causal_here) and n != m:
            _check_last_queries(n, m, told=causal_here)
            first = m - n
        given = options if precision is None else {"precision": precision, **options}
        out = call_kernel(
            resolve(implementation, head_dim, given),
            query,
            key,
            value,
            to_scores(bias, "bias", scores),
            [
                to_scores(_is_allowed(mask), "mask", scores),
                *(_mask_of_keys(keys, scores) for keys in (keys_here, key_mask)),
            ],
            is_causal=is_causal or causal_here,
            first=first,
        )
        if deterministic or dropout_rate == 0:
            return out
        return _drop(out, dropout_rate, dropout_rng, broadcast_dropout)

    return attend


def split_attention_mask(
    mask: ArrayLike,
) -> tuple[Bool[Array, "*batch m"], bool]:
    """Splits a mask of Flax: returns the keys that exist, and whether it is causal.

    mask_ij = query_mask_i key_mask_j, or the same for j <= i only and 0 for j > i. This
    includes the masks that `flax.linen.make_attention_mask` makes from padding, those
    of `flax.linen.make_causal_mask`, and both combined. If there are fewer queries than
    keys, they are the last tokens.

    A query without keys is padding: its output is meaningless, and `attention_fn` does
    not know about it. The mask's values must be known: inside `jax.jit`, pass
    ``mask=key_mask[:, None, None]`` to the layer instead.

    Args:
        mask: Other than zero where query i may attend to key j, shape
            ``[*batch, heads, n, m]``, the same for all heads.

    Returns:
        ``key_mask``, True for keys that exist, shape ``[*batch, m]``, and
        ``is_causal``: the arguments of `attention_fn`.

    Raises:
        ValueError: If the mask has another form, such as one that is added to scores,
            or its values are not known.

    Example:
        >>> import flax.linen as nn
        >>> exists = jnp.array([[1, 1, 0]])
        >>> padding = nn.make_attention_mask(exists, exists)
        >>> mask = nn.combine_masks(padding, nn.make_causal_mask(exists))
        >>> key_mask, is_causal = split_attention_mask(mask)
        >>> key_mask.tolist(), is_causal
        ([[True, True, False]], True)
    """
    try:
        values = np.asarray(mask)
    except jax.errors.TracerArrayConversionError:
        raise ValueError(
            "split_attention_mask needs a mask whose values are known: call it outside "
            "jax.jit, or pass mask=key_mask[:, None, None] to the layer"
        ) from None
    if values.ndim < 3:
        found = "None: leave it out" if mask is None else values.shape
        raise ValueError(f"mask must be [*batch, heads, n, m], got {found}")
    _check_not_additive(values)
    allowed = values != 0
    one_head = allowed[..., 0, :, :]
    if (allowed == one_head[..., None, :, :]).all():
        queries, keys = one_head.any(axis=-1), one_head.any(axis=-2)
        padding = queries[..., None] & keys[..., None, :]
        n, m = one_head.shape[-2:]
        past = np.tri(n, m, m - n, dtype=bool)
        for is_causal, expected in ((False, padding), (True, padding & past)):
            if (one_head == expected).all():
                return jnp.asarray(keys), is_causal
    raise ValueError(
        f"mask of shape {allowed.shape} is neither a padding mask, the same for all "
        f"queries and heads, nor a causal one with padding: {USE_SOFTMAX}"
    )


def _check_last_queries(n, m, told):
    """Checks that causal queries of a Flax layer can be the last of the keys."""
    if n > m:
        raise ValueError(
            "is_causal=True needs as many keys as queries, or more, got "
            f"{n} queries and {m} keys"
        )
    # Flax's own function would place query i at key i.
    if n != 1 and not told:
        raise ValueError(
            f"is_causal=True does not tell where {n} queries stand among {m} keys: "
            "pass is_causal=True to attention_fn if they are the last, or a mask"
        )


def _is_allowed(mask):
    """Returns where a mask of Flax is other than zero; it may be a list, or None."""
    if mask is None:
        return None
    # A list itself is unequal to 0.
    mask = jnp.asarray(mask)
    _check_not_additive(mask)
    return mask != 0


def _check_not_additive(mask):
    """Refuses a mask of 0 and -inf, if its values are known: it means the opposite."""
    if not isinstance(mask, Tracer) and (np.asarray(mask) < 0).any():
        raise ValueError(
            "mask has values below zero, as one that is added to scores, but in a mask "
            "of Flax other than zero means allowed: pass mask == 0"
        )


def _mask_of_keys(key_mask, scores):
    """Returns the mask of keys that exist, with the axes of the scores."""
    x = _is_allowed(key_mask)
    if x is None:
        return None
    expected = (*scores[:-3], scores[-1])
    fits = x.ndim and x.ndim <= len(expected) and x.shape[-1] == expected[-1]
    if not fits:
        raise ValueError(
            f"key_mask must broadcast to [*batch, m] = {expected}, got shape {x.shape}"
        )
    return to_scores(x[..., None, None, :], "mask", scores)


def _mask_of_lengths(lengths, name, scores, axis):
    """Returns the mask of tokens before the end, along an axis of the scores."""
    if lengths is None:
        return None
    lengths, batch = jnp.asarray(lengths), scores[:-3]
    # jax.nn takes one length where query has no batch axis.
    fits = lengths.shape == batch or lengths.shape == (1,) and not batch
    if not fits or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            f"{name} must hold an integer for each example, shape {batch}, got shape "
            f"{lengths.shape} and {lengths.dtype}"
        )
    shape = [1] * len(scores)
    shape[axis] = scores[axis]
    index = jnp.arange(scores[axis]).reshape(shape)
    return to_scores(index < lengths.reshape(*batch, 1, 1, 1), "mask", scores)


def _as_int32(lengths):
    """Converts lengths to the dtype that jax.nn takes."""
    return None if lengths is None else jnp.asarray(lengths).astype(jnp.int32)


def _read_window(size, scores, is_causal):
    """Returns the mask of a window of keys, None for all, and whether it is causal.

    A window that is unlimited on the left is causal, or hides nothing.
    """
    n, m = scores[-2:]
    if np.shape(size) not in ((), (2,)):
        raise ValueError(
            f"local_window_size must be a number or (left, right), got {size}"
        )
    left, right = np.broadcast_to(size, 2).tolist()
    if left >= n - 1 and (right >= m - 1 or right >= 0 and is_causal):
        return None, is_causal
    if left >= n - 1 and right == 0:
        return None, True
    offset = jnp.arange(n)[:, None] - jnp.arange(m)[None]
    window = (-right <= offset) & (offset <= left)
    return to_scores(window, "mask", scores), is_causal


def _drop(out, rate, rng, broadcast):
    """Applies dropout to the heads' outputs, ``[*batch, n, heads, value_dim]``."""
    if not 0 < rate < 1:
        raise ValueError(f"dropout_rate must be from 0 to below 1, got {rate}")
    if rng is None:
        raise ValueError(
            f"dropout_rate={rate} needs dropout_rng, or deterministic=True"
        )
    shared = (*range(out.ndim - 3), out.ndim - 2) if broadcast else ()
    dropout = nn.Dropout(rate, broadcast_dims=shared, parent=None)
    return cast(Array, dropout.apply({}, out, deterministic=False, rng=rng))

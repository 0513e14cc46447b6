"""Attention kernels behind the interfaces of `jax.nn` and of Flax's attention layers.

`dot_product_attention` has the layout and arguments of
`jax.nn.dot_product_attention`; `attention_fn` makes the hook of the same name in
`flax.linen.MultiHeadDotProductAttention` and `flax.nnx.MultiHeadAttention`.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from relattn import kernels, spec
from relattn.nn.linear_attention import FEATURE_MAPS

Kernel = Callable[..., Array]


def dot_product_attention(
    query: Float[Array, "*batch n heads head_dim"],
    key: Float[Array, "*batch m key_heads head_dim"],
    value: Float[Array, "*batch m key_heads value_dim"],
    bias: Float[Array, "..."] | None = None,
    mask: Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    implementation: str | Kernel = "softmax",
    **options: Any,
) -> Float[Array, "*batch n heads value_dim"]:
    """Computes attention with a kernel of relattn, as `jax.nn.dot_product_attention`.

    out_i = sum_j w(scale q_i, k_j) v_j / sum_j w(scale q_i, k_j), where w is the
    implementation's weight; "softmax" has w = exp(q . k + bias).

    A mask of shape ``[batch, 1, 1, m]`` hides keys, and every implementation takes it.
    Other masks and a bias need scores, which linear attention never computes: an
    implementation that cannot honour them raises. A query without allowed keys gives
    zeros (in `jax.nn`: the mean of the values).

    Args:
        query: Queries, shape ``[*batch, n, heads, head_dim]``.
        key: Keys, shape ``[*batch, m, key_heads, head_dim]``; ``key_heads`` divides
            ``heads`` (grouped-query attention).
        value: Values, shape ``[*batch, m, key_heads, value_dim]``.
        bias: Added to the scores; broadcasts to ``[*batch, heads, n, m]``.
        mask: True where query i may attend to key j; broadcasts to
            ``[*batch, heads, n, m]``.
        scale: Factor of the scores; 1 / sqrt(head_dim) if None.
        is_causal: Whether query i attends only to keys j <= i.
        implementation: ``"softmax"``; ``"favor"``, linear attention with random
            features; or a kernel ``(q, k, v, **options)`` of `relattn.kernels` on
            ``[..., n, head_dim]``, such as `linear_attention` with the option
            ``feature_map``.
        **options: Options of the implementation. Those of "favor" are ``projection``,
            W of shape ``[features, head_dim]`` (default: drawn from a fixed seed, with
            the default number of features); ``features``, ``"positive"`` (default),
            ``"trigonometric"`` or ``"relu"``; and those of `linear_attention`.

    Returns:
        Shape ``[*batch, n, heads, value_dim]``, in the dtype of ``value``.

    Raises:
        ValueError: If shapes or dtypes do not fit together, or the implementation
            cannot honour the mask, the bias or ``is_causal``.

    Example:
        >>> x = jax.random.normal(jax.random.key(0), (1, 7, 2, 4))
        >>> ours = dot_product_attention(x, x, x, is_causal=True)
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
    _check_shapes(query, key, value)
    n, heads, head_dim = query.shape[-3:]
    m, key_heads = key.shape[-3:-1]
    kernel = _resolve(implementation, head_dim, options)
    mask = _to_scores(mask, "mask", query.ndim)
    bias = _to_scores(bias, "bias", query.ndim)
    if scale is not None:
        query = query * (scale * math.sqrt(head_dim))
    if is_causal:
        kernel, mask = _make_causal(kernel, mask, (n, m), query.ndim)
    arguments = _mask_arguments(kernel, mask, bias, (n, m))
    # To [*batch, heads, n, head_dim]; grouped queries to [*batch, key_heads, group, n,
    # head_dim], against keys and values with a group of one.
    q, k, v = (jnp.swapaxes(x, -3, -2) for x in (query, key, value))
    if key_heads != heads:
        q = q.reshape(*q.shape[:-3], key_heads, -1, n, head_dim)
        k, v = k[..., None, :, :], v[..., None, :, :]
        arguments = {
            name: _split_heads(x, query.ndim - 3, key_heads)
            for name, x in arguments.items()
        }
    out = kernel(q, k, v, **arguments)
    out = out.reshape(*query.shape[:-3], heads, n, value.shape[-1])
    return jnp.swapaxes(out, -3, -2)


def attention_fn(
    implementation: str | Kernel, *, is_causal: bool = False, **options: Any
) -> Callable[..., Array]:
    """Makes the argument ``attention_fn`` of Flax's attention layers.

    The result serves `flax.linen.MultiHeadDotProductAttention`,
    `flax.linen.MultiHeadAttention` and `flax.nnx.MultiHeadAttention`. It takes masks as
    Flax makes them, in which other than zero means allowed. There is no dropout of
    attention weights, which linear attention never computes.

    Args:
        implementation: As in `dot_product_attention`.
        is_causal: Whether a token attends only to itself and earlier tokens. Linear
            attention needs it here instead of a causal mask.
        **options: As in `dot_product_attention`.

    Returns:
        A function ``(query, key, value, bias=None, mask=None, **settings)``. It raises
        ValueError for settings that no kernel has: dropout and sown weights.

    Example:
        >>> import flax.linen as nn
        >>> layer = nn.MultiHeadDotProductAttention(
        ...     num_heads=2, attention_fn=attention_fn("favor"))
        >>> x = jnp.ones((1, 7, 8))
        >>> out, _ = layer.init_with_output(jax.random.key(0), x)
        >>> out.shape
        (1, 7, 8)
    """
    causal_here = is_causal

    def attend(
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None = None,
        mask: Array | None = None,
        *,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        broadcast_dropout: bool = True,
        deterministic: bool = False,
        dtype: Any = None,
        precision: jax.lax.PrecisionLike = None,
        module: Any = None,
        is_causal: bool = False,
    ) -> Array:
        del dropout_rng, broadcast_dropout
        if dropout_rate > 0 and not deterministic:
            raise ValueError(
                f"dropout_rate={dropout_rate}: kernels drop no attention weights; "
                "apply dropout to the layer's output"
            )
        if module is not None:
            raise ValueError(
                "kernels return no attention weights: leave out sow_weights=True"
            )
        if dtype is not None:
            query, key, value = (x.astype(dtype) for x in (query, key, value))
        given = options if precision is None else {"precision": precision, **options}
        return dot_product_attention(
            query,
            key,
            value,
            bias,
            None if mask is None else mask != 0,
            is_causal=is_causal or causal_here,
            implementation=implementation,
            **given,
        )

    return attend


def _favor(causal: bool) -> Kernel:
    """Returns linear attention with random features, "favor"."""
    attend = kernels.causal_linear_attention if causal else kernels.linear_attention

    def favor(q, k, v, *, key_mask=None, projection, features="positive", **options):
        if features not in FEATURE_MAPS:
            hint = spec.closest(features, FEATURE_MAPS)
            raise ValueError(f"unknown features {features!r}: {hint}")
        feature_map = functools.partial(FEATURE_MAPS[features], projection=projection)
        return attend(q, k, v, feature_map, key_mask=key_mask, **options)

    return favor


IMPLEMENTATIONS = {"softmax": kernels.softmax_attention, "favor": _favor(causal=False)}
# The causal form of a kernel.
_CAUSAL = {
    kernels.softmax_attention: kernels.causal_softmax_attention,
    IMPLEMENTATIONS["favor"]: _favor(causal=True),
    kernels.linear_attention: kernels.causal_linear_attention,
    kernels.relative_attention: kernels.causal_relative_attention,
    kernels.toeplitz_linear_attention: kernels.causal_toeplitz_linear_attention,
}


def _resolve(implementation, head_dim, options):
    """Returns the kernel with its options, a partial."""
    kernel = implementation
    if isinstance(implementation, str):
        if implementation not in IMPLEMENTATIONS:
            hint = spec.closest(implementation, IMPLEMENTATIONS)
            raise ValueError(f"unknown implementation {implementation!r}: {hint}")
        kernel = IMPLEMENTATIONS[implementation]
    if kernel is IMPLEMENTATIONS["favor"] and "projection" not in options:
        num_features = kernels.default_num_features(head_dim)
        # A constant of the compiled program, not drawn again in every call.
        with jax.ensure_compile_time_eval():
            drawn = kernels.draw_orthogonal(jax.random.key(0), num_features, head_dim)
        options = {**options, "projection": drawn}
    kernel = functools.partial(kernel, **options)
    if list(inspect.signature(kernel.func).parameters)[:3] != ["q", "k", "v"]:
        raise ValueError(
            f"implementation {spec.shorten(implementation)} must be a name or a kernel "
            "of queries, keys and values, (q, k, v, **options)"
        )
    return kernel


def _check_shapes(query, key, value):
    """Checks what the kernels do not: the axes of heads."""
    shapes = f"got shapes {query.shape}, {key.shape} and {value.shape}"
    if min(query.ndim, key.ndim, value.ndim) < 3:
        raise ValueError(
            f"query, key and value must be [*batch, n, heads, head_dim], {shapes}"
        )
    heads, key_heads = query.shape[-2], key.shape[-2]
    if key_heads != value.shape[-2] or key_heads == 0 or heads % key_heads:
        raise ValueError(
            "key and value must have the same number of heads, which divides that of "
            f"query, {shapes}"
        )


def _to_scores(x, name, ndim):
    """Gives a mask or bias the axes of the scores, [*batch, heads, n, m]."""
    if x is None:
        return None
    x = jnp.asarray(x)
    if name == "mask" and x.dtype != bool:
        raise ValueError(
            f"mask must be boolean, True where attention is allowed, got {x.dtype}: "
            "pass an additive mask as bias"
        )
    if x.ndim > ndim and x.shape[0] == 1:
        # jax.nn takes four axes where query has three.
        x = x[0]
    if x.ndim > ndim:
        raise ValueError(
            f"{name} must broadcast to [*batch, heads, n, m], got shape {x.shape}"
        )
    return x.reshape((1,) * (ndim - x.ndim) + x.shape)


def _make_causal(kernel, mask, sizes, ndim):
    """Returns the kernel's causal form, or a causal mask if it takes masks of pairs."""
    if kernel.func is kernels.softmax_attention:
        causal = _to_scores(jnp.tril(jnp.ones(sizes, bool)), "mask", ndim)
        return kernel, causal if mask is None else mask & causal
    if kernel.func in _CAUSAL.values():
        return kernel, mask
    if kernel.func not in _CAUSAL:
        raise ValueError(
            f"{_name(kernel)} has no causal form; choose from "
            + ", ".join(map(_name, _CAUSAL))
        )
    causal = functools.partial(_CAUSAL[kernel.func], *kernel.args, **kernel.keywords)
    return causal, mask


def _mask_arguments(kernel, mask, bias, sizes):
    """Returns the kernel's arguments for a mask and a bias, or raises."""
    arguments = {}
    if bias is not None and kernel.func is not kernels.softmax_attention:
        raise ValueError(
            f"{_name(kernel)} takes no bias of pairs; use implementation='softmax', or "
            "functools.partial(toeplitz_linear_attention, bias=...) with a bias for "
            "each offset"
        )
    if bias is not None:
        arguments["bias"] = jnp.broadcast_to(bias, (*bias.shape[:-2], *sizes))
    if mask is None:
        return arguments
    if mask.shape[-2] == 1:
        mask = mask[..., 0, :]
        arguments["key_mask"] = jnp.broadcast_to(mask, (*mask.shape[:-1], sizes[1]))
        return arguments
    if "mask" not in inspect.signature(kernel.func).parameters:
        raise ValueError(
            f"{_name(kernel)} takes a mask of keys, [batch, 1, 1, m], got shape "
            f"{mask.shape}; use is_causal=True instead of a causal mask, or "
            "implementation='softmax'"
        )
    arguments["mask"] = jnp.broadcast_to(mask, (*mask.shape[:-2], *sizes))
    return arguments


def _split_heads(x, axis, key_heads):
    """Splits an axis of heads, or of size 1, into key heads and groups."""
    if x.shape[axis] == 1:
        return jnp.expand_dims(x, axis)
    return x.reshape(*x.shape[:axis], key_heads, -1, *x.shape[axis + 1 :])


def _name(kernel):
    """Returns the name of a kernel, for messages."""
    return getattr(kernel, "func", kernel).__name__

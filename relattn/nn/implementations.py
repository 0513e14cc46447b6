"""Kernels by name, called with arrays in the layout of `jax.nn`.

`call_kernel` converts masks, causality and grouped queries to the form that a kernel
takes, or raises.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from relattn import kernels
from relattn.kernels.precision import widen
from relattn.kernels.random_projections import draw_constant
from relattn.kernels.softmax import MASKED_SCORE, causal_mask
from relattn.messages import check_choice, closest, shorten
from relattn.nn.attention import split_heads
from relattn.nn.linear_attention import FEATURE_MAPS

Kernel = Callable[..., Array]

# What to do where only softmax attention can.
USE_SOFTMAX = "use implementation='softmax'"


def _random_features(name: str, default: str, causal: bool) -> Kernel:
    """Returns linear attention with random features."""
    attend = kernels.causal_linear_attention if causal else kernels.linear_attention
    own = {"q", "k", "v", "feature_map", "key_mask"}
    known = {*inspect.signature(attend).parameters} - own
    listed = {"projection", "features", "chunk_size", "precision"}

    def kernel(
        q, k, v, *, key_mask=None, projection, features=default, **options
    ) -> Any:
        for option in options:
            if option == "num_features":
                raise ValueError(
                    f"{name} has no option num_features: pass projection="
                    "relattn.draw_orthogonal(key, num_features, head_dim)"
                )
            if option not in known:
                hint = closest(option, listed)
                raise ValueError(f"{name} has no option {option!r}: {hint}")
        check_choice("features", features, FEATURE_MAPS)
        feature_map = functools.partial(FEATURE_MAPS[features], projection=projection)
        return attend(q, k, v, feature_map, key_mask=key_mask, **options)

    kernel.__name__ = name
    return kernel


_DEFAULT_FEATURES = {"favor": "positive", "relu": "relu"}
_RANDOM = {
    name: (
        _random_features(name, default, causal=False),
        _random_features(name, default, causal=True),
    )
    for name, default in _DEFAULT_FEATURES.items()
}
IMPLEMENTATIONS = {
    "softmax": kernels.softmax_attention,
    **{name: forms[0] for name, forms in _RANDOM.items()},
}
# Those of jax.nn, which computes them; None lets it choose.
JAX_NN = (None, "xla", "cudnn")
# The causal form of a kernel.
_CAUSAL = {
    kernels.softmax_attention: kernels.causal_softmax_attention,
    **dict(_RANDOM.values()),
    kernels.linear_attention: kernels.causal_linear_attention,
    kernels.relative_attention: kernels.causal_relative_attention,
    kernels.toeplitz_linear_attention: kernels.causal_toeplitz_linear_attention,
}
_PLAIN = {causal: plain for plain, causal in _CAUSAL.items()}
# Kernels of queries and keys without positions.
_WITHOUT_POSITIONS = {kernels.linear_attention, *IMPLEMENTATIONS.values()}


def resolve(
    implementation: str | Kernel, head_dim: int, options: Mapping[str, Any]
) -> functools.partial[Any]:
    """Returns the kernel with its options, a partial."""
    if not isinstance(implementation, str):
        kernel = implementation
    else:
        if "(" in implementation:
            raise ValueError(
                f"implementation {shorten(implementation)} must be a name: pass its "
                "options as arguments, such as projection="
            )
        names = [*IMPLEMENTATIONS, *JAX_NN[1:]]
        check_choice("implementation", implementation, names)
        kernel = IMPLEMENTATIONS[implementation]
        if implementation in _RANDOM and "projection" not in options:
            num_features = kernels.default_num_features(head_dim)
            drawn = draw_constant(
                lambda key: kernels.draw_orthogonal(key, num_features, head_dim)
            )
            options = {**options, "projection": drawn}
    if "key_mask" in options:
        raise ValueError(
            "dot_product_attention has no option key_mask: pass "
            "mask=key_mask[:, None, None]"
        )
    kernel = functools.partial(kernel, **options)
    if list(inspect.signature(kernel.func).parameters)[:3] != ["q", "k", "v"]:
        raise ValueError(
            f"implementation {shorten(implementation)} must be a name or a kernel "
            "of queries, keys and values, (q, k, v, **options)"
        )
    return kernel


def call_kernel(
    kernel: functools.partial[Any],
    query: Float[Array, "*batch n heads head_dim"],
    key: Float[Array, "*batch m key_heads head_dim"],
    value: Float[Array, "*batch m key_heads value_dim"],
    bias: Float[Array, "..."] | None,
    masks: Sequence[Bool[Array, "..."] | None],
    *,
    is_causal: bool,
    first: int,
    scale: float | Float[Array, ""] | None = None,
    return_residual: bool = False,
) -> Any:
    """Calls a kernel with arrays in the layout of jax.nn.

    Args:
        kernel: What `resolve` returns.
        query: Queries, shape ``[*batch, n, heads, head_dim]``.
        key: Keys, shape ``[*batch, m, key_heads, head_dim]``; ``key_heads`` divides
            ``heads``.
        value: Values, shape ``[*batch, m, key_heads, value_dim]``.
        bias: With the axes of the scores, as `to_scores` returns it.
        masks: All of them must allow a pair; with the axes of the scores.
        is_causal: Whether query i attends only to keys j <= first + i.
        first: The key at which the first query stands.
        scale: Factor of the scores.
        return_residual: Whether to also return the residual.

    Returns:
        Shape ``[*batch, n, heads, value_dim]``, in the dtype of ``value``. With
        ``return_residual``, also the residual, shape ``[*batch, n, heads]``.

    Raises:
        ValueError: If the kernel does not support an argument.
    """
    *batch, n, heads, head_dim = query.shape
    m, key_heads = key.shape[-3:-1]
    if scale is not None:
        # Half precision would round what the scores are multiplied by.
        query = widen(query) * (scale * math.sqrt(head_dim))
    if kernel.func in _PLAIN:
        is_causal = True
        kernel = functools.partial(_PLAIN[kernel.func], *kernel.args, **kernel.keywords)
    arguments, query_mask = _sort_masks(masks, (n, m))
    if bias is not None:
        arguments["bias"] = jnp.broadcast_to(bias, (*bias.shape[:-2], n, m))
    is_softmax = kernel.func is kernels.softmax_attention
    window = kernel.keywords.get("window") if is_softmax else None
    # The last token alone sees all keys.
    in_order = is_causal and (first != m - 1 or window is not None)
    if in_order and is_softmax and (n != m or return_residual or "mask" in arguments):
        options = {k: x for k, x in kernel.keywords.items() if k != "window"}
        kernel = functools.partial(kernel.func, *kernel.args, **options)
        past = causal_mask(first, n, m, window)
        past = jnp.expand_dims(past, range(len(batch) + 1))
        arguments["mask"] = past & arguments.get("mask", True)
        in_order = False
    _check_supported(kernel, arguments, is_causal, return_residual, (n, m))
    if in_order:
        kernel = _causal_form(kernel, n)
    if return_residual:
        kernel = functools.partial(kernel, return_logsumexp=True)
    parameters = inspect.signature(kernel.func).parameters
    _check_options(name_of(kernel), kernel.keywords, parameters)
    # To [*batch, heads, n, head_dim]; grouped queries to [*batch, key_heads, group, n,
    # head_dim], against keys and values with a group of one.
    q, k, v = (jnp.swapaxes(x, -3, -2) for x in (query, key, value))
    if key_heads != heads:
        q = q.reshape(*q.shape[:-3], key_heads, heads // key_heads, n, head_dim)
        k, v = k[..., None, :, :], v[..., None, :, :]
        arguments = {
            name: split_heads(x, len(batch), key_heads) for name, x in arguments.items()
        }
    if in_order and n != m:
        q, k, v, arguments = _align(q, k, v, arguments, first)
    outs = kernel(q, k, v, **arguments)
    if isinstance(outs, tuple) != return_residual:
        raise ValueError(
            f"{name_of(kernel)} must return its output alone: leave out options such "
            "as return_state and return_normalizer"
        )
    out, *residual = outs if return_residual else (outs,)
    # Without what `_align` put before the queries.
    out = out[..., out.shape[-2] - n :, :]
    out = out.reshape(*batch, heads, n, value.shape[-1])
    if query_mask is not None:
        out = jnp.where(query_mask[..., None], out, 0)
    out = jnp.swapaxes(out, -3, -2)
    if not return_residual:
        return out
    residual = residual[0].reshape(*batch, heads, n)
    if query_mask is not None:
        residual = jnp.where(query_mask, residual, MASKED_SCORE)
    residual = jax.lax.stop_gradient(residual.astype(key.dtype))
    return out, jnp.swapaxes(residual, -2, -1)


def _causal_form(kernel, n):
    """Returns the causal form of a kernel, which has no grid: tokens are a line."""
    options = dict(kernel.keywords)
    grid = options.pop("grid", (n,))
    if tuple(grid) != (n,) or options.pop("num_prefix", 0):
        raise ValueError(
            f"{name_of(kernel)} with is_causal=True needs a line of tokens without "
            f"prefix, grid=({n},), got grid={grid}"
        )
    return functools.partial(_CAUSAL[kernel.func], *kernel.args, **options)


def _align(q, k, v, arguments, first):
    """Gives causal attention as many queries as keys, query i at key ``first + i``.

    Zeros stand for the queries before the first. Keys after the last query are left
    out, and missing ones masked.
    """
    q = jnp.pad(q, [(0, 0)] * (q.ndim - 2) + [(first, 0), (0, 0)])
    n, m = q.shape[-2], k.shape[-2]
    if n == m:
        return q, k, v, arguments
    key_mask = arguments.get("key_mask", jnp.ones((1,) * (k.ndim - 2) + (m,), bool))
    if n < m:
        k, v, key_mask = k[..., :n, :], v[..., :n, :], key_mask[..., :n]
    else:
        rows = [(0, n - m), (0, 0)]
        k, v = (jnp.pad(x, [(0, 0)] * (x.ndim - 2) + rows) for x in (k, v))
        key_mask = jnp.pad(key_mask, [(0, 0)] * (key_mask.ndim - 1) + [(0, n - m)])
    return q, k, v, {**arguments, "key_mask": key_mask}


def check_shapes(query: Array, key: Array, value: Array) -> None:
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


def _check_supported(kernel, arguments, is_causal, return_residual, sizes):
    """Raises if the kernel does not support an argument."""
    n, m = sizes
    name = name_of(kernel)
    if is_causal and kernel.func not in _CAUSAL:
        raise ValueError(
            f"{name} has no causal form: choose from "
            f"{', '.join(map(name_of, _CAUSAL))}, or leave out is_causal=True"
        )
    if is_causal and n != m and kernel.func not in _WITHOUT_POSITIONS:
        raise ValueError(
            f"{name} with is_causal=True needs as many queries as keys, whose "
            f"positions it uses, got {n} queries and {m} keys: to decode, use the "
            "layers of relattn.nn"
        )
    if "bias" in arguments and kernel.func is not kernels.softmax_attention:
        raise ValueError(
            f"{name} takes no bias of pairs: {USE_SOFTMAX}, or "
            "functools.partial(toeplitz_linear_attention, bias=...) with a bias for "
            "each offset"
        )
    if return_residual and kernel.func is not kernels.softmax_attention:
        raise ValueError(
            f"{name} computes no scores, whose exponentials return_residual=True sums: "
            f"{USE_SOFTMAX}"
        )
    if "mask" in arguments and not takes(kernel, "mask"):
        raise ValueError(
            f"{name} takes a mask of keys, [batch, 1, 1, m], got shape "
            f"{arguments['mask'].shape}: use is_causal=True instead of a causal mask, "
            "and mask=key_mask[:, None, None], or key_mask= of attention_fn, instead "
            "of a padding mask (relattn.split_attention_mask splits Flax's masks "
            f"apart), or {USE_SOFTMAX}"
        )
    if "key_mask" in arguments and not takes(kernel, "key_mask"):
        raise ValueError(f"{name} takes no mask of keys: {USE_SOFTMAX}")


def _check_options(name, options, parameters):
    """Raises for options that a kernel does not have."""
    kinds = {parameter.kind for parameter in parameters.values()}
    for option in options:
        if option not in parameters and inspect.Parameter.VAR_KEYWORD not in kinds:
            hint = closest(option, [*parameters][3:])
            raise ValueError(f"{name} has no option {option!r}: {hint}")


def takes(kernel: functools.partial[Any], name: str) -> bool:
    """Returns whether a kernel, a partial, has a parameter."""
    return name in inspect.signature(kernel.func).parameters


def to_scores(x: ArrayLike | None, name: str, scores: tuple[int, ...]) -> Array | None:
    """Gives a mask or bias the axes of the scores, [*batch, heads, n, m]."""
    if x is None:
        return None
    x = jnp.asarray(x)
    if name == "mask" and x.dtype != bool:
        raise ValueError(
            f"mask must be boolean, True where attention is allowed, got {x.dtype}: "
            "pass an additive mask as bias"
        )
    shape = x.shape
    if x.ndim > len(scores) and shape[0] == 1:
        # jax.nn takes four axes where query has three.
        x = x[0]
    if x.ndim <= len(scores):
        x = x.reshape((1,) * (len(scores) - x.ndim) + x.shape)
        if all(size in (1, other) for size, other in zip(x.shape, scores, strict=True)):
            return x
    raise ValueError(
        f"{name} must broadcast to [*batch, heads, n, m] = {scores}, got shape {shape}"
    )


def _sort_masks(masks, sizes):
    """Combines masks of pairs and of keys to arguments, and those of queries."""
    n, m = sizes
    found: dict[str, Array] = {}
    for mask in masks:
        if mask is None:
            continue
        if mask.shape[-2] == 1:
            name, mask = "key_mask", mask[..., 0, :]
            mask = jnp.broadcast_to(mask, (*mask.shape[:-1], m))
        elif mask.shape[-1] == 1:
            name, mask = "query_mask", mask[..., 0]
        else:
            name = "mask"
        found[name] = mask & found.get(name, True)
    return found, found.pop("query_mask", None)


def name_of(kernel: Kernel) -> str:
    """Returns the name of a kernel, for messages."""
    return getattr(kernel, "func", kernel).__name__

"""Features of images: the CLS token, the mean of the patches, and layers' tokens."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from relattn.models.vit import ViT
from relattn.nn.blocks import TransformerBlock, make_norm

# Where the blocks' outputs are recorded.
_COLLECTION, _OUTPUT = "intermediates", "block_output"
_BLOCK = re.compile(r"blocks?_\d+")


class ImageFeatures(NamedTuple):
    """Features of a batch of images, float32.

    Attributes:
        pooled: What the model's head reads, or would read, ``[batch, dim]``, or
            ``[batch, 2 dim]`` with ``pool="cls_mean"``.
        cls: The CLS token after the last layer, ``[batch, dim]``; None for a model
            without one.
        mean: The mean of the patch tokens after the last layer, ``[batch, dim]``.
        tokens: For each chosen layer all tokens after it, ``[batch, n, dim]``: prefix
            tokens (CLS, then registers) first, then patches row by row.
    """

    pooled: Any
    cls: Any
    mean: Any
    tokens: list[Any]


def features(
    model: nn.Module,
    variables: Mapping[str, Any],
    inputs: Float[Array, "batch height width channels"],
    *,
    layers: Sequence[int] = (-1,),
    norm: bool = True,
) -> ImageFeatures:
    """Computes features of images by a ViT, with or without a head.

    Where the model's final norm precedes the pooling, it is applied to ``cls`` and
    ``mean``, and with ``norm`` to ``tokens`` of every layer.

    Args:
        model: A `ViT`, or a `Performer` or another of its settings.
        variables: Its variables.
        inputs: Preprocessed images.
        layers: The layers whose tokens are returned, from 0; negative numbers count
            from the last, which is -1.
        norm: Whether the final norm is applied to ``tokens``.

    Returns:
        The features.

    Raises:
        ValueError: If the model is not a `ViT`, or has no such layer.

    Example:
        >>> model = ViT(10, dim=8, num_heads=2, num_layers=3, num_registers=2)
        >>> images = jnp.ones((1, 32, 32, 1))
        >>> variables = model.init(jax.random.key(0), images)
        >>> found = features(model, variables, images, layers=(0, -1))
        >>> found.pooled.shape, found.mean.shape
        ((1, 8), (1, 8))
        >>> [tokens.shape for tokens in found.tokens]
        [(1, 7, 8), (1, 7, 8)]
    """
    return features_fn(model, layers, norm)(variables, inputs)


def features_fn(
    model: nn.Module, layers: Sequence[int], norm: bool
) -> Callable[[Any, Any], ImageFeatures]:
    """Returns the compiled function of variables and inputs; see `features`."""
    if not isinstance(model, ViT):
        raise ValueError(
            "features needs a model whose tokens are patches, such as 'vit', got "
            f"{type(model).__name__}"
        )
    if not isinstance(layers, Sequence):
        raise ValueError(f"layers must be a list, such as [-1], got {layers!r}")
    count = model.num_layers
    for layer in layers:
        if layer not in range(-count, count):
            raise ValueError(
                f"layers has {layer!r}, but the model has {count} layers: expected "
                f"{-count} .. {count - 1}"
            )
    return functools.partial(_features, model, tuple(layers), norm)


# Of the module, so that a second call with an equal model does not compile again.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _features(
    model: ViT, layers: tuple[int, ...], norm: bool, variables: Any, inputs: Any
) -> ImageFeatures:
    # Without a head, the output is what it would read.
    headless = model.clone(num_classes=0)
    is_normed = model.final_norm and not model.fc_norm
    with nn.intercept_methods(_record):
        pooled, found = headless.apply(variables, inputs, mutable=[_COLLECTION])
    outputs: dict[int, Array] = {}
    for name, part in found[_COLLECTION].items():
        if _BLOCK.fullmatch(name) is None:
            continue
        kind, first = name.split("_")
        out = jnp.asarray(part[_OUTPUT][0])
        out = out if kind == "blocks" else out[None]
        outputs |= {int(first) + index: x for index, x in enumerate(out)}

    def final(x: Array) -> Array:
        if not is_normed:
            return x.astype(jnp.float32)
        final_norm = make_norm(model.norm_type, model.norm_eps, model.dtype)()
        params = {"params": variables["params"]["norm"]}
        return jnp.asarray(final_norm.apply(params, x), jnp.float32)

    last = final(outputs[model.num_layers - 1])
    tokens = [outputs[layer % model.num_layers] for layer in layers]
    return ImageFeatures(
        pooled,
        last[:, 0] if model.has_class_token else None,
        last[:, model.num_prefix :].mean(axis=1),
        [final(x) if norm else x.astype(jnp.float32) for x in tokens],
    )


def _record(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """Sows the output of a block."""
    out = call(*args, **kwargs)
    is_block = isinstance(context.module, TransformerBlock)
    if is_block and context.method_name == "__call__":
        # A layer may be traced twice: the last output replaces the one before.
        context.module.sow(_COLLECTION, _OUTPUT, out, reduce_fn=lambda _, new: (new,))
    return out

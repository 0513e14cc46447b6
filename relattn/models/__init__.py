"""Models built from the attention modules."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from relattn import spec
from relattn.models.performer import Performer as Performer

MODELS = {"performer": Performer}

__all__ = ["MODELS", "Performer", "build_model"]


def build_model(
    config: ConfigDict | Mapping[str, Any],
    *,
    num_classes: int,
    image_shape: tuple[int, int, int],
) -> nn.Module:
    """Builds the model of ``config.model`` and checks it against the data.

    Args:
        config: ``name`` of the model and the values of its attributes.
        num_classes: Number of classes of the data.
        image_shape: Height, width and channels of the images as the model sees them.

    Returns:
        The module, called on images ``[batch, height, width, channels]``.

    Raises:
        ValueError: If a name, an option or a size does not fit.

    Example:
        >>> model = build_model(
        ...     {"name": "performer", "dim": 8, "heads": 2},
        ...     num_classes=3, image_shape=(4, 4, 1))
        >>> model.heads
        2
    """
    options = dict(config)
    name = options.pop("name")
    if name not in MODELS:
        raise ValueError(
            f"unknown config.model.name {name!r}: {spec.closest(name, MODELS)}"
        )
    known = list(inspect.signature(MODELS[name]).parameters)
    for option in options:
        if option not in known:
            raise ValueError(
                f"model {name!r} has no option {option!r}: "
                f"{spec.closest(option, known)}"
            )
    if "dtype" in options:
        try:
            options["dtype"] = jnp.dtype(options["dtype"])
        except TypeError:
            raise ValueError(
                f"unknown config.model.dtype {options['dtype']!r}: choose float32, "
                "bfloat16 or float16"
            ) from None
    model = MODELS[name](num_classes=num_classes, **options)
    # Tracing is cheap and finds every size that does not fit, before any work.
    jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, *image_shape)))
    return model

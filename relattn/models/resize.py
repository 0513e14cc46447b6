"""Trained parameters for another grid of tokens than the one they were trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn

from relattn.models.cnn import CNN
from relattn.nn.registry import build
from relattn.offsets import Grid


def resize_grid(
    model: nn.Module, variables: Mapping[str, Any], old: Grid, new: Grid
) -> dict[str, Any]:
    """Resizes what depends on the grid, so that a model sees images of another size.

    Tables with a row for every place, offset, row or column (`learned`,
    `relative_key`, `relative_value`, `relative_bias`, `irpe_gate`) are stretched,
    bicubically, and rows of prefix tokens kept. Functions of the position have nothing
    to resize: positions count tokens, and go on where the old grid ends. A
    convolutional network has nothing that depends on the grid.

    Args:
        model: Of `relattn.models.build_model`; the size of its images does not matter.
        variables: Its variables, trained on images of ``old`` tokens.
        old: Height and width in tokens, of a convolutional network in pixels, or the
            length of a text.
        new: Those that are wanted.

    Returns:
        The variables for ``new``; what does not depend on the grid is the same.

    Raises:
        ValueError: If the model has parameters that belong to one grid only, or
            ``variables`` are not of ``old``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from relattn.models import build_model
        >>> model = build_model(
        ...     {"name": "performer", "dim": 8, "num_heads": 2, "num_layers": 1,
        ...      "position": "learned"}, num_classes=3, image_shape=(2, 3, 1))
        >>> variables = jax.eval_shape(
        ...     model.init, jax.random.key(0), jnp.ones((1, 2, 3, 1)))
        >>> resize = lambda x: resize_grid(model, x, (2, 3), (5, 4))
        >>> variables = jax.eval_shape(resize, variables)
        >>> variables["params"]["position"]["table"].shape
        (20, 8)

    Source:
        Dosovitskiy et al., An Image is Worth 16x16 Words, section 3.2.
    """
    if isinstance(model, CNN):
        return dict(variables)
    attention, make_position = build(
        model.attention,
        model.position,
        dim=model.dim,
        num_heads=model.num_heads,
        num_layers=model.num_layers,
        causal=model.inputs == "tokens",
    )
    if old == new:
        return dict(variables)
    if attention.func.has_grid_tables:
        shown = ["x".join(map(str, grid)) for grid in (old, new)]
        raise ValueError(
            f"attention {model.attention!r} has matrices that belong to the grid of "
            f"{shown[0]} tokens, which have no meaning on one of {shown[1]}: train on "
            "the grid that you evaluate on"
        )
    params = dict(variables["params"])
    if "position" in params:
        params["position"] = make_position().resize(
            params["position"], old, new, model.num_prefix
        )
    return {**variables, "params": params}

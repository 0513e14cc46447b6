"""Resizes trained parameters to another grid of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import unfreeze

from relattn.models.cnn import CNN
from relattn.models.gpt import GPT
from relattn.models.points import PointTransformer
from relattn.models.vit import ViT
from relattn.nn.registry import build
from relattn.offsets import Grid, Torus, check_axes


def resize_grid(
    model: nn.Module, variables: Mapping[str, Any], old: Grid, new: Grid
) -> dict[str, Any]:
    """Resizes the parameters that depend on the grid, for inputs of another size.

    Tables with a row for each position, offset, row or column (`learned`,
    `relative_key`, `relative_value`, `relative_bias`, `irpe_gate`) are interpolated
    bicubically; rows of prefix tokens are kept. Functions of the position need no
    resizing: positions count tokens and continue beyond the old grid. Waves that fit a
    torus a whole number of times keep this number. Convolutional networks and models of
    points have no parameters that depend on a grid.

    For a shorter text, every table keeps the rows of its positions or offsets, also the
    matrices of Translution, so the model computes the same as before.

    Args:
        model: A model from `relattn.models.build_model`, for inputs of any size.
        variables: Its variables, trained on the grid ``old``.
        old: Height and width in tokens (for a convolutional network in pixels), or the
            length of a text, ``(160,)``.
        new: The new grid, in the same units.

    Returns:
        The variables for ``new``; those that do not depend on the grid are unchanged.

    Raises:
        ValueError: If a grid is not a tuple of positive whole numbers or lacks the
            axes of the model's inputs, parameters of the model cannot be resized, or
            the shapes of ``variables`` are not those of ``old``.

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
    for grid in (old, new):
        check_axes(grid)
    if isinstance(model, CNN | PointTransformer):
        return dict(variables)
    if not isinstance(model, GPT | ViT):
        if old == new:
            return dict(variables)
        raise ValueError(
            f"the parameters of {type(model).__name__}, which is not a model of "
            "relattn, cannot be resized: train on the size of the evaluation"
        )
    is_text = model.inputs == "tokens"
    if len(old) != len(new) or is_text != (len(old) == 1):
        raise ValueError(
            f"grids {old} and {new} do not fit a model of {model.inputs}: both need "
            + ("one axis" if is_text else "two axes, or three for volumes")
        )
    attention, make_position = build(
        model.attention,
        model.position,
        dim=model.dim,
        head_dim=model.head_dim,
        num_heads=model.num_heads,
        num_layers=model.num_layers,
        causal=is_text,
    )
    if old == new:
        return dict(variables)
    if isinstance(model, GPT) and new < old:
        return {**variables, "params": _cut(model, variables["params"], *old, *new)}
    if attention(parent=None).has_grid_tables:
        shown = ["x".join(map(str, grid)) for grid in (old, new)]
        raise ValueError(
            f"attention {model.attention!r} has matrices for the grid of {shown[0]} "
            f"tokens, which cannot be resized to {shown[1]}: train on the grid of the "
            "evaluation"
        )
    # A torus has other offsets than a plain grid.
    if getattr(model, "periodic", False):
        old, new = Torus(old), Torus(new)
    params = dict(variables["params"])
    if "position" in params:
        params["position"] = make_position().resize(
            params["position"], old, new, model.num_prefix
        )
    return {**variables, "params": params}


def _cut(model: GPT, params: Any, old: int, new: int) -> Any:
    """Keeps the rows of tables that a shorter text needs."""
    token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    full, like = (
        jax.eval_shape(
            model.clone(context_length=length).init, jax.random.key(0), token
        )["params"]
        for length in (old, new)
    )
    params = unfreeze(params)
    if jax.tree.map(jnp.shape, params) != jax.tree.map(jnp.shape, full):
        raise ValueError(
            f"the variables are not those of this model with a context of {old} "
            "tokens: pass the context length of training as old"
        )
    # The first row kept of the positions 0 .. old - 1, or the offsets 0 .. old - 1 of
    # causal attention; and of the offsets -(old - 1) .. old - 1.
    starts = {(old, new): 0, (2 * old - 1, 2 * new - 1): old - new}

    def cut(table: Any, kept: Any) -> Any:
        for axis, sizes in enumerate(zip(table.shape, kept.shape, strict=True)):
            if sizes[0] != sizes[1]:
                start = starts[sizes]
                table = jax.lax.slice_in_dim(table, start, start + sizes[1], axis=axis)
        return table

    return jax.tree.map(cut, params, like)

"""Parameters whose shape depends on the grid."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from relattn.offsets import Grid


def grid_table(
    module: nn.Module,
    name: str,
    init: nn.initializers.Initializer,
    shape: tuple[int, ...],
    grid: Grid,
    *,
    whose: str,
    remedy: str = "",
) -> Float[Array, "..."]:
    """A parameter whose shape depends on the grid; refuses the table of another grid.

    Args:
        module: The module that owns the parameter, in its ``__call__``.
        name: The parameter's name.
        init: How it starts.
        shape: Its shape.
        grid: Height and width, or length, in tokens.
        whose: What has the table, for the message.
        remedy: What to do instead, for the message.

    Returns:
        The parameter, float32.

    Raises:
        ValueError: If the module holds a table of another shape.
    """
    if module.has_variable("params", name):
        found = module.get_variable("params", name).shape
        if found != shape:
            raise ValueError(
                f"{whose} {name} has shape {found}; a grid of "
                f"{'x'.join(map(str, grid))} tokens needs {shape}: give images or "
                f"sequences of the size that the model was made for{remedy}"
            )
    return module.param(name, init, shape, jnp.float32)

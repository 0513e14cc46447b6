"""Resizes position tables from one grid to another."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from relattn.kernels.checks import check_arguments
from relattn.kernels.precision import widen
from relattn.offsets import Grid, check_axes


@check_arguments
def resize_table(
    table: Float[Array | np.ndarray, "..."],
    old: Grid,
    new: Grid,
    *,
    axis: int = 0,
    num_others: int = 0,
    antialias: bool = True,
) -> Float[Array, "..."]:
    """Interpolates a table with one row per grid position, bicubically.

    new(p) = sum_q kernel((p' - q) / max(scale, 1)) old(q) / the sum of kernels, axis by
    axis, with scale = old size / new size and p' = (p + 1/2) scale - 1/2: the centres
    of positions lie at half-integers of both grids. To a smaller grid, the wider kernel
    averages. Without ``antialias``, the scale of the kernel is 1, and old(q) beyond the
    grid is that of its border, as in PyTorch.

    Args:
        table: Its ``axis`` has the rows of the grid, numbered row by row, and then
            ``num_others`` rows without a position, which are kept.
        old: Size of each axis of the table's grid.
        new: Size of each axis of the new grid.
        axis: The axis of the rows.
        num_others: Number of rows after those of the grid.
        antialias: Whether the kernel becomes wider on a smaller grid.

    Returns:
        The table of the new grid, in the dtype of ``table``. Along ``axis`` it has the
        rows of the new grid and then the ``num_others`` rows.

    Raises:
        ValueError: If shapes or dtypes do not fit together, the table does not have the
            rows of the old grid, or the grids differ in their number of axes or are no
            tuples of sizes.

    Example:
        >>> resize_table(jnp.array([1.0, 3.0, 99.0]), (2,), (4,), num_others=1).shape
        (5,)

    Source:
        Dosovitskiy et al., An Image is Worth 16x16 Words, section 3.2; cubic kernel:
        Keys, Cubic Convolution Interpolation for Digital Image Processing (a = -1/2;
        without ``antialias`` a = -3/4, as ``torch.nn.functional.interpolate`` has it).
    """
    for grid in (old, new):
        check_axes(grid)
    if len(old) != len(new):
        raise ValueError(
            f"a table of {len(old)} axes cannot be resized to {len(new)}: expected a "
            f"new grid like {old}, got {new}"
        )
    rows = math.prod(old)
    if table.shape[axis] != rows + num_others:
        raise ValueError(
            f"a table of the grid {'x'.join(map(str, old))} has {rows + num_others} "
            f"rows, got {table.shape[axis]}: pass the grid of the table as old"
        )
    # Rows first; those of the grid as height and width.
    moved = jnp.moveaxis(jnp.asarray(table), axis, 0)
    rest = moved.shape[1:]
    on_grid = moved[:rows].reshape(*old, *rest)
    # sum_q kernel((p' - q) / max(scale, 1)) old(q) / the sum of kernels
    if antialias:
        on_grid = jax.image.resize(widen(on_grid), (*new, *rest), "cubic")
    else:
        on_grid = widen(on_grid)
        for place, sizes in enumerate(zip(old, new, strict=True)):
            weights = jnp.asarray(_cubic_weights(*sizes), on_grid.dtype)
            on_grid = jnp.tensordot(weights, on_grid, (1, place), precision="highest")
            on_grid = jnp.moveaxis(on_grid, 0, place)
    on_grid = on_grid.astype(moved.dtype).reshape(-1, *rest)
    resized = jnp.concatenate([on_grid, moved[rows:]])
    return jnp.moveaxis(resized, 0, axis)


def _cubic_weights(old: int, new: int) -> Float[np.ndarray, "{new} {old}"]:
    """Returns the weight of each old position in a new one, as PyTorch (a = -3/4)."""
    a, weights = -0.75, np.zeros((new, old))
    at = (np.arange(new) + 0.5) * old / new - 0.5
    first = np.floor(at).astype(int)
    for step in range(-1, 3):
        t = np.abs(at - first - step)
        near = (a + 2) * t**3 - (a + 3) * t**2 + 1
        far = a * (t**3 - 5 * t**2 + 8 * t - 4)
        columns = np.clip(first + step, 0, old - 1)
        np.add.at(weights, (np.arange(new), columns), np.where(t <= 1, near, far))
    return weights

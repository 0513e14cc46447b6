"""Tables of one grid resized for another."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from relattn.kernels.checks import check_arguments
from relattn.kernels.precision import widen
from relattn.offsets import Grid


@check_arguments
def resize_table(
    table: Float[Array | np.ndarray, "..."],
    old: Grid,
    new: Grid,
    *,
    axis: int = 0,
    num_others: int = 0,
) -> Float[Array, "..."]:
    """Interpolates a table with a row for every place on a grid, bicubically.

    The centres of the places lie at half-integers of both grids, stretched over each
    other. A smaller grid is averaged, by the cubic kernel as wide as the old places.

    Args:
        table: Its ``axis`` has the rows of the grid, numbered row by row, and then
            ``num_others`` rows of no place, which are kept.
        old: Height and width, or length, of the table's grid.
        new: Those of the grid that is wanted.
        axis: The axis of the rows.
        num_others: Number of rows after those of the grid.

    Returns:
        The table of the new grid, in the dtype of ``table``.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        ValueError: If the table has not the rows of the old grid, or the new one has
            another number of axes.

    Example:
        >>> resize_table(jnp.array([1.0, 3.0, 99.0]), (2,), (4,), num_others=1).shape
        (5,)

    Source:
        Dosovitskiy et al., An Image is Worth 16x16 Words, section 3.2; cubic kernel:
        Keys, Cubic Convolution Interpolation for Digital Image Processing (a = -1/2).
    """
    if len(old) != len(new):
        raise ValueError(
            f"a table of {len(old)} axes cannot be resized to {len(new)}: expected a "
            f"new grid like {old}, got {new}"
        )
    rows = math.prod(old)
    if table.shape[axis] != rows + num_others:
        raise ValueError(
            f"a table of the grid {'x'.join(map(str, old))} has {rows + num_others} "
            f"rows, got {table.shape[axis]}: name the grid that it was made for"
        )
    moved = jnp.moveaxis(jnp.asarray(table), axis, 0)
    rest = moved.shape[1:]
    places = moved[:rows].reshape(*old, *rest)
    places = jax.image.resize(widen(places), (*new, *rest), "cubic").astype(moved.dtype)
    resized = jnp.concatenate([places.reshape(-1, *rest), moved[rows:]])
    return jnp.moveaxis(resized, 0, axis)

"""Tables of Translution in which far offsets share one matrix."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from relattn.kernels.checks import check_arguments
from relattn.offsets import Grid, Torus, num_table_rows


@check_arguments
def expand_clipped_table(
    table: Float[Array, "rows width heads head_dim"],
    *,
    grid: Grid,
    clip: int,
    num_prefix: int = 0,
    causal: bool = False,
) -> Float[Array, "more_rows width heads head_dim"]:
    """Makes a table with a row for each offset from one in which far offsets share one.

    Offsets of at most ``clip`` along each axis are near and have a matrix each, in the
    order of `relattn.offsets.offset_index` on a grid of clip + 1 tokens per axis. All
    others share the next row. The rows of prefix tokens follow.

    The table fits a grid of any size. Its expansion, which attention reads, has the
    size of a table for that grid.

    Args:
        table: Shape ``[rows, width, heads, head_dim]``, with the rows of
            `relattn.offsets.num_table_rows` for ``clip``.
        grid: Size of each axis, in tokens.
        clip: Largest component of a near offset.
        num_prefix: Number of prefix tokens.
        causal: Whether the rows are those of the offsets 0, 1, ... only.

    Returns:
        A table for `translution` and `lor_translution`, with a row for each offset.

    Raises:
        ValueError: If shapes or dtypes do not fit together, the table has another
            number of rows, or `relattn.offsets.num_table_rows` raises it.

    Example:
        >>> table = jnp.arange(4.0).reshape(4, 1, 1, 1)  # d = -1, 0, 1, and the rest
        >>> expand_clipped_table(table, grid=(4,), clip=1).ravel().tolist()
        [3.0, 3.0, 0.0, 1.0, 2.0, 3.0, 3.0]

    Source:
        Translution: Unifying Self-attention and Convolution, section 5, suggests it.
    """
    expected = num_table_rows(grid, num_prefix, causal=causal, clip=clip)
    if table.shape[0] != expected:
        raise ValueError(
            f"a table clipped at {clip} needs {expected} rows, got {table.shape[0]}"
        )
    matrix = table.shape[1:]
    if causal:
        # d = 0 .. clip, then the rest.
        near, far = table[: min(clip + 1, grid[0])], table[clip + 1]
        far = jnp.broadcast_to(far, (grid[0] - len(near), *matrix))
        return jnp.concatenate([near, far])
    axes, side = len(grid), 2 * clip + 1
    near = table[: side**axes].reshape(*[side] * axes, *matrix)
    far, prefix = table[side**axes], table[side**axes + 1 :]
    is_near = np.ones([1] * axes, bool)
    widths, starts = [(0, 0)] * near.ndim, []
    for axis, size in enumerate(grid):
        first, last = 1 - size, size - 1
        if isinstance(grid, Torus):
            # The shortest offsets.
            first, last = -((size - 1) // 2), size // 2
        start, stop = max(first, -clip), min(last, clip)
        near = jax.lax.slice_in_dim(near, start + clip, stop + clip + 1, axis=axis)
        widths[axis] = start - first, last - stop
        offsets = np.abs(np.arange(first, last + 1)) <= clip
        is_near = is_near & np.expand_dims(
            offsets, [a for a in range(axes) if a != axis]
        )
        starts.append(first)
    mask = is_near.reshape(*is_near.shape, *[1] * len(matrix))
    full = jnp.where(mask, jnp.pad(near, widths), far)
    if isinstance(grid, Torus):
        # Offset 0 first.
        full = jnp.roll(full, starts, axis=tuple(range(axes)))
    return jnp.concatenate([full.reshape(-1, *matrix), prefix])

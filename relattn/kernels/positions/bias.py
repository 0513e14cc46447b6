"""Biases that are functions of the offset, and tables with a row for each offset."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from relattn.kernels.checks import at_most, bound_hint, check_arguments
from relattn.kernels.platform import platform_defaults
from relattn.kernels.precision import widen
from relattn.offsets import (
    Grid,
    PrefixRow,
    Torus,
    num_offsets,
    offset_index,
    offsets_per_axis,
)


@check_arguments
def offset_buckets(
    offsets: Int[np.ndarray, "..."],
    *,
    num_buckets: int = 32,
    max_distance: int = 128,
    bidirectional: bool = True,
) -> Int[np.ndarray, "..."]:
    """Computes the T5 bucket of every offset along an axis.

    bucket(d) = |d| if |d| < half, else half + floor(half log(|d| / half) /
    log(max_distance / half)), at most 2 half - 1, with 2 half buckets per direction.
    Negative offsets (later keys) use the second half of the buckets.

    Args:
        offsets: Query position minus key position, in tokens.
        num_buckets: Number of buckets.
        max_distance: Distances from this one on share the last bucket, in tokens.
        bidirectional: Whether half of the buckets are for later keys. Otherwise all
            later keys share the bucket of offset zero.

    Returns:
        Buckets 0 .. ``num_buckets`` - 1, same shape as ``offsets``.

    Raises:
        ValueError: If the offsets or a number are not whole, ``num_buckets`` cannot be
            split evenly, or ``max_distance`` is at most half the buckets of a
            direction.

    Example:
        >>> offset_buckets(np.array([0, 1, 7, 8, 16, 127, 999, -1])).tolist()
        [0, 1, 7, 8, 10, 15, 15, 17]

    Source:
        Raffel et al., Exploring the Limits of Transfer Learning (T5), section 2.1; the
        boundaries: its published code.
    """
    sides = 2 if bidirectional else 1
    num_exact = num_buckets // sides // 2
    if num_buckets % (2 * sides) or num_exact < 1 or max_distance <= num_exact:
        raise ValueError(
            f"offset buckets need num_buckets divisible by {2 * sides} and max_distance"
            f" > num_buckets / {2 * sides}, got num_buckets={num_buckets} and "
            f"max_distance={max_distance}"
        )
    offsets = np.asarray(offsets)
    distances = np.abs(offsets) if bidirectional else np.maximum(offsets, 0)
    # half log(|d| / half) / log(max_distance / half)
    growth = np.log(np.maximum(distances, num_exact) / num_exact)
    growth = growth / math.log(max_distance / num_exact) * num_exact
    # Rounding must not move a boundary into the bucket below it.
    far = num_exact + np.floor(growth + 1e-6).astype(int)
    buckets = np.where(distances < num_exact, distances, far)
    buckets = np.minimum(buckets, num_buckets // sides - 1)
    return buckets + num_buckets // 2 * (offsets < 0) if bidirectional else buckets


@check_arguments
def wave_bias(
    offsets: Int[np.ndarray, "rows axes"],
    frequencies: Float[Array, "waves axes"],
    coefficients: Float[Array, "*heads waves 2"],
) -> Float[Array, "*heads rows"]:
    """Computes a bias that is a sum of plane waves of the offset.

    b(d) = sum_r a_r cos(w_r . d) + b_r sin(w_r . d)

    Args:
        offsets: Offsets d in tokens, shape ``[rows, axes]``.
        frequencies: Vectors w_r in radians per token, shape ``[waves, axes]``.
        coefficients: (a_r, b_r), shape ``[*heads, waves, 2]``.

    Returns:
        Biases, float32 or wider, shape ``[*heads, rows]``.

    Raises:
        ValueError: If shapes or dtypes do not fit together.

    Example:
        >>> d = np.array([[-1], [0], [1]])
        >>> wave = jnp.array([[jnp.pi / 2]]), jnp.array([[0.0, 1.0]])
        >>> wave_bias(d, *wave).round(3).tolist()
        [-1.0, 0.0, 1.0]

    Source:
        Horn et al., Translational Equivariance in Kernelizable Attention, lemma 1, for
        waves along the axes.
    """
    # In half precision, large angles lose their phase.
    frequencies = widen(frequencies)
    d = jnp.asarray(offsets, frequencies.dtype)
    angles = jnp.sum(d[:, None] * frequencies, axis=-1)
    # sum_r a_r cos(w_r . d) + b_r sin(w_r . d)
    waves = jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=-1)
    coefficients = widen(coefficients)
    return jnp.sum(coefficients[..., None, :, :] * waves, axis=(-2, -1))


def longer_axes(grid: Grid) -> Grid:
    """Returns a grid without its axes of one token, whose only offset is zero.

    Tokens and table rows have the same order.

    Example:
        >>> longer_axes((1, 5, 1)), longer_axes((1, 1)), longer_axes(Torus((3, 1)))
        ((5,), (1,), Torus((3,)))
    """
    sizes = tuple(size for size in grid if size > 1) or (1,)
    return Torus(sizes) if isinstance(grid, Torus) else sizes


def with_prefix_rows(
    table: Float[Array, "..."] | None, name: str, rows: int, num_prefix: int, axis: int
) -> Float[Array, "..."] | None:
    """Appends the three rows of prefix tokens, zeros, to a table without them."""
    if table is None:
        return None
    found = table.shape[axis]
    more = len(PrefixRow) if num_prefix else 0
    if found not in (rows, rows + more):
        raise ValueError(
            f"{name} needs {rows} rows, one for each offset"
            + (f", or {rows + more} with those of prefix tokens" if more else "")
            + f", got {found}"
        )
    if found == rows + more:
        return table
    widths = [(0, 0)] * table.ndim
    widths[axis] = (0, more)
    return jnp.pad(table, widths)


def past_rows(
    table: Float[Array, "..."] | None, name: str, length: int, axis: int
) -> Float[Array, "..."] | None:
    """Returns the rows of the offsets 0 .. length - 1 of a line's table."""
    if table is None:
        return None
    rows = table.shape[axis]
    if rows % 2 == 0 or not at_most(2 * length - 1, rows):
        raise ValueError(
            f"{name} needs an odd number of rows, at least "
            f"{2 * length - 1} for a sequence of {length} tokens, got {rows}"
            + bound_hint(length, f"<= {(rows + 1) // 2}")
        )
    return jax.lax.slice_in_dim(table, rows // 2, rows // 2 + length, axis=axis)


def rows_of_token(
    table: Float[Array, "..."] | None,
    name: str,
    length: int,
    index: Int[Array, ""] | int,
    axis: int,
) -> Float[Array, "..."] | None:
    """Returns the rows of the offsets index - j of a line's table, for every key j."""
    table = with_prefix_rows(table, name, 2 * length - 1, 0, axis)
    if table is None:
        return None
    # Row length - 1 of the flipped table is offset 0, and key j is j rows after key 0.
    table = jnp.flip(table, axis)
    return jax.lax.dynamic_slice_in_dim(table, length - 1 - index, length, axis)


def bias_of_pairs(
    bias: Float[Array, "*batch rows"], grid: Grid, num_prefix: int
) -> Float[Array, "*batch n n"]:
    """Returns b_d of every pair of tokens, in float32 or wider.

    The rows are those of `relattn.offsets.offset_index`.
    """
    # Widened first: the gradient is a sum over many pairs.
    bias = widen(bias)
    if platform_defaults().gather_bias:
        return bias[..., offset_index(grid, num_prefix)]
    leading, n = bias.shape[:-1], math.prod(grid)
    table = bias[..., : num_offsets(grid)].reshape(*leading, *offsets_per_axis(grid))
    pairs = pairs_of_offsets(unwrap_axes(table, grid), grid)
    if not num_prefix:
        return pairs

    def repeat(row, height, width):
        value = bias[..., row - len(PrefixRow), None, None]
        return jnp.broadcast_to(value, (*leading, height, width))

    # "in", before the grid's pairs; "self" and "out" above them.
    pairs = jnp.concatenate([repeat(PrefixRow.IN, n, num_prefix), pairs], axis=-1)
    top = [
        repeat(PrefixRow.SELF, num_prefix, num_prefix),
        repeat(PrefixRow.OUT, num_prefix, n),
    ]
    return jnp.concatenate([jnp.concatenate(top, axis=-1), pairs], axis=-2)


def pairs_of_offsets(
    table: Float[Array, "*batch_and_offsets"], sizes: tuple[int, ...]
) -> Float[Array, "*batch n n"]:
    """Copies a table of the offsets along some axes to all pairs of their positions.

    Args:
        table: Its last axes are the offsets 1 - size .. size - 1 along each axis.
        sizes: The sizes of the axes; without any, the result has one pair.

    Returns:
        Shape ``[*batch, n, n]``, queries and keys, each in row-major order.
    """
    if not sizes:
        return table[..., None, None]
    *others, width = sizes
    # Pairs along the last axis: [*batch, *offsets, query, key].
    *leading, num_offsets = table.shape
    pairs = jnp.broadcast_to(table[..., None, :], (*leading, width, num_offsets))
    pairs = skew(pairs)
    for size in reversed(others):
        # Each query so far: its keys, for every offset of the next axis, the largest
        # first.
        *leading, _, n, _ = pairs.shape
        lines = jnp.flip(pairs, -3).swapaxes(-3, -2)
        lines = lines.reshape(*leading, n, (2 * size - 1) * n)
        # Each query of the next axis: slices, which need no padding of small axes on
        # TPUs.
        starts = range((size - 1) * n, -1, -n)
        pairs = jnp.concatenate([lines[..., s : s + size * n] for s in starts], axis=-2)
    return pairs


def unwrap_axes(
    table: Float[Array, "..."], grid: Grid, first_axis: int | None = None
) -> Float[Array, "..."]:
    """Returns the offsets -(size - 1) .. size - 1 of each axis, also on a torus.

    Args:
        table: Has an axis of offsets for each axis of the grid, in the order of
            `relattn.offsets.offset_index`.
        grid: Size of each axis, in tokens.
        first_axis: The first axis of offsets; None if they are the last axes.
    """
    if not isinstance(grid, Torus):
        return table
    before = table.ndim - len(grid) if first_axis is None else first_axis
    widths = [(0, 0)] * table.ndim
    widths[before : before + len(grid)] = [(size - 1, 0) for size in grid]
    return jnp.pad(table, widths, mode="wrap")


def skew(
    x: Float[Array, "*batch n offsets"], *, periodic: bool = False
) -> Float[Array, "*batch n m"]:
    """Computes y_ij = x_i,(i - j + m - 1), from [..., n, n + m - 1] to [..., n, m].

    If ``periodic``, computes y_ij = x_i,(i - j mod n), from [..., n, n] to [..., n, n].

    Row i has the offsets 1 - m .. n - 1 of query i. The wanted ones, i .. i - m + 1,
    start one column further left in each flipped row. So rows padded by one column,
    read as one line and cut one column narrower, have them below each other. The
    offsets for n = 3 and m = 2, from column n - 1 of the line on:

        flipped, padded      cut again          first m columns
        2  1  0 -1  .         0 -1  .  2         0 -1
        2  1  0 -1  .   ->    1  0 -1  .   ->    1  0
        2  1  0 -1  .         2  1  0 -1         2  1
    """
    if periodic:
        # The offsets 0 .. n - 1 as -(n - 1) .. n - 1.
        x = jnp.concatenate([x[..., 1:], x], axis=-1)
    *leading, num_rows, width = x.shape
    x = jnp.pad(jnp.flip(x, -1), [(0, 0)] * (x.ndim - 1) + [(0, 1)])
    x = x.reshape(*leading, num_rows * (width + 1))
    x = x[..., num_rows - 1 : num_rows - 1 + num_rows * width]
    return x.reshape(*leading, num_rows, width)[..., : width - num_rows + 1]

"""Grids of tokens: positions, offsets and distances, as static NumPy arrays.

A grid is ``(length,)`` for text, ``(height, width)`` for images,
``(frames, height, width)`` for volumes, or has any other number of axes. Tokens are
numbered in row-major order: the last axis varies fastest. On a `Torus` the last
position of an axis is next to the first. ``num_prefix`` prefix tokens (CLS) come first
and have no position.
"""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from relattn.messages import shorten

Grid = tuple[int, ...]


class Torus(tuple):
    """A periodic grid, accepted wherever a grid is.

    Offsets count modulo the size of each axis, which has as many offsets as tokens. The
    offset of a pair is the shortest one, from -((size - 1) // 2) to size // 2 along an
    axis. A table has the rows of the offsets 0 .. size - 1 modulo size, in row-major
    order.

    It copies like a named tuple, because Flax and JAX make plain tuples of all others:
    as an attribute of a Flax module a torus would become a plain grid.

    Example:
        >>> Torus((3, 4)), num_offsets(Torus((3, 4)))
        (Torus((3, 4)), 12)
        >>> offsets(Torus((5,)))[0].ravel().tolist()
        [0, -1, -2, 2, 1]
    """

    __slots__ = ()

    def __new__(cls, *sizes: Any, **named: Any) -> Torus:
        """Takes a tuple of the sizes, or the sizes themselves, as a named tuple."""
        one = sizes[0] if len(sizes) == 1 else None
        # A traced size has an iterator, but no axes.
        if isinstance(one, Iterable) and getattr(one, "ndim", 1):
            sizes = tuple(one)
        return super().__new__(cls, sizes or named.values())

    @property
    def _fields(self) -> tuple[str, ...]:
        return tuple(f"axis_{axis}" for axis in range(len(self)))

    def __getattr__(self, name: str) -> Any:
        """Returns the size of an axis by its name in ``_fields``."""
        if name not in self._fields:
            raise AttributeError(f"{self!r} has no attribute {name!r}")
        return self[self._fields.index(name)]

    def __eq__(self, other: object) -> bool:
        """Returns False for a plain grid of the same size."""
        return isinstance(other, Torus) and tuple.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        """Returns True for a plain grid of the same size."""
        return not self == other

    def __hash__(self) -> int:
        """Differs from that of the plain grid."""
        return hash((Torus, tuple(self)))

    def __repr__(self) -> str:
        """Returns the call that makes the grid."""
        return f"Torus({tuple(self)})"


class PrefixRow(enum.IntEnum):
    """Rows of a table for pairs with a prefix token, counted after the offsets' rows.

    Attributes:
        IN: A grid token with a prefix token.
        SELF: A prefix token with a prefix token.
        OUT: A prefix token with a grid token.
    """

    IN = 0
    SELF = 1
    OUT = 2


def check_axes(grid: Grid) -> None:
    """Checks that a grid is a tuple of whole numbers of at least 1, one or more.

    Args:
        grid: Size of each axis, in tokens.

    Raises:
        ValueError: If it is not: a single number, a list, sizes that are floats or
            traced, or a size of 0.

    Example:
        >>> check_axes((3, 4))
    """
    if not isinstance(grid, tuple) or not all(map(is_whole, grid)):
        traced = isinstance(grid, tuple) and any(hasattr(x, "aval") for x in grid)
        hint = ": add 'grid' to the static_argnames of jax.jit" if traced else ""
        raise ValueError(
            "grid must be a tuple of the sizes of its axes, such as (7, 7), or (7,) "
            f"for a line, got {shorten(grid)}{hint}"
        )
    if min(grid, default=0) < 1:
        raise ValueError(f"grid must have sizes of at least 1, got {grid}")


def check_torus(torus: Torus) -> None:
    """Checks that a grid is a torus.

    Args:
        torus: Size of each axis, in tokens.

    Raises:
        ValueError: If it is not a `Torus`, or not a valid grid.

    Example:
        >>> check_torus(Torus((3, 4)))
    """
    if not isinstance(torus, Torus):
        raise ValueError(f"torus must be a relattn.Torus, got {shorten(torus)}")
    check_axes(torus)


def is_whole(size: Any) -> bool:
    """Returns whether a size is a whole number; the value of a traced one is unknown.

    Example:
        >>> is_whole(3), is_whole(np.int32(3)), is_whole(3.0)
        (True, True, False)
    """
    try:
        operator.index(size)
    except TypeError:
        return False
    return True


def check_grid(num_tokens: int, grid: Grid, num_prefix: int = 0) -> None:
    """Checks that a grid and its prefix hold exactly ``num_tokens`` tokens.

    num_tokens = num_prefix + the product of the sizes.

    Args:
        num_tokens: Length of the sequence, prefix included.
        grid: Size of each axis, in tokens.
        num_prefix: Number of prefix tokens.

    Raises:
        ValueError: If the grid is not a tuple of sizes, is empty or holds another
            number of tokens, or ``num_prefix`` is negative.

    Example:
        >>> check_grid(13, (3, 4), num_prefix=1)
    """
    check_axes(grid)
    if not is_whole(num_prefix) or num_prefix < 0:
        raise ValueError(
            "num_prefix must be a whole number of at least 0, got "
            f"{shorten(num_prefix)}"
        )
    expected = num_prefix + math.prod(grid)
    if num_tokens != expected:
        is_symbolic = not isinstance(num_tokens, int | np.integer)
        hint = ": with a grid, only the batch can be symbolic" if is_symbolic else ""
        raise ValueError(
            f"grid {'x'.join(map(str, grid))} with num_prefix={num_prefix} holds "
            f"{expected} tokens, got {num_tokens}{hint}"
        )


def check_prefix(num_tokens: int, num_prefix: int) -> None:
    """Checks that ``num_prefix`` is from 0 to ``num_tokens``.

    Args:
        num_tokens: Length of the sequence.
        num_prefix: Number of prefix tokens.

    Raises:
        ValueError: If ``num_prefix`` is negative or exceeds ``num_tokens``.

    Example:
        >>> check_prefix(3, 1)
    """
    if not 0 <= num_prefix <= num_tokens:
        raise ValueError(
            f"num_prefix must be from 0 to {num_tokens}, the number of tokens, got "
            f"{num_prefix}"
        )


def grid_positions(grid: Grid, num_prefix: int = 0) -> Float[np.ndarray, "n axes"]:
    """Returns the position of every token on each axis; zeros for prefix tokens.

    Args:
        grid: Size of each axis, in tokens.
        num_prefix: Number of prefix tokens.

    Returns:
        Positions, in tokens, such as rows and columns, shape ``[n, axes]``, with n =
        num_prefix + grid tokens.

    Example:
        >>> grid_positions((1, 2), num_prefix=1).tolist()
        [[0.0, 0.0], [0.0, 0.0], [0.0, 1.0]]
    """
    positions = np.stack(np.unravel_index(np.arange(math.prod(grid)), grid), axis=-1)
    return np.pad(positions.astype(np.float32), [(num_prefix, 0), (0, 0)])


def is_prefix(grid: Grid, num_prefix: int = 0) -> Bool[np.ndarray, " n"]:
    """Marks prefix tokens with True and grid tokens with False.

    Args:
        grid: Size of each axis, in tokens.
        num_prefix: Number of prefix tokens.

    Returns:
        A mask, shape ``[n]``.

    Example:
        >>> is_prefix((1, 2), num_prefix=1).tolist()
        [True, False, False]
    """
    return np.arange(num_prefix + math.prod(grid)) < num_prefix


def offsets(grid: Grid) -> Int[np.ndarray, "n n axes"]:
    """Computes the offset of every pair of grid tokens.

    offset(i, j) = p_i - p_j, query position minus key position.

    Args:
        grid: Size of each axis, in tokens.

    Returns:
        Offsets along each axis, in tokens, shape ``[n, n, axes]``.

    Example:
        >>> offsets((1, 3))[:, 0, 1].tolist()
        [0, 1, 2]
    """
    positions = grid_positions(grid).astype(np.int64)
    return _shortest(positions[:, None] - positions[None, :], grid)


def _shortest(offsets, grid):
    """Returns the shortest offsets on a torus; on a plain grid the same offsets."""
    if not isinstance(grid, Torus):
        return offsets
    sizes = np.array(grid)
    offsets = offsets % sizes
    return offsets - sizes * (2 * offsets > sizes)


def distances(grid: Grid, clip: int, num_prefix: int = 0) -> Int[np.ndarray, "n n"]:
    """Computes the clipped Manhattan distance of every pair of tokens.

    distance(i, j) = min(sum over the axes of |offset|, clip). A prefix token is at
    distance ``clip`` from every token, including itself.

    Args:
        grid: Size of each axis, in tokens.
        clip: Largest distance, in tokens; larger ones become ``clip``.
        num_prefix: Number of prefix tokens.

    Returns:
        Distances in tokens, shape ``[n, n]``, with n = num_prefix + grid tokens.

    Example:
        >>> distances((1, 3), clip=2, num_prefix=1)[1].tolist()
        [2, 0, 1, 2]

    Source:
        Horn et al., Translational Equivariance in Kernelizable Attention, section 2.3,
        which does not say where CLS stands.
    """
    num_tokens = num_prefix + math.prod(grid)
    result = np.full((num_tokens, num_tokens), clip, np.int64)
    inner = np.abs(offsets(grid)).sum(axis=-1)
    result[num_prefix:, num_prefix:] = np.minimum(inner, clip)
    return result


def max_distance(grid: Grid) -> int:
    """Computes the largest Manhattan distance of two tokens.

    Args:
        grid: Size of each axis, in tokens.

    Returns:
        Sum of size - 1 over the axes; of size // 2 on a torus.

    Example:
        >>> max_distance((3, 4)), max_distance(Torus((3, 4)))
        (5, 3)
    """
    torus = isinstance(grid, Torus)
    return sum(size // 2 if torus else size - 1 for size in grid)


def offsets_per_axis(grid: Grid) -> tuple[int, ...]:
    """Counts the different offsets along each axis: 2 size - 1; size on a torus.

    Args:
        grid: Size of each axis, in tokens.

    Returns:
        One number for each axis.

    Example:
        >>> offsets_per_axis((3, 4)), offsets_per_axis(Torus((3, 4)))
        ((5, 7), (3, 4))
    """
    torus = isinstance(grid, Torus)
    return tuple(size if torus else 2 * size - 1 for size in grid)


def num_offsets(grid: Grid) -> int:
    """Counts the different offsets on a grid: the product of `offsets_per_axis`.

    Args:
        grid: Size of each axis, in tokens.

    Returns:
        The number of offsets.

    Example:
        >>> num_offsets((3, 4))
        35
    """
    return math.prod(offsets_per_axis(grid))


def table_offsets(grid: Grid) -> Int[np.ndarray, "rows axes"]:
    """Returns the offset of every table row, in the order of `offset_index`.

    Args:
        grid: Size of each axis, in tokens.

    Returns:
        Offsets along each axis, in tokens, shape ``[rows, axes]``.

    Example:
        >>> table_offsets((1, 2)).tolist()
        [[0, -1], [0, 0], [0, 1]]
    """
    index = np.unravel_index(np.arange(num_offsets(grid)), offsets_per_axis(grid))
    index = np.stack(index, axis=-1)
    if isinstance(grid, Torus):
        return _shortest(index, grid)
    return index - (np.array(grid) - 1)


def num_table_rows(
    grid: Grid, num_prefix: int = 0, *, causal: bool = False, clip: int | None = None
) -> int:
    """Counts the rows of a table with one row for each kind of token pair.

    Args:
        grid: Size of each axis, in tokens.
        num_prefix: Number of prefix tokens.
        causal: Whether a token attends only to itself and earlier tokens.
        clip: Largest component of an offset with a row of its own; all others share
            one. None for a row for every offset.

    Returns:
        `num_offsets`, plus three if there are prefix tokens; the length if ``causal``.
        With ``clip``, on a grid of any size, (2 clip + 1)^axes + 1 instead of
        `num_offsets`; clip + 2 if ``causal``.

    Raises:
        ValueError: If the grid is not a tuple of sizes, ``clip`` is negative, or
            ``causal`` with a torus, several axes or prefix tokens.

    Example:
        >>> num_table_rows((3, 4)), num_table_rows((3, 4), num_prefix=1)
        (35, 38)
        >>> num_table_rows((5,), causal=True)
        5
        >>> num_table_rows((14, 14), num_prefix=1, clip=2)
        29
    """
    check_axes(grid)
    if clip is not None and (not is_whole(clip) or clip < 0):
        raise ValueError(
            f"clip must be a whole number of at least 0, or None, got {shorten(clip)}"
        )
    if causal:
        if len(grid) != 1 or num_prefix or isinstance(grid, Torus):
            raise ValueError(
                "causal offsets need a grid (length,) and no prefix tokens, got "
                f"grid={grid} and num_prefix={num_prefix}"
            )
        return grid[0] if clip is None else clip + 2
    rows = num_offsets(grid) if clip is None else (2 * clip + 1) ** len(grid) + 1
    return rows + len(PrefixRow) * bool(num_prefix)


def offset_index(grid: Grid, num_prefix: int = 0) -> Int[np.ndarray, "n n"]:
    """Returns the table row of every pair (token, partner).

    Rows are the offsets, token minus partner, in row-major order, the most negative
    first; on a `Torus` modulo the sizes, zero first. With prefix tokens, three more
    rows follow, in the order of `PrefixRow`: "in", a grid token with a prefix token;
    "self", a prefix token with a prefix token; "out", a prefix token with a grid token.

    Args:
        grid: Size of each axis, in tokens.
        num_prefix: Number of prefix tokens.

    Returns:
        Rows, shape ``[n, n]``, with n = num_prefix + grid tokens.

    Example:
        >>> offset_index((2,), num_prefix=1).tolist()
        [[4, 5, 5], [3, 1, 0], [3, 2, 1]]

    Source:
        Translution: Unifying Self-attention and Convolution, section 3.3, appendix H.
    """
    sizes, rows = np.array(grid), offsets_per_axis(grid)
    strides = np.cumprod([1, *rows[:0:-1]])[::-1]
    first_offset = np.zeros_like(sizes) if isinstance(grid, Torus) else 1 - sizes
    inner = (offsets(grid) - first_offset) % rows @ strides
    first = num_offsets(grid)
    result = np.pad(inner, [(num_prefix, 0), (num_prefix, 0)])
    result[num_prefix:, :num_prefix] = first + PrefixRow.IN
    result[:num_prefix, :num_prefix] = first + PrefixRow.SELF
    result[:num_prefix, num_prefix:] = first + PrefixRow.OUT
    return result


def pair_rows(grid: Grid, num_prefix: int = 0) -> dict[str, np.ndarray]:
    """Returns the rows of the tables of queries, keys and values for every pair.

    A query takes row d = p_i - p_j, a key -d and a value d. In a pair with a prefix
    token each takes the row of the token that is projected.

    Args:
        grid: Size of each axis of the tokens after the prefix.
        num_prefix: Number of prefix tokens.

    Returns:
        Rows by ``"q"``, ``"k"`` and ``"v"``, each of shape ``[n, n]``, queries first.

    Example:
        >>> rows = pair_rows((2,))
        >>> rows["q"].tolist(), rows["k"].tolist(), rows["v"].tolist()
        ([[1, 0], [2, 1]], [[1, 2], [0, 1]], [[1, 0], [2, 1]])
    """
    rows = offset_index(grid, num_prefix)
    prefix = is_prefix(grid, num_prefix)
    values = np.where(prefix | prefix[:, None], rows.T, rows)
    return {"q": rows, "k": rows.T, "v": values}

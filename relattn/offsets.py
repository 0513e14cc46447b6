"""Grids of tokens: positions, offsets and distances, as static NumPy arrays.

A grid is ``(height, width)``, its tokens numbered row by row, or ``(length,)`` for
text. Prefix tokens (CLS) come before them, ``num_prefix`` of them, and have no
position.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Bool, Float, Int

Grid = tuple[int, ...]


def check_grid(num_tokens: int, grid: Grid, num_prefix: int = 0) -> None:
    """Raises unless ``num_tokens`` is ``num_prefix`` and the product of the grid.

    Args:
        num_tokens: Length of the sequence that is to lie on the grid.
        grid: Height and width, or length, in tokens.
        num_prefix: Number of prefix tokens before the grid's.

    Raises:
        ValueError: If the grid is empty or does not hold the tokens.

    Example:
        >>> check_grid(13, (3, 4), num_prefix=1)
    """
    if len(grid) not in (1, 2) or min(grid) < 1 or num_prefix < 0:
        raise ValueError(
            "a grid needs a positive height and width, or a positive length, and "
            f"num_prefix >= 0, got grid={grid} and num_prefix={num_prefix}"
        )
    expected = num_prefix + math.prod(grid)
    if num_tokens != expected:
        raise ValueError(
            f"grid {'x'.join(map(str, grid))} with num_prefix={num_prefix} holds "
            f"{expected} tokens, got {num_tokens}"
        )


def check_prefix(num_tokens: int, num_prefix: int) -> None:
    """Raises unless ``num_prefix`` of the tokens can come first.

    Args:
        num_tokens: Length of the sequence.
        num_prefix: Number of prefix tokens.

    Raises:
        ValueError: If there are fewer tokens, or the number is negative.

    Example:
        >>> check_prefix(3, 1)
    """
    if not 0 <= num_prefix <= num_tokens:
        raise ValueError(
            f"num_prefix lies between 0 and the {num_tokens} tokens, got {num_prefix}"
        )


def grid_positions(grid: Grid, num_prefix: int = 0) -> Float[np.ndarray, "n axes"]:
    """Row and column, or index, of every token; zeros for prefix tokens.

    Args:
        grid: Height and width, or length, in tokens.
        num_prefix: Number of prefix tokens.

    Returns:
        Positions, in tokens, shape ``[num_prefix + height * width, 2]``, or
        ``[num_prefix + length, 1]``.

    Example:
        >>> grid_positions((1, 2), num_prefix=1).tolist()
        [[0.0, 0.0], [0.0, 0.0], [0.0, 1.0]]
    """
    positions = np.stack(np.unravel_index(np.arange(math.prod(grid)), grid), axis=-1)
    return np.pad(positions.astype(np.float32), [(num_prefix, 0), (0, 0)])


def is_prefix(grid: Grid, num_prefix: int = 0) -> Bool[np.ndarray, " n"]:
    """True for prefix tokens, False for the grid's.

    Args:
        grid: Height and width, or length, in tokens.
        num_prefix: Number of prefix tokens.

    Returns:
        A mask, one element a token.

    Example:
        >>> is_prefix((1, 2), num_prefix=1).tolist()
        [True, False, False]
    """
    return np.arange(num_prefix + math.prod(grid)) < num_prefix


def offsets(grid: Grid) -> Int[np.ndarray, "n n axes"]:
    """Offset of every pair of grid tokens: query position minus key position.

    Args:
        grid: Height and width, or length, in tokens.

    Returns:
        Offsets in rows and columns, shape ``[height * width, height * width, 2]``, or
        in tokens, ``[length, length, 1]``.

    Example:
        >>> offsets((1, 3))[:, 0, 1].tolist()
        [0, 1, 2]
    """
    positions = grid_positions(grid).astype(np.int64)
    return positions[:, None] - positions[None, :]


def distances(grid: Grid, clip: int, num_prefix: int = 0) -> Int[np.ndarray, "n n"]:
    """Clipped Manhattan distance of every pair of tokens.

    distance(i, j) = min(|rows| + |columns| of the offset, clip). A prefix token is at
    distance ``clip`` from every token, itself included.

    Args:
        grid: Height and width, or length, in tokens.
        clip: The largest distance told apart, in tokens.
        num_prefix: Number of prefix tokens.

    Returns:
        Distances, shape ``[n, n]``, n the number of tokens, prefix included.

    Example:
        >>> distances((1, 3), clip=2, num_prefix=1)[1].tolist()
        [2, 0, 1, 2]

    Source:
        Horn et al., Translational Equivariance in Kernelizable Attention, section 2.3.
    """
    num_tokens = num_prefix + math.prod(grid)
    result = np.full((num_tokens, num_tokens), clip, np.int64)
    inner = np.abs(offsets(grid)).sum(axis=-1)
    result[num_prefix:, num_prefix:] = np.minimum(inner, clip)
    return result


def num_offsets(grid: Grid) -> int:
    """Number of different offsets on a grid: the product of 2 size - 1.

    Args:
        grid: Height and width, or length, in tokens.

    Returns:
        The number.

    Example:
        >>> num_offsets((3, 4))
        35
    """
    return math.prod(2 * size - 1 for size in grid)


def table_offsets(grid: Grid) -> Int[np.ndarray, "rows axes"]:
    """Offset of every row of a table, in the order of `offset_index`.

    Args:
        grid: Height and width, or length, in tokens.

    Returns:
        Offsets in rows and columns, or in tokens, shape ``[rows, axes]``.

    Example:
        >>> table_offsets((1, 2)).tolist()
        [[0, -1], [0, 0], [0, 1]]
    """
    sizes = np.array(grid)
    index = np.unravel_index(np.arange(num_offsets(grid)), 2 * sizes - 1)
    return np.stack(index, axis=-1) - (sizes - 1)


def num_table_rows(grid: Grid, num_prefix: int = 0, *, causal: bool = False) -> int:
    """Number of rows of a table that has one for every kind of pair of tokens.

    Args:
        grid: Height and width, or length, in tokens.
        num_prefix: Number of prefix tokens.
        causal: Whether a token meets only itself and those before it.

    Returns:
        `num_offsets`, and three more where there are prefix tokens; the length where
        ``causal``.

    Raises:
        ValueError: If ``causal`` and the grid is no line or has prefix tokens.

    Example:
        >>> num_table_rows((3, 4)), num_table_rows((3, 4), num_prefix=1)
        (35, 38)
        >>> num_table_rows((5,), causal=True)
        5
    """
    if not causal:
        return num_offsets(grid) + 3 * bool(num_prefix)
    if len(grid) != 1 or num_prefix:
        raise ValueError(
            "causal offsets need a grid (length,) and no prefix tokens, got "
            f"grid={grid} and num_prefix={num_prefix}"
        )
    return grid[0]


def offset_index(grid: Grid, num_prefix: int = 0) -> Int[np.ndarray, "n n"]:
    """Row of a table of offsets for every pair (token, partner).

    Rows are the offsets, token minus partner, row-major, the most negative first. With
    prefix tokens three rows follow: "in", a grid token with a prefix token; "self", a
    prefix token with a prefix token; "out", a prefix token with a grid token.

    Args:
        grid: Height and width, or length, in tokens.
        num_prefix: Number of prefix tokens.

    Returns:
        Rows, shape ``[n, n]``, n the number of tokens, prefix included.

    Example:
        >>> offset_index((2,), num_prefix=1).tolist()
        [[4, 5, 5], [3, 1, 0], [3, 2, 1]]

    Source:
        Translution: Unifying Self-attention and Convolution, section 3.3, appendix H.
    """
    sizes = np.array(grid)
    strides = np.cumprod([1, *(2 * sizes - 1)[:0:-1]])[::-1]
    inner = (offsets(grid) + sizes - 1) @ strides
    first = num_offsets(grid)
    result = np.pad(inner, [(num_prefix, 0), (num_prefix, 0)])
    result[num_prefix:, :num_prefix] = first
    result[:num_prefix, :num_prefix] = first + 1
    result[:num_prefix, num_prefix:] = first + 2
    return result

"""Grids of tokens: positions, offsets and distances, as static NumPy arrays.

A grid is ``(height, width)``; its tokens are numbered row by row. Prefix tokens (CLS)
come before them, ``num_prefix`` of them, and have no position.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, Int

Grid = tuple[int, int]


def check_grid(num_tokens: int, grid: Grid, num_prefix: int = 0) -> None:
    """Raises unless ``num_tokens`` is ``num_prefix + height * width``.

    Args:
        num_tokens: Length of the sequence that is to lie on the grid.
        grid: Height and width, in tokens.
        num_prefix: Number of prefix tokens before the grid's.

    Raises:
        ValueError: If the grid is empty or does not hold the tokens.

    Example:
        >>> check_grid(13, (3, 4), num_prefix=1)
    """
    height, width = grid
    if height < 1 or width < 1 or num_prefix < 0:
        raise ValueError(
            "a grid needs a positive height and width and num_prefix >= 0, got "
            f"grid={grid} and num_prefix={num_prefix}"
        )
    expected = num_prefix + height * width
    if num_tokens != expected:
        raise ValueError(
            f"grid {height}x{width} with num_prefix={num_prefix} holds {expected} "
            f"tokens, got {num_tokens}"
        )


def grid_positions(grid: Grid, num_prefix: int = 0) -> Float[np.ndarray, "n 2"]:
    """Row and column of every token; zeros for prefix tokens.

    Args:
        grid: Height and width, in tokens.
        num_prefix: Number of prefix tokens.

    Returns:
        Positions, in tokens, shape ``[num_prefix + height * width, 2]``.

    Example:
        >>> grid_positions((1, 2), num_prefix=1).tolist()
        [[0.0, 0.0], [0.0, 0.0], [0.0, 1.0]]
    """
    height, width = grid
    rows, columns = np.divmod(np.arange(height * width), width)
    positions = np.stack([rows, columns], axis=-1).astype(np.float32)
    return np.concatenate([np.zeros((num_prefix, 2), np.float32), positions])


def is_prefix(grid: Grid, num_prefix: int = 0) -> Bool[np.ndarray, " n"]:
    """True for prefix tokens, False for the grid's.

    Args:
        grid: Height and width, in tokens.
        num_prefix: Number of prefix tokens.

    Returns:
        A mask, shape ``[num_prefix + height * width]``.

    Example:
        >>> is_prefix((1, 2), num_prefix=1).tolist()
        [True, False, False]
    """
    height, width = grid
    return np.arange(num_prefix + height * width) < num_prefix


def offsets(grid: Grid) -> Int[np.ndarray, "n n 2"]:
    """Offset of every pair of grid tokens: query position minus key position.

    Args:
        grid: Height and width, in tokens.

    Returns:
        Offsets in rows and columns, shape ``[height * width, height * width, 2]``.

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
        grid: Height and width, in tokens.
        clip: The largest distance told apart, in tokens.
        num_prefix: Number of prefix tokens.

    Returns:
        Distances, shape ``[n, n]`` with ``n = num_prefix + height * width``.

    Example:
        >>> distances((1, 3), clip=2, num_prefix=1)[1].tolist()
        [2, 0, 1, 2]

    Source:
        Horn et al., Translational Equivariance in Kernelizable Attention, section 2.3.
    """
    num_tokens = num_prefix + grid[0] * grid[1]
    result = np.full((num_tokens, num_tokens), clip, np.int64)
    inner = np.abs(offsets(grid)).sum(axis=-1)
    result[num_prefix:, num_prefix:] = np.minimum(inner, clip)
    return result

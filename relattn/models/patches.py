"""The patches of an image: their sides, their grid, and cutting an image into them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from relattn.messages import shorten
from relattn.offsets import Grid, Torus

# The side of a square, or height and width. A config read from JSON has a list.
PatchSize = int | Sequence[int]


def patch_sides(patch_size: Any) -> tuple[int, int]:
    """Returns height and width of a patch.

    Args:
        patch_size: Side of a square patch, or height and width, in pixels.

    Returns:
        Height and width in pixels.

    Raises:
        ValueError: If it is neither one whole number nor two.

    Example:
        >>> patch_sides(2), patch_sides([4, 2])
        ((2, 2), (4, 2))
    """
    sides = patch_size if isinstance(patch_size, list | tuple) else (patch_size,) * 2
    if len(sides) != 2 or not all(type(side) is int for side in sides):
        raise ValueError(
            "patch_size must be a whole number of pixels, or two (height and width), "
            f"got {shorten(patch_size)}"
        )
    height, width = sides
    return height, width


def patch_grid(height: int, width: int, patch_size: PatchSize) -> tuple[int, int]:
    """Computes the grid of an image's patches.

    Args:
        height: Height of the image, in pixels.
        width: Width of the image, in pixels.
        patch_size: Side of a square patch, or height and width, in pixels.

    Returns:
        Height and width of the grid, in tokens.

    Raises:
        ValueError: If the patch does not divide the image, or is larger than it.

    Example:
        >>> patch_grid(4, 6, 2)
        (2, 3)
    """
    patch = patch_sides(patch_size)
    if patch[0] > height or patch[1] > width:
        raise ValueError(
            f"patch_size={patch_size} is larger than the image of {height}x{width} "
            "pixels; choose a smaller patch or larger images"
        )
    if min(patch) < 1 or height % patch[0] or width % patch[1]:
        raise ValueError(
            f"patch_size={patch_size} does not divide the image of {height}x{width} "
            "pixels; choose a divisor or images of another size"
        )
    return (height // patch[0], width // patch[1])


def extract_patches(
    images: Float[Array, "batch height width channels"],
    patch_size: PatchSize,
    *,
    overlap: int = 0,
    periodic: bool = False,
) -> tuple[Float[Array, "batch n patch"], Grid]:
    """Cuts images into patches, in row-major order.

    Args:
        images: Shape ``[batch, height, width, channels]``.
        patch_size: Side of a square patch, or height and width, in pixels.
        overlap: Number of pixels by which a patch is larger on every side.
        periodic: Whether the image is periodic: patches that overlap a border continue
            on the other side, not with zeros, and the grid is a torus.

    Returns:
        Tokens ``[batch, n, patch height * patch width * channels]``, and their grid.

    Raises:
        ValueError: If the patch does not divide the image, or is larger than it.

    Example:
        >>> import jax.numpy as jnp
        >>> tokens, grid = extract_patches(jnp.zeros((1, 4, 6, 3)), 2)
        >>> tokens.shape, grid
        ((1, 6, 12), (2, 3))
        >>> extract_patches(jnp.zeros((1, 4, 6, 3)), (4, 2))[1]
        (1, 3)
        >>> tokens, grid = extract_patches(
        ...     jnp.zeros((1, 4, 6, 3)), 2, overlap=1, periodic=True)
        >>> tokens.shape, grid
        ((1, 6, 48), Torus((2, 3)))
    """
    if overlap < 0:
        raise ValueError(f"patch_overlap must be at least 0 pixels, got {overlap}")
    batch, height, width, channels = images.shape
    grid = patch_grid(height, width, patch_size)
    patch = patch_sides(patch_size)
    # x: [batch, grid rows, patch rows, grid columns, patch columns, channels]
    if overlap:
        widths = [(0, 0), (overlap, overlap), (overlap, overlap), (0, 0)]
        x = jnp.pad(images, widths, mode="wrap" if periodic else "constant")
        rows, columns = (
            np.arange(count)[:, None] * side + np.arange(side + 2 * overlap)
            for count, side in zip(grid, patch, strict=True)
        )
        x = x[:, rows][:, :, :, columns]
    else:
        x = images.reshape(batch, grid[0], patch[0], grid[1], patch[1], channels)
    tokens = x.swapaxes(2, 3).reshape(batch, grid[0] * grid[1], -1)
    return tokens, Torus(grid) if periodic else grid


def adapt_channels(
    kernel: Float[np.ndarray, "inputs dim"], old: int, new: int
) -> Float[np.ndarray, "_inputs dim"]:
    """Fits a linear embedding of patches to another number of channels, as timm does.

    To one channel, the channels' weights are summed: a grey image gives the same as
    its copies in all channels. To more, they are repeated in turn and multiplied by
    old / new.

    Args:
        kernel: The matrix, with channels as the last part of its inputs.
        old: Its number of channels.
        new: The number of channels of the result.

    Returns:
        The matrix for ``new`` channels.

    Example:
        >>> adapt_channels(np.array([[1.0], [2.0], [6.0]]), 3, 1).tolist()
        [[9.0]]
        >>> adapt_channels(np.array([[9.0]]), 1, 3).tolist()
        [[3.0], [3.0], [3.0]]

    Source:
        timm, ``adapt_input_conv``.
    """
    kernel = kernel.reshape(-1, old, kernel.shape[-1])
    if new == 1:
        kernel = kernel.sum(axis=1, keepdims=True)
    else:
        kernel = kernel[:, np.arange(new) % old] * old / new
    return kernel.reshape(-1, kernel.shape[-1])


def zero_patches(
    images: Float[Array, "batch height width channels"],
    exists: Bool[Array, "batch patches"],
    patch_size: PatchSize,
) -> Float[Array, "batch height width channels"]:
    """Sets the pixels of patches that do not exist to zero, even where they are NaN."""
    batch, height, width, _ = images.shape
    grid = patch_grid(height, width, patch_size)
    exists = exists.reshape(batch, *grid)
    for axis, side in enumerate(patch_sides(patch_size), 1):
        exists = jnp.repeat(exists, side, axis=axis)
    return jnp.where(exists[..., None], images, 0)

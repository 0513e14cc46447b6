"""Patches: how images become tokens on a grid."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Array, Float

from relattn import spec

# The side of a square, or height and width; a config from JSON has a list.
PatchSize = int | Sequence[int]


def patch_grid(height: int, width: int, patch_size: PatchSize) -> tuple[int, int]:
    """The grid of an image's patches.

    Args:
        height: Of the image, in pixels.
        width: Of the image, in pixels.
        patch_size: Side of a square patch, or height and width, in pixels.

    Returns:
        Height and width, in tokens.

    Raises:
        ValueError: If the patch does not divide the image, or is larger than it.

    Example:
        >>> patch_grid(4, 6, 2)
        (2, 3)
    """
    patch = (patch_size,) * 2 if isinstance(patch_size, int) else tuple(patch_size)
    if len(patch) != 2:
        raise ValueError(
            f"config.model.patch_size={spec.shorten(patch_size)} must be one side or a "
            "height and a width, in pixels"
        )
    if patch[0] > height or patch[1] > width:
        raise ValueError(
            f"config.model.patch_size={patch_size} is larger than the image of "
            f"{height}x{width} pixels; choose a smaller patch or a larger "
            "config.data.image_size"
        )
    if min(patch) < 1 or height % patch[0] or width % patch[1]:
        raise ValueError(
            f"config.model.patch_size={patch_size} does not divide the image of "
            f"{height}x{width} pixels; choose a divisor or another "
            "config.data.image_size"
        )
    return (height // patch[0], width // patch[1])


def patches(
    images: Float[Array, "batch height width channels"], patch_size: PatchSize
) -> tuple[Float[Array, "batch n patch"], tuple[int, int]]:
    """Cuts images into patches, row by row.

    Args:
        images: Shape ``[batch, height, width, channels]``.
        patch_size: Side of a square patch, or height and width, in pixels.

    Returns:
        Tokens ``[batch, n, patch height * patch width * channels]``, and their grid.

    Raises:
        ValueError: If the patch does not divide the image, or is larger than it.

    Example:
        >>> import jax.numpy as jnp
        >>> tokens, grid = patches(jnp.zeros((1, 4, 6, 3)), 2)
        >>> tokens.shape, grid
        ((1, 6, 12), (2, 3))
        >>> patches(jnp.zeros((1, 4, 6, 3)), (4, 2))[1]
        (1, 3)
    """
    batch, height, width, channels = images.shape
    grid = patch_grid(height, width, patch_size)
    patch = (height // grid[0], width // grid[1])
    x = images.reshape(batch, grid[0], patch[0], grid[1], patch[1], channels)
    tokens = x.swapaxes(2, 3).reshape(batch, grid[0] * grid[1], -1)
    return tokens, grid

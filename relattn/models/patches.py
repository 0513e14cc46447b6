"""Patches: how images become tokens on a grid."""

from __future__ import annotations

from jaxtyping import Array, Float


def patches(
    images: Float[Array, "batch height width channels"], patch_size: int
) -> tuple[Float[Array, "batch n patch"], tuple[int, int]]:
    """Cuts images into square patches, row by row.

    Args:
        images: Shape ``[batch, height, width, channels]``.
        patch_size: Side of a patch, in pixels.

    Returns:
        Tokens ``[batch, n, patch_size^2 * channels]``, and their grid.

    Raises:
        ValueError: If the patch does not divide the image, or is larger than it.

    Example:
        >>> import jax.numpy as jnp
        >>> tokens, grid = patches(jnp.zeros((1, 4, 6, 3)), 2)
        >>> tokens.shape, grid
        ((1, 6, 12), (2, 3))
    """
    batch, height, width, channels = images.shape
    if patch_size > min(height, width):
        raise ValueError(
            f"config.model.patch_size={patch_size} is larger than the image of "
            f"{height}x{width} pixels; choose a smaller patch or a larger "
            "config.data.image_size"
        )
    if patch_size < 1 or height % patch_size or width % patch_size:
        raise ValueError(
            f"config.model.patch_size={patch_size} does not divide the image of "
            f"{height}x{width} pixels; choose a divisor or another "
            "config.data.image_size"
        )
    grid = (height // patch_size, width // patch_size)
    x = images.reshape(batch, grid[0], patch_size, grid[1], patch_size, channels)
    tokens = x.swapaxes(2, 3).reshape(batch, grid[0] * grid[1], -1)
    return tokens, grid

"""The patches of an image: their sides, their grid, and cutting an image into them.

A volume, such as a video, is an image of three axes: frames, height and width.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from relattn.messages import shorten
from relattn.offsets import Grid, Torus

# One side for all axes, or one for each axis. A config read from JSON has a list.
PatchSize = int | Sequence[int]

_SIDES = {2: "two (height and width)", 3: "three (frames, height and width)"}


def check_images(images: Any) -> None:
    """Checks that images are inputs of a model.

    Args:
        images: Shape ``[batch, height, width, channels]``, or with frames before the
            height.

    Raises:
        ValueError: If the batch has no axis, or pixels are integers.

    Example:
        >>> check_images(np.zeros((1, 4, 6, 3), np.float32))
    """
    if images.ndim < 4:
        raise ValueError(
            f"images have shape {images.shape}, expected [batch, height, width, "
            "channels]: add the axis of the batch, images[None], or of the channels, "
            "images[..., None]"
        )
    if not jnp.issubdtype(images.dtype, jnp.floating):
        # A model would take 255 for a value 255 times as large as white.
        raise ValueError(
            f"images are {images.dtype}, but the inputs of a model are floats: prepare "
            "them as in training, as run.preprocess and Pretrained.preprocess do"
        )


def patch_sides(
    patch_size: Any, axes: int = 2, name: str = "patch_size"
) -> tuple[int, ...]:
    """Returns the sides of a patch, or of an image.

    Args:
        patch_size: One side for all axes, or one for each axis, such as height and
            width, in pixels.
        axes: Number of axes of the image; 3 for frames, height and width.
        name: Name of the argument, for the message.

    Returns:
        The side along each axis, in pixels.

    Raises:
        ValueError: If it is neither one whole number nor one for each axis.

    Example:
        >>> patch_sides(np.int64(2)), patch_sides((1, 4, 2), axes=3)
        ((2, 2), (1, 4, 2))
    """
    several = isinstance(patch_size, list | tuple | np.ndarray)
    sides = tuple(patch_size) if several else (patch_size,) * axes
    if len(sides) != axes or not all(
        isinstance(side, int | np.integer) and not isinstance(side, bool)
        for side in sides
    ):
        raise ValueError(
            f"{name} must be a whole number of pixels, or "
            f"{_SIDES.get(axes, f'{axes}, one for each axis')}, got "
            f"{shorten(patch_size)}"
        )
    return tuple(map(int, sides))


def patch_grid(image_size: Sequence[int], patch_size: PatchSize) -> tuple[int, ...]:
    """Computes the grid of an image's patches.

    Args:
        image_size: Size of the image along each axis, in pixels: height and width, or
            frames, height and width.
        patch_size: One side for all axes, or one for each axis, in pixels.

    Returns:
        Size of the grid along each axis, in tokens.

    Raises:
        ValueError: If the patch does not divide the image, or is larger than it.

    Example:
        >>> patch_grid((4, 6), 2), patch_grid((8, 4, 6), (4, 2, 2))
        ((2, 3), (2, 2, 3))
    """
    patch = patch_sides(patch_size, len(image_size))
    pairs = [*zip(image_size, patch, strict=True)]
    shown = "x".join(map(str, image_size))
    if any(side > size for size, side in pairs):
        raise ValueError(
            f"patch_size={patch_size} is larger than the image of {shown} "
            "pixels: choose a smaller patch or larger images, whose channels come last"
        )
    if min(patch) < 1 or any(size % side for size, side in pairs):
        raise ValueError(
            f"patch_size={patch_size} does not divide the image of {shown} "
            "pixels: choose a divisor or images of another size"
        )
    return tuple(size // side for size, side in pairs)


def extract_patches(
    images: Float[Array, "batch *size channels"],
    patch_size: PatchSize,
    *,
    overlap: int = 0,
    periodic: bool = False,
) -> tuple[Float[Array, "batch n patch"], Grid]:
    """Cuts images into patches, in row-major order.

    Args:
        images: Shape ``[batch, height, width, channels]``, or with frames before the
            height.
        patch_size: One side for all axes, or one for each axis, in pixels.
        overlap: Number of pixels by which a patch is larger on every side.
        periodic: Whether the image is periodic: patches that overlap a border continue
            on the other side, not with zeros, and the grid is a torus.

    Returns:
        Tokens ``[batch, n, pixels of a patch * channels]``, and their grid.

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
        >>> tokens, grid = extract_patches(jnp.zeros((1, 8, 4, 6, 3)), (4, 2, 2))
        >>> tokens.shape, grid
        ((1, 12, 48), (2, 2, 3))
    """
    if overlap < 0:
        raise ValueError(f"patch_overlap must be at least 0 pixels, got {overlap}")
    batch, *image_size, channels = images.shape
    grid, axes = patch_grid(image_size, patch_size), len(image_size)
    pairs = [*zip(grid, patch_sides(patch_size, axes), strict=True)]
    # x: [batch, grid rows, patch rows, grid columns, patch columns, channels]
    if overlap:
        widths = [(0, 0), *[(overlap, overlap)] * axes, (0, 0)]
        x = jnp.pad(images, widths, mode="wrap" if periodic else "constant")
        for axis, (count, side) in enumerate(pairs):
            pixels = np.arange(count)[:, None] * side + np.arange(side + 2 * overlap)
            x = x[(slice(None),) * (1 + 2 * axis) + (pixels,)]
    else:
        x = images.reshape(batch, *itertools.chain(*pairs), channels)
    # The grid's axes, then the patch's.
    order = [*range(1, 2 * axes, 2), *range(2, 2 * axes + 1, 2)]
    x = x.transpose(0, *order, 2 * axes + 1)
    tokens = x.reshape(batch, math.prod(grid), math.prod(x.shape[1 + axes :]))
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
    images: Float[Array, "batch *size channels"],
    exists: Bool[Array, "batch patches"],
    patch_size: PatchSize,
) -> Float[Array, "batch *size channels"]:
    """Sets the pixels of patches that do not exist to zero, even where they are NaN."""
    batch, *image_size, _ = images.shape
    exists = exists.reshape(batch, *patch_grid(image_size, patch_size))
    for axis, side in enumerate(patch_sides(patch_size, len(image_size)), 1):
        exists = jnp.repeat(exists, side, axis=axis)
    return jnp.where(exists[..., None], images, 0)

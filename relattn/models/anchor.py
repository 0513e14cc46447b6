"""Rolls images to a place that their content chooses, so that shifts do not matter."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from relattn.kernels.precision import widen
from relattn.models.patches import PatchSize, patch_grid, patch_sides

ANCHORS = ("none", "polyphase")


def polyphase_anchor(
    images: Float[Array, "batch height width channels"], patch_size: PatchSize
) -> Float[Array, "batch height width channels"]:
    """Rolls every image so that a circular shift of it does not change the result.

    1. A phase (r, c), below the patch size, is a way to cut the image into patches,
       after rolling it by (-r, -c). The phase with the largest energy is chosen:
       sum over patches of (sum of the patch)^2.
    2. Of the patches of this phase, the one that starts at the pixel with the largest
       key comes first: key = sum_ab (3/4)^a (7/8)^b x(row + a, column + b). On a torus
       this choice changes nothing but rounding. It also decides between phases of equal
       energy.

    The result for a shifted image is the same bit for bit, unless two keys are equal:
    all sums add the same numbers in the same order.

    Args:
        images: Shape ``[batch, height, width, channels]``.
        patch_size: Side of a square patch, or height and width, in pixels.

    Returns:
        The rolled images. Gradients pass through the roll, not through its choice.

    Raises:
        ValueError: If the patch does not divide the image, or is larger than it.

    Example:
        >>> image = jnp.zeros((1, 4, 4, 1)).at[0, 1:3, 1:3].set(1.0)
        >>> polyphase_anchor(image, 2)[0, :2, :2, 0].tolist()
        [[1.0, 1.0], [1.0, 1.0]]

    Source:
        Rojas-Gomez et al., Making Vision Transformers Truly Shift-Equivariant, section
        4.1; the energy of the patches' sums and the key are ours.
    """
    shifts = anchor_shifts(images, patch_size)
    roll = functools.partial(jnp.roll, axis=(0, 1))
    return jax.vmap(lambda image, shift: roll(image, tuple(-shift)))(images, shifts)


def anchor_shifts(
    images: Float[Array, "batch height width channels"], patch_size: PatchSize
) -> Int[Array, "batch 2"]:
    """Computes where in each image the first patch of `polyphase_anchor` starts.

    Args:
        images: Shape ``[batch, height, width, channels]``.
        patch_size: Side of a square patch, or height and width, in pixels.

    Returns:
        Rows and columns in pixels, shape ``[batch, 2]``.

    Raises:
        ValueError: If the patch does not divide the image, or is larger than it.

    Example:
        >>> image = jnp.zeros((1, 4, 4, 1)).at[0, 1:3, 1:3].set(1.0)
        >>> anchor_shifts(image, 2).tolist()
        [[1, 1]]
    """
    _, height, width, _ = images.shape
    grid = patch_grid((height, width), patch_size)
    patch = patch_sides(patch_size)
    # Pixels without channels.
    pixels = widen(jax.lax.stop_gradient(images)).sum(axis=-1)
    # The sum of the patch that starts at each pixel.
    sums = pixels
    for axis, side in ((1, patch[0]), (2, patch[1])):
        rolled = (jnp.roll(sums, -shift, axis) for shift in range(side))
        sums = functools.reduce(jnp.add, rolled)
    # The patches of each phase, [batch, phase row, phase column, patches].
    squares = (sums**2).reshape(-1, grid[0], patch[0], grid[1], patch[1])
    squares = squares.transpose(0, 2, 4, 1, 3).reshape(-1, *patch, math.prod(grid))
    energy = _sum_sorted(squares)
    largest = energy == energy.max(axis=(1, 2), keepdims=True)

    # The key of a pixel: the sum of the pixels from it on, each next one with a
    # smaller weight, along both axes.
    key = pixels
    for axis, share in ((1, 1 / 4), (2, 1 / 8)):
        # (1 - share) times the sum so far, shifted by one, plus x. Multiplying by a
        # power of two is exact, so that fused operations round as separate ones do.
        def add(_, total, x=key, axis=axis, share=share):
            total = jnp.roll(total, -1, axis)
            return x + (total - share * total)

        key = jax.lax.fori_loop(0, pixels.shape[axis], add, jnp.zeros_like(key))
    # The first patch has the largest key among those of the phases with the most
    # energy.
    chosen = jnp.where(jnp.tile(largest, (1, *grid)), key, -jnp.inf)
    first = jnp.argmax(chosen.reshape(images.shape[0], height * width), axis=-1)
    return jnp.stack(divmod(first, width), axis=-1)


def _sum_sorted(x):
    """Sums over the last axis in an order that depends on the numbers only."""
    x = jnp.sort(x, axis=-1)
    # A tree of elementwise additions rounds the same way in every row.
    while x.shape[-1] > 1:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, x.shape[-1] % 2)])
        x = x[..., ::2] + x[..., 1::2]
    return x[..., 0]

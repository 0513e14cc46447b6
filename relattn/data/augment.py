"""Augmentation of batches under jit: rotation, crop, CutMix, MixUp, random erasing."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from relattn import spec
from relattn.messages import shorten

# Random numbers per image; an augmentation uses the first of them.
NUM_DRAWS = 3
# Function from a key and (height, width) to the weight of an image in every pixel.
Mix = Callable[[Key[Array, ""], tuple[int, int]], Float[Array, "height width"]]
# The same function; its mask is 0 in the pixels of one image that are erased.
Erase = Mix
# Rectangles to draw for an image until one fits into it.
ATTEMPTS = 10


def augment(
    images: Float[Array | np.ndarray, "batch height width channels"],
    draws: Float[Array | np.ndarray, "batch draws"],
    augmentation: str,
) -> Float[Array, "batch height width channels"]:
    """Augments a batch of images.

    Args:
        images: Images, shape ``[batch, height, width, channels]``.
        draws: Random numbers, uniform in [0, 1), shape ``[batch, NUM_DRAWS]``.
        augmentation: A spec of `AUGMENTATIONS`, for example ``"rotate(degrees=10)"``.

    Returns:
        The new images, in the shape of ``images``.

    Raises:
        ValueError: If the augmentation is unknown, or an option is invalid.

    Example:
        >>> augment(jnp.ones((2, 5, 7, 3)), jnp.zeros((2, 3)), "rotate").shape
        (2, 5, 7, 3)
    """
    function = spec.resolve(
        augmentation, AUGMENTATIONS, "data.augment", reserved=("images", "draws")
    )
    return function(jnp.asarray(images), jnp.asarray(draws))


def check_augmentation(augmentation: str) -> None:
    """Checks that a spec names an augmentation and has valid options.

    Args:
        augmentation: A spec of `AUGMENTATIONS`.

    Raises:
        ValueError: If the augmentation is unknown, or an option is invalid.
    """
    jax.eval_shape(
        lambda images, draws: augment(images, draws, augmentation),
        jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.float32),
        jax.ShapeDtypeStruct((1, NUM_DRAWS), jnp.float32),
    )


def rotate(
    images: Float[Array, "batch height width channels"],
    draws: Float[Array, "batch draws"],
    *,
    degrees: int | float = 10,
) -> Float[Array, "batch height width channels"]:
    """Rotates each image about its centre by an angle uniform in +-degrees.

    The result at (x, y), relative to the centre with y downwards, is the image at
    (x cos a - y sin a, x sin a + y cos a), interpolated bilinearly, with zeros outside
    of the image. Positive angles are counter-clockwise.

    Args:
        images: Images, shape ``[batch, height, width, channels]``.
        draws: Random numbers, uniform in [0, 1), shape ``[batch, draws]``; the first
            of each image is used.
        degrees: Largest angle.

    Returns:
        The new images, in the shape of ``images``.

    Raises:
        ValueError: If ``degrees`` is not between 0 and 180.

    Example:
        >>> image = jnp.eye(3)[None, :, :, None]
        >>> rotate(image, jnp.ones((1, 1)), degrees=90)[0, ..., 0].round().tolist()
        [[0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    """
    if not 0 <= degrees <= 180:
        raise ValueError(
            f"data.augment: rotate needs degrees from 0 to 180, got {degrees}"
        )
    height, width = images.shape[1:3]
    y = jnp.arange(height)[:, None] - (height - 1) / 2
    x = jnp.arange(width)[None, :] - (width - 1) / 2

    def rotate_one(image: Array, angle: Array) -> Array:
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        rows = sin * x + cos * y + (height - 1) / 2
        columns = cos * x - sin * y + (width - 1) / 2
        return jax.vmap(
            lambda channel: jax.scipy.ndimage.map_coordinates(
                channel, [rows, columns], order=1
            ),
            in_axes=-1,
            out_axes=-1,
        )(image)

    angles = (2 * draws[:, 0] - 1) * math.radians(degrees)
    return jax.vmap(rotate_one)(images, angles)


def flip_crop(
    images: Float[Array, "batch height width channels"],
    draws: Float[Array, "batch draws"],
    *,
    padding: int = 4,
) -> Float[Array, "batch height width channels"]:
    """Flips each image left-right with probability 1/2, and crops it at random.

    Each image is padded with ``padding`` rows and columns of zeros on every side; the
    crop has the original size and a uniformly random position.

    Args:
        images: Images, shape ``[batch, height, width, channels]``.
        draws: Random numbers, uniform in [0, 1), shape ``[batch, draws]``; the first
            three of each image draw the flip, the row and the column.
        padding: Number of pixels.

    Returns:
        The new images, in the shape of ``images``.

    Raises:
        ValueError: If ``padding`` is negative.

    Example:
        >>> image = jnp.array([1.0, 2.0, 3.0]).reshape(1, 1, 3, 1)
        >>> draws = jnp.array([[0.0, 0.5, 0.9]])
        >>> flip_crop(image, draws, padding=1)[0, 0, :, 0].tolist()
        [2.0, 1.0, 0.0]
    """
    if padding < 0:
        raise ValueError(
            f"data.augment: flip_crop needs a padding of at least 0, got {padding}"
        )
    flipped = (draws[:, 0] < 0.5)[:, None, None, None]
    images = jnp.where(flipped, images[:, :, ::-1], images)
    widths = [(0, 0), (padding, padding), (padding, padding), (0, 0)]
    corners = jnp.floor(draws[:, 1:3] * (2 * padding + 1)).astype(jnp.int32)

    def crop(padded: Array, corner: Array) -> Array:
        # All of one dtype.
        start = (corner[0], corner[1], jnp.zeros_like(corner[0]))
        return jax.lax.dynamic_slice(padded, start, images.shape[1:])

    return jax.vmap(crop)(jnp.pad(images, widths), corners)


def identity(
    images: Float[Array, "batch height width channels"],
    draws: Float[Array, "batch draws"],
) -> Float[Array, "batch height width channels"]:
    """Returns the images unchanged."""
    del draws
    return images


AUGMENTATIONS = {"none": identity, "rotate": rotate, "flip_crop": flip_crop}


def make_mix(text: str, kind: str = "images") -> Mix | None:
    """Returns the function that draws the mask to mix a batch with.

    mixed_i = mask image_i + (1 - mask) image_(i-1),
    loss_i = mean(mask) loss(label_i) + (1 - mean(mask)) loss(label_(i-1))

    One mask serves the whole batch; the first image is mixed with the last.

    Args:
        text: A spec of `MIXES`, or several joined by ``|``, one of which is drawn for
            every batch with equal probability; "none" for no mixing.
        kind: "images", or "tokens" or "points", which cannot be mixed.

    Returns:
        A function from a key and ``(height, width)`` to the mask, shape
        ``[height, width]``; None for "none".

    Raises:
        ValueError: If a spec is unknown, an option is invalid, or the data are not
            images.

    Example:
        >>> mix = make_mix("cutmix(alpha=1.0) | mixup(alpha=0.8)")
        >>> mix(jax.random.key(0), (5, 7)).shape
        (5, 7)
    """
    if text == "none":
        return None
    if kind != "images":
        raise ValueError(
            f"data.mix={shorten(text)} mixes images, but the data are "
            f"{'text' if kind == 'tokens' else kind}: remove data.mix"
        )
    choices = [
        spec.resolve(choice, MIXES, "data.mix", reserved=("key", "size"))
        for choice in spec.alternatives(text)
    ]

    def mix(key: Key[Array, ""], size: tuple[int, int]) -> Array:
        choice_key, key = jax.random.split(key)
        masks = jnp.stack([choice(key, size) for choice in choices])
        return masks[jax.random.randint(choice_key, (), 0, len(choices))]

    # Raises on options out of range now, not in the first step.
    jax.eval_shape(lambda key: mix(key, (1, 1)), jax.random.key(0))
    return mix


def cutmix(
    key: Key[Array, ""], size: tuple[int, int], *, alpha: float = 1.0
) -> Float[Array, "height width"]:
    """Draws the mask of CutMix, which replaces a random rectangle of the image.

    The rectangle has 2 floor(height r) by 2 floor(width r) pixels, r = sqrt(1 - s) / 2,
    s ~ Beta(alpha, alpha). Its centre is uniform over the pixels; the rectangle is
    clipped to the image.

    Args:
        key: PRNG key.
        size: Height and width of the images.
        alpha: Parameter of the Beta distribution.

    Returns:
        The mask, shape ``[height, width]``: 0 in the rectangle and 1 elsewhere.

    Raises:
        ValueError: If ``alpha`` is not positive.

    Example:
        >>> mask = cutmix(jax.random.key(0), (5, 7))
        >>> mask.shape, set(mask.ravel().tolist()) <= {0.0, 1.0}
        ((5, 7), True)

    Source:
        Yun et al., CutMix, section 3.1, with the sides rounded as in torchvision.
    """
    share_key, *centre_keys = jax.random.split(key, 3)
    ratio = jnp.sqrt(1 - _draw_share(share_key, "cutmix", alpha)) / 2
    inside = []
    for axis_key, length in zip(centre_keys, size, strict=True):
        pixels = jnp.arange(length)
        half = jnp.floor(ratio * length)
        centre = jax.random.randint(axis_key, (), 0, length)
        inside.append((pixels >= centre - half) & (pixels < centre + half))
    return 1.0 - (inside[0][:, None] & inside[1]).astype(jnp.float32)


def mixup(
    key: Key[Array, ""], size: tuple[int, int], *, alpha: float = 1.0
) -> Float[Array, "height width"]:
    """Draws the mask of MixUp, one weight s ~ Beta(alpha, alpha) for every pixel.

    Args:
        key: PRNG key.
        size: Height and width of the images.
        alpha: Parameter of the Beta distribution.

    Returns:
        The mask, shape ``[height, width]``: s everywhere.

    Raises:
        ValueError: If ``alpha`` is not positive.

    Example:
        >>> mask = mixup(jax.random.key(0), (5, 7), alpha=0.8)
        >>> mask.shape, len(set(mask.ravel().tolist()))
        ((5, 7), 1)

    Source:
        Zhang et al., mixup, section 2.
    """
    return jnp.full(size, _draw_share(key, "mixup", alpha))


def _draw_share(key: Array, name: str, alpha: float) -> Array:
    if alpha <= 0:
        raise ValueError(f"data.mix: {name} needs a positive alpha, got {alpha}")
    return jax.random.beta(key, alpha, alpha, dtype=jnp.float32)


MIXES = {"cutmix": cutmix, "mixup": mixup}


def make_erase(text: str, kind: str = "images") -> Erase | None:
    """Returns the function that draws which pixels of an image are erased.

    erased = mask image, for model inputs: zero is black, or the mean of the training
    images if ``data.standardize`` is set.

    Args:
        text: A spec of `ERASES`; "none" for no erasing.
        kind: "images", or "tokens" or "points", which cannot be erased.

    Returns:
        A function from a key and ``(height, width)`` to the mask of an image, shape
        ``[height, width]``; None for "none".

    Raises:
        ValueError: If the spec is unknown, an option is invalid, or the data are not
            images.

    Example:
        >>> erase = make_erase("random_erasing(probability=0.5)")
        >>> erase(jax.random.key(0), (5, 7)).shape
        (5, 7)
    """
    if text == "none":
        return None
    if kind != "images":
        raise ValueError(
            f"data.erase={shorten(text)} erases parts of images, but the data are "
            f"{'text' if kind == 'tokens' else kind}: remove data.erase"
        )
    erase = spec.resolve(text, ERASES, "data.erase", reserved=("key", "size"))
    # Raises on options out of range now, not in the first step.
    jax.eval_shape(lambda key: erase(key, (1, 1)), jax.random.key(0))
    return erase


def random_erasing(
    key: Key[Array, ""],
    size: tuple[int, int],
    *,
    probability: float = 0.25,
    min_area: float = 0.02,
    max_area: float = 1 / 3,
    min_aspect: float = 0.3,
) -> Float[Array, "height width"]:
    """Draws the mask of Random Erasing: with a probability one rectangle is erased.

    The rectangle's fraction of the area is uniform from ``min_area`` to ``max_area``,
    its height divided by its width log-uniform from ``min_aspect`` to 1 /
    ``min_aspect``. If it does not fit, another is drawn, at most `ATTEMPTS`. Its place
    is uniform.

    Args:
        key: PRNG key.
        size: Height and width of the images.
        probability: Probability that a part is erased.
        min_area: Smallest fraction of the area.
        max_area: Largest fraction of the area.
        min_aspect: Smallest ratio of height and width.

    Returns:
        The mask, shape ``[height, width]``: 0 in the rectangle and 1 elsewhere.

    Raises:
        ValueError: If an option is out of range.

    Example:
        >>> mask = random_erasing(jax.random.key(0), (8, 8), probability=1.0)
        >>> mask.shape, set(mask.ravel().tolist())
        ((8, 8), {0.0, 1.0})

    Source:
        Zhong et al., Random Erasing Data Augmentation, algorithm 1, with the sides
        rounded as in timm and torchvision.
    """
    if not 0 <= probability <= 1:
        raise ValueError(
            "data.erase: random_erasing needs a probability from 0 to 1, got "
            f"{probability}"
        )
    if not 0 < min_area <= max_area < 1:
        raise ValueError(
            "data.erase: random_erasing needs 0 < min_area <= max_area < 1, got "
            f"{min_area} and {max_area}"
        )
    if not 0 < min_aspect <= 1:
        raise ValueError(
            "data.erase: random_erasing needs a min_aspect above 0 and at most 1, got "
            f"{min_aspect}"
        )
    height, width = size
    draws = jax.random.uniform(key, (2 * ATTEMPTS + 3,))
    areas, aspects = draws[3:].reshape(2, ATTEMPTS)
    areas = height * width * (min_area + (max_area - min_area) * areas)
    aspects = jnp.exp((1 - 2 * aspects) * math.log(min_aspect))
    rows, columns = jnp.round(jnp.sqrt(jnp.stack([areas * aspects, areas / aspects])))
    fits = (rows < height) & (columns < width)
    first = jnp.argmax(fits)
    erased = (draws[0] < probability) & fits[first]
    inside = []
    for draw, length, side in zip(draws[1:3], size, (rows, columns), strict=True):
        pixels, side = jnp.arange(length), side[first]
        start = jnp.floor(draw * (length - side + 1))
        inside.append((pixels >= start) & (pixels < start + side))
    rectangle = inside[0][:, None] & inside[1] & erased
    return 1.0 - rectangle.astype(jnp.float32)


ERASES = {"random_erasing": random_erasing}

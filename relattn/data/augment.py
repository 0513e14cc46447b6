"""Augmentation of batches under jit: of small images, and CutMix and MixUp."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from relattn import spec

# Numbers drawn for an image; an augmentation uses the first of them.
NUM_DRAWS = 3


def rotate(
    images: Float[Array, "batch height width channels"],
    draws: Float[Array, "batch draws"],
    *,
    degrees: int | float = 10,
) -> Float[Array, "batch height width channels"]:
    """Turns each image about its centre, by an angle uniform in +-degrees.

    The pixel (x, y) of the result, counted from the centre and y downwards, is the
    image at (x cos a - y sin a, x sin a + y cos a), bilinear, with zeros around the
    image; positive angles are counter-clockwise.

    Args:
        images: [batch, height, width, channels].
        draws: [batch, at least 1], uniform in [0, 1).
        degrees: the largest angle.

    Returns:
        Images of the same shape.

    Raises:
        ValueError: `degrees` is not between 0 and 180.

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

    def turn(image: Array, angle: Array) -> Array:
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
    return jax.vmap(turn)(images, angles)


def flip_crop(
    images: Float[Array, "batch height width channels"],
    draws: Float[Array, "batch draws"],
    *,
    padding: int = 4,
) -> Float[Array, "batch height width channels"]:
    """Mirrors half of the images left and right, and moves each up to `padding` pixels.

    That is a crop of the image's size, anywhere with equal probability, of the image
    with `padding` rows and columns of zeros around it.

    Args:
        images: [batch, height, width, channels].
        draws: [batch, at least 3], uniform in [0, 1): of the flip, the row and the
            column.
        padding: in pixels.

    Returns:
        Images of the same shape.

    Raises:
        ValueError: `padding` is negative.

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
    around = [(0, 0), (padding, padding), (padding, padding), (0, 0)]
    corners = jnp.floor(draws[:, 1:3] * (2 * padding + 1)).astype(jnp.int32)

    def crop(padded: Array, corner: Array) -> Array:
        start = (corner[0], corner[1], 0)
        return jax.lax.dynamic_slice(padded, start, images.shape[1:])

    return jax.vmap(crop)(jnp.pad(images, around), corners)


def keep(
    images: Float[Array, "batch height width channels"],
    draws: Float[Array, "batch draws"],
) -> Float[Array, "batch height width channels"]:
    """Changes nothing."""
    del draws
    return images


AUGMENTATIONS = {"none": keep, "rotate": rotate, "flip_crop": flip_crop}


def augment(
    images: Float[Array | np.ndarray, "batch height width channels"],
    draws: Float[Array | np.ndarray, "batch draws"],
    augmentation: str,
) -> Float[Array, "batch height width channels"]:
    """Augments a batch of images as a spec says.

    Args:
        images: [batch, height, width, channels].
        draws: [batch, NUM_DRAWS], uniform in [0, 1).
        augmentation: a spec of `AUGMENTATIONS`, "rotate(degrees=10)".

    Returns:
        Images of the same shape.

    Raises:
        ValueError: there is no such augmentation, or an option does not fit.

    Example:
        >>> augment(jnp.ones((2, 5, 7, 3)), jnp.zeros((2, 3)), "rotate").shape
        (2, 5, 7, 3)
    """
    function = spec.resolve(
        augmentation, AUGMENTATIONS, "data.augment", reserved=("images", "draws")
    )
    return function(jnp.asarray(images), jnp.asarray(draws))


def check_augmentation(augmentation: str) -> None:
    """Raises unless a spec names an augmentation and options that it has.

    Args:
        augmentation: a spec of `AUGMENTATIONS`.

    Raises:
        ValueError: there is no such augmentation, or an option does not fit.
    """
    jax.eval_shape(
        lambda images, draws: augment(images, draws, augmentation),
        jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.float32),
        jax.ShapeDtypeStruct((1, NUM_DRAWS), jnp.float32),
    )


# From a key and (height, width) to the weight of the image in every pixel.
Mix = Callable[[Key[Array, ""], tuple[int, int]], Float[Array, "height width"]]


def cutmix(
    key: Key[Array, ""], size: tuple[int, int], *, alpha: float = 1.0
) -> Float[Array, "height width"]:
    """CutMix: replaces a random rectangle of the image.

    The rectangle has 2 floor(height r) by 2 floor(width r) pixels, r = sqrt(1 - s) / 2,
    s ~ Beta(alpha, alpha). Its centre is uniform over the pixels; what lies outside of
    the image is cut off.

    Args:
        key: of the random numbers.
        size: height and width.
        alpha: of the Beta distribution.

    Returns:
        [height, width], 0 in the rectangle and 1 elsewhere.

    Raises:
        ValueError: `alpha` is not positive.

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
    """MixUp: the same weight s ~ Beta(alpha, alpha) for every pixel.

    Args:
        key: of the random number.
        size: height and width.
        alpha: of the Beta distribution.

    Returns:
        [height, width], all s.

    Raises:
        ValueError: `alpha` is not positive.

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


def make_mix(text: str, kind: str = "images") -> Mix | None:
    """Makes the function that draws how a batch is mixed.

    mixed_i = mask image_i + (1 - mask) image_(i-1),
    loss_i = mean(mask) loss(label_i) + (1 - mean(mask)) loss(label_(i-1))

    The mask is one for the whole batch; the first image is mixed with the last.

    Args:
        text: a spec of `MIXES`, or several joined by ``|``, of which every batch uses
            one at random with equal probability; "none" for no mixing.
        kind: "images", or "tokens", which cannot be mixed.

    Returns:
        A function from a key and (height, width) to the mask [height, width]; None
        for "none".

    Raises:
        ValueError: there is no such spec, an option does not fit, or the data are text.

    Example:
        >>> mix = make_mix("cutmix(alpha=1.0) | mixup(alpha=0.8)")
        >>> mix(jax.random.key(0), (5, 7)).shape
        (5, 7)
    """
    if text == "none":
        return None
    if kind != "images":
        raise ValueError(
            f"data.mix={spec.shorten(text)} mixes images, and the data are text: "
            "leave data.mix out"
        )
    choices = [
        spec.resolve(choice, MIXES, "data.mix", reserved=("key", "size"))
        for choice in spec.alternatives(text)
    ]

    def mix(key: Key[Array, ""], size: tuple[int, int]) -> Array:
        choice_key, key = jax.random.split(key)
        masks = jnp.stack([choice(key, size) for choice in choices])
        return masks[jax.random.randint(choice_key, (), 0, len(choices))]

    # Options out of range are refused here, not in the first step.
    jax.eval_shape(lambda key: mix(key, (1, 1)), jax.random.key(0))
    return mix

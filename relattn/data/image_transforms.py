"""Transforms of single Pillow images on the host: crops, flips and RandAugment.

The crops equal torchvision's ``RandomResizedCrop``, ``Resize`` and ``CenterCrop`` on
Pillow images: bilinear, with antialiasing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

SCALE = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
ATTEMPTS = 10
# A longer image loses its ends before the resize, which would enlarge them too.
MAX_ASPECT = 16
# A magnitude is one of torchvision's 31 bins, 0 .. 30.
MAX_MAGNITUDE = 30


def random_resized_crop(
    image: Image.Image,
    rng: np.random.Generator,
    size: int,
    interpolation: str = "bilinear",
) -> Image.Image:
    """Crops a random rectangle and resizes it to a square.

    The area is uniform in 8% to 100% of the image, the aspect ratio (width over height)
    log-uniform in 3/4 to 4/3. If ten draws do not fit into the image, the result is the
    largest central rectangle with an aspect ratio within these bounds.

    Args:
        image: Image of any size.
        rng: Random generator.
        size: Side of the result.
        interpolation: Name of a filter of Pillow.

    Returns:
        An image of size x size.

    Example:
        >>> image = Image.new("RGB", (7, 5))
        >>> random_resized_crop(image, np.random.default_rng(0), 3).size
        (3, 3)

    Source:
        Szegedy et al., Going Deeper with Convolutions, section 6.
    """
    box = draw_crop(*image.size, rng)
    filter = Image.Resampling[interpolation.upper()]
    return image.crop(box).resize((size, size), filter)


def draw_crop(
    width: int, height: int, rng: np.random.Generator
) -> tuple[int, int, int, int]:
    """Draws the rectangle of `random_resized_crop`.

    Args:
        width: Width of the image.
        height: Height of the image.
        rng: Random generator.

    Returns:
        (left, top, right, bottom).

    Example:
        >>> draw_crop(100, 1, np.random.default_rng(0))
        (49, 0, 50, 1)
    """
    low, high = (math.log(ratio) for ratio in RATIO)
    for _ in range(ATTEMPTS):
        area = width * height * rng.uniform(*SCALE)
        ratio = math.exp(rng.uniform(low, high))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left = int(rng.integers(width - w + 1))
            top = int(rng.integers(height - h + 1))
            return left, top, left + w, top + h
    w = min(width, round(height * RATIO[1]))
    h = min(height, round(width / RATIO[0]))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def random_flip(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Flips an image left-right with probability 1/2.

    Args:
        image: Image of any size.
        rng: Random generator.

    Returns:
        An image of the same size.

    Example:
        >>> random_flip(Image.new("L", (7, 5)), np.random.default_rng(0)).size
        (7, 5)
    """
    if rng.integers(2):
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return image


def resized_center_crop(
    image: Image.Image,
    size: int,
    short_side: int,
    margin: int = 0,
    interpolation: str = "bilinear",
    floor_crop: bool = False,
) -> Image.Image:
    """Resizes the short side and crops the central square.

    Args:
        image: Image of any size.
        size: Side of the result, without the margin.
        short_side: Short side of the image after the resize, at least ``size``.
        margin: Number of pixels to add on every side of the square.
        interpolation: Name of a filter of Pillow.
        floor_crop: Whether half a pixel left or above the square is rounded down, as by
            transformers, instead of to the even number, as by torchvision.

    Returns:
        An image of size x size, with the margin around it.

    Raises:
        ValueError: If the square and its margin do not fit into the resized image.

    Example:
        >>> resized_center_crop(Image.new("RGB", (500, 375)), 224, 256).size
        (224, 224)
    """
    if not 1 <= size <= size + 2 * margin <= short_side:
        raise ValueError(
            f"short_side={short_side} with size={size}: the square must fit into the "
            "resized image"
        )
    image = _cut_ends(image)
    shortest = min(image.size)
    width, height = (short_side * side // shortest for side in image.size)
    image = image.resize((width, height), Image.Resampling[interpolation.upper()])
    rounded = math.floor if floor_crop else round
    left, top = (rounded((side - size) / 2) - margin for side in (width, height))
    size += 2 * margin
    return image.crop((left, top, left + size, top + size))


def _cut_ends(image: Image.Image) -> Image.Image:
    """Returns the central part of an image that is far longer than wide."""
    shortest = min(image.size)
    margins = [max(0, side - MAX_ASPECT * shortest) // 2 for side in image.size]
    if not any(margins):
        return image
    left, top = margins
    return image.crop((left, top, image.width - left, image.height - top))


def randaugment(
    image: Image.Image,
    rng: np.random.Generator,
    *,
    num_ops: int = 2,
    magnitude: int = 9,
) -> Image.Image:
    """Applies random operations of one magnitude, one after another.

    Each operation is one of the 14 `OPERATIONS`, drawn with equal probability and with
    replacement; a signed operation takes either sign with probability 1/2. Pixels from
    outside the image are black.

    Args:
        image: Grey ("L") or colour ("RGB") image.
        rng: Random generator.
        num_ops: Number of operations to apply.
        magnitude: 0 .. 30; 30 shears by 0.3, rotates by 30 degrees, changes colours by
            0.9, and so on.

    Returns:
        An image of the same size and mode.

    Raises:
        ValueError: If ``num_ops`` is negative or ``magnitude`` not within 0 .. 30.

    Example:
        >>> image = Image.new("RGB", (7, 5), "red")
        >>> randaugment(image, np.random.default_rng(0)).size
        (7, 5)

    Source:
        Cubuk et al., RandAugment: Practical Automated Data Augmentation with a Reduced
        Search Space. Operations, ranges, nearest-neighbour sampling and black filling
        as in torchvision's ``RandAugment(2, 9)``; torchvision computes strengths in
        float32, so some pixel values differ by 1.
    """
    if num_ops < 0:
        raise ValueError(f"randaugment: num_ops={num_ops} must be at least 0")
    if not 0 <= magnitude <= MAX_MAGNITUDE:
        raise ValueError(
            f"randaugment: magnitude={magnitude} must be within 0 .. {MAX_MAGNITUDE}"
        )
    names = list(OPERATIONS)
    for _ in range(num_ops):
        operation = OPERATIONS[names[rng.integers(len(names))]]
        value = operation.value(magnitude, *image.size)
        # Drawn for every operation, so that later draws do not depend on this one.
        flipped = rng.integers(2) == 1
        image = operation.apply(
            image, -value if operation.signed and flipped else value
        )
    return image


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of RandAugment.

    Attributes:
        value: Returns the strength for (magnitude, width, height).
        apply: Applies the operation to (image, strength).
        signed: Whether the strength is negated with probability 1/2.
    """

    value: Callable[[int, int, int], float]
    apply: Callable[[Image.Image, float], Image.Image]
    signed: bool


_signed = functools.partial(Operation, signed=True)
_unsigned = functools.partial(Operation, signed=False)


def _affine(image: Image.Image, *inverse: float | int) -> Image.Image:
    """Applies an affine map, given the two rows of its inverse, result to source."""
    return image.transform(
        image.size, Image.Transform.AFFINE, inverse, Image.Resampling.NEAREST
    )


def _enhance(kind: type) -> Callable[[Image.Image, float], Image.Image]:
    return lambda image, value: kind(image).enhance(1 + value)


def _up_to(limit: float) -> Callable[[int, int, int], float]:
    return lambda magnitude, width, height: limit * magnitude / MAX_MAGNITUDE


OPERATIONS = {
    "identity": _unsigned(_up_to(0.0), lambda image, _: image),
    "shear_x": _signed(
        _up_to(0.3), lambda image, value: _affine(image, 1, value, 0, 0, 1, 0)
    ),
    "shear_y": _signed(
        _up_to(0.3), lambda image, value: _affine(image, 1, 0, 0, value, 1, 0)
    ),
    "translate_x": _signed(
        lambda magnitude, width, height: 150 / 331 * width * magnitude / MAX_MAGNITUDE,
        lambda image, value: _affine(image, 1, 0, -int(value), 0, 1, 0),
    ),
    "translate_y": _signed(
        lambda magnitude, width, height: 150 / 331 * height * magnitude / MAX_MAGNITUDE,
        lambda image, value: _affine(image, 1, 0, 0, 0, 1, -int(value)),
    ),
    "rotate": _signed(_up_to(30.0), lambda image, value: image.rotate(value)),
    "brightness": _signed(_up_to(0.9), _enhance(ImageEnhance.Brightness)),
    "color": _signed(_up_to(0.9), _enhance(ImageEnhance.Color)),
    "contrast": _signed(_up_to(0.9), _enhance(ImageEnhance.Contrast)),
    "sharpness": _signed(_up_to(0.9), _enhance(ImageEnhance.Sharpness)),
    "posterize": _unsigned(
        # Number of bits kept, an integer: 8 down to 4.
        lambda magnitude, width, height: 8 - round(4 * magnitude / MAX_MAGNITUDE),
        lambda image, value: ImageOps.posterize(image, int(value)),
    ),
    "solarize": _unsigned(
        # Values from this threshold on are inverted: only white at magnitude 0.
        lambda magnitude, width, height: 255 - 255 * magnitude / MAX_MAGNITUDE,
        ImageOps.solarize,  # pyright: ignore[reportArgumentType]: it only compares.
    ),
    "autocontrast": _unsigned(
        _up_to(0.0), lambda image, _: ImageOps.autocontrast(image)
    ),
    "equalize": _unsigned(_up_to(0.0), lambda image, _: ImageOps.equalize(image)),
}

"""Square crops of photographs as Pillow images: random to train, central to evaluate.

The results are those of torchvision's ``RandomResizedCrop``, ``Resize`` and
``CenterCrop`` on Pillow images: bilinear, averaging where an image shrinks.
"""

import math

import numpy as np
from PIL import Image

SCALE = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
ATTEMPTS = 10


def random_resized_crop(
    image: Image.Image, rng: np.random.Generator, size: int
) -> Image.Image:
    """Cuts a random rectangle out and resizes it to a square.

    Its area is a uniform part of 8% to 100% of the image, its width over its height
    log-uniform between 3/4 and 4/3. Ten draws that do not fit into the image are
    followed by the largest central rectangle of a shape within these bounds.

    Args:
        image: of any size.
        rng: source of the draws.
        size: side of the result.

    Returns:
        An image of size x size.

    Example:
        >>> image = Image.new("RGB", (7, 5))
        >>> random_resized_crop(image, np.random.default_rng(0), 3).size
        (3, 3)

    Source: Szegedy et al., "Going deeper with convolutions", 2014, section 6.
    """
    box = draw_crop(*image.size, rng)
    return image.crop(box).resize((size, size), Image.Resampling.BILINEAR)


def draw_crop(
    width: int, height: int, rng: np.random.Generator
) -> tuple[int, int, int, int]:
    """Draws the rectangle of `random_resized_crop`.

    Args:
        width: of the image.
        height: of the image.
        rng: source of the draws.

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
    """Mirrors left and right with probability 1/2.

    Args:
        image: of any size.
        rng: source of the draw.

    Returns:
        An image of the same size.

    Example:
        >>> random_flip(Image.new("L", (7, 5)), np.random.default_rng(0)).size
        (7, 5)
    """
    if rng.integers(2):
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return image


def resized_center_crop(image: Image.Image, size: int, short_side: int) -> Image.Image:
    """Resizes the short side and cuts the central square out.

    Args:
        image: of any size.
        size: side of the result.
        short_side: of the image after the resize, at least `size`.

    Returns:
        An image of size x size.

    Raises:
        ValueError: `short_side` is less than `size`.

    Example:
        >>> resized_center_crop(Image.new("RGB", (500, 375)), 224, 256).size
        (224, 224)
    """
    if not 1 <= size <= short_side:
        raise ValueError(
            f"short_side={short_side} with size={size}: the square must fit into the "
            "resized image."
        )
    shortest = min(image.size)
    width, height = (short_side * side // shortest for side in image.size)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.crop((left, top, left + size, top + size))

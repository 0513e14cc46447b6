"""Small synthetic volumes: digits of MNIST that move in one of eight directions."""

from __future__ import annotations

import numpy as np
from jaxtyping import UInt8

from relattn.data.images import (
    ImageData,
    ImageSplit,
    channel_statistics,
    split_validation,
)
from relattn.data.registry import EMBEDDED_FOLDER, EMBEDDED_VERSION
from relattn.data.tfds import read_prepared

FRAMES, SIDE, DIGIT = 8, 28, 14
# Rows and columns of a step; rows count downwards.
DIRECTIONS = {
    "right": (0, 1),
    "down right": (1, 1),
    "down": (1, 0),
    "down left": (1, -1),
    "left": (0, -1),
    "up left": (-1, -1),
    "up": (-1, 0),
    "up right": (-1, 1),
}
# Largest step in pixels: the digit stays in the frame.
MAX_SPEED = (SIDE - DIGIT) // (FRAMES - 1)


def make_moving_digits(num_validation: int = 0, split_seed: int = 0) -> ImageData:
    """Makes volumes of the embedded subset of MNIST: 8 frames of 28x28 pixels.

    The class is the direction of motion, one of eight. Each digit of the subset is in
    one volume, scaled to 14x14 pixels; the test volumes show its test images.

    Args:
        num_validation: Number of training volumes held out for validation.
        split_seed: Seed that selects them, and of the motions.

    Returns:
        The volumes, in memory.

    Raises:
        ValueError: If ``num_validation`` leaves no training volume.

    Example:
        >>> data = make_moving_digits(num_validation=500)
        >>> len(data.train), len(data.test), data.image_shape, data.num_classes
        (4500, 1000, (8, 28, 28, 1), 8)
    """
    train, test, _ = read_prepared(EMBEDDED_FOLDER / "mnist" / EMBEDDED_VERSION)
    train, test = (
        move_digits(split.images, [split_seed, number])
        for number, split in enumerate((train, test))
    )
    train, validation = split_validation(train, num_validation, split_seed)
    mean, std = channel_statistics(train.images)
    origin = (
        "the subset of MNIST that ships with relattn, whose digits move in one of "
        f"{len(DIRECTIONS)} directions"
    )
    return ImageData(
        "moving_digits", train, validation, test, tuple(DIRECTIONS), mean, std, origin
    )


def move_digits(images: UInt8[np.ndarray, "n 28 28 1"], seed: list[int]) -> ImageSplit:
    """Moves each image, at half its size, through the frames of a volume.

    The direction, the speed of 1 or 2 pixels for each frame and the start are uniform,
    such that the digit is in all frames. They are a function of the seed and the index
    of the image.

    Args:
        images: Digits, uint8, shape ``[n, 28, 28, 1]``.
        seed: Seed of NumPy's generator.

    Returns:
        Volumes, uint8, shape ``[n, 8, 28, 28, 1]``, and the number of each direction.

    Example:
        >>> split = move_digits(np.full((2, 28, 28, 1), 255, np.uint8), [0])
        >>> int((split.images[0] > 0).sum()) == 8 * 14 * 14
        True
    """
    volumes = np.zeros((len(images), FRAMES, SIDE, SIDE, 1), np.uint8)
    labels = np.zeros(len(images), np.int32)
    directions = np.array([*DIRECTIONS.values()])
    for index, digit in enumerate(_halve(images)):
        rng = np.random.default_rng([*seed, index])
        labels[index] = rng.integers(len(directions))
        speed = rng.integers(1, MAX_SPEED, endpoint=True)
        corners = np.arange(FRAMES)[:, None] * speed * directions[labels[index]]
        corners = corners - corners.min(axis=0)
        corners += rng.integers(SIDE - DIGIT - corners.max(axis=0), endpoint=True)
        for frame, (row, column) in zip(volumes[index], corners, strict=True):
            frame[row : row + DIGIT, column : column + DIGIT] = digit
    return ImageSplit(volumes, labels)


def _halve(images):
    """Averages the pixels of 2x2 squares."""
    squares = images.reshape(len(images), DIGIT, 2, DIGIT, 2, 1)
    return squares.mean(axis=(2, 4)).round().astype(np.uint8)

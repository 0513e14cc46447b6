"""MNIST as sets of points: pixels of a digit, with their grey values."""

from __future__ import annotations

import zlib

import numpy as np
from jaxtyping import Int32, UInt8

from relattn.data.points import PointData, PointSplit
from relattn.data.registry import EMBEDDED_FOLDER, EMBEDDED_VERSION
from relattn.data.tfds import read_prepared

NUM_POINTS = 100
# The largest shift along an axis: a side of an image, in pixels.
MAX_SHIFT = 28.0


def make_mnist_points(
    num_validation: int = 0, split_seed: int = 0, num_points: int = NUM_POINTS
) -> PointData:
    """Makes sets of points of the embedded subset of MNIST.

    Args:
        num_validation: Number of training sets held out for validation.
        split_seed: Seed that selects them, and of the pixels and shifts.
        num_points: Number of points of an image.

    Returns:
        The sets, in memory. Positions are in pixels from the centre of the image. The
        split ``test_shifted`` has the test sets, each shifted by a real vector, uniform
        up to 28 pixels along each axis.

    Raises:
        ValueError: If ``num_validation`` leaves no training set.

    Example:
        >>> data = make_mnist_points(num_validation=500)
        >>> len(data.train), data.info.point_shape, sorted(data.eval_splits)
        (4500, (100, 2, 1), ['test', 'test_shifted', 'validation'])
    """
    train, test, class_names = read_prepared(
        EMBEDDED_FOLDER / "mnist" / EMBEDDED_VERSION
    )
    train, test = (
        draw_points(split.images, split.labels, split_seed, num_points)
        for split in (train, test)
    )
    return PointData.from_splits(
        "mnist_points",
        train,
        class_names,
        num_validation=num_validation,
        test=test,
        split_seed=split_seed,
        origin=f"the subset of MNIST that ships with relattn, {num_points} points of "
        "each image",
        more_tests={"test_shifted": shift_points(test, split_seed)},
    )


def draw_points(
    images: UInt8[np.ndarray, "n height width 1"],
    labels: Int32[np.ndarray, " n"],
    seed: int,
    num_points: int = NUM_POINTS,
) -> PointSplit:
    """Draws points of each image: pixels that are not black.

    They are drawn without replacement, with equal probabilities, as a function of the
    image and the seed. If there are fewer, the others are padding.

    Args:
        images: Images, uint8, shape ``[n, height, width, 1]``.
        labels: Their labels, shape ``[n]``.
        seed: Seed of the draws.
        num_points: Number of points of an image.

    Returns:
        Positions (row, column) from the centre of the image, in pixels, and the grey
        value from 0 to 1.

    Example:
        >>> images = np.zeros((1, 5, 5, 1), np.uint8)
        >>> images[0, 1, 4] = 255
        >>> draw_points(images, np.zeros(1, np.int32), 0, 2).points.tolist()
        [[[-1.0, 2.0, 1.0], [nan, nan, nan]]]
    """
    centre = (np.array(images.shape[1:3]) - 1) / 2
    points = np.full((len(images), num_points, 3), np.nan)
    for image, found in zip(images[..., 0], points, strict=True):
        # Equal images have equal points, wherever they are in the data.
        rng = np.random.default_rng([seed, zlib.crc32(image.tobytes())])
        pixels = rng.permutation(np.argwhere(image))[:num_points]
        found[: len(pixels), :2] = pixels - centre
        found[: len(pixels), 2] = image[tuple(pixels.T)] / 255
    return PointSplit.from_arrays(
        points[..., :2], labels, points[..., 2:], ~np.isnan(points[..., 0])
    )


def shift_points(
    split: PointSplit, seed: int, max_shift: float = MAX_SHIFT
) -> PointSplit:
    """Moves the points of each set by a vector of real numbers.

    Args:
        split: Sets of points.
        seed: Seed of the vectors.
        max_shift: Largest shift along an axis; shifts are uniform up to it.

    Returns:
        The shifted sets.
    """
    points, axes = split.points.copy(), split.num_axes
    vectors = np.random.default_rng(seed).uniform(
        -max_shift, max_shift, (len(split), 1, axes)
    )
    points[..., :axes] += vectors.astype(np.float32)
    return PointSplit(points, split.labels, axes)

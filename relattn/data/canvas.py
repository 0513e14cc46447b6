"""Image sets on a larger canvas: static and dynamic MNIST."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

import numpy as np
from jaxtyping import Int, Int64, UInt8
from ml_collections import ConfigDict

from relattn.data.base import CACHED_EPOCHS, Batch, EvalSplit
from relattn.data.images import ImageData, ImageSplit
from relattn.messages import check_choice, shorten

# Placements of test images, and of all images.
TESTS = ("static", "dynamic")
PLACEMENTS = (*TESTS, "dynamic_once")
# Random streams, distinct from the batch order's [seed, epoch] and from
# `relattn.data.images.AUGMENTATION`.
TRAINING, EVALUATION = 1, 2
# Limit for the evaluation images, which are placed once and stay in memory.
MAX_EVAL_BYTES = 2**34


def place_on_canvas(data: ImageData, config: ConfigDict) -> PlacedData:
    """Puts the images of a set on a canvas.

    Args:
        data: The set.
        config: Options of the data: ``placement``, "static" (in the centre),
            "dynamic" (anywhere, with equal probability; in training at new positions in
            each epoch) or "dynamic_once" (the same, but in training at the same
            positions in each epoch); ``canvas``, its height and width, by default 84;
            ``split_seed``, the seed of the evaluation positions.

    Returns:
        The same images on the canvas.

    Raises:
        ValueError: If the placement is unknown, the images are volumes, or the canvas
            is too small or too large.

    Source:
        Fan et al., Translution, section 4.1.1, which does not say whether an image has
        one position in all epochs.
    """
    placement = config.placement
    check_choice("data.placement", placement, PLACEMENTS)
    canvas, shape = config.get("canvas", 84), data.image_shape
    if len(shape) != 3:
        raise ValueError(
            f"data.placement={placement!r} places images of height and width, not "
            "volumes: leave it at ''"
        )
    if not isinstance(canvas, int | np.integer) or canvas < max(shape[:2]):
        raise ValueError(
            f"data.canvas={shorten(canvas)} must be an integer of at least "
            f"{max(shape[:2])}, the size of the images of {shape[0]}x{shape[1]} pixels"
        )
    canvas = int(canvas)
    # The test images are placed both ways.
    count = (len(data.validation) + 2 * len(data.test)) * shape[2]
    max_canvas = math.isqrt(MAX_EVAL_BYTES // max(1, count))
    if canvas > max_canvas:
        raise ValueError(
            f"data.canvas={shorten(canvas)} needs over "
            f"{MAX_EVAL_BYTES / 1e9:.0f} GB for the evaluation images: it must be at "
            f"most {max_canvas}"
        )
    seed = config.get("split_seed", 0)

    def place_split(split: ImageSplit, how: str, number: int) -> ImageSplit:
        if how == "static":
            corners = centre_corners(len(split), shape, canvas)
        else:
            key = [seed, number, EVALUATION]
            corners = draw_corners(len(split), shape, canvas, key)
        return ImageSplit(place(split.images, corners, canvas), split.labels)

    tests = {how: place_split(data.test, how, 1) for how in TESTS}
    mean, std = _canvas_statistics(data, canvas)
    where = {
        "static": "in the centre of",
        "dynamic": "anywhere on",
        "dynamic_once": "anywhere, in each epoch at the same place, on",
    }[placement]
    return PlacedData(
        name=data.name,
        train=data.train,
        validation=place_split(data.validation, placement, 0),
        test=tests["static" if placement == "static" else "dynamic"],
        class_names=data.class_names,
        mean=mean,
        std=std,
        origin=f"{data.origin}, {where} {canvas}x{canvas} pixels",
        placement=placement,
        canvas=canvas,
        test_static=tests["static"],
        test_dynamic=tests["dynamic"],
        augment=data.augment,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class PlacedData(ImageData):
    """Images on a canvas, in the centre or anywhere: a `DataSource`.

    ``train`` holds the original images, which `training_batch` places. The other splits
    are placed already, at fixed positions.

    Attributes:
        placement: "static", "dynamic" or "dynamic_once": placement of training,
            validation and ``test``.
        canvas: Height and width of the canvas.
        test_static: Test images in the centre.
        test_dynamic: Test images anywhere.
    """

    placement: str
    canvas: int
    test_static: ImageSplit
    test_dynamic: ImageSplit

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Returns (height, width, channels) of the canvas."""
        return self.canvas, self.canvas, self.train.images.shape[3]

    @property
    def eval_splits(self) -> Mapping[str, EvalSplit]:
        """Returns the evaluation splits by name; "test" is placed as in training."""
        tests = {"test_static": self.test_static, "test_dynamic": self.test_dynamic}
        return {**super().eval_splits, **tests}

    def training_batch(
        self, indices: Int64[np.ndarray, " batch"], seed: int, epoch: int
    ) -> Batch:
        """Returns training images on the canvas.

        A dynamic position is a function of the image, the seed and, unless the
        placement is "dynamic_once", the epoch.

        Args:
            indices: Indices of the images.
            seed: Seed of the positions.
            epoch: Epoch of the positions.

        Returns:
            The same batch as `ImageSplit.gather`, with images on the canvas.
        """
        batch = self.train.gather(indices)
        shape = self.train.images.shape[1:]
        if self.placement == "static":
            corners = centre_corners(len(indices), shape, self.canvas)
        else:
            n = len(self.train)
            epoch = 0 if self.placement == "dynamic_once" else epoch
            corners = _training_corners(n, shape, self.canvas, seed, epoch)[indices]
        return {**batch, "image": place(batch["image"], corners, self.canvas)}


def place(
    images: UInt8[np.ndarray, "n height width channels"],
    corners: Int[np.ndarray, "n 2"],
    canvas: int,
) -> UInt8[np.ndarray, "n {canvas} {canvas} channels"]:
    """Puts each image on a black canvas, without resizing it.

    Args:
        images: Images, shape ``[n, height, width, channels]``.
        corners: Row and column of the upper left pixel of each image, shape
            ``[n, 2]``.
        canvas: Height and width of the results.

    Returns:
        The canvases, shape ``[n, canvas, canvas, channels]``.

    Example:
        >>> image = np.full((1, 1, 2, 1), 9, np.uint8)
        >>> place(image, np.array([[1, 0]]), 3)[0, ..., 0].tolist()
        [[0, 0, 0], [9, 9, 0], [0, 0, 0]]
    """
    n, height, width, channels = images.shape
    placed = np.zeros((n, canvas, canvas, channels), np.uint8)
    for result, image, (row, column) in zip(placed, images, corners, strict=True):
        result[row : row + height, column : column + width] = image
    return placed


def centre_corners(
    num_images: int, image_shape: tuple[int, ...], canvas: int
) -> Int64[np.ndarray, "{num_images} 2"]:
    """Returns the corners that centre images, rounded towards the upper left."""
    corner = [(canvas - size) // 2 for size in image_shape[:2]]
    return np.tile(np.array(corner, np.int64), (num_images, 1))


def draw_corners(
    num_images: int, image_shape: tuple[int, ...], canvas: int, seed: list[int]
) -> Int64[np.ndarray, "{num_images} 2"]:
    """Draws corners uniformly, such that every image lies within the canvas.

    Args:
        num_images: Number of corners.
        image_shape: (height, width, ...) of the images.
        canvas: Height and width of the canvas.
        seed: Seed of NumPy's generator.

    Returns:
        Rows and columns, shape ``[num_images, 2]``.
    """
    span = [canvas - size + 1 for size in image_shape[:2]]
    return np.random.default_rng(seed).integers(0, span, (num_images, 2))


@functools.lru_cache(maxsize=CACHED_EPOCHS)
def _training_corners(
    num_images: int, image_shape: tuple[int, ...], canvas: int, seed: int, epoch: int
) -> np.ndarray:
    return draw_corners(num_images, image_shape, canvas, [seed, epoch, TRAINING])


def _canvas_statistics(data: ImageData, canvas: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean and standard deviation including the black pixels of the canvas."""
    height, width, _ = data.image_shape
    share = height * width / canvas**2
    mean, std = data.mean.astype(np.float64), data.std.astype(np.float64)
    squares = share * (std**2 + mean**2)
    mean = share * mean
    std = np.sqrt(squares - mean**2)
    return mean.astype(np.float32), std.astype(np.float32)

"""Converts arrays, PIL images and image files to a data set's stored form."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt8
from ml_collections import ConfigDict
from PIL import Image, ImageOps

from relattn.data.base import ImageInfo
from relattn.data.image_io import GREY_MODES, decode_image, open_image
from relattn.data.image_transforms import resized_center_crop

UserImage = str | os.PathLike | Image.Image | np.ndarray


def read_images(
    images: Any, info: ImageInfo, config: ConfigDict, batch_size: int
) -> Iterator[UInt8[np.ndarray, "batch height width channels"]]:
    """Yields images as a data set stores them, in batches.

    Images of another size are scaled and cropped to the central part: for photographs
    as in evaluation, otherwise to the stored size. Arrays of the stored size are taken
    unchanged.

    Args:
        images: See `as_sequence`.
        info: Description of the training data.
        config: Options of the training data.
        batch_size: Number of images in a batch; the last may be smaller.

    Yields:
        uint8 ``[batch, height, width, channels]``.

    Raises:
        ValueError: If an image cannot be read, its values are not integers from 0 to
            255, or its channels or size do not fit.

    Example:
        >>> info = ImageInfo("grey", ("a", "b"), (4, 6, 1), (0.5,), (0.5,), 7, "")
        >>> images = [Image.new("L", (12, 8)), np.zeros((4, 6, 1), np.uint8)]
        >>> [batch.shape for batch in read_images(images, info, ConfigDict(), 3)]
        [(2, 4, 6, 1)]
    """
    images = as_sequence(images, info.image_shape[2])
    for start in range(0, len(images), batch_size):
        chunk = images[start : start + batch_size]
        names = (f"image {start + i}" for i in range(len(chunk)))
        yield np.stack(
            [_read(x, name, info, config) for x, name in zip(chunk, names, strict=True)]
        )


def as_sequence(images: Any, channels: int) -> Sequence[UserImage] | np.ndarray:
    """Returns a sequence of images; one image becomes a sequence of one.

    Args:
        images: A path, a PIL image, a list of these or of arrays, or an array of one
            image or more: ``[n, height, width, channels]``, where grey images may lack
            the last axis.
        channels: Number of channels of an image.

    Raises:
        ValueError: If an array has too few or too many axes.

    Example:
        >>> len(as_sequence(np.zeros((28, 28), np.uint8), channels=1))
        1
    """
    if isinstance(images, str | os.PathLike | Image.Image):
        return [images]
    if isinstance(images, list | tuple):
        return images
    array = np.asarray(images)
    if array.ndim in (2, 3) and channels == 1 and array.shape[-1] != 1:
        array = array[..., None]
    if array.ndim not in (3, 4):
        raise ValueError(
            f"images has shape {array.shape}, expected [n, height, width, {channels}] "
            f"or one image [height, width, {channels}]"
        )
    return array[None] if array.ndim == 3 else array


def _read(
    source: UserImage, name: str, info: ImageInfo, config: ConfigDict
) -> UInt8[np.ndarray, "height width channels"]:
    height, width, channels = info.image_shape
    if isinstance(source, str | os.PathLike):
        path = pathlib.Path(source)
        if path.is_dir():
            raise ValueError(f"{path} is a folder: give a list of image files")
        with open_image(path, str(path)) as image:
            image = _decode(image, str(path), channels)
    elif isinstance(source, Image.Image):
        image = _decode(source, name, channels)
    else:
        pixels = _check_array(np.asarray(source), name, channels)
        if pixels.shape == info.image_shape:
            return pixels
        image = Image.fromarray(pixels[..., 0] if channels == 1 else pixels)
    if info.streamed:
        size = config.image_size
        image = resized_center_crop(image, size, short_side(config))
    elif image.size != (width, height):
        if config.get("placement", ""):
            raise ValueError(
                f"{name} has {image.width}x{image.height} pixels, but the model was "
                f"trained on a canvas of {width}x{height}: put the image on such a "
                "canvas"
            )
        image = ImageOps.fit(image, (width, height), Image.Resampling.BILINEAR)
    return np.asarray(image).reshape(image.height, image.width, channels)


def short_side(config: ConfigDict) -> int:
    """Returns the short side of a photograph before its central crop.

    Args:
        config: Options of the data: ``short_side``, or 256 / 224 of ``image_size``.

    Example:
        >>> short_side(ConfigDict({"image_size": 224}))
        256
    """
    given = config.get("short_side", 0)
    return given or round(config.get("image_size", 224) * 256 / 224)


def _decode(image: Image.Image, name: str, channels: int) -> Image.Image:
    if channels == 1 and image.mode not in GREY_MODES:
        raise ValueError(
            f"{name} is in colour (mode {image.mode}), but the model was trained on "
            'grey images: convert it with image.convert("L")'
        )
    return decode_image(image, "L" if channels == 1 else "RGB", name)


def _check_array(
    pixels: np.ndarray, name: str, channels: int
) -> UInt8[np.ndarray, "height width {channels}"]:
    if pixels.ndim == 2 and channels == 1:
        pixels = pixels[..., None]
    if pixels.ndim != 3 or pixels.shape[2] != channels:
        raise ValueError(
            f"{name} has shape {pixels.shape}, but the model was trained on images "
            f"[height, width, {channels}]"
        )
    lowest, highest = (pixels.min(), pixels.max()) if pixels.size else (0, 0)
    if not np.issubdtype(pixels.dtype, np.integer):
        if lowest >= 0 and highest <= 1:
            fix = "give (255 * images).round().astype(np.uint8)"
        elif lowest >= 0 and highest <= 255:
            fix = "give images.round().astype(np.uint8)"
        else:
            fix = "give images that are not standardised, as np.uint8 from 0 to 255"
        raise ValueError(
            f"{name} has {pixels.dtype} values from {float(lowest):.3g} to "
            f"{float(highest):.3g}, but the model takes integers from 0 to 255 and "
            f"scales them itself: {fix}"
        )
    if lowest < 0 or highest > 255:
        raise ValueError(
            f"{name} has values from {lowest} to {highest}: scale them to 0 to 255"
        )
    return pixels.astype(np.uint8)

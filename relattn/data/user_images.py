"""Converts arrays, Pillow images and image files to a data set's stored form."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, UInt8
from ml_collections import ConfigDict
from PIL import Image, ImageOps

from relattn.data.array_hints import images_hint
from relattn.data.arrays import open_arrays
from relattn.data.base import ImageInfo
from relattn.data.image_io import decode_image, open_image
from relattn.data.image_transforms import resized_center_crop
from relattn.data.preprocess import (
    MAX_IMAGE_SIZE,
    channel_mean_std,
    input_shape,
    make_preprocess,
    standardize,
    stored_shape,
)
from relattn.messages import check_choice, shorten

ARRAY_FILE = ".npz"
UserImage = str | os.PathLike | Image.Image | np.ndarray


def read_images(
    images: Any, config: ConfigDict, info: ImageInfo, batch_size: int
) -> Iterator[UInt8[np.ndarray, "batch *frames height width channels"]]:
    """Yields images as a data set stores them, in batches.

    If the data are photographs, every image is scaled and cropped to the central part,
    as in evaluation. Otherwise an image of the stored size is taken unchanged, and one
    of another size is scaled and cropped to it.

    Args:
        images: A path, a Pillow image, a list of these or of arrays, or an array; see
            `as_sequence`.
        config: Options of the training data.
        info: Description of the training data.
        batch_size: Number of images in a batch; the last may be smaller.

    Yields:
        Images, uint8, shape ``[batch, height, width, channels]``, or volumes
        ``[batch, frames, height, width, channels]``.

    Raises:
        ValueError: If an image cannot be read, its values are not integers from 0 to
            255, or its channels or size do not fit.

    Example:
        >>> info = ImageInfo("grey", ("a", "b"), (4, 6, 1), (0.5,), (0.5,), 7, "")
        >>> images = [Image.new("L", (12, 8)), np.zeros((4, 6, 1), np.uint8)]
        >>> [batch.shape for batch in read_images(images, ConfigDict(), info, 3)]
        [(2, 4, 6, 1)]
    """
    images = as_sequence(images, info.image_shape)
    for start in range(0, len(images), batch_size):
        chunk = images[start : start + batch_size]
        names = (f"image {start + i}" for i in range(len(chunk)))
        yield np.stack(
            [_read(x, name, config, info) for x, name in zip(chunk, names, strict=True)]
        )


def prepare_images(
    images: Any, config: ConfigDict, info: ImageInfo, batch_size: int = 256
) -> Float32[Array, "n *frames height width channels"]:
    """Converts images of any kind to model inputs, as evaluation does.

    Args:
        images: A path, a Pillow image, a list of these or of arrays, or an array; see
            `as_sequence`.
        config: Options of the training data.
        info: Description of the training data.
        batch_size: Number of images that are converted at once.

    Returns:
        Model inputs, float32, shape ``[n, height, width, channels]``, or of volumes
        ``[n, frames, height, width, channels]``.

    Raises:
        ValueError: If an image cannot be read, its values are not integers from 0 to
            255, or its channels or size do not fit.

    Example:
        >>> info = ImageInfo("grey", ("a", "b"), (4, 6, 1), (0.5,), (0.5,), 7, "")
        >>> prepare_images(Image.new("L", (12, 8)), ConfigDict(), info).shape
        (1, 4, 6, 1)
    """
    function = make_preprocess(config, info)
    batches = [
        function({"image": stored})
        for stored in read_images(images, config, info, batch_size)
    ]
    empty = jnp.zeros((0, *input_shape(config, info)), jnp.float32)
    return jnp.concatenate([empty, *batches])


def describe_preprocessing(config: ConfigDict, info: ImageInfo) -> str:
    """Describes in words how `prepare_images` makes a model's inputs.

    Args:
        config: Options of the training data.
        info: Description of the training data.

    Example:
        >>> info = ImageInfo("grey", ("a", "b"), (4, 6, 1), (0.5,), (0.5,), 7, "")
        >>> print(describe_preprocessing(ConfigDict({"image_size": 8}), info))
        Inputs are grey images of 8x8 pixels. An image file is decoded upright, as its \
EXIF orientation says; transparent pixels are composited on white. An image of another \
size than 6x4 is cropped to its central part of this shape and resized to it, \
bilinearly with antialiasing, as 8-bit values. It is then resized to 8x8, in the same \
way but without rounding. Values are pixels / 255.
    """
    *frames, height, width, channels = stored_shape(config, info)
    *_, rows, columns, _ = input_shape(config, info)
    size = f"{columns}x{rows}"
    colour = {1: "grey", 3: "RGB"}.get(channels, f"{channels}-channel")
    bilinear = "bilinearly with antialiasing, as 8-bit values"
    resized = bilinear
    if (name := interpolation(config)) != "bilinear":
        resized = f"by {name} interpolation, as 8-bit values"
    parts = [
        f"Inputs are {colour} images of {size} pixels.",
        "An image file is decoded upright, as its EXIF orientation says; transparent "
        f"pixels are composited on {config.get('background', 'white')}.",
    ]
    if frames:
        parts = [
            f"Inputs are {colour} volumes of {frames[0]} frames of {size} pixels, "
            f"given as arrays of frames of {width}x{height}."
        ]
    elif info.streamed:
        parts.append(
            f"Its short side is resized to {short_side(config)} pixels, {resized}, "
            f"and the central {size} are cropped."
        )
    elif config.get("placement", ""):
        parts.append(
            f"It has to be a canvas of {width}x{height} pixels, on which the images "
            f"were placed ({config.placement}) without resizing, on black."
        )
    else:
        parts.append(
            f"An image of another size than {width}x{height} is cropped to its central "
            f"part of this shape and resized to it, {bilinear}."
        )
    if (height, width) != (rows, columns):
        parts.append(
            f"It is then resized to {size}, in the same way but without rounding."
        )
    values = "pixels / 255"
    if config.get("standardize", False):
        mean, std = (
            ", ".join(f"{value:.4f}" for value in numbers)
            for numbers in channel_mean_std(config, info)
        )
        values = f"(pixels / 255 - mean) / std, mean {mean}, std {std}"
    return " ".join([*parts, f"Values are {values}."])


def library_preprocessing(config: ConfigDict, info: ImageInfo) -> dict[str, Any]:
    """Returns how a model's inputs are made, in terms of `prepare_squares`.

    For images of the stored size it is the same but for rounding to 8-bit values, and
    close for others: `prepare_images` resizes some of them twice.

    Args:
        config: Options of the training data.
        info: Description of the training data.

    Returns:
        ``preprocessing`` of a saved model, see `relattn.models.preprocessing`.

    Example:
        >>> info = ImageInfo("grey", ("a", "b"), (4, 4, 1), (0.5,), (0.5,), 7, "")
        >>> library_preprocessing(ConfigDict({"image_size": 8}), info)
        {'resized': 8, 'squash': False, 'interpolation': 'bilinear', 'mean': [0.0], \
'std': [1.0]}
    """
    *_, height, width, channels = stored_shape(config, info)
    *_, rows, columns, _ = input_shape(config, info)
    mean, std = [0.0] * channels, [1.0] * channels
    if config.get("standardize", False):
        mean, std = map(list, channel_mean_std(config, info))
    return {
        "resized": short_side(config) if info.streamed else min(rows, columns),
        "squash": not info.streamed and (height, rows) != (width, columns),
        "interpolation": interpolation(config) if info.streamed else "bilinear",
        "mean": [float(value) for value in mean],
        "std": [float(value) for value in std],
    }


def as_sequence(
    images: Any, image_shape: Sequence[int]
) -> Sequence[UserImage] | np.ndarray:
    """Returns a sequence of images; one image becomes a sequence of one.

    Args:
        images: A path, a Pillow image, a list or an array of these or of arrays, or an
            array of one image or more: ``[n, height, width, channels]``, where grey
            images may lack the last axis. Or the path of an ``.npz`` file, which
            `numpy.savez` wrote, with such an array called ``images``.
        image_shape: Height, width and channels of an image as the model was trained on;
            for volumes frames before them.

    Raises:
        FileNotFoundError: If an ``.npz`` file is missing.
        ValueError: If it is none of these, or an array has too few or too many axes, or
            is one image in colour for a model of grey images.

    Example:
        >>> len(as_sequence(np.zeros((28, 28), np.uint8), (28, 28, 1)))
        1
    """
    if is_array_file(images):
        return _read_array_file(Path(images), image_shape)
    if isinstance(images, str | os.PathLike | Image.Image):
        return [images]
    if isinstance(images, Sequence):
        return images
    array = np.asarray(images)
    if array.dtype.kind in "OU" and array.ndim:
        # Paths in a table of pandas, or images of different sizes.
        return list(array)
    if array.dtype != bool and not jnp.issubdtype(array.dtype, jnp.number):
        raise ValueError(
            "images must be a path, a Pillow image, an array, or a list of these, got "
            f"{shorten(images)}"
        )
    axes, (*_, trained_width, channels) = len(image_shape) - 1, image_shape
    # Of grey images of the trained width 1, the last axis may be the width.
    lacks_channels = array.shape[-1:] != (1,) or array.shape[1:] == (*image_shape[:-1],)
    if channels == 1 and (
        array.ndim == axes or (array.ndim == axes + 1 and lacks_channels)
    ):
        width = array.shape[-1]
        # Its rows would be taken for grey images of this width.
        if array.ndim > axes and width in (3, 4) and width != trained_width:
            raise ValueError(
                f"images has shape {array.shape}, which is an image in colour, but the "
                "model was trained on grey images: convert it to grey, or pass grey "
                f"images of width {width} as images[..., None]"
            )
        array = array[..., None]
    if array.ndim not in (axes + 1, axes + 2):
        shape = f"{'frames, ' * (axes > 2)}height, width, {channels}]"
        raise ValueError(
            f"images has shape {array.shape}, expected [n, {shape} or one image "
            f"[{shape}"
        )
    return array[None] if array.ndim == axes + 1 else array


def is_array_file(images: Any) -> bool:
    """Returns whether it is the path of a file of arrays, by its suffix.

    Example:
        >>> is_array_file("a.npz"), is_array_file("a.png")
        (True, False)
    """
    is_path = isinstance(images, str | os.PathLike)
    return is_path and Path(images).suffix.lower() == ARRAY_FILE


def _read_array_file(
    file: Path, image_shape: Sequence[int]
) -> Sequence[UserImage] | np.ndarray:
    arrays, listed = open_arrays(file, {"images"}, "pass a file of numpy.savez")
    if not arrays:
        raise ValueError(
            f"{file} has no array images, only {listed or 'none'}: name the array "
            "images"
        )
    try:
        return as_sequence(arrays["images"], image_shape)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _read(
    source: UserImage, name: str, config: ConfigDict, info: ImageInfo
) -> UInt8[np.ndarray, "*frames height width channels"]:
    *frames, height, width, channels = stored = stored_shape(config, info)
    if frames:
        shape = getattr(source, "shape", None)
        if shape != stored or getattr(source, "dtype", None) != np.uint8:
            raise ValueError(
                f"{name} must be an array of uint8 of shape {list(stored)}, as the "
                "volumes that the model was trained on"
            )
        return np.asarray(source)
    planes = _planes(source, name, channels, config.get("background", "white"))
    if info.streamed:
        side = short_side(config)
        filter = interpolation(config)
        planes = [
            resized_center_crop(plane, height, side, interpolation=filter)
            for plane in planes
        ]
    elif planes[0].size != (width, height):
        if config.get("placement", ""):
            raise ValueError(
                f"{name} has {planes[0].width}x{planes[0].height} pixels, but the "
                f"model was trained on a canvas of {width}x{height}: put the image on "
                "such a canvas"
            )
        planes = [
            ImageOps.fit(plane, (width, height), Image.Resampling.BILINEAR)
            for plane in planes
        ]
    return np.dstack([np.asarray(plane) for plane in planes])


def _planes(
    source: UserImage, name: str, channels: int, background: str
) -> list[Image.Image]:
    """Decodes an image: one Pillow image, or one for each channel."""
    if isinstance(source, str | os.PathLike | Image.Image):
        return [_decode(source, name, channels, background)]
    pixels = np.asarray(source)
    if not pixels.ndim:
        raise ValueError(
            f"{name} is of type {type(source).__name__}, expected a path, a Pillow "
            "image or an array"
        )
    pixels = _check_array(pixels, name, channels)
    # Pillow resizes every channel alone, but weights colours by an alpha channel.
    return [Image.fromarray(plane) for plane in np.moveaxis(pixels, -1, 0)]


def short_side(config: ConfigDict) -> int:
    """Returns the short side of a photograph before its central crop.

    Args:
        config: Options of the data: ``short_side``, or ``image_size`` by ``crop_pct``,
            which is 224 / 256 by default.

    Raises:
        ValueError: If an option is not a number, or out of range.

    Example:
        >>> short_side(ConfigDict({"image_size": 224}))
        256
    """
    for option in ("image_size", "short_side"):
        value = config.get(option, 0)
        if not isinstance(value, int | np.integer) or not 0 <= value <= MAX_IMAGE_SIZE:
            raise ValueError(
                f"data.{option}={shorten(value)} must be an integer from 0 to "
                f"{MAX_IMAGE_SIZE}: photographs are cropped to squares"
            )
    given = config.get("short_side", 0)
    size, share = config.get("image_size", 224), config.get("crop_pct", 0)
    if not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ValueError(
            f"data.crop_pct={shorten(share)} must be a fraction of the short side, "
            "above 0 and at most 1"
        )
    return given or round(size / share if share else size * 256 / 224)


def interpolation(config: ConfigDict) -> str:
    """Returns the interpolation of photographs: ``"bilinear"`` by default.

    Raises:
        ValueError: If Pillow has no such filter.
    """
    name = config.get("interpolation", "bilinear")
    filters = [each.name.lower() for each in Image.Resampling]
    check_choice("data.interpolation", str(name).lower(), filters)
    return name


def prepare_squares(
    images: Any,
    *,
    image_shape: Sequence[int],
    resized: int,
    squash: bool,
    interpolation: str,
    mean: Sequence[float],
    std: Sequence[float],
    background: str = "white",
    floor_crop: bool = False,
) -> Float32[Array, "n size size channels"]:
    """Converts images of any kind to the inputs of a converted model.

    x -> (crop(resize(x)) / 255 - mean) / std, resized as 8-bit values by Pillow.

    Args:
        images: A path, a Pillow image, a list of these or of arrays, or an array; see
            `as_sequence`.
        image_shape: Height, width and channels of the inputs, a square.
        resized: Short side of an image before the central crop.
        squash: Whether both sides become ``resized``, instead of the short one.
        interpolation: Name of a filter of Pillow.
        mean: Mean of each channel, for values in [0, 1].
        std: Standard deviation of each channel.
        background: Colour behind transparent pixels.
        floor_crop: See `relattn.data.image_transforms.resized_center_crop`.

    Returns:
        float32, shape ``[n, *image_shape]``.

    Raises:
        ValueError: If an image cannot be read, its values are not integers from 0 to
            255, or its channels do not fit.

    Example:
        >>> prepare_squares(
        ...     Image.new("RGB", (12, 8)), image_shape=(4, 4, 3), resized=6,
        ...     squash=False, interpolation="bicubic", mean=(0.5,) * 3, std=(0.5,) * 3,
        ... ).shape
        (1, 4, 4, 3)
    """
    size, _, channels = image_shape
    prepared = [np.zeros((0, *image_shape), np.uint8)]
    for index, source in enumerate(as_sequence(images, image_shape)):
        planes = _planes(source, f"image {index}", channels, background)
        if squash:
            filter = Image.Resampling[interpolation.upper()]
            planes = [plane.resize((resized, resized), filter) for plane in planes]
        planes = [
            resized_center_crop(
                plane,
                size,
                resized,
                interpolation=interpolation,
                floor_crop=floor_crop,
            )
            for plane in planes
        ]
        prepared.append(np.dstack([np.asarray(plane) for plane in planes])[None])
    values = jnp.asarray(np.concatenate(prepared), jnp.float32) / 255
    statistics = (np.asarray(numbers, np.float32) for numbers in (mean, std))
    return standardize(values, *statistics)


def _decode(
    source: str | os.PathLike | Image.Image, name: str, channels: int, background: str
) -> Image.Image:
    if channels not in (1, 3):
        raise ValueError(
            f"{name} is an image file or a Pillow image, but the model was trained on "
            f"images of {channels} channels: pass arrays [height, width, {channels}]"
        )
    if isinstance(source, Image.Image):
        image = decode_image(source, name, background=background)
    else:
        path = Path(source)
        name = str(path)
        if path.is_dir():
            raise ValueError(f"{path} is a folder: pass a list of image files")
        with open_image(path, name) as image:
            image = decode_image(image, name, background=background)
    if channels == 1 and image.mode != "L":
        raise ValueError(
            f"{name} is in colour (mode {image.mode}), but the model was trained on "
            'grey images: convert it with image.convert("L")'
        )
    return image.convert("L" if channels == 1 else "RGB")


def _check_array(
    pixels: np.ndarray, name: str, channels: int
) -> UInt8[np.ndarray, "height width {channels}"]:
    if pixels.ndim == 2 and channels == 1:
        pixels = pixels[..., None]
    if pixels.ndim != 3 or pixels.shape[2] != channels:
        fix = ""
        if pixels.ndim == 3 and pixels.shape[0] == channels:
            fix = ": pass np.moveaxis(image, 0, -1)"
        elif pixels.ndim > 1 and pixels.shape[2:] in ((), (1,)) and channels == 3:
            fix = ": for three equal channels pass np.dstack([image] * 3)"
        raise ValueError(
            f"{name} has shape {pixels.shape}, but the model was trained on images "
            f"[height, width, {channels}]{fix}"
        )
    if not pixels.size:
        raise ValueError(f"{name} has shape {pixels.shape}: it has no pixels")
    if np.iscomplexobj(pixels):
        raise ValueError(
            f"{name} has {pixels.dtype} values: pass integers from 0 to 255"
        )
    lowest, highest = pixels.min(), pixels.max()
    is_integer = np.issubdtype(pixels.dtype, np.integer)
    if not is_integer or lowest < 0 or highest > 255:
        raise ValueError(
            f"{name} has {pixels.dtype} values from {float(lowest):.3g} to "
            f"{float(highest):.3g}, but the model takes integers from 0 to 255 and "
            f"scales them itself: {images_hint(pixels)}"
        )
    return pixels.astype(np.uint8)

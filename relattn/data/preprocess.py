"""Converts images to model inputs, for training, evaluation and prediction alike.

`relattn.data.user_images` converts images of any kind to the form that a data set
stores; `make_preprocess` returns the function that converts stored images, under jit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Shaped
from ml_collections import ConfigDict

from relattn.data.augment import augment
from relattn.data.base import DataInfo, ImageInfo
from relattn.messages import shorten

# XLA ends the process where the number of pixels is beyond 64 bits.
MAX_IMAGE_SIZE = 2**16


def make_preprocess(
    config: ConfigDict, info: DataInfo
) -> Callable[[dict[str, Any]], Array]:
    """Returns the function that converts a batch to model inputs, for use under jit.

    Args:
        config: Options of the data; ``image_size`` (by default that of the stored
            images), ``standardize`` and ``augment`` apply to images.
        info: Description of the data.

    Returns:
        A function of a batch that returns `preprocess` of its images, augmented if the
        batch has ``draws``, or its tokens or points unchanged. It raises ValueError if
        the images have another shape than those of the data.

    Raises:
        ValueError: If ``standardize`` is set and a standard deviation is 0.

    Example:
        >>> from relattn.data.base import ImageInfo
        >>> info = ImageInfo("grey", ("a", "b"), (4, 4, 1), (0.5,), (0.5,), 7, "")
        >>> function = make_preprocess(ConfigDict({"standardize": True}), info)
        >>> function({"image": np.full((1, 4, 4, 1), 255, np.uint8)})[0, 0, 0]
        Array([1.], dtype=float32)
    """
    if info.kind != "images":
        return lambda batch: _inputs(batch, info.kind)
    check_statistics(config, info)
    statistics = {}
    if config.get("standardize", False):
        mean, std = channel_mean_std(config, info)
        statistics = {
            "mean": np.asarray(mean, np.float32),
            "std": np.asarray(std, np.float32),
        }
    function = functools.partial(
        preprocess, image_size=input_shape(config, info)[-3:-1], **statistics
    )
    stored = stored_shape(config, info)

    def preprocess_batch(batch: Any) -> Array:
        images = _inputs(batch, "image")
        shape = images.shape
        if shape[1:] != stored:
            raise ValueError(
                f"images have shape {list(shape)}, but the model was trained on "
                f"stored images [n, {', '.join(map(str, stored))}]: convert them as "
                "`run.predict` and `Pretrained.preprocess` do"
            )
        if "draws" not in batch:
            return function(images)
        change = functools.partial(
            augment, draws=batch["draws"], augmentation=config.augment
        )
        return function(images, change=change)

    return preprocess_batch


def _inputs(batch: Any, name: str) -> Any:
    """Returns the inputs of a batch; raises ValueError if it has none."""
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"preprocess takes a batch, {{{name!r}: array}}, got {shorten(batch)}"
        )
    if name not in batch:
        raise ValueError(
            f"the model reads {name!r} of a batch, which has only "
            f"{', '.join(map(repr, sorted(batch)))}: pass data of the kind that it was "
            "trained on"
        )
    return batch[name]


def channel_mean_std(
    config: ConfigDict, info: ImageInfo
) -> tuple[Sequence[float], Sequence[float]]:
    """Returns the mean and standard deviation by which images are standardised.

    Args:
        config: Options of the data; ``mean`` and ``std`` replace those of the training
            images. If the images have another number of channels, every channel gets
            the mean of the values.
        info: Description of the data.

    Raises:
        ValueError: If ``mean`` or ``std`` is not a tuple of numbers.

    Example:
        >>> info = ImageInfo("grey", ("a", "b"), (4, 4, 1), (0.5,), (0.5,), 7, "")
        >>> channel_mean_std(ConfigDict({"mean": (0.25, 0.75, 0.5)}), info)
        ((0.5,), (0.5,))
    """
    channels = info.image_shape[-1]
    found = []
    for key in ("mean", "std"):
        given = config.get(key, None)
        listed = isinstance(given, list | tuple | None)
        if not listed or not all(isinstance(x, int | float) for x in given or ()):
            raise ValueError(
                f"data.{key}={shorten(given)} must be a tuple of plain numbers, one "
                "for each channel, such as (0.5,)"
            )
        values = tuple(given or getattr(info, key))
        if len(values) != channels:
            values = (sum(values) / len(values),) * channels
        found.append(values)
    return found[0], found[1]


def is_standardized(config: ConfigDict) -> bool:
    """Returns ``standardize``; raises ValueError if it is neither True nor False."""
    chosen = config.get("standardize", False)
    if chosen not in (True, False):
        # The text "False" would count as true.
        raise ValueError(f"data.standardize={shorten(chosen)} must be True or False")
    return chosen


def check_statistics(config: ConfigDict, info: DataInfo) -> None:
    """Checks that the images can be standardised if ``standardize`` is set.

    Args:
        config: Options of the data; only ``standardize`` is used.
        info: Description of the data.

    Raises:
        ValueError: If ``standardize`` is neither True nor False, or it is set and a
            channel has a standard deviation that is not positive, or a mean that is not
            within 0 .. 1.

    Example:
        >>> info = ImageInfo("grey", ("a", "b"), (4, 4, 1), (0.5,), (0.0,), 7, "")
        >>> check_statistics(ConfigDict({"standardize": True}), info)
        Traceback (most recent call last):
        ValueError: data.standardize divides by the standard deviation, but all pixels \
of channel 0 of grey are equal: set data.standardize=False, or use other images
    """
    if not is_standardized(config) or info.kind != "images":
        return
    statistics = zip(*channel_mean_std(config, info), strict=True)
    for channel, (mean, std) in enumerate(statistics):
        if std == 0:
            raise ValueError(
                "data.standardize divides by the standard deviation, but all pixels of "
                f"channel {channel} of {info.name} are equal: set "
                "data.standardize=False, or use other images"
            )
        if not (0 <= mean <= 1 and 0 < std < math.inf):
            raise ValueError(
                f"channel {channel} of {info.name} has mean {mean}, expected 0 to 1, "
                f"and standard deviation {std}, expected finite and positive: compute "
                "them from the training images divided by 255"
            )


def input_shape(config: ConfigDict, info: DataInfo) -> tuple[int, ...]:
    """Returns the shape of one example as model input.

    Args:
        config: Options of the data.
        info: Description of the data.

    Returns:
        ``(height, width, channels)`` for images, with frames before them for volumes;
        ``(context_length,)`` for text; ``(points, axes + channels)`` for sets of
        points.

    Raises:
        ValueError: If ``image_size`` is neither an integer nor two, or one is below 1
            or above `MAX_IMAGE_SIZE`.

    Example:
        >>> info = ImageInfo("grey", ("a", "b"), (4, 6, 1), (0.5,), (0.5,), 7, "")
        >>> input_shape(ConfigDict(), info)
        (4, 6, 1)
        >>> input_shape(ConfigDict({"image_size": (8, 12)}), info)
        (8, 12, 1)
        >>> input_shape(ConfigDict({"image_size": 8}), info)
        (8, 8, 1)
    """
    if info.kind == "tokens":
        return (info.context_length,)
    if info.kind == "points":
        num_points, num_axes, channels = info.point_shape
        return (num_points, num_axes + channels)
    *frames, height, width, channels = info.image_shape
    size = config.get("image_size", (height, width))
    sides = _sides(size, "data.image_size")
    if info.streamed and sides[0] != sides[1]:
        raise ValueError(
            f"data.image_size={shorten(size)} must be one integer: photographs are "
            "cropped to squares"
        )
    return (*frames, *sides, channels)


def _sides(size: Any, name: str) -> tuple[int, int]:
    """Returns the height and width of an image size, which is one side or both."""
    pair = tuple(size) if isinstance(size, list | tuple) else (size, size)
    limit = ""
    whole = (isinstance(x, int | np.integer) and x is not True for x in pair)
    if len(pair) != 2 or not all(whole):
        limit = "an integer, or two: the height and the width"
    elif min(pair) < 1:
        limit = "at least 1"
    elif max(pair) > MAX_IMAGE_SIZE:
        limit = f"at most {MAX_IMAGE_SIZE}"
    if limit:
        raise ValueError(f"{name}={shorten(size)} must be {limit}")
    height, width = map(int, pair)
    return height, width


def stored_shape(config: ConfigDict, info: ImageInfo) -> tuple[int, ...]:
    """Returns the shape of an image in a batch, before `preprocess`.

    Args:
        config: Options of the data.
        info: Description of the data.

    Returns:
        ``(height, width, channels)`` of the images in memory or, for photographs, of
        the crop, which already has the size of a model input. Volumes have frames
        before them.
    """
    return input_shape(config, info) if info.streamed else info.image_shape


def with_image_size(
    config: ConfigDict, info: DataInfo, size: int | Sequence[int]
) -> ConfigDict:
    """Returns the options of the data for model inputs of another size.

    Args:
        config: Options of the data.
        info: Description of the data.
        size: The new side of the images, or their height and width.

    Returns:
        A copy with another ``image_size``, and a ``short_side`` of photographs in the
        same proportion to it.

    Raises:
        ValueError: If ``size`` is neither an integer nor two.

    Example:
        >>> info = ImageInfo("mine", ("a",), (4, 4, 1), (0.5,), (1.0,), 7, "")
        >>> config = ConfigDict({"image_size": 4, "short_side": 6})
        >>> with_image_size(config, info, 8).short_side
        12
    """
    height, width = _sides(size, "image_size")
    changed = ConfigDict(config.to_dict())
    with changed.ignore_type():
        changed.image_size = height if height == width else (height, width)
    if config.get("short_side", 0):
        before = min(input_shape(config, info)[-3:-1])
        changed.short_side = round(config.short_side * min(height, width) / before)
    return changed


def preprocess(
    images: Shaped[Array | np.ndarray, "batch *frames height width channels"],
    *,
    image_size: int | Sequence[int],
    mean: Float[Array | np.ndarray, " channels"] | None = None,
    std: Float[Array | np.ndarray, " channels"] | None = None,
    change: Callable[[Array], Array] | None = None,
) -> Float32[Array, "batch *frames rows columns channels"]:
    """Scales images to [0, 1], resizes them and, given a mean, standardises them.

    x -> (resize(change(x / 255)) - mean) / std

    The resize is bilinear with pixel centres at half-integers and antialiasing, as in
    Pillow and torchvision. An image has the same result, bit for bit, in batches of
    every size, and under jit.

    Args:
        images: Images, uint8, shape ``[batch, height, width, channels]``, or volumes,
            with frames before the height.
        image_size: The side of the result, or its height and width.
        mean: Mean of each channel, for values in [0, 1], shape ``[channels]``; None
            leaves the values in [0, 1].
        std: Standard deviation of each channel, shape ``[channels]``; required with
            ``mean``.
        change: Function applied to the images in [0, 1] before the resize; None for
            none.

    Returns:
        Model inputs, float32, shape ``[batch, *image_size, channels]``, or with frames
        before the height.

    Raises:
        ValueError: If only one of ``mean`` and ``std`` is given, ``image_size`` is no
            size, or the images are not uint8.

    Example:
        >>> images = np.full((1, 28, 28, 1), 255, np.uint8)
        >>> preprocess(images, image_size=32).shape
        (1, 32, 32, 1)
    """
    sides = _sides(image_size, "image_size")
    if (mean is None) != (std is None):
        raise ValueError("mean and std go together: pass both or neither")
    if images.dtype != np.uint8:
        raise ValueError(
            f"images are {images.dtype}, expected uint8 from 0 to 255: for values in "
            "[0, 1] pass (255 * images).round().astype(np.uint8)"
        )
    if change is None:
        values = _scale_and_resize(images, sides)
    else:
        values = _resize(change(_scale(images)), sides)
    return values if mean is None else standardize(values, mean, std)


@jax.jit
def standardize(
    images: Float[Array, "batch *frames height width channels"],
    mean: Float[Array | np.ndarray, " channels"],
    std: Float[Array | np.ndarray, " channels"],
) -> Float[Array, "batch *frames height width channels"]:
    """Returns (images - mean) / std, by channel."""
    return (images - mean) / std


# Compiled, so that the result does not depend on where they are called from: alone,
# operations round one by one.
@functools.partial(jax.jit, static_argnums=1)
def _scale_and_resize(images: Array | np.ndarray, sides: tuple[int, int]) -> Array:
    return _resize(_scale(images), sides)


def _scale(images: Array | np.ndarray) -> Array:
    # The minimum changes no value. It keeps a compiler from fusing product and later
    # difference to one operation, which rounds once instead of twice.
    return jnp.minimum(jnp.asarray(images, jnp.float32) / 255, 1)


def _resize(images: Array, sides: tuple[int, int]) -> Array:
    """Resizes height and width in sums of few terms.

    Matrix products would round differently in batches of another size.
    """
    for axis, size in enumerate(sides, images.ndim - 3):
        if images.shape[axis] != size:
            columns, weights = _triangle(images.shape[axis], size)
            shape = [1] * images.ndim
            shape[axis] = size
            terms = [
                jnp.take(images, index, axis) * weight.reshape(shape)
                for index, weight in zip(columns, weights, strict=True)
            ]
            images = cast(Array, sum(terms))
    return images


def _triangle(length: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns which pixels make up a resized pixel, and their weights.

    Args:
        length: Number of pixels.
        size: Number of resized pixels.

    Returns:
        Indices and float32 weights, both ``[terms, size]``.
    """
    scale = length / size
    support = max(scale, 1.0)
    centre = (np.arange(size) + 0.5) * scale - 0.5
    first = np.ceil(centre - support).astype(int)
    index = first + np.arange(int(2 * support) + 1)[:, None]
    weight = np.maximum(1 - np.abs(index - centre) / support, 0)
    weight *= (index >= 0) & (index < length)
    weight /= weight.sum(axis=0)
    return np.clip(index, 0, length - 1), weight.astype(np.float32)

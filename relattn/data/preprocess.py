"""Converts batches as stored to model inputs, under jit."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Shaped
from ml_collections import ConfigDict

from relattn import spec
from relattn.data.augment import augment
from relattn.data.base import DataInfo


def make_preprocess(
    config: ConfigDict, info: DataInfo
) -> Callable[[dict[str, Any]], Array]:
    """Returns the function that converts a batch to model inputs, for use under jit.

    Args:
        config: Options of the data; ``image_size`` (by default the height as stored),
            ``standardize`` and ``augment`` apply to images.
        info: Description of the data.

    Returns:
        A function of a batch that returns `preprocess` of its images, augmented if the
        batch has ``draws``, or its tokens unchanged.

    Example:
        >>> from relattn.data.base import ImageInfo
        >>> info = ImageInfo("grey", ("a", "b"), (4, 4, 1), (0.5,), (0.5,), 7, "")
        >>> function = make_preprocess(ConfigDict({"standardize": True}), info)
        >>> function({"image": np.full((1, 4, 4, 1), 255, np.uint8)})[0, 0, 0]
        Array([1.], dtype=float32)
    """
    if info.kind == "tokens":
        return lambda batch: batch["tokens"]
    statistics = {}
    if config.get("standardize", False):
        statistics = {
            "mean": jnp.asarray(info.mean, jnp.float32),
            "std": jnp.asarray(info.std, jnp.float32),
        }
    function = functools.partial(
        preprocess, image_size=input_shape(config, info)[0], **statistics
    )

    def preprocess_batch(batch: dict[str, Any]) -> Array:
        if "draws" not in batch:
            return function(batch["image"])
        change = functools.partial(
            augment, draws=batch["draws"], augmentation=config.augment
        )
        return function(batch["image"], change=change)

    return preprocess_batch


def input_shape(config: ConfigDict, info: DataInfo) -> tuple[int, ...]:
    """Returns the shape of one example as model input.

    Args:
        config: Options of the data.
        info: Description of the data.

    Returns:
        (height, width, channels) for images, (context_length,) for text.

    Raises:
        ValueError: If ``image_size`` < 1.
    """
    if info.kind == "tokens":
        return (info.context_length,)
    size = config.get("image_size", info.image_shape[0])
    if size < 1:
        shown = spec.shorten(size)
        raise ValueError(f"data.image_size={shown}: it must be at least 1.")
    return (size, size, info.image_shape[2])


def preprocess(
    images: Shaped[Array | np.ndarray, "batch height width channels"],
    *,
    image_size: int,
    mean: Float[Array | np.ndarray, " channels"] | None = None,
    std: Float[Array | np.ndarray, " channels"] | None = None,
    change: Callable[[Array], Array] | None = None,
) -> Float32[Array, "batch {image_size} {image_size} channels"]:
    """Scales images to [0, 1], resizes them and, given `mean` and `std`, standardises.

    x -> (resize(change(x / 255)) - mean) / std

    The resize is bilinear with pixel centres at half-integers and antialiasing, as in
    Pillow and torchvision.

    Args:
        images: uint8 [batch, height, width, channels].
        image_size: Height and width of the result.
        mean: [channels], for values in [0, 1]; None leaves the values in [0, 1].
        std: [channels]; required with `mean`.
        change: Function applied to the images in [0, 1] before the resize; None for
            none.

    Returns:
        float32 [batch, image_size, image_size, channels].

    Raises:
        ValueError: If only one of `mean` and `std` is given, `image_size` < 1, or the
            images are not uint8.

    Example:
        >>> images = np.full((1, 28, 28, 1), 255, np.uint8)
        >>> preprocess(images, image_size=32).shape
        (1, 32, 32, 1)
    """
    if image_size < 1:
        raise ValueError(f"image_size={image_size}: it must be at least 1.")
    if (mean is None) != (std is None):
        raise ValueError("mean and std go together: give both or neither.")
    if images.dtype != np.uint8:
        raise ValueError(
            f"images are {images.dtype}, expected uint8 from 0 to 255: for values in "
            "[0, 1] give (255 * images).round().astype(np.uint8)"
        )
    batch, height, width, channels = images.shape
    values = jnp.asarray(images, jnp.float32) / 255
    if change is not None:
        values = change(values)
    if (height, width) != (image_size, image_size):
        shape = (batch, image_size, image_size, channels)
        values = jax.image.resize(values, shape, "linear")
    if mean is None:
        return values
    return (values - jnp.asarray(mean)) / jnp.asarray(std)

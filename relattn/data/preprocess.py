"""From uint8 images as stored to the float images that a model sees, under jit."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, UInt8


def preprocess(
    images: UInt8[Array | np.ndarray, "batch height width channels"],
    *,
    image_size: int,
    mean: Float[Array | np.ndarray, "channels"] | None = None,
    std: Float[Array | np.ndarray, "channels"] | None = None,
) -> Float32[Array, "batch {image_size} {image_size} channels"]:
    """Scales to [0, 1], resizes bilinearly and, with `mean` and `std`, standardises.

    x -> (resize(x / 255) - mean) / std

    Pixel centres lie at half-integers and a smaller result is averaged (antialiased),
    as Pillow and torchvision do.

    Args:
        images: uint8 [batch, height, width, channels].
        image_size: height and width of the result.
        mean: [channels], of values in [0, 1]; None leaves the values in [0, 1].
        std: [channels]; given with `mean`.

    Returns:
        float32 [batch, image_size, image_size, channels].

    Raises:
        ValueError: only one of `mean` and `std` is given, or `image_size` < 1.

    Example:
        >>> images = np.full((1, 28, 28, 1), 255, np.uint8)
        >>> preprocess(images, image_size=32).shape
        (1, 32, 32, 1)
    """
    if image_size < 1:
        raise ValueError(f"image_size={image_size}: it must be at least 1.")
    if (mean is None) != (std is None):
        raise ValueError("mean and std go together: give both or neither.")
    batch, height, width, channels = images.shape
    values = jnp.asarray(images, jnp.float32) / 255
    if (height, width) != (image_size, image_size):
        shape = (batch, image_size, image_size, channels)
        values = jax.image.resize(values, shape, "linear")
    if mean is None:
        return values
    return (values - jnp.asarray(mean)) / jnp.asarray(std)

"""Convolutional networks, adapted to 32x32 pixels as is usual for CIFAR-10."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from relattn.nn.batch_statistics import BatchNorm
from relattn.nn.linear import Linear

# The scale that a layer before a ReLU keeps (He et al., 2015).
HE_NORMAL = nn.initializers.he_normal()
# Channels and convolutions between two pools.
VGG_STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))


class CNN(nn.Module):
    """What the convolutional networks have in common; not a network itself.

    Their parameters fit images of every size from ``min_size`` on.

    Attributes:
        num_classes: Number of classes.
        dtype: Compute dtype; parameters and statistics are float32.
    """

    num_classes: int
    dtype: Any = jnp.float32
    inputs: ClassVar[str] = "images"
    min_size: ClassVar[int] = 1
    # They work on pixels.
    patch_size: ClassVar[int] = 1

    def check_size(self, images: Float[Array, "batch height width channels"]) -> None:
        """Raises unless the strides leave something of the images.

        Args:
            images: Shape ``[batch, height, width, channels]``.

        Raises:
            ValueError: If they are too small.
        """
        height, width = images.shape[1:3]
        if min(height, width) < self.min_size:
            raise ValueError(
                f"config.data.image_size must be at least {self.min_size} for "
                f"{type(self).__name__}, whose strides leave nothing of an image of "
                f"{height}x{width} pixels"
            )


class AlexNet(CNN):
    """Classifies images by five convolutions and a linear layer.

    The adaptation that is usual for CIFAR-10: the first convolution has stride 4 on
    images padded by 5 pixels, pools are 2x2, and one linear layer replaces the three,
    so that 32x32 images become 256 features. It has 2,472,266 parameters for three
    channels and ten classes, 2,456,778 for one channel; of larger images the last grid
    is averaged.

    Example:
        >>> import jax
        >>> logits, _ = jax.eval_shape(
        ...     AlexNet(10).init_with_output, jax.random.key(0),
        ...     jnp.zeros((1, 32, 32, 3)))
        >>> logits.shape
        (1, 10)

    Source:
        Krizhevsky et al., ImageNet Classification with Deep Convolutional Neural
        Networks, section 3.5; a baseline of Horn et al., table 1.
    """

    # (29 + 10 - 11) // 4 + 1 = 8, which three pools halve to 1.
    min_size: ClassVar[int] = 29

    @nn.compact
    def __call__(
        self,
        images: Float[Array, "batch height width channels"],
        *,
        deterministic: bool = True,
    ) -> Float[Array, "batch classes"]:
        """Class logits of a batch of images."""
        del deterministic
        self.check_size(images)
        conv = functools.partial(_conv, dtype=self.dtype)
        x = nn.relu(conv("conv_0", 64, 11, stride=4)(images))
        x = nn.relu(conv("conv_1", 192, 5)(_halve(x)))
        x = nn.relu(conv("conv_2", 384, 3)(_halve(x)))
        x = nn.relu(conv("conv_3", 256, 3)(x))
        x = nn.relu(conv("conv_4", 256, 3)(x))
        return _head(self.num_classes, _halve(x).mean((1, 2)))


class Vgg16(CNN):
    """Classifies images by thirteen 3x3 convolutions and three linear layers.

    Configuration D without batch normalisation, as published: its features are averaged
    to a 7x7 grid, or repeated where there are fewer, as of a 32x32 image the single
    one, so that the linear layers are those for ImageNet. It has 134,301,514 parameters
    for three channels and ten classes, 134,300,362 for one channel.

    Attributes:
        dropout: Dropout rate of the two hidden linear layers.

    Example:
        >>> import jax
        >>> logits, _ = jax.eval_shape(
        ...     Vgg16(10).init_with_output, jax.random.key(0),
        ...     jnp.zeros((1, 32, 32, 3)))
        >>> logits.shape
        (1, 10)

    Source:
        Simonyan and Zisserman, Very Deep Convolutional Networks for Large-Scale Image
        Recognition, table 1; a baseline of Horn et al., table 1.
    """

    dropout: float = 0.5
    # Five pools halve it to 1.
    min_size: ClassVar[int] = 32

    @nn.compact
    def __call__(
        self,
        images: Float[Array, "batch height width channels"],
        *,
        deterministic: bool = True,
    ) -> Float[Array, "batch classes"]:
        """Class logits of a batch of images."""
        self.check_size(images)
        x = images
        for stage, (channels, depth) in enumerate(VGG_STAGES):
            for layer in range(depth):
                conv = _conv(f"conv_{stage}_{layer}", channels, 3, dtype=self.dtype)
                x = nn.relu(conv(x))
            x = _halve(x)
        x = average_to_grid(x, (7, 7)).reshape(len(x), -1)
        for index in range(2):
            hidden = nn.Dense(
                4096, dtype=self.dtype, kernel_init=HE_NORMAL, name=f"hidden_{index}"
            )
            x = nn.relu(hidden(x))
            x = nn.Dropout(self.dropout)(x, deterministic=deterministic)
        return _head(self.num_classes, x)


class ResidualBlock(nn.Module):
    """relu(shortcut(x) + norm(conv(relu(norm(conv(x)))))), with 3x3 convolutions.

    Attributes:
        channels: Of the result.
        stride: Of the first convolution.
        dtype: Compute dtype.
    """

    channels: int
    stride: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch height width channels"],
        *,
        deterministic: bool = True,
    ) -> Float[Array, "batch _height _width _channels"]:
        """Applies the block."""

        def normalised_conv(name: str, size: int, stride: int, x: Array) -> Array:
            conv = _conv(f"{name}_conv", self.channels, size, stride, False, self.dtype)
            norm = BatchNorm(self.dtype, name=f"{name}_norm")
            return norm(conv(x), deterministic=deterministic)

        y = nn.relu(normalised_conv("first", 3, self.stride, x))
        y = normalised_conv("second", 3, 1, y)
        if x.shape != y.shape:
            x = normalised_conv("shortcut", 1, self.stride, x)
        return nn.relu(x + y)


class ResNet18(CNN):
    """Classifies images by eight residual blocks.

    The adaptation that is usual for CIFAR-10: a 3x3 convolution of stride 1 without
    pooling replaces the 7x7 one before the blocks. It has 11,173,962 parameters for
    three channels and ten classes, 11,172,810 for one channel. Batch normalisation is
    by the moments of all devices together.

    Example:
        >>> import jax
        >>> logits, _ = jax.eval_shape(
        ...     ResNet18(10).init_with_output, jax.random.key(0),
        ...     jnp.zeros((1, 32, 32, 3)))
        >>> logits.shape
        (1, 10)

    Source:
        He et al., Deep Residual Learning for Image Recognition, table 1 and section
        4.2; a baseline of Horn et al., table 1.
    """

    @nn.compact
    def __call__(
        self,
        images: Float[Array, "batch height width channels"],
        *,
        deterministic: bool = True,
    ) -> Float[Array, "batch classes"]:
        """Class logits of a batch of images."""
        x = _conv("conv", 64, 3, bias=False, dtype=self.dtype)(images)
        norm = BatchNorm(self.dtype, name="norm")
        x = nn.relu(norm(x, deterministic=deterministic))
        for stage in range(4):
            for layer in range(2):
                stride = 2 if stage and not layer else 1
                name = f"block_{stage}_{layer}"
                block = ResidualBlock(64 * 2**stage, stride, self.dtype, name=name)
                x = block(x, deterministic=deterministic)
        return _head(self.num_classes, x.mean((1, 2)))


def average_to_grid(
    x: Float[Array, "batch height width channels"], grid: tuple[int, int]
) -> Float[Array, "batch rows columns channels"]:
    """Averages features over equal parts of their grid.

    Part i of n has the rows from floor(i height / n) to ceil((i + 1) height / n), and
    likewise columns: parts overlap where n does not divide, and repeat where n is
    larger.

    Args:
        x: Shape ``[batch, height, width, channels]``.
        grid: Rows and columns of the result.

    Returns:
        Shape ``[batch, *grid, channels]``.

    Example:
        >>> x = jnp.arange(5.0).reshape(1, 1, 5, 1)
        >>> average_to_grid(x, (1, 2)).ravel().tolist()
        [1.0, 3.0]
    """
    weights = []
    for size, parts in zip(x.shape[1:3], grid, strict=True):
        part, place = np.arange(parts)[:, None], np.arange(size)
        inside = place >= part * size // parts
        inside &= place < -(-(part + 1) * size // parts)
        weights.append((inside / inside.sum(1, keepdims=True)).astype(x.dtype))
    return jnp.einsum("rh,bhwc,kw->brkc", weights[0], x, weights[1])


def convolve(
    x: Float[Array, "batch height width channels"],
    kernel: Float[Array, "rows columns channels features"],
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    **options: Any,
) -> Float[Array, "batch _height _width features"]:
    """A convolution, as `jax.lax.conv_general_dilated` computes it.

    Where the kernel is larger than the images it is one product of matrices: XLA has
    only a loop for it on CPUs, 40 times slower.

    Args:
        x: Shape ``[batch, height, width, channels]``.
        kernel: Shape ``[rows, columns, channels, features]``.
        strides: Of rows and columns.
        padding: Zeros before and after the rows, and the columns.
        **options: Of `jax.lax.conv_general_dilated`.

    Returns:
        Shape ``[batch, height', width', features]``.
    """
    height, width = x.shape[1:3]
    rows, columns = kernel.shape[:2]
    if tuple(strides) != (1, 1) or (rows <= height and columns <= width):
        return jax.lax.conv_general_dilated(x, kernel, strides, padding, **options)
    x = jnp.pad(x, ((0, 0), *padding, (0, 0)))
    height, width = x.shape[1] - rows + 1, x.shape[2] - columns + 1
    windows = [
        x[:, row : row + height, column : column + width]
        for row in range(rows)
        for column in range(columns)
    ]
    return jnp.matmul(
        jnp.concatenate(windows, axis=-1),
        kernel.reshape(-1, kernel.shape[-1]),
        precision=options.get("precision"),
    )


def _conv(
    name: str,
    channels: int,
    size: int,
    stride: int = 1,
    bias: bool = True,
    dtype: Any = jnp.float32,
) -> nn.Conv:
    """A convolution that keeps the grid, but for its stride."""
    return nn.Conv(
        channels,
        (size, size),
        strides=stride,
        padding=size // 2,
        use_bias=bias,
        kernel_init=HE_NORMAL,
        dtype=dtype,
        conv_general_dilated=convolve,
        name=name,
    )


def _halve(
    x: Float[Array, "batch height width channels"],
) -> Float[Array, "batch _height _width channels"]:
    return nn.max_pool(x, (2, 2), (2, 2))


def _head(num_classes: int, features: Float[Array, "batch features"]) -> Array:
    return Linear(num_classes, name="head")(features.astype(jnp.float32))

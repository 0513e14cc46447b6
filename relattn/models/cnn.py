"""Convolutional networks for small images: AlexNet, VGG-16 and ResNet-18.

They are adapted to 32x32 pixels as is usual for CIFAR-10. `PUBLISHED_BASELINES` has the
options of the baselines of Horn et al.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from relattn.messages import check_choice
from relattn.models.patches import check_images
from relattn.nn.batch_norm import BatchNorm
from relattn.nn.blocks import KERNEL_INIT, Linear, at_precision, uniform

# Keeps the scale of layers before a ReLU (He et al., 2015).
HE_NORMAL = nn.initializers.he_normal()
# Initializers of convolutions' weights, by `CNN.weight_init`.
INITS = {
    "he": HE_NORMAL,
    "torchvision": nn.initializers.variance_scaling(2.0, "fan_out", "normal"),
    "pytorch": KERNEL_INIT,
}
STEMS = ("cifar", "imagenet")
# Channels and number of convolutions between two pools.
VGG_STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))


class CNN(nn.Module):
    """Base class of the convolutional networks.

    Their parameters fit images of all sizes from ``min_size`` on.

    Attributes:
        num_classes: Number of classes.
        dtype: Compute dtype; parameters and statistics are float32.
        precision: Precision of products and convolutions, one of those that
            `jax.default_matmul_precision` takes: ``"default"``, ``"high"`` or
            ``"highest"``; ``""`` for JAX's setting.
        weight_init: Initial values of the weights. ``"he"``: He normal with the fan-in;
            ``"torchvision"``: He normal with the fan-out, as in torchvision's VGG and
            ResNet; both with zero biases. ``"pytorch"``: weights and biases uniform in
            +-1/sqrt(fan_in), the default of PyTorch's layers.
    """

    num_classes: int
    dtype: Any = jnp.float32
    precision: str = ""
    weight_init: str = "he"
    inputs: ClassVar[str] = "images"
    split_axes: ClassVar[Mapping[str, tuple[int, ...]]] = {"head/kernel": (-1, -2)}
    min_size: ClassVar[int] = 1
    # Inputs are pixels.
    patch_size: ClassVar[int] = 1

    def check(self, images: Float[Array, "batch height width channels"]) -> None:
        """Checks the options, and that the images are large enough for the strides.

        Args:
            images: Shape ``[batch, height, width, channels]``.

        Raises:
            ValueError: If an option has an unknown value, or the images are too small
                or no inputs of a model.
        """
        check_images(images)
        check_choice("weight_init", self.weight_init, INITS)
        height, width = images.shape[1:3]
        if min(height, width) < self.min_size:
            raise ValueError(
                f"the side of images must be at least {self.min_size} for "
                f"{type(self).__name__}, whose strides reduce an image of "
                f"{height}x{width} pixels to nothing"
            )


class AlexNet(CNN):
    """Classifies images with five convolutions and a linear layer (AlexNet).

    This is the usual adaptation to CIFAR-10: the first convolution has stride 4 on
    images padded by 5 pixels, pools are 2x2, and one linear layer replaces three, so
    that 32x32 images become 256 features. For larger images the last grid is averaged.
    It has 2,472,266 parameters for three channels and ten classes, 2,456,778 for one
    channel. The baseline of Horn et al. has ``dropout=0.5`` and
    ``weight_init="pytorch"``.

    Attributes:
        dropout: Dropout rate after the first, third and fifth convolution.

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

    dropout: float = 0.0
    # (29 + 10 - 11) // 4 + 1 = 8, and three pools halve it to 1.
    min_size: ClassVar[int] = 29

    @nn.compact
    @at_precision
    def __call__(
        self,
        images: Float[Array, "batch height width channels"],
        *,
        deterministic: bool = True,
    ) -> Float[Array, "batch classes"]:
        """Computes the class logits of a batch of images."""
        self.check(images)
        conv = functools.partial(_conv, dtype=self.dtype, weight_init=self.weight_init)

        def drop(x):
            return nn.Dropout(self.dropout)(x, deterministic=deterministic)

        # Five convolutions; a pool follows the first, the second and the last.
        x = drop(nn.relu(conv(images, "conv_0", 64, 11, stride=4)))
        x = nn.relu(conv(_halve(x), "conv_1", 192, 5))
        x = drop(nn.relu(conv(_halve(x), "conv_2", 384, 3)))
        x = nn.relu(conv(x, "conv_3", 256, 3))
        x = drop(nn.relu(conv(x, "conv_4", 256, 3)))
        # The last grid has one place for 32x32 pixels; larger ones are averaged.
        return _head(self.num_classes, _halve(x).mean((1, 2)))


class Vgg16(CNN):
    """Classifies images with 13 convolutions and three linear layers (VGG-16).

    This is configuration D without batch normalisation, as published: convolutions are
    3x3. Features are averaged to a 7x7 grid, or repeated if there are fewer (a 32x32
    image has one), so that the linear layers are those for ImageNet. It has 134,301,514
    parameters for three channels and ten classes, 134,300,362 for one channel. With
    ``weight_init="torchvision"``, as in the baseline of Horn et al., the weights of the
    three linear layers start as N(0, 0.01^2) and their biases at zero.

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
    # Five pools halve 32 to 1.
    min_size: ClassVar[int] = 32

    @nn.compact
    @at_precision
    def __call__(
        self,
        images: Float[Array, "batch height width channels"],
        *,
        deterministic: bool = True,
    ) -> Float[Array, "batch classes"]:
        """Computes the class logits of a batch of images."""
        self.check(images)
        conv = functools.partial(_conv, dtype=self.dtype, weight_init=self.weight_init)
        # Five stages of 3x3 convolutions, each with a pool after it.
        x = images
        for stage, (channels, depth) in enumerate(VGG_STAGES):
            for layer in range(depth):
                x = nn.relu(conv(x, f"conv_{stage}_{layer}", channels, 3))
            x = _halve(x)
        # 7x7 places of 512 channels, for any size of the images.
        x = average_to_grid(x, (7, 7))
        x = x.reshape(x.shape[0], math.prod(x.shape[1:]))
        # Two hidden layers of 4,096, and the head.
        hidden = head = Linear
        if self.weight_init == "he":
            hidden = functools.partial(nn.Dense, kernel_init=HE_NORMAL)
        elif self.weight_init == "torchvision":
            normal = nn.initializers.normal(0.01)
            hidden = head = functools.partial(nn.Dense, kernel_init=normal)
        for index in range(2):
            x = nn.relu(hidden(4096, dtype=self.dtype, name=f"hidden_{index}")(x))
            x = nn.Dropout(self.dropout)(x, deterministic=deterministic)
        return head(self.num_classes, name="head")(x.astype(jnp.float32))


class ResidualBlock(nn.Module):
    """Computes relu(shortcut(x) + norm(conv(relu(norm(conv(x)))))), conv being 3x3.

    Attributes:
        channels: Number of channels of the result.
        stride: Stride of the first convolution, and of the shortcut's.
        dtype: Compute dtype; parameters and statistics are float32.
        weight_init: Initial values of the weights: ``"he"``, ``"torchvision"`` or
            ``"pytorch"``.
    """

    channels: int
    stride: int
    dtype: Any = jnp.float32
    precision: str = ""
    weight_init: str = "he"

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch height width channels"],
        *,
        deterministic: bool = True,
    ) -> Float[Array, "batch _height _width _channels"]:
        """Applies the block."""
        conv = functools.partial(_conv, dtype=self.dtype, weight_init=self.weight_init)

        def normalised_conv(name: str, size: int, stride: int, x: Array) -> Array:
            x = conv(x, f"{name}_conv", self.channels, size, stride, bias=False)
            norm = BatchNorm(self.dtype, name=f"{name}_norm")
            return norm(x, deterministic=deterministic)

        # y = norm(conv(relu(norm(conv(x)))))
        y = nn.relu(normalised_conv("first", 3, self.stride, x))
        y = normalised_conv("second", 3, 1, y)
        # The shortcut is x, or norm(conv(x)) with a 1x1 kernel where the shapes differ.
        if x.shape != y.shape:
            x = normalised_conv("shortcut", 1, self.stride, x)
        return nn.relu(x + y)


class ResNet18(CNN):
    """Classifies images with eight residual blocks (ResNet-18).

    This is the usual adaptation to CIFAR-10: a 3x3 convolution of stride 1 without
    pooling replaces the 7x7 convolution before the blocks. It has 11,173,962 parameters
    for three channels and ten classes, 11,172,810 for one channel. Batch normalisation
    uses the moments over all devices.

    The baseline of Horn et al. has ``stem="imagenet"`` and
    ``weight_init="torchvision"``: 11,181,642 parameters for three channels, 11,175,370
    for one. Its first blocks see 8x8 pixels of a 32x32 image.

    Attributes:
        stem: Layers before the blocks: ``"cifar"``, or ``"imagenet"``: the 7x7
            convolution of stride 2 and a max-pool of 3x3 pixels and stride 2.

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

    stem: str = "cifar"

    @nn.compact
    @at_precision
    def __call__(
        self,
        images: Float[Array, "batch height width channels"],
        *,
        deterministic: bool = True,
    ) -> Float[Array, "batch classes"]:
        """Computes the class logits of a batch of images."""
        self.check(images)
        check_choice("stem", self.stem, STEMS)
        # The stem: relu(norm(conv(images))), and a pool in that for ImageNet.
        size, stride = (7, 2) if self.stem == "imagenet" else (3, 1)
        options = {"dtype": self.dtype, "weight_init": self.weight_init}
        x = _conv(images, "conv", 64, size, stride, bias=False, **options)
        norm = BatchNorm(self.dtype, name="norm")
        x = nn.relu(norm(x, deterministic=deterministic))
        if self.stem == "imagenet":
            padding: Any = ((1, 1), (1, 1))
            x = nn.max_pool(x, (3, 3), (2, 2), padding)
        # Four stages of two blocks; each but the first halves the grid and doubles the
        # channels.
        for stage in range(4):
            for layer in range(2):
                stride = 2 if stage and not layer else 1
                name = f"block_{stage}_{layer}"
                block = ResidualBlock(64 * 2**stage, stride, **options, name=name)
                x = block(x, deterministic=deterministic)
        # The head reads the mean over the grid.
        return _head(self.num_classes, x.mean((1, 2)))


def average_to_grid(
    x: Float[Array, "batch height width channels"], grid: tuple[int, int]
) -> Float[Array, "batch rows columns channels"]:
    """Averages features over equal parts of their grid.

    Part i of n has the rows from floor(i height / n) to ceil((i + 1) height / n);
    columns are divided in the same way. Parts overlap if n does not divide the size,
    and repeat if n is larger.

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
    # Weights [parts, size] of each axis: 1 / (rows of the part) inside of it.
    weights = []
    for size, parts in zip(x.shape[1:3], grid, strict=True):
        part, index = np.arange(parts)[:, None], np.arange(size)
        inside = index >= part * size // parts
        inside &= index < -(-(part + 1) * size // parts)
        weights.append((inside / inside.sum(1, keepdims=True)).astype(x.dtype))
    return jnp.einsum("rh,bhwc,kw->brkc", weights[0], x, weights[1])


def convolve(
    x: Float[Array, "batch height width channels"],
    kernel: Float[Array, "rows columns channels features"],
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    **options: Any,
) -> Float[Array, "batch _height _width features"]:
    """Computes a convolution, like `jax.lax.conv_general_dilated`.

    If the kernel is larger than the images, the convolution is computed as one matrix
    product: XLA on CPUs has only a loop for it, which is 40 times slower.

    Args:
        x: Shape ``[batch, height, width, channels]``.
        kernel: Shape ``[rows, columns, channels, features]``.
        strides: Strides over rows and columns.
        padding: Zeros before and after the rows, and the columns.
        **options: Options of `jax.lax.conv_general_dilated`.

    Returns:
        Shape ``[batch, height', width', features]``.
    """
    height, width = x.shape[1:3]
    rows, columns = kernel.shape[:2]
    if tuple(strides) != (1, 1) or (rows <= height and columns <= width):
        return jax.lax.conv_general_dilated(x, kernel, strides, padding, **options)
    # A window for each place of the kernel; y = sum of windows times weights.
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
    x: Float[Array, "batch height width channels"],
    name: str,
    channels: int,
    size: int,
    stride: int = 1,
    *,
    bias: bool = True,
    dtype: Any = jnp.float32,
    weight_init: str = "he",
) -> Float[Array, "batch _height _width _channels"]:
    """Applies a convolution with padding that keeps the grid, apart from the stride."""
    bias_init = nn.initializers.zeros
    if weight_init == "pytorch":
        bias_init = uniform((size**2 * x.shape[-1]) ** -0.5)
    conv = nn.Conv(
        channels,
        (size, size),
        strides=stride,
        padding=size // 2,
        use_bias=bias,
        kernel_init=INITS[weight_init],
        bias_init=bias_init,
        dtype=dtype,
        conv_general_dilated=convolve,
        name=name,
    )
    return conv(x)


def _halve(
    x: Float[Array, "batch height width channels"],
) -> Float[Array, "batch _height _width channels"]:
    return nn.max_pool(x, (2, 2), (2, 2))


def _head(num_classes: int, features: Float[Array, "batch features"]) -> Array:
    return Linear(num_classes, name="head")(features.astype(jnp.float32))


# Options of ``config.model``, from the authors' notebooks. They have no Routing
# Transformer. Their Linformer is a ViT with one patch and a CLS token; k is larger than
# these two tokens, as the authors chose. They also add a learned position to the
# learned CLS token: 256 parameters more than here.
PUBLISHED_BASELINES = {
    "alexnet": {"name": "alexnet", "dropout": 0.5, "weight_init": "pytorch"},
    "vgg16": {"name": "vgg16", "dropout": 0.5, "weight_init": "torchvision"},
    "resnet18": {
        "name": "resnet18",
        "stem": "imagenet",
        "weight_init": "torchvision",
    },
    "linformer": {
        "name": "vit",
        "dim": 256,
        "num_layers": 12,
        "num_heads": 8,
        "mlp_dim": 1024,
        "patch_size": 32,
        "attention": "linformer(k=64, sharing='heads')",
        "position": "learned",
        "embedding_norms": False,
    },
}

"""The pixel Performer: a Transformer on an image's pixels (or patches) as tokens."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from relattn.nn.blocks import TransformerBlock
from relattn.nn.build import build
from relattn.nn.linear import Linear


class Performer(nn.Module):
    """Classifies images from their pixels: embedding, CLS token, blocks, linear head.

    With ``attention="favor"`` and ``position`` ``"none"``, ``"learnable_sincos"`` or
    ``"constrained_sincos"``, or with ``attention="banded(clip=6)"``, these are the
    Performers of Horn et al. (no position, absolute, strategy 1, strategy 2). They have
    as many parameters as published and the 256 of the CLS token, which the published
    count leaves out.

    Attributes:
        num_classes: Number of classes.
        dim: Width of the tokens.
        num_layers: Number of blocks.
        heads: Number of heads.
        mlp_dim: Width of the feed-forward networks' hidden layer.
        patch_size: Side of the square patch that is one token, in pixels.
        attention: Spec of the attention.
        position: Spec of the position encoding.
        attention_dropout: Dropout rate of the attentions' outputs.
        dropout: Dropout rate of the feed-forward networks.
        dtype: Compute dtype; parameters are float32.

    Example:
        >>> import jax
        >>> model = Performer(num_classes=3, dim=8, num_layers=1, heads=2, mlp_dim=16)
        >>> images = jnp.zeros((1, 5, 7, 1))
        >>> logits, _ = model.init_with_output(jax.random.key(0), images)
        >>> logits.shape
        (1, 3)

    Source:
        Horn et al., Translational Equivariance in Kernelizable Attention, section 3
        and appendix A.2.
    """

    num_classes: int
    dim: int = 256
    num_layers: int = 6
    heads: int = 8
    mlp_dim: int = 1024
    patch_size: int = 1
    attention: str = "favor"
    position: str = "none"
    attention_dropout: float = 0.0
    dropout: float = 0.0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        images: Float[Array, "batch height width channels"],
        *,
        deterministic: bool = True,
    ) -> Float[Array, "batch classes"]:
        """Class logits of a batch of images."""
        make_attention, make_position = build(
            self.attention,
            self.position,
            dim=self.dim,
            heads=self.heads,
            num_layers=self.num_layers,
        )
        tokens, grid = patches(images, self.patch_size)
        x = Linear(self.dim, dtype=self.dtype, name="embedding")(tokens)
        position = make_position(name="position")
        if position.site == "tokens":
            x = position(x, grid)
        cls = self.param("cls", nn.initializers.normal(1.0), (1, 1, self.dim))
        cls = jnp.broadcast_to(cls.astype(x.dtype), (x.shape[0], 1, self.dim))
        x = jnp.concatenate([cls, x], axis=1)
        layers = [None] * self.num_layers
        if position.site == "heads":
            layers = position(grid, 1)
        for layer in range(self.num_layers):
            x = TransformerBlock(
                functools.partial(make_attention, layer=layer, dtype=self.dtype),
                dim=self.dim,
                mlp_dim=self.mlp_dim,
                attention_dropout=self.attention_dropout,
                dropout=self.dropout,
                dtype=self.dtype,
                name=f"block_{layer}",
            )(
                x,
                grid=grid,
                num_prefix=1,
                position=layers[layer],
                deterministic=deterministic,
            )
        return Linear(self.num_classes, name="head")(x[:, 0].astype(jnp.float32))


def patches(
    images: Float[Array, "batch height width channels"], patch_size: int
) -> tuple[Float[Array, "batch n patch"], tuple[int, int]]:
    """Cuts images into square patches, row by row.

    Args:
        images: Shape ``[batch, height, width, channels]``.
        patch_size: Side of a patch, in pixels.

    Returns:
        Tokens ``[batch, n, patch_size^2 * channels]``, and their grid.

    Raises:
        ValueError: If the patch does not divide the image.

    Example:
        >>> tokens, grid = patches(jnp.zeros((1, 4, 6, 3)), 2)
        >>> tokens.shape, grid
        ((1, 6, 12), (2, 3))
    """
    batch, height, width, channels = images.shape
    if patch_size < 1 or height % patch_size or width % patch_size:
        raise ValueError(
            f"config.model.patch_size={patch_size} does not divide the image of "
            f"{height}x{width} pixels; choose a divisor or another "
            "config.data.image_size"
        )
    grid = (height // patch_size, width // patch_size)
    x = images.reshape(batch, grid[0], patch_size, grid[1], patch_size, channels)
    tokens = x.swapaxes(2, 3).reshape(batch, grid[0] * grid[1], -1)
    return tokens, grid

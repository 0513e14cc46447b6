"""The pixel Performer: a Transformer on an image's pixels (or patches) as tokens."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from relattn.models.patches import PatchSize, patches
from relattn.nn.blocks import TransformerBlock, transformer_blocks
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
        patch_size: Side of the square patch that is one token, or its height and width,
            in pixels.
        attention: Spec of the attention.
        position: Spec of the position encoding.
        attention_dropout: Dropout rate of the attentions' outputs.
        dropout: Dropout rate of the feed-forward networks.
        dtype: Compute dtype; parameters are float32.
        remat: Whether the backward pass computes each layer anew, from its input.

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
    patch_size: PatchSize = 1
    attention: str = "favor"
    position: str = "none"
    attention_dropout: float = 0.0
    dropout: float = 0.0
    dtype: Any = jnp.float32
    remat: bool = False
    inputs: ClassVar[str] = "images"
    num_prefix: ClassVar[int] = 1
    # Whether equal layers are compiled once.
    scan: ClassVar[bool] = False

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
        x = position.of_tokens(x, grid)
        cls = self.param("cls", nn.initializers.normal(1.0), (1, 1, self.dim))
        cls = jnp.broadcast_to(cls.astype(x.dtype), (x.shape[0], 1, self.dim))
        x = jnp.concatenate([cls, x], axis=1)
        x = transformer_blocks(
            x,
            [make_attention] * self.num_layers,
            functools.partial(
                TransformerBlock,
                dim=self.dim,
                mlp_dim=self.mlp_dim,
                attention_dropout=self.attention_dropout,
                dropout=self.dropout,
                dtype=self.dtype,
            ),
            positions=position.of_layers(grid, self.num_prefix),
            scan=self.scan,
            grid=grid,
            num_prefix=self.num_prefix,
            remat=self.remat,
            deterministic=deterministic,
        )
        return Linear(self.num_classes, name="head")(x[:, 0].astype(jnp.float32))

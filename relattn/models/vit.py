"""The Vision Transformer, with any attention in its first layers."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from relattn import spec
from relattn.models.hybrid import SIZES as SIZES
from relattn.models.hybrid import hybrid
from relattn.models.patches import PatchSize, patches
from relattn.nn.blocks import LAYER_NORM_EPSILON, TransformerBlock, transformer_blocks
from relattn.nn.linear import Linear

HEADS = ("linear", "mlp")


class ViT(nn.Module):
    """Classifies images from their patches: embedding, CLS token, blocks, head.

    A patch is embedded by LayerNorm, Linear, LayerNorm; the CLS token, N(0, 1) at the
    start, comes first; a last LayerNorm precedes the head. With ``dim``,
    ``num_layers``, ``heads`` and ``mlp_dim`` of ``SIZES["A"]`` and so on these are the
    ViT-A, B and C of Translution. With ``qkv_bias=True``, ``embedding_norms=False`` and
    ``head="mlp"`` it is the ViT of Guoji.

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
        num_relative_layers: The first layers, which use ``attention``; the rest use
            softmax; 0 for all layers.
        attention_dropout: Dropout rate of the attentions' outputs.
        dropout: Dropout rate of the feed-forward networks.
        qkv_bias: Whether queries, keys and values have a bias.
        embedding_norms: Whether LayerNorms surround the embedding's linear layer.
        head: ``"linear"``, or ``"mlp"``: a hidden layer of ``mlp_dim`` and exact GELU
            before it.
        dtype: Compute dtype; parameters are float32.
        remat: Whether the backward pass computes each layer anew, from its input.

    Example:
        >>> import jax
        >>> model = ViT(num_classes=3, patch_size=2, dim=8, num_layers=2, heads=2,
        ...             mlp_dim=16, attention="translution", num_relative_layers=1)
        >>> images = jnp.zeros((1, 4, 6, 1))
        >>> logits, _ = jax.eval_shape(
        ...     model.init_with_output, jax.random.key(0), images)
        >>> logits.shape
        (1, 3)

    Source:
        Translution, section 4.1 and table 1; Guoji, Improving efficient Vision
        Transformers with RPEs, section 3.
    """

    num_classes: int
    dim: int = 192
    num_layers: int = 6
    heads: int = 3
    mlp_dim: int = 768
    patch_size: PatchSize = 16
    attention: str = "softmax"
    position: str = "none"
    num_relative_layers: int = 0
    attention_dropout: float = 0.0
    dropout: float = 0.0
    qkv_bias: bool = False
    embedding_norms: bool = True
    head: str = "linear"
    dtype: Any = jnp.float32
    remat: bool = False
    inputs: ClassVar[str] = "images"
    num_prefix: ClassVar[int] = 1

    @nn.compact
    def __call__(
        self,
        images: Float[Array, "batch height width channels"],
        *,
        deterministic: bool = True,
    ) -> Float[Array, "batch classes"]:
        """Class logits of a batch of images."""
        if self.head not in HEADS:
            raise ValueError(
                f"unknown config.model.head {spec.shorten(self.head)}: "
                + spec.closest(self.head, HEADS)
            )
        attentions, make_position = hybrid(
            self.attention,
            self.position,
            dim=self.dim,
            heads=self.heads,
            num_layers=self.num_layers,
            num_relative_layers=self.num_relative_layers,
            qkv_bias=self.qkv_bias,
        )
        norm = functools.partial(nn.LayerNorm, LAYER_NORM_EPSILON, dtype=self.dtype)
        x, grid = patches(images, self.patch_size)
        if self.embedding_norms:
            x = norm(name="patch_norm")(x)
        x = Linear(self.dim, dtype=self.dtype, name="embedding")(x)
        if self.embedding_norms:
            x = norm(name="embedding_norm")(x)
        position = make_position(name="position")
        x = position.of_tokens(x, grid)
        cls = self.param("cls", nn.initializers.normal(1.0), (1, 1, self.dim))
        cls = jnp.broadcast_to(cls.astype(x.dtype), (x.shape[0], 1, self.dim))
        x = jnp.concatenate([cls, x], axis=1)
        x = transformer_blocks(
            x,
            attentions,
            functools.partial(
                TransformerBlock,
                dim=self.dim,
                mlp_dim=self.mlp_dim,
                attention_dropout=self.attention_dropout,
                dropout=self.dropout,
                dtype=self.dtype,
            ),
            positions=position.of_layers(grid, self.num_prefix),
            grid=grid,
            num_prefix=self.num_prefix,
            remat=self.remat,
            deterministic=deterministic,
        )
        cls = norm(name="norm")(x[:, 0]).astype(jnp.float32)
        if self.head == "mlp":
            cls = nn.gelu(Linear(self.mlp_dim, name="hidden")(cls), approximate=False)
        return Linear(self.num_classes, name="head")(cls)

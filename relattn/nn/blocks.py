"""Transformer blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from relattn import offsets
from relattn.nn.linear import Linear

# PyTorch's default, with which the published models were trained.
LAYER_NORM_EPSILON = 1e-5


class FeedForward(nn.Module):
    """The position-wise network: Dense, exact GELU, Dense.

    Attributes:
        dim: Width of the tokens.
        mlp_dim: Width of the hidden layer.
        dropout: Dropout rate after the activation.
        dtype: Compute dtype.
    """

    dim: int
    mlp_dim: int
    dropout: float = 0.0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch n dim"], *, deterministic: bool = True
    ) -> Float[Array, "batch n dim"]:
        """Applies the network to every token."""
        x = Linear(self.mlp_dim, dtype=self.dtype, name="hidden")(x)
        x = nn.gelu(x, approximate=False)
        x = nn.Dropout(self.dropout)(x, deterministic=deterministic)
        return Linear(self.dim, dtype=self.dtype, name="out")(x)


class TransformerBlock(nn.Module):
    """A pre-norm block: x + attention(norm(x)), then x + feed_forward(norm(x)).

    Attributes:
        attention: Makes the attention module; called with ``name``.
        dim: Width of the tokens.
        mlp_dim: Width of the feed-forward network's hidden layer.
        attention_dropout: Dropout rate of the attention's output.
        dropout: Dropout rate of the feed-forward network.
        dtype: Compute dtype.
    """

    attention: Callable[..., nn.Module]
    dim: int
    mlp_dim: int
    attention_dropout: float = 0.0
    dropout: float = 0.0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch n dim"],
        *,
        grid: offsets.Grid,
        num_prefix: int,
        position: Any = None,
        key_mask: Bool[Array, "batch n"] | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "batch n dim"]:
        """Applies the block; arguments as in `relattn.nn.attention`."""

        def norm(name: str) -> nn.LayerNorm:
            return nn.LayerNorm(LAYER_NORM_EPSILON, dtype=self.dtype, name=name)

        y = self.attention(name="attention")(
            norm("attention_norm")(x),
            grid=grid,
            num_prefix=num_prefix,
            position=position,
            key_mask=key_mask,
        )
        x = x + nn.Dropout(self.attention_dropout)(y, deterministic=deterministic)
        return x + FeedForward(
            self.dim, self.mlp_dim, self.dropout, self.dtype, name="feed_forward"
        )(norm("feed_forward_norm")(x), deterministic=deterministic)

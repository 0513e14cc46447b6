"""Pooling by attention: one learned query reads all tokens."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from relattn.nn.blocks import LAYER_NORM_EPSILON, FeedForward, make_norm
from relattn.nn.softmax_attention import SoftmaxAttention


class AttentionPool(nn.Module):
    """Pools tokens to one vector by attention of a learned query, the probe.

    y = attention(probe, x), then y + MLP(norm(y)), with softmax attention: linear in
    the number of tokens, because there is one query.

    Attributes:
        num_heads: Number of heads.
        mlp_dim: Width of the feed-forward network's hidden layer.
        norm_eps: Constant that the norm adds to the variance.
        activation: See `relattn.nn.blocks.FeedForward`.
        dtype: Compute dtype; parameters are float32.
        norm_type: ``"layer_norm"`` or ``"rms_norm"``, see
            `relattn.nn.blocks.make_norm`.

    Example:
        >>> import jax
        >>> pool = AttentionPool(num_heads=2, mlp_dim=16)
        >>> pool.init_with_output(jax.random.key(0), jnp.ones((3, 7, 8)))[0].shape
        (3, 8)

    Source:
        Zhai et al., Scaling Vision Transformers, section 3.2 (MAP head); Zhai et al.,
        Sigmoid Loss for Language Image Pre-Training.
    """

    num_heads: int
    mlp_dim: int
    norm_eps: float = LAYER_NORM_EPSILON
    activation: str = "gelu"
    dtype: Any = jnp.float32
    norm_type: str = "layer_norm"

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch n dim"],
        *,
        key_mask: Bool[Array, "batch n"] | None = None,
    ) -> Float[Array, "batch dim"]:
        """Pools tokens.

        Args:
            x: Tokens, shape ``[batch, n, dim]``.
            key_mask: True for tokens that exist, shape ``[batch, n]``.

        Returns:
            Shape ``[batch, dim]``.
        """
        dim = x.shape[-1]
        probe = self.param(
            "probe", nn.initializers.normal(1.0), (1, 1, dim), jnp.float32
        )
        probe = jnp.broadcast_to(probe.astype(self.dtype), (x.shape[0], 1, dim))
        attention = SoftmaxAttention(
            dim, self.num_heads, dtype=self.dtype, name="attention"
        )
        y = attention(probe, memory=x, key_mask=key_mask)[:, 0]
        mlp = FeedForward(
            dim,
            self.mlp_dim,
            dtype=self.dtype,
            activation=self.activation,
            name="feed_forward",
        )
        norm = make_norm(self.norm_type, self.norm_eps, self.dtype)(name="norm")
        # FeedForward takes sequences of tokens.
        return y + mlp(norm(y)[:, None])[:, 0]

"""Gated positional attention."""

from __future__ import annotations

from typing import ClassVar

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from relattn import offsets
from relattn.kernels import gated_positional
from relattn.nn.attention import Context, MultiHeadAttention


class GatedPositionalAttention(MultiHeadAttention):
    """Attention by content and attention by offset, mixed by a gate of each head.

    As in `relattn.kernels.gated_positional_attention`. Gates start at 1; the attention
    by offset starts around one place next to the query for each head, like a
    convolution: w = locality (-1, 2 c), c the head's place on the smallest square that
    holds the heads, or on a line, for causal attention of the past only. Pairs with a
    prefix token start at zero.

    Attributes:
        locality: How narrow the attention by offset starts.

    Example:
        >>> import jax
        >>> x = jnp.ones((1, 7, 8))
        >>> module = GatedPositionalAttention(dim=8, num_heads=2)
        >>> out, variables = module.init_with_output(
        ...     jax.random.key(0), x, grid=(2, 3), num_prefix=1)
        >>> out.shape, variables["params"]["coefficients"].shape
        ((1, 7, 8), (2, 6))

    Source:
        d'Ascoli et al., ConViT, section 3, with every head local at the start; there,
        no prefix token takes part.
    """

    locality: float = 1.0
    sites: ClassVar[tuple[str, ...]] = ("none", "tokens", "heads")
    has_causal_form: ClassVar[bool] = True
    scannable: ClassVar[bool] = True

    def attend(
        self,
        q: Float[Array, "batch heads n head_dim"],
        k: Float[Array, "batch heads n head_dim"],
        v: Float[Array, "batch heads n value_dim"],
        context: Context,
    ) -> Float[Array, "batch heads n value_dim"]:
        """Gated positional attention."""
        inputs = (q, k, v, *self.gates(context))
        if self.causal:
            return gated_positional.causal_gated_positional_attention(
                *inputs, key_mask=context.key_mask
            )
        return gated_positional.gated_positional_attention(
            *inputs,
            grid=context.grid,
            num_prefix=context.num_prefix,
            key_mask=context.key_mask,
        )

    def attend_step(
        self,
        q_i: Float[Array, "batch heads head_dim"],
        k: Float[Array, "batch heads length head_dim"],
        v: Float[Array, "batch heads length value_dim"],
        context: Context,
    ) -> Float[Array, "batch heads value_dim"]:
        """Computes gated positional attention of one token to the tokens up to it."""
        return gated_positional.causal_gated_positional_attention_step(
            q_i, k, v, *self.gates(context), index=context.index
        )

    def gates(
        self, context: Context
    ) -> tuple[Float[Array, " heads"], Float[Array, "heads features"]]:
        """Gates and coefficients of the heads."""
        if context.grid is None:
            raise ValueError("attention 'gated_positional' goes by offsets: give grid=")

        def init(_) -> Array:
            return jnp.asarray(self.locality * self.start(context), jnp.float32)

        gate = self.param("gate", nn.initializers.ones, (self.num_heads,), jnp.float32)
        return gate, self.param("coefficients", init)

    def start(self, context: Context) -> Float[np.ndarray, "heads features"]:
        """Coefficients w at the start."""
        axes = len(context.grid)
        side = self.num_heads if axes == 1 else int(np.ceil(self.num_heads**0.5))
        places = offsets.grid_positions((side,) * axes)[: self.num_heads]
        if not self.causal:
            places = places - side // 2
        w = np.concatenate([np.full((self.num_heads, 1), -1.0), 2 * places], axis=1)
        return np.pad(w, [(0, 0), (0, 3 if context.num_prefix else 0)])

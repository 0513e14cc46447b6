"""Gated positional attention (ConViT)."""

from __future__ import annotations

import itertools
from typing import ClassVar

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from relattn import offsets
from relattn.kernels import gated_positional
from relattn.nn.attention import Context, MultiHeadAttention

# Why a grid must be given.
_NEED = "attention 'gated_positional' needs offsets"


class GatedPositionalAttention(MultiHeadAttention):
    """Mixes attention by content and attention by offset with a gate for each head.

    The equation is that of `relattn.kernels.gated_positional_attention`. Gates start at
    1. In each head the attention by offset starts around one position next to the
    query, like a convolution: w = locality (-1, 2 c), where c is the head's position on
    the smallest square that holds the heads, for a grid of three axes the smallest
    cube; for text, c is on a line, and for causal attention in the past. Pairs with a
    prefix token start at zero.

    Attributes:
        locality: Initial inverse width of the attention by offset.

    Example:
        >>> import jax
        >>> x = jnp.ones((1, 7, 8))
        >>> module = GatedPositionalAttention(dim=8, num_heads=2)
        >>> out, variables = module.init_with_output(
        ...     jax.random.key(0), x, grid=(2, 3), num_prefix=1)
        >>> out.shape, variables["params"]["coefficients"].shape
        ((1, 7, 8), (2, 6))

    Source:
        d'Ascoli et al., ConViT, section 3, where heads start local and there are no
        prefix tokens.
    """

    locality: float = 1.0
    sites: ClassVar[tuple[str, ...]] = ("none", "tokens", "heads", "values")
    periodic: ClassVar[bool] = True
    has_causal_form: ClassVar[bool] = True
    scannable: ClassVar[bool] = True

    def attend(
        self,
        q: Float[Array, "batch heads n head_dim"],
        k: Float[Array, "batch heads n head_dim"],
        v: Float[Array, "batch heads n value_dim"],
        context: Context,
    ) -> Float[Array, "batch heads n value_dim"]:
        """Computes gated positional attention."""
        inputs = (q, k, v, *self.gates(context))
        if self.causal:
            return gated_positional.causal_gated_positional_attention(
                *inputs, key_mask=context.key_mask
            )
        return gated_positional.gated_positional_attention(
            *inputs,
            grid=context.grid_for(_NEED),
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
        assert context.index is not None
        return gated_positional.causal_gated_positional_attention_step(
            q_i, k, v, *self.gates(context), index=context.index
        )

    def gates(
        self, context: Context
    ) -> tuple[Float[Array, " heads"], Float[Array, "heads features"]]:
        """Returns the gates and coefficients of the heads."""
        context.grid_for(_NEED)

        def init(_) -> Array:
            return jnp.asarray(self.locality * self.centres(context), jnp.float32)

        gate = self.param("gate", nn.initializers.ones, (self.num_heads,), jnp.float32)
        return gate, self.param("coefficients", init)

    def centres(self, context: Context) -> Float[np.ndarray, "heads features"]:
        """Returns the initial coefficients w for locality 1."""
        axes = len(context.grid_for(_NEED))
        side = next(n for n in itertools.count(1) if n**axes >= self.num_heads)
        c = offsets.grid_positions((side,) * axes)[: self.num_heads]
        if not self.causal:
            c = c - side // 2
        w = np.concatenate([np.full((self.num_heads, 1), -1.0), 2 * c], axis=1)
        return np.pad(w, [(0, 0), (0, 3 if context.num_prefix else 0)])

"""Attention in linear time, whatever its feature map."""

from __future__ import annotations

from typing import ClassVar

from jaxtyping import Array, Float

from relattn.kernels import causal_linear, causal_toeplitz, linear, toeplitz
from relattn.nn.attention import Context, MultiHeadAttention


class LinearAttention(MultiHeadAttention):
    """Weights phi(q_i) . phi(k_j), times exp(b) of the offset where a position has one.

    A subclass defines `feature_map`.
    """

    sites: ClassVar[tuple[str, ...]] = ("none", "tokens", "heads", "offset_bias")

    def feature_map(self, depth: int) -> linear.FeatureMap:
        """The feature map of the layer, for queries and keys of a depth."""
        raise NotImplementedError

    @property
    def signed(self) -> bool:
        """Whether features may be negative, and so the sum of a query's weights."""
        return False

    def attend(
        self,
        q: Float[Array, "batch heads n key_depth"],
        k: Float[Array, "batch heads n key_depth"],
        v: Float[Array, "batch heads n depth"],
        context: Context,
    ) -> Float[Array, "batch heads n depth"]:
        """Linear attention."""
        feature_map = self.feature_map(q.shape[-1])
        return self.attend_content(q, k, v, feature_map, context)

    def attend_content(
        self,
        q: Float[Array, "batch heads n key_depth"],
        k: Float[Array, "batch heads n key_depth"],
        v: Float[Array, "batch heads n depth"],
        feature_map: linear.FeatureMap,
        context: Context,
    ) -> Float[Array, "batch heads n depth"]:
        """Linear attention; counts the weights' sums that are not positive."""
        tables = self.tables(context)
        options = {"key_mask": context.key_mask, **tables}
        if self.causal:
            attend = causal_linear.causal_linear_attention
            if tables:
                attend = causal_toeplitz.causal_toeplitz_linear_attention
            return attend(q, k, v, feature_map, **options)
        attend = linear.linear_attention
        if tables:
            attend = toeplitz.toeplitz_linear_attention
            options |= {"grid": context.grid, "num_prefix": context.num_prefix}
        if not self.signed:
            return attend(q, k, v, feature_map, **options)
        out, normalizer = attend(
            q, k, v, feature_map, return_normalizer=True, **options
        )
        self.sow("intermediates", "nonpositive_normalizer", (normalizer <= 0).mean())
        return out

    def attend_step(
        self,
        q: Float[Array, "batch heads 1 key_depth"],
        k: Float[Array, "batch heads 1 key_depth"],
        v: Float[Array, "batch heads 1 depth"],
        context: Context,
    ) -> Float[Array, "batch heads 1 depth"]:
        """One step of causal linear attention; the cache is its state.

        With an offset bias, the cache is the keys and values so far.
        """
        feature_map = self.feature_map(q.shape[-1])
        tables = self.tables(context)
        if tables:
            keys = self.remember("keys", k, context)
            values = self.remember("values", v, context)
            return causal_toeplitz.causal_toeplitz_linear_attention_step(
                q, keys, values, context.index, feature_map, **tables
            )
        q, k, v = (row[..., 0, :] for row in (q, k, v))
        state = self.variable(
            "cache", "state", causal_linear.init_linear_state, k, v, feature_map
        )
        after, out = causal_linear.causal_linear_attention_step(
            state.value, q, k, v, feature_map
        )
        if not self.is_initializing():
            state.value = after
        return out[..., None, :]

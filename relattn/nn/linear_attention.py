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
    has_causal_form: ClassVar[bool] = True
    scannable: ClassVar[bool] = True

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
        q_i: Float[Array, "batch heads key_depth"],
        k_i: Float[Array, "batch heads key_depth"],
        v_i: Float[Array, "batch heads depth"],
        context: Context,
    ) -> Float[Array, "batch heads depth"]:
        """One step of causal linear attention; the cache is its state.

        With an offset bias, the cache is the keys and values so far.
        """
        feature_map = self.feature_map(q_i.shape[-1])
        tables = self.tables(context)
        if tables:
            return causal_toeplitz.causal_toeplitz_linear_attention_step(
                q_i,
                self.remember("keys", k_i, context),
                self.remember("values", v_i, context),
                feature_map,
                index=context.index,
                **tables,
            )
        state = self.variable(
            "cache", "state", causal_linear.init_linear_state, k_i, v_i, feature_map
        )
        after, out_i = causal_linear.causal_linear_attention_step(
            state.value, q_i, k_i, v_i, feature_map
        )
        if not self.is_initializing():
            state.value = after
        return out_i

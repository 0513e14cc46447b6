"""Softmax attention, with tables of offsets or a window."""

from __future__ import annotations

from typing import Any, ClassVar

import flax.linen as nn
from jaxtyping import Array, Float

from relattn.kernels import relative, softmax
from relattn.nn.attention import Context, MultiHeadAttention, grouped


class SoftmaxAttention(MultiHeadAttention):
    """Computes softmax attention, softmax(q.k / sqrt(head_dim)) v.

    Attributes:
        window: Number of tokens, itself included, that a token of causal attention
            attends to; 0 for all earlier ones. The decoding cache holds as many, or
            all tokens if the position has tables.

    Example:
        >>> import jax
        >>> x = jax.numpy.ones((1, 7, 8))
        >>> module = SoftmaxAttention(dim=8, num_heads=2)
        >>> out, _ = module.init_with_output(jax.random.key(0), x)
        >>> out.shape
        (1, 7, 8)

    Source:
        Vaswani et al., Attention Is All You Need, section 3.2; window: Beltagy et al.,
        Longformer, section 3.1.
    """

    window: int = 0
    sites: ClassVar[tuple[str, ...]] = (
        "none",
        "tokens",
        "heads",
        "values",
        "pairs",
        "offset_bias",
    )
    periodic: ClassVar[bool] = True
    has_causal_form: ClassVar[bool] = True
    has_cross_form: ClassVar[bool] = True
    has_grouped_form: ClassVar[bool] = True
    scannable: ClassVar[bool] = True

    @nn.nowrap
    def check(self) -> None:
        """Raises ValueError if the attributes are invalid."""
        super().check()
        if self.window < 0 or self.window and not self.causal:
            raise ValueError(
                "attention 'softmax' takes a window of at least 1 token, or 0 for all, "
                f"in causal attention, as of a GPT, got window={self.window} and "
                f"causal={self.causal}"
            )

    @nn.nowrap
    def takes_segments(self, position: Any) -> bool:
        """Returns True: a mask separates sequences."""
        del position
        return True

    @grouped
    def attend(
        self,
        q: Float[Array, "*batch heads n head_dim"],
        k: Float[Array, "*batch kv_heads m head_dim"],
        v: Float[Array, "*batch kv_heads m value_dim"],
        context: Context,
    ) -> Float[Array, "*batch heads n value_dim"]:
        """Computes softmax attention."""
        tables = self.tables(context)
        options: dict[str, Any] = {
            "key_mask": context.key_mask,
            "segment_ids": context.segment_ids,
            **tables,
        }
        if self.causal:
            window = self.window or None
            return relative.causal_relative_attention(q, k, v, window=window, **options)
        if not tables:
            return softmax.softmax_attention(q, k, v, **options)
        grid = context.grid_for("the position's tables have a row for each offset")
        return relative.relative_attention(
            q, k, v, grid=grid, num_prefix=context.num_prefix, **options
        )

    @grouped
    def attend_step(
        self,
        q_i: Float[Array, "*batch heads head_dim"],
        k: Float[Array, "*batch kv_heads length head_dim"],
        v: Float[Array, "*batch kv_heads length value_dim"],
        context: Context,
    ) -> Float[Array, "*batch heads value_dim"]:
        """Computes softmax attention of one token to the tokens up to it."""
        assert context.index is not None
        options: dict[str, Any] = self.tables(context)
        # Without tables, the cache holds the window.
        if options and self.window:
            options["window"] = self.window
        return relative.causal_relative_attention_step(
            q_i, k, v, index=context.index, **options
        )

    def cache_length(self, context: Context) -> int:
        """Returns the window; tables have a row for each offset of all tokens."""
        length = super().cache_length(context)
        if not self.window or self.tables(context):
            return length
        return min(length, self.window)

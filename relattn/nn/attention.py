"""Multi-head attention modules: they own the projections, the kernels do the rest.

All are called as ``attention(x, grid=, num_prefix=, position=, key_mask=)``, where
``position`` is what a position encoding returned for the layer. `MultiHeadAttention`
has the one ``__call__``; a subclass fills in one of its hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from relattn import offsets
from relattn.kernels import relative, softmax
from relattn.nn.blocks import Linear


class Context(NamedTuple):
    """What an attention knows of its tokens beside their content.

    Attributes:
        grid: Height and width, or length, of the tokens after the prefix. In decoding,
            the length that there is room for.
        num_prefix: Number of prefix tokens.
        position: What the position encoding returned for the layer, or None.
        key_mask: True for tokens that may be attended to, ``[batch 1 n]``, or None.
        index: In decoding, the place of the one token in its sequence; else None.
        shared: What the layers of a model share, of `MultiHeadAttention.make_shared`.
    """

    grid: offsets.Grid | None
    num_prefix: int
    position: Any
    key_mask: Bool[Array, "batch 1 n"] | None
    index: Int[Array, ""] | int | None
    shared: Any


class MultiHeadAttention(nn.Module):
    """What every attention has: its size, its projections, its call.

    A subclass defines `attend`, from queries, keys and values to the heads' outputs,
    or, where it has no such things, `mix`, from tokens to the heads' outputs. To
    decode token by token it defines `attend_step`, or looks at ``context.index`` in
    `mix`. Its class attributes say what else it can. `relattn.register_attention` gives
    it a name.

    Attributes:
        dim: Width of the tokens.
        num_heads: Number of heads; divides ``dim``.
        layer: Index of the layer in the model.
        qkv_bias: Whether queries, keys and values have a bias.
        causal: Whether a token attends to itself and those before it only.
        dtype: Compute dtype; parameters are float32.
    """

    dim: int
    num_heads: int
    layer: int = 0
    qkv_bias: bool = True
    causal: bool = False
    dtype: Any = jnp.float32
    sites: ClassVar[tuple[str, ...]] = ("none", "tokens")
    # Whether `attend` or `mix` hides the future where ``self.causal``.
    has_causal_form: ClassVar[bool] = False
    # Whether nothing but parameters and position tells one layer from another, so that
    # equal layers may be compiled once.
    scannable: ClassVar[bool] = False
    # Whether parameters belong to one grid, and have no meaning on another.
    has_grid_tables: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check()

    @nn.nowrap
    def check(self) -> None:
        """Raises ValueError if the attributes are invalid; called on every instance."""
        if self.num_heads < 1 or self.dim % self.num_heads:
            raise ValueError(
                "config.model.num_heads must divide config.model.dim, got "
                f"dim={self.dim} and num_heads={self.num_heads}"
            )

    @nn.nowrap
    def make_shared(self) -> Callable[..., nn.Module] | None:
        """Returns the constructor of the module that layers share, or None.

        `relattn.nn.blocks.transformer_blocks` builds the module once in the model,
        calls it with the number of tokens and the grid, and passes the result to the
        layers.
        """
        return None

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.dim // self.num_heads

    @property
    def key_heads(self) -> int:
        """Number of heads that have keys."""
        return self.num_heads

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch n dim"],
        *,
        grid: offsets.Grid | None = None,
        num_prefix: int = 0,
        position: Any = None,
        key_mask: Bool[Array, "batch n"] | None = None,
        index: Int[Array, ""] | int | None = None,
        shared: Any = None,
    ) -> Float[Array, "batch n dim"]:
        """Attends.

        Args:
            x: Tokens, shape ``[batch, n, dim]``.
            grid: Height and width, or length, of the tokens after the prefix.
            num_prefix: Number of prefix tokens.
            position: What a position encoding returned for this layer.
            key_mask: False for tokens that nobody may attend to, ``[batch, n]``.
            index: In decoding, where ``x`` is one token, its place in the sequence; the
                mutable collection ``cache`` holds what came before, and ``grid`` is
                the length ``(length,)`` that there is room for.
            shared: What the module of `make_shared` returned.

        Returns:
            Shape ``[batch, n, dim]``.

        Raises:
            ValueError: If a causal attention is given prefix tokens, or decoding is
                asked of one that is not causal, or with a ``key_mask``.
        """
        if self.causal and num_prefix:
            raise ValueError(
                "causal attention takes no prefix tokens, which everyone would see: "
                f"expected num_prefix=0, got {num_prefix}"
            )
        if index is not None and (not self.causal or key_mask is not None):
            raise ValueError(
                "decoding needs causal=True and no key_mask, got "
                f"causal={self.causal} and "
                f"{'no key_mask' if key_mask is None else 'a key_mask'}"
            )
        key_mask = None if key_mask is None else key_mask[:, None]
        if position is not None and index is not None:
            position = position.slice(index, 1)
        context = Context(grid, num_prefix, position, key_mask, index, shared)
        return self.merge(self.mix(x, context))

    def mix(
        self, x: Float[Array, "batch n dim"], context: Context
    ) -> Float[Array, "batch heads n head_dim"]:
        """The heads' outputs: projects, applies the position, and attends."""
        q = self.project(x, self.num_heads, "q")
        k = self.project(x, self.key_heads, "k") if self.key_heads else None
        v = self.project(x, self.num_heads, "v")
        q, k = self.with_position(q, k, x, context)
        if context.index is None:
            return self.attend(q, k, v, context)
        q_i, k_i, v_i = (None if x is None else x[..., 0, :] for x in (q, k, v))
        return self.attend_step(q_i, k_i, v_i, context)[..., None, :]

    def attend(
        self,
        q: Float[Array, "batch heads n head_dim"],
        k: Float[Array, "batch key_heads n head_dim"] | None,
        v: Float[Array, "batch heads n value_dim"],
        context: Context,
    ) -> Float[Array, "batch heads n value_dim"]:
        """The heads' outputs: the kernel."""
        raise NotImplementedError(f"{type(self).__name__} defines no attend")

    def attend_step(
        self,
        q_i: Float[Array, "batch heads head_dim"],
        k_i: Float[Array, "batch key_heads head_dim"] | None,
        v_i: Float[Array, "batch heads value_dim"],
        context: Context,
    ) -> Float[Array, "batch heads value_dim"]:
        """The heads' outputs for the token at ``context.index``, in decoding."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot decode: it defines no attend_step"
        )

    def project(
        self, x: Float[Array, "batch n dim"], num_heads: int, name: str
    ) -> Float[Array, "batch {num_heads} n head_dim"]:
        """A linear projection to ``num_heads`` heads; for use in the hooks."""
        width = num_heads * self.head_dim
        out = Linear(width, use_bias=self.qkv_bias, dtype=self.dtype, name=name)(x)
        return out.reshape(*out.shape[:-1], num_heads, self.head_dim).swapaxes(-2, -3)

    def with_position(
        self, q: Array, k: Array | None, x: Array, context: Context
    ) -> tuple[Array, Array | None]:
        """Queries and keys with the position of the site ``heads``, if there is one."""
        if context.position is None:
            return q, k
        return context.position(q, k, x)

    def merge(
        self, out: Float[Array, "batch heads n head_dim"]
    ) -> Float[Array, "batch n dim"]:
        """Concatenates the heads and projects them."""
        out = out.swapaxes(-2, -3)
        out = out.reshape(*out.shape[:-2], self.dim)
        return Linear(self.dim, dtype=self.dtype, name="out")(out)

    def update_cache(
        self, name: str, row: Float[Array, "*batch width"], context: Context
    ) -> Float[Array, "*batch length width"]:
        """Writes a token's row into the cache ``name``, and returns the whole cache.

        Args:
            name: Name of the variable of the collection ``cache``.
            row: What is to be kept of the token at ``context.index``.
            context: As in `mix`.

        Returns:
            The rows of all tokens so far; zeros after them.
        """
        shape = (*row.shape[:-1], *context.grid, row.shape[-1])
        cache = self.variable("cache", name, jnp.zeros, shape, row.dtype)
        if not self.is_initializing():
            cache.value = jax.lax.dynamic_update_index_in_dim(
                cache.value, row, context.index, axis=-2
            )
        return cache.value

    def tables(self, context: Context) -> dict[str, Array]:
        """The tables of offsets that the position has, vectors in the compute dtype."""
        tables = {} if context.position is None else context.position.tables
        # Kernels add a bias in float32: rounding it would change exp(b) by percents.
        return {
            name: table if name == "bias" else table.astype(self.dtype)
            for name, table in tables.items()
        }


class SoftmaxAttention(MultiHeadAttention):
    """Exact attention: softmax(q.k / sqrt(head_dim)).

    Example:
        >>> x = jnp.ones((1, 7, 8))
        >>> module = SoftmaxAttention(dim=8, num_heads=2)
        >>> out, _ = module.init_with_output(jax.random.key(0), x)
        >>> out.shape
        (1, 7, 8)

    Source:
        Vaswani et al., Attention Is All You Need, section 3.2.
    """

    sites: ClassVar[tuple[str, ...]] = (
        "none",
        "tokens",
        "heads",
        "pairs",
        "offset_bias",
    )
    has_causal_form: ClassVar[bool] = True
    scannable: ClassVar[bool] = True

    def attend(
        self,
        q: Float[Array, "batch heads n head_dim"],
        k: Float[Array, "batch heads n head_dim"],
        v: Float[Array, "batch heads n value_dim"],
        context: Context,
    ) -> Float[Array, "batch heads n value_dim"]:
        """Softmax attention."""
        tables = self.tables(context)
        options = {"key_mask": context.key_mask, **tables}
        if self.causal:
            return relative.causal_relative_attention(q, k, v, **options)
        if not tables:
            return softmax.softmax_attention(q, k, v, **options)
        return relative.relative_attention(
            q, k, v, grid=context.grid, num_prefix=context.num_prefix, **options
        )

    def attend_step(
        self,
        q_i: Float[Array, "batch heads head_dim"],
        k_i: Float[Array, "batch heads head_dim"],
        v_i: Float[Array, "batch heads value_dim"],
        context: Context,
    ) -> Float[Array, "batch heads value_dim"]:
        """Softmax attention of one token to those so far."""
        return relative.causal_relative_attention_step(
            q_i,
            self.update_cache("keys", k_i, context),
            self.update_cache("values", v_i, context),
            index=context.index,
            **self.tables(context),
        )

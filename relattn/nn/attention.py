"""The base class of attention modules.

`MultiHeadAttention` has the linear projections, the ``__call__`` of all attentions, and
the cache for decoding. Subclasses define its hooks, most by one call of a kernel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from relattn import offsets
from relattn.kernels.masks import finite_masked, finite_tokens
from relattn.messages import shorten
from relattn.nn.blocks import Linear, default_head_dim

# The collection of `MultiHeadAttention.sow_weights`.
ATTENTION_WEIGHTS = "attention_weights"

Hook = TypeVar("Hook", bound=Callable[..., Any])


class Context(NamedTuple):
    """The arguments of an attention's call, other than the tokens.

    Attributes:
        grid: Size of each axis of the tokens after the prefix. In decoding,
            the length of the cache.
        num_prefix: Number of prefix tokens.
        position: The layer's `relattn.nn.positions.base.LayerPosition`, or None.
        key_mask: True for tokens that exist, ``[batch, 1, m]``, or None.
        index: In decoding, the position of the last token; otherwise None.
        shared: The output of the module that `MultiHeadAttention.make_shared` makes.
        memory: Tokens that give the keys and values, ``[batch, m, memory_dim]``; None
            for the attention's own tokens.
        segment_ids: For packed sequences: a token attends only to tokens of its
            segment, a run of equal ids, ``[batch, 1, n]``; None for one sequence.
    """

    grid: offsets.Grid | None
    num_prefix: int
    position: Any
    key_mask: Bool[Array, "batch 1 m"] | None
    index: Int[Array, ""] | int | None
    shared: Any
    memory: Float[Array, "batch m memory_dim"] | None = None
    segment_ids: Int[Array, "batch 1 n"] | None = None

    def grid_for(self, need: str) -> offsets.Grid:
        """Returns the grid; raises ValueError with the ``need`` if there is none."""
        if self.grid is None:
            raise ValueError(
                f"{need}: pass grid=, or choose another attention for points, such as "
                "'softmax'"
            )
        return self.grid


def split_heads(x: Array, axis: int, num_kv_heads: int) -> Array:
    """Splits an axis of heads, or of size 1, into key heads and their queries.

    Args:
        x: An array.
        axis: The axis of the heads.
        num_kv_heads: Number of heads with keys.

    Returns:
        The array with the axes ``num_kv_heads, group``, or 1, 1, in place of the axis.

    Example:
        >>> split_heads(jnp.ones((3, 6, 5)), 1, 2).shape
        (3, 2, 3, 5)
    """
    if x.shape[axis] == 1:
        return jnp.expand_dims(x, axis)
    group = x.shape[axis] // num_kv_heads
    return x.reshape(*x.shape[:axis], num_kv_heads, group, *x.shape[axis + 1 :])


def grouped(hook: Hook) -> Hook:
    """Lets heads share keys and values in a hook with the arguments q, k, v, context.

    If there are fewer keys than queries, the hook is called with queries
    ``[batch, kv_heads, group, ...]`` and with keys, values and masks that have an axis
    of size 1 in the place of ``group``. Its output gets the axis of the heads again.

    Args:
        hook: A method of an attention, such as `MultiHeadAttention.attend`.

    Returns:
        The method, for any number of heads with keys.

    Example:
        >>> @grouped
        ... def attend(self, q, k, v, context):
        ...     return q + k + v
        >>> q, k = jnp.ones((3, 6, 5, 4)), jnp.ones((3, 2, 5, 4))
        >>> attend(None, q, k, k, Context(None, 0, None, None, None, None)).shape
        (3, 6, 5, 4)

    Source:
        Ainslie et al., GQA: Training Generalized Multi-Query Transformer Models from
        Multi-Head Checkpoints, section 2.2.
    """

    @functools.wraps(hook)
    def call(self: Any, q: Array, k: Array, v: Array, context: Context) -> Array:
        # Of the query of one token too, which has no axis of tokens.
        axis = k.ndim - 3
        num_heads, kv_heads = q.shape[axis], k.shape[axis]
        if num_heads == kv_heads:
            return hook(self, q, k, v, context)
        masks = (context.key_mask, context.segment_ids)
        key_mask, segment_ids = (x if x is None else x[..., None, :] for x in masks)
        context = context._replace(key_mask=key_mask, segment_ids=segment_ids)
        groups = split_heads(q, axis, kv_heads)
        k, v = (jnp.expand_dims(x, axis + 1) for x in (k, v))
        out = hook(self, groups, k, v, context)
        return out.reshape(*out.shape[:axis], num_heads, *out.shape[axis + 2 :])

    return cast(Hook, call)


class MultiHeadAttention(nn.Module):
    """Base class of attentions: sizes, projections, call and cache.

    A subclass defines `attend`, from queries, keys and values to the heads' outputs,
    or `mix`, from tokens to the heads' outputs. For decoding it also defines
    `attend_step`, or overrides `decode`, or handles ``context.index`` in `mix`. Its
    class attributes declare what it supports. `relattn.register_attention` registers it
    under a name.

    Attributes:
        dim: Width of the tokens.
        num_heads: Number of heads.
        head_dim: Width of a head; 0 for dim / num_heads.
        layer: Index of the layer in the model.
        qkv_bias: Whether queries, keys and values have a bias.
        causal: Whether a token attends only to itself and earlier tokens.
        dtype: Compute dtype; parameters are float32.
        out_bias: Whether the output projection has a bias.
        num_kv_heads: Number of heads with keys and values, which consecutive heads of
            queries share; divides ``num_heads``; 0 for ``num_heads``.
    """

    dim: int
    num_heads: int
    head_dim: int = 0
    layer: int = 0
    qkv_bias: bool = True
    causal: bool = False
    dtype: Any = jnp.float32
    out_bias: bool = True
    num_kv_heads: int = 0
    # Sites of position encodings that the attention supports.
    sites: ClassVar[tuple[str, ...]] = ("none", "tokens")
    # Whether `attend` or `mix` is causal if ``self.causal``.
    has_causal_form: ClassVar[bool] = False
    # Whether `attend` takes keys and values of another sequence.
    has_cross_form: ClassVar[bool] = False
    # Whether hooks take keys and values of fewer heads than queries, see `grouped`.
    has_grouped_form: ClassVar[bool] = False
    # Whether layers differ only in parameters and position, so that equal layers can be
    # scanned.
    scannable: ClassVar[bool] = False
    # Whether rolled tokens of a torus give rolled outputs.
    periodic: ClassVar[bool] = False
    # Whether parameters fit one grid only and cannot be resized.
    has_grid_tables: ClassVar[bool] = False
    # Whether outputs depend, whatever the positions, on the order of the tokens or on
    # the number of masked tokens.
    needs_order: ClassVar[bool] = False
    # Parameters that a mesh may split over devices, and their axes, counted from the
    # last; the first axis that divides evenly is split.
    split_axes: ClassVar[Mapping[str, tuple[int, ...]]] = {}

    @classmethod
    def expensive_to_compile(cls) -> bool:
        """Returns whether a layer takes seconds to compile for the platform."""
        return False

    def __post_init__(self) -> None:
        self.head_dim = self.head_dim or default_head_dim(self.dim, self.num_heads)
        self.num_kv_heads = self.num_kv_heads or self.num_heads
        super().__post_init__()
        self.check()

    @nn.nowrap
    def check(self) -> None:
        """Raises ValueError if the attributes are invalid; called on every instance."""
        if self.num_heads < 1 or self.head_dim < 1:
            raise ValueError(
                "num_heads must divide dim unless head_dim is given, got "
                f"dim={self.dim} and num_heads={self.num_heads}"
            )
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                "num_kv_heads must divide num_heads, or be 0 for num_heads, got "
                f"num_kv_heads={self.num_kv_heads} and num_heads={self.num_heads}"
            )
        if self.num_kv_heads < self.num_heads and not self.has_grouped_form:
            raise ValueError(
                f"heads of {type(self).__name__} cannot share keys and values, got "
                f"num_kv_heads={self.num_kv_heads}: choose num_kv_heads=0, or "
                "attention 'softmax', 'favor', 'relu' or 'hedgehog'"
            )

    @nn.nowrap
    def takes_segments(self, position: Any) -> bool:
        """Returns whether `attend` supports ``segment_ids`` with this position."""
        del position
        return False

    @nn.nowrap
    def make_shared(self) -> Callable[..., nn.Module] | None:
        """Returns the constructor of the module that layers share, or None.

        `relattn.nn.blocks.transformer_blocks` builds the module once in the model,
        calls it with the number of tokens and the grid, and passes the result to the
        layers.
        """
        return None

    @property
    def key_heads(self) -> int:
        """Number of heads with keys."""
        return self.num_kv_heads

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch n dim"],
        *,
        grid: offsets.Grid | None = None,
        num_prefix: int = 0,
        position: Any = None,
        key_mask: Bool[Array, "batch m"] | None = None,
        segment_ids: Int[Array, "batch n"] | None = None,
        memory: Float[Array, "batch m memory_dim"] | None = None,
        index: Int[Array, ""] | int | None = None,
        shared: Any = None,
    ) -> Float[Array, "batch n dim"]:
        """Applies the attention.

        Args:
            x: Tokens, shape ``[batch, n, dim]``.
            grid: Size of each axis of the tokens after the prefix; of causal attention
                the length of the longest sequence, ``(length,)``.
            num_prefix: Number of prefix tokens.
            position: The layer's `relattn.nn.positions.base.LayerPosition`, or None.
            key_mask: True for tokens that exist, shape ``[batch, n]``, or ``[batch,
                m]`` with ``memory``. NaN and inf in other tokens count as zero.
            segment_ids: For packed sequences: a token attends only to tokens of its
                segment, a run of equal ids, shape ``[batch, n]``. An id that comes back
                after another one starts a new segment.
            memory: Tokens that give the keys and values (cross-attention), shape
                ``[batch, m, memory_dim]``; ``x`` by default.
            index: In decoding, the position of the last token. ``x`` is that token
                alone, which attends to the mutable collection ``cache``; or it is the
                whole sequence from position 0 (prefill), which fills the cache, and
                tokens after ``index`` are padding. ``grid`` is the length of the cache.
                Outputs are NaN if it is traced and out of range.
            shared: The output of the module that `make_shared` makes.

        Returns:
            Shape ``[batch, n, dim]``.

        Raises:
            ValueError: If the grid is not a tuple of sizes or does not hold the tokens,
                causal attention has prefix tokens, decoding is not causal or has a mask
                or an ``index`` out of range, or the attention cannot support
                ``memory``, ``segment_ids`` or a torus.
        """
        masks = {"key_mask": key_mask, "segment_ids": segment_ids}
        self._check_call(x, grid, num_prefix, position, masks, memory, index)
        if memory is None:
            x = finite_tokens(x, key_mask)
        else:
            memory = finite_tokens(memory, key_mask)
        if index is not None and x.shape[-2] > 1:
            x = finite_masked(x, (jnp.arange(x.shape[-2]) <= index)[None])
        # An axis for the heads, also of a mask without a batch.
        key_mask, segment_ids = (
            None if mask is None else jnp.atleast_2d(jnp.asarray(mask))[..., None, :]
            for mask in (key_mask, segment_ids)
        )
        if position is not None and self.causal:
            one = index is not None and x.shape[-2] == 1
            position = position.slice(index if one else 0, x.shape[-2])
        context = Context(
            grid, num_prefix, position, key_mask, index, shared, memory, segment_ids
        )
        out = self.mix(x, context)
        expected = (self.num_heads, x.shape[-2], self.head_dim)
        shape = getattr(out, "shape", ())
        if shape[-3:] != expected:
            found = f"shape {shape}" if shape else shorten(out)
            raise ValueError(
                f"the heads of {type(self).__name__} returned {found}, expected [batch"
                f", {', '.join(map(str, expected))}]: heads, tokens and head_dim, as q"
            )
        return _nan_outside(self.merge(out), index, grid)

    def _check_call(
        self,
        x: Array,
        grid: offsets.Grid | None,
        num_prefix: int,
        position: Any,
        masks: Mapping[str, Array | None],
        memory: Array | None,
        index: Array | int | None,
    ) -> None:
        """Raises ValueError if the arguments of a call do not fit together."""
        if self.causal and num_prefix:
            raise ValueError(
                "causal attention takes no prefix tokens, which all tokens would see: "
                f"expected num_prefix=0, got {num_prefix}"
            )
        given = [name for name, mask in masks.items() if mask is not None]
        if index is not None and (not self.causal or given):
            raise ValueError(
                "decoding needs causal=True and no key_mask or segment_ids, got "
                f"causal={self.causal} and {' and '.join(given) or 'neither'}"
            )
        if grid is not None:
            self._check_grid(x.shape[-2], grid, num_prefix)
        if index is not None:
            check_index(index, x.shape[-2], grid)
        if isinstance(grid, offsets.Torus) and (self.causal or not self.periodic):
            raise ValueError(
                f"attention {type(self).__name__} with these options cannot be "
                "periodic: choose another, such as 'softmax' or 'favor', or "
                "periodic=False"
            )
        if isinstance(position, list | tuple):
            raise ValueError(
                "position has the encodings of all layers: pass the entry of this "
                "layer in the list that Position.per_layer returns"
            )
        if memory is not None and (
            self.causal or not self.has_cross_form or position is not None
        ):
            raise ValueError(
                f"{type(self).__name__} takes no memory: cross-attention needs a "
                "non-causal attention such as 'softmax', 'favor' or 'relu', without a "
                "position in the layer"
            )
        if memory is not None and memory.ndim != x.ndim:
            raise ValueError(
                "memory must have the batch axes of x, of size 1 where examples share "
                f"it, got shapes {memory.shape} and {x.shape}"
            )
        if masks["segment_ids"] is not None and not self.takes_segments(position):
            raise ValueError(
                f"{type(self).__name__} cannot separate packed sequences here: leave "
                "out segment_ids, or use attention 'softmax', or a causal linear "
                "attention without an offset bias"
            )

    def _check_grid(self, num_tokens: Any, grid: offsets.Grid, num_prefix: int) -> None:
        """Raises ValueError if the tokens, if their number is known, do not fit."""
        offsets.check_axes(grid)
        if not isinstance(num_tokens, int):
            return
        if not self.causal:
            offsets.check_grid(num_tokens, grid, num_prefix)
        elif num_tokens > math.prod(grid):
            raise ValueError(
                f"the sequence of {num_tokens} tokens is longer than grid={grid}, the "
                "length for which the attention and its position are made"
            )

    def mix(
        self, x: Float[Array, "batch n dim"], context: Context
    ) -> Float[Array, "batch heads n head_dim"]:
        """Projects, applies the position, and computes the heads' outputs."""
        source = x if context.memory is None else context.memory
        q = self.project(x, self.num_heads, "q")
        k = self.project(source, self.key_heads, "k") if self.key_heads else None
        v = self.project(source, self.num_kv_heads, "v")
        q, k = self.with_position(q, k, x, context)
        v = self.widen_values(v, x, context)
        attend = self.attend if context.index is None else self.decode
        return self.combine_values(attend(q, k, v, context), context)

    def attend(
        self,
        q: Float[Array, "batch heads n head_dim"],
        k: Float[Array, "batch key_heads m head_dim"] | None,
        v: Float[Array, "batch kv_heads m value_dim"],
        context: Context,
    ) -> Float[Array, "batch heads n value_dim"]:
        """Computes the heads' outputs; calls the kernel.

        Args:
            q: Queries, without the factor 1 / sqrt(head_dim).
            k: Keys; None for an attention without keys.
            v: Values, possibly widened by a position of the site ``values``.
            context: Mask, grid, position and other inputs of the call, see `Context`.

        Returns:
            Shape ``[batch, heads, n, value_dim]``; `merge` projects it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define attend")

    def decode(
        self,
        q: Float[Array, "batch heads n head_dim"],
        k: Float[Array, "batch kv_heads n head_dim"] | None,
        v: Float[Array, "batch kv_heads n value_dim"],
        context: Context,
    ) -> Float[Array, "batch heads n value_dim"]:
        """Computes the heads' outputs in decoding; caches keys and values."""
        assert k is not None  # Attentions without keys override this.
        keys = self.update_cache("keys", k, context)
        values = self.update_cache("values", v, context)
        if q.shape[-2] > 1:
            return self.attend(q, k, v, context)
        return self.attend_step(q[..., 0, :], keys, values, context)[..., None, :]

    def attend_step(
        self,
        q_i: Float[Array, "batch heads head_dim"],
        k: Float[Array, "batch kv_heads length head_dim"],
        v: Float[Array, "batch kv_heads length value_dim"],
        context: Context,
    ) -> Float[Array, "batch heads value_dim"]:
        """Computes the heads' outputs for the token at ``context.index``.

        Args:
            q_i: The token's query.
            k: Cached keys of all positions; ignore those after ``context.index``.
            v: Cached values of all positions; ignore those after ``context.index``.
            context: Grid, position and other inputs of the call, see `Context`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} cannot decode: it does not define attend_step"
        )

    def project(
        self, x: Float[Array, "batch n dim"], num_heads: int, name: str
    ) -> Float[Array, "batch {num_heads} n head_dim"]:
        """Projects tokens to ``num_heads`` heads; for the hooks."""
        width = num_heads * self.head_dim
        out = Linear(width, use_bias=self.qkv_bias, dtype=self.dtype, name=name)(x)
        return out.reshape(*out.shape[:-1], num_heads, self.head_dim).swapaxes(-2, -3)

    def with_position(
        self, q: Array, k: Array | None, x: Array, context: Context
    ) -> tuple[Array, Array | None]:
        """Applies the position of the site ``heads``, if any, to queries and keys."""
        if context.position is None:
            return q, k
        return context.position(q, k, x)

    def widen_values(self, v: Array, x: Array, context: Context) -> Array:
        """Applies the position of the site ``values``, if any, to values."""
        return v if context.position is None else context.position.widen_values(v, x)

    def combine_values(self, out: Array, context: Context) -> Array:
        """Applies the position of the site ``values``, if any, to the outputs."""
        position = context.position
        return out if position is None else position.combine_values(out)

    def merge(
        self, out: Float[Array, "batch heads n head_dim"]
    ) -> Float[Array, "batch n dim"]:
        """Concatenates the heads and applies the output projection."""
        out = out.swapaxes(-2, -3)
        out = out.reshape(*out.shape[:-2], math.prod(out.shape[-2:]))
        use_bias = self.out_bias
        return Linear(self.dim, use_bias=use_bias, dtype=self.dtype, name="out")(out)

    @nn.nowrap
    def sow_weights(self, weights: Float[Array, "batch heads n m"]) -> None:
        """Sows attention weights for `relattn.models.attention_weights`."""
        # A layer may be traced twice: the last weights replace those before.
        weights = weights.astype(jnp.float32)
        self.sow(
            ATTENTION_WEIGHTS,
            "weights",
            weights,
            reduce_fn=lambda _, new: new,
            init_fn=lambda: weights,
        )

    def update_cache(
        self, name: str, rows: Float[Array, "*batch n width"], context: Context
    ) -> Float[Array, "*batch length width"]:
        """Writes the tokens' rows into the cache ``name``, and returns the whole cache.

        The row of token i is row i of the cache, modulo the length of the cache.

        Args:
            name: Name of the variable in the collection ``cache``.
            rows: One row for the token at ``context.index``, or, in prefill, a row for
                every token from position 0 on.
            context: Grid, position and other inputs of the call, see `Context`.

        Returns:
            The cache; its rows after row ``context.index`` are meaningless.

        Raises:
            ValueError: If the cache is of another batch.
        """
        *batch, num_rows, width = rows.shape
        length, index = self.cache_length(context), context.index
        shape = (*batch, length, width)
        cache = self.variable("cache", name, jnp.zeros, shape, rows.dtype)
        if cache.value.shape != shape:
            raise ValueError(
                f"the cache has {name} of shape {cache.value.shape}, but these tokens "
                f"need {shape}: pass the cache of the same batch, or none with a prompt"
            )
        if not self.is_initializing():
            start = 0 if index is None or num_rows > 1 else index % length
            if index is not None and length < num_rows <= math.prod(context.grid or ()):
                # The last token of each row.
                tokens = index - (index - jnp.arange(length)) % length
                rows = jnp.take(rows, tokens, axis=-2, mode="clip")
            cache.value = jax.lax.dynamic_update_slice_in_dim(
                cache.value, rows, start, axis=-2
            )
        return cache.value

    def cache_length(self, context: Context) -> int:
        """Returns the number of tokens whose rows are cached; all by default."""
        return math.prod(context.grid_for("decoding needs the length of the cache"))

    def tables(self, context: Context) -> dict[str, Any]:
        """Returns the position's tables by name; vectors have the compute dtype.

        If heads share keys, the axis of heads is split as in `grouped`.
        """
        tables = {} if context.position is None else context.position.tables
        if self.num_kv_heads < self.num_heads:
            # Only tables with an axis of heads are split.
            tables = {
                name: split_heads(table, 0, self.num_kv_heads)
                if table.ndim > (1 if name == "bias" else 2)
                else table
                for name, table in tables.items()
            }
        # Kernels add the bias in float32: rounding it would change exp(b) by percents.
        return {
            name: table if name == "bias" else table.astype(self.dtype)
            for name, table in tables.items()
        }


def check_index(index: Any, num_tokens: Any, grid: offsets.Grid | None) -> None:
    """Checks a position in decoding, and, if it is known, its value.

    Past the cache's end the update would overwrite the last row.

    Args:
        index: The position of the last token.
        num_tokens: Number of tokens in the call.
        grid: Length of the cache, or None.

    Raises:
        ValueError: If the position is not one whole number, or is out of range.

    Example:
        >>> check_index(6, 1, (7,))
    """
    if np.ndim(index):
        raise ValueError(
            "index must be one position for all examples, got shape "
            f"{np.shape(index)}: for a position for each, use jax.vmap over examples"
        )
    if not jnp.issubdtype(jnp.result_type(index), jnp.integer):
        raise ValueError(f"index must be a whole number, got {shorten(index)}")
    if isinstance(index, Tracer):
        return
    length = _num_positions(num_tokens, grid)
    if not 0 <= int(index) < length:
        raise ValueError(
            f"index={index} must be the position of the last token, 0 .. {length - 1}: "
            "pass the whole sequence from position 0, or one token at a position of "
            "the cache"
        )


def _num_positions(num_tokens: Any, grid: offsets.Grid | None) -> Any:
    """Returns how many positions a call in decoding may have."""
    return math.prod(grid) if num_tokens == 1 and grid is not None else num_tokens


def _nan_outside(out: Array, index: Any, grid: offsets.Grid | None) -> Array:
    """Sets outputs to NaN if a traced position is out of range, see `check_index`.

    Otherwise a later part of a text would count as its beginning.
    """
    if not isinstance(index, Tracer):
        return out
    inside = (index >= 0) & (index < _num_positions(out.shape[-2], grid))
    return jnp.where(inside, out, jnp.nan)

"""Attentions, position encodings and models as Flax NNX modules.

`MultiHeadAttention` and `Position` take the specs of `relattn.nn`; `ViT` and `GPT` take
the arguments of `relattn.ViT` and `relattn.GPT`, and `Model` any model of relattn. All
hold the variables of the Linen modules as NNX variables, and compute with the same
code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx, traverse_util
from jaxtyping import Array, Bool, Float, Int, Key

from relattn import kernels, models, offsets
from relattn.kernels.checks import at_most, check_position
from relattn.messages import shorten
from relattn.models.sampling import Prompts
from relattn.nn import registry
from relattn.nn.positions.base import LayerPosition


class RandomFeatures(nnx.Variable):
    """Holds a `relattn.kernels.RandomFeatures`, which `redraw` redraws; not trained."""


# The Linen collection whose variables have this type.
nnx.register_variable_name("random_features", RandomFeatures)


def redraw(
    module: nnx.Module, key: Key[Array, ""], index: int | Int[Array, ""]
) -> None:
    """Redraws all random features of a module, in place.

    W_layer = draw_random_features(key, layer, index); see `relattn.kernels.redraw`.

    Args:
        module: A module that contains a `MultiHeadAttention`.
        key: A PRNG key, the same for every redraw of a run.
        index: Number of redraws so far, ``step // redraw_every``; may be traced.

    Raises:
        ValueError: If ``index`` is negative or no whole number.

    Example:
        >>> attention = MultiHeadAttention(
        ...     "favor", dim=8, num_heads=2, rngs=nnx.Rngs(0))
        >>> x = jax.random.normal(jax.random.key(1), (1, 7, 8))
        >>> before = attention(x)
        >>> redraw(attention, jax.random.key(2), 1)
        >>> bool((attention(x) == before).all())
        False
    """
    nnx.update(module, kernels.redraw(nnx.state(module, RandomFeatures), key, index))


class _LinenModule(nnx.bridge.ToNNX):
    """A Linen module whose variables are NNX variables.

    As in Flax's layers, the mode is that of training until ``eval()`` is called.
    """

    def __init__(self, module: nn.Module, variables: Mapping[str, Any]):
        super().__init__(module)
        self.to_nnx__deterministic = False
        flat = {
            path[1:]: nnx.variable_type_from_name(path[0])(value)
            for path, value in traverse_util.flatten_dict(dict(variables)).items()
        }
        for name, value in traverse_util.unflatten_dict(flat).items():
            setattr(self, name, nnx.data(value))

    @property
    def linen(self) -> nn.Module:
        """The Linen module."""
        return self.to_nnx__module

    @property
    def deterministic(self) -> bool:
        """Whether the mode is that of evaluation; ``train()`` and ``eval()`` set it."""
        return self.to_nnx__deterministic

    @deterministic.setter
    def deterministic(self, value: bool) -> None:
        self.to_nnx__deterministic = value

    def set_view(self, deterministic: bool | None = None) -> None:
        """Sets the mode of a view, for `flax.nnx.view`.

        Args:
            deterministic: Whether the mode is that of evaluation; None keeps it.
        """
        if deterministic is not None:
            self.deterministic = deterministic

    def _apply(
        self,
        *args: Any,
        mutable: Sequence[str] = (),
        without: tuple[str, ...] = (),
        **kwargs: Any,
    ) -> Any:
        """Applies the Linen module; writes the variables of mutable collections.

        The method of the base class replaces these variables by others, which control
        flow of NNX such as `flax.nnx.cond` refuses.
        """
        ours = self._variables()
        given = {path: x.get_value() for path, x in ours.items()}
        given = {path: x for path, x in given.items() if path[0] not in without}
        out, updates = self.linen.apply(
            traverse_util.unflatten_dict(given), *args, mutable=list(mutable), **kwargs
        )
        for path, value in traverse_util.flatten_dict(updates).items():
            if path in ours:
                ours[path].set_value(value)
            else:
                self._add(path, value)
        return out

    def _add(self, path: tuple[str, ...], value: Any) -> None:
        """Adds a variable at the path of Linen."""
        collection, name, *_ = path
        added = {path[1:]: nnx.variable_type_from_name(collection)(value)}
        flat = traverse_util.flatten_dict({name: vars(self).get(name, {})}) | added
        setattr(self, name, nnx.data(traverse_util.unflatten_dict(flat)[name]))

    def _call(self, x: Any, *, index: Any, update_stats: bool, **kwargs: Any) -> Any:
        """Calls the module; writes the cache and, if told to, batch statistics."""
        mutable = ["batch_stats"] if update_stats else []
        if index is None:
            return self._apply(x, mutable=mutable, **kwargs)
        # Several tokens begin a sequence, possibly in a batch of another size.
        without = ("cache",) if x.shape[1] > 1 else ()
        mutable.append("cache")
        return self._apply(x, mutable=mutable, without=without, index=index, **kwargs)

    def to_linen(self) -> dict[str, Any]:
        """Returns the variables of the Linen module, by collection, without cache."""
        ours = self._without_cache()
        return traverse_util.unflatten_dict(
            {path: variable.get_value() for path, variable in ours.items()}
        )

    def update_from_linen(self, variables: Mapping[str, Any]) -> None:
        """Replaces the variables by those of a Linen module.

        Args:
            variables: Variables by collection, as `to_linen` returns them.

        Raises:
            ValueError: If they do not have the names and shapes of this module's.
        """
        flat, held = traverse_util.flatten_dict(dict(variables)), self._without_cache()
        ours = {path: variable.get_value() for path, variable in held.items()}
        for path in sorted({*ours, *flat}):
            old, new = (
                jax.tree.map(jnp.shape, tree[path]) if path in tree else "none"
                for tree in (ours, flat)
            )
            if old != new:
                name = "/".join(map(str, path))
                raise ValueError(
                    f"the variables do not fit the module: at {name} it has {old}, got "
                    f"{new}"
                )
        for path, variable in held.items():
            variable.set_value(flat[path])

    def _variables(self) -> dict[tuple[str, ...], nnx.Variable]:
        """Returns the Linen module's variables by their Linen paths.

        Attributes of users and of `flax.nnx.tabulate` are none of them.
        """
        held = {
            name: value
            for name, value in vars(self).items()
            if not name.startswith(("to_nnx__", "_pytree__"))
            and isinstance(value, dict | nnx.Variable)
        }
        return {
            (nnx.variable_name_from_type(type(variable)), *path): variable
            for path, variable in traverse_util.flatten_dict(held).items()
            if isinstance(variable, nnx.Variable)
        }

    def _without_cache(self) -> dict[tuple[str, ...], nnx.Variable]:
        ours = self._variables()
        return {path: x for path, x in ours.items() if not isinstance(x, nnx.Cache)}


def _draw(
    module: nn.Module, init: Callable[[nn.Module], Any], rngs: nnx.Rngs
) -> Mapping[str, Any]:
    """Draws the variables of a Linen module; ``init`` calls it."""
    names = ("params", "random_features")
    if not isinstance(rngs, nnx.Rngs) or not all(
        name in rngs or "default" in rngs for name in names
    ):
        raise ValueError(
            "rngs must be flax.nnx.Rngs with the streams params and random_features, "
            f"or a default one, such as nnx.Rngs(0), got {shorten(rngs)}"
        )
    keys = {name: rngs[name]() for name in names}
    return jax.jit(lambda keys: module.init(keys, method=init))(keys)


class MultiHeadAttention(_LinenModule):
    """Applies multi-head attention of any kind in `relattn.nn.ATTENTIONS`.

    Parameters are `flax.nnx.Param`, named as in Linen; random features are
    `RandomFeatures`.

    Args:
        attention: Spec of the attention, ``"favor(num_features=256)"``.
        dim: Width of the tokens.
        num_heads: Number of heads.
        num_kv_heads: Number of heads with keys and values, which divides ``num_heads``
            (grouped queries); 0 for ``num_heads``.
        head_dim: Width of a head; 0 for dim / num_heads.
        memory_dim: Width of the ``memory`` of cross-attention; None for none.
        layer: Index of the layer: layers need different ones to draw different
            random features.
        qkv_bias: Whether queries, keys and values have a bias.
        out_bias: Whether the output projection has a bias.
        causal: Whether a token attends only to itself and earlier tokens.
        grid: Size of each axis of the tokens after the prefix; None if the attention
            does not depend on it. In decoding, the length of the cache.
        num_prefix: Number of prefix tokens.
        dtype: Compute dtype; parameters are float32.
        rngs: Has the streams ``params`` and ``random_features``, or a default one.

    Raises:
        ValueError: If the spec is invalid or the attention has no causal form.

    Example:
        >>> attention = MultiHeadAttention(
        ...     "favor", dim=8, num_heads=2, memory_dim=5, rngs=nnx.Rngs(0))
        >>> memory = jnp.ones((1, 3, 5))
        >>> attention(jnp.ones((1, 7, 8)), memory=memory).shape
        (1, 7, 8)
        >>> attention.q["kernel"].shape, attention.k["kernel"].shape
        ((8, 8), (5, 8))
    """

    def __init__(
        self,
        attention: str = "softmax",
        *,
        dim: int,
        num_heads: int,
        num_kv_heads: int = 0,
        head_dim: int = 0,
        memory_dim: int | None = None,
        layer: int = 0,
        qkv_bias: bool = True,
        out_bias: bool = True,
        causal: bool = False,
        grid: offsets.Grid | None = None,
        num_prefix: int = 0,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        make, _ = registry.build(
            attention,
            "none",
            dim=dim,
            num_heads=num_heads,
            num_layers=1,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            causal=causal,
        )
        module = make(layer=layer, dtype=dtype, parent=None)
        n = num_prefix + math.prod(grid or (1,))

        def init(module: nn.Module) -> Array:
            memory = None if memory_dim is None else jnp.zeros((1, 1, memory_dim))
            x = jnp.zeros((1, n, dim))
            return module(x, grid=grid, num_prefix=num_prefix, memory=memory)

        super().__init__(module, _draw(module, init, rngs))
        self.to_nnx__grid = grid
        self.to_nnx__num_prefix = num_prefix

    def __call__(
        self,
        x: Float[Array, "batch n dim"],
        *,
        memory: Float[Array, "batch m memory_dim"] | None = None,
        position: LayerPosition | None = None,
        key_mask: Bool[Array, "batch m"] | None = None,
        segment_ids: Int[Array, "batch n"] | None = None,
        index: Int[Array, ""] | int | None = None,
        deterministic: bool | None = None,
    ) -> Float[Array, "batch n dim"]:
        """Applies the attention.

        Args:
            x: Tokens, shape ``[batch, n, dim]``.
            memory: Tokens that give the keys and values (cross-attention), shape
                ``[batch, m, memory_dim]``; ``x`` by default.
            position: The layer's position, from `Position.per_layer`.
            key_mask: True for tokens that exist, shape ``[batch, n]``, or ``[batch,
                m]`` with ``memory``.
            segment_ids: For packed sequences: a token attends only to tokens of its
                segment, a run of equal ids, shape ``[batch, n]``.
            index: In decoding, the position of the last token. ``x`` is that token
                alone, which attends to the variables of type `flax.nnx.Cache`; or it is
                the whole sequence from position 0 (prefill), which replaces them, and
                tokens after ``index`` are padding. ``nnx.pop(module, nnx.Cache)``
                removes them, for a first token alone in a batch of another size.
            deterministic: Whether `flax.nnx.BatchStat` variables, the centroids of
                routed attention, are kept; None for the module's mode.

        Returns:
            Shape ``[batch, n, dim]``.

        Raises:
            ValueError: If `relattn.MultiHeadAttention` raises it.
        """
        if deterministic is None:
            deterministic = self.deterministic
        return self._call(
            x,
            index=index,
            update_stats=not deterministic,
            memory=memory,
            position=position,
            key_mask=key_mask,
            segment_ids=segment_ids,
            grid=self.to_nnx__grid,
            num_prefix=self.to_nnx__num_prefix,
        )


class Position(_LinenModule):
    """Encodes positions for all layers, in any way in `relattn.nn.POSITIONS`.

    Args:
        position: Spec of the encoding, or a sum of specs, ``"learned + rope2d"``.
        attention: Spec of the attention that uses it.
        dim: Width of the tokens.
        num_heads: Number of heads.
        num_kv_heads: Number of heads with keys and values; 0 for ``num_heads``.
        head_dim: Width of a head; 0 for dim / num_heads.
        num_layers: Number of layers.
        causal: Whether a token attends only to itself and earlier tokens.
        grid: Size of each axis of the tokens after the prefix; for points ones, as
            ``(1, 1, 1)`` in space.
        num_prefix: Number of prefix tokens.
        rngs: Has the stream ``params``, or a default one.

    Raises:
        ValueError: If a spec is invalid or the attention does not support the encoding.

    Example:
        >>> position = Position(
        ...     "rope2d", "favor", dim=8, num_heads=2, num_layers=3, grid=(2, 3),
        ...     rngs=nnx.Rngs(0))
        >>> tokens = position.add_to_tokens(jnp.ones((1, 6, 8)))
        >>> tokens.shape, len(position.per_layer())
        ((1, 6, 8), 3)
    """

    def __init__(
        self,
        position: str,
        attention: str,
        *,
        dim: int,
        num_heads: int,
        num_kv_heads: int = 0,
        head_dim: int = 0,
        num_layers: int,
        causal: bool = False,
        grid: offsets.Grid,
        num_prefix: int = 0,
        rngs: nnx.Rngs,
    ):
        _, make = registry.build(
            attention,
            position,
            dim=dim,
            num_heads=num_heads,
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            causal=causal,
        )

        def init(module: nn.Module) -> None:
            module.add_to_tokens(jnp.zeros((1, math.prod(grid), dim)), grid)
            module.per_layer(grid, num_prefix)

        module = make(parent=None)
        super().__init__(module, _draw(module, init, rngs))
        self.to_nnx__grid = grid
        self.to_nnx__num_prefix = num_prefix
        self.to_nnx__num_layers = num_layers

    def add_to_tokens(
        self,
        tokens: Float[Array, "batch n dim"],
        start: Int[Array, ""] | int = 0,
    ) -> Float[Array, "batch n dim"]:
        """Adds the encoding to tokens, without prefix, if it acts there.

        Args:
            tokens: All tokens of the grid or, of text, some that follow each other.
            start: Position of the first token.

        Returns:
            Shape ``[batch, n, dim]``.

        Raises:
            ValueError: If the tokens do not fit the grid from this position on.
        """
        grid, (_, n, dim) = self.to_nnx__grid, tokens.shape
        whole = math.prod(grid)
        if len(grid) > 1 or not at_most(n, whole):
            offsets.check_grid(n, grid)
        check_position(start, whole - n + 1)
        if n == whole:
            return self._apply(tokens, grid, method="add_to_tokens")
        zeros = jnp.zeros((1, whole, dim), tokens.dtype)
        encoding = self._apply(zeros, grid, method="add_to_tokens")
        return tokens + jax.lax.dynamic_slice_in_dim(encoding, start, n, axis=1)

    def per_layer(
        self, points: Float[Array, "batch n axes"] | None = None
    ) -> list[LayerPosition | None]:
        """Returns what each layer passes to `MultiHeadAttention` as ``position``.

        Args:
            points: Any real positions of the tokens after the prefix, in place of those
                of the grid, for an encoding that takes them, such as
                ``"fourier_values"``; the attention then has no grid.
        """
        grid = self.to_nnx__grid if points is None else points
        layers = self._apply(grid, self.to_nnx__num_prefix, method="per_layer")
        return [None] * self.to_nnx__num_layers if layers is None else layers


# Attributes of models that are dropout rates.
_RATES = ("dropout", "attention_dropout", "drop_path")


class Model(_LinenModule):
    """A model of relattn with its variables, as an NNX module.

    Parameters are `flax.nnx.Param`, random features `RandomFeatures`, batch statistics
    `flax.nnx.BatchStat` and the decoding cache `flax.nnx.Cache`, all named as in Linen.

    Args:
        model: A Linen model of relattn, ``load_pretrained(folder).model``.
        variables: Its variables, by collection.
        rngs: Has the stream ``dropout``, or a default one; only models with dropout
            use it.

    Example:
        >>> import relattn
        >>> linen = relattn.ViT(3, dim=8, num_heads=2, num_layers=1, patch_size=2)
        >>> images = jnp.ones((1, 4, 6, 1))
        >>> variables = jax.jit(linen.init)(jax.random.key(0), images)
        >>> Model(linen, variables)(images).shape
        (1, 3)
    """

    def __init__(
        self,
        model: nn.Module,
        variables: Mapping[str, Any],
        *,
        rngs: nnx.Rngs | None = None,
    ):
        super().__init__(model, variables)
        draws = any(getattr(model, rate, 0) for rate in _RATES)
        self.to_nnx__draws = draws
        fork = rngs["dropout"].fork() if draws and rngs is not None else None
        self.to_nnx__dropout = nnx.data(fork)

    def __call__(
        self,
        inputs: Any,
        *,
        key_mask: Bool[Array, "batch m"] | None = None,
        segment_ids: Int[Array, "batch n"] | None = None,
        index: Int[Array, ""] | int | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch ..."]:
        """Computes the logits, as the Linen model does.

        Args:
            inputs: Images, shape ``[batch, height, width, channels]``, token ids, shape
                ``[batch, n]``, or sets of points, shape ``[batch, n, axes +
                channels]``.
            key_mask: True for the patches, tokens or points that exist, for models that
                take it.
            segment_ids: For packed sequences, see `relattn.GPT`.
            index: In decoding, the position of the last token. ``inputs`` are that
                token alone, which attends to the variables of type `flax.nnx.Cache`; or
                the whole sequence from position 0 (prefill), which replaces them.
                ``nnx.pop(model, nnx.Cache)`` removes them, for a first token alone in a
                batch of another size.
            deterministic: Whether dropout is off and `flax.nnx.BatchStat` variables are
                kept; None for the model's mode.
            rngs: Has the stream ``dropout``; the model's by default.

        Returns:
            Logits: shape ``[batch, num_classes]``, or ``[batch, n, vocab_size]`` with
            ``n = 1`` in decoding.

        Raises:
            ValueError: If the model has dropout, but no stream for it.
        """
        if deterministic is None:
            deterministic = self.deterministic
        kwargs: dict[str, Any] = {"deterministic": deterministic}
        # Not all models have both arguments.
        masks = {"key_mask": key_mask, "segment_ids": segment_ids}
        kwargs |= {name: mask for name, mask in masks.items() if mask is not None}
        if self.to_nnx__draws and not deterministic:
            stream = self.to_nnx__dropout if rngs is None else rngs["dropout"]
            if stream is None:
                raise ValueError(
                    "the model has dropout but no random numbers: pass rngs=, or call "
                    "model.eval()"
                )
            # Every stream of Linen; `flax.nnx.tabulate` takes no new `flax.nnx.Rngs`.
            kwargs["rngs"] = stream()
        return self._call(inputs, index=index, update_stats=not deterministic, **kwargs)


class ViT(Model):
    """`relattn.ViT` as an NNX module, with new variables.

    Args:
        num_classes: Number of classes; 0 for a model without a head.
        image_shape: Height, width and channels of the images.
        rngs: Has the streams ``params`` and ``random_features`` and, with dropout,
            ``dropout``; or a default one.
        **options: Attributes of `relattn.ViT`.

    Raises:
        ValueError: If an option is invalid.

    Example:
        >>> model = ViT(3, image_shape=(4, 6, 1), patch_size=2, dim=8, num_layers=1,
        ...             num_heads=2, attention="favor", dropout=0.5, rngs=nnx.Rngs(0))
        >>> images = jnp.ones((1, 4, 6, 1))
        >>> bool((model(images) == model(images)).all())
        False
        >>> model.eval()
        >>> bool((model(images) == model(images)).all())
        True
    """

    def __init__(
        self,
        num_classes: int,
        *,
        image_shape: tuple[int, int, int],
        rngs: nnx.Rngs,
        **options: Any,
    ):
        model = models.ViT(num_classes, **options)
        example = jnp.zeros((1, *image_shape))
        variables = _draw(model, lambda model: model(example), rngs)
        super().__init__(model, variables, rngs=rngs)


class GPT(Model):
    """`relattn.GPT` as an NNX module, with new variables.

    Args:
        vocab_size: Size of the vocabulary.
        context_length: Length of the longest sequence, in tokens.
        rngs: Has the streams ``params`` and ``random_features`` and, with dropout,
            ``dropout``; or a default one.
        **options: Attributes of `relattn.GPT`.

    Raises:
        ValueError: If an option is invalid.

    Example:
        >>> model = GPT(11, 7, dim=8, num_layers=1, num_heads=2, mlp_dim=16,
        ...             attention="favor", rngs=nnx.Rngs(0))
        >>> tokens = jnp.array([[3, 5, 2]])
        >>> logits = model(tokens)
        >>> last = model(tokens, index=2)  # Prefill.
        >>> bool(jnp.allclose(last[:, 0], logits[:, 2], atol=1e-5))
        True
        >>> model(jnp.array([[7]]), index=3).shape
        (1, 1, 11)
    """

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        *,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        model = models.GPT(vocab_size, context_length, **options)
        example = jnp.zeros((1, 1), jnp.int32)
        variables = _draw(model, lambda model: model(example), rngs)
        super().__init__(model, variables, rngs=rngs)


def generate(
    model: Model,
    prompt: Prompts,
    num_tokens: int,
    *,
    key: Key[Array, ""] | Key[Array, " prompts"],
    **options: Any,
) -> Int[Array, "batch total"]:
    """Continues prompts with tokens drawn from the model.

    Args:
        model: A `GPT`, or a `Model` of one; its own cache is not used.
        prompt: Token ids, see `relattn.generate`.
        num_tokens: Number of tokens to draw after the longest prompt.
        key: A PRNG key, or one for each prompt.
        **options: ``temperature``, ``top_k``, ``top_p`` and ``stop_token`` of
            `relattn.generate`.

    Returns:
        The prompts and their continuations, shape ``[batch, prompt + num_tokens]`` of
        the longest prompt.

    Raises:
        ValueError: If `relattn.generate` raises it.

    Example:
        >>> model = GPT(11, 7, dim=8, num_layers=1, num_heads=2, mlp_dim=16,
        ...             rngs=nnx.Rngs(0))
        >>> generate(model, [[3, 5], [2]], 9, key=jax.random.key(1)).shape
        (2, 11)
    """
    variables = model.to_linen()
    return models.generate(
        model.linen, variables, prompt, num_tokens, key=key, **options
    )

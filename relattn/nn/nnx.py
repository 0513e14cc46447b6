"""Attentions and position encodings as Flax NNX modules.

`MultiHeadAttention` and `Position` take the specs of `relattn.nn`. They hold the
variables of the Linen modules as NNX variables, and compute with the same code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx, traverse_util
from jaxtyping import Array, Bool, Float, Int, Key

from relattn import kernels, offsets
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
    """A Linen module whose variables are NNX variables."""

    def __init__(
        self,
        module: nn.Module,
        init: Callable[[nn.Module], Any],
        grid: offsets.Grid | None,
        num_prefix: int,
        rngs: nnx.Rngs,
    ):
        collections = ("params", "random_features", "batch_stats")
        super().__init__(
            module, nnx.Rngs(**{name: rngs[name]() for name in collections})
        )
        self.to_nnx__grid = grid
        self.to_nnx__num_prefix = num_prefix
        nnx.bridge.lazy_init(self._apply, method=init)
        # Calls draw nothing.
        self.to_nnx__rngs = None

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        return nnx.bridge.ToNNX.__call__(self, *args, **kwargs)

    def to_linen(self) -> dict[str, Any]:
        """Returns the variables of the Linen module, by collection."""
        flat = {path: variable.get_value() for path, variable in self._variables()}
        return traverse_util.unflatten_dict(flat)

    def update_from_linen(self, variables: Mapping[str, Any]) -> None:
        """Replaces the variables by those of a Linen module.

        Args:
            variables: Variables by collection, as `to_linen` returns them.

        Raises:
            ValueError: If they do not have the names and shapes of this module's.
        """
        shapes = [
            jax.tree.map(jnp.shape, tree) for tree in (self.to_linen(), dict(variables))
        ]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"the variables do not fit the module: it has {shapes[0]}, got "
                f"{shapes[1]}"
            )
        flat = traverse_util.flatten_dict(dict(variables))
        for path, variable in self._variables():
            variable.set_value(flat[path])

    def _variables(self):
        """Returns the variables with their Linen paths."""
        return [
            ((nnx.variable_name_from_type(type(variable)), *path), variable)
            for path, variable in nnx.to_flat_state(nnx.state(self))
        ]


class MultiHeadAttention(_LinenModule):
    """Applies multi-head attention of any kind in `relattn.nn.ATTENTIONS`.

    Parameters are `flax.nnx.Param`, named as in Linen; random features are
    `RandomFeatures`.

    Args:
        attention: Spec of the attention, ``"favor(num_features=256)"``.
        dim: Width of the tokens.
        num_heads: Number of heads; divides ``dim``.
        layer: Index of the layer: layers need different ones to draw different
            random features.
        qkv_bias: Whether queries, keys and values have a bias.
        causal: Whether a token attends only to itself and earlier tokens.
        grid: Height and width, or length, of the tokens after the prefix; None if the
            attention does not depend on it.
        num_prefix: Number of prefix tokens.
        dtype: Compute dtype; parameters are float32.
        rngs: Has the streams ``params`` and ``random_features``, or a default one.

    Raises:
        ValueError: If the spec is invalid or the attention has no causal form.

    Example:
        >>> attention = MultiHeadAttention(
        ...     "favor", dim=8, num_heads=2, rngs=nnx.Rngs(0))
        >>> attention(jnp.ones((1, 7, 8))).shape
        (1, 7, 8)
        >>> attention.q["kernel"].shape
        (8, 8)
    """

    def __init__(
        self,
        attention: str = "softmax",
        *,
        dim: int,
        num_heads: int,
        layer: int = 0,
        qkv_bias: bool = True,
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
            qkv_bias=qkv_bias,
            causal=causal,
        )
        module = make(layer=layer, dtype=dtype, parent=None)
        n = num_prefix + math.prod(grid or (1,))

        def init(module: nn.Module) -> Array:
            return module(jnp.zeros((1, n, dim)), grid=grid, num_prefix=num_prefix)

        super().__init__(module, init, grid, num_prefix, rngs)

    def __call__(
        self,
        x: Float[Array, "batch n dim"],
        *,
        position: LayerPosition | None = None,
        key_mask: Bool[Array, "batch n"] | None = None,
    ) -> Float[Array, "batch n dim"]:
        """Applies the attention.

        Args:
            x: Tokens, shape ``[batch, n, dim]``.
            position: The layer's position, from `Position.per_layer`.
            key_mask: True for tokens that may be attended to, shape ``[batch, n]``.

        Returns:
            Shape ``[batch, n, dim]``.
        """
        return self._apply(
            x,
            grid=self.to_nnx__grid,
            num_prefix=self.to_nnx__num_prefix,
            position=position,
            key_mask=key_mask,
        )


class Position(_LinenModule):
    """Encodes positions for all layers, in any way in `relattn.nn.POSITIONS`.

    Args:
        position: Spec of the encoding, or a sum of specs, ``"learned + rope2d"``.
        attention: Spec of the attention that uses it.
        dim: Width of the tokens.
        num_heads: Number of heads.
        num_layers: Number of layers.
        grid: Height and width, or length, of the tokens after the prefix.
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
        num_layers: int,
        grid: offsets.Grid,
        num_prefix: int = 0,
        rngs: nnx.Rngs,
    ):
        _, make = registry.build(
            attention, position, dim=dim, num_heads=num_heads, num_layers=num_layers
        )

        def init(module: nn.Module) -> None:
            module.add_to_tokens(jnp.zeros((1, math.prod(grid), dim)), grid)
            module.per_layer(grid, num_prefix)

        super().__init__(make(parent=None), init, grid, num_prefix, rngs)
        self.to_nnx__num_layers = num_layers

    def add_to_tokens(
        self, tokens: Float[Array, "batch n dim"]
    ) -> Float[Array, "batch n dim"]:
        """Adds the encoding to the grid's tokens, without prefix, if it acts there."""
        return self._apply(tokens, self.to_nnx__grid, method="add_to_tokens")

    def per_layer(self) -> list[LayerPosition | None]:
        """Returns what each layer passes to `MultiHeadAttention` as ``position``."""
        layers = self._apply(
            self.to_nnx__grid, self.to_nnx__num_prefix, method="per_layer"
        )
        return [None] * self.to_nnx__num_layers if layers is None else layers

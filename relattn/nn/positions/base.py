"""The base classes of position encodings as Flax modules, and sums of encodings.

A model has one encoding for all layers, which declares the ``site`` where it acts. At
the site ``tokens`` it adds a vector to each token of the grid. At the other sites it
returns a `LayerPosition` for each layer: at the site ``heads`` the layer calls it on
queries and keys, at the site ``values`` on values and on the attention's outputs; at
the sites ``pairs`` and ``offset_bias`` it has tables for the attention's kernel. So
parameters that layers share exist once, and the layers receive plain arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax.linen as nn
import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from relattn.kernels.positions.fourier import same_waves
from relattn.messages import shorten
from relattn.nn.blocks import default_head_dim
from relattn.offsets import Grid, Torus, check_axes

Params = Mapping[str, Any]
# Real positions of the tokens after the prefix, in place of a grid.
Points = Float[Array, "batch n axes"]
# Where an encoding may act.
SITES = ("none", "tokens", "heads", "values", "pairs", "offset_bias")


@flax.struct.dataclass
class LayerPosition:
    """The position encoding of one layer, a pytree; this one changes nothing.

    At the site ``heads`` a subclass defines `__call__`, at the site ``values``
    `widen_values` and `combine_values`, and at both `slice` if it has an array with a
    row for each token; at the sites ``pairs`` and ``offset_bias`` it defines `tables`.
    """

    def __call__(
        self, q: Array, k: Array | None, x: Array
    ) -> tuple[Array, Array | None]:
        """Applies the position to queries and keys.

        Args:
            q: Queries, shape ``[batch, heads, n, head_dim]``.
            k: Keys, shape ``[batch, heads, n, head_dim]``, or None.
            x: The layer's input, shape ``[batch, n, dim]``.

        Returns:
            Queries and keys with their position; both may be wider.
        """
        del x
        return q, k

    def widen_values(self, v: Array, x: Array) -> Array:
        """Applies the position of the keys to values.

        Args:
            v: Values, shape ``[batch, heads, n, head_dim]``.
            x: The layer's input, shape ``[batch, n, dim]``.

        Returns:
            Values with their position, which may be wider.
        """
        del x
        return v

    def combine_values(self, out: Array) -> Array:
        """Applies the position of the queries to outputs.

        Args:
            out: Outputs of the heads, as wide as the values of `widen_values`.

        Returns:
            Outputs, shape ``[batch, heads, n, head_dim]``.
        """
        return out

    def slice(self, start: Int[Array, ""] | int, num_tokens: int) -> LayerPosition:
        """Returns the encoding of ``num_tokens`` tokens from position ``start`` on."""
        del start, num_tokens
        return self

    @property
    def tables(self) -> dict[str, Array]:
        """Tables of offsets, by argument of `relattn.kernels.relative_attention`."""
        return {}

    @property
    def keeps_scores(self) -> bool:
        """Whether q' . k' / sqrt(their width) is q . k / sqrt(head_dim), plus a term.

        Otherwise q' . k' is q . k plus a term, and both are divided by the root of the
        new width.
        """
        return False


@flax.struct.dataclass
class ScoreAndValuePosition(LayerPosition):
    """Two encodings of one layer: of queries, keys or scores, and of values.

    Attributes:
        scores: The encoding of queries, keys or scores.
        values: The encoding of values.
    """

    scores: LayerPosition
    values: LayerPosition

    def __call__(
        self, q: Array, k: Array | None, x: Array
    ) -> tuple[Array, Array | None]:
        """Applies the first encoding to queries and keys."""
        return self.scores(q, k, x)

    def widen_values(self, v: Array, x: Array) -> Array:
        """Applies the second encoding to values."""
        return self.values.widen_values(v, x)

    def combine_values(self, out: Array) -> Array:
        """Applies the second encoding to outputs."""
        return self.values.combine_values(out)

    def slice(
        self, start: Int[Array, ""] | int, num_tokens: int
    ) -> ScoreAndValuePosition:
        """Returns the encodings of ``num_tokens`` tokens from position ``start`` on."""
        return ScoreAndValuePosition(
            self.scores.slice(start, num_tokens), self.values.slice(start, num_tokens)
        )

    @property
    def tables(self) -> dict[str, Array]:
        """Tables of offsets of the first encoding."""
        return self.scores.tables

    @property
    def keeps_scores(self) -> bool:
        """Whether the first encoding does."""
        return self.scores.keeps_scores


def grid_table(
    module: nn.Module,
    name: str,
    init: nn.initializers.Initializer,
    shape: tuple[int, ...],
    grid: Grid,
    *,
    whose: str,
    remedy: str = "",
) -> Float[Array, "..."]:
    """Returns a parameter whose shape depends on the grid; raises for another grid.

    Args:
        module: The module with the parameter, in its ``__call__``.
        name: Name of the parameter.
        init: Its initializer.
        shape: Its shape.
        grid: Size of each axis, in tokens.
        whose: What the table belongs to, for the message.
        remedy: A further way to fix the error, for the message.

    Returns:
        The parameter, float32.

    Raises:
        ValueError: If the module's variables have a table of another shape.
    """
    if module.has_variable("params", name):
        found = module.get_variable("params", name).shape
        if found != shape:
            raise ValueError(
                f"{whose} {name} has shape {found}; a grid of "
                f"{'x'.join(map(str, grid))} tokens needs {shape}: pass images or "
                f"sequences of the size that the model was built for{remedy}"
            )
    return module.param(name, init, shape, jnp.float32)


def check_same_waves(
    position: Position, old: Grid, new: Grid, num_frequencies: int
) -> None:
    """Checks that parameters of the longest waves of a torus fit those of another.

    Args:
        position: The position encoding, for the message.
        old: Size of each axis, in tokens.
        new: Size of each axis of the other grid.
        num_frequencies: Number of waves.

    Raises:
        ValueError: If other waves are the longest. On plain grids all may be.
    """
    if isinstance(old, Torus) and not same_waves(old, Torus(new), num_frequencies):
        sizes = ["x".join(map(str, grid)) for grid in (old, new)]
        raise ValueError(
            f"position {type(position).__name__} has other waves on a torus of "
            f"{sizes[1]} tokens than on one of {sizes[0]}: pass images of the size "
            "that the model was trained on, or choose a position such as 'sincos_bias'"
        )


class Position(nn.Module):
    """Base class of position encodings.

    A subclass sets ``site`` and defines ``__call__``. At the site ``tokens`` it maps
    the grid's tokens and the grid to tokens; at the other sites, except ``none``, it
    maps the grid and the number of prefix tokens to a list of `LayerPosition`, one for
    each layer.

    Attributes:
        dim: Width of the tokens.
        num_heads: Number of heads.
        num_layers: Number of layers.
        head_dim: Width of a head; 0 for dim / num_heads.
    """

    dim: int = 0
    num_heads: int = 0
    num_layers: int = 0
    head_dim: int = 0
    site: ClassVar[str] = "none"
    # Whether the encoding depends on offsets only, modulo the sizes of a torus.
    periodic: ClassVar[bool] = False
    # Whether tokens may stand at any real positions, `Points`, in place of a grid.
    continuous: ClassVar[bool] = False
    # Whether tokens must be on a grid of two axes or more.
    needs_plane: ClassVar[bool] = False
    # At other sites than ``tokens``: parameters that layers share; the others have a
    # leading axis of layers.
    shared_params: ClassVar[tuple[str, ...]] = ()
    # At the sites ``heads`` and ``values``: whether all heads encode keys and values
    # alike, so that heads can share them.
    takes_shared_keys: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.head_dim = self.head_dim or default_head_dim(self.dim, self.num_heads)
        super().__post_init__()

    def add_to_tokens(
        self, tokens: Float[Array, "batch n dim"], grid: Grid
    ) -> Float[Array, "batch n dim"]:
        """Adds the encoding to the grid's tokens at the site ``tokens``."""
        self.check_grid(grid)
        if self.site != "tokens":
            return tokens
        added = self(tokens, grid)
        shape = getattr(added, "shape", None)
        if shape != tokens.shape:
            raise ValueError(
                f"position {type(self).__name__} returned shape {shape}, but the "
                f"tokens have {tokens.shape}: return the tokens with the encoding added"
            )
        return added

    def per_layer(
        self, grid: Grid | Points, num_prefix: int
    ) -> list[LayerPosition] | None:
        """Returns the encoding of each layer, or None at ``none`` and ``tokens``.

        Args:
            grid: Size of each axis, in tokens; or, if the encoding is ``continuous``,
                the positions of points, shape ``[batch, n, axes]``.
            num_prefix: Number of prefix tokens.
        """
        self.check_grid(grid)
        if self.site in ("none", "tokens"):
            return None
        layers = self(grid, num_prefix)
        is_list = isinstance(layers, list | tuple)
        found = list(layers) if is_list else [layers]
        kinds = {type(layer) for layer in found}
        if (
            not is_list
            or len(found) != self.num_layers
            or not all(issubclass(kind, LayerPosition) for kind in kinds)
        ):
            names = " and ".join(sorted(kind.__name__ for kind in kinds))
            returned = f"a list of {len(found)} {names}" if is_list else f"a {names}"
            raise ValueError(
                f"position {type(self).__name__} returned {returned.rstrip()}, "
                f"expected a list of {self.num_layers} relattn.LayerPosition, one for "
                "each layer"
            )
        return found

    def check_grid(self, grid: Grid | Points) -> None:
        """Raises ValueError if the encoding is not for points, a torus, or a line."""
        if not isinstance(grid, tuple):
            if self.site != "none" and getattr(grid, "ndim", 0) != 3:
                raise ValueError(
                    "grid must be a tuple of the sizes of its axes, such as (7, 7), or "
                    "an array of the positions of points, [batch, n, axes], got "
                    f"{shorten(grid)}"
                )
            if not self.continuous:
                raise ValueError(
                    f"position {type(self).__name__} needs tokens on a grid, got "
                    "points: choose another, such as 'fourier_values', or 'none'"
                )
            return
        if self.site != "none":
            check_axes(grid)
        if isinstance(grid, Torus) and not self.periodic:
            raise ValueError(
                f"position {type(self).__name__} cannot be periodic: choose another, "
                "such as 'relative_bias' or 'rope2d', or periodic=False"
            )
        if self.needs_plane and len(grid) < 2:
            raise ValueError(
                f"position {type(self).__name__} needs tokens on a grid of two axes or "
                f"more, got a line of {math.prod(grid)}: choose another, such as "
                "'rope1d'"
            )

    def resize(self, params: Params, old: Grid, new: Grid, num_prefix: int) -> Params:
        """Resizes the parameters that depend on the grid to another grid.

        Args:
            params: The encoding's parameters.
            old: The grid of ``params``.
            new: The new grid.
            num_prefix: Number of prefix tokens.

        Returns:
            Parameters for ``new``. Functions of the position are returned unchanged:
            positions count tokens and continue beyond the old grid.

        Raises:
            ValueError: If the parameters cannot be resized.
        """
        del old, new, num_prefix
        return params

    def table(
        self,
        init: nn.initializers.Initializer,
        shape: tuple[int, ...],
        grid: Grid,
        name: str = "table",
    ) -> Float[Array, "..."]:
        """Returns a parameter whose shape depends on the grid; `resize` resizes it."""
        hints = {"whose": "the position's"}
        hints["remedy"] = ", or resize its tables by relattn.models.resize_grid"
        return grid_table(self, name, init, shape, grid, **hints)


class NoPosition(Position):
    """Encodes no position: attention sees a set of tokens.

    Example:
        >>> NoPosition().site
        'none'
    """

    periodic: ClassVar[bool] = True
    continuous: ClassVar[bool] = True


class PositionSum(Position):
    """Combines several encodings: ``"learned + relative_key"``.

    Attributes:
        makers: Constructors of the encodings. At most one acts at the site ``values``,
            and at most one at another site than ``values`` and ``tokens``.

    Example:
        >>> from relattn.nn.positions.sincos import Sincos
        >>> module = PositionSum(makers=(NoPosition, Sincos), dim=8)
        >>> module.apply({}, jnp.zeros((1, 6, 8)), (2, 3), method="add_to_tokens").shape
        (1, 6, 8)
    """

    makers: tuple[Callable[..., Position], ...] = ()

    def setup(self) -> None:
        """Creates the encodings."""
        self.terms = self.make_terms()

    @nn.nowrap
    def make_terms(self) -> list[Position]:
        """Returns the encodings, as new modules."""
        sizes = {
            "dim": self.dim,
            "num_heads": self.num_heads,
            "num_layers": self.num_layers,
            "head_dim": self.head_dim,
        }
        return [make(**sizes) for make in self.makers]

    def add_to_tokens(
        self, tokens: Float[Array, "batch n dim"], grid: Grid
    ) -> Float[Array, "batch n dim"]:
        """Adds all encodings at the site ``tokens`` to the grid's tokens."""
        for term in self.terms:
            tokens = term.add_to_tokens(tokens, grid)
        return tokens

    def per_layer(
        self, grid: Grid | Points, num_prefix: int
    ) -> list[LayerPosition] | None:
        """Returns the layers' encodings from the terms at other sites."""
        # The term of the values last.
        terms = sorted(self.terms, key=lambda term: term.site == "values")
        found = [term.per_layer(grid, num_prefix) for term in terms]
        found = [layers for layers in found if layers is not None]
        if len(found) < 2:
            return found[0] if found else None
        return [ScoreAndValuePosition(*both) for both in zip(*found, strict=True)]

    @nn.nowrap
    def resize(self, params: Params, old: Grid, new: Grid, num_prefix: int) -> Params:
        """Resizes the parameters of every encoding."""
        resized = dict(params)
        for index, term in enumerate(self.make_terms()):
            name = f"terms_{index}"
            if name in params:
                resized[name] = term.resize(params[name], old, new, num_prefix)
        return resized

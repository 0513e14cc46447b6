"""Position encodings of relative places: vectors, biases and rotations."""

from __future__ import annotations

import math
from typing import ClassVar

import flax
import flax.linen as nn
import jax
import numpy as np
from jaxtyping import Array, Float, Int

from relattn import offsets
from relattn.kernels import rotary
from relattn.kernels.resize import resize_table
from relattn.nn.positions import Grid, LayerPosition, Params, Position


@flax.struct.dataclass
class RelativeTables(LayerPosition):
    """Tables of a layer, one of them or more, for `relattn.kernels.relative_attention`.

    Attributes:
        key_table: A vector for each head and offset, or None.
        value_table: A vector for each head and offset, or None.
        bias: A number for each head and offset, or None.
    """

    key_table: Float[Array, "heads rows depth"] | None = None
    value_table: Float[Array, "heads rows depth"] | None = None
    bias: Float[Array, "heads rows"] | None = None

    @property
    def tables(self) -> dict[str, Array]:
        """The tables that there are."""
        names = ("key_table", "value_table", "bias")
        named = {name: getattr(self, name) for name in names}
        return {name: table for name, table in named.items() if table is not None}


class _RelativeVectors(Position):
    site: ClassVar[str] = "pairs"
    kind: ClassVar[str]

    @nn.compact
    def __call__(self, grid: Grid, num_prefix: int) -> list[RelativeTables]:
        """The tables of every layer."""
        del num_prefix
        depth = self.dim // self.heads
        shape = (self.num_layers, self.heads, offsets.num_offsets(grid), depth)
        table = self.table(nn.initializers.normal(depth**-0.5), shape, grid)
        return [RelativeTables(**{self.kind: layer}) for layer in table]

    def resize(self, params: Params, old: Grid, new: Grid, num_prefix: int) -> Params:
        """Vectors between those of the old grid's offsets, bicubically."""
        del num_prefix
        sizes = _offset_grids(old, new)
        return {"table": resize_table(params["table"], *sizes, axis=-2)}


class RelativeKey(_RelativeVectors):
    """Relative key vectors: q_i . (k_j + r_d) / sqrt(depth), d = p_i - p_j.

    Every layer, head and offset has a vector r_d, N(0, 1/depth) at the start. Pairs
    with a prefix token have none. Causal attention uses the offsets from zero on.

    Example:
        >>> import jax
        >>> module = RelativeKey(dim=8, heads=2, num_layers=3)
        >>> layers, _ = module.init_with_output(jax.random.key(0), (2, 3), 1)
        >>> len(layers), layers[0].key_table.shape
        (3, (2, 15, 4))

    Source:
        Shaw et al., Self-Attention with Relative Position Representations, section
        3.1, without their clip; two axes and the start: Srinivas et al., Bottleneck
        Transformers, section 3.
    """

    kind: ClassVar[str] = "key_table"


class RelativeValue(_RelativeVectors):
    """Relative value vectors: out_i = sum_j alpha_ij (v_j + r_d), d = p_i - p_j.

    Every layer, head and offset has a vector r_d, N(0, 1/depth) at the start. Pairs
    with a prefix token have none. Causal attention uses the offsets from zero on.

    Example:
        >>> import jax
        >>> module = RelativeValue(dim=8, heads=2, num_layers=3)
        >>> layers, _ = module.init_with_output(jax.random.key(0), (5,), 0)
        >>> layers[0].value_table.shape
        (2, 9, 4)

    Source:
        Shaw et al., Self-Attention with Relative Position Representations, section
        3.1, without their clip.
    """

    kind: ClassVar[str] = "value_table"


class RelativeBias(Position):
    """Relative bias: q_i . k_j / sqrt(depth) + b_d, d = p_i - p_j.

    Every layer, head and offset has a number b_d, N(0, 0.02^2) at the start, and where
    there are prefix tokens so has each kind of pair with one: "in", "self" and "out" of
    `relattn.offsets.offset_index`. Causal attention uses the offsets from zero on.

    Example:
        >>> import jax
        >>> module = RelativeBias(dim=8, heads=2, num_layers=3)
        >>> layers, _ = module.init_with_output(jax.random.key(0), (2, 3), 1)
        >>> layers[0].bias.shape
        (2, 18)

    Source:
        Liu et al., Swin Transformer, section 3.2.
    """

    site: ClassVar[str] = "offset_bias"

    @nn.compact
    def __call__(self, grid: Grid, num_prefix: int) -> list[RelativeTables]:
        """The tables of every layer."""
        rows = offsets.num_table_rows(grid, num_prefix)
        shape = (self.num_layers, self.heads, rows)
        table = self.table(nn.initializers.truncated_normal(0.02), shape, grid)
        return [RelativeTables(bias=layer) for layer in table]

    def resize(self, params: Params, old: Grid, new: Grid, num_prefix: int) -> Params:
        """Numbers between those of the old grid's offsets, bicubically."""
        sizes = _offset_grids(old, new)
        others = offsets.num_table_rows(old, num_prefix) - offsets.num_offsets(old)
        table = resize_table(params["table"], *sizes, axis=-1, num_others=others)
        return {"table": table}


def _offset_grids(old: Grid, new: Grid) -> tuple[Grid, Grid]:
    """Sizes of the tables of offsets of two grids."""
    if len(old) == 1:
        # Causal attention trains one half of it, which would mix with the other.
        raise ValueError(
            "a table of offsets on a line is not resized, since causal attention "
            f"trains its past only: give sequences of up to {old[0]} tokens, or choose "
            "a position without tables such as 'rope1d'"
        )
    return tuple(tuple(2 * size - 1 for size in grid) for grid in (old, new))


@flax.struct.dataclass
class TurnedHeads(LayerPosition):
    """Turns the queries and keys of a layer; a subclass defines `turn`.

    Attributes:
        angles: One for each token and pair of a head's numbers, of all heads or each.
    """

    angles: Float[Array, "*heads n pairs"]

    def turn(self, x: Array) -> Array:
        """Queries or keys, turned."""
        raise NotImplementedError

    def __call__(self, q: Array, k: Array, x: Array) -> tuple[Array, Array]:
        """Turned queries and keys."""
        del x
        return self.turn(q), self.turn(k)

    def at(self, index: Int[Array, ""] | int) -> TurnedHeads:
        """The angles of one token, for decoding."""
        angles = jax.lax.dynamic_slice_in_dim(self.angles, index, 1, axis=-2)
        return self.replace(angles=angles)


@flax.struct.dataclass
class RotaryHeads(TurnedHeads):
    """Turns pairs of a head's numbers.

    Attributes:
        interleaved: As in `relattn.kernels.rotate`.
    """

    interleaved: bool = flax.struct.field(pytree_node=False, default=False)

    def turn(self, x: Array) -> Array:
        """Queries or keys, turned."""
        return rotary.rotate(x, self.angles, interleaved=self.interleaved)


class Rope1d(Position):
    """Rotary positions along a line; the tokens of an image count row by row.

    Queries and keys turn, pair by pair of a head's numbers, by angles w_t p_i with
    w_t = base^(-2 t / depth), so that their products depend on p_i - p_j only. Prefix
    tokens do not turn, so that products with theirs depend on the place. No parameters.

    Attributes:
        base: The slowest frequency is nearly 1 / base.
        interleaved: Pairs are neighbours (2 t, 2 t + 1), not (t, t + depth / 2).

    Example:
        >>> import jax.numpy as jnp
        >>> layers = Rope1d(dim=8, heads=2, num_layers=3).apply({}, (5,), 0)
        >>> q, k = layers[0](*jnp.ones((2, 1, 2, 5, 4)), jnp.ones((1, 5, 8)))
        >>> q.shape
        (1, 2, 5, 4)

    Source:
        Su et al., RoFormer, section 3.2.
    """

    base: float = 10000.0
    interleaved: bool = False
    site: ClassVar[str] = "heads"

    @nn.compact
    def __call__(self, grid: Grid, num_prefix: int) -> list[RotaryHeads]:
        """The angles of every layer, the same for all."""
        places = np.arange(math.prod(grid), dtype=np.float32)
        return _rotary_layers(
            self, np.pad(places, (num_prefix, 0))[:, None], num_prefix
        )


class Rope2d(Position):
    """Rotary positions on a grid: half of the pairs turn by row, half by column.

    As `Rope1d` in each half, with frequencies base^(-t / (depth / 4)). Prefix tokens do
    not turn. No parameters.

    Attributes:
        base: The slowest frequency is nearly 1 / base.
        interleaved: Pairs are neighbours (2 t, 2 t + 1), not (t, t + depth / 2).

    Example:
        >>> layers = Rope2d(dim=8, heads=2, num_layers=3).apply({}, (2, 3), 1)
        >>> layers[0].angles.shape
        (7, 2)

    Source:
        Heo et al., Rotary Position Embedding for Vision Transformer, section 3.2.
    """

    base: float = 100.0
    interleaved: bool = False
    site: ClassVar[str] = "heads"

    @nn.compact
    def __call__(self, grid: Grid, num_prefix: int) -> list[RotaryHeads]:
        """The angles of every layer, the same for all."""
        check_plane("rope2d", grid)
        return _rotary_layers(
            self, offsets.grid_positions(grid, num_prefix), num_prefix
        )


def check_plane(name: str, grid: Grid) -> None:
    """Raises unless tokens lie on a grid of two axes.

    Args:
        name: Of the position, for the message.
        grid: Height and width, in tokens.

    Raises:
        ValueError: If it is a line.

    Example:
        >>> check_plane("rope2d", (2, 3))
    """
    if len(grid) != 2:
        raise ValueError(
            f"position {name!r} needs tokens on a grid of height and width, got a "
            f"line of {grid[0]}; choose 'rope1d'"
        )


def _rotary_layers(
    module: Rope1d | Rope2d, positions: Float[np.ndarray, "n axes"], num_prefix: int
) -> list[RotaryHeads]:
    angles = rotary.rotary_angles(
        positions,
        module.dim // module.heads,
        base=module.base,
        num_prefix=num_prefix,
    )
    return [RotaryHeads(angles, module.interleaved)] * module.num_layers

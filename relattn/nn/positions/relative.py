"""Relative keys, values and biases: learned tables with a row for each offset."""

from __future__ import annotations

from typing import ClassVar

import flax.linen as nn
import flax.struct
from jaxtyping import Array, Float

from relattn import offsets
from relattn.kernels.positions.interpolate import resize_table
from relattn.nn.positions.base import Grid, LayerPosition, Params, Position


@flax.struct.dataclass
class RelativeTables(LayerPosition):
    """Tables of a layer for `relattn.kernels.relative_attention`.

    Attributes:
        key_table: A vector for each head and offset, or None.
        value_table: A vector for each head and offset, or None.
        bias: A scalar for each head and offset, or None.
    """

    key_table: Float[Array, "heads rows head_dim"] | None = None
    value_table: Float[Array, "heads rows head_dim"] | None = None
    bias: Float[Array, "heads rows"] | None = None

    @property
    def tables(self) -> dict[str, Array]:
        """The tables that are not None, by name."""
        names = ("key_table", "value_table", "bias")
        named = {name: getattr(self, name) for name in names}
        return {name: table for name, table in named.items() if table is not None}


class _RelativeVectors(Position):
    site: ClassVar[str] = "pairs"
    periodic: ClassVar[bool] = True
    kind: ClassVar[str]

    @nn.compact
    def __call__(self, grid: Grid, num_prefix: int) -> list[RelativeTables]:
        """Returns the tables of each layer."""
        del num_prefix
        rows, width = offsets.num_offsets(grid), self.head_dim
        shape = (self.num_layers, self.num_heads, rows, width)
        table = self.table(nn.initializers.normal(width**-0.5), shape, grid)
        return [RelativeTables(**{self.kind: layer}) for layer in table]

    def resize(self, params: Params, old: Grid, new: Grid, num_prefix: int) -> Params:
        """Interpolates the vectors bicubically over the offsets."""
        del num_prefix
        sizes = _offset_grids(old, new)
        return {"table": resize_table(params["table"], *sizes, axis=-2)}


class RelativeKey(_RelativeVectors):
    """Adds relative vectors to keys: q_i . (k_j + r_d) / sqrt(head_dim), d = p_i - p_j.

    Every layer, head and offset has a vector r_d, which starts as N(0, 1/head_dim).
    Pairs with a prefix token have none. Causal attention uses offsets >= 0.

    Example:
        >>> import jax
        >>> module = RelativeKey(dim=8, num_heads=2, num_layers=3)
        >>> layers, _ = module.init_with_output(jax.random.key(0), (2, 3), 1)
        >>> len(layers), layers[0].key_table.shape
        (3, (2, 15, 4))

    Source:
        Shaw et al., Self-Attention with Relative Position Representations, section 3.1,
        without their clip; two axes and the initial values: Srinivas et al., Bottleneck
        Transformers, section 3.
    """

    kind: ClassVar[str] = "key_table"


class RelativeValue(_RelativeVectors):
    """Adds relative vectors to values: sum_j alpha_ij (v_j + s_d), d = p_i - p_j.

    Every layer, head and offset has a vector s_d, which starts as N(0, 1/head_dim).
    Pairs with a prefix token have none. Causal attention uses offsets >= 0.

    Example:
        >>> import jax
        >>> module = RelativeValue(dim=8, num_heads=2, num_layers=3)
        >>> layers, _ = module.init_with_output(jax.random.key(0), (5,), 0)
        >>> layers[0].value_table.shape
        (2, 9, 4)

    Source:
        Shaw et al., Self-Attention with Relative Position Representations, section
        3.1, without their clip.
    """

    kind: ClassVar[str] = "value_table"


class RelativeBias(Position):
    """Adds a relative bias: q_i . k_j / sqrt(head_dim) + b_d, d = p_i - p_j.

    Every layer, head and offset has a scalar b_d, which starts as N(0, 0.02^2) without
    values beyond 0.04. With prefix tokens there are three more for pairs with a prefix
    token: "in", "self" and "out" of `relattn.offsets.offset_index`. Causal attention
    uses offsets >= 0.

    Example:
        >>> import jax
        >>> module = RelativeBias(dim=8, num_heads=2, num_layers=3)
        >>> layers, _ = module.init_with_output(jax.random.key(0), (2, 3), 1)
        >>> layers[0].bias.shape
        (2, 18)

    Source:
        Liu et al., Swin Transformer, section 3.2.
    """

    site: ClassVar[str] = "offset_bias"
    periodic: ClassVar[bool] = True

    @nn.compact
    def __call__(self, grid: Grid, num_prefix: int) -> list[RelativeTables]:
        """Returns the tables of each layer."""
        rows = offsets.num_table_rows(grid, num_prefix)
        shape = (self.num_layers, self.num_heads, rows)
        table = self.table(nn.initializers.truncated_normal(0.02), shape, grid)
        return [RelativeTables(bias=layer) for layer in table]

    def resize(self, params: Params, old: Grid, new: Grid, num_prefix: int) -> Params:
        """Interpolates the biases bicubically over the offsets."""
        sizes = _offset_grids(old, new)
        others = offsets.num_table_rows(old, num_prefix) - offsets.num_offsets(old)
        table = resize_table(params["table"], *sizes, axis=-1, num_others=others)
        return {"table": table}


def _offset_grids(old: Grid, new: Grid) -> tuple[Grid, Grid]:
    """Returns the grids of offsets of two grids."""
    if isinstance(old, offsets.Torus):
        raise ValueError(
            "a table of offsets on a torus is not resized: pass images of the size "
            "that the model was trained on, or choose a position without tables such "
            "as 'rope2d'"
        )
    if len(old) == 1:
        # Causal attention trains only one half; interpolation would mix in the other.
        raise ValueError(
            "a table of offsets on a line is not resized, since causal attention "
            f"trains only half of it: pass sequences of up to {old[0]} tokens, or "
            "choose a position without tables such as 'rope1d'"
        )
    return offsets.offsets_per_axis(old), offsets.offsets_per_axis(new)

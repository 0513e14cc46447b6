"""Position gates: scale queries and keys by functions of the absolute position."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from relattn import offsets
from relattn.kernels.positions import gates, rotary
from relattn.kernels.positions.interpolate import resize_table
from relattn.nn.positions.base import Grid, LayerPosition, Params, Position


@flax.struct.dataclass
class GatedHeads(LayerPosition):
    """Scales the queries and keys of a layer.

    Attributes:
        exponents: Logarithms of the scales, of the queries and of the keys.
    """

    exponents: Float[Array, "2 heads n head_dim"]

    def __call__(self, q: Array, k: Array, x: Array) -> tuple[Array, Array]:
        """Scales queries and keys."""
        del x
        q_exponents, k_exponents = self.exponents
        return gates.apply_gate(q, q_exponents), gates.apply_gate(k, k_exponents)

    def slice(self, start: Int[Array, ""] | int, num_tokens: int) -> GatedHeads:
        """Returns the exponents of ``num_tokens`` tokens from position ``start`` on."""
        exponents = jax.lax.dynamic_slice_in_dim(
            self.exponents, start, num_tokens, axis=-2
        )
        return dataclasses.replace(self, exponents=exponents)


class IrpeGate(Position):
    """Scales queries and keys by learned embeddings of row and column (iRPE gate).

    q' = q * exp(r_q[row] + c_q[column]), k' = k * exp(r_k[row] + c_k[column]). Every
    layer and head has its embeddings, one for each position on each axis of the grid:
    on a line there are no rows, on a volume there are frames, too. They start at zero,
    so the gate starts as the identity. Prefix tokens are not scaled. Despite its name,
    the gate is a function of the absolute position.

    Example:
        >>> module = IrpeGate(dim=8, num_heads=2, num_layers=3)
        >>> layers, variables = module.init_with_output(jax.random.key(0), (2, 3), 1)
        >>> layers[0].exponents.shape, variables["params"]["rows"].shape
        ((2, 2, 7, 4), (3, 2, 2, 2, 4))

    Source:
        Guoji, Improving efficient Vision Transformers with RPEs, section 5.1, which
        does not state the initial values or what layers and heads share: these are
        ours.
    """

    site: ClassVar[str] = "heads"

    @nn.compact
    def __call__(self, grid: Grid, num_prefix: int) -> list[GatedHeads]:
        """Returns the exponents of each layer."""
        leading = (self.num_layers, 2, self.num_heads)
        embeddings = [
            self.table(
                nn.initializers.zeros, (*leading, size, self.head_dim), grid, name
            )
            for name, size in zip(_axes(grid), grid, strict=True)
        ]
        exponents = gates.irpe_exponents(*embeddings, num_prefix=num_prefix)
        return [GatedHeads(layer) for layer in exponents]

    def resize(self, params: Params, old: Grid, new: Grid, num_prefix: int) -> Params:
        """Interpolates the embeddings of rows and columns cubically."""
        del num_prefix
        return {
            name: resize_table(params[name], old[i : i + 1], new[i : i + 1], axis=-2)
            for i, name in enumerate(_axes(old))
        }


def _axes(grid: Grid) -> tuple[str, ...]:
    named = {1: ("positions",), 2: ("rows", "columns")}
    return named.get(len(grid), tuple(f"axis_{axis}" for axis in range(len(grid))))


class StringGate(Position):
    """Scales queries and keys by Fourier features of the position (STRING gate).

    q' = q * exp(g(p) A_q), k' = k * exp(g(p) A_k), with g(p) = [cos(w_r . p + b_r),
    sin(w_r . p + b_r)], r = 1 .. rank. Each layer has frequencies w and phases b, each
    layer and head its A. A starts at zero, so the gate starts as the identity. Prefix
    tokens are not scaled. Despite its name, the gate is a function of the absolute
    position.

    Attributes:
        rank: Number of frequencies.
        base: Base of the initial series of frequencies; 0 for 10 on a grid and 10,000
            on a line.

    Example:
        >>> module = StringGate(dim=8, num_heads=2, num_layers=3, rank=5)
        >>> layers, variables = module.init_with_output(jax.random.key(0), (2, 3), 1)
        >>> layers[0].exponents.shape, variables["params"]["coefficients"].shape
        ((2, 2, 7, 4), (3, 2, 2, 10, 4))

    Source:
        Guoji, Improving efficient Vision Transformers with RPEs, section 5.3, which
        does not state the rank, the initial values or what layers and heads share:
        these are ours.
    """

    rank: int = 8
    base: float = 0.0
    site: ClassVar[str] = "heads"

    @nn.compact
    def __call__(self, grid: Grid, num_prefix: int) -> list[GatedHeads]:
        """Returns the exponents of each layer."""
        if self.rank < 1:
            raise ValueError(f"position 'string_gate' needs rank >= 1, got {self.rank}")
        layers, zeros = self.num_layers, nn.initializers.zeros
        frequencies = self.param(
            "frequencies",
            lambda key: rotary.draw_mixed_frequencies(
                key, self.rank, len(grid), leading=(layers,), base=self.base
            ),
        )
        phases = self.param("phases", zeros, (layers, self.rank), jnp.float32)
        shape = (layers, 2, self.num_heads, 2 * self.rank, self.head_dim)
        exponents = gates.string_exponents(
            offsets.grid_positions(grid, num_prefix),
            frequencies[:, None, None],
            phases[:, None, None],
            self.param("coefficients", zeros, shape, jnp.float32),
            num_prefix=num_prefix,
        )
        return [GatedHeads(layer) for layer in exponents]

"""Slots of tokens on a grid, for kernels that read a bias of the offset by blocks."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array

from relattn.kernels.positions.bias import skew, unwrap_axes
from relattn.offsets import Grid, num_offsets, offsets_per_axis


@dataclasses.dataclass(frozen=True)
class Slots:
    """Where tokens stand, so that equally distant blocks have equal offsets.

    Slots are in rows, as the tokens of the grid are. Rows have empty slots at their
    ends, so that each is as long as several blocks, or several are as long as a block.
    Prefix tokens follow the last token of the grid.

    Attributes:
        grid: Height and width of the tokens after the prefix; a height of 1 for a line.
        num_prefix: Number of prefix tokens.
        block: Number of slots of a block, a power of two.
    """

    grid: tuple[int, int]
    num_prefix: int
    block: int

    @property
    def width(self) -> int:
        """Slots of a row."""
        height, width = self.grid
        if height == 1:
            return _round_up(width + self.num_prefix, self.block)
        if width <= self.block:
            return 2 ** (width - 1).bit_length()
        return _round_up(width, self.block)

    @property
    def first_prefix(self) -> int:
        """The slot of the first prefix token."""
        return (self.grid[0] - 1) * self.width + self.grid[1]

    @property
    def length(self) -> int:
        """Number of slots."""
        used = self.first_prefix + self.num_prefix
        return _round_up(used, max(self.block, self.width))

    @property
    def rows(self) -> int:
        """Rows of slots."""
        return self.length // self.width

    @property
    def num_offsets(self) -> int:
        """Number of offsets between slots, each a row of the table of slots."""
        return (2 * self.rows - 1) * (2 * self.width - 1)

    @property
    def blocks(self) -> tuple[int, int]:
        """Blocks along the rows and along the columns of slots."""
        across = max(1, self.width // self.block)
        return self.length // self.block // across, across

    @property
    def is_full(self) -> bool:
        """Whether no slot is empty."""
        return self.length == math.prod(self.grid) + self.num_prefix

    def place(self, x: Array, value: int = 0) -> Array:
        """Moves tokens [heads, n, width] to slots [heads, length, width]."""
        (height, width), prefix = self.grid, x[:, : self.num_prefix]
        if height > 1 and width < self.width:
            rows = x[:, self.num_prefix :].reshape(len(x), height, width, -1)
            rows = pad_axis(rows, (0, self.width - width), 2, value)
            tokens = rows.reshape(len(x), height * self.width, -1)
            x = tokens[:, : self.first_prefix]
        elif self.num_prefix:
            x = x[:, self.num_prefix :]
        if self.num_prefix:
            x = jnp.concatenate([x, prefix], axis=1)
        return pad_axis(x, (0, self.length - x.shape[1]), 1, value)

    def take(self, x: Array) -> Array:
        """Moves slots back to tokens, the inverse of `place`."""
        height, width = self.grid
        tokens = x[:, : height * self.width] if height > 1 else x[:, :width]
        if height > 1:
            tokens = tokens.reshape(len(x), height, self.width, -1)[:, :, :width]
            tokens = tokens.reshape(len(x), height * width, -1)
        prefix = x[:, self.first_prefix : self.first_prefix + self.num_prefix]
        return jnp.concatenate([prefix, tokens], axis=1) if self.num_prefix else tokens

    def place_table(self, table: Array, grid: Grid) -> Array:
        """Returns a table of the offsets of slots, [heads, num_offsets + prefix]."""
        heads, rows = len(table), num_offsets(grid)
        offsets = table[:, :rows].reshape(heads, *offsets_per_axis(grid))
        offsets = unwrap_axes(offsets, grid)
        offsets = offsets.reshape(heads, *(2 * size - 1 for size in self.grid))
        for axis, size in enumerate((self.rows, self.width)):
            missing = size - self.grid[axis]
            offsets = pad_axis(offsets, (missing, missing), 1 + axis)
        offsets = offsets.reshape(heads, self.num_offsets)
        return jnp.concatenate([offsets, table[:, rows:]], axis=1)

    def spread(self, offsets: Array, causal: bool) -> Array:
        """Copies offsets [heads, num_offsets] to all pairs of slots of two blocks.

        Returns:
            [heads, rows, columns, block, block] for the distances of blocks, of queries
            minus of keys, those that are not negative if causal.
        """
        (down, across), heads = self.blocks, len(offsets)
        wide = min(self.block, self.width)
        high = self.block // wide
        x = offsets.reshape(heads, 2 * self.rows - 1, 2 * self.width - 1)
        x = _spread_axis(x, wide)
        x = _spread_axis(jnp.moveaxis(x, 1, -1), high)
        # From [heads, columns, wide, wide, rows, high, high].
        x = x.transpose(0, 4, 1, 5, 2, 6, 3)
        x = x.reshape(heads, 2 * down - 1, 2 * across - 1, self.block, self.block)
        return x[:, :, across - 1 :] if causal else x


def _round_up(size, step):
    return -(-size // step) * step


def pad_axis(
    x: Array, widths: tuple[int, int], axis: int, value: int | float = 0.0
) -> Array:
    """Pads one axis of an array with a value."""
    if not any(widths):
        return x
    all_widths = [(0, 0)] * x.ndim
    all_widths[axis] = widths
    return jnp.pad(x, all_widths, constant_values=value)


def _spread_axis(x, size):
    """Maps offsets [..., 2 n size - 1] to [..., 2 n - 1, size, size].

    y_Dab = x_(D size + a - b), for the distances D = 1 - n .. n - 1 of blocks.
    """
    x = pad_axis(x, (0, 1), x.ndim - 1).reshape(*x.shape[:-1], -1, size)
    # The 2 size - 1 offsets of each distance.
    x = jnp.concatenate([x[..., :-1, :], x[..., 1:, :-1]], axis=-1)
    x = jnp.broadcast_to(x[..., None, :], (*x.shape[:-1], size, x.shape[-1]))
    return skew(x)

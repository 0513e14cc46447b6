"""Layouts of tokens and pairs by offset, and the loop over the offsets.

Loops run over the offsets of a bucket (`relattn.kernels.translution.schedule`). A step
slices the rectangles of tokens and the matrices of one offset.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from relattn.kernels.platform import first_carry
from relattn.kernels.translution.schedule import Plan, plan
from relattn.offsets import Grid, num_table_rows


class OffsetScan(NamedTuple):
    """Static sizes, the layouts of arrays that follow from them, and the loops.

    Attributes:
        grid: Size of each axis of the tokens after the prefix.
        num_prefix: Number of prefix tokens.
        causal: Whether to use the offsets 0, 1, ... only.
        num_heads: Number of heads.
        head_dim: Width of a projection's head.
        precision: Precision of the products.
        clip: Largest component of an offset with a row of its own, or None.
    """

    grid: Grid
    num_prefix: int
    causal: bool
    num_heads: int
    head_dim: int
    precision: jax.lax.PrecisionLike
    clip: int | None = None

    @property
    def plan(self) -> Plan:
        """Returns the buckets of the offsets with a row of their own."""
        return plan(self.grid, causal=self.causal, clip=self.clip)

    @property
    def num_offset_rows(self) -> int:
        """Number of rows of a table before those of prefix tokens."""
        return num_table_rows(self.grid, causal=self.causal, clip=self.clip)

    @property
    def is_far(self) -> np.ndarray:
        """Pairs of tokens at offsets without a row of their own, ``[n, n]``."""
        length = math.prod(self.grid)
        is_far = self.plan.slot_of_pair == len(self.plan.pair_of_slot)
        return np.pad(is_far.reshape(length, length), [(self.num_prefix, 0)] * 2)

    def to_grid(self, x: Array) -> Array:
        """Moves [batch n width] without its prefix to [*grid batch width].

        Zeros pad the axes of the grid; on a torus their own tokens do.
        """
        # One axis of tokens, the first, as the axes of the grid.
        x = jnp.moveaxis(x[:, self.num_prefix :], 1, 0)
        x = x.reshape(*self.plan.shape, *x.shape[1:])
        widths = [(0, size) for size in self.plan.padding] + [(0, 0)] * 2
        return jnp.pad(x, widths, mode="wrap" if self.plan.periodic else "constant")

    def from_grid(self, x: Array) -> Array:
        """Returns sums over a grid as [batch n width] without prefix.

        On a torus the sums of the tokens that pad it belong to their origins.
        """
        for axis, size in enumerate(self.plan.shape):
            tokens, padding = jnp.split(x, [size], axis)
            if self.plan.periodic:
                widths = [(0, 0)] * x.ndim
                widths[axis] = (0, 1)
                tokens = tokens + jnp.pad(padding, widths)
            x = tokens
        x = x.reshape(math.prod(self.plan.shape), *x.shape[-2:])
        return jnp.moveaxis(x, 0, 1)

    def to_slots(self, pairs: Array) -> list[Array]:
        """Moves [batch heads n n] without prefix to [offsets pairs heads] by bucket."""
        batch = pairs.shape[0]
        length = math.prod(self.grid)
        pairs = pairs.transpose(2, 3, 0, 1).reshape(length**2, batch * self.num_heads)
        # Slots without a pair read a zero.
        pairs = jnp.pad(pairs, [(0, 1), (0, 0)])
        slots = _take(pairs, self.plan.pair_of_slot)
        slots = slots.reshape(len(slots) * batch, self.num_heads)
        # The slots of each bucket: [offsets, pairs of an offset, heads].
        result, start = [], 0
        for bucket in self.plan.buckets:
            size = math.prod(bucket.shape) * batch
            stop = start + len(bucket.rows) * size
            shape = (len(bucket.rows), size, self.num_heads)
            result.append(slots[start:stop].reshape(shape))
            start = stop
        return result

    def from_slots(self, slots: list[Array], batch: int) -> Array:
        """Inverts `to_slots`."""
        joined = jnp.concatenate(
            [
                x.reshape(len(x) * math.prod(bucket.shape), batch * self.num_heads)
                for x, bucket in zip(slots, self.plan.buckets, strict=True)
            ]
        )
        # Pairs of later keys and of far offsets have no slot and read a zero.
        if self.causal or self.clip is not None:
            joined = jnp.pad(joined, [(0, 1), (0, 0)])
        pairs = _take(joined, self.plan.slot_of_pair)
        length = math.prod(self.plan.shape)
        pairs = pairs.reshape(length, length, batch, self.num_heads)
        return pairs.transpose(2, 3, 0, 1)

    def over_offsets(
        self, step: Callable, carry: Any, slots: Sequence[Array | None]
    ) -> tuple[Any, list[Any]]:
        """Scans over the offsets of all buckets.

        Args:
            step: Maps a carry, an offset's rows and corners (see `Bucket`), the shape
                of its rectangles and its slots to a carry and an output.
            carry: The first carry.
            slots: Result of `to_slots`, or a None for every bucket.

        Returns:
            The last carry, and the stacked outputs of each bucket.
        """
        results = []
        for bucket, slots_of_bucket in zip(self.plan.buckets, slots, strict=True):

            def body(carry, offset, shape=bucket.shape):
                return step(carry, *offset[:2], shape, offset[2])

            scanned = (bucket.rows, bucket.corners, slots_of_bucket)
            carry = first_carry(body, carry, scanned)
            carry, result = jax.lax.scan(body, carry, scanned)
            results.append(result)
        return carry, results


def rectangle(x: Array, corner: Array, shape: tuple[int, ...]) -> Array:
    """Slices the tokens of a rectangle, [tokens * batch, width]."""
    x = jax.lax.dynamic_slice(x, _start(corner), (*shape, *x.shape[-2:]))
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def add_rectangle(
    x: Array, corner: Array, shape: tuple[int, ...], tokens: Array
) -> Array:
    """Adds tokens to a rectangle of a grid, the transpose of `rectangle`."""
    old = jax.lax.dynamic_slice(x, _start(corner), (*shape, *x.shape[-2:]))
    new = old + tokens.reshape(old.shape).astype(x.dtype)
    return jax.lax.dynamic_update_slice(x, new, _start(corner))


def get_row(table: Array | None, index: Array) -> Array | None:
    """Returns the matrix [width, heads * head_dim] of a row, None without a table."""
    if table is None:
        return None
    row = jax.lax.dynamic_index_in_dim(table, index, keepdims=False)
    return row.reshape(len(row), -1)


def set_row(table: Array | None, index: Array, row: Array | None) -> Array | None:
    """Writes a row of a table, the inverse of `get_row`."""
    if table is None:
        return None
    assert row is not None
    row = row.reshape(table.shape[1:])
    return jax.lax.dynamic_update_index_in_dim(table, row, index, axis=0)


def _take(x, rows):
    return x.at[rows].get(mode="promise_in_bounds")


def _start(corner):
    """Returns the start of a slice; all indices must have the same dtype."""
    return (*corner, *jnp.zeros(2, corner.dtype))

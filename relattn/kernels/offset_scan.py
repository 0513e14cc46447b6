"""Loops over offsets that slice what one offset needs, and nothing larger."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from relattn.kernels.offset_buckets import Plan, plan
from relattn.offsets import Grid


class OffsetScan(NamedTuple):
    """What is known before any array, the layouts that follow, and the loops.

    Attributes:
        grid: Of the tokens after the prefix.
        num_prefix: Number of prefix tokens.
        causal: Whether only offsets 0, 1, ... are there.
        heads: Number of heads.
        depth: Width of a projection's head.
        precision: Of products.
    """

    grid: Grid
    num_prefix: int
    causal: bool
    heads: int
    depth: int
    precision: jax.lax.PrecisionLike

    @property
    def plan(self) -> Plan:
        """The buckets of the grid."""
        return plan(self.grid, causal=self.causal)

    def to_grid(self, x: Array) -> Array:
        """From [batch n width], its prefix left out, to [rows columns batch width].

        Zeros follow the grid's own rows and columns.
        """
        x = jnp.moveaxis(x[:, self.num_prefix :], 1, 0)
        x = x.reshape(*self.plan.shape, *x.shape[1:])
        return jnp.pad(x, [(0, size) for size in self.plan.padding] + [(0, 0)] * 2)

    def from_grid(self, x: Array) -> Array:
        """The inverse of `to_grid`: [batch n width] without prefix."""
        height, width = self.plan.shape
        x = x[:height, :width].reshape(height * width, *x.shape[2:])
        return jnp.moveaxis(x, 0, 1)

    def to_slots(self, pairs: Array) -> list[Array]:
        """From [batch heads n n] without prefix to [pairs heads] of every bucket."""
        batch = pairs.shape[0]
        length = math.prod(self.grid)
        pairs = pairs.transpose(2, 3, 0, 1).reshape(length**2, batch * self.heads)
        # Places in rectangles that are no pairs read a zero.
        pairs = jnp.pad(pairs, [(0, 1), (0, 0)])
        slots = _take(pairs, self.plan.pair_of_slot)
        slots = slots.reshape(len(slots) * batch, self.heads)
        result, start = [], 0
        for bucket in self.plan.buckets:
            size = math.prod(bucket.shape) * batch
            stop = start + len(bucket.rows) * size
            shape = (len(bucket.rows), size, self.heads)
            result.append(slots[start:stop].reshape(shape))
            start = stop
        return result

    def from_slots(self, slots: list[Array], batch: int) -> Array:
        """The inverse of `to_slots`."""
        slots = jnp.concatenate(
            [
                x.reshape(len(x) * math.prod(bucket.shape), batch * self.heads)
                for x, bucket in zip(slots, self.plan.buckets, strict=True)
            ]
        )
        if self.causal:
            slots = jnp.pad(slots, [(0, 1), (0, 0)])
        pairs = _take(slots, self.plan.slot_of_pair)
        length = math.prod(self.plan.shape)
        pairs = pairs.reshape(length, length, batch, self.heads)
        return pairs.transpose(2, 3, 0, 1)

    def over_offsets(
        self, step: Callable, carry: Any, slots: list[Array | None]
    ) -> tuple[Any, list[Any]]:
        """Scans over the offsets of all buckets.

        Args:
            step: From a carry, an offset's rows and corners (see `Bucket`), the shape
                of its rectangles and its slots to a carry and what is to be stacked.
            carry: The first carry.
            slots: From `to_slots`, or a None for every bucket.

        Returns:
            The last carry, and what the steps returned, bucket by bucket.
        """
        results = []
        for bucket, slots_of_bucket in zip(self.plan.buckets, slots, strict=True):

            def body(carry, offset, shape=bucket.shape):
                return step(carry, *offset[:2], shape, offset[2])

            scanned = (bucket.rows, bucket.corners, slots_of_bucket)
            carry, result = jax.lax.scan(body, carry, scanned)
            results.append(result)
        return carry, results


def _take(x, rows):
    return x.at[rows].get(mode="promise_in_bounds")


def rectangle(x: Array, corner: Array, shape: tuple[int, int]) -> Array:
    """Tokens [height * width * batch, width] of a grid, from a corner on."""
    x = jax.lax.dynamic_slice(x, _start(corner), (*shape, *x.shape[2:]))
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def add_rectangle(
    x: Array, corner: Array, shape: tuple[int, int], tokens: Array
) -> Array:
    """A grid after tokens were added to it, the inverse of `rectangle`."""
    old = jax.lax.dynamic_slice(x, _start(corner), (*shape, *x.shape[2:]))
    new = old + tokens.reshape(old.shape).astype(x.dtype)
    return jax.lax.dynamic_update_slice(x, new, _start(corner))


def _start(corner):
    """Where a rectangle starts; all indices must have one dtype."""
    return (*corner, *jnp.zeros(2, corner.dtype))


def get_row(table: Array | None, index: Array) -> Array | None:
    """The matrix [width, heads * depth] of a row, None of None."""
    if table is None:
        return None
    row = jax.lax.dynamic_index_in_dim(table, index, keepdims=False)
    return row.reshape(len(row), -1)


def set_row(table: Array | None, index: Array, row: Array | None) -> Array | None:
    """A table after a row was written, the inverse of `get_row`."""
    if table is None:
        return None
    row = row.reshape(table.shape[1:])
    return jax.lax.dynamic_update_index_in_dim(table, row, index, axis=0)

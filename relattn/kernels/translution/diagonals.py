"""Scores and values with a projection for every offset of a line, by diagonals.

For GPUs and causal attention: the pairs at an offset are a diagonal of all pairs. One
product projects all tokens by the matrices of a block of offsets, so that no matrix is
copied for a pair, and the gradient of a table is a product, too. Gathers map diagonals
``[n, offsets]`` to pairs ``[n, n]``, and gathers compute their derivatives: the
transpose of a gather would be a scatter.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jaxtyping import Array

from relattn.kernels.platform import first_carry
from relattn.kernels.precision import compute_dtype, widen

# Two groups save a quarter of the work, and four save three eighths. Each one takes
# launches, which only many bytes of projections are worth, and time to compile.
_GROUP_BYTES = 2**26
_MAX_GROUPS = 4


@dataclasses.dataclass(frozen=True)
class DiagonalBlocks:
    """Static sizes, and the loop over blocks of diagonals.

    Attributes:
        length: Number of tokens.
        num_heads: Number of heads.
        precision: Precision of the products.
        max_bytes: Largest number of bytes of a block's projections; a block has at
            least one diagonal.
    """

    length: int
    num_heads: int
    precision: jax.lax.PrecisionLike
    max_bytes: int

    def scores(self, q: Array, k: Array, t_q: Array | None, t_k: Array | None) -> Array:
        """Computes q_ij . k_ji of the pairs j <= i; see `RowLoop.scores`."""
        # What all blocks share is wide, since its gradient is their sum.
        wide_q, wide_k = widen(q), widen(k)

        def step(first, _, delays, t_q, t_k):
            # x_i Tq[d] and x_(i - d) Tk[d], [batch, query, offset, width]
            queries = wide_q[:, first:].astype(q.dtype)
            queries = self._project(queries, t_q)
            keys = wide_k[:, : self.length - first].astype(k.dtype)
            keys = _delay(self._project(keys, t_k), delays)
            # q_ij . k_ji
            products = self._split_heads(widen(queries) * widen(keys))
            return None, products.sum(axis=-1)

        groups = []
        for first, last, size in self._groups(q, t_q, t_k):
            blocks = self._to_blocks(first, last, size, t_q, t_k)
            _, scores = _scan(functools.partial(step, first), None, blocks)
            # From [block, batch, query, offset, heads].
            scores = scores.transpose(1, 4, 2, 0, 3)
            scores = scores.reshape(*scores.shape[:3], math.prod(scores.shape[3:]))
            scores = scores[..., : last - first]
            groups.append(jnp.pad(scores, [(0, 0), (0, 0), (first, 0), (0, 0)]))
        return _mirror(jnp.concatenate(groups, axis=-1))

    def values(self, weights: Array, v: Array, t_v: Array) -> Array:
        """Computes sum_j weights_ij v_j T[d]; see `RowLoop.values`.

        The weights are zeros for j > i.
        """
        wide = widen(v)
        # [offset, batch, query, heads]
        weights = _mirror(weights).transpose(3, 0, 2, 1)

        def step(first, out, delays, t_v, weights):
            # x_(i - d) T[d], [batch, query, offset, heads, head_dim]
            values = wide[:, : self.length - first].astype(v.dtype)
            values = _delay(self._project(values, t_v), delays)
            values = self._split_heads(widen(values))
            # sum_d weights_i(i - d) x_(i - d) T[d]
            weights = jnp.moveaxis(weights, 0, 2)[..., None]
            return out + (weights * values).sum(axis=2), None

        total: Any = 0.0
        for first, last, size in self._groups(v, t_v):
            of_group = weights[:, :, first:]
            blocks = self._to_blocks(first, last, size, t_v, of_group)
            shape = (v.shape[0], self.length - first, *t_v.shape[2:])
            out = jnp.zeros(shape, compute_dtype(weights, v, t_v))
            out, _ = _scan(functools.partial(step, first), out, blocks)
            total = total + jnp.pad(out, [(0, 0), (first, 0), (0, 0), (0, 0)])
        return total.reshape(*total.shape[:2], math.prod(t_v.shape[2:]))

    def _groups(
        self, tokens: Array, *tables: Array | None
    ) -> Iterator[tuple[int, int, int]]:
        """Yields a group's first offset, the one after its last, and its blocks' size.

        A group leaves out the tokens that have no pair at its first offset.
        """
        batch = 1 if is_symbolic_dim(tokens.shape[0]) else tokens.shape[0]
        bytes_of_pair = batch * sum(
            math.prod(table.shape[2:]) * table.dtype.itemsize
            for table in tables
            if table is not None
        )
        num = 1 + bytes_of_pair * self.length**2 // _GROUP_BYTES
        length = -(-self.length // min(num, _MAX_GROUPS))
        for first in range(0, self.length, length):
            last = min(first + length, self.length)
            bytes_of_offset = max(1, bytes_of_pair * (self.length - first))
            most = max(1, self.max_bytes // bytes_of_offset)
            yield first, last, -(-(last - first) // -(-(last - first) // most))

    def _to_blocks(self, first, last, size, *arrays):
        """Returns delays and arrays of the offsets first .. last - 1, by blocks."""
        num = -(-(last - first) // size)

        def split(x):
            missing = num * size - (last - first)
            x = jnp.pad(x[first:last], [(0, missing)] + [(0, 0)] * (x.ndim - 1))
            return x.reshape(num, size, *x.shape[1:])

        delays = jnp.arange(num * size).reshape(num, size)
        return delays, *(None if x is None else split(x) for x in arrays)

    def _project(self, tokens, table):
        """Projects tokens, [batch, n, offset, width], if a table is given."""
        if table is None:
            return tokens[:, :, None]
        table = table.reshape(*table.shape[:2], -1)
        return jnp.einsum("bnc,dcf->bndf", tokens, table, precision=self.precision)

    def _split_heads(self, x):
        return x.reshape(*x.shape[:-1], self.num_heads, x.shape[-1] // self.num_heads)


def _scan(step: Callable, carry: Any, blocks: Any) -> tuple[Any, Any]:
    """Scans over blocks; the backward pass computes their steps again."""
    if len(blocks[0]) == 1:
        step = jax.checkpoint(step)
        carry, out = step(carry, *jax.tree.map(lambda x: x[0], blocks))
        return carry, jax.tree.map(lambda x: x[None], out)
    step = jax.checkpoint(step, prevent_cse=False)

    def body(carry, block):
        return step(carry, *block)

    return jax.lax.scan(body, first_carry(body, carry, blocks), blocks)


def _delay_plainly(x: Array, delays: Array) -> Array:
    """Computes y_it = x_(i - delays_t)t, and zero without it.

    Args:
        x: ``[batch, n, offsets or 1, width]``.
        delays: ``[offsets]``.
    """
    x = jnp.broadcast_to(x, (*x.shape[:2], len(delays), x.shape[3]))
    n = x.shape[1]
    tokens = jnp.arange(n)[:, None] - delays
    inside = (tokens >= 0) & (tokens < n)
    tokens = jnp.where(inside, tokens, 0)
    y = x.at[:, tokens, jnp.arange(len(delays))].get(mode="promise_in_bounds")
    return jnp.where(inside[..., None], y, 0)


_delay = jax.custom_vjp(_delay_plainly)


def _delay_forward(x, delays):
    # The plain function: forward mode, as in `jax.hessian`, refuses the other.
    return _delay_plainly(x, delays), (delays, x.shape[2])


def _delay_backward(residuals, cotangent):
    delays, size = residuals
    gradient = _delay_plainly(cotangent, -delays)
    # An operand that is the same for all offsets gets the sum of their gradients.
    if size != len(delays):
        gradient = widen(gradient).sum(axis=2, keepdims=True).astype(cotangent.dtype)
    return gradient, None


_delay.defvjp(_delay_forward, _delay_backward)


def _mirror_plainly(x: Array) -> Array:
    """Computes y_ij = x_i(i - j), and zero for j > i: its own inverse and transpose."""
    queries = jnp.arange(x.shape[-1])[:, None]
    others = queries - jnp.arange(x.shape[-1])
    y = x.at[..., queries, jnp.maximum(others, 0)].get(mode="promise_in_bounds")
    return jnp.where(others >= 0, y, 0)


_mirror = jax.custom_vjp(_mirror_plainly)
_mirror.defvjp(
    lambda x: (_mirror_plainly(x), None),
    lambda _, cotangent: (_mirror_plainly(cotangent),),
)

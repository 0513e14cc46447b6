"""Softmax attention with a bias of the offset, whose scores never reach memory.

Kernels compute the scores of a block of queries and a block of keys, as in flash
attention: outputs online in the keys, with a running maximum of the scores, and in the
backward pass the scores again, once for the gradients of queries and once for those of
keys and values. The bias is gathered from its table in every block.

The table's gradient sums the scores' gradients of each offset. All pairs of blocks that
are equally far apart have the same offsets at the same places, so one program adds them
up, in the memory of one pair of blocks. XLA adds up the places of each offset.

Products of half-precision arrays are in half precision, with sums in float32, those of
float32 arrays in TF32 or as ``precision`` says.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float, Int

from relattn.kernels.masks import zero_masked
from relattn.kernels.pallas_gpu.products import (
    MAX_HEAD_DIM,
    MIN_EXPONENT,
    dot,
    kernel_dtype,
    power_of_2,
    precision_name,
)
from relattn.kernels.pallas_gpu.slots import Slots, pad_axis
from relattn.kernels.platform import has_program_per_device
from relattn.kernels.precision import compute_dtype, widen
from relattn.offsets import Grid, PrefixRow

# Largest number of tokens of a block, and of its bytes.
_BLOCK = 64
_BLOCK_BYTES = 2**14
# The segment of keys that do not exist.
_NO_SEGMENT = -1


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How kernels divide their work.

    Attributes:
        causal: Whether a token attends only to itself and earlier tokens.
        scale: Factor of the products of queries and keys.
        block: Number of tokens of a block.
        precision: A key of `products.ALGORITHMS`.
        slots: Where the tokens stand.
    """

    causal: bool
    scale: float
    block: int
    precision: str
    slots: Slots


def fits_gpu(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> bool:
    """Returns whether `attend_on_gpu` takes these arguments.

    It takes arrays of float32 or narrower and heads of at most 128 components. The
    compiler cannot divide a kernel: there must be one device, or each device its own
    program, as in `jax.pmap`.

    Args:
        q: Queries, shape ``[*batch, n, head_dim]``.
        k: Keys, shape ``[*batch, m, head_dim]``.
        v: Values, shape ``[*batch, m, value_dim]``.
        bias: A bias of the offset, shape ``[*batch, rows]``, or None.
        precision: Precision of the products of float32 arrays, TF32 by default.

    Returns:
        True if it does.
    """
    sizes = [size for x in (q, k, v) for size in x.shape]
    if any(map(is_symbolic_dim, sizes)) or not (q.size and k.size and v.size):
        return False
    arrays = [x for x in (q, k, v, bias) if x is not None]
    if compute_dtype(*arrays) != jnp.float32 or not has_program_per_device():
        return False
    if max(q.shape[-1], v.shape[-1]) > MAX_HEAD_DIM:
        return False
    return precision_name(precision) is not None


def attend_on_gpu(
    q: Float[Array, "*#batch n head_dim"],
    k: Float[Array, "*#batch m head_dim"],
    v: Float[Array, "*#batch m value_dim"],
    key_mask: Bool[Array, "*#batch m"] | None = None,
    segments: Int[Array, "*#batch n"] | None = None,
    bias: Float[Array, "*#batch rows"] | None = None,
    *,
    causal: bool,
    grid: Grid | None = None,
    num_prefix: int = 0,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch n value_dim"]:
    """Computes softmax attention with a bias of the offset, and its gradient.

    out_i = sum_j softmax_j(q_i . k_j / sqrt(head_dim) + b_d) v_j, d = p_i - p_j, over
    j <= i if it is causal.

    Args:
        q: Queries, shape ``[*batch, n, head_dim]``.
        k: Keys, shape ``[*batch, m, head_dim]``.
        v: Values, shape ``[*batch, m, value_dim]``.
        key_mask: True for keys that exist, shape ``[*batch, m]``.
        segments: Numbers from zero; tokens attend to those of the same number, shape
            ``[*batch, n]``; then m is n.
        bias: b, shape ``[*batch, rows]``, a row for each of
            `relattn.offsets.offset_index`; then m is n.
        causal: Whether a token attends only to itself and earlier tokens; then m is n.
        grid: Height and width, or length, of the tokens after the prefix; (n,) if it is
            causal.
        num_prefix: Number of prefix tokens.
        precision: Precision of the products of float32 arrays, TF32 by default.

    Returns:
        Shape ``[*batch, n, value_dim]``, in the dtype of ``v``. It has only first
        derivatives, in reverse mode.
    """
    # `fits_gpu` refuses what has no precision.
    dtype, name = v.dtype, cast(str, precision_name(precision))
    k, v, key_mask = zero_masked(k, v, key_mask)
    q, k, v = (x.astype(kernel_dtype(name, q, k, v)) for x in (q, k, v))
    per_token = [x for x in (key_mask, segments, bias) if x is not None]
    batch = jnp.broadcast_shapes(
        *(x.shape[:-2] for x in (q, k, v)), *(x.shape[:-1] for x in per_token)
    )
    (n, head_dim), (m, value_dim) = q.shape[-2:], v.shape[-2:]
    width = max(power_of_2(head_dim), power_of_2(value_dim))
    block = min(_BLOCK, _BLOCK_BYTES // (width * v.dtype.itemsize))
    block = min(block, power_of_2(max(n, m)))
    if bias is None or grid is None:
        slots, key_slots = (Slots((1, size), 0, block) for size in (n, m))
    else:
        shape = (grid[0], grid[1]) if len(grid) == 2 else (1, grid[0])
        slots = key_slots = Slots(shape, num_prefix, block)
    plan = _Plan(causal, head_dim**-0.5, block, name, slots)

    def flatten(x, axes):
        x = jnp.broadcast_to(x, (*batch, *x.shape[x.ndim - axes :]))
        return x.reshape(math.prod(batch), *x.shape[x.ndim - axes :])

    def place(x, slots):
        x = slots.place(flatten(x, 2))
        return pad_axis(x, (0, power_of_2(x.shape[-1]) - x.shape[-1]), 2)

    def place_segments(x, slots, value):
        return slots.place(x[..., None], value)[..., 0]

    # Keys that exist have the number of their segment, or zero.
    numbers = None if segments is None else flatten(segments.astype(jnp.int32), 1)
    key_numbers = np.zeros((1, m), np.int32) if numbers is None else numbers
    if key_mask is not None:
        exists = flatten(key_mask, 1)
        key_numbers = jnp.where(exists, key_numbers, _NO_SEGMENT)
    elif numbers is None and (causal or key_slots.is_full):
        # Causal queries do not see the empty slots after the last key.
        key_numbers = None
    if numbers is not None:
        numbers = place_segments(numbers, slots, 0)
    if key_numbers is not None:
        key_numbers = place_segments(jnp.asarray(key_numbers), key_slots, _NO_SEGMENT)
    table = None
    if bias is not None and grid is not None:
        table = slots.place_table(flatten(widen(bias), 1), grid)
    q, k, v = (place(x, at) for x, at in ((q, slots), (k, key_slots), (v, key_slots)))
    out: Any = _attend(q, k, v, table, numbers, key_numbers, plan)
    out = slots.take(out[..., :value_dim])
    return out.reshape(*batch, n, value_dim).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attend(q, k, v, table, segments, key_segments, plan):
    """Computes attention of arrays [heads, slots, width]."""
    return _attend_forward(q, k, v, table, segments, key_segments, plan)[0]


def _attend_forward(q, k, v, table, segments, key_segments, plan):
    inputs = {"q": q, "k": k, "v": v, "table": table}
    inputs |= {"segments": segments, "key_segments": key_segments}
    inputs = {name: x for name, x in inputs.items() if x is not None}
    out = _outputs(inputs, plan)
    return out["out"], (inputs, out)


def _attend_backward(plan, residuals, g):
    inputs, out = residuals
    # ds_ij = weight_ij (g_i . v_j - delta_i), delta_i = sum_j weight_ij g_i . v_j.
    delta = jnp.sum(g.astype(jnp.float32) * out["out"].astype(jnp.float32), axis=-1)
    saved = {"largest": out["largest"], "total": out["total"]}
    inputs = inputs | saved | {"g": g, "delta": delta}
    queries = _query_gradients(inputs, plan)
    keys = _key_gradients(inputs, plan)
    table = None
    if "table" in inputs:
        table = _table_gradient(inputs, queries, plan)
    return queries["q"], keys["k"], keys["v"], table, None, None


_attend.defvjp(_attend_forward, _attend_backward)

# What kernels read of queries and of keys.
_OF_QUERIES = ("q", "g", "largest", "total", "delta", "segments")
_OF_KEYS = ("k", "v", "key_segments")


def _load(refs: Any, names: tuple[str, ...], index: Any, plan: _Plan) -> dict[str, Any]:
    """Loads a block of queries or keys, and the places of its slots in the table."""
    rows = pl.ds(index * plan.block, plan.block)
    loaded: dict[str, Any] = {
        # A program's own block, or the block of all.
        name: refs[name][...] if refs[name].shape[0] == plan.block else refs[name][rows]
        for name in names
        if name in refs
    }
    slots = plan.slots
    slot = index * np.int32(plan.block) + jnp.arange(plan.block, dtype=jnp.int32)
    row = jax.lax.div(slot, jnp.full_like(slot, slots.width))
    loaded["slot"] = slot
    # A row of offsets has 2 width - 1 of them.
    loaded["place"] = slot + row * np.int32(slots.width - 1)
    last = slots.first_prefix + slots.num_prefix
    loaded["in_prefix"] = (slot >= slots.first_prefix) & (slot < last)
    return loaded


def _bias(
    refs: Any, queries: Any, keys: Any, plan: _Plan, of_prefix: bool = True
) -> Any:
    """Gathers the bias of a block of queries and a block of keys, if there is one.

    Without ``of_prefix``, that of pairs with a prefix token is any other.
    """
    if "table" not in refs:
        return None
    rows = plan.slots.num_offsets
    index = queries["place"][:, None] - keys["place"][None, :] + np.int32(rows // 2)
    if of_prefix and plan.slots.num_prefix:
        of_query, of_key = queries["in_prefix"][:, None], keys["in_prefix"][None, :]
        within, into, out = (
            np.int32(rows + row)
            for row in (PrefixRow.SELF, PrefixRow.IN, PrefixRow.OUT)
        )
        index = jnp.where(of_query, out, index)
        index = jnp.where(of_key, jnp.where(of_query, within, into), index)
    return refs["table"][index]


def _scores(
    queries: Any, keys: Any, bias: Any, plan: _Plan, diagonal: bool
) -> tuple[Any, Any]:
    """Returns the scores of a block of queries and one of keys, and which count.

    ``diagonal`` says that some keys of the block are later than some queries.
    """
    scores = dot(queries["q"], keys["k"].T, plan.precision) * np.float32(plan.scale)
    if bias is not None:
        scores = scores + bias
    allowed = None
    if "key_segments" in keys:
        of_queries = queries["segments"][:, None] if "segments" in queries else 0
        allowed = keys["key_segments"][None, :] == of_queries
    if diagonal:
        past = keys["slot"][None, :] <= queries["slot"][:, None]
        allowed = past if allowed is None else allowed & past
    if allowed is not None:
        allowed = jnp.broadcast_to(allowed, scores.shape)
        scores = jnp.where(allowed, scores, MIN_EXPONENT)
    return scores, allowed


def _exp(scores, largest, allowed):
    """Returns exp(scores - largest), at most one; see `guards.shifted_exp`."""
    weights = jnp.exp(jnp.minimum(scores - largest[:, None], 0.0))
    return weights if allowed is None else jnp.where(allowed, weights, 0.0)


def _outputs(inputs, plan):
    """Returns outputs, largest scores and sums of exponentials of queries."""
    (heads, n, _), (_, m, width) = inputs["q"].shape, inputs["v"].shape

    def kernel(refs, out, i):
        queries = _load(refs, _OF_QUERIES, i, plan)

        def step(j, carry, diagonal=False):
            numerator, total, largest = carry
            keys = _load(refs, _OF_KEYS, j, plan)
            bias = _bias(refs, queries, keys, plan)
            scores, allowed = _scores(queries, keys, bias, plan, diagonal)
            # Sums so far move to the new running maximum of the scores.
            before, largest = largest, jnp.maximum(largest, jnp.max(scores, axis=1))
            decay = jnp.exp(before - largest)
            weights = _exp(scores, largest, allowed)
            # total_i += sum_j weight_ij, numerator_i += sum_j weight_ij v_j
            total = total * decay + jnp.sum(weights, axis=1)
            product = dot(weights.astype(keys["v"].dtype), keys["v"], plan.precision)
            return numerator * decay[:, None] + product, total, largest

        carry = (
            jnp.zeros((plan.block, width), jnp.float32),
            jnp.zeros((plan.block,), jnp.float32),
            jnp.full((plan.block,), MIN_EXPONENT, jnp.float32),
        )
        blocks = i if plan.causal else m // plan.block
        carry = jax.lax.fori_loop(0, blocks, step, carry)
        if plan.causal:
            carry = step(i, carry, diagonal=True)
        numerator, total, largest = carry
        # A query without keys gives zeros.
        total = jnp.where(total > 0, total, 1.0)
        out["out"][...] = (numerator / total[:, None]).astype(inputs["v"].dtype)
        out["largest"][...], out["total"][...] = largest, total

    shapes = {"out": (heads, n, width), "largest": (heads, n), "total": (heads, n)}
    return _call(kernel, inputs, shapes, _OF_QUERIES, plan)


def _score_gradients(
    queries: Any, keys: Any, bias: Any, plan: _Plan, diagonal: bool
) -> tuple[Any, Any]:
    """Returns the weights of a block of queries and one of keys, and ds_ij."""
    scores, allowed = _scores(queries, keys, bias, plan, diagonal)
    weights = _exp(scores, queries["largest"], allowed)
    weights = weights * (1.0 / queries["total"])[:, None]
    products = dot(queries["g"], keys["v"].T, plan.precision)
    return weights, weights * (products - queries["delta"][:, None])


def _query_gradients(inputs, plan):
    """Returns the gradient of queries, and the sums of ds_ij over prefix keys."""
    (heads, n, width), m = inputs["q"].shape, inputs["k"].shape[1]
    has_prefix = "table" in inputs and plan.slots.num_prefix > 0

    def kernel(refs, out, i):
        queries = _load(refs, _OF_QUERIES, i, plan)

        def step(j, carry, diagonal=False):
            gradient, into = carry
            keys = _load(refs, _OF_KEYS, j, plan)
            bias = _bias(refs, queries, keys, plan)
            _, of_scores = _score_gradients(queries, keys, bias, plan, diagonal)
            if has_prefix:
                of_prefix = jnp.where(keys["in_prefix"][None, :], of_scores, 0.0)
                into = into + jnp.sum(of_prefix, axis=1)
            # dq_i = sum_j ds_ij k_j / sqrt(head_dim)
            product = dot(of_scores.astype(keys["k"].dtype), keys["k"], plan.precision)
            return gradient + product, into

        carry = (
            jnp.zeros((plan.block, width), jnp.float32),
            jnp.zeros((plan.block,) if has_prefix else (), jnp.float32),
        )
        blocks = i if plan.causal else m // plan.block
        carry = jax.lax.fori_loop(0, blocks, step, carry)
        if plan.causal:
            carry = step(i, carry, diagonal=True)
        gradient, into = carry
        gradient = gradient * np.float32(plan.scale)
        out["q"][...] = gradient.astype(inputs["q"].dtype)
        if has_prefix:
            out["into"][...] = into

    shapes = {"q": (heads, n, width)} | ({"into": (heads, n)} if has_prefix else {})
    return _call(kernel, inputs, shapes, _OF_QUERIES, plan)


def _key_gradients(inputs, plan):
    """Returns the gradients of keys and values."""
    n = inputs["q"].shape[1]

    def kernel(refs, out, j):
        keys = _load(refs, _OF_KEYS, j, plan)

        def step(i, carry, diagonal=False):
            of_keys, of_values = carry
            queries = _load(refs, _OF_QUERIES, i, plan)
            bias = _bias(refs, queries, keys, plan)
            weights, of_scores = _score_gradients(queries, keys, bias, plan, diagonal)
            # dv_j = sum_i weight_ij g_i, dk_j = sum_i ds_ij q_i / sqrt(head_dim)
            weights, of_scores = (
                x.astype(queries["q"].dtype).T for x in (weights, of_scores)
            )
            of_values = of_values + dot(weights, queries["g"], plan.precision)
            return of_keys + dot(of_scores, queries["q"], plan.precision), of_values

        carry = tuple(jnp.zeros(keys[x].shape, jnp.float32) for x in ("k", "v"))
        first = 0
        if plan.causal:
            carry, first = step(j, carry, diagonal=True), j + 1
        of_keys, of_values = jax.lax.fori_loop(first, n // plan.block, step, carry)
        of_keys = of_keys * np.float32(plan.scale)
        out["k"][...] = of_keys.astype(inputs["k"].dtype)
        out["v"][...] = of_values.astype(inputs["v"].dtype)

    shapes = {"k": inputs["k"].shape, "v": inputs["v"].shape}
    return _call(kernel, inputs, shapes, _OF_KEYS, plan)


def _table_gradient(inputs, queries, plan):
    """Returns the gradient of the table of slots."""
    slots, block = plan.slots, plan.block
    heads = len(inputs["table"])
    down, across = slots.blocks
    distances = (2 * down - 1, across if plan.causal else 2 * across - 1)

    def kernel(refs, out, distance):
        # How many blocks queries are below and right of the keys.
        columns = np.int32(distances[1])
        row = jax.lax.div(distance, columns) - np.int32(down - 1)
        column = jax.lax.rem(distance, columns)
        if not plan.causal:
            column = column - np.int32(across - 1)
        first_row, first_column = jnp.maximum(row, 0), jnp.maximum(column, 0)
        num_rows, num_columns = down - abs(row), across - abs(column)

        def blocks(index):
            i_row = first_row + jax.lax.div(index, num_columns)
            i_column = first_column + jax.lax.rem(index, num_columns)
            j_row, j_column = i_row - row, i_column - column
            return i_row * across + i_column, j_row * across + j_column

        def load(index):
            i, j = blocks(index)
            return _load(refs, _OF_QUERIES, i, plan), _load(refs, _OF_KEYS, j, plan)

        # All pairs of these blocks have the same offsets, and so the same biases.
        first = load(jnp.int32(0))
        bias = _bias(refs, *first, plan, of_prefix=False)

        def step(index, total):
            tokens, keys = load(index)
            _, of_scores = _score_gradients(tokens, keys, bias, plan, diagonal=False)
            if slots.num_prefix:
                of_prefix = tokens["in_prefix"][:, None] | keys["in_prefix"][None, :]
                of_scores = jnp.where(of_prefix, 0.0, of_scores)
            return total + of_scores

        total = jnp.zeros((block, block), jnp.float32)
        total = jax.lax.fori_loop(0, num_rows * num_columns, step, total)
        if plan.causal:
            tokens, keys = first
            past = keys["slot"][None, :] <= tokens["slot"][:, None]
            total = jnp.where(past, total, 0.0)
        out["pairs"][...] = total

    shape = (heads, math.prod(distances), block, block)
    pairs = _call(kernel, inputs, {"pairs": shape}, (), plan)["pairs"]
    # The sum over the places of each offset: the transpose of copies to them.
    pairs = pairs.reshape(heads, *distances, block, block)
    spread = functools.partial(slots.spread, causal=plan.causal)
    like = jax.ShapeDtypeStruct((heads, slots.num_offsets), jnp.float32)
    (gradient,) = jax.linear_transpose(spread, like)(pairs)
    if not slots.num_prefix:
        return gradient
    # A query's ds_ij add up to zero, also over the prefix and the grid.
    into, first = queries["into"], slots.first_prefix
    within = into[:, first : first + slots.num_prefix].sum(axis=1)
    rows = {
        PrefixRow.IN: into[:, :first].sum(axis=1),
        PrefixRow.SELF: within,
        PrefixRow.OUT: -within,
    }
    return jnp.concatenate([gradient, jnp.stack([rows[x] for x in PrefixRow], 1)], 1)


def _call(kernel, inputs, shapes, own, plan):
    """Calls a kernel for every head, and for every block of queries, keys or pairs.

    Args:
        kernel: A function of references to inputs and outputs, and of the block.
        inputs: Arrays by name, of heads or for all of them.
        shapes: Shapes of outputs by name; those of tokens have the dtype of the tokens,
            others are float32.
        own: Names of the inputs that a program gets as its own block; it gets the
            others whole.
        plan: The plan.

    Returns:
        Outputs by name.
    """
    heads, length, *_ = next(iter(shapes.values()))
    # Outputs of tokens are blocks of slots, those of pairs an entry each.
    per_token = "pairs" not in shapes
    blocks = length // plan.block if per_token else length

    def spec(x, of_block):
        size = plan.block if per_token else None
        shape = (None, size, *x.shape[2:]) if of_block else (None, *x.shape[1:])

        def index(program):
            # One axis, so that two `jax.vmap` can add theirs to the three of a GPU.
            head = jax.lax.div(program, np.int32(blocks))
            rest = jax.lax.rem(program, np.int32(blocks)) if of_block else 0
            return (0 if len(x) == 1 else head, rest, *(0,) * (x.ndim - 2))

        return pl.BlockSpec(shape, index)

    def run(refs, out):
        kernel(refs, out, jax.lax.rem(pl.program_id(0), np.int32(blocks)))

    tokens = ("out", "q", "k", "v")
    outputs = {
        name: jax.ShapeDtypeStruct(
            shape, inputs["q"].dtype if name in tokens else jnp.float32
        )
        for name, shape in shapes.items()
    }
    width = max(inputs[x].shape[-1] for x in ("q", "v"))
    return pl.pallas_call(
        run,
        grid=(heads * blocks,),
        in_specs=[{name: spec(x, name in own) for name, x in inputs.items()}],
        out_specs={name: spec(x, of_block=True) for name, x in outputs.items()},
        out_shape=outputs,
        compiler_params=triton.CompilerParams(
            num_warps=8 if width > _BLOCK else 4, num_stages=2
        ),
    )(inputs)

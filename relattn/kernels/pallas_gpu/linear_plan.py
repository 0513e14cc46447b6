"""How the kernels of linear attention divide their work: arrays, parts and calls.

A sequence is divided into stretches, these into chunks, and features into blocks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array

from relattn.kernels.pallas_gpu.features import BlockMap

# The arrays of kernels with their axes: heads, stretches, tokens, features, and "d",
# the components of tokens or sums. In comments, i is a query, j a key, f a feature.
AXES = {
    "q": "hnd",
    "k": "hnd",
    "v": "hnd",
    "out": "hnd",
    # g_i, the cotangent of out_i.
    "g": "hnd",
    # total_i, the denominator of out_i, and its cotangent times total_i, -g_i . out_i.
    "total": "hn",
    "g1": "hn",
    # r_i, the largest exponent of a query, if features are exponentials.
    "largest": "hn",
    # Where weights may be negative: 0 if total_i is a guard, otherwise 1.
    "unguarded": "hn",
    # The largest magnitude of the components of g_i.
    "largest_g": "hn",
    # What cotangents of a head are multiplied by, see `cotangent_scale`.
    "scale": "h",
    # See `relattn.kernels.pallas_gpu.token_weights`.
    "key_exponents": "hn",
    "query_exponents": "hn",
    "sequences": "hn",
    # Arrays whose sum is W^T / head_dim^(1/4), and the biases of `BlockMap`.
    "ws": "df",
    "key_bias": "hf",
    "query_bias": "hf",
    # S and z, or their cotangents dS and dz.
    "sums": "hsfd",
    "totals": "hsf",
    # sum_j |phi(k_j)_f| where features may be negative.
    "magnitudes": "hsf",
    # c_f, the largest exponent of the keys of a stretch.
    "largest_keys": "hsf",
    # Gradients of W^T / head_dim^(1/4) and of the biases.
    "w": "hsdf",
    "b": "hsf",
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """How kernels divide their work.

    Attributes:
        causal: Whether a token attends only to itself and earlier tokens.
        head_dim: Width of the heads before they are padded.
        chunk: Number of tokens of a chunk.
        query_stretch: Number of queries of a stretch.
        key_stretch: Number of keys of a stretch; that of queries if causal.
        step: Number of tokens that a program adds to sums at a time.
        block: Number of features of a block.
        num_warps: Number of warps of a program.
        precision: A key of `products.ALGORITHMS`.
        block_map: The feature map.
    """

    causal: bool
    head_dim: int
    chunk: int
    query_stretch: int
    key_stretch: int
    step: int
    block: int
    num_warps: int
    precision: str
    block_map: BlockMap


def call_kernel(
    kernel: Callable,
    grid: tuple[int, ...],
    size: int,
    inputs: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    plan: Plan,
) -> dict[str, Array]:
    """Calls a kernel for heads, parts of ``size`` tokens and blocks of features.

    Parts are stretches or chunks. The program of a chunk gets the inputs of the whole
    stretch if it is causal. Without blocks of features in the grid, a program gets all
    of them.

    Args:
        kernel: A function of references to inputs and outputs, and of the place of the
            program's part in its stretch.
        grid: Number of heads, of parts, and perhaps of blocks of features.
        size: Number of tokens of a part.
        inputs: Arrays by name, see `AXES`.
        shapes: Shapes of outputs by name. Those of tokens have the dtype of the
            inputs' tokens, others are float32.
        plan: The plan.

    Returns:
        Outputs by name.
    """
    # One axis, so that two `jax.vmap` can add theirs to the three of a GPU.
    blocks, parts = math.prod(grid[2:]), grid[1]
    stretch = plan.key_stretch if plan.causal else size

    def part(program):
        return jax.lax.rem(jax.lax.div(program, np.int32(blocks)), np.int32(parts))

    def index(axes, shape, length, program):
        place = jax.lax.div(part(program), np.int32(length // size))
        places = {
            "h": jax.lax.div(program, np.int32(blocks * parts)),
            "s": place,
            "n": place,
            "f": jax.lax.rem(program, np.int32(blocks)),
        }
        return tuple(
            0 if x == 1 else places.get(axis, 0)
            for axis, x in zip(axes, shape, strict=True)
        )

    def spec(axes, length, x):
        sizes = {"h": None, "s": None, "n": length}
        if grid[2:]:
            sizes["f"] = plan.block
        block = [sizes.get(axis, x) for axis, x in zip(axes, x.shape, strict=True)]
        return pl.BlockSpec(block, functools.partial(index, axes, x.shape, length))

    def specs(arrays, length):
        return {
            name: jax.tree.map(functools.partial(spec, AXES[name], length), x)
            for name, x in arrays.items()
        }

    def run(refs, out):
        place = 0
        if stretch > size:
            place = jax.lax.rem(part(pl.program_id(0)), np.int32(stretch // size))
        kernel(refs, out, place)

    tokens = inputs["ws"][0].dtype
    out_shape = {
        name: jax.ShapeDtypeStruct(
            shape, tokens if AXES[name] == "hnd" else jnp.float32
        )
        for name, shape in shapes.items()
    }
    return pl.pallas_call(
        run,
        grid=(math.prod(grid),),
        in_specs=[specs(inputs, stretch)],
        out_specs=specs(out_shape, size),
        out_shape=out_shape,
        compiler_params=triton.CompilerParams(num_warps=plan.num_warps, num_stages=2),
    )(inputs)

"""Translution: the naive reference, masks, subsets, prefix tokens and errors."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import kernels, offsets
from tests import compare, reference

DIM, HEADS, DEPTH = 5, 2, 3
GRIDS = [
    ((3, 5), 0, True),
    ((3, 5), 1, False),
    ((5, 2), 2, True),
    ((1, 3), 1, True),
    ((5,), 0, False),
    ((1, 1), 1, False),
]


def _random(seed, *shape):
    generator = np.random.default_rng(seed)
    return jnp.asarray(generator.standard_normal(shape), jnp.float32)


def _inputs(length, rows, relative="qkv"):
    """Tokens and weights with a leading axis of one."""
    weights = [
        _random(1 + seed, 1, *([rows] if name in relative else []), DIM, HEADS, DEPTH)
        for seed, name in enumerate("qkv")
    ]
    return [_random(0, 1, length, DIM), *weights]


def _allowed(length, masked, causal=False):
    mask = np.arange(length) % 4 != 2 if masked else np.ones(length, bool)
    allowed = np.broadcast_to(mask, (length, length))
    return mask, np.tril(allowed) if causal else allowed


def _expect_equal(kernel, inputs, rows, masked, causal=False):
    mask, allowed = _allowed(inputs[0].shape[1], masked, causal)
    kernel = functools.partial(kernel, key_mask=jnp.asarray(mask) if masked else None)
    naive = functools.partial(reference.translution, rows=rows, allowed=allowed)
    compare.expect_equal(jax.vmap(kernel), naive, inputs)


@pytest.mark.parametrize(("grid", "num_prefix", "masked"), GRIDS)
def test_values_and_gradients_equal_the_reference(grid, num_prefix, masked):
    length = num_prefix + math.prod(grid)
    inputs = _inputs(length, offsets.num_table_rows(grid, num_prefix))
    kernel = functools.partial(kernels.translution, grid=grid, num_prefix=num_prefix)
    _expect_equal(kernel, inputs, reference.offset_rows(grid, num_prefix), masked)


@pytest.mark.parametrize("relative", ["", "q", "k", "v", "qk"])
def test_projections_that_do_not_depend_on_the_offset(relative):
    inputs = _inputs(7, offsets.num_table_rows((3, 2), 1), relative)
    kernel = functools.partial(kernels.translution, grid=(3, 2), num_prefix=1)
    _expect_equal(kernel, inputs, reference.offset_rows((3, 2), 1), masked=True)


@pytest.mark.parametrize(
    ("length", "relative"), [(2, "qkv"), (11, "qkv"), (5, "q"), (5, "kv")]
)
def test_causal_values_and_gradients_equal_the_reference(length, relative):
    # Two rows more than tokens: a shorter sequence than the model's.
    inputs = _inputs(length, length + 2, relative)
    rows = reference.offset_rows((length,), causal=True)
    _expect_equal(kernels.causal_translution, inputs, rows, length > 3, causal=True)

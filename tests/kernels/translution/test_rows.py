"""Tests the loop over rows of queries, which accelerators use."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from relattn import kernels
from relattn.kernels import platform
from relattn.offsets import Torus
from tests import reference
from tests.helpers import compare

DIM, HEADS, HEAD_DIM = 5, 2, 3


@pytest.fixture(params=[2, 3], ids=["aligned_projections", "aligned_matrices"])
def batch(request, monkeypatch):
    """Number of sequences, which decides what is aligned."""
    defaults = platform.PLATFORM_DEFAULTS
    rows = dataclasses.replace(defaults["cpu"], translution_by_rows=True)
    monkeypatch.setitem(defaults, "cpu", rows)
    return request.param


def expect_reference(index, num_rows, batch, relative="qkv"):
    generator = np.random.default_rng(0)
    shapes = [(batch, index.length, DIM)]
    for name in "qkv":
        rows = [num_rows] if name in relative else []
        shapes.append((*rows, DIM, HEADS, HEAD_DIM))
    inputs = [np.float32(generator.standard_normal((1, *shape))) for shape in shapes]
    grid, prefix, causal = index.grid, index.num_prefix, index.causal
    allowed = np.ones((index.length, index.length), bool)
    allowed = np.tril(allowed) if causal else allowed
    rows = reference.offset_rows(grid, prefix, causal)

    def naive(x, *tables):
        return jax.vmap(lambda x: reference.translution(x, *tables, rows, allowed))(x)

    kernel = functools.partial(kernels.translution, index=index)
    compare.expect_equal(jax.vmap(kernel), naive, inputs)


@pytest.mark.quick(
    "aligned_projections-Offsets(grid=(7,), num_prefix=1)",
    "aligned_matrices-Offsets(grid=Torus((2, 3)), num_prefix=1)",
)
@pytest.mark.parametrize(
    "index",
    [
        kernels.Offsets((3, 4)),
        kernels.Offsets((5, 1), num_prefix=2),
        kernels.Offsets((7,), num_prefix=1),
        kernels.Offsets(Torus((2, 3)), num_prefix=1),
        kernels.Offsets(Torus((5,))),
    ],
    ids=str,
)
def test_values_and_gradients_equal_the_reference(index, batch):
    expect_reference(index, index.rows, batch)


def test_causal_values_and_gradients_equal_the_reference(batch):
    # Tables have two more rows than there are tokens.
    expect_reference(kernels.CausalOffsets(7), 9, batch)


@pytest.mark.quick("aligned_projections-q")
@pytest.mark.parametrize("relative", ["q", "kv"])
def test_projections_that_do_not_depend_on_the_offset(relative, batch):
    expect_reference(kernels.Offsets((3, 2), 1), 18, batch, relative)

"""Tests relative attention: grids, prefix tokens, decoding, memory and errors."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import kernels, offsets
from relattn.kernels.platform import use_platform
from relattn.offsets import Torus
from tests import reference
from tests.helpers import compare
from tests.helpers.quick import normal, quick_jit

HEAD_DIM, VALUE_DIM = 5, 3
# Grid, number of prefix tokens, and whether the tables have rows for them.
GRIDS = [((3, 4), 0, False), ((2, 5), 2, True), ((5,), 1, False), ((1, 1), 1, True)]
GRIDS += [((2, 1), 4, True), (Torus((5, 2)), 1, True), (Torus((3,)), 0, False)]
GRIDS += [((3, 2, 5), 1, True), (Torus((2, 3, 5)), 0, False)]


def _inputs(length, rows):
    return [
        normal(0, 1, length, HEAD_DIM, scale=0.7),
        normal(1, 1, length, HEAD_DIM, scale=0.7),
        normal(2, 1, length, VALUE_DIM, scale=0.7),
        normal(3, 1, rows, HEAD_DIM, scale=0.7),
        normal(4, 1, rows, VALUE_DIM, scale=0.7),
        normal(5, 1, rows, scale=0.7),
    ]


@pytest.mark.quick("blocks-grid1-2-True", "dense-grid1-2-True")
@pytest.mark.usefixtures("form")
@pytest.mark.parametrize(("grid", "num_prefix", "prefix_rows"), GRIDS)
def test_matches_reference_on_every_grid(grid, num_prefix, prefix_rows):
    length = num_prefix + math.prod(grid)
    rows = offsets.num_table_rows(grid, num_prefix if prefix_rows else 0)

    def kernel(q, k, v, key_table, value_table, bias):
        return kernels.relative_attention(
            q,
            k,
            v,
            grid=grid,
            num_prefix=num_prefix,
            key_table=key_table,
            value_table=value_table,
            bias=bias,
        )

    naive = functools.partial(
        reference.relative_attention,
        allowed=np.ones((length, length), bool),
        rows=reference.offset_rows(grid, num_prefix)[0],
    )
    compare.expect_equal(jax.vmap(kernel), naive, _inputs(length, rows))


@pytest.mark.quick("blocks-True")
@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("causal", [False, True])
def test_masked_pairs_match_the_reference(causal):
    length, rows = 7, 13
    mask = np.random.default_rng(6).random((length, length)) < 0.6
    mask[3] = False
    # An id that comes back starts a new segment.
    masks = {"mask": mask, "segment_ids": jnp.array([3, 3, 3, 8, 8, 3, 3])}
    runs = np.array([0, 0, 0, 1, 1, 2, 2])

    def kernel(q, k, v, key_table, value_table, bias):
        tables = {"key_table": key_table, "value_table": value_table, "bias": bias}
        if causal:
            return kernels.causal_relative_attention(q, k, v, **masks, **tables)
        return kernels.relative_attention(q, k, v, grid=(length,), **masks, **tables)

    mask = mask & (runs[:, None] == runs)

    naive = functools.partial(
        reference.relative_attention,
        allowed=np.tril(mask) if causal else mask,
        rows=reference.offset_rows((length,))[0],
    )
    compare.expect_equal(jax.vmap(kernel), naive, _inputs(length, rows))


@pytest.mark.quick("key_table")
@pytest.mark.parametrize("name", ["key_table", "value_table", "bias"])
def test_single_table_matches_reference(name):
    q, k, v, *tables = _inputs(7, 13)
    table = dict(zip(["key_table", "value_table", "bias"], tables, strict=True))[name]
    plain = np.asarray(quick_jit(kernels.causal_softmax_attention)(q, k, v))
    attend = quick_jit(kernels.causal_relative_attention)
    np.testing.assert_allclose(attend(q, k, v, **{name: 0 * table}), plain, atol=1e-6)
    out = np.asarray(attend(q, k, v, **{name: table}))
    assert not np.allclose(out[:, 1:], plain[:, 1:], atol=1e-2)
    naive = quick_jit(
        reference.relative_attention,
        allowed=np.tril(np.ones((7, 7), bool)),
        rows=reference.offset_rows((7,))[0],
    )
    expected = naive(q[0], k[0], v[0], **{name: table[0]})
    np.testing.assert_allclose(out[0], expected, atol=1e-5)


@pytest.mark.slow
def test_sequence_may_be_shorter_than_tables():
    q, k, v, *tables = _inputs(7, 13)
    names = ["key_table", "value_table", "bias"]
    tables = dict(zip(names, tables, strict=True))
    attend = quick_jit(kernels.causal_relative_attention)
    whole = np.asarray(attend(q, k, v, **tables))
    part = attend(*(x[:, :4] for x in (q, k, v)), **tables)
    np.testing.assert_allclose(part, whole[:, :4], atol=1e-6)


def test_decoding_matches_causal_attention():
    q, k, v, *tables = _inputs(7, 13)
    tables = dict(zip(["key_table", "value_table", "bias"], tables, strict=True))

    @jax.jit
    def step(index):
        future = jnp.arange(7)[:, None] > index
        q_i = jax.lax.dynamic_index_in_dim(q, index, axis=1, keepdims=False)
        # Later entries of the cache must have no effect.
        seen = (jnp.where(future, 1e3, x) for x in (k, v))
        return kernels.causal_relative_attention_step(q_i, *seen, index=index, **tables)

    outs = np.stack([step(i) for i in range(7)], axis=1)
    expected = quick_jit(kernels.causal_relative_attention)(q, k, v, **tables)
    np.testing.assert_allclose(outs, expected, atol=1e-6)


def test_memory_has_no_vector_per_pair():
    side, head_dim = 8, 64

    def loss(q, key_table, value_table):
        return kernels.relative_attention(
            q, q, q, grid=(side, side), key_table=key_table, value_table=value_table
        ).sum()

    n, rows = side**2, (2 * side - 1) ** 2
    shapes = [(n, head_dim), (rows, head_dim), (rows, head_dim)]
    compiled = (
        jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
        .lower(*[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes])
        .compile()
    )
    used = compiled.memory_analysis().temp_size_in_bytes
    assert used < n * n * head_dim * 4


@pytest.mark.parametrize(
    ("grid", "line"), [((1, 64), (64,)), (Torus((1, 64, 1)), Torus((64,)))]
)
def test_axes_of_one_token_take_no_time_or_memory(grid, line):
    """A block of queries would otherwise be a row of the grid: all tokens."""
    x, rows = jnp.ones((64, HEAD_DIM)), offsets.num_offsets(line)

    def programs(grid):
        def attend(x, bias):
            banded = kernels.banded_attention(x, x, x[:5], jnp.exp, grid=grid)
            relative = kernels.relative_attention(x, x, x, bias=bias, grid=grid)
            options = {"grid": grid, "chunk_size": 4}
            toeplitz = kernels.toeplitz_linear_attention(
                x, x, x, jnp.exp, bias, **options
            )
            return banded, relative, toeplitz

        with use_platform("cpu", block_scores=256):
            return str(jax.make_jaxpr(attend)(x, jnp.ones(rows)))

    address = re.compile("0x[0-9a-f]+")
    assert address.sub("", programs(grid)) == address.sub("", programs(line))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x: kernels.relative_attention(x, x, x, grid=(2, 3)),
            "grid 2x3 with num_prefix=0 holds 6 tokens, got 7",
        ),
        (
            lambda x: kernels.relative_attention(
                x, x, x, grid=(2, 3), num_prefix=1, key_table=x
            ),
            "key_table needs 15 rows, one for each offset, or 18 with .*got 7",
        ),
        (
            lambda x: kernels.causal_relative_attention(x, x, x, bias=np.ones(11)),
            "bias needs an odd number of rows, at least 13 for a sequence of 7",
        ),
        (
            lambda x: kernels.causal_relative_attention(x, x, x, bias=np.ones(14)),
            "bias needs an odd number of rows",
        ),
        (
            lambda x: kernels.causal_relative_attention_step(
                x[0], x, x, index=0, value_table=x
            ),
            "value_table needs 13 rows, one for each offset, got 7",
        ),
        (
            lambda x: kernels.causal_relative_attention_step(x[0], x, x, index=-1),
            "index=-1 must be the position of a token, 0 .. inf",
        ),
    ],
)
def test_arguments_that_do_not_fit_raise(call, message):
    with pytest.raises(ValueError, match=message):
        call(np.ones((7, HEAD_DIM)))

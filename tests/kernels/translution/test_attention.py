"""Tests Translution: reference, masks, subsets, prefix tokens and errors."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import kernels, offsets
from tests import reference
from tests.helpers import compare
from tests.helpers.export import unchecked_annotations
from tests.helpers.quick import normal, quick_jit

DIM, HEADS, HEAD_DIM = 5, 2, 3
# Small grids, for speed; tests/test_contracts.py has grids of several buckets.
GRIDS = [((3, 2), 0, True), ((2, 3), 2, False), ((3,), 1, True), ((1, 1), 1, False)]
GRIDS += [((2, 3, 5), 1, True)]


def _inputs(length, rows, relative="qkv"):
    """Returns tokens and weights with a leading axis of one."""
    weights = [
        normal(1 + seed, 1, *([rows] if name in relative else []), DIM, HEADS, HEAD_DIM)
        for seed, name in enumerate("qkv")
    ]
    return [normal(0, 1, length, DIM), *weights]


def _allowed(length, masked, causal=False):
    mask = np.arange(length) % 4 != 2 if masked else np.ones(length, bool)
    allowed = np.broadcast_to(mask, (length, length))
    return mask, np.tril(allowed) if causal else allowed


def _expect_equal(index, inputs, rows, masked, causal=False):
    mask, allowed = _allowed(inputs[0].shape[1], masked, causal)
    kernel = functools.partial(
        kernels.translution,
        index=index,
        key_mask=jnp.asarray(mask) if masked else None,
    )
    naive = functools.partial(reference.translution, rows=rows, allowed=allowed)
    compare.expect_equal(jax.vmap(kernel), naive, inputs)


@pytest.mark.quick("grid1-2-False")
@pytest.mark.parametrize(("grid", "num_prefix", "masked"), GRIDS)
def test_values_and_gradients_equal_the_reference(grid, num_prefix, masked):
    length = num_prefix + math.prod(grid)
    inputs = _inputs(length, offsets.num_table_rows(grid, num_prefix))
    index = kernels.Offsets(grid, num_prefix)
    _expect_equal(index, inputs, reference.offset_rows(grid, num_prefix), masked)


@pytest.mark.quick("v")
@pytest.mark.parametrize("relative", ["", "q", "k", "v"])
def test_projections_that_do_not_depend_on_the_offset(relative):
    inputs = _inputs(4, offsets.num_table_rows((3,), 1), relative)
    index = kernels.Offsets((3,), num_prefix=1)
    _expect_equal(index, inputs, reference.offset_rows((3,), 1), masked=True)


@pytest.mark.quick("5-qkv")
@pytest.mark.parametrize(
    ("length", "relative"), [(2, "qkv"), (5, "qkv"), (3, "q"), (3, "kv")]
)
def test_causal_values_and_gradients_equal_the_reference(length, relative):
    # Tables have two more rows than there are tokens.
    inputs = _inputs(length, length + 2, relative)
    rows = reference.offset_rows((length,), causal=True)
    index = kernels.CausalOffsets(length)
    _expect_equal(index, inputs, rows, length > 3, causal=True)


@pytest.mark.quick("grid0-1-2-qkv", "None-0-2-qkv")
@pytest.mark.parametrize(
    ("grid", "num_prefix", "clip", "relative"),
    [
        # Even sizes have an offset that is its own negative.
        (offsets.Torus((4, 2)), 1, 2, "qkv"),
        (offsets.Torus((3, 7)), 0, 1, "qv"),
        ((5, 7), 2, 2, "k"),
        ((11,), 0, 3, "v"),
        ((2, 3), 1, 5, "qkv"),
        (None, 0, 2, "qkv"),
        (None, 0, 13, "kv"),
    ],
)
def test_clipped_tables_equal_their_expansions(grid, num_prefix, clip, relative):
    causal, grid = grid is None, grid or (7,)
    where = {"grid": grid, "num_prefix": num_prefix, "clip": clip, "causal": causal}
    length = num_prefix + math.prod(grid)
    index, full = (
        kernels.Offsets(grid, num_prefix, clip),
        kernels.Offsets(grid, num_prefix),
    )
    if causal:
        index, full = kernels.CausalOffsets(length, clip), kernels.CausalOffsets(length)
    x, *weights = _inputs(length, offsets.num_table_rows(**where), relative)

    def loss(weights, index, change):
        weights = [change(w[0]) if w.ndim == 5 else w[0] for w in weights]
        return (kernels.translution(x, *weights, index=index) ** 2).sum()

    @quick_jit
    def both(weights):
        expand = functools.partial(kernels.expand_clipped_table, **where)
        return [
            jax.value_and_grad(loss)(weights, *options)
            for options in ((index, lambda w: w), (full, expand))
        ]

    found, expected = both(weights)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
        found,
        expected,
    )


def test_without_keys_output_is_zero():
    inputs, key_mask = (y[0] for y in _inputs(5, 9)), np.zeros(5, bool)
    attend = quick_jit(kernels.translution, index=kernels.Offsets((5,)))
    np.testing.assert_array_equal(attend(*inputs, key_mask=key_mask), 0)


def test_leading_axes_share_a_mask():
    _, *weights = (y[0] for y in _inputs(4, 8))
    x, mask = normal(9, 2, 3, 4, DIM), np.arange(4) != 2

    @jax.jit
    def attend(x, mask):
        index = kernels.Offsets((1, 3), num_prefix=1)
        return kernels.translution(x, *weights, index=index, key_mask=mask)

    out = attend(x, mask[None, None])
    assert out.shape == (2, 3, HEADS, 4, HEAD_DIM)
    np.testing.assert_allclose(out[1, 2], attend(x[1, 2], mask), atol=1e-5)


def test_half_precision_is_near_single_precision():
    inputs = [y[0] for y in _inputs(4, 8)]
    index = kernels.Offsets((1, 3), num_prefix=1)
    kernel = jax.jit(functools.partial(kernels.translution, index=index))
    halves = [y.astype(jnp.bfloat16) for y in inputs]
    out = kernel(*halves)
    assert out.dtype == jnp.bfloat16
    expected = np.asarray(kernel(*map(np.float32, halves)))
    error = np.abs(np.float32(out) - expected).max()
    assert error < 0.1 * np.abs(expected).max()


@pytest.mark.slow
def test_scores_beyond_half_precision_stay_finite():
    x, table = np.full((3, 1), 300, np.float16), np.ones((5, 1, 1, 1), np.float16)
    for index in (kernels.Offsets((3,)), kernels.CausalOffsets(3)):
        attend = quick_jit(kernels.translution, index=index)
        out = attend(x, *[table] * 2, 0.01 * table)
        np.testing.assert_allclose(out.ravel(), 3.0, rtol=1e-3)


def _temporary_bytes(kernel, *shapes):
    """Returns temporary bytes of the compiled forward and backward pass."""

    def forward_backward(*inputs):
        out, pull_back = jax.vjp(kernel, *inputs)
        return out, pull_back(jax.tree.map(jnp.ones_like, out))

    inputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    compiled = jax.jit(forward_backward).lower(*inputs).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def _translution_bytes(size, wide):
    rows = offsets.num_table_rows((size, size), 1)
    index = kernels.Offsets((size, size), num_prefix=1)
    kernel = functools.partial(kernels.translution, index=index)
    tables = 3 * [(rows, wide, 1, wide)]
    # Besides the gradients, one table may be copied.
    spare = 4 * math.prod(tables[0])
    return _temporary_bytes(kernel, (1, size**2 + 1, wide), *tables) - spare


def _causal_bytes(length, wide):
    tables = 3 * [(length, wide, 1, wide)]
    spare = 4 * math.prod(tables[0])
    kernel = functools.partial(kernels.translution, index=kernels.CausalOffsets(length))
    return _temporary_bytes(kernel, (1, length, wide), *tables) - spare


def _lor_bytes(size, wide):
    n, rows = size**2 + 1, offsets.num_table_rows((size, size), 1)
    index = kernels.Offsets((size, size), num_prefix=1)

    def kernel(*x):
        return kernels.lor_translution(x[:3], x[3:6], x[6:], index=index)

    shapes = [(1, n, wide)] * 3 + [(n, 8)] * 3 + [(rows, 8, 1, wide)] * 3
    return _temporary_bytes(kernel, *shapes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("temporary_bytes", "sizes", "tokens"),
    [
        (_translution_bytes, (4, 9), (17, 82)),
        (_causal_bytes, (17, 82), (17, 82)),
        (_lor_bytes, (4, 9), (17, 82)),
    ],
)
def test_memory_grows_like_the_scores_not_the_projections(
    temporary_bytes, sizes, tokens
):
    wide = 128
    few, many = (temporary_bytes(size, wide) for size in sizes)
    per_pair = (many - few) / 4 / (tokens[1] ** 2 - tokens[0] ** 2)
    # A few scores per pair; projections would take ``wide`` numbers per pair.
    assert per_pair < wide / 2


@pytest.mark.parametrize(
    ("index", "length", "rows", "message"),
    [
        (
            kernels.Offsets((2, 3)),
            7,
            15,
            "grid 2x3 with num_prefix=0 holds 6 tokens, got 7",
        ),
        (
            kernels.Offsets((2, 3)),
            6,
            18,
            "w_q needs a row for .* expected 15 rows, got 18",
        ),
        (
            kernels.CausalOffsets(6),
            7,
            7,
            r"index=CausalOffsets\(length=6, clip=None\) does not fit 7 tokens",
        ),
        (
            kernels.Offsets((2, 3), 1, clip=2),
            7,
            15,
            r"w_q needs a row for .* up to clip=2, one .* expected 29 rows, got 15",
        ),
        (
            kernels.CausalOffsets(6, clip=2),
            6,
            6,
            r"w_q needs a row for each of the offsets 0 .. 2, .* expected 4 rows",
        ),
        (
            kernels.CausalOffsets(6),
            6,
            5,
            "w_q has weights for 5 offsets, too few for a",
        ),
        ((2, 3), 6, 15, r"index must be Offsets, .* got \(2, 3\)"),
        (kernels.Pairs(6), 7, 7, r"index=Pairs\(length=6\) does not fit 7 tokens"),
        (
            kernels.Pairs(6),
            6,
            6,
            r"w_q needs a matrix for every pair of tokens: expected \[6, 6, ",
        ),
    ],
)
def test_errors_state_the_expected_sizes(index, length, rows, message):
    inputs = [y[0] for y in _inputs(length, rows)]
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        kernels.translution(*inputs, index=index)


@pytest.mark.parametrize("index", [kernels.Offsets((4,)), kernels.CausalOffsets(4)])
def test_table_of_pairs_with_offsets_raises(index):
    x, w = normal(0, 4, DIM), normal(1, 4, 4, DIM, HEADS, HEAD_DIM)
    with pytest.raises(ValueError, match=r"w_q needs one axis of rows.*index=Pairs"):
        kernels.translution(x, w, w, w, index=index)


def test_index_is_hashable():
    indices = [kernels.Offsets((2, 3), 1), kernels.CausalOffsets(6), kernels.Pairs(6)]
    assert len({*indices, *map(dataclasses.replace, indices)}) == 3

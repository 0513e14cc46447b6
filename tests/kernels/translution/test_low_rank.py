"""Tests LoR-Translution: reference, subsets, missing parts and errors."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import kernels, offsets
from tests import reference
from tests.helpers import compare
from tests.helpers.quick import normal

HEADS, HEAD_DIM, INNER, RANK = 2, 5, 3, 4


def _inputs(length, rows, relative="qkv"):
    """Returns plain, low-rank and table arrays with a leading axis of one."""
    plain = [normal(seed, 1, HEADS, length, HEAD_DIM) for seed in range(3)]
    low = [normal(3 + seed, 1, length, INNER) for seed in range(3)]
    tables = [
        normal(6 + seed, 1, *([rows] if name in relative else []), INNER, HEADS, RANK)
        for seed, name in enumerate("qkv")
    ]
    return [*plain, *low, *tables]


def _expect_equal(
    index, inputs, rows, *, given="qlv", masked=False, causal=False, average=False
):
    """Compares with the reference when only some parts are given.

    ``given`` contains q for plain attention, l for the low-rank score, v for the
    low-rank values.
    """
    base, low_score, low_value = "q" in given, "l" in given, "v" in given
    kept = [base] * 3 + 2 * [low_score, low_score, low_value]
    length = inputs[3].shape[1]
    mask = np.arange(length) % 4 != 2 if masked else np.ones(length, bool)
    allowed = np.broadcast_to(mask, (length, length))
    allowed = np.tril(allowed) if causal else allowed
    scale = HEAD_DIM**-0.5 if base else 0.6

    def fill(arrays):
        arrays = iter(arrays)
        return [next(arrays) if keep else None for keep in kept]

    def join(outputs):
        return jnp.concatenate([x for x in outputs if x is not None], axis=-1)

    def apply(*arrays):
        arrays = tuple(fill(arrays))
        outputs = kernels.lor_translution(
            arrays[:3],
            arrays[3:6],
            arrays[6:],
            index=index,
            key_mask=jnp.asarray(mask) if masked else None,
            scale=None if base else scale,
            average=average,
        )
        assert [x is not None for x in outputs] == [base, low_value]
        return join(outputs)

    def naive(*arrays):
        arrays = fill(arrays)
        return join(
            reference.lor_translution(
                *arrays[:3],
                arrays[3:6],
                arrays[6:],
                rows=rows,
                allowed=allowed,
                scale=scale,
                average=average,
            )
        )

    inputs = [x for x, keep in zip(inputs, kept, strict=True) if keep]
    compare.expect_equal(jax.vmap(apply), naive, inputs)


@pytest.mark.quick("grid3-1-options3")
@pytest.mark.parametrize(
    ("grid", "num_prefix", "options"),
    [
        ((2, 3), 2, {"masked": True, "average": True}),
        ((3, 2), 0, {"given": "lv", "average": True}),
        ((3,), 1, {"given": "qv", "average": True}),
        ((2, 3), 1, {"given": "ql", "masked": True, "average": True}),
    ],
)
def test_values_and_gradients_equal_the_reference(grid, num_prefix, options):
    inputs = _inputs(
        num_prefix + math.prod(grid), offsets.num_table_rows(grid, num_prefix)
    )
    index = kernels.Offsets(grid, num_prefix)
    rows = reference.offset_rows(grid, num_prefix)
    _expect_equal(index, inputs, rows, **options)


@pytest.mark.quick("q")
@pytest.mark.parametrize("relative", ["", "q", "kv"])
def test_projections_that_do_not_depend_on_the_offset(relative):
    inputs = _inputs(4, offsets.num_table_rows((3,), 1), relative)
    index = kernels.Offsets((3,), num_prefix=1)
    _expect_equal(index, inputs, reference.offset_rows((3,), 1))


def test_causal_values_and_gradients_equal_the_reference():
    # Tables have two more rows than there are tokens.
    rows = reference.offset_rows((5,), causal=True)
    index, inputs = kernels.CausalOffsets(5), _inputs(5, 7, "v")
    _expect_equal(index, inputs, rows, causal=True, given="lv", masked=True)


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        ("q", r"qkv\[0\], qkv\[1\] and qkv\[2\] must all be"),
        ("v", r"qkv\[0\], qkv\[1\] and qkv\[2\] must all be"),
        ("t_q", r"low\[0\], low\[1\], tables\[0\] and tables\[1\] must all be"),
        ("low_v", r"low\[2\] and tables\[2\] must all be"),
        ("q k v low_q low_k t_q t_k", r"no scores: pass qkv, or low\[0\]"),
        ("q k v", "scale has no default without qkv"),
    ],
)
def test_missing_arguments_raise(left_out, message):
    names = ["q", "k", "v", "low_q", "low_k", "low_v", "t_q", "t_k", "t_v"]
    arrays = tuple(
        None if name in left_out.split() else x[0]
        for name, x in zip(names, _inputs(3, 3), strict=True)
    )
    inputs = arrays[:3], arrays[3:6], arrays[6:]
    with pytest.raises(ValueError, match=message):
        kernels.lor_translution(*inputs, index=kernels.CausalOffsets(3))


def test_tables_and_grids_of_wrong_size_raise():
    arrays = tuple(x[0] for x in _inputs(5, 4))
    for index, message in (
        (kernels.CausalOffsets(5), r"tables\[0\] has weights for 4 offsets, too few"),
        (kernels.Offsets((5,)), r"tables\[0\] needs a row for .* expected 9 rows, got"),
        (kernels.Offsets((2, 3)), "grid 2x3 with num_prefix=0 holds 6 tokens, got 5"),
        (kernels.Pairs(6), r"index=Pairs\(length=6\) does not fit 5 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            kernels.lor_translution(arrays[:3], arrays[3:6], arrays[6:], index=index)

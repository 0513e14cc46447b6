"""LoR-Translution: the naive reference, subsets, parts left out, and errors."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import kernels, offsets
from tests import reference
from tests.helpers import compare

HEADS, HEAD_DIM, INNER, RANK = 2, 5, 3, 2


def _random(seed, *shape):
    generator = np.random.default_rng(seed)
    return jnp.asarray(generator.standard_normal(shape), jnp.float32)


def _inputs(length, rows, relative="qkv"):
    """Plain, low-rank and table arrays, each with a leading axis of one."""
    plain = [_random(seed, 1, HEADS, length, HEAD_DIM) for seed in range(3)]
    low = [_random(3 + seed, 1, length, INNER) for seed in range(3)]
    tables = [
        _random(6 + seed, 1, *([rows] if name in relative else []), INNER, HEADS, RANK)
        for seed, name in enumerate("qkv")
    ]
    return [*plain, *low, *tables]


def _expect_equal(
    kernel, inputs, rows, *, given="qlv", masked=False, causal=False, average=False
):
    """Compares with the reference where only some parts are given.

    ``given`` has q for plain attention, l for the low-rank score, v for the low-rank
    values.
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
        outputs = kernel(
            *fill(arrays),
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
    kernel = functools.partial(
        kernels.lor_translution, grid=grid, num_prefix=num_prefix
    )
    rows = reference.offset_rows(grid, num_prefix)
    _expect_equal(kernel, inputs, rows, **options)


@pytest.mark.parametrize("relative", ["", "q", "kv"])
def test_projections_that_do_not_depend_on_the_offset(relative):
    inputs = _inputs(4, offsets.num_table_rows((3,), 1), relative)
    kernel = functools.partial(kernels.lor_translution, grid=(3,), num_prefix=1)
    _expect_equal(kernel, inputs, reference.offset_rows((3,), 1))


def test_causal_values_and_gradients_equal_the_reference():
    # Two rows more than tokens: a shorter sequence than the model's.
    rows = reference.offset_rows((5,), causal=True)
    kernel, inputs = kernels.causal_lor_translution, _inputs(5, 7, "v")
    _expect_equal(kernel, inputs, rows, causal=True, given="lv", masked=True)


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        ("q", "q, k and v must be given together"),
        ("v", "q, k and v must be given together"),
        ("t_q", "low_q, low_k, t_q and t_k must be given together"),
        ("low_v", "low_v and t_v must be given together"),
        ("q k v low_q low_k t_q t_k", "no scores: give q, k and v, or low_q"),
        ("q k v", "scale has no default without q"),
    ],
)
def test_arguments_that_belong_together(left_out, message):
    names = ["q", "k", "v", "low_q", "low_k", "low_v", "t_q", "t_k", "t_v"]
    inputs = {
        name: None if name in left_out.split() else x[0]
        for name, x in zip(names, _inputs(3, 3), strict=True)
    }
    with pytest.raises(ValueError, match=message):
        kernels.causal_lor_translution(**inputs)


def test_tables_and_grids_that_do_not_fit():
    inputs = [x[0] for x in _inputs(5, 4)]
    with pytest.raises(ValueError, match="t_q has weights for 4 offsets, too few for"):
        kernels.causal_lor_translution(*inputs)
    with pytest.raises(ValueError, match="t_q needs a row for .* expected 9 rows, got"):
        kernels.lor_translution(*inputs, grid=(5,))
    with pytest.raises(ValueError, match="grid 2x3 with num_prefix=0 holds 6 tokens"):
        kernels.lor_translution(*inputs, grid=(2, 3))

"""Tests projections for every pair: reference, subsets, masks and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import kernels
from tests import reference
from tests.helpers import compare
from tests.helpers.quick import normal, run

N, DIM, HEADS, HEAD_DIM, RANK = 7, 5, 2, 3, 4


def _tables(*shape, relative="qkv"):
    return [
        normal(1 + seed, 1, *((N, N) if name in relative else ()), *shape)
        for seed, name in enumerate("qkv")
    ]


@pytest.mark.quick("qkv-True")
@pytest.mark.parametrize(
    ("relative", "masked"), [("qkv", True), ("kv", False), ("q", False)]
)
def test_values_and_gradients_equal_the_reference(relative, masked):
    mask = np.arange(N) % 3 != 1 if masked else np.ones(N, bool)
    inputs = [normal(0, 1, N, DIM), *_tables(DIM, HEADS, HEAD_DIM, relative=relative)]
    kernel = functools.partial(
        kernels.translution,
        index=kernels.Pairs(N),
        key_mask=jnp.asarray(mask) if masked else None,
    )
    naive = functools.partial(
        reference.translution, rows=(None,) * 3, allowed=np.tile(mask, (N, 1))
    )
    compare.expect_equal(jax.vmap(kernel), naive, inputs)


def test_scores_beyond_half_precision_stay_finite():
    x, w = np.full((3, 1), 300, np.float16), np.ones((3, 3, 1, 1, 1), np.float16)
    attend = functools.partial(kernels.translution, index=kernels.Pairs(3))
    out = run(attend, x, w, w, np.float16(0.01) * w)
    np.testing.assert_allclose(out.ravel(), 3.0, rtol=1e-3)


def test_low_rank_values_and_gradients_equal_the_reference():
    mask = np.arange(N) % 3 != 1
    plain = [normal(5 + seed, 1, HEADS, N, HEAD_DIM) for seed in range(3)]
    low = [normal(8 + seed, 1, N, DIM) for seed in range(3)]
    inputs = [*plain, *low, *_tables(DIM, HEADS, RANK)]

    def kernel(*inputs):
        outputs = kernels.lor_translution(
            inputs[:3],
            inputs[3:6],
            inputs[6:],
            index=kernels.Pairs(N),
            key_mask=jnp.asarray(mask),
        )
        return jnp.concatenate(outputs, axis=-1)

    def naive(*inputs):
        outputs = reference.lor_translution(
            *inputs[:3],
            inputs[3:6],
            inputs[6:],
            rows=(None,) * 3,
            allowed=np.tile(mask, (N, 1)),
            scale=HEAD_DIM**-0.5,
        )
        return jnp.concatenate(outputs, axis=-1)

    compare.expect_equal(jax.vmap(kernel), naive, inputs)


def test_tables_of_another_length_raise():
    x, w = np.ones((N + 1, DIM)), _tables(DIM, HEADS, HEAD_DIM)[0][0]
    with pytest.raises(
        ValueError, match=r"must have the same n, got shapes \(8, 5\) and \(7, 7"
    ):
        kernels.translution(x, w, w, w, index=kernels.Pairs(N))

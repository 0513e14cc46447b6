"""Tests decoding steps against the whole sequence at once."""

import functools

import jax
import numpy as np
import pytest

from relattn import kernels
from tests.helpers.quick import normal, run

BATCH, N, DIM, HEADS, HEAD_DIM, INNER, RANK = 6, 7, 5, 2, 3, 4, 8


def _table(seed, *shape, of, relative):
    return normal(seed, *([N + 2] if of in relative else []), *shape)


@pytest.mark.quick("k")
@pytest.mark.parametrize("relative", ["qkv", "qv", "k"])
def test_translution_steps_equal_the_whole_sequence(relative):
    x = normal(0, BATCH, N, DIM)
    # Longer queries and keys would amplify the rounding of scores.
    weights = [
        _table(seed, DIM, HEADS, HEAD_DIM, of=name, relative=relative) / DIM**0.5
        for seed, name in enumerate("qkv")
    ]
    expected = kernels.translution(x, *weights, index=kernels.CausalOffsets(N))
    step = jax.jit(kernels.causal_translution_step)
    for index in range(N):
        past = np.where(np.arange(N)[:, None] > index, np.float32(np.nan), x)
        out = step(past, *weights, index=index)
        np.testing.assert_allclose(out, expected[:, :, index], atol=2e-6)


@pytest.mark.slow
def test_scores_beyond_half_precision_stay_finite():
    x, w = np.full((3, 1), 300, np.float16), np.ones((3, 1, 1, 1), np.float16)
    step = functools.partial(kernels.causal_translution_step, index=2)
    out = run(step, x, w, w, np.float16(0.01) * w)
    np.testing.assert_allclose(out, [[3.0]], rtol=1e-3)


def test_precision_is_passed_to_every_product():
    x, w = normal(0, N, DIM), normal(1, N, DIM, HEADS, HEAD_DIM)
    step = functools.partial(kernels.causal_translution_step, precision="highest")
    program = str(jax.make_jaxpr(functools.partial(step, index=2))(x, w, w, w))
    highest = program.count("precision=(Precision.HIGHEST")
    assert program.count("dot_general[") == highest > 0


@pytest.mark.slow
@pytest.mark.parametrize("relative", ["qkv", "qv", "k"])
@pytest.mark.parametrize("base", [True, False])
def test_lor_translution_steps_equal_the_whole_sequence(relative, base):
    plain = [normal(seed, BATCH, HEADS, N, HEAD_DIM) for seed in range(3)]
    qkv = tuple(plain) if base else (None,) * 3
    low = tuple(normal(3 + seed, BATCH, N, INNER) for seed in range(3))
    # As large as at the start of training.
    tables = tuple(
        _table(seed, INNER, HEADS, RANK, of=name, relative=relative) / INNER**0.5
        for seed, name in enumerate("qkv")
    )
    options = {"scale": None if base else 0.6, "average": relative == "qkv"}
    expected = kernels.lor_translution(
        qkv, low, tables, index=kernels.CausalOffsets(N), **options
    )
    step = jax.jit(functools.partial(kernels.causal_lor_translution_step, **options))
    for index in range(N):

        def past(x, index=index):
            later = np.arange(N)[:, None] > index
            return None if x is None else np.where(later, np.float32(np.nan), x)

        q_i = None if qkv[0] is None else qkv[0][:, :, index]
        outputs = step(
            (q_i, *map(past, qkv[1:])),
            (low[0][:, index], *map(past, low[1:])),
            tables,
            index=index,
        )
        assert (outputs[0] is None) == (not base)
        for out, whole in zip(outputs, expected, strict=True):
            if out is not None:
                np.testing.assert_allclose(out, whole[:, :, index], atol=2e-6)


def test_lor_translution_step_without_low_rank_score():
    q, k, v = (normal(seed, BATCH, HEADS, N, HEAD_DIM) for seed in range(3))
    low = (None, None, normal(3, BATCH, N, INNER))
    tables = (None, None, normal(4, N, INNER, HEADS, RANK))
    attend = functools.partial(kernels.lor_translution, index=kernels.CausalOffsets(N))
    expected = run(attend, (q, k, v), low, tables)
    k[:, :, 5:] = v[:, :, 5:] = low[2][:, 5:] = np.nan
    step = functools.partial(kernels.causal_lor_translution_step, index=4)
    outputs = run(step, (q[:, :, 4], k, v), low, tables)
    for out, whole in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(out, whole[:, :, 4], atol=2e-6)


def test_sequence_longer_than_the_table_raises():
    x, w = np.ones((5, DIM)), np.ones((3, DIM, HEADS, HEAD_DIM))
    with pytest.raises(ValueError, match="w_q has weights for 3 offsets, too few for"):
        kernels.causal_translution_step(x, w, w, w, index=0)

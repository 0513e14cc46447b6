"""Tests gated positional attention: grids, prefix tokens, decoding and errors."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import kernels
from tests import reference
from tests.helpers import compare
from tests.helpers.quick import normal, run

HEAD_DIM, VALUE_DIM = 5, 3


def _inputs(length, width):
    return [
        normal(0, 2, length, HEAD_DIM, scale=0.5),
        normal(1, 2, length, HEAD_DIM, scale=0.5),
        normal(2, 2, length, VALUE_DIM, scale=0.5),
        normal(3, 2, scale=0.5),
        normal(4, 2, width, scale=0.5),
    ]


@pytest.mark.quick("grid0-2-6-True")
@pytest.mark.parametrize(
    ("grid", "num_prefix", "width", "masked"),
    [
        ((3, 2), 2, 6, True),
        ((3, 4), 0, 3, False),
        ((5,), 1, 5, False),
        ((2, 3, 5), 1, 7, True),
    ],
)
def test_matches_reference_on_every_grid(grid, num_prefix, width, masked):
    length = num_prefix + math.prod(grid)
    mask = np.arange(length) % 4 != 2 if masked else np.ones(length, bool)
    compare.expect_equal(
        functools.partial(
            kernels.gated_positional_attention,
            grid=grid,
            num_prefix=num_prefix,
            key_mask=jnp.asarray(mask) if masked else None,
        ),
        functools.partial(
            reference.gated_positional_attention,
            allowed=np.broadcast_to(mask, (length, length)),
            grid=grid,
            num_prefix=num_prefix,
        ),
        _inputs(length, width),
    )


def test_decoding_matches_causal_attention():
    q, k, v, gate, coefficients = _inputs(7, 2)

    @jax.jit
    def step(index):
        future = jnp.arange(7)[:, None] > index
        q_i = jax.lax.dynamic_index_in_dim(q, index, axis=1, keepdims=False)
        seen = (jnp.where(future, 1e3, x) for x in (k, v))
        return kernels.causal_gated_positional_attention_step(
            q_i, *seen, gate, coefficients, index=index
        )

    outs = np.stack([step(i) for i in range(7)], axis=1)
    attend = kernels.causal_gated_positional_attention
    expected = run(attend, q, k, v, gate, coefficients)
    np.testing.assert_allclose(outs, expected, atol=1e-6)


@pytest.mark.slow
def test_large_gate_attends_by_position_only():
    q, k, v, _, _ = _inputs(6, 3)
    coefficients = jnp.array([-20.0, 0.0, 40.0])  # favours the key at the left
    out = kernels.gated_positional_attention(
        q, k, v, jnp.array(50.0), coefficients, grid=(2, 3)
    )
    np.testing.assert_allclose(out[:, [1, 2, 4, 5]], v[:, [0, 1, 3, 4]], atol=1e-5)


def test_wrong_number_of_coefficients_raises():
    q, k, v, gate, coefficients = _inputs(7, 3)
    message = "grid of 2 axes and num_prefix=1 needs 6 coefficients, got 3"
    with pytest.raises(ValueError, match=message):
        kernels.gated_positional_attention(
            q, k, v, gate, coefficients, grid=(2, 3), num_prefix=1
        )
    with pytest.raises(ValueError, match="grid of 1 axes.*2 coefficients, got 3"):
        kernels.causal_gated_positional_attention(q, k, v, gate, coefficients)

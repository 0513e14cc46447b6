"""Local attention: windows, blocks that do not divide, prefix tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import kernels
from tests import compare, reference


@pytest.mark.parametrize(
    ("window", "num_prefix", "n"),
    # Blocks that do not divide the sequence; a window longer than it.
    [(4, 2, 11), (23, 0, 5)],
)
def test_every_window_equals_the_reference(window, num_prefix, n):
    inputs = list(jax.random.normal(jax.random.key(0), (3, 2, n, 3)))
    i, j = np.ogrid[:n, :n]
    near = abs(i - j) <= window // 2
    compare.expect_equal(
        functools.partial(
            kernels.local_attention, window=window, num_prefix=num_prefix
        ),
        functools.partial(
            reference.softmax_attention,
            allowed=near | (i < num_prefix) | (j < num_prefix),
        ),
        inputs,
    )


def test_a_window_of_one_token_is_the_token():
    x, v = jax.random.normal(jax.random.key(0), (2, 5, 3))
    np.testing.assert_array_equal(kernels.local_attention(x, x, v, window=1), v)


def test_a_window_holds_a_token():
    x = jnp.ones((5, 2))
    with pytest.raises(ValueError, match="local attention needs window >= 1, got 0"):
        kernels.local_attention(x, x, x, window=0)

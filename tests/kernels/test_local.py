"""Local attention: windows, blocks that do not divide, prefix tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import kernels
from tests import compare, reference


def random(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    ("window", "num_prefix", "n"),
    # Blocks that do not divide the sequence; a window longer than it.
    [(4, 2, 11), (23, 0, 5)],
)
def test_every_window_equals_the_reference(window, num_prefix, n):
    inputs = list(random(3, 2, n, 3))
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
    x, v = random(2, 5, 3)
    attend = jax.jit(functools.partial(kernels.local_attention, window=1))
    np.testing.assert_array_equal(attend(x, x, v), v)


def test_a_window_holds_a_token():
    x = jnp.ones((5, 2))
    with pytest.raises(ValueError, match="local attention needs window >= 1, got 0"):
        kernels.local_attention(x, x, x, window=0)


def test_there_are_no_fewer_tokens_than_prefix_tokens():
    x = jnp.ones((1, 3))
    with pytest.raises(ValueError, match="between 0 and the 1 tokens, got 2"):
        kernels.local_attention(x, x, x, window=3, num_prefix=2)
    everything = kernels.local_attention(x, x, x, window=3, num_prefix=1)
    np.testing.assert_allclose(everything, x, rtol=1e-6)

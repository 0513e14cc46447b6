"""Collectives over the devices that share a batch, against NumPy on the whole batch."""

import jax
import numpy as np
import pytest

from relattn.nn.device_axis import (
    DEVICE_AXIS,
    device_index,
    mean_over_devices,
    roll_batch,
    sum_over_devices,
)

X = np.random.default_rng(0).normal(size=(4, 3, 2)).astype(np.float32)


@pytest.mark.parametrize(
    "function, expected",
    [
        (mean_over_devices, np.tile(X.astype(np.float64).mean(0), (4, 1, 1))),
        (sum_over_devices, np.tile(X.astype(np.float64).sum(0), (4, 1, 1))),
        (roll_batch, np.roll(X.reshape(12, 2), 1, axis=0).reshape(X.shape)),
        (lambda x: device_index(), np.arange(4)),
    ],
    ids=["mean", "sum", "roll", "index"],
)
def test_devices_see_the_whole_batch(function, expected):
    found = jax.pmap(function, axis_name=DEVICE_AXIS)(X)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "function, expected",
    [
        (mean_over_devices, X),
        (sum_over_devices, X),
        (roll_batch, np.roll(X, 1, axis=1)),
        (lambda x: device_index(), np.zeros(4)),
    ],
    ids=["mean", "sum", "roll", "index"],
)
def test_another_axis_and_none_change_nothing(function, expected):
    other = jax.pmap(lambda x: function(x), axis_name="another")(X)
    np.testing.assert_array_equal(other, expected)
    np.testing.assert_array_equal(jax.jit(function)(X[0]), expected[0])

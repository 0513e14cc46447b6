"""Tests biases that are functions of the offset."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import kernels, offsets
from relattn.kernels.platform import use_platform
from relattn.kernels.positions.bias import bias_of_pairs
from relattn.offsets import Torus
from tests import reference
from tests.helpers.quick import quick_jit, run


def naive_bucket(offset, num_buckets, max_distance, bidirectional):
    """Computes one bucket by T5's rule, comparing boundaries as integer powers."""
    first = 0
    if bidirectional:
        num_buckets //= 2
        first, offset = (num_buckets if offset < 0 else 0), abs(offset)
    offset, half = max(offset, 0), num_buckets // 2
    if offset < half:
        return first + offset
    far = sum(
        offset**half * half**t >= max_distance**t * half**half for t in range(1, half)
    )
    return first + half + far


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 11), (4, 3)])
def test_buckets_match_t5(num_buckets, max_distance, bidirectional):
    distances = np.arange(-150, 151)
    options = {
        "num_buckets": num_buckets,
        "max_distance": max_distance,
        "bidirectional": bidirectional,
    }
    expected = [naive_bucket(int(d), **options) for d in distances]
    found = kernels.offset_buckets(distances, **options)
    np.testing.assert_array_equal(found, expected)
    assert found.max() == num_buckets - 1


@pytest.mark.parametrize(
    "options",
    [{"num_buckets": 6}, {"num_buckets": 2}, {"num_buckets": 8, "max_distance": 2}],
)
def test_invalid_bucket_options_raise(options):
    message = r"need num_buckets divisible by 4 and max_distance > num_buckets / 4, got"
    with pytest.raises(ValueError, match=message):
        kernels.offset_buckets(np.arange(3), **options)


def test_waves_along_axes_match_lemma_1():
    generator = np.random.default_rng(0)
    scales, coefficients = generator.uniform(0, 2, 3), generator.normal(size=(6, 2))
    grid = (2, 5)
    bias = run(
        functools.partial(kernels.wave_bias, offsets.table_offsets(grid)),
        np.float32(np.kron(np.eye(2), scales[:, None])),
        np.float32(coefficients),
    )
    p = np.float64(offsets.grid_positions(grid))
    with jax.enable_x64(True):
        naive = functools.partial(reference.constrained_scores, p, p)
        expected = run(naive, scales, coefficients)
    rows = offsets.offset_index(grid)
    np.testing.assert_allclose(bias[rows], expected, atol=1e-5)


def test_wave_may_be_diagonal():
    d = np.array([[3, -5], [0, 2]])
    wave = np.float32([[0.3, 1.1]]), np.float32([[0.7, -0.4]])
    angles = d @ np.array([0.3, 1.1])
    expected = 0.7 * np.cos(angles) - 0.4 * np.sin(angles)
    bias = run(functools.partial(kernels.wave_bias, d), *wave)
    np.testing.assert_allclose(bias, expected, atol=1e-6)
    nowhere = run(functools.partial(kernels.wave_bias, 0 * d), *wave)
    np.testing.assert_allclose(nowhere, 0.7, rtol=1e-6)


def test_table_offsets_match_offsets_of_pairs():
    grid = (3, 4)
    rows = offsets.table_offsets(grid)
    np.testing.assert_array_equal(
        rows[offsets.offset_index(grid)], offsets.offsets(grid)
    )


@pytest.mark.quick("grid1-3-cpu", "grid1-3-gpu")
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize(
    ("grid", "num_prefix"),
    # On the first, half precision could not count the pairs of an offset.
    [
        ((17, 19), 0),
        ((2, 5), 3),
        ((7,), 1),
        ((1, 1), 0),
        ((2, 3, 5), 1),
        ((2, 1, 3, 2), 0),
        (Torus((5, 2)), 3),
        (Torus((2, 3, 5)), 1),
    ],
)
def test_pairs_have_the_bias_of_their_offset(grid, num_prefix, platform):
    rows = reference.offset_rows(grid, num_prefix)[0]
    generator = np.random.default_rng(0)
    shape = (2, offsets.num_table_rows(grid, num_prefix))
    bias = generator.normal(size=shape).astype(jnp.bfloat16)
    # Whole numbers, so that float32 sums are exact.
    cotangent = generator.integers(1, 8, (2, *rows.shape))

    @quick_jit
    def pairs_and_gradient(bias):
        pairs, pullback = jax.vjp(lambda x: bias_of_pairs(x, grid, num_prefix), bias)
        return pairs, *pullback(jnp.asarray(cotangent, pairs.dtype))

    with use_platform(platform):
        pairs, gradient = pairs_and_gradient(bias)
    assert pairs.dtype == jnp.float32 and gradient.dtype == jnp.bfloat16
    np.testing.assert_array_equal(pairs, np.float32(bias)[:, rows])
    expected = np.zeros(shape, np.float32)
    np.add.at(expected, (np.arange(2)[:, None, None], rows), cotangent)
    np.testing.assert_array_equal(gradient, expected.astype(jnp.bfloat16))

"""Tests absolute and constrained sinusoids: Lemma 1, invariance, shapes and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn.kernels.positions import sinusoids as kernel
from relattn.offsets import grid_positions
from tests import reference
from tests.helpers import compare
from tests.helpers.quick import normal, run

GRID = (3, 5)
SCALES = 3
PAIRS = 2 * SCALES


def _grid():
    return grid_positions(GRID)


def _scores(positions, frequencies, coefficients):
    u = kernel.sinusoids(positions, frequencies)
    return kernel.constrained_sinusoids(u, coefficients) @ u.T


@functools.cache
def _sinusoids():
    frequencies = kernel.length_scale_frequencies(SCALES)
    return run(lambda: kernel.sinusoids(_grid(), frequencies))


@pytest.mark.parametrize("num_prefix", [0, 2])
def test_sinusoids_match_reference_with_zeros_for_prefix(num_prefix):
    positions = grid_positions(GRID, num_prefix)
    frequencies = np.array([1.0, 0.4, 0.07], np.float32)
    sinusoids = functools.partial(kernel.sinusoids, num_prefix=num_prefix)
    result = run(sinusoids, positions, frequencies)
    assert result.shape == (num_prefix + 15, 2 * PAIRS)
    assert (result[:num_prefix] == 0).all()
    expected = reference.sinusoids(_grid(), frequencies)
    np.testing.assert_allclose(result[num_prefix:], expected, atol=1e-6)


def test_scores_and_gradients_match_lemma_1():
    frequencies = np.array([1.0, 0.37, 0.11], np.float32)
    coefficients = normal(0, PAIRS, 2)
    # Few tokens, in no line: the naive reference loops over pairs.
    tokens = _grid()[[5, 7, 11]]
    positions = tokens.astype(np.float64)

    def naive(frequencies, coefficients):
        arguments = (positions, positions, frequencies, coefficients)
        return reference.constrained_scores(*arguments)

    compare.expect_equal(
        jax.vmap(functools.partial(_scores, tokens)),
        naive,
        [frequencies[None], coefficients[None]],
        tolerance=1e-5,
    )


@pytest.mark.parametrize("shift", [(7.0, -3.0), (0.3, 1.7)])
def test_scores_are_invariant_under_common_shift(shift):
    frequencies = kernel.length_scale_frequencies(SCALES)
    coefficients = normal(2, PAIRS, 2)
    before = run(_scores, np.float32(_grid()), frequencies, coefficients)
    moved = run(_scores, _grid() + np.float32(shift), frequencies, coefficients)
    np.testing.assert_allclose(moved, before, atol=2e-5)


def test_unconstrained_projection_is_not_invariant():
    frequencies = kernel.length_scale_frequencies(SCALES)
    matrix = normal(3, 2 * PAIRS, 2 * PAIRS)
    u = _sinusoids()
    moved = run(lambda: kernel.sinusoids(_grid() + 1, frequencies))
    assert np.abs(moved @ matrix @ moved.T - u @ matrix @ u.T).max() > 0.1


def test_query_side_is_u_times_block_diagonal_matrix():
    u, coefficients = _sinusoids(), normal(4, PAIRS, 2)
    matrix = np.zeros((2 * PAIRS, 2 * PAIRS), np.float32)
    for pair, (a, b) in enumerate(coefficients):
        matrix[2 * pair : 2 * pair + 2, 2 * pair : 2 * pair + 2] = [[a, b], [-b, a]]
    result = run(kernel.constrained_sinusoids, u, coefficients)
    np.testing.assert_allclose(result, u @ matrix, atol=1e-6)


def test_coefficients_per_head_and_per_token():
    u = _sinusoids()
    heads, tokens = normal(5, 7, PAIRS, 2), normal(6, 7, 15, PAIRS, 2)

    def results():
        rotate = kernel.constrained_sinusoids
        return (
            rotate(u, heads),
            rotate(u, heads[2]),
            rotate(u, tokens, per_token=True),
            rotate(u[11:12], tokens[3, 11])[0],
        )

    per_head, head, per_token, token = run(results)
    assert per_head.shape == (7, 15, 2 * PAIRS)
    np.testing.assert_array_equal(per_head[2], head)
    assert per_token.shape == (7, 15, 2 * PAIRS)
    np.testing.assert_array_equal(per_token[3, 11], token)


def test_prefix_tokens_score_zero_as_query_and_as_key():
    positions = grid_positions(GRID, 1)
    frequencies = kernel.length_scale_frequencies(SCALES)

    def all_scores():
        u = kernel.sinusoids(positions, frequencies, num_prefix=1)
        return kernel.constrained_sinusoids(u, normal(7, PAIRS, 2)) @ u.T

    scores = run(all_scores)
    assert (scores[0] == 0).all()
    assert (scores[:, 0] == 0).all()


def test_absolute_sinusoids_have_width_of_tokens():
    dim = 20
    frequencies = kernel.absolute_frequencies(dim // 4)
    expected = [32000 ** (-i / 5) for i in range(5)]
    np.testing.assert_allclose(frequencies, expected, rtol=1e-6)
    shape = jax.eval_shape(lambda: kernel.sinusoids(_grid(), frequencies)).shape
    assert shape == (15, dim)


def test_length_scales_match_published_ones():
    expected = [64 ** (-s / 4) for s in range(4)]
    np.testing.assert_allclose(kernel.length_scale_frequencies(4), expected, rtol=1e-6)


def test_angles_of_half_precision_inputs_are_float32():
    positions, frequencies = np.float32([[1000.0]]), np.ones(1, jnp.bfloat16)
    result = run(kernel.sinusoids, positions, frequencies)
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result[0], [np.sin(1000), np.cos(1000)], atol=1e-4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kernel.length_scale_frequencies(0), "num_scales >= 1"),
        (lambda: kernel.length_scale_frequencies(2, -1.0), "base > 0"),
        (lambda: kernel.absolute_frequencies(0), "num >= 1"),
        (lambda: kernel.absolute_frequencies(2, -1.0), "must be > 0, got -1.0"),
        (lambda: kernel.absolute_frequencies(2, dtype="int8"), "a dtype of floats"),
        (
            lambda: kernel.sinusoids(np.ones((3, 2)), np.ones(2), num_prefix=4),
            "from 0 to 3, the number of tokens, got 4",
        ),
        (
            lambda: kernel.constrained_sinusoids(np.ones((3, 8)), np.ones((3, 2))),
            "of width 6, got u of width 8",
        ),
        (
            lambda: kernel.constrained_sinusoids(
                np.ones((3, 4)), np.ones((5, 2, 2)), per_token=True
            ),
            r"shape \[\*heads, 3, 2, 2\], got \[5, 2, 2\]",
        ),
    ],
)
def test_errors_name_expected_values(call, message):
    with pytest.raises(ValueError, match=message):
        call()

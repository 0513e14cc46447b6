"""Tests absolute and constrained sinusoids: Lemma 1, invariance, shapes and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn.kernels.positions import sinusoids as kernel
from relattn.offsets import grid_positions
from tests import reference

GRID = (3, 5)
SCALES = 3
PAIRS = 2 * SCALES


def _random(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _grid():
    return grid_positions(GRID)


def _scores(positions, frequencies, coefficients):
    u = kernel.sinusoids(positions, frequencies)
    return kernel.constrained_sinusoids(u, coefficients) @ u.T


@pytest.mark.parametrize("num_prefix", [0, 2])
def test_sinusoids_match_reference_with_zeros_for_prefix(num_prefix):
    positions = grid_positions(GRID, num_prefix)
    frequencies = jnp.array([1.0, 0.4, 0.07])
    result = kernel.sinusoids(positions, frequencies, num_prefix=num_prefix)
    assert result.shape == (num_prefix + 15, 2 * PAIRS)
    assert (result[:num_prefix] == 0).all()
    expected = reference.sinusoids(_grid(), frequencies)
    np.testing.assert_allclose(result[num_prefix:], expected, atol=1e-6)


def test_scores_and_gradients_match_lemma_1():
    frequencies = np.array([1.0, 0.37, 0.11], np.float32)
    coefficients = _random(0, PAIRS, 2)
    # Few tokens, in no line: the naive reference loops over pairs.
    tokens = _grid()[[5, 7, 11]]
    weights = _random(1, 3, 3)

    def loss(scores):
        return lambda w, c: (weights * scores(w, c)).sum()

    kernel_loss = loss(lambda w, c: _scores(tokens, w, c))
    values = _scores(tokens, jnp.asarray(frequencies), jnp.asarray(coefficients))
    gradients = jax.grad(kernel_loss, (0, 1))(
        jnp.asarray(frequencies), jnp.asarray(coefficients)
    )
    with jax.enable_x64(True):
        positions = tokens.astype(np.float64)
        exact = loss(
            lambda w, c: reference.constrained_scores(positions, positions, w, c)
        )
        arguments = (
            jnp.asarray(frequencies, jnp.float64),
            jnp.asarray(coefficients, jnp.float64),
        )
        expected = reference.constrained_scores(positions, positions, *arguments)
        expected_gradients = jax.grad(exact, (0, 1))(*arguments)
        np.testing.assert_allclose(values, expected, atol=1e-5)
        for gradient, target in zip(gradients, expected_gradients, strict=True):
            scale = float(jnp.abs(target).max())
            np.testing.assert_allclose(gradient, target, atol=1e-5 * scale)


@pytest.mark.parametrize("shift", [(7.0, -3.0), (0.3, 1.7)])
def test_scores_are_invariant_under_common_shift(shift):
    frequencies = kernel.length_scale_frequencies(SCALES)
    coefficients = jnp.asarray(_random(2, PAIRS, 2))
    before = _scores(_grid(), frequencies, coefficients)
    moved = _scores(_grid() + np.float32(shift), frequencies, coefficients)
    np.testing.assert_allclose(moved, before, atol=2e-5)


def test_unconstrained_projection_is_not_invariant():
    frequencies = kernel.length_scale_frequencies(SCALES)
    matrix = _random(3, 2 * PAIRS, 2 * PAIRS)
    u = kernel.sinusoids(_grid(), frequencies)
    moved = kernel.sinusoids(_grid() + 1, frequencies)
    assert jnp.abs(moved @ matrix @ moved.T - u @ matrix @ u.T).max() > 0.1


def test_query_side_is_u_times_block_diagonal_matrix():
    u = kernel.sinusoids(_grid(), kernel.length_scale_frequencies(SCALES))
    coefficients = jnp.asarray(_random(4, PAIRS, 2))
    matrix = np.zeros((2 * PAIRS, 2 * PAIRS), np.float32)
    for pair, (a, b) in enumerate(np.asarray(coefficients)):
        matrix[2 * pair : 2 * pair + 2, 2 * pair : 2 * pair + 2] = [[a, b], [-b, a]]
    result = kernel.constrained_sinusoids(u, coefficients)
    np.testing.assert_allclose(result, u @ matrix, atol=1e-6)


def test_coefficients_per_head_and_per_token():
    u = kernel.sinusoids(_grid(), kernel.length_scale_frequencies(SCALES))
    heads = jnp.asarray(_random(5, 7, PAIRS, 2))
    per_head = kernel.constrained_sinusoids(u, heads)
    assert per_head.shape == (7, 15, 2 * PAIRS)
    np.testing.assert_array_equal(
        per_head[2], kernel.constrained_sinusoids(u, heads[2])
    )
    tokens = jnp.asarray(_random(6, 7, 15, PAIRS, 2))
    per_token = kernel.constrained_sinusoids(u, tokens, per_token=True)
    assert per_token.shape == (7, 15, 2 * PAIRS)
    np.testing.assert_array_equal(
        per_token[3, 11], kernel.constrained_sinusoids(u[11:12], tokens[3, 11])[0]
    )


def test_prefix_tokens_score_zero_as_query_and_as_key():
    u = kernel.sinusoids(
        grid_positions(GRID, 1), kernel.length_scale_frequencies(SCALES), num_prefix=1
    )
    scores = kernel.constrained_sinusoids(u, jnp.asarray(_random(7, PAIRS, 2))) @ u.T
    assert (scores[0] == 0).all()
    assert (scores[:, 0] == 0).all()


def test_absolute_sinusoids_have_width_of_tokens():
    dim = 20
    frequencies = kernel.absolute_frequencies(dim // 4)
    expected = [32000 ** (-i / 5) for i in range(5)]
    np.testing.assert_allclose(frequencies, expected, rtol=1e-6)
    assert kernel.sinusoids(_grid(), frequencies).shape == (15, dim)


def test_length_scales_match_published_ones():
    expected = [64 ** (-s / 4) for s in range(4)]
    np.testing.assert_allclose(kernel.length_scale_frequencies(4), expected, rtol=1e-6)


def test_angles_of_half_precision_inputs_are_float32():
    positions = jnp.array([[1000.0]], jnp.float32)
    result = kernel.sinusoids(positions, jnp.array([1.0], jnp.bfloat16))
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result[0], [np.sin(1000), np.cos(1000)], atol=1e-4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kernel.length_scale_frequencies(0), "num_scales >= 1"),
        (lambda: kernel.length_scale_frequencies(2, -1.0), "base > 0"),
        (lambda: kernel.absolute_frequencies(0), "num >= 1"),
        (lambda: kernel.absolute_frequencies(2, dtype="int8"), "a dtype of floats"),
        (
            lambda: kernel.sinusoids(jnp.ones((3, 2)), jnp.ones(2), num_prefix=4),
            "between 0 and the number of tokens, 3, got 4",
        ),
        (
            lambda: kernel.constrained_sinusoids(jnp.ones((3, 8)), jnp.ones((3, 2))),
            "of width 6, got u of width 8",
        ),
        (
            lambda: kernel.constrained_sinusoids(
                jnp.ones((3, 4)), jnp.ones((5, 2, 2)), per_token=True
            ),
            r"shape \[\*heads, 3, 2, 2\], got \[5, 2, 2\]",
        ),
    ],
)
def test_errors_name_expected_values(call, message):
    with pytest.raises(ValueError, match=message):
        call()

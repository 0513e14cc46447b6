"""Tests STRING: orthogonality, invariance, prefix tokens and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import kernels, offsets
from tests.helpers.quick import normal, run

GRID = (3, 5)


def cayley(positions, num_prefix=0):
    w = kernels.draw_mixed_frequencies(jax.random.key(0), 3, 2)
    matrix = kernels.cayley_matrix(normal(0, 15))
    angles = kernels.mixed_rotary_angles(positions, w, num_prefix=num_prefix)
    return lambda x: kernels.cayley_string(x, angles, matrix)


def circulant(positions, num_prefix=0):
    circulants = normal(1, 2, 7)
    angles = kernels.circulant_angles(positions, circulants, num_prefix=num_prefix)
    return lambda x: kernels.circulant_string(x, angles)


both = pytest.mark.parametrize(("string", "head_dim"), [(cayley, 6), (circulant, 7)])


@both
def test_scores_are_invariant_under_common_shift(string, head_dim):
    positions = offsets.grid_positions(GRID)
    q, k = normal(2, 2, 15, head_dim)

    @jax.jit
    def scores(shift):
        rotate = string(positions + shift)
        return rotate(q) @ rotate(k).T

    before = scores(np.float32([0.0, 0.0]))
    np.testing.assert_allclose(scores(np.float32([7.0, -3.0])), before, atol=5e-5)
    assert np.abs(before - q @ k.T).max() > 0.1


@both
def test_rotations_are_orthogonal_and_additive(string, head_dim):
    @jax.jit
    def rotated_basis(position):
        return string(jnp.broadcast_to(position, (head_dim, 2)))(jnp.eye(head_dim))

    def matrix(*position):
        return np.asarray(rotated_basis(np.float32(position)))

    first, second = matrix(2.0, -1.0), matrix(0.5, 3.0)
    np.testing.assert_allclose(first @ first.T, np.eye(head_dim), atol=2e-6)
    # The generators commute, so the order of the rotations does not matter.
    np.testing.assert_allclose(first @ second, matrix(2.5, 2.0), atol=1e-5)
    np.testing.assert_allclose(matrix(0.0, 0.0), np.eye(head_dim), atol=2e-6)


@both
def test_prefix_tokens_and_dtype_are_kept(string, head_dim):
    x = normal(0, 17, head_dim)
    rotate = jax.jit(
        lambda x: string(offsets.grid_positions(GRID, 2) + 1, num_prefix=2)(x)
    )
    out = np.asarray(rotate(x))
    np.testing.assert_allclose(out[:2], x[:2], atol=2e-6)
    assert (np.abs(out[2:] - x[2:]).max(axis=1) > 0.1).all()
    half = jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
    assert jax.eval_shape(rotate, half).dtype == jnp.bfloat16


@pytest.mark.quick("3")
@pytest.mark.parametrize("head_dim", [3, 8])
def test_circulants_rotate_fourier_components_by_their_frequencies(head_dim):
    components = (head_dim - 1) // 2
    w = normal(0, 5, components, 2)

    def circulants_and_angles(w):
        circulants = kernels.circulants_of(w, head_dim)
        angles = kernels.circulant_angles(np.float32([[2.0, 3.0]]), circulants)
        return circulants, angles

    circulants, angles = run(circulants_and_angles, w)
    assert circulants.shape == (5, 2, head_dim)
    expected = w @ np.array([2.0, 3.0])
    np.testing.assert_allclose(angles[:, 0, 1 : components + 1], expected, atol=1e-5)
    np.testing.assert_allclose(angles[:, 0, 0], 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kernels.cayley_matrix(np.ones(4)), "entries below its diagonal.*4"),
        (
            lambda: kernels.cayley_string(np.ones((1, 4)), np.ones((1, 2)), np.eye(3)),
            "head_dim 4 needs a matrix of 4x4, got 3x3",
        ),
        (
            lambda: kernels.circulant_angles(np.ones((1, 1)), np.ones((1, 2))),
            "rotate nothing where head_dim .* below 3, got 2",
        ),
        (
            lambda: kernels.circulant_string(np.ones((1, 7)), np.ones((1, 7))),
            "head_dim 7 has 4 Fourier components, got 7 angles",
        ),
        (
            lambda: kernels.circulants_of(np.ones((3, 1)), 5),
            "head_dim 5 has 2 Fourier components that can rotate, got 3",
        ),
    ],
)
def test_errors_name_expected_values(call, message):
    with pytest.raises(ValueError, match=message):
        call()

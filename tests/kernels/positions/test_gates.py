"""Tests gates beyond the contracts: identity, prefix, batch axes and errors."""

import functools

import numpy as np
import pytest

from relattn import kernels, offsets
from tests.helpers.quick import normal, run


def test_zero_embeddings_and_prefix_tokens_give_identity():
    x, rows, columns = normal(0, 7, 5), np.ones((2, 5)), np.zeros((3, 5))
    make = functools.partial(kernels.irpe_exponents, num_prefix=1)
    same, ones = run(
        lambda x: (
            kernels.apply_gate(x, make(0 * rows, columns)),
            make(rows, columns),
        ),
        x,
    )
    np.testing.assert_array_equal(same, x)
    np.testing.assert_array_equal(ones[:1], 0)
    np.testing.assert_array_equal(ones[1:], 1)


def test_line_has_one_embedding_or_one_axis():
    embedding = np.float32(np.arange(15).reshape(3, 5))
    exponents = run(functools.partial(kernels.irpe_exponents, num_prefix=2), embedding)
    np.testing.assert_array_equal(exponents, np.pad(embedding, [(2, 0), (0, 0)]))
    arrays = np.ones((2, 1)), np.array([0.0, 0.7]), np.eye(4)
    waves = run(
        functools.partial(kernels.string_exponents, num_prefix=1),
        offsets.grid_positions((3,), 1),
        *map(np.float32, arrays),
    )
    angles = np.arange(3.0)[:, None] + np.array([0.0, 0.7])
    expected = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    np.testing.assert_allclose(waves[1:], expected, atol=1e-6)
    np.testing.assert_array_equal(waves[0], 0)


def test_layers_and_heads_are_leading_axes():
    rng = np.random.default_rng(0)
    draw = functools.partial(rng.random, dtype=np.float32)
    rows, columns = draw((2, 3, 2, 5)), draw((2, 3, 7, 5))
    exponents = run(kernels.irpe_exponents, rows, columns)
    one = run(kernels.irpe_exponents, rows[1, 2], columns[1, 2])
    np.testing.assert_array_equal(exponents[1, 2], one)
    w, b, a = draw((2, 1, 3, 2)), draw((2, 1, 3)), draw((2, 5, 6, 7))
    positions = offsets.grid_positions((2, 3))
    exponents = run(kernels.string_exponents, positions, w, b, a)
    assert exponents.shape == (2, 5, 6, 7)
    one = run(kernels.string_exponents, positions, w[1, 0], b[1, 0], a[1, 4])
    np.testing.assert_allclose(exponents[1, 4], one, atol=1e-6)


def test_each_axis_adds_its_embedding():
    embeddings = [normal(seed, size, 7) for seed, size in enumerate((2, 3, 5))]
    exponents = run(kernels.irpe_exponents, *embeddings)
    for row, position in zip(exponents, np.ndindex(2, 3, 5), strict=True):
        expected = sum(x[i] for x, i in zip(embeddings, position, strict=True))
        np.testing.assert_allclose(row, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: kernels.apply_gate(np.ones((1, 4)), np.ones((1, 3))),
            "head_dim 4 needs 4 exponents for each token, got 3",
        ),
        (
            lambda: kernels.irpe_exponents(),
            "embeddings for each axis of the grid, got none",
        ),
        (
            lambda: kernels.irpe_exponents(np.ones((2, 3)), num_prefix=-1),
            "num_prefix must be from 0 to 1, the number of tokens, got -1",
        ),
        (
            lambda: kernels.string_exponents(
                np.ones((2, 1)), np.ones((3, 1)), np.ones(3), np.ones((5, 7))
            ),
            "3 frequencies need 6 rows of coefficients, .*, got 5",
        ),
    ],
)
def test_errors_name_expected_values(call, message):
    with pytest.raises(ValueError, match=message):
        call()

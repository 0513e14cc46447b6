"""Tests gates beyond the contracts: identity, prefix, leading axes and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import kernels, offsets


def test_zero_embeddings_and_prefix_tokens_give_identity():
    x = jax.random.normal(jax.random.key(0), (7, 5))
    exponents = kernels.irpe_exponents(
        jnp.zeros((2, 5)), jnp.zeros((3, 5)), num_prefix=1
    )
    np.testing.assert_array_equal(kernels.apply_gate(x, exponents), x)
    ones = kernels.irpe_exponents(jnp.ones((2, 5)), jnp.zeros((3, 5)), num_prefix=1)
    np.testing.assert_array_equal(ones[:1], 0)
    np.testing.assert_array_equal(ones[1:], 1)


def test_line_has_one_embedding_or_one_axis():
    embedding = jnp.arange(15.0).reshape(3, 5)
    exponents = kernels.irpe_exponents(embedding, num_prefix=2)
    np.testing.assert_array_equal(exponents, jnp.pad(embedding, [(2, 0), (0, 0)]))
    w, b, a = jnp.ones((2, 1)), jnp.array([0.0, 0.7]), jnp.eye(4)
    waves = kernels.string_exponents(
        offsets.grid_positions((3,), 1), w, b, a, num_prefix=1
    )
    angles = np.arange(3.0)[:, None] + np.array([0.0, 0.7])
    expected = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    np.testing.assert_allclose(waves[1:], expected, atol=1e-6)
    np.testing.assert_array_equal(waves[0], 0)


def test_layers_and_heads_are_leading_axes():
    rng = np.random.default_rng(0)
    rows, columns = rng.random((2, 3, 2, 5)), rng.random((2, 3, 7, 5))
    exponents = kernels.irpe_exponents(jnp.asarray(rows), jnp.asarray(columns))
    one = kernels.irpe_exponents(jnp.asarray(rows[1, 2]), jnp.asarray(columns[1, 2]))
    np.testing.assert_array_equal(exponents[1, 2], one)
    w, b, a = rng.random((2, 1, 3, 2)), rng.random((2, 1, 3)), rng.random((2, 5, 6, 7))
    positions = offsets.grid_positions((2, 3))
    arrays = [jnp.asarray(x, jnp.float32) for x in (w, b, a)]
    exponents = kernels.string_exponents(positions, *arrays)
    assert exponents.shape == (2, 5, 6, 7)
    one = kernels.string_exponents(
        positions, arrays[0][1, 0], arrays[1][1, 0], arrays[2][1, 4]
    )
    np.testing.assert_allclose(exponents[1, 4], one, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: kernels.apply_gate(jnp.ones((1, 4)), jnp.ones((1, 3))),
            "head_dim 4 needs 4 exponents for each token, got 3",
        ),
        (
            lambda: kernels.irpe_exponents(*[jnp.ones((2, 3))] * 3),
            "rows and columns, or of a line, got 3",
        ),
        (
            lambda: kernels.string_exponents(
                np.ones((2, 1)), jnp.ones((3, 1)), jnp.ones(3), jnp.ones((5, 7))
            ),
            "3 frequencies need 6 rows of coefficients, .*, got 5",
        ),
    ],
)
def test_errors_name_expected_values(call, message):
    with pytest.raises(ValueError, match=message):
        call()

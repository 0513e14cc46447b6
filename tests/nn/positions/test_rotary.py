"""Tests learned rotations in a layer: parameters, initial values, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import offsets
from relattn.nn.positions import rotary
from tests import reference
from tests.helpers.quick import normal, normal_like, run

GRID, N, LAYERS, HEADS, HEAD_DIM = (2, 3), 7, 3, 2, 6
SIZES = {"dim": HEADS * HEAD_DIM, "num_heads": HEADS, "num_layers": LAYERS}
MODULES = {
    "rope2d_mixed": rotary.Rope2dMixed,
    "cayley_string": rotary.CayleyString,
    "circulant_string": rotary.CirculantString,
}


def rotated(name, x, params, grid=GRID):
    """Rotates queries of a layer and head by the reference, prefix first."""
    positions = np.float64(offsets.grid_positions(grid, 1))
    if name == "rope2d_mixed":
        return reference.mixed_rotary(x, positions, params["frequencies"])
    if name == "cayley_string":
        generators = reference.cayley_generators(params["skew"], params["frequencies"])
    else:
        generators = reference.circulant_generators(params["circulants"])
    return reference.string(x, positions, generators)


@pytest.mark.quick("rope2d_mixed", "circulant_string")
@pytest.mark.parametrize("name", MODULES)
def test_each_layer_and_head_rotates_by_its_parameters(name):
    module = MODULES[name](**SIZES)
    shapes = jax.eval_shape(lambda key: module.init(key, GRID, 1), jax.random.key(0))
    variables = normal_like(shapes)
    q, k = map(jax.device_put, normal(1, 2, 1, HEADS, N, HEAD_DIM))

    @jax.jit
    def apply(variables):
        x = jnp.ones((1, N, 12))
        layers = module.apply(variables, GRID, 1)
        assert len(layers) == LAYERS
        one = layers[2].slice(4, 1)(q[:, :, 4:5], k[:, :, 4:5], x[:, :1])
        return jnp.concatenate(layers[2](q, k, x)), one[0]

    outs, one = jax.device_get(apply(variables))
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: np.float64(x[2, 1]), variables["params"])
        expected = jax.jit(jax.vmap(lambda x: rotated(name, x, params)))
        wide = np.stack([np.float64(x)[0, 1] for x in (q, k)])
        np.testing.assert_allclose(outs[:, 1], expected(wide), atol=2e-5)
    np.testing.assert_allclose(one[0], outs[0, :, 4:5], atol=1e-6)


@pytest.mark.quick("rope2d_mixed")
@pytest.mark.parametrize("name", MODULES)
def test_heads_start_with_different_directions(name):
    init = MODULES[name](**SIZES).init_with_output
    angles = run(
        lambda: [layer.angles for layer in init(jax.random.key(0), GRID, 1)[0]]
    )
    angles = np.stack(angles)[:, :, -1]
    assert len(np.unique(angles[..., 1].round(6))) == LAYERS * HEADS
    assert np.abs(angles).max() <= np.linalg.norm(np.array(GRID) - 1) + 1e-5


def test_cayley_string_starts_as_rope():
    init = MODULES["cayley_string"](**SIZES).init_with_output

    def matrix_and_angles():
        layer = init(jax.random.key(0), (5,), 0)[0][1]
        return layer.matrix, layer.angles

    matrix, angles = run(matrix_and_angles)
    np.testing.assert_array_equal(matrix[1], np.eye(HEAD_DIM))
    frequencies = 10000.0 ** (-np.arange(3) / 3)
    np.testing.assert_allclose(angles[1, 4], 4 * frequencies, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "dim", "grid", "message"),
    [
        ("rope2d_mixed", 14, GRID, r"an even head_dim \(dim / num_heads\), got 7"),
        ("cayley_string", 14, (5,), r"an even head_dim \(dim / num_heads\), got 7"),
        ("circulant_string", 4, GRID, r"\(dim / num_heads\) of at least 3, got 2"),
    ],
)
def test_invalid_sizes_raise(name, dim, grid, message):
    module = MODULES[name](dim=dim, num_heads=2, num_layers=1)
    with pytest.raises(ValueError, match=message):
        module.init(jax.random.key(0), grid, 0)


@pytest.mark.parametrize("make", [rotary.Rope2d, rotary.Rope2dMixed])
def test_rotation_by_row_and_column_on_a_line_raises(make):
    module = make(dim=8, num_heads=HEADS, num_layers=1)
    with pytest.raises(
        ValueError, match=f"{make.__name__} needs .* line of 7: .*rope1"
    ):
        module.apply({}, (7,), 0, method="per_layer")


def test_rope2d_with_a_narrow_head_raises():
    module = rotary.Rope2d(dim=8, num_heads=2, num_layers=1)
    with pytest.raises(
        ValueError, match="even .* at least 2 for each axis, here 6, got 4"
    ):
        module.apply({}, (2, 3, 5), 1)


def test_rope1d_with_an_odd_head_dim_raises():
    module = rotary.Rope1d(dim=6, num_heads=2, num_layers=1)
    with pytest.raises(ValueError, match="even head_dim .* got 3"):
        module.apply({}, (5,), 0)

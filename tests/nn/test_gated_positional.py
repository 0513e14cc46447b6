"""Tests gated positional attention: outputs, initial values, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn.nn.gated_positional import GatedPositionalAttention
from tests import reference
from tests.helpers.quick import normal, run

GRID, N, DIM, HEADS, HEAD_DIM = (2, 3), 7, 8, 2, 4


def test_output_equals_the_reference_with_linear_projections():
    module = GatedPositionalAttention(dim=DIM, num_heads=HEADS)
    x = normal(1, 1, N, DIM)
    options = {"grid": GRID, "num_prefix": 1}
    variables = run(functools.partial(module.init, **options), jax.random.key(0), x)
    params = dict(variables["params"])
    params["coefficients"] = normal(2, HEADS, 6)
    params["gate"] = np.float32([-0.3, 0.7])
    out = run(functools.partial(module.apply, **options), {"params": params}, x)

    def project(name):
        y = x[0] @ params[name]["kernel"] + params[name]["bias"]
        return y.reshape(N, HEADS, HEAD_DIM).swapaxes(0, 1)

    attend = functools.partial(
        reference.gated_positional_attention,
        allowed=np.ones((N, N), bool),
        grid=GRID,
        num_prefix=1,
    )
    inputs = *map(project, "qkv"), params["gate"], params["coefficients"]
    expected = run(jax.vmap(attend), *inputs).swapaxes(0, 1).reshape(N, DIM)
    expected = expected @ params["out"]["kernel"] + params["out"]["bias"]
    np.testing.assert_allclose(out[0], expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "causal", "options", "centres"),
    [
        (3, False, {"grid": GRID, "num_prefix": 1}, [[-1, -1], [-1, 0], [0, -1]]),
        (4, False, {"grid": (8,)}, [[-2], [-1], [0], [1]]),
        (4, True, {"grid": (8,)}, [[0], [1], [2], [3]]),
    ],
)
def test_heads_start_around_different_positions(heads, causal, options, centres):
    module = GatedPositionalAttention(
        dim=12, num_heads=heads, causal=causal, locality=0.5
    )
    x = jnp.ones((1, N if "num_prefix" in options else 8, 12))
    params = module.init(jax.random.key(0), x, **options)["params"]
    np.testing.assert_array_equal(params["gate"], 1)
    w = np.asarray(params["coefficients"])
    axes = len(options["grid"])
    np.testing.assert_array_equal(w[:, 0], -0.5)
    np.testing.assert_array_equal(w[:, 1 : 1 + axes], centres)
    np.testing.assert_array_equal(w[:, 1 + axes :], 0)


def test_a_missing_grid_raises():
    with pytest.raises(ValueError, match="needs offsets: pass grid="):
        GatedPositionalAttention(dim=8, num_heads=2).init(
            jax.random.key(0), jnp.ones((1, 7, 8))
        )

"""Tests relative and rotary positions in an attention layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import offsets
from relattn.nn.positions import relative
from relattn.nn.registry import build
from tests import reference
from tests.helpers.quick import normal, run

GRID, N, DIM, HEADS, HEAD_DIM = (2, 3), 7, 8, 2, 4


def layer(attention, position, dtype=jnp.float32):
    """Applies an attention with its position; returns output, parameters and inputs."""
    make_attention, make_position = build(
        attention, position, dim=DIM, num_heads=HEADS, num_layers=2
    )
    module = make_attention(layer=0, dtype=dtype)
    x = normal(1, 2, N, DIM).astype(dtype)

    def outputs(x):
        key = jax.random.key(0)
        encoding, variables = make_position().init_with_output(key, GRID, 1)
        options = {"grid": GRID, "num_prefix": 1, "position": encoding[1]}
        out, attention = module.init_with_output(jax.random.key(2), x, **options)
        return out, attention["params"], variables.get("params", {}).get("table")

    return *run(outputs, x), x


def attend(attend_head, params, x):
    """Computes the layer by heads; ``attend_head`` takes q, k, v and the head."""
    qkv = []
    for name in "qkv":
        out = x @ params[name]["kernel"] + params[name]["bias"]
        qkv.append(out.reshape(N, HEADS, HEAD_DIM).swapaxes(0, 1))
    heads = [attend_head(*y, head) for head, y in enumerate(zip(*qkv, strict=True))]
    out = jnp.stack(heads, axis=1).reshape(N, DIM)
    return out @ params["out"]["kernel"] + params["out"]["bias"]


@pytest.mark.quick("key_table")
@pytest.mark.parametrize("name", ["key_table", "value_table", "bias"])
def test_each_layer_and_head_uses_its_table(name):
    kinds = {"key_table": "relative_key", "value_table": "relative_value"}
    out, params, table, x = layer("softmax", kinds.get(name, "relative_bias"))
    attend_head = functools.partial(
        reference.relative_attention,
        allowed=np.ones((N, N), bool),
        rows=reference.offset_rows(GRID, 1)[0],
    )

    def naive(params, x, table):
        def with_table(*qkv_and_head):
            *qkv, head = qkv_and_head
            return attend_head(*qkv, **{name: table[1, head]})

        return attend(with_table, params, x)

    expected = run(naive, params, x[0], table)
    np.testing.assert_allclose(out[0], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("position", "positions", "base"),
    [
        ("rope2d(base=10.0)", offsets.grid_positions(GRID, 1), 10.0),
        ("rope1d", np.array([[0, 0, 1, 2, 3, 4, 5]]).T, 10000.0),
    ],
)
def test_rotary_rotates_queries_and_keys_except_the_prefix(position, positions, base):
    out, params, _, x = layer("softmax", position)

    def rotated(q, k, v, head):
        q, k = (reference.rotary(y, np.float64(positions), base) for y in (q, k))
        return reference.softmax_attention(q, k, v, np.ones((N, N), bool))

    expected = run(functools.partial(attend, rotated), params, x[0])
    np.testing.assert_allclose(out[0], expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("position", ["relative_key", "relative_bias", "rope2d"])
def test_output_has_the_compute_dtype(position):
    out, *_ = layer("softmax", position, jnp.bfloat16)
    assert out.dtype == jnp.bfloat16 and jnp.isfinite(out).all()


def test_tables_of_another_grid_raise():
    module = relative.RelativeKey(dim=DIM, num_heads=HEADS, num_layers=1)
    variables = run(lambda: module.init(jax.random.key(0), GRID, 1))
    with pytest.raises(ValueError, match="a grid of 3x3 tokens needs"):
        module.apply(variables, (3, 3), 1)

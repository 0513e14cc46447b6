"""Tests resizing to another grid: tables, functions of the position, errors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import freeze

from relattn import offsets
from relattn.models import build_model, resize_grid
from relattn.nn.registry import ATTENTIONS, POSITIONS
from tests import reference
from tests.helpers.export import unchecked_annotations
from tests.helpers.quick import normal, normal_like, run

SMALL, LARGE = (3, 5), (5, 7)
SIZES = {"dim": 8, "num_heads": 2, "num_layers": 2}


def shape_of(leaf):
    return leaf.shape


def offset_grid(grid):
    return tuple(2 * size - 1 for size in grid)


# For each table of a position: the axis of its rows, and the grid of these rows.
TABLES = {
    "learned": {"table": (0, lambda grid: grid)},
    "relative_key": {"table": (-2, offset_grid)},
    "relative_value": {"table": (-2, offset_grid)},
    "relative_bias": {"table": (-1, offset_grid)},
    "irpe_gate": {"rows": (-2, lambda g: g[:1]), "columns": (-2, lambda g: g[1:])},
}


def encode(module, params, grid):
    """Computes the encoding of a layer by position or offset, ``[*grid, ...]``."""
    variables = {"params": params}
    if module.site == "tokens":
        tokens = jnp.zeros((1, np.prod(grid), SIZES["dim"]))
        out = module.apply(variables, tokens, grid)[0]
        return out.reshape(*grid, -1)
    if module.site == "none":
        return jnp.zeros(grid)
    layer = module.apply(variables, grid, 1)[1]
    if layer.tables:
        (table,) = layer.tables.values()
        rows = table.reshape(2, table.shape[1], -1)[:, : offsets.num_offsets(grid)]
        return rows.swapaxes(0, 1).reshape(*offset_grid(grid), -1)
    ones, x = (
        jnp.ones((1, 2, 1 + np.prod(grid), 4)),
        jnp.ones((1, 1 + np.prod(grid), 8)),
    )
    changed = [layer.widen_values(ones, x)]
    if module.site == "heads":
        changed = layer(ones, ones, x)
    both = jnp.concatenate(changed, axis=1)[0, :, 1:]
    return both.swapaxes(0, 1).reshape(*grid, -1)


def draw_params(module, grid):
    """Draws parameters so large that they matter."""

    def init(key):
        if module.site == "tokens":
            return module.init(key, jnp.zeros((1, np.prod(grid), 8)), grid)
        return module.init(key, grid, 1)

    if module.site == "none":
        return {}
    shapes = jax.eval_shape(init, jax.random.key(0)).get("params", {})
    return normal_like(shapes)


def expected_table(table, axis, old, new):
    table = np.moveaxis(np.float64(table), axis, 0)
    rows, rest = int(np.prod(old)), table.shape[1:]
    resized = reference.resize(table[:rows].reshape(*old, *rest), new)
    out = np.concatenate([resized.reshape(-1, *rest), table[rows:]])
    return np.moveaxis(out, 0, axis)


@pytest.mark.quick(
    "old0-new0-learned", "old0-new0-relative_key", "old0-new0-relative_value"
)
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(("old", "new"), [(SMALL, LARGE), (LARGE, SMALL)])
def test_tables_are_resized_both_ways(name, old, new):
    module = POSITIONS[name](**SIZES)
    params = draw_params(module, old)
    resized = run(lambda params: module.resize(params, old, new, 1), params)
    wanted = jax.tree.map(shape_of, draw_params(module, new))
    assert jax.tree.map(shape_of, resized) == wanted
    jax.eval_shape(lambda params: encode(module, params, new), resized)
    for table, (axis, grid_of) in TABLES[name].items():
        expected = expected_table(params[table], axis, grid_of(old), grid_of(new))
        np.testing.assert_allclose(resized[table], expected, atol=2e-5)


@pytest.mark.quick("cayley_string", "circulant_string", "none")
@pytest.mark.parametrize("name", sorted(POSITIONS.keys() - TABLES))
def test_functions_of_the_position_are_equal_on_every_grid(name):
    module = POSITIONS[name](**SIZES)
    params = draw_params(module, SMALL)
    assert module.resize(params, SMALL, LARGE, 1) is params
    assert module.resize(params, LARGE, SMALL, 1) is params
    small, large = run(
        lambda params: [encode(module, params, grid) for grid in (SMALL, LARGE)], params
    )
    if name == "rope1d":
        # Positions count row by row: compare the beginning of the line.
        small, large = small.reshape(1, 15, -1), large.reshape(1, 35, -1)
    # Compare the positions of both grids; offsets are centred at zero.
    centred = small.shape[:2] == offset_grid(SMALL)
    for axis, size in enumerate(small.shape[:2]):
        start = (large.shape[axis] - size) // 2 if centred else 0
        large = large.take(np.arange(start, start + size), axis=axis)
    np.testing.assert_allclose(large, small, rtol=1e-5, atol=1e-5)


def make(grid, **options):
    config = {"name": "vit", "mlp_dim": 11, "patch_size": 2, **SIZES, **options}
    shape = (2 * grid[0], 2 * grid[1], 1)
    model = build_model(config, num_classes=3, image_shape=shape)
    return model, normal(1, 2, *shape)


@pytest.mark.slow
@pytest.mark.parametrize("position", ["learned + relative_bias", "irpe_gate"])
def test_a_resized_model_accepts_images_of_another_size(position):
    model, images = make(SMALL, position=position)
    variables = jax.jit(model.init)(jax.random.key(0), images)
    resized = resize_grid(model, variables, SMALL, LARGE)
    other, larger = make(LARGE, position=position)
    expected = jax.eval_shape(other.init, jax.random.key(0), larger)
    assert jax.tree.map(shape_of, resized) == jax.tree.map(shape_of, expected)
    assert resized["params"]["head"] is variables["params"]["head"]
    assert jnp.isfinite(jax.jit(other.apply)(resized, larger)).all()
    with pytest.raises(ValueError, match="resize its tables by relattn.models.resize"):
        jax.eval_shape(other.apply, variables, larger)
    same = resize_grid(model, variables, SMALL, SMALL)
    assert same["params"] is variables["params"]


@pytest.mark.quick(
    "translution(relative='q')-Translution's q_table",
    "linformer(k=3)-Linformer's key_projection",
)
@pytest.mark.parametrize(
    ("attention", "table"),
    [
        ("translution(relative='q')", "Translution's q_table"),
        ("lor_translution", "Translution's q_table"),
        ("linformer(k=3)", "Linformer's key_projection"),
        ("linformer(k=3, sharing='layers')", "Linformer's projection"),
    ],
)
def test_resizing_matrices_of_a_grid_raises(attention, table):
    model, images = make(SMALL, attention=attention)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)
    message = (
        f"attention {attention!r} has matrices for the grid of 3x5 tokens, which "
        "cannot be resized to 5x7"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        resize_grid(model, variables, SMALL, LARGE)
    _, larger = make(LARGE, attention=attention)
    with pytest.raises(ValueError, match=rf"{table} has shape .* grid of 5x7 tokens"):
        jax.eval_shape(model.apply, variables, larger)


@pytest.mark.parametrize("grid", [7, (4.0, 5), (0, 5), (-1, 5), (15,), (3, 5, 7)])
def test_resizing_to_no_grid_raises(grid):
    model, images = make(SMALL)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)
    message = "grid must be a tuple|sizes of at least 1|both need two axes"
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        resize_grid(model, variables, SMALL, grid)


def test_clipped_matrices_fit_every_grid():
    model, images = make(SMALL, attention="translution(clip=1)")
    variables = jax.eval_shape(model.init, jax.random.key(0), images)
    resized = resize_grid(model, variables, SMALL, LARGE)
    assert resized["params"] == variables["params"]
    _, larger = make(LARGE)
    assert jax.eval_shape(model.apply, resized, larger).shape == (2, 3)


def test_only_translution_and_linformer_have_matrices_of_a_grid():
    names = [name for name, entry in ATTENTIONS.items() if entry.has_grid_tables]
    assert names == ["translution", "lor_translution", "linformer"]


def test_resizing_a_text_model_to_longer_text():
    def make(length, position):
        config = {"name": "gpt", "mlp_dim": 11, **SIZES, "position": position}
        model = build_model(config, vocab_size=13, context_length=length)
        tokens = np.zeros((1, length), np.int32)
        return model, jax.eval_shape(model.init, jax.random.key(0), tokens)

    def resize(position):
        model, variables = make(7, position)
        resized = jax.eval_shape(
            lambda variables: resize_grid(model, variables, (7,), (11,)), variables
        )
        return resized, make(11, position)[1]

    for position in ("learned", "irpe_gate", "cayley_string", "string_gate"):
        resized, expected = (jax.tree.map(shape_of, x) for x in resize(position))
        assert resized == expected
    with pytest.raises(ValueError, match="offsets on a line is not resized"):
        resize("relative_key")
    model, variables = make(7, "none")
    with pytest.raises(ValueError, match="model of tokens: both need one axis"):
        resize_grid(model, variables, (1, 7), (1, 11))


@pytest.mark.quick("softmax-learned", "lor_translution-none", "favor-relative_bias")
@pytest.mark.parametrize(
    ("attention", "position"),
    [
        ("softmax", "learned"),
        ("softmax", "relative_key"),
        ("softmax", "irpe_gate"),
        ("favor", "relative_bias"),
        ("favor", "rope1d"),
        ("translution", "learned"),
        ("translution(clip=2)", "none"),
        ("lor_translution", "none"),
    ],
)
def test_a_shorter_text_is_computed_as_before(attention, position):
    config = {"name": "gpt", "mlp_dim": 11, **SIZES}
    config |= {"attention": attention, "position": position}
    model, shorter = (
        build_model(config, vocab_size=13, context_length=length) for length in (11, 7)
    )
    tokens = jax.random.randint(jax.random.key(0), (2, 7), 0, 13)
    like = jax.eval_shape(model.init, jax.random.key(1), tokens)
    variables = normal_like(like, scale=0.3)
    expected = run(model.apply, variables, tokens)
    resized = resize_grid(model, freeze(variables), (11,), (7,))
    np.testing.assert_allclose(run(shorter.apply, resized, tokens), expected, atol=1e-5)


@pytest.mark.parametrize("position", ["learned", "relative_key"])
def test_shortening_a_text_of_another_length_raises(position):
    config = {"name": "gpt", "mlp_dim": 11, **SIZES, "position": position}
    model = build_model(config, vocab_size=13, context_length=7)
    tokens = np.zeros((1, 7), np.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
    message = "not those of this model with a context of 9 tokens: pass the context"
    with pytest.raises(ValueError, match=message):
        resize_grid(model, variables, (9,), (5,))


def test_a_model_of_points_has_no_grid():
    config = {"name": "point_transformer", "mlp_dim": 11, **SIZES}
    model = build_model(config, num_classes=3, point_shape=(5, 2, 1))
    variables = {"params": {"head": 1}}
    assert resize_grid(model, variables, SMALL, LARGE) == variables

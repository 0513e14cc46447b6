"""Tests banded attention: values, masks, prefix tokens, large inputs and cost."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import offsets
from relattn.kernels import feature_maps
from relattn.kernels.banded import banded_attention
from relattn.offsets import Torus
from tests import reference
from tests.helpers.quick import normal, run

HEAD_DIM, VALUE_DIM, FEATURES = 5, 3, 13


def _inputs(grid, num_prefix, clip, *batch, q_scale=1.0, table_scale=1.0):
    n = num_prefix + math.prod(grid)
    return (
        normal(0, *batch, n, HEAD_DIM, scale=q_scale),
        normal(1, *batch, n, VALUE_DIM),
        normal(2, clip + 1, HEAD_DIM, scale=table_scale),
    )


PROJECTION = normal(3, FEATURES, HEAD_DIM)


def _positive(x):
    return feature_maps.positive_features(x, PROJECTION)


def _log_positive(x):
    x = x / x.shape[-1] ** 0.25
    projected = x @ PROJECTION.astype(x.dtype).T
    return projected - 0.5 * (x**2).sum(-1, keepdims=True) - 0.5 * math.log(FEATURES)


def _mask(n, *batch):
    return np.random.default_rng(4).random((*batch, n)) < 0.6


def _reference(inputs, **options):
    """Computes the reference's output and gradients of a weighted sum in float64."""
    with jax.enable_x64(True):
        inputs = [np.float64(x) for x in inputs]
        weights = np.float64(normal(5, *inputs[1].shape))

        def loss(q, v, table):
            out = reference.banded_attention(q, v, table, _log_positive, **options)
            return (weights * out).sum(), out

        gradients, out = run(jax.grad(loss, (0, 1, 2), has_aux=True), *inputs)
        return out, gradients


def _kernel(inputs, feature_map=_positive, **options):
    weights = normal(5, *inputs[1].shape)

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1, 2), has_aux=True)
    def gradients(q, v, table):
        out = banded_attention(q, v, table, feature_map, **options)
        return (weights * out).sum(), out

    grads, out = jax.device_get(gradients(*inputs))
    return out, grads


def _assert_close(actual, expected, tolerance):
    for x, y in zip([actual[0], *actual[1]], [expected[0], *expected[1]], strict=True):
        np.testing.assert_allclose(x, y, atol=tolerance * max(1.0, np.abs(y).max()))


@pytest.mark.quick("grid2-2-2-True", "grid12-0-4-False")
@pytest.mark.parametrize(
    ("grid", "num_prefix", "clip", "masked"),
    [
        ((3, 5), 0, 1, False),
        ((3, 5), 1, 2, False),
        ((7, 5), 2, 2, True),
        ((5, 7), 1, 5, False),
        ((7, 3), 1, 6, False),
        ((3, 5), 1, 6, True),
        ((2, 3), 0, 11, False),
        ((2, 3), 1, 11, True),
        ((1, 7), 1, 2, False),
        ((1, 1), 0, 1, False),
        (Torus((7, 5)), 1, 2, True),
        (Torus((4, 3)), 1, 2, False),
        (Torus((5, 6)), 0, 4, False),
        (Torus((3, 2)), 1, 11, True),
        ((7,), 1, 3, True),
        ((2, 3, 5), 1, 3, True),
        ((3, 5, 2), 0, 11, False),
        ((2, 1, 3, 2), 1, 3, False),
        (Torus((2, 3, 5)), 1, 3, True),
        (Torus((5, 3, 4)), 0, 11, False),
        # Rings that just meet, and that do not.
        (Torus((6, 7)), 1, 4, True),
        (Torus((7, 11)), 1, 4, True),
        (Torus((7,)), 0, 4, False),
        (Torus((5, 7, 3)), 2, 2, True),
    ],
)
def test_values_and_gradients_match_reference(grid, num_prefix, clip, masked):
    inputs = _inputs(grid, num_prefix, clip)
    mask = _mask(len(inputs[0])) if masked else None
    options = {"grid": grid, "num_prefix": num_prefix}
    expected = _reference(inputs, key_mask=mask, **options)
    _assert_close(_kernel(inputs, key_mask=mask, **options), expected, 1e-5)


@pytest.mark.quick("grid1-2-3-True", "grid3-1-5-False")
@pytest.mark.parametrize(
    ("grid", "num_prefix", "clip", "masked"),
    [
        ((3, 5), 1, 1, False),
        ((7, 5), 2, 3, True),
        ((5, 7), 1, 5, False),
        # The farthest token of the corner, at height + width - 1, has its own row.
        ((2, 3), 1, 5, False),
        ((2, 3), 1, 11, True),
        ((3, 2), 0, 2, False),
    ],
)
def test_prefix_queries_at_the_corner_match_reference(grid, num_prefix, clip, masked):
    inputs = _inputs(grid, num_prefix, clip)
    mask = _mask(len(inputs[0])) if masked else None
    options = {"grid": grid, "num_prefix": num_prefix, "cls": "corner"}
    expected = _reference(inputs, key_mask=mask, **options)
    _assert_close(_kernel(inputs, key_mask=mask, **options), expected, 1e-5)


def test_the_corner_is_below_the_bottom_left_token():
    # Only the weight of distance 2 is large: that of the tokens (1, 0) and (2, 1).
    q, v, _ = _inputs((3, 5), 1, 3)
    table = np.float32([0, 0, 40, 0])[:, None] * np.ones(HEAD_DIM, np.float32)

    @functools.partial(jax.jit, static_argnames="cls")
    def attend(cls):
        where = {"grid": (3, 5), "num_prefix": 1, "cls": cls}
        return banded_attention(q, v, table, lambda x: jnp.exp(x / 4), **where)

    corner, far = np.asarray(attend("corner")), np.asarray(attend("far"))
    image = v[1:].reshape(3, 5, VALUE_DIM)
    np.testing.assert_allclose(corner[0], (image[1, 0] + image[2, 1]) / 2, atol=2e-3)
    np.testing.assert_allclose(far[0], v.mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(corner[1:], far[1:], atol=1e-6)


@pytest.mark.quick("6-False-far-scales2", "3-True-corner-scales2")
@pytest.mark.parametrize("scales", [(20.0, 1.0), (1.0, 20.0), (20.0, 20.0)])
@pytest.mark.parametrize(
    ("clip", "masked", "cls"),
    [(3, False, "corner"), (6, False, "far"), (3, True, "corner"), (3, False, "far")],
    ids=str,
)
def test_large_queries_and_tables_match_reference(clip, masked, cls, scales):
    # Exponents of rows differ widely, and a query may have keys only at small ones.
    inputs = _inputs((3, 5), 1, clip, q_scale=scales[0], table_scale=scales[1])
    mask = _mask(16) if masked else None
    options = {"grid": (3, 5), "num_prefix": 1, "cls": cls}
    expected = _reference(inputs, key_mask=mask, **options)
    actual = _kernel(inputs, key_mask=mask, **options)
    np.testing.assert_allclose(actual[0], expected[0], atol=2e-3)
    assert all(np.isfinite(x).all() for x in actual[1])


@pytest.mark.parametrize("clip", [3, 4])
def test_shift_ignores_rows_without_keys(clip):
    # The last row has much larger exponents than the others, but the middle of the
    # grid has no keys more than three steps away.
    q, v, table = _inputs((3, 5), 0, clip, table_scale=20.0)
    table[-1] = 0
    inputs = q, v, table
    expected = _reference(inputs, grid=(3, 5), num_prefix=0)
    actual = _kernel(inputs, grid=(3, 5))
    np.testing.assert_allclose(actual[0], expected[0], atol=2e-3)


def _dense(inputs, feature_map, grid, num_prefix, mask):
    """Computes the output from dense features and weights of all pairs."""
    q, v, table = inputs
    distances = offsets.distances(grid, len(table) - 1, num_prefix)
    # Prefix queries stand one row below the first column.
    below = offsets.distances((grid[0] + 1, grid[1]), len(table) - 1)
    distances[:num_prefix, num_prefix:] = below[-grid[1], : math.prod(grid)]
    phi = [feature_map(x) for x in (q, table)]
    queries, rows = (getattr(f, "dense", lambda f=f: f)() for f in phi)
    weights = jnp.einsum("nf,nmf->nm", queries, rows[distances]) * mask
    return (weights @ v) / weights.sum(-1, keepdims=True)


@pytest.mark.quick("array-True")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "feature_map",
    [
        lambda x: feature_maps.relu_features(x, PROJECTION),
        lambda x: feature_maps.trigonometric_features(x, normal(3, 331, HEAD_DIM)),
        lambda x: jax.nn.elu(x) + 1.0,
        lambda x: feature_maps.Features(1.0 + jnp.square(x), x, jnp.zeros(x.shape[-1])),
    ],
    ids=["relu", "trigonometric", "array", "factors and exponents"],
)
def test_other_feature_maps_match_dense_attention(feature_map, masked):
    inputs = _inputs((3, 5), 2, 3, q_scale=0.3, table_scale=0.3)
    mask = _mask(17) if masked else np.ones(17, bool)
    out, gradients = _kernel(
        inputs,
        feature_map,
        grid=(3, 5),
        num_prefix=2,
        cls="corner",
        key_mask=mask if masked else None,
    )
    weights = normal(5, 17, VALUE_DIM)

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1, 2), has_aux=True)
    def dense(*x):
        expected = _dense(x, feature_map, (3, 5), 2, mask)
        return (weights * expected).sum(), expected

    expected_gradients, expected = dense(*inputs)
    _assert_close((out, gradients), (expected, expected_gradients), 1e-4)


def test_cancelling_weights_give_finite_values_and_gradients():
    # With one frequency a row's weight is cos(q - w), here zero.
    def feature_map(x):
        return feature_maps.trigonometric_features(x, jnp.ones((1, HEAD_DIM)))

    q, v, table = _inputs((1, 3), 0, 1)
    q = np.full_like(q, np.pi / 2 / HEAD_DIM**0.75)
    out, gradients = _kernel((q, v, 0 * table), feature_map, grid=(1, 3))
    assert all(np.isfinite(x).all() for x in [out, *gradients])


def test_prefix_queries_average_values_and_prefix_keys_are_at_clip():
    grid, clip = (3, 5), 2
    q, v, table = _inputs(grid, 1, clip)

    @jax.jit
    def attend(v):
        v = v.astype(jnp.float32)
        return banded_attention(q, v, table, _positive, grid=grid, num_prefix=1)

    out = np.asarray(attend(v))
    np.testing.assert_allclose(out[0], v.mean(axis=0), atol=1e-6)
    scores = run(lambda: _positive(q).dense() @ _positive(table).dense().T)
    change = np.asarray(attend(v + (np.arange(16) == 0)[:, None])) - out
    for i, distances in enumerate(offsets.distances(grid, clip), start=1):
        total = scores[i, clip] + scores[i, distances].sum()
        np.testing.assert_allclose(change[i], scores[i, clip] / total, atol=1e-6)


def test_mask_broadcasts_over_heads():
    q, v, table = _inputs((3, 5), 1, 4, 2, 3)
    mask = _mask(16, 2, 1)

    @jax.jit
    def attend(q, v, mask):
        return banded_attention(
            q, v, table, _positive, grid=(3, 5), num_prefix=1, key_mask=mask
        )

    shared = np.broadcast_to(mask, (2, 3, 16))
    expected = jax.vmap(jax.vmap(attend))(q, v, shared)
    np.testing.assert_allclose(attend(q, v, mask), expected, atol=1e-6)


@pytest.mark.parametrize("wide", range(3))
def test_gradients_have_the_dtypes_of_their_arguments(wide):
    def loss(*inputs):
        return banded_attention(*inputs, jax.nn.softplus, grid=(2, 4)).sum()

    inputs = list(_inputs((2, 4), 0, 2))
    with jax.enable_x64(True):
        inputs[wide] = np.float64(inputs[wide])
        gradients = jax.eval_shape(jax.grad(loss, (0, 1, 2)), *inputs)
    assert [x.dtype for x in gradients] == [x.dtype for x in inputs]


@pytest.mark.quick("0-far")
@pytest.mark.parametrize(("num_prefix", "cls"), [(0, "far"), (2, "far"), (2, "corner")])
def test_without_keys_output_is_zero_and_gradients_finite(num_prefix, cls):
    inputs = _inputs((3, 5), num_prefix, 2)
    out, gradients = _kernel(
        inputs,
        grid=(3, 5),
        num_prefix=num_prefix,
        cls=cls,
        key_mask=np.zeros(15 + num_prefix, bool),
    )
    assert (out == 0).all()
    assert all(np.isfinite(x).all() for x in gradients)


def test_interior_outputs_are_translation_equivariant():
    q, v, table = _inputs((11, 13), 0, 2)
    image = np.zeros((11, 13, VALUE_DIM), np.float32)
    image[4:7, 5:8] = normal(6, 3, 3, VALUE_DIM)
    one_query = np.broadcast_to(q[:1], q.shape)

    @jax.jit
    def attend(image):
        v = image.reshape(-1, VALUE_DIM)
        return banded_attention(one_query, v, table, _positive, grid=(11, 13))

    out = np.asarray(attend(image)).reshape(image.shape)
    moved = attend(np.roll(image, (1, -2), (0, 1)))
    moved = np.asarray(moved).reshape(image.shape)
    np.testing.assert_allclose(moved[4:9, 3:8], out[3:8, 5:10], atol=1e-6)


@pytest.mark.slow
def test_flops_are_linear_in_length_and_clip():
    def flops(grid, clip):
        inputs = _inputs(grid, 1, clip)

        def loss(*x):
            return (banded_attention(*x, _positive, grid=grid, num_prefix=1) ** 2).sum()

        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*inputs).compile()
        return compiled.cost_analysis()["flops"]

    few = flops((17, 19), 3)
    assert flops((17, 19), 9) < 3.5 * few
    assert flops((34, 19), 3) < 2.2 * few


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table": np.ones((1, HEAD_DIM))}, "expected at least 2 rows, got 1"),
        ({"grid": (5, 3), "num_prefix": 0}, "holds 15 tokens, got 16"),
        ({"v": np.ones((15, VALUE_DIM))}, "must have the same n, got shapes"),
        (
            {"table": np.ones((3, 7))},
            r"same head_dim, got shapes \(16, 5\) and \(3, 7\)",
        ),
        ({"cls": "middle"}, "unknown cls 'middle': available: corner, far"),
        (
            {"cls": "corner", "grid": Torus((3, 5))},
            r"needs a grid with a last row, got Torus\(\(3, 5\)\): use cls='far'",
        ),
        (
            {"feature_map": lambda x: jnp.stack([x, 2 * x])},
            r"must share its features .*, got shape \(2, 3, 5\): use jax.vmap",
        ),
    ],
)
def test_errors_name_expected_values(change, message):
    q, v, table = _inputs((3, 5), 1, 2)
    arguments = {"q": q, "v": v, "table": table, "grid": (3, 5), "num_prefix": 1}
    with pytest.raises(ValueError, match=message):
        banded_attention(**{"feature_map": _positive, **arguments, **change})

"""Tests draws of random projections, and redraws."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn.kernels import positive_features, random_projections
from tests.helpers.export import unchecked_annotations
from tests.helpers.quick import run

NUM_FEATURES, HEAD_DIM = 7, 5
KEY = jax.random.key(3)


def draw_orthogonal(*sizes, **options):
    return run(lambda: random_projections.draw_orthogonal(KEY, *sizes, **options))


@pytest.mark.parametrize("num_features", [3, 5, 13])
def test_rows_are_orthogonal_within_blocks(num_features):
    projection = draw_orthogonal(num_features, HEAD_DIM, norms="fixed")
    assert projection.shape == (num_features, HEAD_DIM)
    assert projection.dtype == jnp.float32
    for start in range(0, num_features, HEAD_DIM):
        block = projection[start : start + HEAD_DIM]
        np.testing.assert_allclose(
            block @ block.T, HEAD_DIM * np.eye(len(block)), atol=1e-5
        )


def test_rows_are_orthogonal_at_large_head_dim():
    rows = draw_orthogonal(300, 256, norms="fixed") / 16
    for block in (rows[:256], rows[256:]):
        block = np.float64(block)
        np.testing.assert_allclose(block @ block.T, np.eye(len(block)), atol=1e-5)


@pytest.mark.quick("1-True", "1-False", "2-False")
@pytest.mark.parametrize("sign_corrected", [True, False])
@pytest.mark.parametrize("head_dim", [1, 2, 5, 48])
def test_rows_match_lapack(head_dim, sign_corrected):
    options = {"norms": "fixed", "sign_corrected": sign_corrected}
    rows = draw_orthogonal(3 * head_dim, head_dim, **options)

    def draw_blocks():
        block_key, _ = jax.random.split(KEY)
        return jax.random.normal(block_key, (3, head_dim, head_dim))

    gaussian = np.float64(run(draw_blocks))
    q, r = np.linalg.qr(gaussian)
    if sign_corrected:
        q *= np.sign(np.diagonal(r, axis1=1, axis2=2))[:, None, :]
    expected = q.swapaxes(1, 2).reshape(rows.shape) * head_dim**0.5
    np.testing.assert_allclose(rows, expected, atol=1e-5)


# Decompositions by LAPACK or cuSOLVER would be custom calls.
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_draw_lowers_without_lapack(platform):
    draw = jax.jit(
        lambda key: random_projections.draw_orthogonal(key, NUM_FEATURES, HEAD_DIM)
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    exported = jax.export.export(draw, platforms=[platform])(key)
    assert "custom_call" not in exported.mlir_module()


def test_draws_of_a_key_are_unchanged():
    gaussian = [[-1.446257, 1.539381, 0.382506], [1.970702, -0.587667, 0.209416]]
    drawn = run(lambda: random_projections.draw_gaussian(KEY, 2, 3))
    np.testing.assert_allclose(drawn, gaussian, atol=1e-5)
    orthogonal = [[-1.905793, -0.393762], [0.062659, -0.303266], [0.275281, 1.089174]]
    drawn = draw_orthogonal(3, 2)
    np.testing.assert_allclose(drawn, orthogonal, atol=1e-5)
    layer_projection = [
        [1.153859, 1.071999],
        [0.232691, -0.250460],
        [-1.622414, 0.834958],
    ]
    sizes = {"layer": 4, "index": 2, "num_features": 3, "head_dim": 2}
    drawn = run(
        lambda: random_projections.draw_random_features(KEY, **sizes).projection
    )
    np.testing.assert_allclose(drawn, layer_projection, atol=1e-5)


def draw_many(num, **kwargs):
    draw = functools.partial(
        random_projections.draw_orthogonal,
        num_features=NUM_FEATURES,
        head_dim=HEAD_DIM,
        **kwargs,
    )
    return np.asarray(jax.jit(jax.vmap(draw))(jax.random.split(KEY, num)))


def standard_errors_from(samples, expected):
    samples = np.asarray(samples, np.float64)
    error = samples.std(axis=0, ddof=1) / len(samples) ** 0.5
    return (samples.mean(axis=0) - expected) / error


def test_chi_norms_make_every_row_gaussian():
    rows = draw_many(2000)
    assert np.abs(standard_errors_from(rows, 0.0)).max() < 4
    assert np.abs(standard_errors_from(rows**2, 1.0)).max() < 4
    # E w^4 = 3 for a Gaussian; for rows of fixed norm it is 15 / 7.
    assert np.abs(standard_errors_from(rows**4, 3.0)).max() < 4


def test_rows_without_sign_fix_are_not_uniform():
    uniform = draw_many(500)[:, 0, 0]
    unfixed = draw_many(500, sign_corrected=False)[:, 0, 0]
    assert abs(standard_errors_from(uniform, 0.0)) < 4
    assert abs(standard_errors_from(unfixed, 0.0)) > 20


def test_features_without_sign_fix_are_biased():
    x, exact = np.eye(1, HEAD_DIM, dtype=np.float32), np.exp(HEAD_DIM**-0.5)

    def estimate(projection):
        features = positive_features(x, projection).dense()
        return (features @ features.T)[0, 0]

    uniform = run(jax.vmap(estimate), draw_many(2000))
    unfixed = run(jax.vmap(estimate), draw_many(2000, sign_corrected=False))
    assert abs(standard_errors_from(uniform, exact)) < 4
    assert abs(standard_errors_from(unfixed, exact)) > 10


def test_bias_of_fixed_norms_is_as_documented():
    head_dim, x = 12, 1.5 * np.eye(1, 12, dtype=np.float32)

    @jax.jit
    @jax.vmap
    def estimate(key):
        projection = random_projections.draw_orthogonal(
            key, 4 * head_dim, head_dim, norms="fixed"
        )
        features = positive_features(x, projection).dense()
        return (features @ features.T)[0, 0]

    exact = np.exp(1.5**2 / head_dim**0.5)
    documented = np.exp(-(3.0**4) / (4 * head_dim * (head_dim + 2)))
    samples = np.asarray(estimate(jax.random.split(KEY, 2000)))
    assert standard_errors_from(samples, exact) < -8
    assert abs(standard_errors_from(samples, documented * exact)) < 4


@pytest.mark.parametrize("sizes", [(0, 5), (7, 0), (7.0, 5), (7, 2.5)])
@pytest.mark.parametrize(
    "draw", [random_projections.draw_orthogonal, random_projections.draw_gaussian]
)
def test_what_is_no_size_raises(draw, sizes):
    message = "must be (at least 1, got 0|a whole number)"
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        draw(KEY, *sizes)


def test_unknown_norms_raise_and_name_valid_ones():
    with pytest.raises(ValueError, match="unknown norms 'gauss': available: chi"):
        random_projections.draw_orthogonal(KEY, 7, 5, norms="gauss")


def draw(layer, index=0, **kwargs):
    return random_projections.draw_random_features(
        KEY, layer=layer, index=index, num_features=7, head_dim=5, **kwargs
    )


def test_redraw_depends_only_on_key_layer_and_index():
    collection = {"a": [draw(0), draw(1, norms="fixed")], "b": jnp.ones(3)}
    drawn = random_projections.redraw(collection, KEY, 11)
    again = random_projections.redraw(collection, KEY, 2)
    again = random_projections.redraw(again, KEY, 11)
    for one, other in zip(jax.tree.leaves(drawn), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, other)
    assert jax.tree.structure(drawn) == jax.tree.structure(collection)
    np.testing.assert_array_equal(
        drawn["a"][1].projection, draw(1, 11, norms="fixed").projection
    )
    np.testing.assert_array_equal(drawn["b"], 1.0)
    projections = [draw(0), draw(1), draw(0, 1), draw(0, orthogonal=False)]
    for i, one in enumerate(projections):
        for other in projections[i + 1 :]:
            assert np.abs(one.projection - other.projection).min() > 0


def test_layers_share_a_key_where_jax_checks_that_no_key_is_used_twice():
    collection = [draw(0), draw(1)]
    with jax.debug_key_reuse(True):
        for redraw in (random_projections.redraw, jax.jit(random_projections.redraw)):
            drawn = redraw(collection, jax.random.key(3), 1)
    np.testing.assert_array_equal(drawn[1].projection, draw(1, 1).projection)


@pytest.mark.quick("stack0-rbg")
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("stack", [(3,), (2, 3)])
def test_a_stack_gets_what_its_layers_get_alone(stack, impl):
    key = jax.random.key(3, impl=impl)

    def draw(layer, index):
        return random_projections.draw_random_features(
            key, layer=layer, index=index, num_features=5, head_dim=3, norms="fixed"
        )

    first = draw(4, 0)
    shape = (*stack, *first.projection.shape)
    stacked = dataclasses.replace(first, projection=jnp.zeros(shape, jnp.bfloat16))
    layers = range(4, 4 + math.prod(stack))
    expected = run(lambda: jnp.stack([draw(layer, 7).projection for layer in layers]))
    expected = expected.reshape(shape).astype(jnp.bfloat16)
    for redraw in (random_projections.redraw, jax.jit(random_projections.redraw)):
        found = redraw({"layer": stacked}, key, 7)["layer"]
        assert (found.layer, found.norms) == (4, "fixed")
        np.testing.assert_array_equal(found.projection, expected)


@pytest.mark.parametrize("index", [-1, 1.5, np.float32(2)])
def test_an_index_that_is_no_number_of_redraws_raises(index):
    collection = {"layer": draw(0)}
    with unchecked_annotations():
        with pytest.raises(ValueError, match=r"such as step // redraw_every, got"):
            random_projections.redraw(collection, KEY, index)
        if index > 0:
            with pytest.raises(ValueError, match=r"index must be a whole number"):
                jax.jit(random_projections.redraw)(collection, KEY, index)


def test_nothing_to_redraw_raises():
    assert random_projections.redraw({}, KEY, 1) == {}
    with pytest.raises(ValueError, match="has no RandomFeatures to redraw: pass"):
        random_projections.redraw({"projection": jnp.ones((7, 5))}, KEY, 1)


def test_redraw_in_compiled_step_keeps_shapes_and_dtypes():
    features = dataclasses.replace(
        draw(2), projection=draw(2).projection.astype(jnp.bfloat16)
    )

    @jax.jit
    def step(collection, number):
        return jax.lax.cond(
            number % 5 == 0,
            lambda c: random_projections.redraw(c, KEY, number // 5),
            lambda c: c,
            collection,
        )

    kept, redrawn = step([features], 4)[0], step([features], 5)[0]
    assert redrawn.layer == 2 and redrawn.projection.dtype == jnp.bfloat16
    np.testing.assert_array_equal(kept.projection, features.projection)
    np.testing.assert_array_equal(
        redrawn.projection, draw(2, 1).projection.astype(jnp.bfloat16)
    )

"""Tests linear attention with offset biases: values, precision, memory and errors."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import kernels, offsets
from relattn.kernels.platform import use_platform
from relattn.kernels.toeplitz_sums import fft_length
from relattn.offsets import Torus
from tests import reference
from tests.helpers import compare
from tests.helpers.quick import quick_jit, run

HEADS, HEAD_DIM, VALUE_DIM = 2, 5, 3
PROJECTION = run(lambda: kernels.draw_orthogonal(jax.random.key(1), 13, HEAD_DIM))
feature_map = functools.partial(compare.feature_map, projection=PROJECTION)
naive_map = functools.partial(compare.naive_map, projection=PROJECTION)
NAMES = ["positive", "trigonometric"]


def draw_inputs(n, rows):
    generator = np.random.default_rng(0)
    shapes = [(n, HEAD_DIM), (n, HEAD_DIM), (n, VALUE_DIM), (rows,)]
    return [
        np.float32(0.6 * generator.standard_normal((HEADS, *shape))) for shape in shapes
    ]


def naive(q, k, v, bias, *, name, allowed, rows):
    bias = reference.gather_rows(bias, rows)
    return reference.linear_attention(q, k, v, naive_map(name), allowed, bias)


@pytest.mark.quick(
    "grid0-0-False-trigonometric-True-options0",
    "grid10-0-False-trigonometric-True-options10",
)
@pytest.mark.parametrize(
    ("grid", "num_prefix", "prefix_rows", "name", "masked", "options"),
    [
        ((3, 5), 0, False, "trigonometric", True, {"dense_size": 14}),
        ((7,), 1, False, "relu", False, {"dense_size": 0, "block_size": 5}),
        ((5, 3), 1, True, "positive", True, {"chunk_size": 6}),
        ((7,), 2, False, "trigonometric", True, {"chunk_size": 3}),
        ((1, 1), 1, True, "positive", False, {}),
        ((3, 2, 5), 1, True, "positive", True, {"chunk_size": 20}),
        ((2, 3, 5), 1, True, "relu", False, {"dense_size": 0}),
        (Torus((2, 3, 5)), 1, True, "positive", False, {"chunk_size": 16}),
        (Torus((2, 3, 5)), 0, False, "relu", False, {"dense_size": 0}),
        (Torus((5, 2)), 1, True, "positive", False, {"chunk_size": 6}),
        (Torus((7,)), 0, False, "trigonometric", True, {"chunk_size": 3}),
        (Torus((7,)), 1, False, "relu", False, {"dense_size": 0, "block_size": 5}),
    ],
)
def test_matches_reference_on_every_grid(
    grid, num_prefix, prefix_rows, name, masked, options
):
    n = num_prefix + math.prod(grid)
    allowed = np.broadcast_to(np.arange(n) % 4 != 2, (n, n))
    if not masked:
        allowed = np.ones((n, n), bool)

    def kernel(q, k, v, bias):
        return kernels.toeplitz_linear_attention(
            q,
            k,
            v,
            feature_map(name),
            bias,
            grid=grid,
            num_prefix=num_prefix,
            key_mask=jnp.asarray(allowed[0]) if masked else None,
            **options,
        )

    rows = reference.offset_rows(grid, num_prefix)[0]
    compare.expect_equal(
        kernel,
        functools.partial(naive, name=name, allowed=allowed, rows=rows),
        draw_inputs(n, offsets.num_table_rows(grid, num_prefix if prefix_rows else 0)),
    )


@pytest.mark.quick("13-relu-options1")
@pytest.mark.parametrize(
    ("n", "name", "options"),
    [
        (11, "trigonometric", {"dense_size": 3, "chunk_size": 2}),
        (13, "relu", {"dense_size": 7}),
        (7, "trigonometric", {}),
    ],
)
def test_causal_matches_reference(n, name, options):
    mask = np.arange(n) % 4 != 0

    def kernel(q, k, v, bias):
        return kernels.causal_toeplitz_linear_attention(
            q,
            k,
            v,
            feature_map(name),
            bias,
            key_mask=jnp.asarray(mask),
            **options,
        )

    compare.expect_equal(
        kernel,
        functools.partial(
            naive,
            name=name,
            allowed=np.tril(np.broadcast_to(mask, (n, n))),
            rows=reference.offset_rows((n,))[0],
        ),
        draw_inputs(n, 2 * n - 1),
    )


@pytest.mark.quick("positive")
@pytest.mark.parametrize("name", NAMES)
def test_later_tokens_have_no_effect(name):
    n = 23
    q, k, v, bias = draw_inputs(n, 2 * n - 1)
    attend = quick_jit(
        functools.partial(
            kernels.causal_toeplitz_linear_attention,
            feature_map=feature_map(name),
            bias=bias,
            dense_size=6,
            chunk_size=4,
        )
    )
    out = np.asarray(attend(q, k, v))
    for first in range(1, n):
        factors = np.where(np.arange(n) < first, 1, -30)[:, None]
        changed = [np.float32(x * factors) for x in (q, k, v)]
        result = np.asarray(attend(*changed))
        np.testing.assert_array_equal(result[:, :first], out[:, :first])


@pytest.mark.quick("positive")
@pytest.mark.parametrize("name", NAMES)
def test_queries_without_keys_give_zeros_and_finite_gradients(name):
    n = 11
    inputs = draw_inputs(n, 2 * n - 1)
    mask = np.arange(n) >= 5

    def attend(q, k, v, bias):
        causal = kernels.causal_toeplitz_linear_attention(
            q, k, v, feature_map(name), bias, key_mask=mask, dense_size=6
        )
        nothing = kernels.toeplitz_linear_attention(
            q, k, v, feature_map(name), bias, grid=(n,), key_mask=mask & False
        )
        return jnp.stack([causal + nothing, nothing])

    results = compare.value_and_gradients(attend, inputs, quick_jit)
    (out, nothing), *gradients = map(np.asarray, results)
    np.testing.assert_array_equal(nothing, 0.0)
    np.testing.assert_array_equal(out[:, :5], 0.0)
    np.testing.assert_allclose(out[:, 5], np.asarray(inputs[2])[:, 5], rtol=1e-5)
    for gradient in gradients:
        assert np.isfinite(gradient).all()


@pytest.mark.quick("False")
@pytest.mark.parametrize("causal", [False, True])
def test_a_scanned_layer_with_a_mask_has_gradients(causal):
    """In the layers of a model, the broadcast mask is a value of the scan's body."""
    n = 5
    q, k, v, bias = draw_inputs(n, 2 * n - 1)
    attend, options = kernels.toeplitz_linear_attention, {"grid": (n,)}
    if causal:
        attend, options = kernels.causal_toeplitz_linear_attention, {}

    def layer(v):
        mask = np.arange(n) > 1
        phi = feature_map("positive")
        return attend(q, k, v, phi, bias, key_mask=mask, **options)

    def scanned(v):
        return jax.lax.scan(lambda v, _: (layer(v), None), v, None, length=2)[0]

    def gradients(v):
        weights = np.arange(1.0, 1 + v.size, dtype=np.float32).reshape(v.shape)
        return [
            jax.grad(lambda v, f=f: (f(v) * weights).sum())(v)
            for f in (scanned, lambda v: layer(layer(v)))
        ]

    np.testing.assert_allclose(*run(gradients, v), rtol=1e-5, atol=1e-5)


@pytest.mark.quick("positive")
@pytest.mark.parametrize("name", NAMES)
def test_decoding_matches_causal_attention(name):
    n = 7
    q, k, v, bias = draw_inputs(n, 2 * n - 1)
    attend = functools.partial(
        kernels.causal_toeplitz_linear_attention, feature_map=feature_map(name)
    )
    expected = quick_jit(attend)(q, k, v, bias=bias)

    @quick_jit
    def step(index):
        future = jnp.arange(n)[:, None] > index
        q_i = jax.lax.dynamic_index_in_dim(q, index, axis=1, keepdims=False)
        # Later entries of the cache must have no effect.
        seen = (jnp.where(future, 1e3, x) for x in (k, v))
        return kernels.causal_toeplitz_linear_attention_step(
            q_i, *seen, feature_map(name), bias, index=index
        )

    outs = np.stack([step(i) for i in range(n)], axis=1)
    np.testing.assert_allclose(outs, expected, rtol=1e-4, atol=2e-6)


def test_longer_table_and_constant_bias_have_no_effect():
    n = 11
    q, k, v, bias = draw_inputs(n, 2 * n - 1)
    attend = quick_jit(
        functools.partial(
            kernels.causal_toeplitz_linear_attention,
            feature_map=feature_map("positive"),
            dense_size=6,
        )
    )
    out = attend(q, k, v, bias=bias)
    longer = attend(q, k, v, bias=np.pad(bias, [(0, 0), (2, 2)]))
    np.testing.assert_allclose(longer, out, atol=1e-6)
    np.testing.assert_allclose(attend(q, k, v, bias=bias + 300), out, atol=1e-4)


def test_zero_bias_gives_linear_attention():
    q, k, v, _ = draw_inputs(13, 1)
    attend = functools.partial(
        kernels.toeplitz_linear_attention,
        feature_map=feature_map("positive"),
        grid=(3, 4),
        num_prefix=1,
    )
    out = quick_jit(attend)(q, k, v, bias=np.zeros(35, np.float32))
    attend = functools.partial(
        kernels.linear_attention, feature_map=feature_map("positive")
    )
    plain = run(attend, q, k, v)
    np.testing.assert_allclose(out, plain, atol=1e-6)


def test_weights_below_rounding_noise_are_guarded():
    # For all but the last queries the only key has a weight far below the largest one.
    n, near = 64, -40.0
    q, k, v, _ = draw_inputs(n, 1)
    bias = np.where(np.arange(2 * n - 1) < n - 1 + 50, np.float32(near), 0)
    mask = np.arange(n) == 0

    def attend(q, k, v):
        return kernels.toeplitz_linear_attention(
            q,
            k,
            v,
            feature_map("positive"),
            bias,
            grid=(n,),
            key_mask=mask,
            dense_size=0,
            block_size=13,
        )

    results = compare.value_and_gradients(attend, (q, k, v), quick_jit)
    out, *gradients = map(np.asarray, results)
    np.testing.assert_allclose(
        out[:, 50:], np.repeat(v[:, :1], n - 50, 1), rtol=1e-4, atol=1e-6
    )
    assert np.abs(out).max() <= 1.01 * np.abs(v[:, 0]).max()
    for gradient in gradients:
        assert np.isfinite(gradient).all()


@pytest.mark.slow
def test_weights_above_rounding_noise_are_exact():
    # With a single distant key, denominators are about 2e-5 of the largest weight.
    n = 64
    q, k, v, _ = draw_inputs(n, 1)
    far = jnp.arange(2 * n - 1) >= n - 1 + 50
    out = kernels.toeplitz_linear_attention(
        q,
        k,
        v,
        feature_map("positive"),
        jnp.where(far, 0.0, np.log(2e-5)),
        grid=(n,),
        key_mask=jnp.arange(n) == 0,
        dense_size=0,
        block_size=13,
    )
    error = np.abs(out - v[:, :1]).max()
    assert error < 0.1 * np.abs(v[:, 0]).max()


@pytest.mark.parametrize("causal", [False, True])
def test_the_platform_chooses_the_length_from_which_ffts_are_used(causal):
    n = 32771
    x = jax.ShapeDtypeStruct((n, 3), jnp.float32)
    bias = jax.ShapeDtypeStruct((2 * n - 1,), jnp.float32)

    def attend(q, k, v, bias):
        if causal:
            attention = kernels.causal_toeplitz_linear_attention
            return attention(q, k, v, jnp.exp, bias)
        attention = kernels.toeplitz_linear_attention
        return attention(q, k, v, jnp.exp, bias, grid=(n,))

    for platform, has_fft in (("cpu", True), ("tpu", False)):
        with use_platform(platform):
            program = str(jax.make_jaxpr(attend)(x, x, x, bias))
        assert ("fft" in program) == has_fft


@pytest.mark.slow
def test_fft_precision_on_long_sequence():
    n = 4096
    generator = np.random.default_rng(0)
    phi = jnp.asarray(generator.uniform(0.1, 2.0, (n, 1)), jnp.float32)
    v = jnp.asarray(generator.standard_normal((n, 2)), jnp.float32)
    bias = jnp.asarray(generator.standard_normal(2 * n - 1), jnp.float32)
    out = kernels.toeplitz_linear_attention(
        phi, phi, v, jnp.asarray, bias, grid=(n,), dense_size=0
    )
    rows = (np.arange(0, n, 97)[:, None] - np.arange(n)) + n - 1
    weights = np.exp(np.float64(bias))[rows] * np.float64(phi)[:, 0]
    expected = weights @ v / weights.sum(axis=1, keepdims=True)
    # Averages of n random values are small: the error is relative to the values.
    np.testing.assert_allclose(out[::97], expected, rtol=0, atol=2e-6)


def test_is_translation_equivariant_up_to_fft_rounding():
    grid, shift = (11, 13), 3 * 13 + 5
    q, k, v, bias = draw_inputs(143, offsets.num_offsets(grid))
    inside = (offsets.grid_positions(grid) < (6, 7)).all(axis=1)

    @quick_jit
    def attend(q, k, v, mask):
        return kernels.toeplitz_linear_attention(
            q,
            k,
            v,
            feature_map("positive"),
            bias,
            grid=grid,
            key_mask=mask,
            dense_size=0,
        )

    out = np.asarray(attend(q, k, v, inside))
    moved = (np.roll(x, shift, axis=-2) for x in (q, k, v))
    moved = np.asarray(attend(*moved, np.roll(inside, shift)))
    difference = moved[:, np.roll(inside, shift)] - out[:, inside]
    assert np.linalg.norm(difference) <= 1e-5 * np.linalg.norm(out[:, inside])
    assert (difference != 0).any()


@pytest.mark.slow
def test_memory_holds_transforms_of_one_block_of_features():
    n, features, width = 512, 96, 24
    projection = kernels.draw_gaussian(jax.random.key(0), features, HEAD_DIM)
    positive = functools.partial(kernels.positive_features, projection=projection)

    def loss(attend, q, v, bias):
        return attend(q, q, v, positive, bias, dense_size=128, block_size=2).sum()

    shapes = [(n, HEAD_DIM), (n, width - 1), (2 * n - 1,)]
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    on_grid = functools.partial(kernels.toeplitz_linear_attention, grid=(n,))
    for attend in (on_grid, kernels.causal_toeplitz_linear_attention):
        gradient = jax.grad(functools.partial(loss, attend), argnums=(0, 1, 2))
        compiled = jax.jit(gradient).lower(*shapes).compile()
        used = compiled.memory_analysis().temp_size_in_bytes
        assert used < n * features * width * 4


def test_fft_lengths_have_small_factors():
    assert [fft_length(size) for size in (1, 7, 11, 13, 31, 241)] == [
        1,
        8,
        12,
        15,
        32,
        243,
    ]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x: kernels.toeplitz_linear_attention(
                x, x, x, jnp.exp, jnp.ones(15), grid=(2, 3)
            ),
            "grid 2x3 with num_prefix=0 holds 6 tokens, got 7",
        ),
        (
            lambda x: kernels.toeplitz_linear_attention(
                x, x, x, jnp.exp, jnp.ones(16), grid=(2, 3), num_prefix=1
            ),
            "bias needs 15 rows, one for each offset, or 18 with those of.*got 16",
        ),
        (
            lambda x: kernels.toeplitz_linear_attention(
                x, x, x, jnp.exp, jnp.ones(13), grid=(7,), block_size=0
            ),
            "block_size must be at least 1, got 0",
        ),
        (
            lambda x: kernels.toeplitz_linear_attention(
                x, x, x, jnp.exp, jnp.ones(13), grid=(7,), chunk_size=0
            ),
            "chunk_size must be at least 1, got 0",
        ),
        (
            lambda x: kernels.causal_toeplitz_linear_attention(
                x, x, x, jnp.exp, jnp.ones(11)
            ),
            "bias needs an odd number of rows, at least 13 for a sequence of 7",
        ),
        (
            lambda x: kernels.causal_toeplitz_linear_attention(
                x, x, x, jnp.exp, jnp.ones(13), dense_size=0
            ),
            "dense_size must be at least 1, got 0",
        ),
        (
            lambda x: kernels.causal_toeplitz_linear_attention(
                x, x, x, lambda x: kernels.Features(None, x), jnp.ones(13)
            ),
            "with a bound, or with values and one exponent",
        ),
        (
            lambda x: kernels.causal_toeplitz_linear_attention_step(
                x[0], x, x, jnp.exp, jnp.ones(7), index=0
            ),
            "bias needs 13 rows, one for each offset, got 7",
        ),
    ],
)
def test_invalid_arguments_raise(call, message):
    with pytest.raises(ValueError, match=message):
        call(jnp.ones((7, HEAD_DIM)))

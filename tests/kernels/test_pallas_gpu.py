"""Tests linear attention by GPU kernels, in Pallas' interpreter.

A slow test compiles them for an H100. They ran on no device yet.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn.kernels import draw_orthogonal, pallas_gpu
from relattn.kernels.feature_maps import positive_features, relu_features
from relattn.kernels.linear import causal_linear_attention, linear_attention
from relattn.kernels.pallas_gpu import linear as fused
from relattn.kernels.platform import use_platform
from tests import reference
from tests.helpers import compare
from tests.helpers.interpreted import (
    call_alone,
    count_for_h100,
    interpret,
    largest_array,
)
from tests.helpers.quick import normal, quick_jit, run

HEADS, N, M, HEAD_DIM, VALUE_DIM = 2, 19, 37, 5, 3
PROJECTION = run(lambda: draw_orthogonal(jax.random.key(1), 13, HEAD_DIM))
feature_map = functools.partial(positive_features, projection=PROJECTION)
# Parameters of a map for every head.
PROJECTIONS = np.stack([PROJECTION, PROJECTION[::-1]])
BIASES = normal(2, HEADS, 13, scale=0.3)
NAMES = ("positive", "relu", "trigonometric")
# Trigonometric weights cancel: XLA's form differs from the reference by up to 1.4e-5.
TOLERANCES = {"positive": 2e-6, "relu": 2e-6, "trigonometric": 2e-5}


@pytest.fixture
def interpreted(monkeypatch):
    """Runs kernels on the CPU, in small chunks, stretches and blocks of features."""
    interpret(monkeypatch, fused, _CHUNK=8, _STRETCH=16, _CAUSAL_CHUNKS=2, _STEP=4)


@pytest.fixture
def one_device(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)


def draw_inputs(*batch, n=N, m=N, dtype=jnp.float32):
    def draw():
        keys = jax.random.split(jax.random.key(0), 3)
        shapes = ((n, HEAD_DIM), (m, HEAD_DIM), (m, VALUE_DIM))
        return [
            0.5 * jax.random.normal(key, (*batch, *shape), dtype)
            for key, shape in zip(keys, shapes, strict=True)
        ]

    return run(draw)


def with_parameters(phi, bias=None):
    return phi if bias is None else functools.partial(phi, bias=bias)


def attend(
    q,
    k,
    v,
    w=PROJECTION,
    *bias,
    name="positive",
    key_mask=None,
    starts=None,
    causal,
    **options,
):
    phi = with_parameters(compare.feature_map(name, w), *bias)
    return fused.attend_on_gpu(
        q, k, v, key_mask, starts, feature_map=phi, causal=causal, **options
    )


def naive(q, k, v, w, *bias, name, allowed):
    phi = functools.partial(getattr(reference, f"{name}_features"), projection=w)
    phi = with_parameters(phi, *bias)
    return reference.linear_attention(q, k, v, phi, allowed)


# Of each map, once for all tests.
NAIVE = {name: functools.partial(naive, name=name) for name in NAMES}


def expect_reference(
    causal, inputs, name="positive", key_mask=None, starts=None, **options
):
    """Compares values and gradients, those of parameters for each head too."""
    n, m = (x.shape[1] for x in inputs[:2])
    allowed = np.tril(np.ones((n, m), bool)) if causal else np.ones((n, m), bool)
    if starts is not None:
        allowed &= np.cumsum(starts)[:, None] == np.cumsum(starts)
    ours = functools.partial(
        attend,
        name=name,
        key_mask=key_mask,
        starts=starts,
        causal=causal,
        precision="default",
    )
    parameters = [PROJECTIONS, BIASES] if name == "relu" else [PROJECTIONS]
    compare.expect_equal(
        jax.vmap(ours),
        NAIVE[name],
        [*inputs, *parameters],
        allowed=allowed if key_mask is None else allowed & key_mask,
        **options,
    )


@pytest.mark.quick("positive-True-19-False", "relu-False-37-True")
@pytest.mark.parametrize(
    ("causal", "m", "masked"), [(True, N, False), (True, N, True), (False, M, True)]
)
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_reference(interpreted, name, causal, m, masked):
    key_mask = jax.device_put(np.arange(m) % 3 != 1) if masked else None
    inputs = draw_inputs(HEADS, m=m)
    expect_reference(causal, inputs, name, key_mask, tolerance=TOLERANCES[name])


# Chunks have 8 and stretches 16 tokens: sequences end within a chunk, and the fourth
# one is longer than a stretch.
STARTS = np.isin(np.arange(M), [3, 10, 11, 34])


@pytest.mark.quick("trigonometric")
@pytest.mark.parametrize("name", NAMES)
def test_packed_sequences_equal_the_reference(interpreted, name):
    exists, starts = jax.device_put((np.arange(M) % 3 != 1, STARTS))
    inputs = draw_inputs(HEADS, n=M, m=M)
    tolerance = TOLERANCES[name]
    expect_reference(True, inputs, name, exists, starts, tolerance=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_causal_attention_gives_the_kernel_its_masks(
    interpreted, one_device, monkeypatch, name
):
    def choose_cuda(*operands, default, cuda):
        del default
        return cuda(*operands)

    # Queries share keys; heads have masks of their own.
    exists = np.stack([np.arange(M) % 3 != 1, np.arange(M) % 5 != 1])
    exists, ids = jax.device_put((exists, np.cumsum(STARTS) % 2))
    q, k, v = map(jnp.asarray, draw_inputs(HEADS, n=M, m=M))
    attend = functools.partial(
        causal_linear_attention,
        feature_map=compare.feature_map(name, PROJECTION),
        key_mask=exists,
        segment_ids=ids,
    )
    expected = attend(q, k[:1], v[:1])
    monkeypatch.setattr(jax.lax, "platform_dependent", choose_cuda)
    with use_platform("gpu", fused_linear=True, causal_chunk=8):
        found = quick_jit(attend)(q, k[:1], v[:1])
    np.testing.assert_allclose(found, expected, atol=TOLERANCES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["relu", "trigonometric"])
def test_keys_that_fill_the_last_chunk_have_no_weight(interpreted, name):
    inputs = draw_inputs(HEADS, m=M)
    expect_reference(False, inputs, name, tolerance=TOLERANCES[name])


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
def test_denominators_are_guarded_as_in_the_form_of_xla(interpreted, causal):
    # Of the last query, which sees both keys, with gradients of the causal form: those
    # of the other have the query's exponent too, which cancels only without a guard.
    def ours(*inputs):
        return attend(*inputs, name="trigonometric", causal=causal)[1:]

    def theirs(q, k, v, w):
        phi = compare.feature_map("trigonometric", w)
        return causal_linear_attention(q, k, v, phi)[1:]

    ours, theirs = (
        quick_jit(functools.partial(value_and_gradients, x)) for x in (ours, theirs)
    )
    # The weights cos(q - k_j) sum to -5e-5 or 5e-5, less than 1e-4 of the magnitudes.
    k, v = np.float32([[0.35], [-0.35]]), np.eye(2, dtype=np.float32)
    for sign in (-1, 1):
        q = np.float32([[0.3], [np.pi / 2 - sign * 5e-5 / (2 * np.cos(0.35))]])
        inputs = q, k, v, np.eye(1, dtype=np.float32)
        results = ours(*inputs)
        assert np.sign(results[0][0, 0]) == sign
        for found, expected in zip(results, theirs(*inputs), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_equals_the_reference_to_its_rounding(interpreted, name, causal):
    inputs = draw_inputs(HEADS, dtype=jnp.bfloat16)
    eps = float(jnp.finfo(jnp.bfloat16).eps)
    # Half of it for features of queries and of keys, sums of pairs, and the result.
    expect_reference(causal, inputs, name, tolerance=2 * eps)


@pytest.mark.slow
def test_float16_is_computed_in_float32(interpreted):
    inputs = draw_inputs(HEADS, dtype=jnp.float16)
    eps = float(jnp.finfo(jnp.float16).eps)
    expect_reference(True, inputs, tolerance=eps)


def value_and_gradients(function, *inputs):
    out, pullback = jax.vjp(function, *inputs)
    cotangent = jnp.cos(jnp.arange(out.size)).reshape(out.shape)
    return out, *pullback(cotangent.astype(out.dtype))


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_earlier_outputs_and_gradients_do_not_depend_on_later_tokens(
    interpreted, name, packed
):
    # In the middle of a chunk and, if packed, of a sequence.
    cut, starts = 11, None
    if packed:
        starts = jax.device_put(np.isin(np.arange(N), [3, 9, 17]))

    @quick_jit
    def earlier(*inputs):
        run = functools.partial(attend, name=name, starts=starts, causal=True)
        out, pullback = jax.vjp(run, *inputs)
        gradients = pullback(jnp.ones_like(out).at[:, cut:].set(0.0))
        return [x[:, :cut] for x in (out, *gradients)]

    inputs = draw_inputs(HEADS)
    factors = np.where(np.arange(N) < cut, 1, -3).astype(np.float32)[:, None]
    changed = [x * factors for x in inputs]
    for ours, theirs in zip(earlier(*changed), earlier(*inputs), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_long_tokens_and_queries_without_keys_are_finite(interpreted, name, causal):
    inputs, exists = draw_inputs(HEADS), np.ones(N, bool)

    @quick_jit
    def run(key_mask, *inputs):
        def masked(*inputs):
            return attend(*inputs, name=name, key_mask=key_mask, causal=causal)

        return value_and_gradients(masked, *inputs)

    for scale in (20, 1e6):
        for x in run(exists, *(scale * x for x in inputs)):
            assert np.isfinite(x).all()
    # Causal queries before the first key have none, others where there is no key.
    first = 7 if causal else N
    out, *gradients = run(np.arange(N) >= first, *inputs)
    np.testing.assert_array_equal(out[:, :first], 0.0)
    for x in gradients:
        assert np.isfinite(x).all()


def test_a_key_that_barely_has_weight_has_the_right_gradient(interpreted):
    def only_key(q, k, v):
        return attend(q, k, v, w=jnp.zeros((1, 1)), causal=True)

    inputs = map(np.float32, ([[0.0]], [[12.82]], [[1000.0]]))
    results = quick_jit(functools.partial(value_and_gradients, only_key))(*inputs)
    # The only key has weight one: out = v.
    for found, expected in zip(results, [1000.0, 0.0, 0.0, 1.0], strict=True):
        np.testing.assert_allclose(found, [[expected]], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_as_exact_for_large_and_small_cotangents(
    interpreted, name, causal
):
    inputs = draw_inputs(HEADS)

    @quick_jit
    def gradients(factor):
        run = functools.partial(attend, name=name, causal=causal)
        out, pullback = jax.vjp(run, *inputs)
        cotangent = jnp.cos(jnp.arange(out.size)).reshape(out.shape)
        return pullback(factor * cotangent)

    expected = gradients(np.float32(1))
    for factor in (2.0**-80, 2.0**80):
        for ours, theirs in zip(gradients(np.float32(factor)), expected, strict=True):
            np.testing.assert_array_equal(ours / factor, theirs)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_no_array_has_the_features_of_every_token(name, causal):
    n, num_features = 4099, 256
    rows = num_features // 2 if name == "trigonometric" else num_features
    inputs = [jnp.zeros((n, 64))] * 3 + [jnp.zeros((rows, 64))]
    run = functools.partial(attend, name=name, key_mask=None, causal=causal)
    # Sums, and gradients of W, of every stretch of 256 tokens, in 64 columns.
    assert largest_array(run, *inputs) < n * num_features / 2


LONG = draw_inputs(HEADS, n=131, m=131)
CAUSAL = {"attention": causal_linear_attention}


def uses_a_kernel(inputs, phi=feature_map, attention=linear_attention, **options):
    run = functools.partial(attention, feature_map=phi, **options)
    with use_platform("gpu", fused_linear=True):
        return "pallas_call" in str(jax.make_jaxpr(run)(*inputs))


@pytest.mark.parametrize("attention", [linear_attention, causal_linear_attention])
def test_a_gpu_uses_kernels_where_they_are_chosen(one_device, attention):
    relu = functools.partial(relu_features, projection=PROJECTION, bias=BIASES[0])
    for options in (
        {},
        {"key_mask": np.arange(131) < 5},
        {"precision": "high"},
        {"phi": relu},
        {"phi": compare.feature_map("trigonometric", PROJECTION)},
    ):
        assert uses_a_kernel(LONG, attention=attention, **options)
    run = functools.partial(attention, feature_map=feature_map)
    with use_platform("gpu"):
        assert "pallas_call" not in str(jax.make_jaxpr(run)(*LONG))


def test_a_gpu_uses_kernels_for_packed_sequences(one_device):
    assert uses_a_kernel(LONG, segment_ids=jnp.arange(131) // 50, **CAUSAL)


@pytest.mark.parametrize(
    "options",
    [
        {"return_normalizer": True},
        {"chunk_size": 64},
        {"precision": "BF16_BF16_F32"},
        {"phi": functools.partial(feature_map, eps=0.1)},
        {"phi": lambda x: feature_map(x)},
        {"phi": (feature_map, feature_map)},
        {"phi": compare.feature_map("hedgehog", PROJECTION)},
        {"phi": functools.partial(feature_map, precision="highest")},
        {"phi": compare.feature_map("positive", jnp.ones((513, HEAD_DIM)))},
        {"phi": compare.feature_map("trigonometric", jnp.ones((257, HEAD_DIM)))},
        CAUSAL | {"return_state": True},
        CAUSAL | {"chunk_size": 131},
    ],
)
def test_what_a_kernel_cannot_compute_uses_none(one_device, options):
    assert not uses_a_kernel(LONG, **options)


def test_wide_heads_and_double_precision_use_no_kernel(one_device):
    wide = jnp.ones((3, 129))
    assert not uses_a_kernel([wide] * 3, compare.feature_map("positive", wide))
    with jax.enable_x64(True):
        assert not uses_a_kernel([jnp.asarray(x, jnp.float64) for x in LONG])


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="needs simulated devices")
def test_several_devices_use_no_kernel():
    assert jax.device_count() > 1
    assert not uses_a_kernel(LONG)


@pytest.mark.slow
def test_a_cpu_computes_the_same_where_kernels_are_chosen(one_device):
    for attention in (linear_attention, causal_linear_attention):
        plain = attention(*LONG, feature_map)
        with use_platform("gpu", fused_linear=True):
            chosen = jax.jit(functools.partial(attention, feature_map=feature_map))
            np.testing.assert_allclose(chosen(*LONG), plain, atol=1e-6)


def test_an_unknown_setting_is_refused():
    with pytest.raises(ValueError, match="unknown setting 'fused' of a platform: did"):
        use_platform("gpu", fused=True)
    with pytest.raises(ValueError, match="unknown platform 'gpus': did you mean 'gpu'"):
        use_platform("gpus")


def test_versions_of_jax_that_have_the_backend():
    """JAX announces its end: then kernels go, and XLA's form remains."""
    there = {"0.10": True, "0.11": True, "0.12": True}
    version = ".".join(jax.__version__.split(".")[:2])
    assert pallas_gpu.is_available() == there[version]


def test_without_the_backend_xla_computes(one_device, monkeypatch):
    monkeypatch.setattr(pallas_gpu, "is_available", lambda: False)
    assert not uses_a_kernel(LONG)


# JAX 0.12 warns whoever lowers these kernels.
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_lowers_for_the_platform_of_the_program(one_device):
    def gradients(*inputs):
        attend = functools.partial(causal_linear_attention, feature_map=feature_map)
        return jax.grad(lambda x: attend(*x).sum())(inputs)

    kernel = "__gpu$xla.gpu.triton"
    # From JAX 0.12 on, Pallas needs a device that a mesh names.
    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", None, "cuda")
    mesh = jax.sharding.AbstractMesh((1,), ("d",), abstract_device=device)
    with (
        jax.sharding.use_abstract_mesh(mesh),
        use_platform("gpu", fused_linear=True),
    ):
        counts = {
            platform: jax.export.export(
                jax.jit(gradients),
                platforms=[platform],
                disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(kernel)],
            )(*LONG)
            .mlir_module()
            .count(kernel)
            for platform in ("cuda", "cpu")
        }
    # Forward two; backward sums of queries, and gradients of queries and of keys.
    assert counts == {"cuda": 5, "cpu": 0}


def count_kernels(packed, name, causal, head_dim, num_features, dtype, precision):
    tokens = ((2, 8, 1000, head_dim), dtype)
    w = ((num_features, head_dim), "float32")

    def gradients(q, k, v, w, g):
        def run(q, k, v, w):
            phi = compare.feature_map(name, w)
            if not causal:
                return linear_attention(q, k, v, phi, precision=precision)
            ids = jnp.arange(1000) // 300 if packed else None
            return causal_linear_attention(
                q, k, v, phi, segment_ids=ids, precision=precision
            )

        return jax.vjp(run, q, k, v, w)[1](g)

    return count_for_h100(gradients, *[tokens] * 3, w, tokens, fused_linear=True)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("name", "head_dim", "num_features", "dtype", "precision"),
    [
        ("positive", 16, 44, "float32", None),
        ("positive", 64, 256, "float32", "high"),
        ("positive", 64, 266, "float32", "highest"),
        ("positive", 64, 256, "bfloat16", None),
        ("positive", 128, 512, "bfloat16", None),
        ("positive", 128, 512, "float32", None),
        ("relu", 64, 266, "bfloat16", None),
        ("relu", 128, 512, "float32", None),
        ("trigonometric", 64, 133, "bfloat16", None),
        ("trigonometric", 64, 133, "float32", "high"),
        ("trigonometric", 128, 256, "float32", None),
    ],
)
def test_compiles_for_a_gpu(causal, name, head_dim, num_features, dtype, precision):
    pytest.importorskip("jax_cuda13_plugin")
    # Forward two; backward sums of queries, and gradients of queries, of keys and,
    # through both, of the map's parameters.
    case = name, causal, head_dim, num_features, dtype, precision
    assert call_alone(count_kernels, False, *case) == 7


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_packed_sequences_compile_for_a_gpu(name, dtype):
    pytest.importorskip("jax_cuda13_plugin")
    case = name, True, 128, 256, dtype, None
    assert call_alone(count_kernels, True, *case) == 7

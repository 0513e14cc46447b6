"""Tests causal linear attention by TPU kernels, in Pallas' interpreter.

That they compile is tested by `benchmarks.compiled`. None ran on a device.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import Mesh, PartitionSpec

from relattn.kernels import draw_orthogonal, pallas_tpu
from relattn.kernels import feature_maps as maps
from relattn.kernels.linear import causal_linear_attention
from relattn.kernels.pallas_tpu import attend_on_tpu, fits_tpu
from relattn.kernels.platform import use_platform
from tests import reference
from tests.helpers import compare
from tests.helpers.quick import normal, quick_jit, run

HEADS, N, HEAD_DIM, VALUE_DIM = 2, 19, 5, 3
PROJECTION = run(lambda: draw_orthogonal(jax.random.key(1), 13, HEAD_DIM))
feature_map = functools.partial(compare.feature_map, projection=PROJECTION)
NAMES = ["positive", "trigonometric", "relu"]


@pytest.fixture
def interpreted(monkeypatch):
    """Runs kernels on the CPU, in chunks of 8 instead of 256 tokens."""
    monkeypatch.setattr(pallas_tpu, "_LANES", 4)
    monkeypatch.setattr(pallas_tpu, "_CHUNK", 8)
    call = functools.partial(pl.pallas_call, interpret=True)
    monkeypatch.setattr(pallas_tpu.pl, "pallas_call", call)


@pytest.fixture
def one_device(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)


def draw_inputs(*batch, length=N, dtype=jnp.float32):
    widths = (HEAD_DIM, HEAD_DIM, VALUE_DIM)
    return [
        normal(seed, *batch, length, width, scale=0.5).astype(dtype)
        for seed, width in enumerate(widths)
    ]


@pytest.mark.quick("positive")
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_reference(interpreted, name):
    naive_map = compare.naive_map(name, PROJECTION)
    compare.expect_equal(
        lambda q, k, v: attend_on_tpu(q, k, v, feature_map(name)),
        lambda q, k, v: reference.linear_attention(
            q, k, v, naive_map, np.tril(np.ones((N, N), bool))
        ),
        draw_inputs(HEADS),
    )


def equals_the_library(make_map, inputs, parameters, tolerance=2e-6):
    """Compares values and gradients, also those of the feature map's arrays."""

    def value_and_gradients(attend):
        def apply(inputs, parameters):
            return attend(*inputs, make_map(*parameters))

        out, pullback = jax.vjp(apply, inputs, parameters)
        cotangent = jnp.cos(jnp.arange(out.size)).reshape(out.shape)
        return out, pullback(cotangent.astype(out.dtype))

    results, expected = (
        quick_jit(functools.partial(value_and_gradients, attend))()
        for attend in (attend_on_tpu, causal_linear_attention)
    )
    for ours, theirs in zip(*map(jax.tree.leaves, (results, expected)), strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        ours, theirs = (np.asarray(x, np.float32) for x in (ours, theirs))
        atol = tolerance * np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)


@pytest.mark.slow
def test_equals_the_library(interpreted):
    def make_map(projection, bias):
        return lambda x: maps.relu_features(x, projection, bias)

    bias = jnp.linspace(-1, 1, len(PROJECTION))
    equals_the_library(make_map, draw_inputs(2, 3), [PROJECTION, bias])


def test_maps_that_differ_between_queries_and_keys_equal_the_library(interpreted):
    def make_map(of_queries, of_keys):
        return tuple(
            functools.partial(maps.positive_features, projection=w, eps=0.1)
            for w in (of_queries, of_keys)
        )

    equals_the_library(make_map, draw_inputs(), [PROJECTION, PROJECTION[::-1]])


@pytest.mark.slow
def test_bfloat16_equals_the_library(interpreted):
    inputs = draw_inputs(3, dtype=jnp.bfloat16)
    make_map = functools.partial(compare.feature_map, "positive")
    equals_the_library(make_map, inputs, [PROJECTION], tolerance=1e-2)


@pytest.mark.parametrize("name", ["positive", "relu"])
def test_earlier_outputs_do_not_depend_on_later_tokens(interpreted, name):
    attend = jax.jit(lambda *x: attend_on_tpu(*x, feature_map(name)))
    inputs = draw_inputs(HEADS)
    out = np.asarray(attend(*inputs))
    # In the middle of a chunk.
    factors = np.where(np.arange(N) < 11, 1, -3).astype(np.float32)[:, None]
    changed = np.asarray(attend(*(x * factors for x in inputs)))
    np.testing.assert_array_equal(changed[:, :11], out[:, :11])
    assert (changed[:, 11:] != out[:, 11:]).any(axis=(0, 2)).all()


def uses_a_kernel(inputs, phi=None, **options):
    phi = phi or feature_map("positive")
    attend = functools.partial(causal_linear_attention, feature_map=phi, **options)
    with use_platform("tpu"):
        return "pallas_call" in str(jax.make_jaxpr(attend)(*inputs))


LONG = draw_inputs(HEADS, length=131)


@pytest.mark.parametrize("name", NAMES)
def test_a_tpu_uses_a_kernel(one_device, name):
    assert uses_a_kernel(LONG, feature_map(name))


@pytest.mark.parametrize(
    "options",
    [
        {"key_mask": np.arange(131) < 5},
        {"segment_ids": jnp.arange(131)},
        {"return_state": True},
        {"chunk_size": 131},
        {"precision": "high"},
        {"phi": lambda x: jnp.cumsum(x, axis=-1) ** 2},
        {"phi": lambda x: jnp.exp(jnp.einsum("hnd,fd->hnf", x, PROJECTION))},
        {"phi": lambda x: x**2 * jnp.arange(2.0)[:, None, None]},
        {"phi": lambda x: jnp.exp(jnp.tile(x, 401))},
    ],
)
def test_what_a_kernel_cannot_compute_uses_none(one_device, options):
    assert not uses_a_kernel(LONG, **options)


def test_double_precision_uses_no_kernel(one_device):
    with jax.enable_x64(True):
        inputs = [jnp.asarray(x, jnp.float64) for x in LONG]
        assert not uses_a_kernel(inputs)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="needs simulated devices")
def test_several_devices_use_a_kernel_if_each_has_its_own_program(monkeypatch):
    assert jax.device_count() > 1
    assert not uses_a_kernel(LONG)
    mesh, split = Mesh(jax.devices()[:1], "d"), PartitionSpec("d")
    # Queries are the same on all devices.
    specs = (PartitionSpec(), split, split)
    for check_vma, count in ((False, 8), (True, 8), (False, 1), (True, 1)):
        monkeypatch.setattr(jax, "device_count", lambda count=count: count)
        fits = []

        def attend(q, k, v, fits=fits):
            fits.append(fits_tpu(q, k, v, feature_map("positive")))
            return v

        jax.shard_map(
            attend, mesh=mesh, in_specs=specs, out_specs=split, check_vma=check_vma
        )(*LONG)
        assert fits == [not check_vma]


def test_lowers_for_the_platform_of_the_program(one_device):
    phi = feature_map("trigonometric")

    def gradients(*inputs):
        attend = functools.partial(causal_linear_attention, feature_map=phi)
        return jax.grad(lambda x: jax.vmap(attend)(*x).sum())(inputs)

    with use_platform("tpu"):
        modules = {
            platform: jax.export.export(jax.jit(gradients), platforms=[platform])(
                *LONG
            ).mlir_module()
            for platform in ("tpu", "cpu")
        }
    assert modules["tpu"].count("tpu_custom_call") == 2
    assert "custom_call" not in modules["cpu"]

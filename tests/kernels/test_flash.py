"""Tests flash attention: cuDNN's by a substitute, the TPU's in Pallas' interpreter.

`benchmarks.compiled` compiles the TPU's, which ran on no device.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from relattn.kernels import (
    causal_relative_attention,
    causal_softmax_attention,
    flash,
    softmax_attention,
)
from relattn.kernels.platform import use_platform
from tests import reference
from tests.helpers import compare
from tests.helpers.quick import normal

HEADS, N, M, HEAD_DIM = 2, 19, 13, 5
BLOCK = 128
LONG = 2111


def draw_inputs(n=N, m=M, dtype=jnp.float32):
    return [
        normal(seed, HEADS, length, HEAD_DIM).astype(dtype)
        for seed, length in enumerate((n, m, m))
    ]


def expect_reference(attend, n, m, causal, **options):
    allowed = np.tril(np.ones((n, m), bool)) if causal else np.ones((n, m), bool)
    compare.expect_equal(
        functools.partial(attend, causal=causal),
        lambda q, k, v: reference.softmax_attention(q, k, v, allowed),
        draw_inputs(n, m),
        **options,
    )


@pytest.fixture
def cudnn(monkeypatch):
    """Substitutes cuDNN, as on a GPU that has it; returns the sizes that it was given.

    The substitute computes in float32, so that it can be compared with the reference.
    """
    plain, sizes = jax.nn.dot_product_attention, []

    def attend(q, k, v, *, implementation, **options):
        assert implementation == "cudnn"
        sizes.append((q.shape[1], k.shape[1], q.shape[-1]))
        return plain(q, k, v, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    return sizes


@pytest.mark.quick("13-False")
@pytest.mark.parametrize(("m", "causal"), [(M, False), (M + 1, False), (N, True)])
def test_cudnn_gets_padded_arrays_and_equals_the_reference(cudnn, m, causal):
    expect_reference(flash.attend_by_cudnn, N, m, causal)
    # It trains with even lengths only, and on head dimensions that 8 divides.
    assert set(cudnn) == {(N + 1, m + m % 2, 8)}


@pytest.mark.slow
@pytest.mark.parametrize(("m", "causal"), [(131, False), (149, True)])
def test_tpu_kernels_equal_the_reference(monkeypatch, m, causal):
    monkeypatch.setattr(flash, "_BLOCK", BLOCK)
    with pltpu.force_tpu_interpret_mode():
        expect_reference(flash.attend_on_tpu, 149, m, causal)


@pytest.fixture
def one_device(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)


def shape_inputs(n=LONG, value_dim=HEAD_DIM, dtype=np.float32):
    return [
        np.ones((HEADS, n, width), dtype) for width in (HEAD_DIM, HEAD_DIM, value_dim)
    ]


def uses_flash(inputs, attend=softmax_attention, precision="default", **options):
    attend = functools.partial(attend, precision=precision, **options)
    return "platform_index" in str(jax.make_jaxpr(attend)(*inputs))


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize(
    "attend", [softmax_attention, causal_softmax_attention, causal_relative_attention]
)
def test_accelerators_use_it(cudnn, one_device, platform, attend):
    with use_platform(platform):
        assert uses_flash(shape_inputs(), attend)
    assert bool(cudnn) == (platform == "gpu")


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize(
    "options",
    [
        {"mask": np.ones((LONG, LONG), bool)},
        {"key_mask": np.ones(LONG, bool)},
        {"bias": np.zeros((LONG, LONG))},
        {"precision": "high"},
        {"precision": "highest"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_it_does_not_compute_uses_blocks(cudnn, one_device, platform, options):
    with use_platform(platform):
        assert not uses_flash(shape_inputs(), **options)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_shared_keys_use_it_and_wider_values_and_windows_do_not(
    cudnn, one_device, platform
):
    q, k, v = shape_inputs()
    with use_platform(platform):
        assert uses_flash((q, k[0], v[0]))
        assert not uses_flash(shape_inputs(value_dim=2 * HEAD_DIM))
        assert not uses_flash((q, k, v.astype(np.float16)))
        assert not uses_flash((q, k, v), causal_softmax_attention, window=5)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="needs simulated devices")
def test_short_or_divided_sequences_use_blocks_on_a_tpu(monkeypatch):
    with use_platform("tpu"):
        assert jax.device_count() > 1
        assert not uses_flash(shape_inputs())
        monkeypatch.setattr(jax, "device_count", lambda: 1)
        assert not uses_flash(shape_inputs(2047))


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError])
def test_what_cudnn_refuses_uses_blocks(monkeypatch, error):
    def refuse(*_, **__):
        raise error("no cuDNN")

    monkeypatch.setattr(jax.nn, "dot_product_attention", refuse)
    with use_platform("gpu"):
        assert not uses_flash(shape_inputs())


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="needs no cuDNN")
def test_a_machine_without_cudnn_uses_blocks():
    with use_platform("gpu"):
        assert not uses_flash(draw_inputs(dtype=jnp.bfloat16))


def test_lowers_for_the_platform_of_the_program(one_device):
    def gradients(*inputs):
        attend = functools.partial(causal_softmax_attention, precision="default")
        return jax.grad(lambda x: attend(*x).sum())(inputs)

    with use_platform("tpu"):
        calls = {
            platform: jax.export.export(jax.jit(gradients), platforms=[platform])(
                *shape_inputs()
            )
            .mlir_module()
            .count("tpu_custom_call")
            for platform in ("tpu", "cpu")
        }
    # Forward, gradients of keys and values, and gradients of queries.
    assert calls == {"tpu": 3, "cpu": 0}

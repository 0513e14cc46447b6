"""Tests softmax attention by GPU kernels, in Pallas' interpreter.

A slow test compiles them for an H100. They ran on no device yet.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import kernels, offsets
from relattn.kernels import pallas_gpu
from relattn.kernels.pallas_gpu import softmax as fused
from relattn.kernels.platform import use_platform
from relattn.kernels.segments import segment_numbers
from relattn.offsets import Torus
from tests import reference
from tests.helpers import compare
from tests.helpers.interpreted import (
    call_alone,
    count_for_h100,
    interpret,
    largest_array,
)
from tests.helpers.quick import normal, quick_jit

HEADS, HEAD_DIM, VALUE_DIM = 2, 5, 3


@pytest.fixture
def interpreted(monkeypatch):
    """Runs kernels on the CPU, in blocks of 8 tokens."""
    interpret(monkeypatch, fused, _BLOCK=8)


@pytest.fixture
def one_device(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)


def draw_inputs(n, m=None, rows=None, dtype=np.float32):
    m = n if m is None else m
    shapes = [(n, HEAD_DIM), (m, HEAD_DIM), (m, VALUE_DIM)]
    inputs = [normal(i, HEADS, *shape) for i, shape in enumerate(shapes)]
    if rows is not None:
        inputs.append(normal(3, HEADS, rows))
    return [x.astype(dtype) for x in inputs]


def attend(q, k, v, bias=None, *, key_mask=None, segments=None, **options):
    options = {"causal": False, "precision": "default", **options}
    key_mask = None if key_mask is None else jnp.asarray(key_mask)
    return fused.attend_on_gpu(q, k, v, key_mask, segments, bias, **options)


GRIDS = {
    "line": ((19,), 0),
    # The second prefix token has a block of its own.
    "line with prefix": ((15,), 2),
    # Blocks of two rows of four slots, the last one empty; and so here.
    "grid with prefix": ((6, 3), 2),
    # Rows of two blocks.
    "wide grid": ((3, 11), 1),
    "column": ((11, 1), 1),
    "torus": (Torus((3, 5)), 1),
}


@pytest.mark.quick("grid with prefix")
@pytest.mark.parametrize("name", GRIDS)
def test_a_bias_equals_the_reference(interpreted, name):
    grid, num_prefix = GRIDS[name]
    n = num_prefix + math.prod(grid)
    key_mask = np.arange(n) % 3 != 1
    expect_reference(grid, num_prefix, key_mask[None, :].repeat(n, 0), key_mask)


@pytest.mark.quick("False")
@pytest.mark.parametrize("packed", [False, True])
def test_a_causal_bias_equals_the_reference(interpreted, packed):
    n = 19
    allowed, key_mask, options = np.tri(n, dtype=bool), None, {}
    if packed:
        # A segment within a block, one over blocks, and an id that comes back.
        ids = np.repeat([4, 1, 4], [3, 9, 7])
        options["segments"] = segment_numbers(jnp.asarray(ids))
        runs = np.repeat([0, 1, 2], [3, 9, 7])
        key_mask = np.arange(n) % 5 != 2
        allowed = allowed & (runs[:, None] == runs) & key_mask
    expect_reference((n,), 0, allowed, key_mask, causal=True, **options)


def expect_reference(grid, num_prefix, allowed, key_mask, **options):
    compare.expect_equal(
        functools.partial(
            attend, grid=grid, num_prefix=num_prefix, key_mask=key_mask, **options
        ),
        functools.partial(_with_bias, rows=reference.offset_rows(grid, num_prefix)[0]),
        draw_inputs(len(allowed), rows=offsets.num_table_rows(grid, num_prefix)),
        allowed=allowed,
        tolerance=2e-6,
    )


def _with_bias(q, k, v, bias, *, rows, allowed):
    options = {"bias": bias, "rows": rows, "allowed": allowed}
    return reference.relative_attention(q, k, v, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("m", "causal"), [(19, True), (37, False)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_without_a_bias_it_equals_the_reference(interpreted, m, causal, dtype):
    n = 19
    eps = float(jnp.finfo(dtype).eps)
    compare.expect_equal(
        functools.partial(attend, causal=causal),
        reference.softmax_attention,
        draw_inputs(n, m, dtype=dtype),
        allowed=np.tri(n, m, dtype=bool) if causal else np.ones((n, m), bool),
        # In bfloat16 the weights are rounded, and the results.
        tolerance=2e-6 if dtype == "float32" else 2 * eps,
    )


@pytest.mark.slow
def test_earlier_outputs_and_gradients_do_not_depend_on_later_tokens(interpreted):
    # In the middle of a block.
    n, cut = 19, 11

    @quick_jit
    def earlier(*inputs):
        run = functools.partial(attend, causal=True, grid=(n,))
        out, pullback = jax.vjp(run, *inputs)
        of_q, of_k, of_v, of_bias = pullback(jnp.ones_like(out).at[:, cut:].set(0.0))
        return [x[:, :cut] for x in (out, of_q, of_k, of_v)] + [of_bias]

    inputs = draw_inputs(n, rows=2 * n - 1)
    factors = np.where(np.arange(n) < cut, 1, -3).astype(np.float32)[:, None]
    changed = [x * factors for x in inputs[:3]] + inputs[3:]
    for ours, theirs in zip(earlier(*changed), earlier(*inputs), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_large_scores_and_queries_without_keys_are_finite(interpreted):
    n = 11

    @quick_jit
    def run(key_mask, *inputs):
        def masked(*inputs):
            return attend(*inputs, key_mask=key_mask, grid=(n,))

        out, pullback = jax.vjp(masked, *inputs)
        return out, *pullback(jnp.ones_like(out))

    inputs = draw_inputs(n, rows=2 * n - 1)
    for x in run(np.ones(n, bool), *(1e4 * x for x in inputs)):
        assert np.isfinite(x).all()
    for x in run(np.zeros(n, bool), *inputs):
        np.testing.assert_array_equal(x, 0.0)


@pytest.mark.slow
def test_two_vmaps_equal_the_batch(interpreted):
    inputs = [np.stack([x, -x]) for x in draw_inputs(11, rows=21)]

    def gradients(run):
        def pull_back(*inputs):
            out, pullback = jax.vjp(run, *inputs)
            return out, *pullback(jnp.cos(out))

        return quick_jit(pull_back)(*inputs)

    run = functools.partial(attend, causal=True, grid=(11,))
    mapped = gradients(jax.vmap(jax.vmap(run)))
    for ours, theirs in zip(mapped, gradients(run), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_no_array_has_a_number_for_every_pair(causal):
    n = 4099
    inputs = [jnp.zeros((n, 64))] * 3 + [jnp.zeros(2 * n - 1)]
    run = functools.partial(attend, causal=causal, grid=(n,))
    # Two blocks of 64 for every distance of blocks, twice while they are added up.
    assert largest_array(run, *inputs) < n * n / 8


LONG = draw_inputs(131)
BIAS = np.ones((HEADS, 261), np.float32)


def uses_a_kernel(attention, inputs=LONG, **options):
    run = functools.partial(attention, **options)
    with use_platform("gpu", fused_softmax=True):
        return "pallas_call" in str(jax.make_jaxpr(run)(*inputs))


relative = functools.partial(kernels.relative_attention, grid=(131,), bias=BIAS)
causal_relative = functools.partial(kernels.causal_relative_attention, bias=BIAS)
gated = {"gate": np.zeros(HEADS), "coefficients": np.ones((HEADS, 2))}
ATTENTIONS = {
    "softmax": kernels.softmax_attention,
    "causal_softmax": kernels.causal_softmax_attention,
    "relative": relative,
    "causal_relative": causal_relative,
    "causal_without_tables": kernels.causal_relative_attention,
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_gpu_uses_kernels_where_they_are_chosen(one_device, name):
    key_mask, segments = np.arange(131) < 5, jnp.arange(131) // 50
    for options in (
        {"key_mask": key_mask, "segment_ids": segments},
        {"precision": "high"},
    ):
        assert uses_a_kernel(ATTENTIONS[name], **options)
    with use_platform("gpu"):
        assert "pallas_call" not in str(jax.make_jaxpr(ATTENTIONS[name])(*LONG))


@pytest.mark.parametrize("causal", [True, False])
def test_gated_positional_attention_uses_kernels(one_device, causal):
    attention, options = kernels.causal_gated_positional_attention, gated
    if not causal:
        attention, options = kernels.gated_positional_attention, {"grid": (131,)}
        options |= gated
    assert uses_a_kernel(attention, **options)


@pytest.mark.parametrize(
    ("attention", "options"),
    [
        (kernels.softmax_attention, {"mask": np.ones((131, 131), bool)}),
        (kernels.softmax_attention, {"bias": np.ones((131, 131))}),
        (kernels.softmax_attention, {"return_logsumexp": True}),
        (kernels.softmax_attention, {"precision": "BF16_BF16_F32"}),
        (relative, {"mask": np.ones((131, 131), bool)}),
        (relative, {"key_table": np.ones((261, HEAD_DIM))}),
        (causal_relative, {"value_table": np.ones((261, VALUE_DIM))}),
    ],
)
def test_what_a_kernel_cannot_compute_uses_none(one_device, attention, options):
    assert not uses_a_kernel(attention, **options)


def test_wide_heads_and_double_precision_use_no_kernel(one_device):
    assert not uses_a_kernel(kernels.softmax_attention, [jnp.ones((3, 129))] * 3)
    with jax.enable_x64(True):
        wide = [jnp.asarray(x, jnp.float64) for x in LONG]
        assert not uses_a_kernel(kernels.softmax_attention, wide)
        # Also of the bias alone.
        causal = kernels.causal_relative_attention
        assert not uses_a_kernel(causal, bias=np.float64(BIAS))
        causal = kernels.causal_gated_positional_attention
        assert not uses_a_kernel(causal, **gated)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="needs simulated devices")
def test_several_devices_use_no_kernel():
    assert jax.device_count() > 1
    assert not uses_a_kernel(relative)


def test_without_the_backend_xla_computes(one_device, monkeypatch):
    monkeypatch.setattr(pallas_gpu, "is_available", lambda: False)
    assert not uses_a_kernel(relative)


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_cpu_computes_the_same_where_kernels_are_chosen(one_device, name):
    options = {
        "key_mask": np.arange(131) % 7 != 2,
        "segment_ids": jnp.arange(131) // 50,
    }
    run = functools.partial(ATTENTIONS[name], **options)
    plain = run(*LONG)
    with use_platform("gpu", fused_softmax=True):
        chosen = jax.jit(functools.partial(ATTENTIONS[name], **options))(*LONG)
    np.testing.assert_allclose(chosen, plain, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
def test_gated_positional_attention_by_kernels_equals_the_reference(
    interpreted, one_device, monkeypatch, causal
):
    monkeypatch.setattr(
        jax.lax, "platform_dependent", lambda *x, cuda, default: cuda(*x)
    )
    n = 11
    inputs = [
        *draw_inputs(n),
        normal(4, HEADS),
        normal(5, HEADS, 2, scale=0.1),
    ]
    key_mask = np.arange(n) % 5 != 2
    allowed = np.tri(n, dtype=bool) if causal else np.ones((n, n), bool)

    def kernel(*inputs):
        attention = kernels.causal_gated_positional_attention
        if not causal:
            attention = functools.partial(kernels.gated_positional_attention, grid=(n,))
        with use_platform("gpu", fused_softmax=True):
            return attention(*inputs, key_mask=key_mask)

    compare.expect_equal(
        kernel,
        functools.partial(
            reference.gated_positional_attention, grid=(n,), num_prefix=0
        ),
        inputs,
        allowed=allowed & key_mask,
        tolerance=2e-6,
    )


def count_kernels(grid, num_prefix, causal, head_dim, dtype, precision):
    n = 1000 if grid is None else num_prefix + math.prod(grid)
    tokens, bias = ((2, 8, n, head_dim), dtype), None
    if grid is not None:
        bias = ((8, offsets.num_table_rows(grid, num_prefix)), "float32")

    def gradients(q, k, v, bias, g):
        def run(q, k, v, bias):
            options = {"bias": bias, "precision": precision}
            if causal:
                return kernels.causal_relative_attention(q, k, v, **options)
            options |= {"grid": grid or (n,), "num_prefix": num_prefix}
            return kernels.relative_attention(q, k, v, **options)

        return jax.vjp(run, q, k, v, bias)[1](g)

    arguments = *[tokens] * 3, bias, tokens
    return count_for_h100(gradients, *arguments, fused_softmax=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grid", "num_prefix", "causal", "head_dim", "dtype", "precision"),
    [
        (None, 0, True, 64, "float32", None),
        (None, 0, False, 64, "float32", "highest"),
        ((1000,), 0, True, 128, "float32", None),
        ((1000,), 0, False, 128, "bfloat16", None),
        ((32, 32), 1, False, 32, "float32", "high"),
        ((7, 7), 1, False, 16, "bfloat16", None),
    ],
)
def test_compiles_for_a_gpu(grid, num_prefix, causal, head_dim, dtype, precision):
    pytest.importorskip("jax_cuda13_plugin")
    # Forward, and gradients of queries, of keys and values, and of a table.
    case = grid, num_prefix, causal, head_dim, dtype, precision
    assert call_alone(count_kernels, *case) == (3 if grid is None else 4)

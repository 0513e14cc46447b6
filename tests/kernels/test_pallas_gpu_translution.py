"""Tests Translution by GPU kernels, in Pallas' interpreter.

A slow test compiles them for an H100. They ran on no device yet.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import kernels
from relattn.kernels import pallas_gpu
from relattn.kernels.pallas_gpu import translution as fused
from relattn.kernels.platform import use_platform
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

# Two blocks of sequences.
BATCH, DIM, HEADS, HEAD_DIM = 7, 5, 2, 3
INDICES = {
    "line": kernels.Offsets((7,)),
    "grid with prefix": kernels.Offsets((2, 3), num_prefix=1),
    "torus with prefix": kernels.Offsets(Torus((2, 3)), num_prefix=2),
    "three axes": kernels.Offsets((3, 1, 2), num_prefix=1),
    "causal": kernels.CausalOffsets(7),
}


@pytest.fixture
def one_gpu(monkeypatch):
    """Traces what is compiled for a GPU."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(
        jax.lax, "platform_dependent", lambda *x, cuda, default: cuda(*x)
    )


@pytest.fixture
def interpreted(monkeypatch, one_gpu):
    """Runs kernels on the CPU, on blocks of 4 sequences."""
    interpret(monkeypatch, fused, _BLOCK=4)


def by_kernels(kernel):
    def attend(*inputs, **options):
        with use_platform("gpu", fused_translution=True):
            return kernel(*inputs, **options)

    return attend


def draw_inputs(index, relative="qkv"):
    # Causal tables have two more rows than there are tokens.
    rows = 9 if index.causal else index.rows
    shapes = [(BATCH, index.length, DIM)]
    for name in "qkv":
        table = [rows] if name in relative else []
        shapes.append((*table, DIM, HEADS, HEAD_DIM))
    return [normal(i, *shape) for i, shape in enumerate(shapes)]


def expect_reference(index, relative="qkv"):
    n = index.length
    allowed = np.tri(n, dtype=bool) if index.causal else np.ones((n, n), bool)
    rows = reference.offset_rows(index.grid, index.num_prefix, index.causal)

    def naive(x, *tables):
        return jax.vmap(lambda x: reference.translution(x, *tables, rows, allowed))(x)

    kernel = by_kernels(functools.partial(kernels.translution, index=index))
    inputs = [x[None] for x in draw_inputs(index, relative)]
    compare.expect_equal(jax.vmap(kernel), naive, inputs)


@pytest.mark.quick("grid with prefix")
@pytest.mark.parametrize("name", INDICES)
def test_values_and_gradients_equal_the_reference(interpreted, name):
    expect_reference(INDICES[name])


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("relative", ["q", "k", "v", "kv"])
def test_projections_that_do_not_depend_on_the_offset(interpreted, relative, causal):
    expect_reference(INDICES["causal" if causal else "grid with prefix"], relative)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grid with prefix", "causal"])
def test_half_precision_is_near_single_precision(interpreted, name):
    index = INDICES[name]
    halves = [jnp.bfloat16(x) for x in draw_inputs(index)]

    @quick_jit
    def attend(*inputs):
        run = by_kernels(functools.partial(kernels.translution, index=index))
        out, pull_back = jax.vjp(run, *inputs)
        return out, *pull_back(jnp.ones_like(out))

    singles = attend(*(jnp.float32(x) for x in halves))
    for half, single in zip(attend(*halves), singles, strict=True):
        assert half.dtype == jnp.bfloat16
        error = np.abs(np.float32(half) - single).max()
        assert error < 0.05 * np.abs(single).max()


@pytest.mark.slow
def test_earlier_outputs_and_gradients_do_not_depend_on_later_tokens(interpreted):
    index, cut = INDICES["causal"], 4

    @quick_jit
    def earlier(x, *tables):
        run = by_kernels(functools.partial(kernels.translution, index=index))
        out, pull_back = jax.vjp(run, x, *tables)
        of_x, *of_tables = pull_back(jnp.ones_like(out).at[:, :, cut:].set(0.0))
        return [out[:, :, :cut], of_x[:, :cut], *of_tables]

    x, *tables = draw_inputs(index)
    changed = x * np.where(np.arange(7) < cut, 1, -3).astype(np.float32)[:, None]
    for ours, theirs in zip(
        earlier(changed, *tables), earlier(x, *tables), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_two_vmaps_equal_the_batch(interpreted):
    x, *tables = draw_inputs(INDICES["grid with prefix"])
    x = np.stack([x, -x])

    def gradients(run):
        def pull_back(x):
            out, pullback = jax.vjp(lambda x: run(x, *tables), x)
            return out, *pullback(jnp.cos(out))

        return quick_jit(pull_back)(x)

    run = functools.partial(kernels.translution, index=INDICES["grid with prefix"])
    run = by_kernels(run)
    mapped = jax.vmap(jax.vmap(run, (0, None, None, None)), (0, None, None, None))
    for ours, theirs in zip(gradients(mapped), gradients(run), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_no_array_has_a_projection_for_every_pair(one_gpu):
    index, batch = kernels.Offsets((11, 11)), 32
    tokens, table = jnp.zeros((batch, 121, 24)), jnp.zeros((index.rows, 24, 3, 8))

    def run(low, tables):
        options = {"scale": 1.0, "index": index}
        return kernels.lor_translution((None,) * 3, low, tables, **options)[1]

    largest = largest_array(by_kernels(run), (tokens,) * 3, (table,) * 3)
    assert largest <= batch * 3 * 121**2


LOW = [np.ones((2, 7, 6), np.float32)] * 3
TABLES = [np.ones((13, 6, 2, 3), np.float32)] * 3


def num_kernels(low=LOW, tables=TABLES, index=INDICES["line"], **options):
    def run(low, tables):
        return kernels.lor_translution(
            (None,) * 3, low, tables, index=index, scale=1.0, **options
        )

    return str(jax.make_jaxpr(by_kernels(run))(low, tables)).count("pallas_call")


def test_a_gpu_uses_kernels_where_they_are_chosen(one_gpu):
    # Scores, and values.
    assert num_kernels() == num_kernels(precision="high") == 2
    assert num_kernels(index=INDICES["causal"]) == 2
    assert num_kernels(low=[*LOW[:2], None], tables=[*TABLES[:2], None]) == 1


@pytest.mark.parametrize(
    ("dim", "head_dim", "options"),
    [(129, 3, {}), (6, 65, {}), (6, 3, {"precision": "BF16_BF16_F32"})],
)
def test_what_kernels_cannot_compute_uses_none(one_gpu, dim, head_dim, options):
    low, tables = jnp.ones((2, 7, dim)), jnp.ones((13, dim, 2, head_dim))
    assert num_kernels([low] * 3, [tables] * 3, **options) == 0


def test_double_precision_uses_no_kernel(one_gpu):
    with jax.enable_x64(True):
        low, tables = ([jnp.float64(x) for x in xs] for xs in (LOW, TABLES))
        assert num_kernels(low, tables) == 0
        # Keys or the table of queries alone give weights in float64.
        assert num_kernels([LOW[0], low[1], LOW[2]]) == 0
        assert num_kernels(tables=[tables[0], *TABLES[1:]]) == 0
        # Scores need no values.
        assert num_kernels([*LOW[:2], low[2]]) == 1


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="needs simulated devices")
def test_several_devices_use_no_kernel():
    assert jax.device_count() > 1
    assert num_kernels() == 0


def test_without_the_backend_xla_computes(one_gpu, monkeypatch):
    monkeypatch.setattr(pallas_gpu, "is_available", lambda: False)
    assert num_kernels() == 0


@pytest.mark.quick("bfloat16-causal")
@pytest.mark.parametrize("name", ["grid with prefix", "causal"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cpu_computes_the_same_where_kernels_are_chosen(monkeypatch, name, dtype):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    run = functools.partial(kernels.translution, index=INDICES[name])
    inputs = [x.astype(dtype) for x in draw_inputs(INDICES[name])]
    chosen, plain = quick_jit(by_kernels(run))(*inputs), quick_jit(run)(*inputs)
    tolerance = 1e-5 if dtype == "float32" else 0.05
    np.testing.assert_allclose(
        *(np.float32(x) for x in (chosen, plain)), tolerance, tolerance
    )


def count_kernels(index, batch, inner, heads, dtype, precision):
    rows = index.length if index.causal else index.rows
    tokens = (batch, index.length, inner), dtype
    table = (rows, inner, heads, 8), dtype
    out = (batch, heads, index.length, 8), dtype

    def gradients(*arrays):
        def run(*arrays):
            options = {"index": index, "scale": 1.0, "precision": precision}
            low, tables = arrays[:3], arrays[3:]
            return kernels.lor_translution((None,) * 3, low, tables, **options)[1]

        return jax.vjp(run, *arrays[:6])[1](arrays[6])

    arguments = *[tokens] * 3, *[table] * 3, out
    return count_for_h100(gradients, *arguments, fused_translution=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("index", "batch", "inner", "heads", "dtype", "precision"),
    [
        (kernels.Offsets((7, 7), num_prefix=1), 256, 24, 3, "float32", None),
        (kernels.Offsets((7, 7), num_prefix=1), 256, 24, 3, "float32", "high"),
        (kernels.Offsets((12, 12)), 100, 128, 16, "float32", "highest"),
        (kernels.CausalOffsets(160), 8, 24, 3, "bfloat16", None),
        (kernels.CausalOffsets(160), 8, 48, 6, "float32", None),
    ],
)
def test_compiles_for_a_gpu(index, batch, inner, heads, dtype, precision):
    pytest.importorskip("jax_cuda13_plugin")
    # Scores; gradients of weights, of three kinds of tokens, and of three tables. The
    # gradients need no values.
    case = index, batch, inner, heads, dtype, precision
    assert call_alone(count_kernels, *case) == 8

"""Tests the forms of accelerators: rows of queries, blocks of pairs or diagonals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import kernels
from relattn.kernels.platform import use_platform
from relattn.kernels.translution import diagonals
from relattn.offsets import Torus
from tests import reference
from tests.helpers import compare
from tests.helpers.quick import quick_jit

DIM, HEADS, HEAD_DIM = 5, 2, 3
# The number of sequences decides what rows align, and what fits into a block.
FORMS = {
    "aligned_projections": (2, {"translution": "rows"}),
    "aligned_matrices": (3, {"translution": "rows"}),
    "one_block": (2, {"translution": "pairs"}),
    "blocks": (2, {"translution": "pairs", "pair_bytes": 6000}),
    "smallest_blocks": (2, {"translution": "pairs", "pair_bytes": 1}),
}
GRIDS = [
    kernels.Offsets((3, 4)),
    kernels.Offsets((5, 1), num_prefix=2),
    kernels.Offsets((7,), num_prefix=1),
    kernels.Offsets(Torus((2, 3)), num_prefix=1),
    kernels.Offsets(Torus((5,))),
    kernels.Offsets((3, 2, 2), num_prefix=1),
    kernels.Offsets((1, 1, 5)),
    kernels.Offsets(Torus((2, 3, 2))),
]


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    """Number of sequences, and changes of the platform's defaults."""
    # A group of diagonals for each 1,500 bytes.
    monkeypatch.setattr(diagonals, "_GROUP_BYTES", 1500)
    return FORMS[request.param]


def in_form(kernel, changes):
    """Returns the kernel in a form, on CPUs."""

    def attend(*inputs, **options):
        with use_platform("cpu", **changes):
            return kernel(*inputs, **options)

    return attend


def expect_reference(index, num_rows, form, relative="qkv"):
    batch, changes = form
    generator = np.random.default_rng(0)
    shapes = [(batch, index.length, DIM)]
    for name in "qkv":
        rows = [num_rows] if name in relative else []
        shapes.append((*rows, DIM, HEADS, HEAD_DIM))
    inputs = [np.float32(generator.standard_normal((1, *shape))) for shape in shapes]
    grid, prefix, causal = index.grid, index.num_prefix, index.causal
    allowed = np.ones((index.length, index.length), bool)
    allowed = np.tril(allowed) if causal else allowed
    rows = reference.offset_rows(grid, prefix, causal)

    def naive(x, *tables):
        return jax.vmap(lambda x: reference.translution(x, *tables, rows, allowed))(x)

    kernel = in_form(functools.partial(kernels.translution, index=index), changes)
    compare.expect_equal(jax.vmap(kernel), naive, inputs)


@pytest.mark.quick(
    "aligned_projections-Offsets(grid=(7,), num_prefix=1, clip=None)",
    "aligned_matrices-Offsets(grid=Torus((2, 3)), num_prefix=1, clip=None)",
    "blocks-Offsets(grid=(5, 1), num_prefix=2, clip=None)",
    "one_block-Offsets(grid=Torus((2, 3)), num_prefix=1, clip=None)",
)
@pytest.mark.parametrize("index", GRIDS, ids=str)
def test_values_and_gradients_equal_the_reference(index, form):
    expect_reference(index, index.rows, form)


@pytest.mark.quick("blocks")
def test_causal_values_and_gradients_equal_the_reference(form):
    # Tables have two more rows than there are tokens.
    expect_reference(kernels.CausalOffsets(7), 9, form)


@pytest.mark.quick("aligned_projections-q-False", "blocks-kv-True")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("relative", ["q", "kv"])
def test_projections_that_do_not_depend_on_the_offset(relative, causal, form):
    index = kernels.CausalOffsets(5) if causal else kernels.Offsets((3, 2), 1)
    expect_reference(index, 5 if causal else 18, form, relative)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_second_derivatives_equal_the_reference(causal):
    _, changes = FORMS["blocks"]
    index = kernels.CausalOffsets(5) if causal else kernels.Offsets((5,))
    generator = np.random.default_rng(3)
    shapes = [(1, 5, DIM)] + 3 * [(1, 9, DIM, HEADS, HEAD_DIM)]
    inputs = [np.float32(generator.standard_normal(shape)) for shape in shapes]
    rows = reference.offset_rows((5,), 0, causal)
    allowed = np.tril(np.ones((5, 5), bool)) if causal else np.ones((5, 5), bool)
    kernel = functools.partial(kernels.translution, index=index)
    naive = functools.partial(reference.translution, rows=rows, allowed=allowed)
    kernel = jax.vmap(in_form(kernel, changes | {"pair_bytes": 1000}))
    compare.expect_equal_second_derivatives(kernel, naive, inputs)


@pytest.mark.quick("aligned_projections-False")
@pytest.mark.parametrize("causal", [False, True])
def test_batch_may_be_empty(causal, form):
    _, changes = form
    index = kernels.CausalOffsets(7) if causal else kernels.Offsets((7,))
    kernel = in_form(functools.partial(kernels.translution, index=index), changes)
    table = np.zeros((7 if causal else 13, DIM, HEADS, HEAD_DIM), np.float32)
    x = np.zeros((0, 7, DIM), np.float32)
    assert jax.eval_shape(kernel, x, *[table] * 3).shape == (0, HEADS, 7, HEAD_DIM)


@pytest.mark.quick("blocks-False", "blocks-True")
@pytest.mark.parametrize("causal", [False, True])
def test_keys_that_are_masked_or_later_have_no_effect(causal, form):
    """Bit for bit, in values and gradients; what is masked may be NaN."""
    batch, changes = form
    generator = np.random.default_rng(0)
    x = np.float32(generator.standard_normal((batch, 7, DIM)))
    tables = generator.standard_normal((3, 7 if causal else 13, DIM, HEADS, HEAD_DIM))
    index = kernels.CausalOffsets(7) if causal else kernels.Offsets((7,))
    seen = np.arange(7) < 4
    mask = None if causal else seen

    @quick_jit
    def attend(x, tables):
        kernel = functools.partial(kernels.translution, index=index, key_mask=mask)
        out, pull_back = jax.vjp(lambda x: in_form(kernel, changes)(x, *tables), x)
        cotangent = jnp.where(seen[:, None], 1.0, 0.0) * jnp.ones_like(out)
        return out[:, :, seen], pull_back(cotangent)[0][:, seen]

    tables = np.float32(tables)
    expected = attend(x, tables)
    for other in (7 * x,) if causal else (7 * x, np.inf, np.nan):
        found = attend(np.where(seen[:, None], x, other), tables)
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_array_equal(found[1], expected[1])


@pytest.mark.quick("one_block")
def test_low_rank_causal_values_and_gradients_equal_the_reference(form):
    batch, changes = form
    generator = np.random.default_rng(1)
    heads, low, table = (batch, HEADS, 7, 5), (batch, 7, 3), (8, 3, HEADS, 2)
    shapes = [heads] * 3 + [low] * 3 + [table] * 3
    inputs = [np.float32(generator.standard_normal((1, *shape))) for shape in shapes]
    rows = reference.offset_rows((7,), causal=True)
    allowed = np.tril(np.arange(7) != 2).astype(bool) * np.ones((7, 1), bool)

    def apply(*x):
        outputs = kernels.lor_translution(
            x[:3],
            x[3:6],
            x[6:],
            index=kernels.CausalOffsets(7),
            key_mask=jnp.arange(7) != 2,
        )
        return jnp.concatenate(outputs, axis=-1)

    def naive(*x):
        def of_sequence(*arrays):
            options = {"rows": rows, "allowed": allowed, "scale": 5**-0.5}
            outputs = reference.lor_translution(
                *arrays[:3], arrays[3:], x[6:], **options
            )
            return jnp.concatenate(outputs, axis=-1)

        return jax.vmap(of_sequence)(*x[:6])

    compare.expect_equal(jax.vmap(in_form(apply, changes)), naive, inputs)


@pytest.mark.quick("blocks-index0")
@pytest.mark.parametrize(
    "index", [kernels.Offsets((4, 2), 1), kernels.CausalOffsets(9)]
)
def test_half_precision_is_near_single_precision(index, form):
    batch, changes = form
    generator = np.random.default_rng(2)
    rows = 9 if index.causal else index.rows
    shapes = [(batch, 9, DIM)] + 3 * [(rows, DIM, HEADS, HEAD_DIM)]
    halves = [jnp.bfloat16(generator.standard_normal(shape)) for shape in shapes]

    @jax.jit
    def attend(*inputs):
        kernel = functools.partial(kernels.translution, index=index)
        out, pull_back = jax.vjp(in_form(kernel, changes), *inputs)
        return out, *pull_back(jnp.ones_like(out))

    expected = attend(*(jnp.float32(x) for x in halves))
    for half, single in zip(attend(*halves), expected, strict=True):
        assert half.dtype == jnp.bfloat16
        error = np.abs(np.float32(half) - single).max()
        assert error < 0.05 * np.abs(single).max()


@pytest.mark.quick("True")
@pytest.mark.parametrize("causal", [False, True])
def test_memory_of_blocks_is_bounded(causal):
    """Besides scores: neither matrices nor projections of all pairs."""
    batch, width = 8, 32

    def temporary_bytes(size):
        n = size**2
        index = kernels.CausalOffsets(n) if causal else kernels.Offsets((size, size))
        rows = n if causal else index.rows
        kernel = in_form(
            functools.partial(kernels.translution, index=index),
            {"translution": "pairs", "pair_bytes": 2**18},
        )

        def forward_backward(*inputs):
            out, pull_back = jax.vjp(kernel, *inputs)
            return out, pull_back(out)

        tables = 3 * [(rows, width, 1, width)]
        inputs = [
            jax.ShapeDtypeStruct(shape, jnp.float32)
            for shape in [(batch, n, width), *tables]
        ]
        compiled = jax.jit(forward_backward).lower(*inputs).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    few, many = (temporary_bytes(size) for size in (5, 9))
    # A few scores for each pair; projections would take ``width`` numbers.
    assert (many - few) / 4 / batch < width / 2 * (81**2 - 25**2)

"""Tests the contracts of every mechanism, a row of tests/mechanisms.

Translation error and equality across device counts are tested on whole models.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from relattn import kernels
from relattn.kernels.platform import use_platform
from relattn.nn import registry
from tests.helpers import compare
from tests.helpers.export import PLATFORMS, export
from tests.helpers.quick import quick_jit, run
from tests.mechanisms import LINES, MECHANISMS, TORI, VOLUMES
from tests.mechanisms.base import (
    BATCH,
    HEAD_DIM,
    HEADS,
    NUM_FEATURES,
    NUM_PREFIX,
    TORUS,
    M,
    N,
)

DRAWS = 2000

# For what takes long and differs little between kernels.
FEW = ("softmax", "causal linear, positive features", "causal Translution")

# For second derivatives in a scan.
TWICE = ("softmax", "banded, positive features", "Translution")

# What these combine is in other rows.
COMBINED = (
    "causal linear, Fourier values of low rank",
    "causal clipped Translution",
    "causal linear, learned exponential features",
    "causal linear, learned relu features",
    "causal linear, positive features, eps",
    "clipped Translution, torus",
    "linear, offset bias, torus",
    "LoR-Translution, torus",
    "softmax, Cayley-STRING",
)


def each_of(mechanisms, quick):
    """Parametrizes a test by mechanisms; `make test` has the ``quick`` ones."""
    parametrize = pytest.mark.parametrize("mechanism", mechanisms, ids=str)
    mark = pytest.mark.quick(mechanism=quick)
    return lambda test: mark(parametrize(test))


def few_of(mechanisms):
    """Parametrizes a test by mechanisms; `make test` has `FEW` of them."""
    return each_of(mechanisms, [m for m in mechanisms if m.name in FEW])


every_mechanism = each_of([*MECHANISMS, *TORI], [m for m in MECHANISMS if m.quick])


every_causal_mechanism = pytest.mark.parametrize(
    "mechanism", [m for m in MECHANISMS if m.causal], ids=str
)
every_random_mechanism = pytest.mark.parametrize(
    "mechanism", [m for m in MECHANISMS if m.estimate], ids=str
)


def test_every_attention_and_encoding_has_a_row():
    names = {name for name in registry.BUILT_IN if name not in registry.POSITIONS}
    names |= {
        name
        for name in registry.BUILT_IN & {*registry.POSITIONS}
        # Encodings that are added to the tokens need no kernel.
        if registry.POSITIONS[name].site not in ("none", "tokens")
    }
    used_by = {name for row in [*MECHANISMS, *TORI] for name in row.used_by}
    missing, unknown = names - used_by, used_by - names
    assert not missing, f"no row of tests/mechanisms has {missing} in used_by"
    assert not unknown, f"rows of tests/mechanisms are used by unknown {unknown}"


@pytest.mark.quick(masked=[False])
@each_of(
    [*MECHANISMS, *TORI], [m for m in [*MECHANISMS, *TORI] if m.name not in COMBINED]
)
@pytest.mark.parametrize("masked", [False, True])
def test_value_and_gradient_equal_the_reference(mechanism, masked):
    expect_reference(mechanism, masked)


@pytest.mark.quick("False-banded, volume", "False-Translution, volume")
@pytest.mark.parametrize("mechanism", VOLUMES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_value_and_gradient_in_a_volume_equal_the_reference(mechanism, masked):
    expect_reference(mechanism, masked)


def expect_reference(mechanism, masked):
    key_mask = mechanism.key_mask() if masked else None
    kernel, inputs = mechanism.kernel_and_inputs(key_mask)
    exists = np.ones(mechanism.num_keys, bool) if key_mask is None else key_mask
    compare.expect_equal(
        kernel,
        mechanism.naive,
        inputs,
        allowed=mechanism.allowed(exists),
        # float64 inputs keep their accuracy.
        double=masked,
    )


@pytest.mark.slow
@every_mechanism
def test_second_derivatives_equal_the_reference(mechanism):
    kernel, inputs = mechanism.kernel_and_inputs()
    allowed = mechanism.allowed(np.ones(mechanism.num_keys, bool))
    naive = functools.partial(mechanism.naive, allowed=allowed)
    compare.expect_equal_second_derivatives(kernel, naive, inputs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mechanism",
    [m for m in MECHANISMS if m.name in TWICE],
    ids=str,
)
def test_second_derivatives_of_a_scan_equal_those_of_a_loop(mechanism):
    inputs = mechanism.draw_inputs(dtype=np.float64)
    stacked = {name: np.stack([x, 0.7 * x]) for name, x in inputs.items()}
    first = next(iter(stacked))

    def step(carry, inputs):
        out = mechanism.apply(**inputs | {first: carry * inputs[first]})
        return jnp.vdot(jnp.cos(jnp.arange(out.size)), jnp.sin(out).ravel()), None

    def scan(inputs):
        return jax.lax.scan(step, 1.0, inputs)[0]

    def loop(inputs):
        carry = 1.0
        for layer in range(2):
            carry, _ = step(carry, {name: x[layer] for name, x in inputs.items()})
        return carry

    def hessian_product(loss, inputs):
        return jax.vjp(jax.grad(loss), inputs)[1](inputs)[0]

    with jax.enable_x64(True):
        found, expected = (
            run(functools.partial(hessian_product, loss), stacked)
            for loss in (scan, loop)
        )
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, rtol=0, atol=1e-9 * abs(x).max())


@every_random_mechanism
@pytest.mark.parametrize("draw", [kernels.draw_orthogonal, kernels.draw_gaussian])
def test_is_unbiased_within_four_standard_errors(mechanism, draw):
    inputs = mechanism.draw_inputs()

    @jax.jit
    @jax.vmap
    def estimate(key):
        return mechanism.estimate(draw(key, NUM_FEATURES, HEAD_DIM), **inputs)

    samples = np.float64(estimate(jax.random.split(jax.random.key(0), DRAWS)))
    error = samples.std(axis=0, ddof=1) / DRAWS**0.5
    bias = samples.mean(axis=0) - np.asarray(mechanism.expected(**inputs))
    assert np.abs(bias / error).max() < 4


def multiply(mechanism, inputs, index, factor):
    """Multiplies entries of all inputs but parameters."""
    changed = {name: x.copy() for name, x in inputs.items()}
    for name in set(inputs) - set(mechanism.shared):
        changed[name][index] *= factor
    return changed


@every_causal_mechanism
def test_later_tokens_change_nothing_bit_for_bit(mechanism):
    inputs = mechanism.draw_inputs(BATCH, HEADS)
    apply = jax.jit(mechanism.apply)
    out = np.asarray(apply(**inputs))
    # The last token shares its chunk with the two before it.
    for first in (N - 1, N // 2):
        changed = multiply(mechanism, inputs, np.s_[..., first:, :], -3)
        result = np.asarray(apply(**changed))
        np.testing.assert_array_equal(result[..., :first, :], out[..., :first, :])
        assert (result[..., first:, :] != out[..., first:, :]).any()


@every_mechanism
def test_example_does_not_depend_on_its_batch(mechanism):
    inputs = mechanism.draw_inputs(BATCH, HEADS)
    others = multiply(mechanism, inputs, np.s_[1:], -9)
    apply = jax.jit(mechanism.apply)
    out, result = np.asarray(apply(**inputs)), np.asarray(apply(**others))
    np.testing.assert_array_equal(result[0], out[0])
    assert (result[1] != out[1]).any()


@every_mechanism
def test_masked_keys_and_padding_have_no_effect(mechanism):
    inputs = mechanism.draw_inputs(HEADS)
    key_mask = mechanism.key_mask()

    def with_nan(names):
        masked = {
            name: np.where(key_mask[:, None], inputs[name], np.float32(np.nan))
            for name in names
        }
        return {**inputs, **masked}

    @quick_jit
    def value_and_gradients(inputs, key_mask, rows):
        apply = functools.partial(mechanism.apply, key_mask=key_mask)
        out, pullback = jax.vjp(lambda inputs: apply(**inputs), inputs)
        cotangent = np.cos(np.arange(out.size, dtype=np.float32)).reshape(out.shape)
        (gradients,) = pullback(jnp.where(rows[:, None], cotangent, 0.0))
        skipped = mechanism.before_mask
        gradients = {name: x for name, x in gradients.items() if name not in skipped}
        return out, gradients

    def expect_no_effect(changed, rows):
        out, gradients = jax.device_get(value_and_gradients(changed, key_mask, rows))
        expected, expected_gradients = value_and_gradients(inputs, key_mask, rows)
        expected = np.asarray(expected)
        np.testing.assert_array_equal(out[:, rows], expected[:, rows])
        assert np.isfinite(out[:, rows]).all()
        assert set(mechanism.key_inputs) <= set(gradients)
        chex.assert_trees_all_equal(gradients, expected_gradients)
        chex.assert_tree_all_finite(gradients)

    if not mechanism.queries_from_keys:
        expect_no_effect(with_nan(mechanism.key_inputs), np.ones(N, bool))
    if mechanism.masks_queries:
        # The token's query too: its output is not compared, and has no cotangent.
        queries = {"q", "low_q"} & set(inputs)
        expect_no_effect(with_nan({*mechanism.key_inputs, *queries}), key_mask)
    if mechanism.on_grid:
        return
    padded = {
        name: x
        if name in mechanism.shared
        else np.pad(x, [(0, 0), (0, 6), (0, 0)], constant_values=9.0)
        for name, x in inputs.items()
    }
    num_keys = mechanism.num_keys
    out = quick_jit(mechanism.apply)(**padded, key_mask=np.arange(num_keys + 6) < M)
    expected, _ = value_and_gradients(inputs, np.arange(num_keys) < M, np.ones(N, bool))
    np.testing.assert_allclose(out[:, :N], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@every_mechanism
def test_mask_per_example_equals_each_example_alone(mechanism):
    inputs = mechanism.draw_inputs(BATCH, HEADS)
    key_mask = masks(mechanism)
    axes = {name: None if name in mechanism.shared else 0 for name in inputs}

    def alone(inputs, key_mask):
        return mechanism.apply(**inputs, key_mask=key_mask)

    out = quick_jit(mechanism.apply)(**inputs, key_mask=key_mask[:, None])
    expected = quick_jit(jax.vmap(alone, (axes, 0)))(inputs, key_mask)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.quick("Translution", "linear, offset bias", "rotary positions")
@pytest.mark.parametrize("mechanism", LINES, ids=str)
def test_mask_per_example_on_a_line_equals_the_reference(mechanism):
    inputs, key_mask = mechanism.draw_inputs(BATCH), masks(mechanism)
    apply = quick_jit(mechanism.apply)
    results = [apply(**inputs, key_mask=key_mask), apply(**inputs)]
    allowed = [
        [mechanism.allowed(exists) for exists in examples]
        for examples in (key_mask, np.ones_like(key_mask))
    ]
    axes = [None if name in mechanism.shared else 0 for name in inputs]

    def naive(inputs, allowed):
        return mechanism.naive(*inputs, allowed=allowed)

    of_examples = jax.vmap(naive, (axes, 0))
    with jax.enable_x64(True):
        wide = [np.float64(x) for x in inputs.values()]
        reference = quick_jit(jax.vmap(of_examples, (None, 0)))
        expected = np.asarray(reference(wide, np.array(allowed)))
    np.testing.assert_allclose(results, expected, rtol=1e-4, atol=1e-5)


def masks(mechanism):
    """Returns a different mask for every example, ``[batch, keys]``."""
    keys = np.arange(mechanism.num_keys)
    return keys % 4 != np.arange(BATCH)[:, None]


@pytest.mark.quick(dtype=[jnp.bfloat16])
@every_mechanism
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float16])
def test_large_key_gives_finite_values_and_gradients(mechanism, dtype):
    inputs = mechanism.draw_inputs(HEADS, dtype=dtype)
    row = mechanism.shapes[mechanism.scaled_input][0] - 2
    long_key = inputs[mechanism.scaled_input].copy()
    long_key[..., row, :] *= 20
    scaled = {**inputs, mechanism.scaled_input: long_key}

    @quick_jit
    def compiled(inputs, cotangent):
        out, pullback = jax.vjp(lambda inputs: mechanism.apply(**inputs), inputs)
        return out, pullback(jnp.full_like(out, cotangent))

    def value_and_gradients(inputs, cotangent=1.0):
        # One dtype, and so one program.
        return jax.device_get(compiled(inputs, np.float32(cotangent)))

    out, gradients = value_and_gradients(scaled)
    assert out.dtype == dtype
    chex.assert_tree_all_finite((out, gradients))
    if mechanism.causal:
        expected, _ = value_and_gradients(inputs)
        np.testing.assert_array_equal(out[:, :row], expected[:, :row])
    if dtype == jnp.float16:
        return
    # All tokens long, from where the weights of keys underflow; large values and
    # cotangents.
    for length, value, cotangent in (
        (20, 1, 1e6),
        (25, 1e6, 1),
        (30, 1e6, 1e6),
        (1e4, 1e4, 1e4),
        (1e6, 1e6, 1e6),
    ):
        factors = dict.fromkeys(set(inputs) - set(mechanism.shared), length)
        factors |= dict.fromkeys({"v", "low_v"} & set(inputs), value)
        large = {
            name: (x * factors.get(name, 1)).astype(dtype) for name, x in inputs.items()
        }
        results = value_and_gradients(large, cotangent)
        chex.assert_tree_all_finite(results)


@pytest.mark.slow
@every_mechanism
def test_half_precision_equals_single_on_the_same_inputs(mechanism):
    inputs = mechanism.draw_inputs(HEADS, dtype=jnp.bfloat16)

    @quick_jit
    def value_and_gradients(inputs):
        out, pullback = jax.vjp(lambda inputs: mechanism.apply(**inputs), inputs)
        cotangent = np.cos(np.arange(out.size)).reshape(out.shape)
        (gradients,) = pullback(jnp.asarray(cotangent, jnp.bfloat16).astype(out.dtype))
        return {"out": out, **gradients}

    # Without the implicit promotion of dtypes, too.
    with jax.numpy_dtype_promotion("strict"):
        results = value_and_gradients(inputs)
    single = {name: np.float32(x) for name, x in inputs.items()}
    # The largest relative error of one rounding; over many numbers, 0.4 of it.
    unit = float(jnp.finfo(jnp.bfloat16).eps) / 2
    for name, expected in value_and_gradients(single).items():
        expected = np.float64(expected)
        error = np.linalg.norm(np.float64(results[name]) - expected)
        roundings = mechanism.roundings[name != "out"]
        # Few numbers may all err by almost the largest.
        share = 0.7 if expected.size > 10 else 1
        most = share * roundings**0.5 * unit * np.linalg.norm(expected)
        assert error <= most, (name, error / most)


@pytest.mark.parametrize("mechanism", TORI, ids=str)
def test_rolled_tokens_give_rolled_outputs_and_gradients(mechanism):
    inputs = mechanism.draw_inputs(HEADS)

    def roll(x):
        prefix, tokens = x[:, :NUM_PREFIX], x[:, NUM_PREFIX:]
        rolled = np.roll(tokens.reshape(HEADS, *TORUS, -1), (2, 3), axis=(1, 2))
        return np.concatenate([prefix, rolled.reshape(tokens.shape)], axis=1)

    def roll_tokens(inputs):
        return {
            name: x if name in mechanism.shared else roll(x)
            for name, x in inputs.items()
        }

    @quick_jit
    def value_and_gradients(inputs, rolled):
        out, pullback = jax.vjp(lambda inputs: mechanism.apply(**inputs), inputs)
        cotangent = np.cos(np.arange(out.size, dtype=np.float32)).reshape(out.shape)
        return out, pullback(jnp.where(rolled, roll(cotangent), cotangent))[0]

    out, gradients = jax.device_get(value_and_gradients(inputs, False))
    rolled = jax.device_get(value_and_gradients(roll_tokens(inputs), True))
    assert not np.allclose(rolled[0], out, atol=1e-2)
    expected = (roll(out), roll_tokens(gradients))
    chex.assert_trees_all_close(rolled, expected, rtol=1e-5, atol=1e-5)


@every_mechanism
def test_vmap_equals_leading_axes(mechanism):
    inputs = mechanism.draw_inputs(BATCH, HEADS)
    axes = {name: None if name in mechanism.shared else 0 for name in inputs}
    over_heads = jax.vmap(lambda x: mechanism.apply(**x), (axes,))
    mapped = quick_jit(jax.vmap(over_heads, (axes,)))(inputs)
    # The program of the test above.
    expected = jax.jit(mechanism.apply)(**inputs)
    np.testing.assert_allclose(mapped, expected, rtol=1e-5, atol=1e-6)


@few_of([*MECHANISMS, *TORI, *VOLUMES])
def test_lowers_for_cuda_and_tpu_without_a_scatter(mechanism):
    """The other tests compile the forms for CPUs."""
    inputs = jax.eval_shape(lambda: mechanism.draw_inputs(HEADS))
    key_mask = jax.ShapeDtypeStruct((mechanism.num_keys,), bool)

    def step(inputs, key_mask):
        return _value_and_gradients(mechanism, key_mask=key_mask)(inputs)

    for name, platform in (("gpu", "cuda"), ("tpu", "tpu")):
        with use_platform(name):
            export = jax.export.export(jax.jit(step), platforms=[platform])
            exported = export(inputs, key_mask)
        assert exported.platforms == (platform,)
        found = "stablehlo.scatter" in exported.mlir_module()
        assert found == mechanism.scatters, f"{mechanism} for {name}"


def export_kernel(mechanism, masked=True, **sizes):
    """Exports a kernel; ``sizes`` are the batch, n and m, each a number or a symbol."""
    sizes = {"b": BATCH, "n": N, "m": M} | sizes
    symbols = ", ".join(str(sizes[name]) for name in "bnm")
    bounds = mechanism.length_bounds if sizes["n"] == "n" else ()
    b, n, m = jax.export.symbolic_shape(symbols, constraints=bounds)
    inputs = {}
    for name, shape in mechanism.shapes.items():
        if name not in mechanism.shared:
            shape = (b, HEADS, {N: n, M: m}[shape[0]], *shape[1:])
        inputs[name] = jax.ShapeDtypeStruct(shape, jnp.float32)
    keys = inputs[mechanism.key_inputs[0]].shape[-2]
    key_mask = jax.ShapeDtypeStruct((keys,), bool) if masked else None

    def apply(inputs, key_mask):
        return mechanism.apply(**inputs, key_mask=key_mask)

    return export(apply, inputs, key_mask)


def expect_same(exported, mechanism, masked, batch, n=N, m=M):
    """Compares an exported kernel with the kernel at other sizes."""
    lengths = {N: n, M: m}
    shapes = {
        name: shape if name in mechanism.shared else (lengths[shape[0]], *shape[1:])
        for name, shape in mechanism.shapes.items()
    }
    resized = dataclasses.replace(mechanism, shapes=shapes)
    inputs = resized.draw_inputs(batch, HEADS)
    key_mask = resized.key_mask() if masked else None
    expected = quick_jit(resized.apply)(**inputs, key_mask=key_mask)
    out = exported.call(inputs, key_mask)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.quick("causal Translution-True")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("mechanism", [*MECHANISMS, *TORI], ids=str)
def test_exports_with_a_symbolic_batch(mechanism, masked):
    """`make test` has the kernel whose length may not be symbolic too."""
    exported = export_kernel(mechanism, masked, b="b")
    assert exported.platforms == PLATFORMS
    for batch in (1, 5):
        expect_same(exported, mechanism, masked, batch)


@pytest.mark.quick(masked=[True])
@pytest.mark.parametrize("masked", [False, True])
@few_of([m for m in MECHANISMS if m.length_bounds or not (m.on_grid or m.fixed_length)])
def test_exports_with_a_symbolic_length(mechanism, masked):
    exported = export_kernel(mechanism, masked, b="b", n="n", m="m")
    # Within a chunk of 5, several chunks, and a chunk that is full.
    for n, m in ((5, 3), (13, 29), (10, 5)):
        expect_same(exported, mechanism, masked, 2, n, m)


@pytest.mark.parametrize(
    "mechanism", [m for m in MECHANISMS if m.fixed_length], ids=str
)
def test_a_fixed_length_refuses_a_symbolic_one(mechanism):
    with pytest.raises(ValueError, match=mechanism.fixed_length):
        export_kernel(mechanism, b="b", n="n", m="m")


@pytest.mark.parametrize(
    "mechanism", [m for m in MECHANISMS if m.length_bounds], ids=str
)
def test_a_symbolic_length_without_its_bound_raises(mechanism):
    (bound,) = mechanism.length_bounds
    unbounded = dataclasses.replace(mechanism, length_bounds=())
    with pytest.raises(ValueError, match=f"constraints=.*{bound}"):
        export_kernel(unbounded, b="b", n="n", m="m")


@pytest.mark.parametrize("name", ["softmax", "causal linear, positive features"])
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_forms_of_other_platforms_export_with_symbolic_sizes(name, platform):
    """Flash attention and kernels in VMEM have fixed sizes and step aside."""
    (mechanism,) = [m for m in MECHANISMS if m.name == name]
    with use_platform(platform):
        exported = export_kernel(mechanism, False, b="b", n="n", m="m")
    expect_same(exported, mechanism, False, 2, 7, 6)


@every_mechanism
def test_single_precision_stays_single_where_double_is_enabled(mechanism):
    inputs = mechanism.draw_inputs(HEADS)
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("strict"),
        # The arrays of a kernel may differ in rank, also where JAX forbids it.
        jax.numpy_rank_promotion("raise"),
    ):
        shapes = jax.eval_shape(_value_and_gradients(mechanism), inputs)
    assert {x.dtype for x in jax.tree.leaves(shapes)} == {np.dtype(np.float32)}


@pytest.mark.quick("linear, positive features", "causal linear, positive features")
@every_mechanism
def test_batch_may_be_empty(mechanism):
    inputs = mechanism.draw_inputs(0, HEADS)
    key_mask = mechanism.key_mask()
    for options in ({}, {"key_mask": key_mask}):
        function = _value_and_gradients(mechanism, **options)
        out, gradients = jax.eval_shape(function, inputs)
        assert out.shape[:2] == (0, HEADS)
        chex.assert_trees_all_equal_shapes_and_dtypes(gradients, inputs)


def _value_and_gradients(mechanism, **options):
    def value_and_gradients(inputs):
        apply = functools.partial(mechanism.apply, **options)
        out, pullback = jax.vjp(lambda inputs: apply(**inputs), inputs)
        return out, pullback(jnp.ones_like(out))[0]

    return value_and_gradients


def named(mechanisms):
    return parameterized.named_parameters((m.name, m) for m in mechanisms)


def expect_agreement(test, mechanism):
    inputs = mechanism.draw_inputs(HEADS)
    out = test.variant(lambda inputs: mechanism.apply(**inputs))(inputs)
    expected = quick_jit(mechanism.apply)(**inputs)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


class PmapTest(chex.TestCase):
    """Compares results with pmap and with jit."""

    @chex.variants(with_pmap=True)
    @named(m for m in MECHANISMS if m.name in FEW)
    def test_pmap_agrees(self, mechanism):
        expect_agreement(self, mechanism)


@pytest.mark.slow
class TransformationsTest(chex.TestCase):
    """Compares results with pmap, with jit and without."""

    @chex.variants(with_pmap=True, with_jit=True, without_jit=True)
    @named([*MECHANISMS, *TORI])
    def test_transformations_agree(self, mechanism):
        expect_agreement(self, mechanism)

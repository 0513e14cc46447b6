"""The contracts of every mechanism: add a row to MECHANISMS, and it must keep them.

Translation error and equality across device counts belong to whole models and are
measured there.
"""

import dataclasses
import functools
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from relattn import kernels, offsets
from relattn.kernels import sinusoids
from relattn.kernels.banded import banded_attention
from tests import compare, reference

BATCH, HEADS, N, M, DEPTH, VALUE_DEPTH, NUM_FEATURES = 3, 2, 13, 11, 5, 7, 17
GRID, NUM_PREFIX, CLIP = (3, 4), 1, 2
DRAWS = 2000
PROJECTION = kernels.draw_orthogonal(jax.random.key(7), NUM_FEATURES, DEPTH)
FREQUENCIES = np.array([1.0, 0.3], np.float32)
feature_map = functools.partial(compare.feature_map, projection=PROJECTION)
WIDE_PROJECTION = kernels.draw_orthogonal(jax.random.key(8), NUM_FEATURES, DEPTH + 8)


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """A mechanism and what a contract has to know of it.

    Attributes:
        name: Of the test.
        apply: From inputs, each ``[*batch, tokens, width]``, and ``key_mask=`` to
            outputs ``[*batch, n, width]``.
        naive: The reference: from inputs without leading axes, and which keys a query
            may attend to, ``[n, m]``.
        shapes: Shape of every input, by name, without leading axes.
        shared: Inputs that never have leading axes: parameters.
        key_inputs: Inputs that hold a row for every key.
        loud: The input in which one row is scaled by 20.
        causal: Whether a token sees only itself and those before it.
        on_grid: Whether the number of tokens is fixed by a grid.
        estimate: From a projection, estimates of the unnormalised kernel, all of
            `expected`; None where nothing is random.
        expected: What `estimate` must be on average.
    """

    name: str
    apply: Callable
    naive: Callable
    shapes: dict[str, tuple[int, ...]]
    shared: tuple[str, ...] = ()
    key_inputs: tuple[str, ...] = ("k", "v")
    loud: str = "k"
    causal: bool = False
    on_grid: bool = False
    estimate: Callable | None = None
    expected: Callable | None = None

    def __str__(self):
        return self.name

    def draw_inputs(self, *leading, dtype=jnp.float32):
        inputs = {}
        for seed, (name, shape) in enumerate(self.shapes.items()):
            shape = shape if name in self.shared else (*leading, *shape)
            values = 0.5 * np.random.default_rng(seed).standard_normal(shape)
            inputs[name] = jnp.asarray(values.astype(dtype))
        return inputs

    @property
    def num_keys(self):
        return self.shapes[self.key_inputs[0]][0]

    def key_mask(self):
        return np.arange(self.num_keys) % 4 != 2

    def allowed(self, key_mask):
        allowed = np.broadcast_to(key_mask, (N, self.num_keys))
        return np.tril(allowed) if self.causal else allowed


PLAIN = {"q": (N, DEPTH), "k": (M, DEPTH), "v": (M, VALUE_DEPTH)}
CAUSAL = {"q": (N, DEPTH), "k": (N, DEPTH), "v": (N, VALUE_DEPTH)}


def linear(name, *, causal=False, **options):
    """A row for a feature map; chunks are shorter than the sequence."""
    kernel = kernels.causal_linear_attention if causal else kernels.linear_attention
    naive_map = compare.naive_map(name, PROJECTION)

    def apply(q, k, v, key_mask=None):
        return kernel(q, k, v, feature_map(name), key_mask=key_mask, chunk_size=5)

    def naive(q, k, v, allowed):
        return reference.linear_attention(q, k, v, naive_map, allowed)

    return Mechanism(
        name=f"{'causal ' if causal else ''}linear, {name} features",
        apply=apply,
        naive=naive,
        shapes=CAUSAL if causal else PLAIN,
        causal=causal,
        **options,
    )


def softmax_kernel(q, k, v):
    return jnp.exp(q @ k.T / DEPTH**0.5)


def random_kernel(name):
    def estimate(projection, q, k, v):
        phi = compare.feature_map(name, projection)
        queries, keys = (phi(x).dense() for x in (q, k))
        return queries @ keys.T

    return {"estimate": estimate, "expected": softmax_kernel}


def banded(q, v, table, key_mask=None):
    return banded_attention(
        q,
        v,
        table,
        feature_map("positive"),
        grid=GRID,
        num_prefix=NUM_PREFIX,
        key_mask=key_mask,
    )


def naive_banded(q, v, table, allowed):
    def log_phi(x):
        naive_map = jax.vmap(reference.positive_features, (0, None))
        return jnp.log(naive_map(x, np.float64(PROJECTION)))

    return reference.banded_attention(
        q, v, table, log_phi, GRID, NUM_PREFIX, allowed[0]
    )


def concatenate(content, position):
    position = jnp.broadcast_to(position, (*content.shape[:-1], position.shape[-1]))
    return jnp.concatenate([content, position.astype(content.dtype)], axis=-1)


def constrained(q, k, v, coefficients, key_mask=None):
    positions = offsets.grid_positions(GRID, NUM_PREFIX)
    u = sinusoids.sinusoids(positions, FREQUENCIES, num_prefix=NUM_PREFIX)
    q = concatenate(q, sinusoids.constrained_sinusoids(u, coefficients))
    k = concatenate(k, u)
    phi = compare.feature_map("positive", WIDE_PROJECTION)
    return kernels.linear_attention(q, k, v, phi, key_mask=key_mask, chunk_size=5)


def naive_constrained(q, k, v, coefficients, allowed):
    positions = np.float64(offsets.grid_positions(GRID))
    u = reference.sinusoids(positions, np.float64(FREQUENCIES))
    u = jnp.concatenate([jnp.zeros((NUM_PREFIX, u.shape[1])), u])
    blocks = [jnp.array([[1.0, 0.0], [0.0, 1.0]]), jnp.array([[0.0, 1.0], [-1.0, 0.0]])]
    matrix = jax.scipy.linalg.block_diag(
        *[a * blocks[0] + b * blocks[1] for a, b in coefficients]
    )
    naive_map = compare.naive_map("positive", WIDE_PROJECTION)
    q = jnp.concatenate([q, u @ matrix], axis=1)
    k = jnp.concatenate([k, u], axis=1)
    return reference.linear_attention(q, k, v, naive_map, allowed)


MECHANISMS = [
    Mechanism("softmax", kernels.softmax_attention, reference.softmax_attention, PLAIN),
    Mechanism(
        "causal softmax",
        kernels.causal_softmax_attention,
        reference.softmax_attention,
        CAUSAL,
        causal=True,
    ),
    linear("positive", **random_kernel("positive")),
    linear("trigonometric", **random_kernel("trigonometric")),
    linear("relu"),
    linear("positive", causal=True),
    linear("trigonometric", causal=True),
    linear("relu", causal=True),
    Mechanism(
        "linear, positive features, constrained sinusoids",
        constrained,
        naive_constrained,
        {**CAUSAL, "coefficients": (4, 2)},
        shared=("coefficients",),
        on_grid=True,
    ),
    Mechanism(
        "banded, positive features",
        banded,
        naive_banded,
        {"q": (N, DEPTH), "v": (N, VALUE_DEPTH), "table": (CLIP + 1, DEPTH)},
        shared=("table",),
        key_inputs=("v",),
        loud="table",
        on_grid=True,
    ),
]

every_mechanism = pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
every_causal_mechanism = pytest.mark.parametrize(
    "mechanism", [m for m in MECHANISMS if m.causal], ids=str
)
every_random_mechanism = pytest.mark.parametrize(
    "mechanism", [m for m in MECHANISMS if m.estimate], ids=str
)


@every_mechanism
@pytest.mark.parametrize("masked", [False, True])
def test_equals_the_naive_reference_in_value_and_gradient(mechanism, masked):
    key_mask = mechanism.key_mask() if masked else np.ones(mechanism.num_keys, bool)
    allowed = mechanism.allowed(key_mask)
    # Parameters get a leading axis here, through vmap.
    inputs = dataclasses.replace(mechanism, shared=()).draw_inputs(HEADS)

    def apply(*arrays):
        return mechanism.apply(
            **dict(zip(inputs, arrays, strict=True)),
            key_mask=jnp.asarray(key_mask) if masked else None,
        )

    compare.expect_equal(
        jax.vmap(apply) if mechanism.shared else apply,
        functools.partial(mechanism.naive, allowed=allowed),
        list(inputs.values()),
    )


@every_random_mechanism
@pytest.mark.parametrize("draw", [kernels.draw_orthogonal, kernels.draw_gaussian])
def test_is_unbiased_within_four_standard_errors(mechanism, draw):
    inputs = mechanism.draw_inputs()

    @jax.jit
    @jax.vmap
    def estimate(key):
        return mechanism.estimate(draw(key, NUM_FEATURES, DEPTH), **inputs)

    samples = np.float64(estimate(jax.random.split(jax.random.key(0), DRAWS)))
    error = samples.std(axis=0, ddof=1) / DRAWS**0.5
    bias = samples.mean(axis=0) - np.asarray(mechanism.expected(**inputs))
    assert np.abs(bias / error).max() < 4


@every_causal_mechanism
def test_the_future_changes_nothing_bit_for_bit(mechanism):
    inputs = mechanism.draw_inputs(HEADS)
    apply = jax.jit(mechanism.apply)
    out = np.asarray(apply(**inputs))
    # The last token shares its chunk with the two before it.
    for first in (N - 1, N // 2):
        changed = {
            name: x.at[..., first:, :].multiply(-3.0) for name, x in inputs.items()
        }
        result = np.asarray(apply(**changed))
        np.testing.assert_array_equal(result[..., :first, :], out[..., :first, :])
        assert (result[..., first:, :] != out[..., first:, :]).any()


@every_mechanism
def test_an_example_does_not_depend_on_its_batch(mechanism):
    inputs = mechanism.draw_inputs(BATCH, HEADS)
    others = {
        name: x if name in mechanism.shared else x.at[1:].multiply(-9.0)
        for name, x in inputs.items()
    }
    apply = jax.jit(mechanism.apply)
    out, result = np.asarray(apply(**inputs)), np.asarray(apply(**others))
    np.testing.assert_array_equal(result[0], out[0])
    assert (result[1] != out[1]).any()


@every_mechanism
def test_what_masked_keys_hold_does_not_matter(mechanism):
    inputs = mechanism.draw_inputs(HEADS)
    key_mask = jnp.asarray(mechanism.key_mask())
    other = dict(inputs)
    for name in mechanism.key_inputs:
        other[name] = jnp.where(key_mask[:, None], inputs[name], 1e3)
    apply = jax.jit(mechanism.apply)
    np.testing.assert_array_equal(
        apply(**other, key_mask=key_mask), apply(**inputs, key_mask=key_mask)
    )
    if mechanism.on_grid:
        return
    padded = {
        name: jnp.pad(x, [(0, 0), (0, 6), (0, 0)], constant_values=9.0)
        for name, x in inputs.items()
    }
    out = apply(**padded, key_mask=jnp.arange(mechanism.num_keys + 6) < M)
    expected = apply(**inputs, key_mask=jnp.arange(mechanism.num_keys) < M)
    np.testing.assert_allclose(out[:, :N], expected, rtol=1e-5, atol=1e-6)


@every_mechanism
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_stays_finite_when_a_key_is_loud(mechanism, dtype):
    inputs = mechanism.draw_inputs(HEADS, dtype=dtype)
    row = mechanism.shapes[mechanism.loud][0] - 2
    loud = {
        **inputs,
        mechanism.loud: inputs[mechanism.loud].at[..., row, :].multiply(20),
    }

    @jax.jit
    def value_and_gradients(inputs):
        out, pullback = jax.vjp(lambda inputs: mechanism.apply(**inputs), inputs)
        return out, pullback(jnp.ones_like(out))

    out, gradients = value_and_gradients(loud)
    assert out.dtype == dtype
    chex.assert_tree_all_finite((out, gradients))
    if mechanism.causal:
        quiet, _ = value_and_gradients(inputs)
        np.testing.assert_array_equal(out[:, :row], quiet[:, :row])


@every_mechanism
def test_vmap_equals_leading_axes(mechanism):
    inputs = mechanism.draw_inputs(BATCH, HEADS)
    axes = {name: None if name in mechanism.shared else 0 for name in inputs}
    over_heads = jax.vmap(lambda x: mechanism.apply(**x), (axes,))
    mapped = jax.jit(jax.vmap(over_heads, (axes,)))(inputs)
    expected = jax.jit(mechanism.apply)(**inputs)
    np.testing.assert_allclose(mapped, expected, rtol=1e-5, atol=1e-6)


@every_mechanism
def test_lowers_for_cpu_cuda_and_tpu(mechanism):
    inputs = jax.eval_shape(lambda: mechanism.draw_inputs(HEADS))
    key_mask = jax.ShapeDtypeStruct((mechanism.num_keys,), bool)

    def step(inputs, key_mask):
        return jax.grad(lambda x: mechanism.apply(**x, key_mask=key_mask).sum())(inputs)

    platforms = ("cpu", "cuda", "tpu")
    exported = jax.export.export(jax.jit(step), platforms=platforms)(inputs, key_mask)
    assert exported.platforms == platforms


class VariantsTest(chex.TestCase):
    """The same result with and without jit, and on devices side by side."""

    @chex.variants(with_jit=True, without_jit=True, with_pmap=True)
    @parameterized.named_parameters(
        (mechanism.name, mechanism) for mechanism in MECHANISMS
    )
    def test_variants_agree(self, mechanism):
        inputs = mechanism.draw_inputs(HEADS)
        out = self.variant(lambda inputs: mechanism.apply(**inputs))(inputs)
        expected = jax.jit(mechanism.apply)(**inputs)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)

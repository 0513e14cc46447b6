"""Tests sums of waves of the offset: Translution's tables, positions, and errors."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import kernels, offsets
from relattn.offsets import Torus
from tests import reference
from tests.helpers.quick import quick_jit, run

DIM, HEADS, HEAD_DIM = 3, 2, 4


@pytest.mark.parametrize("torus", [Torus((7,)), Torus((4,)), Torus((3, 5)), (4, 2)])
def test_frequencies_of_a_torus_have_every_period_but_for_the_sign(torus):
    torus = Torus(torus)
    frequencies = kernels.torus_frequencies(torus)
    periods = np.round(frequencies * torus / (2 * np.pi)).astype(int)
    np.testing.assert_allclose(frequencies, 2 * np.pi * periods / torus, rtol=1e-6)
    found = [frozenset({tuple(k % torus), tuple(-k % torus)}) for k in periods]
    assert len(set(found)) == len(found)
    assert frozenset().union(*found) == {*np.ndindex(*torus)} - {(0,) * len(torus)}
    lengths = np.linalg.norm(frequencies, axis=1)
    assert (np.diff(lengths) > -1e-6).all()
    two = kernels.torus_frequencies(torus, 2)
    np.testing.assert_array_equal(two, frequencies[:2])


def transform(table, torus, frequencies):
    """Returns W_0, and the cosine and sine parts of a table: its Fourier transform.

    ``table`` is [rows, dim, heads, head_dim]; the parts are [dim, heads, waves, 2,
    head_dim].
    """
    axes = tuple(range(len(torus)))
    spectrum = jnp.fft.fftn(table.reshape(*torus, *table.shape[1:]), axes=axes)
    spectrum = spectrum / np.prod(torus)
    periods = np.round(frequencies * torus / (2 * np.pi)).astype(int) % torus
    parts = spectrum[tuple(periods.T)]
    # k and -k are two terms, unless they are the same.
    twice = 2 - (2 * periods % torus == 0).all(axis=1)[:, None, None, None]
    parts = jnp.stack([twice * parts.real, -twice * parts.imag], axis=1)
    return spectrum[(0,) * len(torus)].real, jnp.moveaxis(parts, (0, 1), (2, 3))


def fourier_attention(x, tables, *, relative, torus):
    """Computes Translution by attention to wide queries, keys and values."""
    frequencies = kernels.torus_frequencies(torus)
    periods = np.round(frequencies * torus / (2 * np.pi))
    frequencies = 2 * np.pi * periods / torus
    waves = kernels.position_waves(offsets.grid_positions(torus), frequencies)
    heads, projections = {}, {}
    for name, table in tables.items():
        if name in relative:
            table, parts = transform(table, torus, frequencies)
            projections[name] = jnp.einsum("nc,chwtd->hnwtd", x, parts)
        heads[name] = jnp.einsum("nc,chd->hnd", x, table)
    q, k, v = (heads[name] for name in "qkv")
    if "q" in relative:
        q = kernels.widen_queries(q, projections["q"], waves)
        k = kernels.widen_keys(k, waves)
    if "k" in relative:
        k = kernels.widen_queries(k, projections["k"], waves)
        q = kernels.widen_keys(q, waves)
    if "v" not in relative:
        return kernels.softmax_attention(q, k, v)
    v = kernels.widen_values(v, projections["v"], waves)
    return kernels.combine_values(kernels.softmax_attention(q, k, v), waves)


@pytest.mark.quick("torus0-v", "torus1-qv")
@pytest.mark.parametrize("relative", ["v", "q", "k", "qv", "kv"])
@pytest.mark.parametrize("torus", [Torus((3, 5)), Torus((4, 2)), Torus((6,))])
def test_all_waves_of_a_torus_are_translution(torus, relative):
    rows, matrix = int(np.prod(torus)), (DIM, HEADS, HEAD_DIM)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, DIM))
    tables = {
        name: rng.standard_normal((rows, *matrix) if name in relative else matrix)
        for name in "qkv"
    }
    cotangent = rng.standard_normal((HEADS, rows, HEAD_DIM))

    def translution(x, tables):
        weights = [tables[name] for name in "qkv"]
        return kernels.translution(x, *weights, index=kernels.Offsets(torus))

    waves = functools.partial(fourier_attention, relative=relative, torus=torus)

    @quick_jit
    def compared(x, tables):
        results = []
        for function in (waves, translution):
            out, pullback = jax.vjp(function, x, tables)
            results.append((out, pullback(jnp.asarray(cotangent))))
        return results

    with jax.enable_x64(True):
        found, expected = jax.device_get(compared(x, tables))
    chex.assert_trees_all_close(found, expected, rtol=1e-10, atol=1e-10)


def test_positions_may_be_real_of_three_axes_and_differ_between_examples():
    rng = np.random.default_rng(0)
    positions, x, v = (rng.standard_normal((2, 5, size)) for size in (3, DIM, HEAD_DIM))
    frequencies = rng.standard_normal((2, 3))
    kernel = rng.standard_normal((DIM, 2, 2, HEAD_DIM))
    weights = rng.random((2, 5, 5))

    def outputs(positions, x, v):
        waves = kernels.position_waves(positions, frequencies)
        projections = jnp.einsum("bnc,cwtd->bnwtd", x, kernel)
        wide = kernels.widen_values(v, projections, waves)
        return kernels.combine_values(weights @ wide, waves)

    def naive(weights, positions, x, v):
        matrices = reference.wave_matrices(positions, frequencies, kernel)
        return reference.fourier_values(weights, x, v, matrices)

    with jax.enable_x64(True):
        # A shift, by no whole number of tokens.
        found = run(outputs, np.stack([positions, positions + 0.3])[:, 0], x, v)
        expected = run(jax.vmap(naive), weights, positions[[0, 0]], x, v)
    np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: kernels.combine_values(np.ones((5, 8)), np.ones((5, 1, 2))),
            "1 waves need a width of a multiple of 3, got 8",
        ),
        (
            lambda: kernels.combine_values(
                np.ones((5, 9)), np.ones((5, 1, 2)), basis=np.ones((1, 2, 4))
            ),
            r"1 waves need a width of 4 \+ 2 \* 1 \* 2, got 9",
        ),
        (
            lambda: kernels.position_waves(
                np.ones((5, 2)), np.ones((3, 2)), num_prefix=6
            ),
            "num_prefix must be between 0 and the number of tokens, 5, got 6",
        ),
        (
            lambda: kernels.widen_values(
                np.ones((5, 4)), np.ones((5, 3, 2, 4)), np.ones((5, 2, 2))
            ),
            "must have the same waves",
        ),
        (
            lambda: kernels.widen_rotary_values(np.ones((5, 4)), np.ones((5, 3))),
            "head_dim 4 needs 2 angles per token, got 3",
        ),
    ],
)
def test_errors_name_expected_values(call, message):
    with pytest.raises(ValueError, match=message):
        call()

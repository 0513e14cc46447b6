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
from tests.helpers.export import unchecked_annotations
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


@pytest.mark.parametrize("torus", [Torus((7,)), Torus((4, 2)), Torus((3, 2, 2))])
def test_the_spectrum_of_a_table_is_its_fourier_transform(torus):
    rows = int(np.prod(torus))
    table = np.random.default_rng(0).standard_normal((rows, DIM, HEADS, HEAD_DIM))
    frequencies = np.float64(kernels.torus_frequencies(torus))
    axes = tuple(range(len(torus)))
    whole = np.fft.fftn(table.reshape(*torus, -1), axes=axes)
    for num_waves in (0, 1, len(frequencies)):
        functions = functools.partial(
            spectrum_and_table, torus=torus, num_frequencies=num_waves
        )
        with jax.enable_x64(True):
            mean, spectrum, low_pass = jax.device_get(run(functions, table))
            expected = jax.device_get(run(transform_parts(torus, frequencies), table))
        np.testing.assert_allclose(mean, expected[0], atol=1e-13)
        parts = np.moveaxis(expected[1], (2, 3), (0, 1))[:num_waves]
        np.testing.assert_allclose(spectrum, parts, atol=1e-13)
        periods = np.round(frequencies[:num_waves] * torus / (2 * np.pi)).astype(int)
        kept = np.zeros(torus, bool)
        for k in (*periods, *-periods, np.zeros(len(torus), int)):
            kept[tuple(k % torus)] = True
        cut = np.fft.ifftn(whole * kept[..., None], axes=axes).real
        np.testing.assert_allclose(low_pass, cut.reshape(table.shape), atol=1e-13)
    np.testing.assert_allclose(low_pass, table, atol=1e-13)


def spectrum_and_table(table, torus, num_frequencies):
    mean, spectrum = kernels.table_spectrum(
        table, torus=torus, num_frequencies=num_frequencies
    )
    return mean, spectrum, kernels.spectrum_table(mean, spectrum, torus=torus)


def transform_parts(torus, frequencies):
    return functools.partial(transform, torus=torus, frequencies=frequencies)


def test_frequencies_of_a_plain_grid_raise():
    message = r"torus must be a relattn.Torus, got \(3, 3\)"
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        kernels.torus_frequencies((3, 3))


def test_a_spectrum_of_other_matrices_than_the_mean_raises():
    mean, spectrum = np.ones(3), np.ones((4, 2, 2))
    message = r"must have shape \[waves, 2, 3\], got \(4, 2, 2\)"
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        kernels.spectrum_table(mean, spectrum, torus=Torus((3, 3)))


def test_the_spectrum_of_bfloat16_is_float32():
    torus, table = Torus((3, 3)), jnp.ones((9, 2), jnp.bfloat16)
    found = jax.eval_shape(lambda x: spectrum_and_table(x, torus, 2), table)
    assert [(x.shape, x.dtype) for x in found] == [
        (shape, jnp.float32) for shape in ((2,), (2, 2, 2), (9, 2))
    ]


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
            "num_prefix must be from 0 to 5, the number of tokens, got 6",
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
        (
            lambda: kernels.combine_rotary_values(
                np.ones((5, 4)), np.ones((5, 2)), num_prefix=1
            ),
            "with prefix tokens, .* for 2 angles .* a width of 12, three parts, got 4",
        ),
        (
            lambda: kernels.rotary_angles(np.ones((5, 1)), 4, torus=Torus((5, 5))),
            r"positions of 1 axes need a torus of as many, got Torus\(\(5, 5\)\)",
        ),
        (
            lambda: kernels.rotary_angles(np.ones((5, 1)), 4, torus=(5,)),
            r"torus must be a relattn.Torus, got \(5,\)",
        ),
        (
            lambda: kernels.rotary_angles(np.ones((5, 1)), 4, torus=Torus((0,))),
            "grid must have sizes of at least 1",
        ),
        (
            lambda: kernels.torus_frequencies(Torus((5,)), 2.5),
            "num_frequencies must be a whole number of at least 0, or None, got 2.5",
        ),
        (
            lambda: kernels.table_spectrum(np.ones((12, 2)), torus=Torus((3, 3))),
            "3x3 tokens has 9 offsets, but the table 12 rows: leave out those of",
        ),
        (
            lambda: kernels.spectrum_table(
                np.ones(2), np.ones((5, 2, 2)), torus=Torus((3, 3))
            ),
            "3x3 tokens has 4 waves, but the spectrum 5: leave out the last",
        ),
        (
            lambda: kernels.torus_frequencies(Torus((3, 3)), -1),
            "num_frequencies must be a whole number of at least 0, or None, got -1",
        ),
    ],
)
def test_errors_name_expected_values(call, message):
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        call()

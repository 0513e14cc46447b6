"""Rows: attention with projections that are sums of waves of the offset."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from relattn import kernels, offsets
from relattn.kernels.precision import compute_dtype
from tests import reference
from tests.helpers import compare
from tests.mechanisms.attention import PROJECTION, draw_wide, feature_map
from tests.mechanisms.base import (
    GRID,
    HEAD_DIM,
    NUM_PREFIX,
    TORUS,
    VALUE_DIM,
    VOLUME,
    Mechanism,
    N,
)

WAVES, DIM, RANK, EVEN_VALUE_DIM = 3, 6, 4, 8
LINE = offsets.grid_positions((N,))
PLANE = offsets.grid_positions(GRID, NUM_PREFIX)
SPACE = offsets.grid_positions(VOLUME, NUM_PREFIX)
TURNS = kernels.torus_frequencies(TORUS, WAVES)
CONTENT = {"q": (N, HEAD_DIM), "k": (N, HEAD_DIM), "v": (N, VALUE_DIM)}
TOKENS = CONTENT | {"x": (N, DIM)}


def naive_softmax(q, k, allowed):
    return reference.softmax_attention(q, k, np.eye(N), allowed)


def causal_linear(q, k, v, key_mask):
    return kernels.causal_linear_attention(
        q, k, v, feature_map("positive"), key_mask=key_mask, chunk_size=5
    )


def naive_linear(q, k, allowed):
    phi = compare.naive_map("positive", PROJECTION)
    return reference.linear_attention(q, k, np.eye(N), phi, allowed)


def softmax(q, k, v, key_mask):
    return kernels.softmax_attention(q, k, v, key_mask=key_mask)


def project(x, kernel):
    return jnp.einsum("...nc,cwtd->...nwtd", x, kernel.astype(x.dtype))


def full_kernel(kernel, basis):
    """Multiplies the factors of matrices of low rank."""
    if basis is None:
        return kernel
    return jnp.einsum("cwtr,wrd->cwtd", kernel, basis)


def values(attend, positions, num_prefix, frequencies=None):
    """Returns attention to widened values, and its outputs combined.

    ``frequencies`` of None are inputs.
    """
    fixed = frequencies

    def apply(q, k, v, x, kernel, frequencies=fixed, basis=None, key_mask=None):
        frequencies = jnp.asarray(frequencies, compute_dtype(q))
        waves = kernels.position_waves(positions, frequencies, num_prefix=num_prefix)
        v = kernels.widen_values(v, project(x, kernel), waves)
        return kernels.combine_values(attend(q, k, v, key_mask), waves, basis=basis)

    return apply


def naive_values(weights_of, positions, num_prefix, frequencies=None):
    fixed, p = frequencies, np.float64(positions)

    def naive(q, k, v, x, kernel, frequencies=fixed, basis=None, *, allowed):
        kernel = full_kernel(kernel, basis)
        matrices = reference.wave_matrices(p, frequencies, kernel, num_prefix)
        return reference.fourier_values(weights_of(q, k, allowed), x, v, matrices)

    return naive


def scores(q, k, v, x, kernel, frequencies, basis=None, key_mask=None, *, of):
    """Computes attention with queries, or keys, that depend on the offset."""
    waves = kernels.position_waves(PLANE, frequencies, num_prefix=NUM_PREFIX)
    if of == "q":
        q = kernels.widen_queries(q, project(x, kernel), waves)
        k = kernels.widen_keys(k, waves, basis=basis)
    else:
        k = kernels.widen_queries(k, project(x, kernel), waves)
        q = kernels.widen_keys(q, waves, basis=basis)
    return kernels.softmax_attention(q, k, v, key_mask=key_mask)


def naive_scores(q, k, v, x, kernel, frequencies, basis=None, *, allowed, of):
    p, kernel = np.float64(PLANE), full_kernel(kernel, basis)
    matrices = reference.wave_matrices(p, frequencies, kernel, NUM_PREFIX)
    if of == "q":
        found = reference.fourier_scores(x, q, k, matrices)
    else:
        found = reference.fourier_scores(x, k, q, matrices).T
    # Scores alone: q . k = 0.
    none = np.zeros((N, 1))
    return reference.softmax_attention(none, none, v, allowed, found)


def mask(attend, positions, num_prefix):
    """Returns attention to keys with waves of their positions."""

    def apply(q, k, v, coefficients, frequencies, key_mask=None):
        waves = kernels.position_waves(positions, frequencies, num_prefix=num_prefix)
        q, k = kernels.append_waves(q, k, coefficients, waves)
        return attend(q, k, v, key_mask)

    return apply


def naive_mask(q, k, v, coefficients, frequencies, allowed):
    """Adds Re((a + bi)^2 exp(i w . d)) to the scores; none in pairs with a prefix."""
    p = np.float64(PLANE)
    squares = (coefficients[:, 0] + 1j * coefficients[:, 1]) ** 2
    turns = jnp.exp(1j * ((p[:, None] - p) @ frequencies.T))
    has_offset = np.arange(N) >= NUM_PREFIX
    bias = jnp.where(has_offset[:, None] & has_offset, (turns @ squares).real, 0.0)
    return reference.softmax_attention(q, k, v, allowed, bias)


def causal_linear_of_width(width):
    projection = draw_wide(jax.random.key(9))[:, :width]

    def attend(q, k, v, key_mask):
        phi = compare.feature_map("positive", projection)
        return kernels.causal_linear_attention(
            q, k, v, phi, key_mask=key_mask, chunk_size=5
        )

    return attend, compare.naive_map("positive", projection)


def naive_linear_mask(q, k, v, coefficients, frequencies, allowed):
    """Computes features of queries and keys with waves, as complex numbers."""
    z = coefficients[:, 0] + 1j * coefficients[:, 1]
    turns = jnp.exp(1j * (np.float64(LINE) @ frequencies.T))
    scale = HEAD_DIM**0.25

    def append(x, waves):
        pairs = jnp.stack([waves.real, waves.imag], axis=-1).reshape(N, -1)
        wide = jnp.concatenate([x, scale * pairs], axis=1)
        return wide * (wide.shape[1] / HEAD_DIM) ** 0.25

    q, k = append(q, z * turns), append(k, z.conj() * turns)
    return reference.linear_attention(q, k, v, NAIVE_WIDE, allowed)


def rotary(q, k, v, key_mask=None):
    positions = jnp.asarray(PLANE, compute_dtype(v))
    angles = kernels.rotary_angles(positions, v.shape[-1], base=100.0)
    v = kernels.widen_rotary_values(v, angles, num_prefix=NUM_PREFIX)
    out = kernels.softmax_attention(q, k, v, key_mask=key_mask)
    return kernels.combine_rotary_values(out, angles, num_prefix=NUM_PREFIX)


def naive_rotary(q, k, v, allowed):
    weights = naive_softmax(q, k, allowed)
    return reference.rotary_values(weights, v, np.float64(PLANE), 100.0, NUM_PREFIX)


def parameters(axes, width, rank=None):
    found = {"kernel": (DIM, WAVES, 2, rank or width), "frequencies": (WAVES, axes)}
    return found | ({"basis": (WAVES, rank, width)} if rank else {})


def row(name, apply, naive, shapes, **options):
    shared = tuple(set(shapes) - {*TOKENS})
    return Mechanism(name, apply, naive, shapes, shared=shared, **options)


# The gradient of a frequency is a sum over queries minus one over keys, which cancel,
# while their roundings do not.
MASK_ROUNDINGS = (4, 64)
ATTEND_WIDE, NAIVE_WIDE = causal_linear_of_width(HEAD_DIM + 2 * WAVES)


MECHANISMS = [
    row(
        "softmax, Fourier mask",
        mask(softmax, PLANE, NUM_PREFIX),
        naive_mask,
        CONTENT | {"coefficients": (WAVES, 2), "frequencies": (WAVES, 2)},
        before_mask=("coefficients", "frequencies"),
        on_grid=True,
        roundings=MASK_ROUNDINGS,
        used_by=("softmax", "fourier_mask"),
    ),
    row(
        "causal linear, Fourier mask",
        mask(ATTEND_WIDE, LINE, 0),
        naive_linear_mask,
        CONTENT | {"coefficients": (WAVES, 2), "frequencies": (WAVES, 1)},
        before_mask=("coefficients", "frequencies"),
        causal=True,
        on_grid=True,
        roundings=MASK_ROUNDINGS,
        used_by=("favor", "fourier_mask"),
    ),
    row(
        "softmax, Fourier values",
        values(softmax, PLANE, NUM_PREFIX),
        naive_values(naive_softmax, PLANE, NUM_PREFIX),
        TOKENS | parameters(2, VALUE_DIM),
        key_inputs=("k", "v", "x"),
        before_mask=("kernel", "frequencies"),
        on_grid=True,
        roundings=(4, 8),
        used_by=("softmax", "fourier_values"),
        quick=True,
    ),
    row(
        "causal linear, Fourier values of low rank",
        values(causal_linear, LINE, 0),
        naive_values(naive_linear, LINE, 0),
        TOKENS | parameters(1, VALUE_DIM, RANK),
        key_inputs=("k", "v", "x"),
        before_mask=("kernel", "frequencies"),
        causal=True,
        on_grid=True,
        roundings=(4, 8),
        used_by=("favor", "fourier_values"),
    ),
    row(
        "softmax, Fourier scores of queries",
        functools.partial(scores, of="q"),
        functools.partial(naive_scores, of="q"),
        TOKENS | parameters(2, HEAD_DIM),
        before_mask=("kernel", "frequencies"),
        on_grid=True,
        roundings=(4, 8),
        used_by=("softmax", "fourier_scores"),
    ),
    row(
        "softmax, Fourier scores of keys, of low rank",
        functools.partial(scores, of="k"),
        functools.partial(naive_scores, of="k"),
        TOKENS | parameters(2, HEAD_DIM, RANK),
        key_inputs=("k", "v", "x"),
        before_mask=("kernel", "frequencies"),
        on_grid=True,
        roundings=(4, 8),
        used_by=("softmax", "fourier_scores"),
    ),
    row(
        "softmax, rotary values",
        rotary,
        naive_rotary,
        {"q": (N, HEAD_DIM), "k": (N, HEAD_DIM), "v": (N, EVEN_VALUE_DIM)},
        on_grid=True,
        roundings=(3, 6),
        used_by=("softmax", "rotary_values"),
    ),
]

# The same kernels on a torus, with whole numbers of periods.
TORI = [
    row(
        "softmax, Fourier values, torus",
        values(softmax, PLANE, NUM_PREFIX, TURNS),
        naive_values(naive_softmax, PLANE, NUM_PREFIX, np.float64(TURNS)),
        TOKENS | {"kernel": (DIM, WAVES, 2, VALUE_DIM)},
        key_inputs=("k", "v", "x"),
        before_mask=("kernel",),
        on_grid=True,
        roundings=(4, 8),
        used_by=("softmax", "fourier_values"),
    ),
]

# A kernel above on a grid of three axes.
VOLUMES = [
    row(
        "softmax, Fourier values, volume",
        values(softmax, SPACE, NUM_PREFIX),
        naive_values(naive_softmax, SPACE, NUM_PREFIX),
        TOKENS | parameters(3, VALUE_DIM),
        key_inputs=("k", "v", "x"),
        before_mask=("kernel", "frequencies"),
        on_grid=True,
        roundings=(4, 8),
        used_by=("softmax", "fourier_values"),
    ),
]

"""Rows: softmax and linear attention, with biases, bands, gates and rotations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from relattn import kernels, offsets
from relattn.kernels.banded import banded_attention
from relattn.kernels.positions import sinusoids
from tests import reference
from tests.helpers import compare
from tests.helpers.quick import quick_jit
from tests.mechanisms.base import (
    GRID,
    GRID_HAS_FIXED_LENGTH,
    HAS_FIXED_LENGTH,
    HEAD_DIM,
    NUM_FEATURES,
    NUM_PREFIX,
    TORUS,
    VALUE_DIM,
    VOLUME,
    M,
    Mechanism,
    N,
)

CLIP = 2
BIASES = ("relative_bias", "t5_bias", "alibi", "sincos_bias", "fourier_bias")
TABLES = ("softmax", "relative_key", "relative_value", *BIASES)
ON_GRID = {"grid": GRID, "num_prefix": NUM_PREFIX}
ON_LINE = {"grid": (N,), "num_prefix": 0}
IN_VOLUME = {"grid": VOLUME, "num_prefix": NUM_PREFIX}
draw = quick_jit(kernels.draw_orthogonal, num_features=NUM_FEATURES, head_dim=HEAD_DIM)
PROJECTION = draw(jax.random.key(7))
FREQUENCIES = np.array([1.0, 0.3], np.float32)
feature_map = functools.partial(compare.feature_map, projection=PROJECTION)
draw_wide = quick_jit(
    kernels.draw_orthogonal, num_features=NUM_FEATURES, head_dim=HEAD_DIM + 12
)
WIDE_PROJECTION = draw_wide(jax.random.key(8))

PLAIN = {"q": (N, HEAD_DIM), "k": (M, HEAD_DIM), "v": (M, VALUE_DIM)}
CAUSAL = {"q": (N, HEAD_DIM), "k": (N, HEAD_DIM), "v": (N, VALUE_DIM)}


def linear(name, *, causal=False, eps=None, **options):
    """Returns the row of a feature map; chunks are shorter than the sequence."""
    kernel = kernels.causal_linear_attention if causal else kernels.linear_attention
    added = {} if eps is None else {"eps": eps}
    phi = functools.partial(feature_map(name), **added)
    naive_map = functools.partial(compare.naive_map(name, PROJECTION), **added)

    def apply(q, k, v, key_mask=None):
        return kernel(q, k, v, phi, key_mask=key_mask, chunk_size=5)

    def naive(q, k, v, allowed):
        return reference.linear_attention(q, k, v, naive_map, allowed)

    return Mechanism(
        name=f"{'causal ' * causal}linear, {name} features{', eps' if added else ''}",
        apply=apply,
        naive=naive,
        shapes=CAUSAL if causal else PLAIN,
        causal=causal,
        used_by=("favor",),
        **options,
    )


def toeplitz(q, k, v, bias, key_mask=None, **where):
    return kernels.toeplitz_linear_attention(
        q,
        k,
        v,
        feature_map("positive"),
        bias,
        key_mask=key_mask,
        dense_size=0,
        **(where or ON_GRID),
    )


def causal_toeplitz(q, k, v, bias, key_mask=None):
    return kernels.causal_toeplitz_linear_attention(
        q, k, v, feature_map("positive"), bias, key_mask=key_mask, dense_size=7
    )


def naive_toeplitz(q, k, v, bias, allowed, rows):
    naive_map = compare.naive_map("positive", PROJECTION)
    bias = reference.gather_rows(bias, rows)
    return reference.linear_attention(q, k, v, naive_map, allowed, bias)


def softmax_kernel(q, k, v):
    return jnp.exp(q @ k.T / HEAD_DIM**0.5)


def random_kernel(name):
    def estimate(projection, q, k, v):
        phi = compare.feature_map(name, projection)
        queries, keys = (phi(x).dense() for x in (q, k))
        return queries @ keys.T

    return {"estimate": estimate, "expected": softmax_kernel}


def banded(q, v, table, key_mask=None, **where):
    return banded_attention(
        q,
        v,
        table,
        feature_map("positive"),
        key_mask=key_mask,
        **(where or ON_GRID),
    )


def naive_banded(q, v, table, allowed, grid=GRID, num_prefix=NUM_PREFIX, cls="far"):
    def log_phi(x):
        naive_map = jax.vmap(reference.positive_features, (0, None))
        return jnp.log(naive_map(x, np.float64(PROJECTION)))

    return reference.banded_attention(
        q, v, table, log_phi, grid, num_prefix, allowed[0], cls
    )


def concatenate(content, position):
    position = jnp.broadcast_to(position, (*content.shape[:-1], position.shape[-1]))
    return jnp.concatenate([content, position.astype(content.dtype)], axis=-1)


def constrained(
    q, k, v, coefficients, key_mask=None, *, grid=GRID, num_prefix=NUM_PREFIX
):
    positions = jnp.asarray(offsets.grid_positions(grid, num_prefix), q.dtype)
    u = sinusoids.sinusoids(positions, FREQUENCIES, num_prefix=num_prefix)
    q = concatenate(q, sinusoids.constrained_sinusoids(u, coefficients))
    k = concatenate(k, u)
    phi = compare.feature_map("positive", WIDE_PROJECTION[:, : q.shape[-1]])
    return kernels.linear_attention(q, k, v, phi, key_mask=key_mask, chunk_size=5)


def naive_constrained(q, k, v, coefficients, allowed, grid=GRID, num_prefix=NUM_PREFIX):
    positions = np.float64(offsets.grid_positions(grid))
    u = reference.sinusoids(positions, np.float64(FREQUENCIES))
    u = jnp.concatenate([jnp.zeros((num_prefix, u.shape[1])), u])
    blocks = [jnp.array([[1.0, 0.0], [0.0, 1.0]]), jnp.array([[0.0, 1.0], [-1.0, 0.0]])]
    matrix = jax.scipy.linalg.block_diag(
        *[a * blocks[0] + b * blocks[1] for a, b in coefficients]
    )
    q = jnp.concatenate([q, u @ matrix], axis=1)
    k = jnp.concatenate([k, u], axis=1)
    naive_map = compare.naive_map(
        "positive", np.asarray(WIDE_PROJECTION)[:, : q.shape[1]]
    )
    return reference.linear_attention(q, k, v, naive_map, allowed)


def relative(q, k, v, key_table, value_table, bias, key_mask=None, **where):
    tables = {"key_table": key_table, "value_table": value_table, "bias": bias}
    return kernels.relative_attention(
        q, k, v, key_mask=key_mask, **tables, **(where or ON_GRID)
    )


def gated(q, k, v, gate, coefficients, key_mask=None, **where):
    return kernels.gated_positional_attention(
        q, k, v, gate, coefficients, key_mask=key_mask, **(where or ON_GRID)
    )


def rotary(q, k, v, key_mask=None, *, grid=GRID, num_prefix=NUM_PREFIX):
    positions = jnp.asarray(offsets.grid_positions(grid, num_prefix), q.dtype)
    angles = kernels.rotary_angles(
        positions, q.shape[-1], base=100.0, num_prefix=num_prefix
    )
    q, k = kernels.rotate(q, angles), kernels.rotate(k, angles)
    return kernels.softmax_attention(q, k, v, key_mask=key_mask)


def naive_rotary(q, k, v, allowed, grid=GRID, num_prefix=NUM_PREFIX):
    positions = np.float64(offsets.grid_positions(grid, num_prefix))
    q, k = (reference.rotary(x, positions, 100.0) for x in (q, k))
    return reference.softmax_attention(q, k, v, allowed)


def naive_window(q, k, v, allowed):
    offsets = np.arange(N)[:, None] - np.arange(N)
    return reference.softmax_attention(q, k, v, allowed & (offsets < 5))


def relative_tables(rows, bias_rows):
    tables = {"key_table": (rows, HEAD_DIM), "value_table": (rows, VALUE_DIM)}
    return {**CAUSAL, **tables, "bias": (bias_rows,)}


MECHANISMS = [
    Mechanism(
        "softmax",
        kernels.softmax_attention,
        reference.softmax_attention,
        PLAIN,
        used_by=("softmax",),
        quick=True,
    ),
    Mechanism(
        "causal softmax",
        kernels.causal_softmax_attention,
        reference.softmax_attention,
        CAUSAL,
        causal=True,
        used_by=("softmax",),
    ),
    Mechanism(
        "causal softmax, window of 5",
        functools.partial(kernels.causal_softmax_attention, window=5),
        naive_window,
        CAUSAL,
        causal=True,
        used_by=("softmax",),
    ),
    linear("positive", **random_kernel("positive"), quick=True),
    linear("trigonometric", **random_kernel("trigonometric")),
    linear("relu"),
    linear("positive", eps=0.3),
    linear("positive", causal=True, quick=True),
    linear("positive", causal=True, eps=0.3),
    linear("trigonometric", causal=True),
    linear("relu", causal=True),
    Mechanism(
        "linear, positive features, constrained sinusoids",
        constrained,
        naive_constrained,
        {**CAUSAL, "coefficients": (4, 2)},
        shared=("coefficients",),
        on_grid=True,
        roundings=(1, 3),
        used_by=("favor", "constrained_sincos"),
    ),
    Mechanism(
        "linear, offset bias",
        toeplitz,
        functools.partial(
            naive_toeplitz, rows=reference.offset_rows(GRID, NUM_PREFIX)[0]
        ),
        {**CAUSAL, "bias": (offsets.num_table_rows(GRID, NUM_PREFIX),)},
        shared=("bias",),
        masks_queries=True,
        on_grid=True,
        used_by=("favor", "relu", "hedgehog", *BIASES),
        fixed_length=GRID_HAS_FIXED_LENGTH,
    ),
    Mechanism(
        "causal linear, offset bias",
        causal_toeplitz,
        functools.partial(naive_toeplitz, rows=reference.offset_rows((N,))[0]),
        {**CAUSAL, "bias": (2 * N - 1,)},
        shared=("bias",),
        causal=True,
        on_grid=True,
        used_by=("favor", "relu", "hedgehog", *BIASES),
        fixed_length=HAS_FIXED_LENGTH,
        quick=True,
    ),
    Mechanism(
        "banded, positive features",
        banded,
        naive_banded,
        {"q": (N, HEAD_DIM), "v": (N, VALUE_DIM), "table": (CLIP + 1, HEAD_DIM)},
        shared=("table",),
        key_inputs=("v",),
        scaled_input="table",
        masks_queries=True,
        on_grid=True,
        used_by=("banded",),
        fixed_length=GRID_HAS_FIXED_LENGTH,
        quick=True,
    ),
    Mechanism(
        "banded, CLS at the corner",
        functools.partial(banded, **ON_GRID, cls="corner"),
        functools.partial(naive_banded, cls="corner"),
        {"q": (N, HEAD_DIM), "v": (N, VALUE_DIM), "table": (CLIP + 1, HEAD_DIM)},
        shared=("table",),
        key_inputs=("v",),
        scaled_input="table",
        on_grid=True,
        used_by=("banded",),
    ),
    Mechanism(
        "relative keys, values and bias",
        relative,
        functools.partial(
            reference.relative_attention,
            rows=reference.offset_rows(GRID, NUM_PREFIX)[0],
        ),
        relative_tables(
            offsets.num_offsets(GRID), offsets.num_table_rows(GRID, NUM_PREFIX)
        ),
        shared=("key_table", "value_table", "bias"),
        masks_queries=True,
        on_grid=True,
        roundings=(1, 2),
        used_by=TABLES,
        fixed_length=GRID_HAS_FIXED_LENGTH,
        quick=True,
    ),
    Mechanism(
        "causal relative keys, values and bias",
        kernels.causal_relative_attention,
        functools.partial(
            reference.relative_attention, rows=reference.offset_rows((N,))[0]
        ),
        relative_tables(2 * N - 1, 2 * N - 1),
        shared=("key_table", "value_table", "bias"),
        causal=True,
        on_grid=True,
        roundings=(1, 2),
        used_by=TABLES,
        length_bounds=(f"n <= {N}",),
    ),
    Mechanism(
        "gated positional",
        gated,
        functools.partial(
            reference.gated_positional_attention, grid=GRID, num_prefix=NUM_PREFIX
        ),
        {**CAUSAL, "gate": (), "coefficients": (6,)},
        shared=("gate", "coefficients"),
        masks_queries=True,
        on_grid=True,
        used_by=("gated_positional",),
        fixed_length=GRID_HAS_FIXED_LENGTH,
        quick=True,
    ),
    Mechanism(
        "causal gated positional",
        kernels.causal_gated_positional_attention,
        functools.partial(
            reference.gated_positional_attention, grid=(N,), num_prefix=0
        ),
        {**CAUSAL, "gate": (), "coefficients": (2,)},
        shared=("gate", "coefficients"),
        causal=True,
        on_grid=True,
        used_by=("gated_positional",),
        fixed_length=HAS_FIXED_LENGTH,
    ),
    Mechanism(
        "softmax, rotary positions of two axes",
        rotary,
        naive_rotary,
        {"q": (N, 8), "k": (N, 8), "v": (N, VALUE_DIM)},
        on_grid=True,
        roundings=(1, 2),
        used_by=("softmax", "rope1d", "rope2d"),
        quick=True,
    ),
]


TOKENS = ("q", "k", "v", "x", "low_q", "low_k", "low_v")


def on_other_grid(name, apply, naive, shapes, *, grid, num_prefix, **options):
    """Returns the row of a kernel that takes a grid, on another one than `GRID`."""
    options.setdefault("shared", tuple(name for name in shapes if name not in TOKENS))
    apply = functools.partial(apply, grid=grid, num_prefix=num_prefix)
    return Mechanism(name, apply, naive, shapes, **options)


def grid_kernels(suffix, **where):
    """Returns the rows of the kernels with a table of offsets or distances."""
    grid, num_prefix = where["grid"], where["num_prefix"]
    rows = reference.offset_rows(grid, num_prefix)[0]
    num_rows = offsets.num_table_rows(grid, num_prefix)
    coefficients = 1 + len(grid) + (3 if num_prefix else 0)
    return [
        on_other_grid(
            f"banded{suffix}",
            banded,
            functools.partial(naive_banded, grid=grid, num_prefix=num_prefix),
            {"q": (N, HEAD_DIM), "v": (N, VALUE_DIM), "table": (CLIP + 1, HEAD_DIM)},
            key_inputs=("v",),
            scaled_input="table",
            used_by=("banded",),
            **where,
        ),
        on_other_grid(
            f"linear, offset bias{suffix}",
            toeplitz,
            functools.partial(naive_toeplitz, rows=rows),
            {**CAUSAL, "bias": (num_rows,)},
            used_by=("favor", "relu", "hedgehog", *BIASES),
            **where,
        ),
        on_other_grid(
            f"relative keys, values and bias{suffix}",
            relative,
            functools.partial(reference.relative_attention, rows=rows),
            relative_tables(num_rows, num_rows),
            used_by=TABLES,
            **where,
        ),
        on_other_grid(
            f"gated positional{suffix}",
            gated,
            functools.partial(
                reference.gated_positional_attention, grid=grid, num_prefix=num_prefix
            ),
            {**CAUSAL, "gate": (), "coefficients": (coefficients,)},
            used_by=("gated_positional",),
            **where,
        ),
    ]


def encodings(suffix, **where):
    """Returns the rows of encodings of queries and keys, on another grid."""
    pairs = len(where["grid"]) * len(FREQUENCIES)
    return [
        on_other_grid(
            f"constrained sinusoids{suffix}",
            constrained,
            functools.partial(naive_constrained, **where),
            {**CAUSAL, "coefficients": (pairs, 2)},
            **where,
        ),
        on_other_grid(
            f"rotary positions{suffix}",
            rotary,
            functools.partial(naive_rotary, **where),
            {"q": (N, 8), "k": (N, 8), "v": (N, VALUE_DIM)},
            **where,
        ),
    ]


# Kernels that take a grid, on a grid of one axis.
LINES = [*grid_kernels("", **ON_LINE), *encodings("", **ON_LINE)]

# The same kernels on a grid of three axes.
VOLUMES = [
    dataclasses.replace(row, on_grid=True)
    for row in [
        *grid_kernels(", volume", **IN_VOLUME),
        *encodings(", volume", **IN_VOLUME),
    ]
]

# The same kernels on a torus.
TORI = [
    dataclasses.replace(row, on_grid=True)
    for row in grid_kernels(", torus", grid=TORUS, num_prefix=NUM_PREFIX)
]

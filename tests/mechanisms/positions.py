"""Rows: attention with rotated or scaled queries and keys, or learned features."""

import functools

import numpy as np

from relattn import kernels, offsets
from tests import reference
from tests.mechanisms.base import (
    GRID,
    HEAD_DIM,
    NUM_FEATURES,
    NUM_PREFIX,
    VALUE_DIM,
    Mechanism,
    N,
)

RANK, EVEN_HEAD_DIM = 3, 6
POSITIONS = offsets.grid_positions(GRID, NUM_PREFIX)
LEARNED = {"projection": (NUM_FEATURES, HEAD_DIM), "bias": (NUM_FEATURES,)}
SQUARE = {"to_q": (HEAD_DIM, HEAD_DIM), "to_k": (HEAD_DIM, HEAD_DIM)}


def inputs(head_dim):
    return {"q": (N, head_dim), "k": (N, head_dim), "v": (N, VALUE_DIM)}


def naive_positions():
    return np.float64(POSITIONS)


def encoded(name, encode, naive_encode, head_dim, parameters, *, position):
    """Returns a row of softmax attention with encoded queries and keys.

    Both functions take queries or keys and the parameters, which both share.
    """

    def apply(q, k, v, key_mask=None, **parameters):
        q, k = encode(q, **parameters), encode(k, **parameters)
        return kernels.softmax_attention(q, k, v, key_mask=key_mask)

    # The arguments have the order of the shapes.
    def naive(q, k, v, *arrays, allowed):
        named = dict(zip(parameters, arrays, strict=True))
        q, k = naive_encode(q, **named), naive_encode(k, **named)
        return reference.softmax_attention(q, k, v, allowed)

    return Mechanism(
        f"softmax, {name}",
        apply,
        naive,
        {**inputs(head_dim), **parameters},
        shared=tuple(parameters),
        before_mask=tuple(parameters),
        on_grid=True,
        # Queries and keys are rounded; the gradients that they share cancel in part.
        roundings=(2, 10),
        used_by=("softmax", position),
    )


def angles(frequencies):
    return kernels.mixed_rotary_angles(POSITIONS, frequencies, num_prefix=NUM_PREFIX)


def mixed_rotary(x, frequencies):
    return kernels.rotate(x, angles(frequencies))


def naive_mixed_rotary(x, frequencies):
    return reference.mixed_rotary(x, naive_positions(), frequencies)


def cayley_string(x, frequencies, skew):
    matrix = kernels.cayley_matrix(skew)
    return kernels.cayley_string(x, angles(frequencies), matrix)


def naive_cayley_string(x, frequencies, skew):
    generators = reference.cayley_generators(skew, frequencies)
    return reference.string(x, naive_positions(), generators)


def circulant_string(x, circulants):
    angles = kernels.circulant_angles(POSITIONS, circulants, num_prefix=NUM_PREFIX)
    return kernels.circulant_string(x, angles)


def naive_circulant_string(x, circulants):
    generators = reference.circulant_generators(circulants)
    return reference.string(x, naive_positions(), generators)


def irpe_gate(x, rows, columns):
    exponents = kernels.irpe_exponents(rows, columns, num_prefix=NUM_PREFIX)
    return kernels.apply_gate(x, exponents)


def naive_irpe_gate(x, rows, columns):
    return reference.irpe_gate(x, rows, columns, GRID, NUM_PREFIX)


def string_gate(x, frequencies, phases, coefficients):
    exponents = kernels.string_exponents(
        POSITIONS, frequencies, phases, coefficients, num_prefix=NUM_PREFIX
    )
    return kernels.apply_gate(x, exponents)


def naive_string_gate(x, frequencies, phases, coefficients):
    return reference.string_gate(x, frequencies, phases, coefficients, GRID, NUM_PREFIX)


def learned_relu(q, k, v, projection, bias, key_mask=None, *, causal):
    kernel = kernels.causal_linear_attention if causal else kernels.linear_attention
    phi = functools.partial(kernels.relu_features, projection=projection, bias=bias)
    return kernel(q, k, v, phi, key_mask=key_mask, chunk_size=5)


def naive_learned_relu(q, k, v, projection, bias, allowed):
    phi = functools.partial(reference.relu_features, projection=projection, bias=bias)
    return reference.linear_attention(q, k, v, phi, allowed)


def hedgehog(q, k, v, to_q, to_k, key_mask=None, *, causal):
    kernel = kernels.causal_linear_attention if causal else kernels.linear_attention
    pair = tuple(
        functools.partial(kernels.hedgehog_features, projection=projection)
        for projection in (to_q, to_k)
    )
    return kernel(q, k, v, pair, key_mask=key_mask, chunk_size=5)


def naive_hedgehog(q, k, v, to_q, to_k, allowed):
    pair = tuple(
        functools.partial(reference.hedgehog_features, projection=projection)
        for projection in (to_q, to_k)
    )
    return reference.linear_attention(q, k, v, pair, allowed)


def learned(features, apply, naive, parameters, *, causal, used_by):
    return Mechanism(
        f"{'causal ' * causal}linear, learned {features} features",
        functools.partial(apply, causal=causal),
        naive,
        {**inputs(HEAD_DIM), **parameters},
        shared=tuple(parameters),
        causal=causal,
        roundings=(1, 4),
        used_by=(used_by,),
    )


learned_relu_row = functools.partial(
    learned, "relu", learned_relu, naive_learned_relu, LEARNED, used_by="relu"
)
hedgehog_row = functools.partial(
    learned, "exponential", hedgehog, naive_hedgehog, SQUARE, used_by="hedgehog"
)


FREQUENCIES = {"frequencies": (EVEN_HEAD_DIM // 2, 2)}

MECHANISMS = [
    learned_relu_row(causal=False),
    learned_relu_row(causal=True),
    hedgehog_row(causal=False),
    hedgehog_row(causal=True),
    encoded(
        "mixed rotary positions",
        mixed_rotary,
        naive_mixed_rotary,
        EVEN_HEAD_DIM,
        FREQUENCIES,
        position="rope2d_mixed",
    ),
    encoded(
        "Cayley-STRING",
        cayley_string,
        naive_cayley_string,
        EVEN_HEAD_DIM,
        {**FREQUENCIES, "skew": (EVEN_HEAD_DIM * (EVEN_HEAD_DIM - 1) // 2,)},
        position="cayley_string",
    ),
    encoded(
        "Circulant-STRING",
        circulant_string,
        naive_circulant_string,
        HEAD_DIM,
        {"circulants": (2, HEAD_DIM)},
        position="circulant_string",
    ),
    encoded(
        "iRPE gate",
        irpe_gate,
        naive_irpe_gate,
        HEAD_DIM,
        {"rows": (GRID[0], HEAD_DIM), "columns": (GRID[1], HEAD_DIM)},
        position="irpe_gate",
    ),
    encoded(
        "STRING gate",
        string_gate,
        naive_string_gate,
        HEAD_DIM,
        {
            "frequencies": (RANK, 2),
            "phases": (RANK,),
            "coefficients": (2 * RANK, HEAD_DIM),
        },
        position="string_gate",
    ),
]

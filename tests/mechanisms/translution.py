"""Rows: Translution and LoR-Translution."""

import jax.numpy as jnp

from relattn import kernels, offsets
from tests import reference
from tests.mechanisms.base import (
    GRID,
    GRID_HAS_FIXED_LENGTH,
    HAS_FIXED_LENGTH,
    HEAD_DIM,
    HEADS,
    NUM_PREFIX,
    TORUS,
    VALUE_DIM,
    VOLUME,
    Mechanism,
    N,
)

LOW, RANK, CLIP = 3, 4, 1
GRID_TABLE = (offsets.num_table_rows(GRID, NUM_PREFIX),)
CAUSAL_TABLE = (N + 6,)
PAIR_TABLE = (N, N)


def index_grid(length):
    del length
    return kernels.Offsets(GRID, NUM_PREFIX)


def index_torus(length):
    del length
    return kernels.Offsets(TORUS, NUM_PREFIX)


def index_volume(length):
    del length
    return kernels.Offsets(VOLUME, NUM_PREFIX)


def index_line(length):
    return kernels.Offsets((length,))


def merge_heads(x):
    *batch, num_heads, n, head_dim = x.shape
    return x.swapaxes(-2, -3).reshape(*batch, n, num_heads * head_dim)


def split_heads(x):
    *tokens, width = x.shape
    return x.reshape(*tokens, HEADS, width // HEADS).swapaxes(-2, -3)


def join(outputs):
    return jnp.concatenate([merge_heads(x) for x in outputs], axis=-1)


def translution(name, make_index, table, rows, **options):
    """Returns a row; ``rows`` index the tables of the reference, None for pairs."""

    def apply(x, w_q, w_k, w_v, key_mask=None):
        index = make_index(x.shape[-2])
        out = kernels.translution(x, w_q, w_k, w_v, index=index, key_mask=key_mask)
        return merge_heads(out)

    def naive(x, w_q, w_k, w_v, allowed):
        return merge_heads(reference.translution(x, w_q, w_k, w_v, rows, allowed))

    shape = (*table, HEAD_DIM, HEADS, VALUE_DIM)
    return Mechanism(
        name,
        apply,
        naive,
        {"x": (N, HEAD_DIM), "w_q": shape, "w_k": shape, "w_v": shape},
        shared=("w_q", "w_k", "w_v"),
        key_inputs=("x",),
        scaled_input="x",
        queries_from_keys=True,
        masks_queries=True,
        used_by=("translution",),
        **{"roundings": (1, 4), **options},
    )


def clipped(name, index, grid, num_prefix=0, *, causal=False):
    """Returns the row of an index in which far offsets share a matrix."""
    rows = reference.offset_rows(grid, num_prefix, causal)
    return translution(
        name,
        lambda length: index,
        (offsets.num_table_rows(grid, num_prefix, causal=causal, clip=CLIP),),
        reference.clip_rows(rows, grid, CLIP, causal),
        causal=causal,
        on_grid=True,
        # Tokens are used for the pairs at near and at far offsets.
        roundings=(1, 7),
    )


def lor_translution(name, make_index, table, rows, **options):
    def apply(q, k, v, low_q, low_k, low_v, t_q, t_k, t_v, key_mask=None):
        qkv = tuple(split_heads(x) for x in (q, k, v))
        low, tables = (low_q, low_k, low_v), (t_q, t_k, t_v)
        index = make_index(q.shape[-2])
        return join(
            kernels.lor_translution(qkv, low, tables, index=index, key_mask=key_mask)
        )

    def naive(q, k, v, low_q, low_k, low_v, t_q, t_k, t_v, allowed):
        plain = [split_heads(x) for x in (q, k, v)]
        low, tables, scale = (low_q, low_k, low_v), (t_q, t_k, t_v), HEAD_DIM**-0.5
        return join(
            reference.lor_translution(*plain, low, tables, rows, allowed, scale)
        )

    plain = dict.fromkeys(("q", "k", "v"), (N, HEADS * HEAD_DIM))
    low = dict.fromkeys(("low_q", "low_k", "low_v"), (N, LOW))
    tables = dict.fromkeys(("t_q", "t_k", "t_v"), (*table, LOW, HEADS, RANK))
    return Mechanism(
        name,
        apply,
        naive,
        plain | low | tables,
        shared=tuple(tables),
        key_inputs=("k", "v", "low_k", "low_v"),
        masks_queries=True,
        roundings=(1, 2),
        used_by=("lor_translution",),
        **options,
    )


MECHANISMS = [
    translution(
        "Translution",
        index_grid,
        GRID_TABLE,
        reference.offset_rows(GRID, NUM_PREFIX),
        on_grid=True,
        fixed_length=GRID_HAS_FIXED_LENGTH,
    ),
    translution(
        "causal Translution",
        kernels.CausalOffsets,
        CAUSAL_TABLE,
        reference.offset_rows((N,), causal=True),
        causal=True,
        fixed_length=HAS_FIXED_LENGTH,
        quick=True,
    ),
    translution(
        "Translution by pairs",
        kernels.Pairs,
        PAIR_TABLE,
        (None,) * 3,
        on_grid=True,
        fixed_length="must have the same n",
    ),
    clipped(
        "clipped Translution",
        kernels.Offsets(GRID, NUM_PREFIX, CLIP),
        GRID,
        NUM_PREFIX,
    ),
    clipped(
        "causal clipped Translution",
        kernels.CausalOffsets(N, CLIP),
        (N,),
        causal=True,
    ),
    lor_translution(
        "LoR-Translution",
        index_grid,
        GRID_TABLE,
        reference.offset_rows(GRID, NUM_PREFIX),
        on_grid=True,
        fixed_length=GRID_HAS_FIXED_LENGTH,
        quick=True,
    ),
    lor_translution(
        "causal LoR-Translution",
        kernels.CausalOffsets,
        CAUSAL_TABLE,
        reference.offset_rows((N,), causal=True),
        causal=True,
        fixed_length=HAS_FIXED_LENGTH,
    ),
]


def on_line(rows):
    """Returns the rows of kernels that take a grid, on a line."""
    table = (2 * N - 1,)
    return [
        translution(
            "Translution",
            index_line,
            table,
            rows,
        ),
        lor_translution(
            "LoR-Translution",
            index_line,
            table,
            rows,
        ),
    ]


def on_torus():
    """Returns the rows of kernels that take a grid, on a torus."""
    return _on_grid("torus", index_torus, TORUS)


def in_volume():
    """Returns the rows of kernels that take a grid, on a grid of three axes."""
    return _on_grid("volume", index_volume, VOLUME)


def _on_grid(name, make_index, grid):
    rows = reference.offset_rows(grid, NUM_PREFIX)
    table = (offsets.num_table_rows(grid, NUM_PREFIX),)
    return [
        translution(f"Translution, {name}", make_index, table, rows, on_grid=True),
        clipped(
            f"clipped Translution, {name}",
            kernels.Offsets(grid, NUM_PREFIX, CLIP),
            grid,
            NUM_PREFIX,
        ),
        lor_translution(
            f"LoR-Translution, {name}", make_index, table, rows, on_grid=True
        ),
    ]

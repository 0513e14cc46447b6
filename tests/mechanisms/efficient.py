"""Rows: Linformer and the heads of the Routing Transformer."""

import functools

import numpy as np

from relattn import kernels
from tests import reference
from tests.mechanisms.base import HEAD_DIM, NUM_PREFIX, VALUE_DIM, M, Mechanism, N

PROJECTED, CLUSTERS = 3, 3
# Neither the clusters nor the windows divide the number of tokens.
ROUTING_WINDOW, LOCAL_WINDOW = 5, 7
TOKENS = {"q": (N, HEAD_DIM), "k": (N, HEAD_DIM), "v": (N, VALUE_DIM)}


def naive_linformer(q, k, v, key_projection, value_projection, allowed):
    return reference.linformer_attention(
        q, k, v, key_projection, value_projection, allowed[0]
    )


def naive_routing(q, k, v, centroids, allowed):
    return reference.routing_attention(q, k, v, centroids, ROUTING_WINDOW, allowed[0])


def naive_local(q, k, v, allowed):
    i, j = np.ogrid[:N, :N]
    near = abs(i - j) <= LOCAL_WINDOW // 2
    near = near | (i < NUM_PREFIX) | (j < NUM_PREFIX)
    return reference.softmax_attention(q, k, v, allowed & near)


MECHANISMS = [
    Mechanism(
        "Linformer",
        kernels.linformer_attention,
        naive_linformer,
        {
            "q": (N, HEAD_DIM),
            "k": (M, HEAD_DIM),
            "v": (M, VALUE_DIM),
            "key_projection": (PROJECTED, M),
            "value_projection": (PROJECTED, M),
        },
        shared=("key_projection", "value_projection"),
        on_grid=True,
        used_by=("linformer",),
        fixed_length="must have the same m",
        quick=True,
    ),
    Mechanism(
        "routing",
        functools.partial(kernels.routing_attention, window=ROUTING_WINDOW),
        naive_routing,
        {**TOKENS, "centroids": (CLUSTERS, HEAD_DIM)},
        shared=("centroids",),
        masks_queries=True,
        # The tokens of a cluster depend on the data. A token is in a cluster at most
        # once, so few rows are added to the same one, unlike those of a table.
        scatters=True,
        used_by=("routing",),
        length_bounds=(f"n >= {ROUTING_WINDOW}",),
        quick=True,
    ),
    Mechanism(
        "local",
        functools.partial(
            kernels.local_attention, window=LOCAL_WINDOW, num_prefix=NUM_PREFIX
        ),
        naive_local,
        TOKENS,
        masks_queries=True,
        roundings=(1, 3),
        used_by=("routing",),
        quick=True,
    ),
]

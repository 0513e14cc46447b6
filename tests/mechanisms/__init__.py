"""The table of mechanisms that tests/test_contracts.py tests."""

from tests import reference
from tests.mechanisms import attention, efficient, positions, translution
from tests.mechanisms.base import N

MECHANISMS = [
    *attention.MECHANISMS,
    *positions.MECHANISMS,
    *translution.MECHANISMS,
    *efficient.MECHANISMS,
]

# A row of every kernel. The others differ by features, an encoding or an option; for
# them `make test` compares only values and gradients with the reference.
QUICK = [
    mechanism
    for mechanism in MECHANISMS
    if mechanism.name
    in {
        "softmax",
        "linear, positive features",
        "causal linear, positive features",
        "linear, offset bias",
        "causal linear, offset bias",
        "banded, positive features",
        "relative keys, values and bias",
        "gated positional",
        "softmax, rotary positions of two axes",
        "Translution",
        "causal Translution",
        "LoR-Translution",
        "Linformer",
        "routing",
        "local",
    }
]

# Kernels that take a grid, on a grid of one axis.
LINES = [*attention.LINES, *translution.on_line(reference.offset_rows((N,)))]
# The same kernels on a torus.
TORI = [*attention.TORI, *translution.on_torus()]

# Kernels that refuse a symbolic number of tokens, with words of the error. Encodings
# have an array of positions instead, which the caller makes for one grid.
_GRID, _FIXED = "of a grid only the batch", "has a fixed number of tokens"
FIXED_LENGTH = {
    "linear, offset bias": _GRID,
    "causal linear, offset bias": _FIXED,
    "banded, positive features": _GRID,
    "relative keys, values and bias": _GRID,
    "gated positional": _GRID,
    "causal gated positional": _FIXED,
    "Translution": _GRID,
    "causal Translution": _FIXED,
    "Translution by pairs": "must have the same n",
    "LoR-Translution": _GRID,
    "causal LoR-Translution": _FIXED,
    "Linformer": "must have the same m",
}
# Bounds that a symbolic number of tokens needs: of tables, and of a cluster's window.
LENGTH_BOUNDS = {
    "causal relative keys, values and bias": ["n <= 13"],
    "routing": ["n >= 5"],
}

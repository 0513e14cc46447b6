"""Kernels for GPUs, by Pallas' Triton backend.

JAX has announced since 0.11 that it will remove this backend; `is_available` says
whether it is there. Its successor, Mosaic GPU, compiles only for Hopper and newer.
There, a prototype was a tenth faster (linear attention that is not causal, 16,384
tokens, bfloat16, an H200: 0.69 instead of 0.77 ms), too little for a second form of
every kernel.

Import the modules only where they are used: Pallas takes long to import.
"""

import importlib.util


def is_available() -> bool:
    """Returns whether this version of JAX has Pallas' Triton backend."""
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None

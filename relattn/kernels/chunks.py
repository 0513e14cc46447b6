"""Sequences cut into chunks, and scans over them whose memory stays linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# The name (`jax.ad_checkpoint.checkpoint_name`) of what is cheap to keep and costly to
# compute anew.
KEPT = "kept"


def check_chunk_size(chunk_size: int, name: str = "chunk_size") -> None:
    """Raises ValueError unless a chunk holds a token."""
    if chunk_size < 1:
        raise ValueError(f"{name} must be at least 1, got {chunk_size}")


def scan_chunks(body: Callable, state: Any, chunks: Any) -> tuple[Any, Any]:
    """Scans over chunks; the backward pass computes anew all but what is `KEPT`."""
    policy = jax.checkpoint_policies.save_only_these_names(KEPT)
    body = jax.checkpoint(body, prevent_cse=False, policy=policy)
    return jax.lax.scan(body, state, chunks)


def split_chunks(tree: Any, chunk_size: int, multiple: int = 1) -> Any:
    """From [*batch, n, width] to [chunks, *batch, chunk, width].

    Chunks are of equal length, a multiple of ``multiple`` and at most ``chunk_size``,
    which is one too; zeros fill up the last.
    """

    def split(x):
        length = x.shape[-2]
        num_chunks = -(-length // chunk_size)
        size = -(-length // (num_chunks * multiple)) * multiple
        padding = [(0, 0)] * x.ndim
        padding[-2] = (0, num_chunks * size - length)
        x = jnp.pad(x, padding)
        x = x.reshape(*x.shape[:-2], num_chunks, size, x.shape[-1])
        return jnp.moveaxis(x, -3, 0)

    return jax.tree.map(split, tree)


def join_chunks(tree: Any, length: int) -> Any:
    """From [chunks, *batch, chunk, width] to [*batch, length, width]."""

    def join(x):
        x = jnp.moveaxis(x, 0, -3)
        *batch, num_chunks, size, width = x.shape
        return x.reshape(*batch, num_chunks * size, width)[..., :length, :]

    return jax.tree.map(join, tree)

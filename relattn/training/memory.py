"""Whether a model fits: an estimate before anything is compiled."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from relattn.training.state import TrainState

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def state_bytes(state: TrainState) -> int:
    """Bytes of the parameters, their gradients and the optimiser's state.

    What an update holds at least, whatever the batch; activations come on top.

    Args:
        state: Arrays, or their shapes and dtypes.

    Returns:
        The sum on one device.

    Example:
        >>> params = {"w": jax.ShapeDtypeStruct((3, 5), "float32")}
        >>> state_bytes(TrainState(0, params, (params, params), {}, {}))
        240
    """
    return 2 * tree_bytes(state.params) + tree_bytes(
        (state.opt_state, state.collections)
    )


def tree_bytes(tree: Any) -> int:
    """Bytes of the arrays of a pytree.

    Args:
        tree: Arrays, or their shapes and dtypes.

    Returns:
        The sum.

    Example:
        >>> tree_bytes({"w": jax.ShapeDtypeStruct((3, 5), "float32")})
        60
    """
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def device_bytes(device: Any) -> int | None:
    """Bytes of memory that a device may use; of a CPU, the machine's.

    Args:
        device: A device of JAX.

    Returns:
        None where it is not known.
    """
    if device.platform == "cpu":
        return _host_bytes()
    return (device.memory_stats() or {}).get("bytes_limit")


def _host_bytes() -> int:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        # "max", where a container has no limit of its own, is no number.
        return min(total, int(CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):
        return total


def warn_if_too_large(state: TrainState, devices: Sequence[Any]) -> None:
    """Warns if a training state cannot fit the devices, each of which holds a copy.

    Args:
        state: Shapes and dtypes of the state.
        devices: Those of JAX to train on.
    """
    device = devices[0]
    available = device_bytes(device)
    # The devices of a CPU share the machine's memory.
    copies = len(devices) if device.platform == "cpu" else 1
    needed = copies * state_bytes(state)
    if available is None or needed <= available:
        return
    on_devices = f" on {copies} devices" if copies > 1 else ""
    warnings.warn(
        f"the parameters, their gradients and the optimiser's state need "
        f"{_gigabytes(needed)}{on_devices}, but {device.device_kind} has "
        f"{_gigabytes(available)}: expect to run out of memory; choose a smaller "
        "config.model or a device with more memory",
        stacklevel=2,
    )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"

"""Collectives over the devices that share a batch in data parallelism.

A program that is mapped over the axis `DEVICE_AXIS`, by ``jax.pmap`` or ``jax.vmap``,
sees its shard of the batch. Elsewhere the axis is not bound, and the program sees the
whole batch: so the same function serves one device and several.
"""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

_Tree = TypeVar("_Tree")

# The name of the axis of devices in data parallelism.
DEVICE_AXIS = "devices"


def is_device_axis_bound() -> bool:
    """Returns whether the program is mapped over `DEVICE_AXIS`.

    Example:
        >>> is_device_axis_bound()
        False
    """
    try:
        jax.lax.axis_size(DEVICE_AXIS)
    except NameError:
        return False
    return True


def mean_over_devices(tree: _Tree) -> _Tree:
    """Averages arrays over the devices that share a batch.

    mean_d x_d under a parallel map over the axis `DEVICE_AXIS`; x itself elsewhere. So
    a module's statistics are those of the whole batch on any number of devices.

    Args:
        tree: An array, or a pytree of arrays, of the same shape on each device, such as
            the moments of the device's shard of the batch.

    Returns:
        The mean, on every device.

    Example:
        >>> float(mean_over_devices(jnp.float32(3)))
        3.0
        >>> mean = jax.vmap(mean_over_devices, axis_name=DEVICE_AXIS)
        >>> mean(jnp.array([1.0, 2.0, 6.0])).tolist()
        [3.0, 3.0, 3.0]
    """
    return jax.lax.pmean(tree, DEVICE_AXIS) if is_device_axis_bound() else tree


def sum_over_devices(tree: _Tree) -> _Tree:
    """Sums arrays over the devices that share a batch.

    Args:
        tree: Arrays of a device, the same structure and shapes on every device.

    Returns:
        sum_d x_d on every device; x itself if the axis is not bound.

    Example:
        >>> total = jax.vmap(sum_over_devices, axis_name=DEVICE_AXIS)
        >>> total(jnp.array([1.0, 2.0, 6.0])).tolist()
        [9.0, 9.0, 9.0]
    """
    return jax.lax.psum(tree, DEVICE_AXIS) if is_device_axis_bound() else tree


def device_index() -> Int[Array, ""] | int:
    """Returns the index of the device along `DEVICE_AXIS`; 0 if it is not bound.

    Example:
        >>> device_index()
        0
        >>> index = jax.vmap(lambda x: device_index(), axis_name=DEVICE_AXIS)
        >>> index(jnp.zeros(3)).tolist()
        [0, 1, 2]
    """
    return jax.lax.axis_index(DEVICE_AXIS) if is_device_axis_bound() else 0


def roll_batch(tree: _Tree) -> _Tree:
    """Rolls the whole batch by one: the last example comes before the first.

    Args:
        tree: Arrays of examples, ``[batch, ...]``; a device's shard of each.

    Returns:
        The example before each; that before a shard's first is another device's last.

    Example:
        >>> roll_batch(jnp.arange(6)).tolist()
        [5, 0, 1, 2, 3, 4]
        >>> roll = jax.vmap(roll_batch, axis_name=DEVICE_AXIS)
        >>> roll(jnp.arange(6).reshape(2, 3)).tolist()
        [[5, 0, 1], [2, 3, 4]]
    """
    if not is_device_axis_bound():
        return jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), tree)
    devices = jax.lax.axis_size(DEVICE_AXIS)
    to_next = [(device, (device + 1) % devices) for device in range(devices)]

    def roll(x: Array) -> Array:
        first = jax.lax.ppermute(x[-1:], DEVICE_AXIS, to_next)
        return jnp.concatenate([first, x[:-1]])

    return jax.tree.map(roll, tree)

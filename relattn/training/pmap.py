"""Data parallelism by ``jax.pmap``: each device has a copy of the state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from relattn.nn.device_axis import DEVICE_AXIS
from relattn.training.parallel import Parallel
from relattn.training.step import Batch, EvalStep, Redraw, TrainStep


class DataParallel(Parallel):
    """Runs the step functions by pmap: each device has a copy of the state.

    Example:
        >>> parallel = DataParallel(jax.local_devices()[:1])
        >>> parallel.shard({"label": np.arange(5)})["label"].shape
        (1, 5)
    """

    @property
    def num_shards(self) -> int:
        """Number of devices."""
        return len(self.devices)

    @property
    def mesh(self) -> Mesh:
        """A mesh of this process's devices."""
        return Mesh(np.array(self.local_devices), (DEVICE_AXIS,))

    def local_shapes(self, tree: Any) -> Any:
        """Returns the shapes themselves: every device has a copy."""
        return tree

    def create(self, make: Callable[[], Any]) -> Any:
        """Calls the function and puts a copy of each array on every device."""
        return self.place(jax.device_get(make()))

    def place(self, tree: Any) -> Any:
        """Puts a copy of every array on every device, along a new leading axis."""
        sharding = NamedSharding(self.mesh, PartitionSpec(DEVICE_AXIS))

        def put(x: Any) -> jax.Array:
            # Through the host, so that no device holds all of the copies at once.
            copy = np.asarray(x)[None]
            shape = (len(self.local_devices), *copy.shape[1:])
            return jax.make_array_from_callback(shape, sharding, lambda _: copy)

        return jax.tree.map(put, tree)

    def fetch(self, tree: Any) -> Any:
        """Copies the first device's arrays to NumPy arrays."""
        # A view of the device's buffer would change once the state is donated.
        return jax.tree.map(
            lambda x: np.array(x.addressable_shards[0].data).reshape(x.shape[1:]), tree
        )

    def to_save(self, tree: Any) -> Any:
        """Copies the first device's arrays to NumPy arrays."""
        return self.fetch(tree)

    def shard(self, batch: Batch, axis: int = 0) -> Batch:
        """Splits a batch along a new leading axis of this process's devices."""
        n = len(self.local_devices)
        sharding = NamedSharding(self.mesh, PartitionSpec(DEVICE_AXIS))
        shards = {}
        for key, value in batch.items():
            before, (size, *after) = value.shape[:axis], value.shape[axis:]
            split = value.reshape(*before, n, size // n, *after)
            shards[key] = np.moveaxis(split, axis, 0)
        return jax.device_put(shards, sharding)

    def compile_train_step(self, step: TrainStep) -> TrainStep:
        """Maps an update over the devices."""
        return jax.pmap(
            step,
            axis_name=DEVICE_AXIS,
            in_axes=(0, 0, None),
            donate_argnums=self.donated,
            devices=self.devices,
        )

    def compile_redraw(self, redraw: Redraw) -> Redraw:
        """Maps a redraw over the devices."""
        return jax.pmap(
            redraw,
            axis_name=DEVICE_AXIS,
            in_axes=(0, None, 0),
            devices=self.devices,
        )

    def compile_eval_step(self, step: EvalStep) -> EvalStep:
        """Maps an evaluation step over the devices."""
        return jax.pmap(step, axis_name=DEVICE_AXIS, devices=self.devices)

"""Data parallelism over the local devices: the only file that says pmap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import flax.jax_utils
import jax
import numpy as np

from relattn.nn.batch_statistics import DEVICE_AXIS
from relattn.training.step import Batch, Metrics, TrainStep


class DataParallel:
    """Runs the step functions with each batch split over devices.

    Batches are global: n devices get a part of 1/n each. The state is replicated.

    Attributes:
        devices: The devices.
        axis_name: The devices' axis, for the step functions.

    Example:
        >>> parallel = DataParallel(jax.local_devices()[:1])
        >>> parallel.shard({"label": np.arange(5)})["label"].shape
        (1, 5)
    """

    axis_name = DEVICE_AXIS

    def __init__(self, devices: Sequence[jax.Device] | None = None):
        """Uses the given devices, or all local ones."""
        self.devices = tuple(devices or jax.local_devices())

    @property
    def platform(self) -> str:
        """Of the devices: "cpu", "gpu" or "tpu"."""
        return self.devices[0].platform

    def check_batch(self, key: str, batch_size: int, parts: int = 1) -> None:
        """Raises unless a global batch splits evenly over the devices.

        Args:
            key: Name of the batch size, for the message.
            batch_size: Size of the global batch.
            parts: Parts that each device takes its share in.

        Raises:
            ValueError: If it does not; names the nearest sizes that do.
        """
        n = len(self.devices) * parts
        if batch_size % n:
            below, above = batch_size // n * n, -(-batch_size // n) * n
            sizes = f"{below} or {above}" if below else f"{above}"
            by = f"the {len(self.devices)} devices"
            if parts > 1:
                by += f" times config.accumulate_steps={parts}"
            raise ValueError(
                f"{key}={batch_size} does not divide by {by}; set it to {sizes}"
            )

    def replicate(self, tree: Any) -> Any:
        """Puts a copy of every array on every device, along a new leading axis."""
        return flax.jax_utils.replicate(
            tree, devices=self.devices, axis_name=DEVICE_AXIS
        )

    def fetch(self, tree: Any) -> Any:
        """The first device's copy of replicated arrays, copied to NumPy arrays."""
        parts = jax.tree.map(lambda x: x.addressable_shards[0].data, tree)
        # A view of the device's buffer would change when the state is donated.
        return jax.tree.map(
            lambda x, part: np.array(part).reshape(x.shape[1:]), tree, parts
        )

    def shard(self, batch: Batch, axis: int = 0) -> Batch:
        """Splits a batch over the devices and starts sending it there.

        Args:
            batch: On the host.
            axis: That of the examples; 1 where seeds are stacked before it.

        Returns:
            Arrays with a new leading axis of devices.
        """
        n = len(self.devices)
        mesh = jax.sharding.Mesh(np.array(self.devices), (DEVICE_AXIS,))
        sharding = jax.sharding.NamedSharding(
            mesh, jax.sharding.PartitionSpec(DEVICE_AXIS)
        )
        parts = {}
        for key, value in batch.items():
            before, (size, *after) = value.shape[:axis], value.shape[axis:]
            split = value.reshape(*before, n, size // n, *after)
            parts[key] = np.moveaxis(split, axis, 0)
        return jax.device_put(parts, sharding)

    def train_step(self, step: TrainStep) -> TrainStep:
        """Maps an update over the devices; the old state's memory is reused."""
        return jax.pmap(
            step,
            axis_name=DEVICE_AXIS,
            in_axes=(0, 0, None),
            donate_argnums=0,
            devices=self.devices,
        )

    def eval_step(
        self, step: Callable[[Any, Batch], Metrics]
    ) -> Callable[[Any, Batch], Metrics]:
        """Maps an evaluation step over the devices."""
        return jax.pmap(step, axis_name=DEVICE_AXIS, devices=self.devices)

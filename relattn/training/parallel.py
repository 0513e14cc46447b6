"""Training on several devices, perhaps of several processes.

Data parallelism by ``jax.pmap``; the only file that says so. `relattn.training.mesh`
shards parameters too.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from relattn.nn.batch_norm import DEVICE_AXIS
from relattn.training.step import Batch, Metrics, TrainStep

EvalStep = Callable[[Any, Batch], Metrics]
# From the random features, the key and the redraw's index to the new features.
Redraw = Callable[[Any, Any, Any], Any]


class Parallel(abc.ABC):
    """Devices that share the work of a step.

    Batches are global: a device gets its part of the examples. Of several processes,
    each gives and holds the part of its own devices.

    Attributes:
        devices: All that take part, in the order of their processes.
        local_devices: Those of this process.
        axis_name: The devices' axis, for the step functions; None if they need none.
    """

    axis_name: str | None

    def __init__(self, devices: Sequence[jax.Device] | None = None):
        """Uses the given devices, or all."""
        # JAX can be told to list them by the network between them.
        self.devices = tuple(
            sorted(devices or jax.devices(), key=lambda device: device.process_index)
        )
        this = jax.process_index()
        self.local_devices = tuple(d for d in self.devices if d.process_index == this)

    @property
    def is_alone(self) -> bool:
        """Whether this process holds all of the devices."""
        return len(self.devices) == len(self.local_devices)

    @property
    def platform(self) -> str:
        """Of the devices: "cpu", "gpu" or "tpu"."""
        return self.devices[0].platform

    @property
    @abc.abstractmethod
    def num_shards(self) -> int:
        """The equal parts that a batch is split in."""

    @property
    def part(self) -> tuple[int, int]:
        """Index and number of the part of a batch that this process reads."""
        owners = [device.process_index for device in self.devices]
        return process_part(owners, jax.process_index(), self.num_shards)

    def check_batch(self, key: str, batch_size: int, parts: int = 1) -> None:
        """Raises unless a global batch splits evenly over the devices.

        Args:
            key: Name of the batch size, for the message.
            batch_size: Size of the global batch.
            parts: Parts that each device takes its share in.

        Raises:
            ValueError: If it does not; names the nearest sizes that do.
        """
        n = self.num_shards * parts
        if batch_size % n:
            below, above = batch_size // n * n, -(-batch_size // n) * n
            sizes = f"{below} or {above}" if below else f"{above}"
            by = f"the {self.num_shards} devices"
            if parts > 1:
                by += f" times config.accumulate_steps={parts}"
            raise ValueError(
                f"{key}={batch_size} does not divide by {by}; set it to {sizes}"
            )

    def round_up(self, batch_size: int) -> int:
        """The smallest batch size, at least the given one, that splits evenly."""
        return -(-batch_size // self.num_shards) * self.num_shards

    @abc.abstractmethod
    def local_shapes(self, tree: Any) -> Any:
        """The shapes and dtypes of what a device holds of arrays."""

    @abc.abstractmethod
    def create(self, make: Callable[[], Any]) -> Any:
        """Puts the arrays that a pure function makes on the devices."""

    def template(self, tree: Any) -> Any:
        """Arrays' shapes and dtypes, and where `restore` is to put them, if it is."""
        return tree

    @abc.abstractmethod
    def place(self, tree: Any) -> Any:
        """Puts arrays, the same in every process, on the devices."""

    @abc.abstractmethod
    def fetch(self, tree: Any) -> Any:
        """Copies arrays that are on the devices to NumPy arrays, whole."""

    @abc.abstractmethod
    def to_save(self, tree: Any) -> Any:
        """What a checkpoint is written from, by all processes together."""

    @abc.abstractmethod
    def shard(self, batch: Batch, axis: int = 0) -> Batch:
        """Splits a batch over the devices and starts sending it there.

        Args:
            batch: On the host, this process's `part`.
            axis: That of the examples; 1 where seeds are stacked before it.

        Returns:
            Arrays for the steps.
        """

    @abc.abstractmethod
    def train_step(self, step: TrainStep) -> TrainStep:
        """Compiles an update for the devices; the old state's memory is reused."""

    @abc.abstractmethod
    def redraw(self, redraw: Redraw) -> Redraw:
        """Compiles a redraw of random features, the same on every device."""

    @abc.abstractmethod
    def eval_step(self, step: EvalStep) -> EvalStep:
        """Compiles an evaluation step for the devices."""


def process_part(
    owners: Sequence[int], process: int, num_shards: int
) -> tuple[int, int]:
    """The part of a batch that a process reads.

    Args:
        owners: Of each device its process, each with as many, one after the other.
        process: The one that reads.
        num_shards: Parts that the devices take the batch in, neighbours the same.

    Returns:
        The part's index and the number of parts; processes whose devices take the same
        part read the same.

    Example:
        >>> process_part([0, 0, 1, 1], process=1, num_shards=4)
        (1, 2)
        >>> process_part([0, 0, 1, 1], process=1, num_shards=1)
        (0, 1)
    """
    devices_per_shard = len(owners) // num_shards
    count = len(owners) // max(devices_per_shard, owners.count(process))
    return owners.index(process) * count // len(owners), count


class DataParallel(Parallel):
    """Runs the step functions by pmap: each device has a copy of the state.

    Example:
        >>> parallel = DataParallel(jax.local_devices()[:1])
        >>> parallel.shard({"label": np.arange(5)})["label"].shape
        (1, 5)
    """

    axis_name = DEVICE_AXIS

    @property
    def num_shards(self) -> int:
        """The number of devices."""
        return len(self.devices)

    @property
    def _mesh(self) -> Mesh:
        return Mesh(np.array(self.local_devices), (DEVICE_AXIS,))

    def local_shapes(self, tree: Any) -> Any:
        """The shapes themselves."""
        return tree

    def create(self, make: Callable[[], Any]) -> Any:
        """Makes the arrays and puts a copy of each on every device."""
        return self.place(jax.device_get(make()))

    def place(self, tree: Any) -> Any:
        """Puts a copy of every array on every device, along a new leading axis."""
        sharding = NamedSharding(self._mesh, PartitionSpec(DEVICE_AXIS))

        def put(x: Any) -> jax.Array:
            # By way of the host, lest one device hold all of the copies at once.
            copy = np.asarray(x)[None]
            shape = (len(self.local_devices), *copy.shape[1:])
            return jax.make_array_from_callback(shape, sharding, lambda _: copy)

        return jax.tree.map(put, tree)

    def fetch(self, tree: Any) -> Any:
        """The first device's copy of replicated arrays, copied to NumPy arrays."""
        # A view of the device's buffer would change when the state is donated.
        return jax.tree.map(
            lambda x: np.array(x.addressable_shards[0].data).reshape(x.shape[1:]), tree
        )

    def to_save(self, tree: Any) -> Any:
        """The first device's copy."""
        return self.fetch(tree)

    def shard(self, batch: Batch, axis: int = 0) -> Batch:
        """Splits a batch along a new leading axis of this process's devices."""
        n = len(self.local_devices)
        sharding = NamedSharding(self._mesh, PartitionSpec(DEVICE_AXIS))
        parts = {}
        for key, value in batch.items():
            before, (size, *after) = value.shape[:axis], value.shape[axis:]
            split = value.reshape(*before, n, size // n, *after)
            parts[key] = np.moveaxis(split, axis, 0)
        return jax.device_put(parts, sharding)

    def train_step(self, step: TrainStep) -> TrainStep:
        """Maps an update over the devices."""
        return jax.pmap(
            step,
            axis_name=DEVICE_AXIS,
            in_axes=(0, 0, None),
            donate_argnums=0,
            devices=self.devices,
        )

    def redraw(self, redraw: Redraw) -> Redraw:
        """Maps a redraw over the devices."""
        return jax.pmap(
            redraw,
            axis_name=DEVICE_AXIS,
            in_axes=(0, None, None),
            devices=self.devices,
        )

    def eval_step(self, step: EvalStep) -> EvalStep:
        """Maps an evaluation step over the devices."""
        return jax.pmap(step, axis_name=DEVICE_AXIS, devices=self.devices)


def whole(x: jax.Array) -> np.ndarray:
    """A NumPy copy of an array that may lie on the devices of several processes.

    Args:
        x: Called by every process with its view of the same array.

    Returns:
        The whole array.

    Example:
        >>> whole(jax.numpy.arange(3)).tolist()
        [0, 1, 2]
    """
    if x.is_fully_addressable:
        return np.array(x)
    if x.is_fully_replicated:
        return np.array(x.addressable_data(0))
    return np.array(multihost_utils.process_allgather(x, tiled=True))

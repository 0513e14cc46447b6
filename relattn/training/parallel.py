"""What devices that share the work of a training step do, in one process or several.

`relattn.training.pmap.DataParallel` maps a step over copies of the state;
`relattn.training.mesh.MeshParallel` compiles it for a mesh that can also split the
parameters.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from relattn.data.base import ShardIndex
from relattn.messages import shorten
from relattn.training.step import Batch, EvalStep, Redraw, TrainStep

# jaxlib has no stubs: for type checkers, jax.Device is a variable.
Device: TypeAlias = jax.Device  # pyright: ignore[reportInvalidTypeForm]

# Calls of a step that the devices have not finished. Each holds its batch, and on CPUs
# a state of its own.
IN_FLIGHT = 2


def list_devices(devices: Iterable[Device] | None) -> list[Device]:
    """Returns the given devices, or all if None.

    Raises:
        ValueError: If there is none, one comes twice, or one is not a device.
    """
    if devices is None:
        return list(jax.devices())
    found = list(devices) if isinstance(devices, Iterable) else []
    is_device = all(hasattr(device, "process_index") for device in found)
    if not found or not is_device or len(set(found)) < len(found):
        raise ValueError(
            "devices must be a list of different JAX devices, such as "
            f"jax.devices()[:2], or None for all, got {shorten(devices)}"
        )
    return found


def limit_in_flight(outputs: Sequence[Any]) -> None:
    """Waits until at most `IN_FLIGHT` calls of a step are unfinished.

    Args:
        outputs: What each call returned so far; the last one has just been made.
    """
    if len(outputs) > IN_FLIGHT:
        jax.block_until_ready(outputs[-1 - IN_FLIGHT])


class Parallel(abc.ABC):
    """Devices that share the work of a step.

    Batches are global: each device takes a shard of the examples. Each process reads
    the shards of its own devices.

    Attributes:
        devices: All devices that are used, in the order of their processes.
        local_devices: The devices of this process.
        mesh: The devices that ``place_key`` puts a key on.
    """

    mesh: Mesh

    def __init__(self, devices: Sequence[Device] | None = None):
        """Uses the given devices, or all."""
        # JAX can list them by network topology instead of by process.
        self.devices = tuple(
            sorted(list_devices(devices), key=lambda device: device.process_index)
        )
        this = jax.process_index()
        self.local_devices = tuple(d for d in self.devices if d.process_index == this)

    @property
    def is_single_process(self) -> bool:
        """Whether this process holds all of the devices."""
        return len(self.devices) == len(self.local_devices)

    @property
    def platform(self) -> str:
        """The platform of the devices: "cpu", "gpu" or "tpu"."""
        return self.devices[0].platform

    @property
    def donated(self) -> tuple[int, ...]:
        """The arguments of an update whose memory it reuses: the state.

        Not on CPUs, where XLA would copy the state first.
        """
        return () if self.platform == "cpu" else (0,)

    @property
    @abc.abstractmethod
    def num_shards(self) -> int:
        """Number of equal shards that a batch is split into."""

    @property
    def shard_index(self) -> ShardIndex:
        """The shard of a batch that this process reads."""
        owners = [device.process_index for device in self.devices]
        return process_shard(owners, jax.process_index(), self.num_shards)

    def check_batch(self, key: str, batch_size: int, accumulate_steps: int = 1) -> None:
        """Checks that a global batch splits evenly over the devices.

        Args:
            key: Name of the batch size, for the message.
            batch_size: Size of the global batch.
            accumulate_steps: Number of micro-batches of each device.

        Raises:
            ValueError: If it does not; the message has the nearest sizes that do.
        """
        n = self.num_shards * accumulate_steps
        if batch_size % n:
            below, above = batch_size // n * n, -(-batch_size // n) * n
            sizes = f"{below} or {above}" if below else f"{above}"
            by = f"the {self.num_shards} devices"
            if accumulate_steps > 1:
                by += f" times config.accumulate_steps={accumulate_steps}"
            raise ValueError(
                f"{key}={batch_size} is not divisible by {by}: set it to {sizes}"
            )

    def round_up(self, batch_size: int) -> int:
        """Rounds a batch size up to one that splits evenly."""
        return -(-batch_size // self.num_shards) * self.num_shards

    @abc.abstractmethod
    def local_shapes(self, tree: Any) -> Any:
        """Returns the shapes and dtypes of the shards of arrays on one device."""

    @abc.abstractmethod
    def create(self, make: Callable[[], Any]) -> Any:
        """Puts the arrays that a pure function returns on the devices."""

    def template(self, tree: Any) -> Any:
        """Returns the template for `restore`: shapes, dtypes and any shardings."""
        return tree

    @abc.abstractmethod
    def place(self, tree: Any) -> Any:
        """Puts arrays, the same in every process, on the devices."""

    def place_key(self, key: Any) -> Any:
        """Puts the run's key on the devices, or every update would copy it there."""
        data = jax.device_put(
            jax.random.key_data(key), NamedSharding(self.mesh, PartitionSpec())
        )
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))

    @abc.abstractmethod
    def fetch(self, tree: Any) -> Any:
        """Copies whole arrays from the devices to NumPy arrays."""

    @abc.abstractmethod
    def to_save(self, tree: Any) -> Any:
        """Returns what all processes together write to a checkpoint."""

    @abc.abstractmethod
    def shard(self, batch: Batch, axis: int = 0) -> Batch:
        """Splits a batch over the devices and starts to copy it there.

        Args:
            batch: This process's shard, on the host.
            axis: The axis of the examples; 1 if stacked batches come before it.

        Returns:
            Arrays on the devices.
        """

    @abc.abstractmethod
    def compile_train_step(self, step: TrainStep) -> TrainStep:
        """Compiles an update for the devices; see `donated`."""

    @abc.abstractmethod
    def compile_redraw(self, redraw: Redraw) -> Redraw:
        """Compiles a redraw of random features, the same on every device."""

    @abc.abstractmethod
    def compile_eval_step(self, step: EvalStep) -> EvalStep:
        """Compiles an evaluation step for the devices."""


def process_shard(owners: Sequence[int], process: int, num_shards: int) -> ShardIndex:
    """Returns the shard of a batch that a process reads.

    Args:
        owners: The process of each device; grouped, with equally many for each process.
        process: The process that reads.
        num_shards: Number of shards that the devices split the batch into; neighbouring
            devices may share one.

    Returns:
        The shard; processes whose devices share one read the same.

    Example:
        >>> process_shard([0, 0, 1, 1], process=1, num_shards=4)
        ShardIndex(index=1, count=2)
        >>> process_shard([0, 0, 1, 1], process=1, num_shards=1)
        ShardIndex(index=0, count=1)
    """
    devices_per_shard = len(owners) // num_shards
    count = len(owners) // max(devices_per_shard, owners.count(process))
    return ShardIndex(owners.index(process) * count // len(owners), count)

"""Devices that share the work of a training step, in one process or several.

`DataParallel` maps a step over copies of the state by ``jax.pmap``; `MeshParallel`
compiles it for a mesh that can also split the parameters.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from relattn.data.base import ShardIndex
from relattn.nn.batch_norm import DEVICE_AXIS
from relattn.training.step import Batch, EvalStep, TrainStep

# jaxlib has no stubs: for type checkers, jax.Device is a variable.
Device: TypeAlias = jax.Device  # pyright: ignore[reportInvalidTypeForm]

# Maps random features, a key and the step to new features.
Redraw = Callable[[Any, Any, Any], Any]

# Values of ``config.parallel``; the first is the default.
PARALLEL = ("pmap", "mesh")

DATA_AXIS, MODEL_AXIS = "data", "model"

# Parameters (and their optimiser state) to split over the mesh's model axis, by the end
# of their path, and the candidate axes: the first that divides evenly is split.
# Every other array has a copy on every device.
SPLIT_AXES: tuple[tuple[str, tuple[int, ...]], ...] = (
    # [..., offsets, width, heads, head_dim]
    (r"attention/[qkv]_table", (-4, -2, -3)),
    (r"attention/[qkv]_matrix", (-2, -3)),
    # [..., dim, mlp_dim], [..., mlp_dim] and [..., mlp_dim, dim]
    (r"feed_forward/hidden/kernel", (-1,)),
    (r"feed_forward/hidden/bias", (-1,)),
    (r"feed_forward/out/kernel", (-2,)),
    # Embedding of tokens [vocabulary, dim], of patches [pixels, dim].
    (r"embedding/embedding", (-2, -1)),
    (r"embedding/kernel", (-1,)),
    (r"head/kernel", (-1, -2)),
)


def make_training_parallel(
    config: ConfigDict, devices: Sequence[Device] | None = None
) -> Parallel:
    """Chooses the devices of a training run, see `choose_devices`.

    Args:
        config: A checked configuration.
        devices: Devices to choose from; all by default.

    Returns:
        The devices.

    Raises:
        ValueError: If the configuration, its batch or the number of devices does not
            fit.
    """
    parallel = make_parallel(config, choose_devices(config, devices))
    parallel.check_batch(
        "config.batch_size", config.batch_size, config.accumulate_steps
    )
    return parallel


def make_parallel(
    config: ConfigDict,
    devices: Sequence[Device] | None = None,
    *,
    model_axis: int | None = None,
) -> Parallel:
    """Makes the `Parallel` that ``config.parallel`` names.

    Args:
        config: A configuration with ``parallel`` and ``model_axis``.
        devices: Devices to use; all by default.
        model_axis: Overrides ``config.model_axis``.

    Returns:
        A `DataParallel` or a `MeshParallel`.

    Raises:
        ValueError: If the configuration or the number of devices does not fit.
    """
    if config.parallel == "mesh":
        return MeshParallel(devices, model_axis=model_axis or config.model_axis)
    return DataParallel(devices)


def choose_devices(
    config: ConfigDict, devices: Sequence[Device] | None = None
) -> list[Device]:
    """Chooses the largest number of devices that divides the batch of a run.

    Every process keeps the same number of its devices, at least one.

    Args:
        config: A configuration with ``batch_size``, ``accumulate_steps``,
            ``model_axis``, and ``num_devices``, which fixes the number unless it is 0.
        devices: Devices to choose from; all by default.

    Returns:
        The first devices of each process; all of them if no number divides the batch,
        which `Parallel.check_batch` reports.

    Raises:
        ValueError: If ``config.num_devices`` are not available.
    """
    devices = list(devices or jax.devices())
    by_process: dict[int, list[Device]] = {}
    for device in devices:
        by_process.setdefault(device.process_index, []).append(device)
    num_processes = len(by_process)
    most = min(len(own) for own in by_process.values())

    def first(count: int) -> list[Device]:
        return [device for own in by_process.values() for device in own[:count]]

    if config.num_devices:
        count, rest = divmod(config.num_devices, num_processes)
        if rest or count > most:
            shared = f" of {num_processes} processes" if num_processes > 1 else ""
            multiple = f"a multiple of {num_processes}, " if num_processes > 1 else ""
            raise ValueError(
                f"config.num_devices={config.num_devices} does not fit the "
                f"{len(devices)} devices{shared}; set it to {multiple}at most "
                f"{most * num_processes}, or to 0 for as many as divide the batch"
            )
        return first(count)
    for count in range(most, 0, -1):
        shards, rest = divmod(count * num_processes, config.model_axis)
        split = count % config.model_axis and config.model_axis % count
        if rest or split:
            continue
        if config.batch_size % (shards * config.accumulate_steps) == 0:
            return first(count)
    return devices


class Parallel(abc.ABC):
    """Devices that share the work of a step.

    Batches are global: each device takes a shard of the examples. Each process reads
    the shards of its own devices.

    Attributes:
        devices: All devices that are used, in the order of their processes.
        local_devices: The devices of this process.
        axis_name: The name of the devices' axis in step functions; None without one.
        mesh: The devices that ``place_key`` puts a key on.
    """

    axis_name: str | None
    mesh: Mesh

    def __init__(self, devices: Sequence[Device] | None = None):
        """Uses the given devices, or all."""
        # JAX can list them by network topology instead of by process.
        self.devices = tuple(
            sorted(devices or jax.devices(), key=lambda device: device.process_index)
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
                f"{key}={batch_size} does not divide by {by}; set it to {sizes}"
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
        """Returns the template for `restore`: shapes, dtypes and perhaps shardings."""
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
    def train_step(self, step: TrainStep) -> TrainStep:
        """Compiles an update for the devices; see `donated`."""

    @abc.abstractmethod
    def redraw(self, redraw: Redraw) -> Redraw:
        """Compiles a redraw of random features, the same on every device."""

    @abc.abstractmethod
    def eval_step(self, step: EvalStep) -> EvalStep:
        """Compiles an evaluation step for the devices."""


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

    def train_step(self, step: TrainStep) -> TrainStep:
        """Maps an update over the devices."""
        return jax.pmap(
            step,
            axis_name=DEVICE_AXIS,
            in_axes=(0, 0, None),
            donate_argnums=self.donated,
            devices=self.devices,
        )

    def redraw(self, redraw: Redraw) -> Redraw:
        """Maps a redraw over the devices."""
        return jax.pmap(
            redraw,
            axis_name=DEVICE_AXIS,
            in_axes=(0, None, 0),
            devices=self.devices,
        )

    def eval_step(self, step: EvalStep) -> EvalStep:
        """Maps an evaluation step over the devices."""
        return jax.pmap(step, axis_name=DEVICE_AXIS, devices=self.devices)


class MeshParallel(Parallel):
    """Runs the step functions by jit on a mesh ``(data, model)``.

    The devices along ``data`` share a batch, those along ``model`` the parameters and
    the optimiser's state, see `SPLIT_AXES`. The program is that of one device; the
    compiler divides it and adds the communication. So the results, dropout included,
    do not depend on the number of devices except for rounding.

    Attributes:
        mesh: The JAX mesh; neighbouring devices share the parameters.

    Example:
        >>> parallel = MeshParallel(jax.local_devices()[:1])
        >>> parallel.shard({"label": np.arange(5)})["label"].shape
        (5,)

    Source:
        Xu et al., GSPMD: General and Scalable Parallelization for ML Computation
        Graphs.
    """

    axis_name = None

    def __init__(self, devices: Sequence[Device] | None = None, *, model_axis: int = 1):
        """Uses the given devices, or all, ``model_axis`` of them for each copy."""
        super().__init__(devices)
        n = len(self.devices)
        if n % model_axis:
            fitting = ", ".join(str(m) for m in range(1, n + 1) if n % m == 0)
            raise ValueError(
                f"config.model_axis={model_axis} does not divide the {n} devices; set "
                f"it to one of {fitting}"
            )
        local = len(self.local_devices)
        if local % model_axis and model_axis % local:
            raise ValueError(
                f"config.model_axis={model_axis} must divide the {local} devices of a "
                "process, or be a multiple of their number"
            )
        self.mesh = Mesh(
            np.array(self.devices).reshape(-1, model_axis), (DATA_AXIS, MODEL_AXIS)
        )

    @property
    def num_shards(self) -> int:
        """Number of devices along the data axis."""
        return self.mesh.shape[DATA_AXIS]

    def shardings(self, tree: Any) -> Any:
        """Returns the sharding of each array of a state, or of some of its fields.

        Args:
            tree: Arrays, or their shapes and dtypes.

        Returns:
            Shardings, in the same structure.
        """

        def sharding(path: Any, leaf: Any) -> NamedSharding:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            spec = partition_spec(name, leaf.shape, self.mesh.shape[MODEL_AXIS])
            return NamedSharding(self.mesh, spec)

        return jax.tree_util.tree_map_with_path(sharding, tree)

    def local_shapes(self, tree: Any) -> Any:
        """Returns the shapes and dtypes of the shards of arrays on one device."""
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(
                sharding.shard_shape(leaf.shape), leaf.dtype
            ),
            tree,
            self.shardings(tree),
        )

    def create(self, make: Callable[[], Any]) -> Any:
        """Creates the arrays sharded: no device ever holds a whole one."""
        shardings = self.shardings(jax.eval_shape(make))
        return jax.jit(make, out_shardings=shardings)()

    def template(self, tree: Any) -> Any:
        """Adds shardings, so that a process reads only what its devices hold."""
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=sharding
            ),
            tree,
            self.shardings(tree),
        )

    def place(self, tree: Any) -> Any:
        """Puts arrays, or shards of them, on the devices."""

        def put(x: Any, sharding: NamedSharding) -> jax.Array:
            if isinstance(x, jax.Array) and x.sharding == sharding:
                return x
            return jax.make_array_from_callback(
                np.shape(x), sharding, lambda index: np.asarray(x)[index]
            )

        return jax.tree.map(put, tree, self.shardings(tree))

    def fetch(self, tree: Any) -> Any:
        """Copies whole arrays to NumPy arrays."""
        return jax.tree.map(to_host, tree)

    def to_save(self, tree: Any) -> Any:
        """Returns NumPy arrays, or with several processes the sharded arrays."""
        return self.fetch(tree) if self.is_single_process else tree

    def shard(self, batch: Batch, axis: int = 0) -> Batch:
        """Splits a batch along its axis of examples."""
        spec = PartitionSpec(*[None] * axis, DATA_AXIS)
        sharding = NamedSharding(self.mesh, spec)
        placed = {}
        for key, value in batch.items():
            shape = list(value.shape)
            shape[axis] *= self.shard_index.count
            placed[key] = jax.make_array_from_process_local_data(
                sharding, value, tuple(shape)
            )
        return placed

    def train_step(self, step: TrainStep) -> TrainStep:
        """Compiles an update; the state keeps its shardings."""

        def update(state: Any, batch: Batch, key: Any) -> tuple[Any, Any]:
            state, metrics = step(state, batch, key)
            state = jax.lax.with_sharding_constraint(state, self.shardings(state))
            return state, self._replicate(metrics)

        return jax.jit(update, donate_argnums=self.donated)

    def redraw(self, redraw: Redraw) -> Redraw:
        """Compiles a redraw."""
        return jax.jit(lambda *arguments: self._replicate(redraw(*arguments)))

    def eval_step(self, step: EvalStep) -> EvalStep:
        """Compiles an evaluation step."""
        return jax.jit(lambda *arguments: self._replicate(step(*arguments)))

    def _replicate(self, tree: Any) -> Any:
        return jax.lax.with_sharding_constraint(
            tree, NamedSharding(self.mesh, PartitionSpec())
        )


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


def partition_spec(path: str, shape: Sequence[int], num_devices: int) -> PartitionSpec:
    """Returns how an array is split over the model axis, by `SPLIT_AXES`.

    Args:
        path: Path of the array in the state, such as ``"params/head/kernel"``.
        shape: Shape of the array.
        num_devices: Devices along the model axis.

    Returns:
        The specification; empty if every device has a copy.

    Example:
        >>> tuple(partition_spec("params/head/kernel", (5, 6), num_devices=2))
        (None, 'model')
        >>> tuple(partition_spec("params/attention/q_table", (7, 8, 4, 2), 2))
        (None, None, 'model', None)
        >>> tuple(partition_spec("params/cls", (1, 1, 6), 2))
        ()
    """
    if num_devices == 1:
        return PartitionSpec()
    for pattern, axes in SPLIT_AXES:
        if not re.search(f"(^|/){pattern}$", path):
            continue
        for axis in axes:
            if -axis <= len(shape) and shape[axis] % num_devices == 0:
                names: list[str | None] = [None] * len(shape)
                names[axis] = MODEL_AXIS
                return PartitionSpec(*names)
    return PartitionSpec()


def to_host(x: jax.Array) -> np.ndarray:
    """Copies an array on the devices of one or several processes to a NumPy array.

    Args:
        x: The array; every process calls with its view of it.

    Returns:
        The whole array.

    Example:
        >>> to_host(jax.numpy.arange(3)).tolist()
        [0, 1, 2]
    """
    if x.is_fully_addressable:
        return np.array(x)
    if x.is_fully_replicated:
        return np.array(x.addressable_data(0))
    return np.array(multihost_utils.process_allgather(x, tiled=True))

"""A mesh of devices that split the batch, and the parameters if they are large."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from relattn.models import MODELS
from relattn.nn import registry
from relattn.nn.blocks import FeedForward
from relattn.training.parallel import Device, Parallel
from relattn.training.step import Batch, EvalStep, Redraw, TrainStep

DATA_AXIS, MODEL_AXIS = "data", "model"


class MeshParallel(Parallel):
    """Runs the step functions by jit on a mesh ``(data, model)``.

    The devices along ``data`` share a batch, those along ``model`` the parameters and
    the optimiser's state, see `split_axes`. The program is that of one device; the
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

    def __init__(self, devices: Sequence[Device] | None = None, *, model_axis: int = 1):
        """Uses the given devices, or all, ``model_axis`` of them for each copy."""
        super().__init__(devices)
        n = len(self.devices)
        if n % model_axis:
            fitting = ", ".join(str(m) for m in range(1, n + 1) if n % m == 0)
            raise ValueError(
                f"config.model_axis={model_axis} does not divide the {n} devices: set "
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
        axes = split_axes()

        def sharding(path: Any, leaf: Any) -> NamedSharding:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            spec = _partition_spec(name, leaf.shape, self.mesh.shape[MODEL_AXIS], axes)
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
        return jax.tree.map(_to_host, tree)

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

    def compile_train_step(self, step: TrainStep) -> TrainStep:
        """Compiles an update; the state keeps its shardings."""

        def update(state: Any, batch: Batch, key: Any) -> tuple[Any, Any]:
            state, metrics = step(state, batch, key)
            state = jax.lax.with_sharding_constraint(state, self.shardings(state))
            return state, self._replicate(metrics)

        return jax.jit(update, donate_argnums=self.donated)

    def compile_redraw(self, redraw: Redraw) -> Redraw:
        """Compiles a redraw."""
        return jax.jit(lambda *arguments: self._replicate(redraw(*arguments)))

    def compile_eval_step(self, step: EvalStep) -> EvalStep:
        """Compiles an evaluation step."""
        return jax.jit(lambda *arguments: self._replicate(step(*arguments)))

    def _replicate(self, tree: Any) -> Any:
        return jax.lax.with_sharding_constraint(
            tree, NamedSharding(self.mesh, PartitionSpec())
        )


def split_axes() -> dict[str, tuple[int, ...]]:
    """Returns the parameters that a mesh splits over its model axis.

    These are the ``split_axes`` of the attentions, registered ones included, the
    feed-forward network and the models. The optimiser's state is split like its
    parameters; every other array has a copy on every device.

    Returns:
        By the end of a parameter's path, the axes that may be split, counted from the
        last. The first that divides evenly is split.

    Raises:
        ValueError: If two attentions split parameters of the same name differently.

    Example:
        >>> split_axes()["attention/q_table"]
        (-4, -2, -3)
    """
    modules = [("attention/", module) for module in registry.ATTENTIONS.values()]
    modules += [("feed_forward/", FeedForward)]
    modules += [("", model) for model in MODELS.values()]
    found: dict[str, tuple[int, ...]] = {}
    for prefix, module in modules:
        # Registered models may have none.
        for name, axes in getattr(module, "split_axes", {}).items():
            if found.setdefault(prefix + name, axes) != axes:
                raise ValueError(
                    f"{module.__name__}.split_axes has {name!r}: {axes}, but another "
                    f"module has {found[prefix + name]}: rename the parameter"
                )
    return found


def _partition_spec(
    path: str,
    shape: Sequence[int],
    num_devices: int,
    split: Mapping[str, tuple[int, ...]],
) -> PartitionSpec:
    """Returns how an array of a path is split over the model axis, if it is.

    ``split`` has the axes that may be split, see `split_axes`.

    Example:
        >>> split = {"head/kernel": (-1, -2)}
        >>> tuple(_partition_spec("params/head/kernel", (5, 6), 2, split))
        (None, 'model')
        >>> tuple(_partition_spec("params/head/kernel", (6, 5), 2, split))
        ('model', None)
        >>> tuple(_partition_spec("params/cls", (1, 1, 6), 2, split))
        ()
    """
    if num_devices == 1:
        return PartitionSpec()
    for name, axes in split.items():
        if not f"/{path}".endswith(f"/{name}"):
            continue
        for axis in axes:
            if -axis <= len(shape) and shape[axis] % num_devices == 0:
                names: list[str | None] = [None] * len(shape)
                names[axis] = MODEL_AXIS
                return PartitionSpec(*names)
    return PartitionSpec()


def _to_host(x: jax.Array) -> np.ndarray:
    """Copies an array on the devices of one or several processes to a NumPy array."""
    if x.is_fully_addressable:
        return np.array(x)
    if x.is_fully_replicated:
        return np.array(x.addressable_data(0))
    return np.array(multihost_utils.process_allgather(x, tiled=True))

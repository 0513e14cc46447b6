"""Computes the memory of a training step per device, on simulated meshes.

    python -m benchmarks.memory \
        --config=configs/translution_vit.py:imagenet,C/16,translution \
        --meshes=1x1,2x4,16x4 --num_classes=1000

compiles the training step of a configuration for simulated devices, without its arrays
and data, and prints the memory per device. A mesh ``DATAxMODEL`` splits the batch into
DATA shards and the parameters into MODEL shards; see `relattn.training.mesh`. The
compiler is the one for CPUs: on other platforms the ``temporary`` memory differs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from ml_collections import ConfigDict
from tqdm import tqdm

from relattn import command
from relattn.data import DataInfo, ImageInfo, TextInfo
from relattn.files import usable_file
from relattn.markdown import markdown_table
from relattn.training.config import check_config
from relattn.training.config_file import read_config
from relattn.training.cost import tree_bytes
from relattn.training.mesh import DATA_AXIS, MeshParallel
from relattn.training.task import Task
from relattn.training.workdir import write_json

_MESH = re.compile(r"([1-9][0-9]*)x([1-9][0-9]*)")


def read_mesh(text: str) -> tuple[int, int]:
    """Reads the sizes of a mesh.

    Args:
        text: The mesh, such as ``"2x4"``.

    Returns:
        Number of devices along the data and the model axis.

    Raises:
        ValueError: If the text is not a mesh.

    Example:
        >>> read_mesh("2x4")
        (2, 4)
    """
    match = _MESH.fullmatch(text)
    if match is None:
        raise ValueError(f"--meshes={text}: pass DATAxMODEL, such as 2x4")
    return int(match[1]), int(match[2])


def describe_data(
    config: ConfigDict, num_classes: int, vocab_size: int, channels: int = 3
) -> DataInfo:
    """Describes the data to the model, without reading them.

    Args:
        config: Configuration of the run.
        num_classes: Number of classes, for images.
        vocab_size: Number of tokens, for text.
        channels: Number of channels, for images.

    Returns:
        A `TextInfo` if the model is the GPT, else an `ImageInfo`.

    Raises:
        ValueError: If the configuration has no image size or context length.
    """
    name = str(config.data.get("name", "unknown"))
    is_text = config.model.get("name") == "gpt"
    key = "context_length" if is_text else "image_size"
    if key not in config.data:
        raise ValueError(
            f"config.data.{key} is missing: only the memory of models of square images "
            "and of texts can be computed"
        )
    if is_text:
        length = config.data.context_length
        return TextInfo(name, "unknown", vocab_size, length, 10**6, "nowhere")
    size = config.data.image_size
    classes = tuple(map(str, range(num_classes)))
    shape, statistics = (size, size, channels), (0.5,) * channels
    return ImageInfo(name, classes, shape, statistics, statistics, 10**6, "nowhere")


def measure(task: Task, parallel: MeshParallel) -> dict[str, int]:
    """Compiles a training step for a mesh and reads its memory per device.

    Args:
        task: The task to train.
        parallel: The mesh.

    Returns:
        Bytes per device: ``state``, the parameters and the optimiser's state;
        ``batch``; ``temporary``, all else, such as gradients and activations; and
        ``total``, their sum.
    """
    step, arguments = abstract_step(task, parallel)
    analysis = step.lower(*arguments).compile().memory_analysis()
    sizes = {
        "state": tree_bytes(parallel.local_shapes(task.abstract_state)),
        "batch": analysis.argument_size_in_bytes,
        "temporary": analysis.temp_size_in_bytes,
    }
    sizes["batch"] -= sizes["state"]
    return {**sizes, "total": sum(sizes.values())}


def abstract_step(task: Task, parallel: MeshParallel) -> tuple[Any, tuple[Any, ...]]:
    """Makes a training step that can be compiled without its arrays.

    Args:
        task: The task to train.
        parallel: The mesh.

    Returns:
        The step, a function made by `jax.jit`, and its arguments, without values.
    """
    state = _with_shardings(
        task.abstract_state, parallel.shardings(task.abstract_state)
    )
    batch = _abstract_batch(task)
    examples = NamedSharding(parallel.mesh, PartitionSpec(DATA_AXIS))
    batch = _with_shardings(batch, jax.tree.map(lambda _: examples, batch))
    step = parallel.compile_train_step(task.train_step)
    return step, (state, batch, task.key)


def _with_shardings(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        tree,
        shardings,
    )


def _abstract_batch(task: Task) -> dict[str, jax.ShapeDtypeStruct]:
    size = task.config.batch_size
    if isinstance(task.info, TextInfo):
        tokens = jax.ShapeDtypeStruct((size, task.info.context_length), jnp.int32)
        return {"tokens": tokens, "label": tokens}
    return {
        "image": jax.ShapeDtypeStruct((size, *task.info.image_shape), jnp.uint8),
        "label": jax.ShapeDtypeStruct((size,), jnp.int32),
    }


def _memory_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Formats a table in Markdown, one row per mesh, in gigabytes of 10^9 bytes.

    Example:
        >>> row = {"data": 2, "model": 4, "state": 3e9, "temporary": 5e8, "total": 4e9}
        >>> print(_memory_table([row]).splitlines()[-1])
        | 8 | 2 x 4 | 3.00 GB | 0.50 GB | 4.00 GB |
    """
    held = ["parameters and optimiser", "temporary", "total"]
    cells = [
        [
            str(row["data"] * row["model"]),
            f"{row['data']} x {row['model']}",
            *(f"{row[key] / 1e9:,.2f} GB" for key in ("state", "temporary", "total")),
        ]
        for row in rows
    ]
    return markdown_table(["devices", "data x model", *held], cells)


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table and, with ``--output``, writes it as JSON."""
    parser = command.Parser("python -m benchmarks.memory", __doc__, overrides=True)
    add = parser.add_argument
    add("--config", required=True, help="configs/X.py[:argument]")
    add("--meshes", default="1x1", help="meshes DATAxMODEL, separated by commas")
    add("--num_classes", type=int, default=10, help="number of classes, for images")
    add(
        "--vocab_size", type=int, default=50257, help="size of the vocabulary, for text"
    )
    add("--output", help="JSON file to write")
    given = parser.parse_args(argv)
    meshes = [read_mesh(text) for text in given.meshes.split(",")]
    config = read_config(given.config, given.overrides)
    check_config(config)
    for name in ("num_classes", "vocab_size"):
        if getattr(given, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(given, name)}")
    if config.num_seeds > 1:
        raise ValueError(
            f"config.num_seeds={config.num_seeds}: only the memory of one seed can be "
            "computed: leave it at 1"
        )
    path = None
    if given.output is not None:
        path = usable_file(given.output, "--output")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(d * m for d, m in meshes))
    info = describe_data(config, given.num_classes, given.vocab_size)
    task = Task.build(config, info)
    parallels = [
        MeshParallel(jax.devices()[: data * model], model_axis=model)
        for data, model in meshes
    ]
    for parallel in parallels:
        parallel.check_batch(
            "config.batch_size", config.batch_size, config.accumulate_steps
        )
    rows = [
        {"data": data, "model": model, **measure(task, parallel)}
        for (data, model), parallel in tqdm(
            zip(meshes, parallels, strict=True), unit=" meshes", total=len(meshes)
        )
    ]
    print(f"{task.num_params:,} parameters, a batch of {config.batch_size}:\n")
    print(_memory_table(rows))
    if path is not None:
        result = {
            "config": given.config,
            "batch_size": config.batch_size,
            "num_params": task.num_params,
            "jax": jax.__version__,
            "bytes_per_device": rows,
        }
        write_json(path, result)


if __name__ == "__main__":
    main()

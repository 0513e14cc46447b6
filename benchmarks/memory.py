"""Memory of a training step by device, on meshes that need not be there.

    python -m benchmarks.memory \
        --config=configs/translution_vit.py:imagenet,C/16,translution \
        --meshes=1x1,2x4,16x4 --num_classes=1000

compiles the step of a configuration for simulated devices, without allocating its
arrays and without its data, and prints what each device holds. A mesh ``DATAxMODEL``
splits the batch in DATA parts and parameters in MODEL parts, see
`relattn.training.devices`. The compiler is that of CPUs: another platform's will differ
in what it needs beside the state, ``temporary``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from ml_collections import ConfigDict
from tqdm import tqdm

from relattn import command
from relattn.data import DataInfo, ImageInfo, TextInfo
from relattn.training.config import check_config, read_config
from relattn.training.cost import tree_bytes
from relattn.training.devices import DATA_AXIS, MeshParallel
from relattn.training.errors import writing
from relattn.training.task import Task
from relattn.training.workdir import usable_folder

_MESH = re.compile(r"([1-9][0-9]*)x([1-9][0-9]*)")
GIGABYTE = 1e9


def read_mesh(text: str) -> tuple[int, int]:
    """Reads the sizes of a mesh.

    Args:
        text: Such as ``"2x4"``.

    Returns:
        Devices along the data and along the model axis.

    Raises:
        ValueError: If it is nothing of the kind.

    Example:
        >>> read_mesh("2x4")
        (2, 4)
    """
    match = _MESH.fullmatch(text)
    if match is None:
        raise ValueError(f"--meshes={text}: give DATAxMODEL, such as 2x4")
    return int(match[1]), int(match[2])


def describe_data(config: ConfigDict, num_classes: int, vocab_size: int) -> DataInfo:
    """What a model needs to know of data that are not there.

    Args:
        config: Of the run.
        num_classes: Of images.
        vocab_size: Of text.

    Returns:
        The description, of text if the model is the GPT.

    Raises:
        ValueError: If the configuration does not say how large the images or the
            windows of text are.
    """
    name = str(config.data.get("name", "unknown"))
    is_text = config.model.get("name") == "gpt"
    key = "context_length" if is_text else "image_size"
    if key not in config.data:
        raise ValueError(f"config.data.{key} is missing")
    if is_text:
        length = config.data.context_length
        return TextInfo(name, "unknown", vocab_size, length, 10**6, "nowhere")
    size = config.data.image_size
    classes = tuple(map(str, range(num_classes)))
    statistics = (0.5,) * 3
    return ImageInfo(
        name, classes, (size, size, 3), statistics, statistics, 10**6, "nowhere"
    )


def measure(task: Task, parallel: MeshParallel) -> dict[str, int]:
    """Compiles a step of training for a mesh and reads what a device holds.

    Args:
        task: What is trained.
        parallel: The mesh.

    Returns:
        In bytes of a device: ``state``, the parameters and the optimiser's state;
        ``batch``; ``temporary``, all else, gradients and activations among them; and
        ``total``, their sum.
    """
    state = _with_shardings(
        task.abstract_state, parallel.shardings(task.abstract_state)
    )
    batch = _abstract_batch(task)
    examples = NamedSharding(parallel.mesh, PartitionSpec(DATA_AXIS))
    batch = _with_shardings(batch, jax.tree.map(lambda _: examples, batch))
    step = parallel.train_step(task.make_train_step(parallel))
    analysis = step.lower(state, batch, task.key).compile().memory_analysis()
    sizes = {
        "state": tree_bytes(parallel.local_shapes(task.abstract_state)),
        "batch": analysis.argument_size_in_bytes,
        "temporary": analysis.temp_size_in_bytes,
    }
    sizes["batch"] -= sizes["state"]
    return {**sizes, "total": sum(sizes.values())}


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


def memory_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table in Markdown.

    Args:
        rows: Of each mesh ``data``, ``model`` and what `measure` returned.

    Returns:
        A row a mesh, sizes in gigabytes of 10^9 bytes.

    Example:
        >>> row = {"data": 2, "model": 4, "state": 3e9, "temporary": 5e8, "total": 4e9}
        >>> print(memory_table([row]).splitlines()[-1])
        | 8 | 2 x 4 | 3.00 GB | 0.50 GB | 4.00 GB |
    """
    kinds = ("state", "temporary", "total")
    lines = [
        "| devices | data x model | parameters and optimiser | temporary | total |",
        "| ---: | :---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        mesh = f"{row['data']} x {row['model']}"
        sizes = " | ".join(f"{row[kind] / GIGABYTE:,.2f} GB" for kind in kinds)
        lines.append(f"| {row['data'] * row['model']} | {mesh} | {sizes} |")
    return "\n".join(lines)


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table and, where asked for, writes it as JSON.

    Args:
        argv: Command-line arguments, by default the process's.
    """
    parser = command.Parser("python -m benchmarks.memory", __doc__, overrides=True)
    add = parser.add_argument
    add("--config", required=True, help="configs/X.py[:argument]")
    add("--meshes", default="1x1", help="meshes DATAxMODEL, separated by commas")
    add("--num_classes", type=int, default=10, help="classes of images")
    add("--vocab_size", type=int, default=50257, help="tokens of a text's vocabulary")
    add("--output", default="", help="a JSON file to write")
    given = parser.parse_args(argv)
    meshes = [read_mesh(text) for text in given.meshes.split(",")]
    config = read_config(given.config, given.overrides)
    check_config(config)
    path = Path(given.output)
    if given.output:
        usable_folder(path.parent, "--output")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(d * m for d, m in meshes))
    info = describe_data(config, given.num_classes, given.vocab_size)
    task = Task.build(config, info)
    rows = []
    for data, model in tqdm(meshes, unit=" meshes"):
        parallel = MeshParallel(jax.devices()[: data * model], model_axis=model)
        parallel.check_batch(
            "config.batch_size", config.batch_size, config.accumulate_steps
        )
        rows.append({"data": data, "model": model, **measure(task, parallel)})
    print(f"{task.num_params:,} parameters, a batch of {config.batch_size}:\n")
    print(memory_table(rows))
    if given.output:
        result = {
            "config": given.config,
            "batch_size": config.batch_size,
            "num_params": task.num_params,
            "jax": jax.__version__,
            "bytes_per_device": rows,
        }
        with writing(path):
            path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Whether the input pipeline keeps up: steps on real batches against one fixed batch.

    python -m relattn.evaluation.pipeline --config=configs/X.py[:argument]

prints one line of JSON: the median time of a step in ms with the training images as
they come (``pipeline_ms``) and with one batch that is already on the device
(``fixed_ms``), and the median of their ratios, measured in turns; and the examples a
second of such training, and of reading, augmenting and placing alone. The few batches
that are made ahead flatter short turns.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from absl import app, flags
from ml_collections import ConfigDict, config_flags

from relattn import data as data_lib
from relattn.training.config import check_config
from relattn.training.mesh import choose_devices, make_parallel
from relattn.training.seeds import train_loader
from relattn.training.task import Task


def measure(
    config: ConfigDict,
    *,
    steps: int = 20,
    rounds: int = 5,
    devices: Sequence[jax.Device] | None = None,
) -> dict[str, Any]:
    """Times training steps with and without the input pipeline, in turns.

    Args:
        config: As for training.
        steps: Steps in a turn.
        rounds: Turns of each kind.
        devices: Those to use; all local ones by default.

    Returns:
        ``device``, ``batch_size``, ``fixed_ms``, ``pipeline_ms``, ``ratio``,
        ``examples_per_second`` on batches as they come, and
        ``read_examples_per_second`` without any update.

    Raises:
        ValueError: If the configuration does not fit the data or the devices.
    """
    check_config(config)
    parallel = make_parallel(config, choose_devices(config, devices))
    parallel.check_batch(
        "config.batch_size", config.batch_size, config.accumulate_steps
    )
    data = data_lib.load_data(config.data)
    task = Task.build(config, data.info)
    step = parallel.train_step(task.make_train_step(parallel))
    state, key = parallel.place(task.create_state()), task.key

    def turn(batches: Iterator[Any]) -> float:
        nonlocal state
        start = time.perf_counter()
        for batch in itertools.islice(batches, steps):
            state, metrics = step(state, batch, key)
        jax.block_until_ready((state, metrics))
        return (time.perf_counter() - start) / steps * 1e3

    def read(batches: Iterator[Any]) -> float:
        start = time.perf_counter()
        for batch in itertools.islice(batches, steps):
            jax.block_until_ready(batch)
        return (time.perf_counter() - start) / steps * 1e3

    times: dict[str, list[float]] = {"fixed": [], "pipeline": [], "read": []}
    with train_loader(data, config.batch_size, task.seeds, 0, parallel) as loader:
        real = (batch for _, batch in loader)
        fixed = itertools.repeat(next(real))
        turn(fixed)
        for _ in range(rounds):
            times["fixed"].append(turn(fixed))
            times["pipeline"].append(turn(real))
            times["read"].append(read(real))
    median = {kind: statistics.median(values) for kind, values in times.items()}
    batch_size = config.batch_size * len(task.seeds)
    ratios = [p / f for p, f in zip(times["pipeline"], times["fixed"], strict=True)]
    return {
        "device": f"{len(parallel.devices)} x {parallel.devices[0].device_kind}",
        "batch_size": config.batch_size,
        "fixed_ms": median["fixed"],
        "pipeline_ms": median["pipeline"],
        "ratio": statistics.median(ratios),
        "examples_per_second": batch_size / median["pipeline"] * 1e3,
        "read_examples_per_second": batch_size / median["read"] * 1e3,
    }


def main(argv: list[str]) -> None:
    """Measures as the flags say and prints a line of JSON."""
    del argv
    result = measure(
        flags.FLAGS.config, steps=flags.FLAGS.steps, rounds=flags.FLAGS.rounds
    )
    print(json.dumps({"config": flags.FLAGS["config"].config_filename, **result}))


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "What to train.")
    flags.DEFINE_integer("steps", 20, "Steps in a turn.")
    flags.DEFINE_integer("rounds", 5, "Turns of each kind.")
    flags.mark_flag_as_required("config")
    app.run(main)

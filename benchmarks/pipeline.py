"""Times training steps with the input pipeline and with one fixed batch.

    python -m benchmarks.pipeline --config=configs/X.py[:argument]

prints one line of JSON: the median time of a step in ms with batches from the pipeline
(``pipeline_ms``) and with one batch that is already on the device (``fixed_ms``), and
the median of their ratios, measured in alternating rounds; and the examples per second
of this training, and of reading, augmenting and placing alone. Prefetched batches make
short rounds look faster.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from relattn import command
from relattn import data as data_lib
from relattn.training.config import check_config
from relattn.training.config_file import read_config
from relattn.training.devices import make_training_parallel
from relattn.training.seeds import make_task


def measure(
    config: ConfigDict,
    *,
    steps: int = 20,
    rounds: int = 5,
    devices: Sequence[jax.Device] | None = None,
) -> dict[str, Any]:
    """Times training steps with and without the input pipeline, in alternation.

    Args:
        config: Configuration of a training.
        steps: Steps per round.
        rounds: Rounds of each kind.
        devices: Devices to use; all local ones by default.

    Returns:
        ``device``, ``batch_size``, ``fixed_ms``, ``pipeline_ms``, ``ratio``,
        ``examples_per_second`` with the pipeline, and ``read_examples_per_second``
        without updates.

    Raises:
        ValueError: If the configuration does not fit the data or the devices, or
            ``steps`` or ``rounds`` is not positive.
    """
    if min(steps, rounds) < 1:
        raise ValueError(
            f"steps and rounds must be at least 1, got {steps} and {rounds}"
        )
    check_config(config)
    parallel = make_training_parallel(config, devices)
    data = data_lib.load_data(config.data)
    task = make_task(config, data.info)
    step = parallel.compile_train_step(task.train_step)
    state, key = parallel.place(task.create_state()), parallel.place_key(task.key)

    def train(batches: Iterator[Any]) -> float:
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
    with task.loader(data, 0, parallel.shard, parallel.shard_index) as loader:
        real = (batch for _, batch in loader)
        fixed = itertools.repeat(next(real))
        train(fixed)  # Compiles.
        for _ in range(rounds):
            times["fixed"].append(train(fixed))
            times["pipeline"].append(train(real))
            times["read"].append(read(real))
    median = {kind: statistics.median(values) for kind, values in times.items()}
    ratios = [p / f for p, f in zip(times["pipeline"], times["fixed"], strict=True)]
    return {
        "device": f"{len(parallel.devices)} x {parallel.devices[0].device_kind}",
        "batch_size": config.batch_size,
        "fixed_ms": median["fixed"],
        "pipeline_ms": median["pipeline"],
        "ratio": statistics.median(ratios),
        "examples_per_second": task.examples_per_step / median["pipeline"] * 1e3,
        "read_examples_per_second": task.examples_per_step / median["read"] * 1e3,
    }


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Prints the measurement as a line of JSON."""
    parser = command.Parser("python -m benchmarks.pipeline", __doc__, overrides=True)
    parser.add_argument("--config", required=True, help="configs/X.py[:argument]")
    parser.add_argument("--steps", type=int, default=20, help="steps per round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each kind")
    given = parser.parse_args(argv)
    config = read_config(given.config, given.overrides)
    result = measure(config, steps=given.steps, rounds=given.rounds)
    print(json.dumps({"config": given.config, **result}))


if __name__ == "__main__":
    main()

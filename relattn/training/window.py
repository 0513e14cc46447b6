"""What the updates since the last row of metrics come to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relattn.training.errors import NonFiniteLossError
from relattn.training.flops import peak_flops
from relattn.training.history import History
from relattn.training.metrics import Row
from relattn.training.step import FINITE_METRICS
from relattn.training.task import Task

Window = dict[str, np.ndarray]


def stack(fetched: Sequence[dict[str, np.ndarray]], num_seeds: int) -> Window:
    """The metrics of updates as arrays ``[updates, seeds]``.

    Args:
        fetched: The metrics of each update.
        num_seeds: How many seeds each is of.

    Returns:
        By name.

    Example:
        >>> window = stack([{"loss": np.array(2.0)}, {"loss": np.array(1.0)}], 1)
        >>> window["loss"].tolist()
        [[2.0], [1.0]]
    """
    return {
        name: np.reshape([metrics[name] for metrics in fetched], (-1, num_seeds))
        for name in sorted(fetched[0])
    }


def is_finite(window: Window) -> np.ndarray:
    """Which updates ``[updates, seeds]`` are finite: loss, gradient and change.

    Args:
        window: As `stack` returns it.

    Returns:
        Booleans.

    Example:
        >>> loss, norm = np.array([[1.0], [np.nan]]), np.ones((2, 1))
        >>> window = {"loss": loss, "grad_norm": norm, "update_norm": norm}
        >>> is_finite(window).tolist()
        [[True], [False]]
    """
    return np.all([np.isfinite(window[name]) for name in FINITE_METRICS], axis=0)


def summaries(
    window: Window, task: Task, histories: Sequence[History], done: int
) -> list[Row]:
    """A row for each seed: means over the updates of a window that were not skipped.

    Args:
        window: As `stack` returns it.
        task: What is trained.
        histories: Of the seeds, with the updates skipped so far.
        done: Number of updates so far, those skipped included.

    Returns:
        The rows; without an update to take the mean of, it is NaN.
    """
    rows = []
    made = is_finite(window)
    for index, (seed, history) in enumerate(zip(task.seeds, histories, strict=True)):
        row: Row = {"seed": seed} if len(task.seeds) > 1 else {}
        for name, values in window.items():
            kept = values[made[:, index], index]
            row[f"train_{name}"] = float(np.mean(kept)) if len(kept) else math.nan
        row["epoch"] = done / task.steps_per_epoch
        # A skipped update does not move the optimiser along its schedule.
        count = max(done - history.skipped_updates, 1)
        row["learning_rate"] = float(task.schedule(count - 1))
        if task.config.max_skipped_updates:
            row["train_skipped"] = history.skipped_updates
        rows.append(row)
    return rows


def throughput(rate: float, task: Task, devices: Sequence[Any]) -> Row:
    """What a rate of training asks of each device.

    Args:
        rate: Examples a second, of all seeds and devices.
        task: What is trained.
        devices: Those of JAX that share the work.

    Returns:
        ``examples_per_second``, ``examples_per_second_per_device`` and, where the
        device's peak is known, ``model_flops_utilization``, a fraction.
    """
    row: Row = {
        "examples_per_second": rate,
        "examples_per_second_per_device": rate / len(devices),
    }
    peak = peak_flops(devices[0].device_kind)
    if peak is not None:
        done = rate * task.flops_per_example / len(devices)
        row["model_flops_utilization"] = done / peak
    return row


def non_finite_error(
    window: Window, update: int, index: int, task: Task, done: int, last: Path | None
) -> NonFiniteLossError:
    """Says which update of a window is not finite, and what to do about it.

    Args:
        window: As `stack` returns it.
        update: Its place in the window.
        index: Of the seed.
        task: What is trained.
        done: Number of updates at the end of the window.
        last: The last checkpoint, if there is one.

    Returns:
        The error.
    """
    step = done - len(window["loss"]) + 1 + update
    name = next(n for n in FINITE_METRICS if not np.isfinite(window[n][update, index]))
    skipped = task.config.max_skipped_updates
    after = f" after {skipped} skipped updates" if skipped else ""
    of_seed = f" of seed {task.seeds[index]}" if len(task.seeds) > 1 else ""
    kept = "no checkpoint was written before it"
    if last is not None:
        kept = f"the last good checkpoint is {last}"
    what, value = FINITE_METRICS[name], float(window[name][update, index])
    return NonFiniteLossError(
        f"the {what}{of_seed} is {value} at step {step}{after}; {kept}. Lower "
        "config.optimizer.learning_rate or set config.optimizer.clip_norm, with a new "
        "--workdir, or go on with a larger config.max_skipped_updates",
        step,
    )

"""Metrics of several updates: collected on the devices, then averaged to a row."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relattn.training.cost import peak_flops
from relattn.training.errors import NonFiniteLossError
from relattn.training.metrics import METRICS, finish_metric
from relattn.training.metrics_log import Row
from relattn.training.parallel import limit_in_flight
from relattn.training.run_metadata import History
from relattn.training.step import FINITE_METRICS
from relattn.training.task import Task

# Metrics of several updates, each an array ``[updates, seeds]``.
Window = dict[str, np.ndarray]


class MetricsWindow:
    """Aggregates step metrics over a logging interval, and times its updates.

    Example:
        >>> window = MetricsWindow()
        >>> window.add({"loss": np.array(2.0)})
        >>> window.add({"loss": np.array(1.0)})
        >>> values, seconds, updates = window.take(fetch=lambda tree: tree)
        >>> values["loss"].tolist(), updates
        ([[2.0], [1.0]], 2)
    """

    def __init__(self) -> None:
        self._metrics: list[dict[str, Any]] = []
        self.restart_timer()

    def restart_timer(self) -> None:
        """Excludes the time and the updates so far from the timing."""
        self._start = time.perf_counter()
        self._untimed = len(self._metrics)

    def add(self, metrics: dict[str, Any]) -> None:
        """Adds the metrics of an update, and waits for all but the last few."""
        self._metrics.append(metrics)
        limit_in_flight(self._metrics)

    def take(self, fetch: Callable[[Any], Any]) -> tuple[Window, float, int]:
        """Empties the window.

        Args:
            fetch: Copies metrics from the devices.

        Returns:
            The metrics, the seconds since the timer started, and the number of updates
            in these seconds.
        """
        fetched = fetch(self._metrics)
        seconds = time.perf_counter() - self._start
        updates = len(fetched) - self._untimed
        self._metrics, self._untimed = [], 0
        values = {
            name: np.reshape([metrics[name] for metrics in fetched], (len(fetched), -1))
            for name in sorted(fetched[0])
        }
        return values, seconds, updates


def is_finite(window: Window) -> np.ndarray:
    """Returns which updates have finite `FINITE_METRICS`.

    Args:
        window: The metrics of some updates, each an array ``[updates, seeds]``.

    Returns:
        Shape ``[updates, seeds]``.

    Example:
        >>> loss, norm = np.array([[1.0], [np.nan]]), np.ones((2, 1))
        >>> window = {"loss": loss, "grad_norm": norm, "update_norm": norm}
        >>> is_finite(window).tolist()
        [[True], [False]]
    """
    return np.all([np.isfinite(window[name]) for name in FINITE_METRICS], axis=0)


def count_skipped(
    window: Window,
    histories: Sequence[History],
    last_step: int,
    max_skipped: int,
    last_checkpoint: Callable[[], Path | None],
) -> None:
    """Counts the updates of a window that are not finite.

    Args:
        window: The metrics of some updates, each an array ``[updates, seeds]``.
        histories: The history of each seed; their counts are increased.
        last_step: Number of updates so far.
        max_skipped: ``config.max_skipped_updates``.
        last_checkpoint: Returns the last checkpoint for the message, or None.

    Raises:
        NonFiniteLossError: At the first such update beyond ``max_skipped``.
    """
    num_updates = len(window["loss"])
    for update, index in np.argwhere(~is_finite(window)):
        history = histories[index]
        if history.stopped_early:
            continue
        if history.skipped_updates < max_skipped:
            history.skipped_updates += 1
            continue
        values = {name: float(window[name][update, index]) for name in FINITE_METRICS}
        name = next(name for name, value in values.items() if not np.isfinite(value))
        step = last_step - num_updates + 1 + int(update)
        after = f" after {max_skipped} skipped updates" if max_skipped else ""
        last = last_checkpoint()
        kept = "no checkpoint was written before it"
        if last is not None:
            kept = f"the last good checkpoint is {last}"
        raise NonFiniteLossError(
            f"{history.prefix}the {FINITE_METRICS[name]} is {values[name]} at step "
            f"{step}{after}; {kept}. Lower config.optimizer.learning_rate or set "
            "config.optimizer.clip_norm, with a new --workdir, or resume with a larger "
            "config.max_skipped_updates",
            step,
        )


def summarize(
    window: Window, task: Task, histories: Sequence[History], step: int
) -> list[Row]:
    """Averages the finite updates of a window to one row for each seed.

    Args:
        window: The metrics of some updates, each an array ``[updates, seeds]``.
        task: The task that is trained.
        histories: The history of each seed, with the updates skipped so far.
        step: Number of updates so far, those skipped included.

    Returns:
        The rows. A mean over no update is NaN.
    """
    rows = []
    finite = is_finite(window)
    for index, history in enumerate(histories):
        row: Row = {} if history.seed is None else {"seed": history.seed}
        for name, values in window.items():
            kept = values[finite[:, index], index]
            mean = float(np.mean(kept)) if len(kept) else math.nan
            row[f"train_{name}"] = (
                finish_metric(name, mean) if name in METRICS else mean
            )
        row["epoch"] = step / task.steps_per_epoch
        # A skipped update does not advance the optimiser's schedule.
        count = max(step - history.skipped_updates, 1)
        row["learning_rate"] = float(np.asarray(task.schedule(count - 1)))
        if task.config.max_skipped_updates:
            row["train_skipped"] = history.skipped_updates
        rows.append(row)
    return rows


def throughput(rate: float, task: Task, devices: Sequence[Any]) -> Row:
    """Computes the throughput of each device.

    Args:
        rate: Examples per second, of all seeds and devices.
        task: The task that is trained.
        devices: The JAX devices that share the work.

    Returns:
        ``examples_per_second``, ``examples_per_second_per_device`` and, if the device's
        peak is known, ``model_flops_utilization``, a fraction.
    """
    row: Row = {
        "examples_per_second": rate,
        "examples_per_second_per_device": rate / len(devices),
    }
    peak = peak_flops(devices[0].device_kind)
    if peak is not None:
        flops = rate * task.flops_per_example / len(devices)
        row["model_flops_utilization"] = flops / peak
    return row

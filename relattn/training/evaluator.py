"""Evaluates a model on a split, over the devices, and a run's best checkpoints."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from relattn.data import EvalSplit
from relattn.training.checkpoint import CHECKPOINTS, read_meta, restore
from relattn.training.distributed import from_primary
from relattn.training.metrics import (
    BEST_METRICS,
    RESERVED,
    finish_metric,
    format_metrics,
)
from relattn.training.parallel import IN_FLIGHT, Parallel
from relattn.training.run_metadata import History
from relattn.training.step import Draw, EvalStep
from relattn.training.task import Task


class Evaluator:
    """Evaluates a model on splits; compiles it once for each batch size.

    Args:
        step: The pure function of `relattn.training.step.make_eval_step`; its sums may
            have a leading axis of models, such as seeds.
        parallel: The devices.
        draw: Maps random features and the run's key to the draws that the step averages
            over; None for the features of the variables.
    """

    def __init__(self, step: EvalStep, parallel: Parallel, draw: Draw | None = None):
        self._parallel = parallel
        self._step = parallel.compile_eval_step(step)
        self._draw = draw and jax.jit(draw)

    @classmethod
    def of_task(cls, task: Task, parallel: Parallel) -> Evaluator:
        """Returns the evaluator of a task's model."""
        return cls(task.eval_step, parallel, task.draw)

    def __call__(
        self,
        variables: Any,
        split: EvalSplit,
        batch_size: int,
        *,
        key: Any = None,
        timed: bool = False,
    ) -> list[dict[str, float]]:
        """Evaluates on a split.

        Args:
            variables: On the devices, as `Parallel.place` puts them.
            split: The examples.
            batch_size: Size of the global batch, rounded up to a multiple of the
                devices that share it.
            key: The run's key, for the draws of random features. Several models have
                stacked keys.
            timed: Whether to measure the seconds from a batch's arrival on the devices
                to its metrics, batch by batch. The first batch runs twice, so that
                compilation is not measured.

        Returns:
            For each model its metrics by name, see `relattn.training.metrics.METRICS`,
            the ``count`` of labels, and for a timed evaluation ``seconds``.

        Raises:
            ValueError: If the split is empty, or no label counts.
        """
        if not len(split):
            raise ValueError("there is nothing to evaluate on: the split is empty")
        variables = self._drawn(variables, key)
        totals: dict[str, Any] = collections.defaultdict(float)
        pending, seconds = collections.deque(), 0.0

        def collect() -> None:
            for name, value in self._parallel.fetch(pending.popleft()).items():
                totals[name] += np.float64(value)

        batch_size = self._parallel.round_up(batch_size)
        batches = split.batches(batch_size, self._parallel.shard_index)
        for number, batch in enumerate(batches):
            placed = self._parallel.shard(batch)
            if timed and not number:
                jax.block_until_ready(self._step(variables, placed))
            if timed:
                jax.block_until_ready(placed)
                start = time.perf_counter()
                pending.append(jax.block_until_ready(self._step(variables, placed)))
                seconds += time.perf_counter() - start
            else:
                pending.append(self._step(variables, placed))
            if len(pending) > IN_FLIGHT:
                collect()
        while pending:
            collect()
        if not np.all(totals["count"] > 0):
            raise ValueError(
                f"there is nothing to evaluate on: the split has {len(split)} "
                "examples, but its batches have no label of positive weight"
            )
        # One model without a leading axis is a list of one.
        rows = zip(*map(np.ravel, totals.values()), strict=True)
        results = [_means(dict(zip(totals, row, strict=True))) for row in rows]
        for result in results if timed else ():
            result["seconds"] = seconds
        return results

    def _drawn(self, variables: Any, key: Any) -> Any:
        """Returns variables with all draws of the random features."""
        if self._draw is None:
            return variables
        features = self._parallel.fetch(variables["random_features"])
        drawn = self._parallel.place(self._draw(features, key))
        return {**variables, "random_features": drawn}


def _means(sums: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of the sums over all labels."""
    count = float(sums["count"])
    means = {
        name: finish_metric(name, float(value) / count)
        for name, value in sums.items()
        if name != "count"
    }
    return {**means, "count": count}


def final_results(
    task: Task,
    histories: Sequence[History],
    splits: Mapping[str, EvalSplit],
    evaluator: Evaluator,
    parallel: Parallel,
    workdir: Path,
    step: int,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Evaluates the best checkpoint of each seed; verifies and reads each once.

    Args:
        task: The task that was trained.
        histories: The history of each seed.
        splits: Splits by name; "validation" was evaluated in training.
        evaluator: The evaluator of ``task.single``.
        parallel: The devices.
        workdir: The run directory.
        step: Number of updates.
        log: Called with a line for each seed.

    Returns:
        The contents of ``result.json``: the metrics of the one seed, or for several
        seeds the shared metrics and, in the list ``runs``, the metrics of each.
        ``inference_seconds`` is the time of the compiled model on the test split, batch
        by batch from the devices' memory, without compilation and loading. It is left
        out if the test split is the validation split.
    """
    metric = BEST_METRICS[task.info.kind]
    folder = workdir / CHECKPOINTS
    template = parallel.template(task.abstract_state)
    runs: dict[int, dict[str, Any]] = {}
    for best_step in dict.fromkeys(history.best_step for history in histories):
        assert best_step is not None  # The last step of a run evaluates it.
        from_primary(partial(read_meta, folder, best_step))
        states = task.unstack(restore(folder, best_step, template))
        for index, history in enumerate(histories):
            if history.best_step != best_step:
                continue
            variables = parallel.place(states[index].variables)
            key = jax.random.key(task.seeds[index])
            scores = _split_scores(task, history, splits, evaluator, variables, key)
            runs[index] = _result(task, history, scores, step)
    for index, history in enumerate(histories):
        tests = [
            format_metrics({f"{name}_{metric}": runs[index][f"{name}_{metric}"]})
            for name in splits
            if name != "validation"
        ]
        log(
            f"{history.prefix}best validation "
            f"{format_metrics({metric: history.best[metric]})} at step "
            f"{history.best_step}; "
            f"{', '.join(tests)}. Everything is in {workdir}."
        )
    results = [runs[index] for index in range(len(histories))]
    return results[0] if len(results) == 1 else _joined(task, results, step)


def _split_scores(
    task: Task,
    history: History,
    splits: Mapping[str, EvalSplit],
    evaluator: Evaluator,
    variables: Any,
    key: Any,
) -> dict[str, dict[str, float]]:
    """Evaluates on every split once, even if it has two names."""
    scores = {id(splits["validation"]): history.best}
    batch_size = task.config.eval_batch_size
    for name, split in splits.items():
        if id(split) not in scores:
            (scores[id(split)],) = evaluator(
                variables, split, batch_size, key=key, timed=name == "test"
            )
    return {name: scores[id(split)] for name, split in splits.items()}


def _result(
    task: Task, history: History, scores: dict[str, dict[str, float]], step: int
) -> dict[str, Any]:
    """Collects the final metrics of one seed."""
    result: dict[str, Any] = {} if history.seed is None else {"seed": history.seed}
    step = history.stopped_step or step
    result |= {
        "step": step,
        "num_steps": task.num_steps,
        "epochs": step / task.steps_per_epoch,
        "stopped_early": history.stopped_early,
        "num_params": task.num_params,
        "best_step": history.best_step,
        "skipped_updates": history.skipped_updates,
    }
    for name, metrics in scores.items():
        for key, value in metrics.items():
            if key not in RESERVED:
                result[f"{name}_{key}"] = value
    if "seconds" in scores["test"]:
        result["inference_seconds"] = scores["test"]["seconds"]
    result["seconds"] = history.seconds
    result["examples_per_second"] = history.examples_per_second
    return result


def _joined(task: Task, runs: list[dict[str, Any]], step: int) -> dict[str, Any]:
    """Collects the final metrics of several seeds: shared ones, and each seed's."""
    return {
        "step": step,
        "num_steps": task.num_steps,
        "epochs": step / task.steps_per_epoch,
        "stopped_early": all(run["stopped_early"] for run in runs),
        "num_params": task.num_params,
        "seconds": sum(run["seconds"] for run in runs),
        "runs": runs,
    }

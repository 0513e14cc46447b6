"""Evaluation of a model on a split, over the devices."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jaxtyping import Array

from relattn.data import DataInfo, EvalSplit
from relattn.training.checkpoint import CHECKPOINTS, read_meta, restore
from relattn.training.devices import Parallel
from relattn.training.distributed import from_primary
from relattn.training.run_metadata import BEST_METRICS, History
from relattn.training.seeds import map_eval_step, select
from relattn.training.step import Batch, make_eval_step
from relattn.training.task import Task

# With ten classes or fewer the five best are half of them.
TOP5_CLASSES = 10
# Batches on their way to the devices at a time.
AHEAD = 3


class Evaluator:
    """Evaluates a model, or one of several seeds, compiled once for each batch size.

    Args:
        model: Applied with ``deterministic=True``.
        preprocess: From a batch to what the model sees.
        info: The data's description.
        parallel: The devices.
        num_seeds: How many sets of variables there are, stacked if several.
    """

    def __init__(
        self,
        model: nn.Module,
        preprocess: Callable[[Batch], Array],
        info: DataInfo,
        parallel: Parallel,
        num_seeds: int = 1,
    ):
        self._parallel = parallel
        self._is_text = info.kind == "tokens"
        top5 = not self._is_text and info.num_classes > TOP5_CLASSES
        step = make_eval_step(
            model, preprocess, top5=top5, axis_name=parallel.axis_name
        )
        step = map_eval_step(step, num_seeds, parallel.platform)
        self._step = parallel.eval_step(step)
        self._num_seeds = num_seeds

    def __call__(
        self, variables: Any, split: EvalSplit, batch_size: int, *, timed: bool = False
    ) -> list[dict[str, float]]:
        """Evaluates on a split.

        Args:
            variables: On the devices, as `Parallel.place` puts them.
            split: The examples.
            batch_size: Size of the global batch, rounded up to a multiple of the
                devices that share it.
            timed: Whether to wait for every batch, first for its arrival on the devices
                and then for its metrics, and to sum the seconds of the latter; the
                first batch comes twice, so that compilation is not among them.

        Returns:
            For each seed ``loss`` and ``accuracy``, means over the labels, and their
            ``count``; of images of more than ten classes ``top5_accuracy``; of text
            ``perplexity``, exp(loss); and of a timed evaluation ``seconds``.

        Raises:
            ValueError: If the split is empty.
        """
        if not len(split):
            raise ValueError("there is nothing to evaluate on: the split is empty")
        totals: dict[str, Any] = collections.defaultdict(float)
        pending, seconds = collections.deque(), 0.0

        def collect() -> None:
            for name, value in self._parallel.fetch(pending.popleft()).items():
                totals[name] += np.float64(value)

        batch_size = self._parallel.round_up(batch_size)
        batches = split.batches(batch_size, self._parallel.part)
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
            if len(pending) > AHEAD:
                collect()
        while pending:
            collect()
        results = []
        for seed in range(self._num_seeds):
            of_seed = {
                name: float(np.reshape(total, self._num_seeds)[seed])
                for name, total in totals.items()
            }
            results.append(self._result(of_seed))
            if timed:
                results[-1]["seconds"] = seconds
        return results

    def _result(self, totals: dict[str, float]) -> dict[str, float]:
        count = totals["count"]
        result = {
            "loss": totals["loss"] / count,
            "accuracy": totals["correct"] / count,
            "count": count,
        }
        if "correct_top5" in totals:
            result["top5_accuracy"] = totals["correct_top5"] / count
        if self._is_text:
            # The largest exponent whose exponential is a float.
            result["perplexity"] = math.exp(min(result["loss"], 709.0))
        return result


def final_results(
    task: Task,
    histories: Sequence[History],
    splits: Mapping[str, EvalSplit],
    evaluator: Evaluator,
    parallel: Parallel,
    workdir: Path,
    step: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Evaluates the best checkpoint of every seed.

    Args:
        task: What was trained.
        histories: Of the seeds.
        splits: By name; "validation" was evaluated in training.
        evaluator: Of a single seed.
        parallel: The devices.
        workdir: The run directory.
        step: Number of updates.
        say: Told the results.

    Returns:
        What ``result.json`` holds: the metrics of the one seed, or for several what
        they share and, in the list ``runs``, the metrics of each. ``inference_seconds``
        is the time of the compiled model on the test split, batch by batch from the
        devices' memory, without compilation and loading; not of a test split that is
        the validation split.
    """
    seeds, kind = task.seeds, task.info.kind
    metric = BEST_METRICS[kind][0]
    folder = workdir / CHECKPOINTS
    runs = []
    for index, history in enumerate(histories):
        from_primary(partial(read_meta, folder, history.best_step))
        template = parallel.template(task.abstract_state)
        best = restore(folder, history.best_step, template)
        best = select(best, index, len(seeds))
        variables = parallel.place(best.variables)
        # A split may have two names.
        results = {id(splits["validation"]): history.best}
        for name, split in splits.items():
            if id(split) not in results:
                (results[id(split)],) = evaluator(
                    variables, split, task.config.eval_batch_size, timed=name == "test"
                )
        result = {
            "step": history.stopped_step or step,
            "num_steps": task.num_steps,
            "epochs": (history.stopped_step or step) / task.steps_per_epoch,
            "stopped_early": history.stopped_early,
            "num_params": task.num_params,
            "best_step": history.best_step,
            "skipped_updates": history.skipped_updates,
        }
        for name, split in splits.items():
            for key, value in results[id(split)].items():
                if key not in ("count", "seconds"):
                    result[f"{name}_{key}"] = value
        if "seconds" in results[id(splits["test"])]:
            result["inference_seconds"] = results[id(splits["test"])]["seconds"]
        result["seconds"] = history.seconds
        result["examples_per_second"] = history.examples_per_second
        if len(seeds) > 1:
            result = {"seed": seeds[index], **result}
        runs.append(result)
        tests = [
            f"{name.replace('_', ' ')} {metric} {result[f'{name}_{metric}']:.4f}"
            for name in splits
            if name != "validation"
        ]
        of_seed = f"Seed {seeds[index]}: best" if len(seeds) > 1 else "Best"
        say(
            f"{of_seed} validation {metric} {history.best[metric]:.4f} at step "
            f"{history.best_step}; {', '.join(tests)}. Everything is in {workdir}."
        )
    if len(runs) == 1:
        return runs[0]
    return {
        "step": step,
        "num_steps": task.num_steps,
        "epochs": step / task.steps_per_epoch,
        "stopped_early": all(run["stopped_early"] for run in runs),
        "num_params": task.num_params,
        "seconds": sum(run["seconds"] for run in runs),
        "runs": runs,
    }


def words(metrics: Mapping[str, float]) -> str:
    """Metrics in a line.

    Args:
        metrics: By name.

    Returns:
        For example ``"top5 accuracy 0.9000, loss 1.2000"``.

    Example:
        >>> words({"top5_accuracy": 0.9, "loss": 1.2})
        'top5 accuracy 0.9000, loss 1.2000'
    """
    return ", ".join(
        f"{name.replace('_', ' ')} {value:.4f}" for name, value in metrics.items()
    )

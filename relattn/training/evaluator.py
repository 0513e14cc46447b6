"""Evaluation of a model on a split, over the devices."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jaxtyping import Array

from relattn.data import DataInfo, EvalSplit
from relattn.training.parallel import Parallel
from relattn.training.seeds import map_eval_step
from relattn.training.step import Batch, make_eval_step

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

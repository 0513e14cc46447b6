"""Evaluation of a model on a split, over the devices."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
from jaxtyping import Array

from relattn.data import DataInfo, EvalSplit
from relattn.training.parallel import DataParallel
from relattn.training.step import Batch, make_eval_step

# With ten classes or fewer the five best are half of them.
TOP5_CLASSES = 10
# Batches on their way to the devices at a time.
AHEAD = 3


class Evaluator:
    """Evaluates one model, compiled once for each batch size.

    Args:
        model: Applied with ``deterministic=True``.
        preprocess: From a batch to what the model sees.
        info: The data's description.
        parallel: The devices.
    """

    def __init__(
        self,
        model: nn.Module,
        preprocess: Callable[[Batch], Array],
        info: DataInfo,
        parallel: DataParallel,
    ):
        self._parallel = parallel
        self._is_text = info.kind == "tokens"
        top5 = not self._is_text and info.num_classes > TOP5_CLASSES
        step = make_eval_step(
            model, preprocess, top5=top5, axis_name=parallel.axis_name
        )
        self._step = parallel.eval_step(step)

    def __call__(
        self, variables: Any, split: EvalSplit, batch_size: int
    ) -> dict[str, float]:
        """Evaluates on a split.

        Args:
            variables: Replicated over the devices.
            split: The examples.
            batch_size: Size of the global batch.

        Returns:
            ``loss`` and ``accuracy``, means over the labels, and their ``count``; of
            images of more than ten classes ``top5_accuracy``; of text ``perplexity``,
            exp(loss).

        Raises:
            ValueError: If the split is empty.
        """
        if not len(split):
            raise ValueError("there is nothing to evaluate on: the split is empty")
        totals: dict[str, float] = collections.defaultdict(float)
        pending = collections.deque()

        def collect() -> None:
            for name, value in self._parallel.fetch(pending.popleft()).items():
                totals[name] += float(value)

        for batch in split.batches(batch_size):
            pending.append(self._step(variables, self._parallel.shard(batch)))
            if len(pending) > AHEAD:
                collect()
        while pending:
            collect()
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

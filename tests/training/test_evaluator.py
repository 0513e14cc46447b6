"""Top-5 accuracy and the seconds of inference."""

import dataclasses
import itertools
import types

import flax.linen as nn
import jax
import numpy as np
import pytest

from relattn.training import evaluator
from relattn.training.metrics import metrics_of
from relattn.training.pmap import DataParallel
from relattn.training.step import make_eval_step
from tests.helpers.clock import slow_to_compile
from tests.training.conftest import make_data

SPLIT = make_data().test


class Linear(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, images, *, deterministic=True):
        return nn.Dense(self.num_classes)(images.reshape(len(images), -1))


def evaluate(num_classes, make_eval_step=make_eval_step, split=SPLIT, **options):
    model = Linear(num_classes)
    names = tuple(map(str, range(num_classes)))
    info = dataclasses.replace(make_data().info, class_names=names)
    parallel = DataParallel(jax.local_devices()[:1])
    variables = model.init(jax.random.key(0), np.zeros((1, 5, 3, 1), np.float32))
    variables = parallel.place(variables)
    step = make_eval_step(
        model,
        lambda batch: batch["image"].astype(np.float32) / 255,
        metrics=metrics_of(info),
    )
    evaluate = evaluator.Evaluator(step, parallel)
    (result,) = evaluate(variables, split, 16, **options)
    return result


@pytest.mark.parametrize("num_classes", [10, 11])
def test_top5_accuracy_needs_more_than_ten_classes(num_classes):
    result = evaluate(num_classes)
    assert ("top5_accuracy" in result) == (num_classes > 10)
    assert result["count"] == len(SPLIT)


def test_seconds_leave_compilation_out(monkeypatch):
    """Uses a clock that compilation advances."""
    now = [0.0]
    make = slow_to_compile(make_eval_step, now)

    clock = types.SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(evaluator, "time", clock)
    result = evaluate(3, make, timed=True)
    assert now == [1000]
    assert result["seconds"] == 0
    # The batch that runs twice counts once.
    assert result["count"] == len(SPLIT)


@pytest.mark.parametrize("num_batches", [0, 1])
def test_a_split_in_which_no_label_counts_raises(num_batches):
    class Unweighted:
        def __len__(self):
            return 5

        def batches(self, *args):
            for batch in itertools.islice(SPLIT.batches(*args), num_batches):
                yield {**batch, "weight": 0 * batch["weight"]}

    message = "has 5 examples, but its batches have no label of positive weight"
    with pytest.raises(ValueError, match=message):
        evaluate(3, split=Unweighted())

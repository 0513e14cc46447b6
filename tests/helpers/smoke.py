"""A step of every smoke configuration on simulated devices; run by test_smoke.py.

``python -m tests.helpers.smoke MODEL COUNT,COUNT``: MODEL is ``configured``, or
``tiny`` to replace the configured model with a small one. COUNT is a number of devices.
Prints a line of JSON for each run.
"""

import dataclasses
import importlib
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import chex
import jax

from relattn import data as data_lib
from relattn import models, training
from tests.training.conftest import build_tiny

CONFIGS = ["performer", "baselines", "translution_vit", "translution_gpt", "rpe_vit"]


@dataclasses.dataclass
class FirstBatch:
    """A split of which only the first batch is evaluated."""

    split: Any

    def __len__(self):
        return len(self.split)

    def batches(self, *arguments):
        return itertools.islice(self.split.batches(*arguments), 1)


class FewBatches:
    """Data with one batch in each of its splits."""

    def __init__(self, data):
        self.data, splits = data, data.eval_splits
        self.eval_splits = {name: FirstBatch(split) for name, split in splits.items()}

    def __getattr__(self, name):
        return getattr(self.data, name)


def run(name, count):
    """Runs one step; returns the configuration, the devices used and the test loss."""
    config = importlib.import_module(f"configs.{name}").get_config("smoke")
    config.update(num_epochs=0, num_steps=1, progress=False)
    config.schedule.warmup_steps = 0
    data = FewBatches(data_lib.load_data(config.data))
    with tempfile.TemporaryDirectory() as workdir:
        result = training.train_and_evaluate(
            config, workdir, data=data, devices=jax.devices()[:count]
        )
        record = json.loads(Path(workdir, "run.json").read_text())
    used = record["starts"][0]["num_devices"]
    return {"config": name, "devices": used, "test_loss": result["test_loss"]}


def main(model, counts):
    counts = [int(count) for count in counts.split(",")]
    chex.set_n_cpu_devices(max(counts))
    if model == "tiny":
        models.build_model = lambda config, **shapes: build_tiny({}, **shapes)
    for name in CONFIGS:
        for count in counts:
            print(json.dumps(run(name, count)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

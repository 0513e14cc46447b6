"""Interrupts runs, and reads the files that they leave."""

import pytest

from relattn import data as data_lib
from relattn import training
from relattn.training.checkpoint import (
    CHECKPOINTS,
    checkpoint_steps,
    read_meta,
    restore,
)
from relattn.training.config import complete
from relattn.training.metrics_log import read_rows
from relattn.training.seeds import make_task


class Interrupted(Exception):
    pass


def interrupt_at(last):
    """Makes an ``on_step`` that raises after an update."""

    def on_step(step):
        if step == last:
            raise Interrupted

    return on_step


def train_until(last, config, workdir, **options):
    """Trains, until a run is interrupted after an update."""
    with pytest.raises(Interrupted):
        training.train_and_evaluate(
            config, workdir, on_step=interrupt_at(last), **options
        )


def untimed(result):
    """Returns a ``result.json`` without timings."""
    timings = ("seconds", "examples_per_second", "inference_seconds")
    return {key: value for key, value in result.items() if key not in timings}


def untimed_rows(workdir):
    """Reads the rows of a run's metrics without timings."""
    rows = read_rows(workdir / "metrics.jsonl")
    for row in rows:
        del row["examples_per_second"], row["examples_per_second_per_device"]
    return rows


def final_state(workdir):
    """Restores the state of a run's latest checkpoint."""
    folder = workdir / CHECKPOINTS
    step = checkpoint_steps(folder)[-1]
    meta = read_meta(folder, step)
    task = make_task(complete(meta["config"]), data_lib.read_info(meta["data"]))
    return restore(folder, step, task.abstract_state)

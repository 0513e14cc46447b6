"""The training loop: `train_and_evaluate`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict
from tqdm import tqdm

from relattn import data as data_lib
from relattn.training import records
from relattn.training.checkpoint import (
    CheckpointWriter,
    checkpoint_steps,
    read_meta,
    restore,
)
from relattn.training.config import check_config, differences, to_json
from relattn.training.errors import NonFiniteLossError, WorkdirError
from relattn.training.metrics import MetricsLog
from relattn.training.parallel import DataParallel
from relattn.training.run import CHECKPOINTS, evaluate_split
from relattn.training.step import Metrics, make_eval_step, make_train_step
from relattn.training.task import Task


@dataclasses.dataclass
class History:
    """What a run remembers beside its state; kept in every checkpoint.

    Attributes:
        best_accuracy: The best validation accuracy so far.
        best_loss: The validation loss that went with it.
        best_step: The step of it; None before the first evaluation.
        stopped_early: Whether early stopping ended the run.
        seconds: Time spent, restarts included.
        timed_seconds: Of it in updates, compilation and evaluation apart.
        timed_examples: The examples of those updates.
    """

    best_accuracy: float = -1.0
    best_loss: float = 0.0
    best_step: int | None = None
    stopped_early: bool = False
    seconds: float = 0.0
    timed_seconds: float = 0.0
    timed_examples: int = 0

    @property
    def examples_per_second(self) -> float:
        """Training throughput."""
        return self.timed_examples / max(self.timed_seconds, 1e-9)


def train_and_evaluate(
    config: ConfigDict,
    workdir: str | Path,
    *,
    devices: Sequence[jax.Device] | None = None,
    on_step: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Trains as a configuration says, or goes on with a run that was interrupted.

    Args:
        config: As `relattn.training.default_config`, with ``model`` and ``data``
            filled.
        workdir: The run directory: checkpoints, metrics, ``run.json``,
            ``result.json``. The same command on it goes on from its last complete
            checkpoint and ends with the parameters of a run never interrupted.
        devices: Those to use; all local ones by default.
        on_step: Called after each update was started, with the number of updates.

    Returns:
        The final metrics, as in ``result.json``: among them ``test_accuracy``, of the
        checkpoint with the best ``validation_accuracy``.

    Raises:
        ValueError: If the configuration, the data or the device count do not fit.
        WorkdirError: If the directory is not writable or of another configuration.
        CheckpointError: If a checkpoint is damaged or of another model.
        NonFiniteLossError: If the loss becomes NaN or infinite.
    """
    check_config(config)
    parallel = DataParallel(devices)
    parallel.check_batch("config.batch_size", config.batch_size)
    parallel.check_batch("config.eval_batch_size", config.eval_batch_size)
    workdir = records.usable_workdir(workdir)
    saved = _saved(workdir, config)
    data = data_lib.load_data(config.data)
    if not len(data.eval_splits["validation"]):
        raise ValueError(
            "config.data.num_validation must be at least 1: the best checkpoint is "
            "chosen by validation accuracy"
        )
    task = Task.build(config, data.info)
    loop = _Loop(task, data, parallel, workdir, saved)
    loop.announce()
    if not loop.finished:
        with loop:
            loop.train(on_step)
    return loop.finish()


def _saved(workdir: Path, config: ConfigDict) -> dict[str, Any] | None:
    """The verified meta of the latest checkpoint, if the run is of this config."""
    steps = checkpoint_steps(workdir / CHECKPOINTS)
    if not steps:
        return None
    meta = read_meta(workdir / CHECKPOINTS, steps[-1])
    differing = differences(meta["config"], to_json(config))
    if differing:
        raise WorkdirError(
            f"--workdir {workdir} holds a run of another configuration "
            f"({'; '.join(differing)}): choose another directory or the same values"
        )
    return {**meta, "step": steps[-1]}


class _Loop:
    """A run under way."""

    def __init__(
        self,
        task: Task,
        data: data_lib.DataSource,
        parallel: DataParallel,
        workdir: Path,
        saved: dict[str, Any] | None,
    ):
        self.task = task
        self.data = data
        self.parallel = parallel
        self.workdir = workdir
        self.history = History(**saved["history"]) if saved else History()
        self.start = saved["step"] if saved else 0
        if saved:
            state = restore(self.checkpoints, self.start, task.abstract_state())
        else:
            state = task.create_state()
        self.num_params = sum(x.size for x in jax.tree.leaves(state.params))
        self.state = parallel.replicate(state)
        axis = parallel.axis_name
        self.train_step = parallel.train_step(
            make_train_step(
                task.model,
                task.optimizer,
                task.preprocess,
                redraw_every=task.config.redraw_every,
                axis_name=axis,
            )
        )
        self.eval_step = parallel.eval_step(
            make_eval_step(task.model, task.preprocess, axis_name=axis)
        )

    @property
    def checkpoints(self) -> Path:
        return self.workdir / CHECKPOINTS

    @property
    def finished(self) -> bool:
        return self.start >= self.task.num_steps or self.history.stopped_early

    def __enter__(self) -> _Loop:
        task, devices = self.task, self.parallel.devices
        records.write_run_json(self.workdir, task, devices, self.start)
        self.writer = CheckpointWriter(self.checkpoints)
        self.log = MetricsLog(self.workdir, self.start)
        self.began = time.perf_counter() - self.history.seconds
        return self

    def __exit__(self, *error: Any) -> None:
        self.writer.close()
        self.log.close()

    def _say(self, text: str) -> None:
        if self.task.config.progress:
            tqdm.write(text)

    def announce(self) -> None:
        """Says what is about to happen."""
        task, device = self.task, self.parallel.devices[0]
        if self.finished:
            self._say(
                f"Already at the final step {self.start} of {self.workdir}: nothing to "
                "train."
            )
            return
        if self.start:
            self._say(f"Resuming from step {self.start} of {self.workdir}.")
        self._say(
            f"Training {self.num_params:,} parameters on {task.info.origin}: "
            f"{task.num_steps:,} steps of {task.config.batch_size} examples, "
            f"{task.steps_per_epoch:,} an epoch, on {len(self.parallel.devices)} x "
            f"{device.device_kind}."
        )

    def train(self, on_step: Callable[[int], None] | None) -> None:
        """Updates until the last step or early stopping."""
        config, task = self.task.config, self.task
        eval_every = config.eval_every_epochs * task.steps_per_epoch
        key = task.key
        pending: list[Metrics] = []
        window_start, untimed = time.perf_counter(), 0
        bar = tqdm(
            total=task.num_steps * config.batch_size,
            initial=self.start * config.batch_size,
            unit=" examples",
            unit_scale=True,
            disable=None if config.progress else True,
            dynamic_ncols=True,
        )
        loader = self.data.train_loader(
            config.batch_size, config.seed, self.start, place=self.parallel.shard
        )
        with loader as batches, bar:
            for step, batch in batches:
                self.state, metrics = self.train_step(self.state, batch, key)
                done = step + 1
                pending.append(metrics)
                if step == self.start:
                    # Compilation is no part of the throughput.
                    jax.block_until_ready(metrics)
                    window_start, untimed = time.perf_counter(), 1
                bar.update(config.batch_size)
                if on_step is not None:
                    on_step(done)
                at_end = done == task.num_steps
                evaluating = at_end or done % eval_every == 0
                every = config.checkpoint_every_steps
                saving = evaluating or bool(every and done % every == 0)
                if not saving and done % config.log_every_steps:
                    continue
                row = self._summary(pending, done)
                seconds = time.perf_counter() - window_start
                examples = (len(pending) - untimed) * config.batch_size
                pending, untimed = [], 0
                self.history.timed_seconds += seconds
                self.history.timed_examples += examples
                row["examples_per_second"] = examples / max(seconds, 1e-9)
                bar.set_postfix(
                    loss=f"{row['train_loss']:.3f}",
                    accuracy=f"{row['train_accuracy']:.3f}",
                )
                if evaluating:
                    row |= self._validate(done, row)
                self.log.write(done, row)
                if saving:
                    self._save(done, row.get("validation_accuracy"))
                window_start = time.perf_counter()
                if at_end or self.history.stopped_early:
                    break

    def _summary(self, pending: list[Metrics], done: int) -> dict[str, float]:
        """Means over the updates since the last row; raises if one was not finite."""
        fetched = self.parallel.fetch(pending)
        first = done - len(fetched) + 1
        for step, metrics in enumerate(fetched, first):
            for name, what in (("loss", "loss"), ("grad_norm", "gradient")):
                if not np.isfinite(metrics[name]):
                    self._raise_non_finite(step, what, float(metrics[name]))
        row = {
            f"train_{name}": float(np.mean([metrics[name] for metrics in fetched]))
            for name in sorted(fetched[0])
        }
        row["epoch"] = done / self.task.steps_per_epoch
        row["learning_rate"] = float(self.task.schedule(done - 1))
        return row

    def _raise_non_finite(self, step: int, what: str, value: float) -> None:
        self.writer.close()
        steps = checkpoint_steps(self.checkpoints)
        kept = "no checkpoint was written before it"
        if steps:
            kept = f"the last good checkpoint is {self.checkpoints / str(steps[-1])}"
        raise NonFiniteLossError(
            f"the {what} is {value} at step {step}; {kept}. Lower "
            "config.optimizer.learning_rate or set config.optimizer.clip_norm, with a "
            "new --workdir",
            step,
        )

    def _validate(self, done: int, row: dict[str, float]) -> dict[str, float]:
        """Evaluates on the validation images and keeps the history."""
        config, history = self.task.config, self.history
        result = evaluate_split(
            self.parallel,
            self.eval_step,
            self.state.variables,
            self.data.eval_splits["validation"],
            config.eval_batch_size,
        )
        if result["accuracy"] > history.best_accuracy:
            history.best_accuracy = result["accuracy"]
            history.best_loss = result["loss"]
            history.best_step = done
        patience = config.early_stopping_epochs * self.task.steps_per_epoch
        if patience and done - history.best_step >= patience:
            history.stopped_early = True
        self._say(
            f"step {done}/{self.task.num_steps} (epoch {row['epoch']:.4g}): loss "
            f"{row['train_loss']:.4f}, accuracy {row['train_accuracy']:.4f}; "
            f"validation loss {result['loss']:.4f}, accuracy "
            f"{result['accuracy']:.4f}; {row['examples_per_second']:,.0f} examples/s"
        )
        if history.stopped_early:
            self._say(
                f"Stopping early: no gain in validation accuracy in "
                f"{config.early_stopping_epochs} epochs."
            )
        return {
            "validation_loss": result["loss"],
            "validation_accuracy": result["accuracy"],
        }

    def _save(self, done: int, validation_accuracy: float | None) -> None:
        self.start = done
        self.history.seconds = time.perf_counter() - self.began
        meta = {
            "config": to_json(self.task.config),
            "data": dataclasses.asdict(self.task.info),
            "history": dataclasses.asdict(self.history),
        }
        state = self.parallel.fetch(self.state)
        self.writer.save(done, state, meta, validation_accuracy)

    def finish(self) -> dict[str, Any]:
        """Evaluates the best checkpoint on the test images; writes ``result.json``."""
        history = self.history
        read_meta(self.checkpoints, history.best_step)
        best = restore(self.checkpoints, history.best_step, self.task.abstract_state())
        test = evaluate_split(
            self.parallel,
            self.eval_step,
            self.parallel.replicate(best.variables),
            self.data.eval_splits["test"],
            self.task.config.eval_batch_size,
        )
        result = {
            "step": self.start,
            "num_steps": self.task.num_steps,
            "epochs": self.start / self.task.steps_per_epoch,
            "stopped_early": history.stopped_early,
            "num_params": self.num_params,
            "best_step": history.best_step,
            "validation_accuracy": history.best_accuracy,
            "validation_loss": history.best_loss,
            "test_accuracy": test["accuracy"],
            "test_loss": test["loss"],
            "seconds": history.seconds,
            "examples_per_second": history.examples_per_second,
        }
        records.write_json(self.workdir / "result.json", result)
        self._say(
            f"Best validation accuracy {history.best_accuracy:.4f} at step "
            f"{history.best_step}; test accuracy {test['accuracy']:.4f}. Everything is "
            f"in {self.workdir}."
        )
        return result

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
from relattn.training.config import check_config, complete, differences, to_json
from relattn.training.errors import NonFiniteLossError, WorkdirError
from relattn.training.evaluator import Evaluator
from relattn.training.history import BEST_METRICS, History, score
from relattn.training.memory import warn_if_too_large
from relattn.training.metrics import MetricsLog
from relattn.training.parallel import DataParallel
from relattn.training.run import CHECKPOINTS, check_labels
from relattn.training.step import Metrics, make_train_step
from relattn.training.task import Task


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
        checkpoint with the best ``validation_accuracy``, or of text the best
        ``validation_loss``; every further test set has its own, such as
        ``test_static_accuracy``.

    Raises:
        ValueError: If the configuration, the data or the device count do not fit.
        WorkdirError: If the directory is not writable or of another configuration.
        CheckpointError: If a checkpoint is damaged or of another model.
        NonFiniteLossError: If the loss becomes NaN or infinite.
    """
    check_config(config)
    parallel = DataParallel(devices)
    parallel.check_batch(
        "config.batch_size", config.batch_size, config.accumulate_steps
    )
    parallel.check_batch("config.eval_batch_size", config.eval_batch_size)
    workdir = records.usable_workdir(workdir)
    saved = _saved(workdir, config)
    data = data_lib.load_data(config.data)
    if not len(data.eval_splits["validation"]):
        raise ValueError(
            "config.data.num_validation must be at least 1: the best checkpoint is "
            "chosen by validation accuracy"
        )
    if saved:
        checkpoint = workdir / CHECKPOINTS / str(saved["step"])
        check_labels(data_lib.read_info(saved["data"]), data.info, checkpoint)
    task = Task.build(config, data.info)
    warn_if_too_large(task.abstract_state, parallel.devices)
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
    differing = differences(to_json(complete(meta["config"])), to_json(config))
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
        self.history = History.from_json(saved["history"]) if saved else History()
        self.start = saved["step"] if saved else 0
        if saved:
            state = restore(self.checkpoints, self.start, task.abstract_state)
        else:
            state = task.create_state()
        self.num_params = sum(x.size for x in jax.tree.leaves(state.params))
        self.state = parallel.replicate(state)
        self.train_step = parallel.train_step(
            make_train_step(
                task.model,
                task.optimizer,
                task.preprocess,
                redraw_every=task.config.redraw_every,
                accumulate_steps=task.config.accumulate_steps,
                axis_name=parallel.axis_name,
            )
        )
        self.evaluator = Evaluator(task.model, task.preprocess, task.info, parallel)

    @property
    def checkpoints(self) -> Path:
        return self.workdir / CHECKPOINTS

    @property
    def kind(self) -> str:
        return self.task.info.kind

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
        eval_every = config.eval_every_steps
        eval_every = eval_every or config.eval_every_epochs * task.steps_per_epoch
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
                result = self._validate(done, row) if evaluating else {}
                row |= {f"validation_{name}": value for name, value in result.items()}
                self.log.write(done, row)
                if saving:
                    self._save(done, score(result, self.kind) if result else None)
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
        """Evaluates on the validation split and keeps the history."""
        config, history = self.task.config, self.history
        result = self._evaluate(self.state.variables, "validation")
        history.add(done, result, self.kind)
        patience = config.early_stopping_epochs * self.task.steps_per_epoch
        if patience and done - history.best_step >= patience:
            history.stopped_early = True
        self._say(
            f"step {done}/{self.task.num_steps} (epoch {row['epoch']:.4g}): loss "
            f"{row['train_loss']:.4f}, accuracy {row['train_accuracy']:.4f}; "
            f"validation {_words(result)}; {row['examples_per_second']:,.0f} examples/s"
        )
        if history.stopped_early:
            self._say(
                f"Stopping early: no gain in validation {BEST_METRICS[self.kind][0]} "
                f"in {config.early_stopping_epochs} epochs."
            )
        return result

    def _evaluate(self, variables: Any, split: str) -> dict[str, float]:
        batch_size = self.task.config.eval_batch_size
        result = self.evaluator(variables, self.data.eval_splits[split], batch_size)
        del result["count"]
        return result

    def _save(self, done: int, score: float | None) -> None:
        self.start = done
        self.history.seconds = time.perf_counter() - self.began
        meta = {
            "config": to_json(self.task.config),
            "data": dataclasses.asdict(self.task.info),
            "history": dataclasses.asdict(self.history),
        }
        state = self.parallel.fetch(self.state)
        self.writer.save(done, state, meta, score)

    def finish(self) -> dict[str, Any]:
        """Evaluates the best checkpoint on the test splits; writes ``result.json``."""
        history = self.history
        read_meta(self.checkpoints, history.best_step)
        best = restore(self.checkpoints, history.best_step, self.task.abstract_state)
        variables = self.parallel.replicate(best.variables)
        splits = self.data.eval_splits
        # A split may have two names.
        results = {id(splits["validation"]): history.best}
        for name, split in splits.items():
            if id(split) not in results:
                results[id(split)] = self._evaluate(variables, name)
        result = {
            "step": self.start,
            "num_steps": self.task.num_steps,
            "epochs": self.start / self.task.steps_per_epoch,
            "stopped_early": history.stopped_early,
            "num_params": self.num_params,
            "best_step": history.best_step,
        }
        for name, split in splits.items():
            for metric, value in results[id(split)].items():
                result[f"{name}_{metric}"] = value
        result["seconds"] = history.seconds
        result["examples_per_second"] = history.examples_per_second
        records.write_json(self.workdir / "result.json", result)
        metric = BEST_METRICS[self.kind][0]
        tests = [
            f"{name.replace('_', ' ')} {metric} {result[f'{name}_{metric}']:.4f}"
            for name in splits
            if name != "validation"
        ]
        self._say(
            f"Best validation {metric} {history.best[metric]:.4f} at step "
            f"{history.best_step}; {', '.join(tests)}. Everything is in {self.workdir}."
        )
        return result


def _words(metrics: dict[str, float]) -> str:
    return ", ".join(
        f"{name.replace('_', ' ')} {value:.4f}" for name, value in metrics.items()
    )

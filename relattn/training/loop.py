"""The training loop: `train_and_evaluate`."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict
from tqdm import tqdm

from relattn import data as data_lib
from relattn.training import distributed
from relattn.training import workdir as workdir_lib
from relattn.training.checkpoint import (
    CHECKPOINTS,
    CheckpointWriter,
    checkpoint_steps,
    restore,
    set_damaged_aside,
)
from relattn.training.config import check_config, to_json
from relattn.training.cost import warn_if_too_large
from relattn.training.devices import Parallel, choose_devices, make_parallel
from relattn.training.errors import PreemptedError
from relattn.training.evaluator import Evaluator, final_results, words
from relattn.training.metrics import (
    MetricsLog,
    Row,
    Window,
    is_finite,
    non_finite_error,
    stack,
    summaries,
    throughput,
)
from relattn.training.preemption import Preemption
from relattn.training.run import check_same_data, read_saved
from relattn.training.run_metadata import BEST_METRICS, History, score
from relattn.training.seeds import train_loader
from relattn.training.step import Metrics
from relattn.training.task import Task
from relattn.training.workdir import lock_workdir


def train_and_evaluate(
    config: ConfigDict,
    workdir: str | Path,
    *,
    data: data_lib.DataSource | None = None,
    devices: Sequence[jax.Device] | None = None,
    on_step: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Trains as a configuration says, or goes on with a run that was interrupted.

    Args:
        config: As `relattn.training.default_config`, with ``model`` and ``data``
            filled.
        workdir: The run directory: checkpoints, metrics, ``run.json``,
            ``result.json``. The same command on it goes on from its last intact
            checkpoint and ends with the parameters of a run never interrupted; later
            checkpoints, which are damaged, are renamed to ``<step>.damaged``.
        data: What to train on, instead of what ``config.data`` names; the same at every
            start.
        devices: Those to use, all by default; if ``config.batch_size`` does not divide
            by their number, the largest number of them that it divides by.
        on_step: Called after each update was started, with the number of updates.

    Returns:
        The final metrics, as in ``result.json``: among them ``test_accuracy``, of the
        checkpoint with the best ``validation_accuracy``, or of text the best
        ``validation_loss``; every further test set has its own, such as
        ``test_static_accuracy``. Seeds that train together have theirs in the list
        ``runs``, as if each had been trained alone.

    Raises:
        ValueError: If the configuration, the data or the device count do not fit.
        WorkdirError: If the directory is not writable, in use by another run, or of
            another configuration.
        CheckpointError: If no checkpoint is intact, or one is of another model or
            cannot be written.
        NonFiniteLossError: If the loss or its gradient is NaN or infinite in more than
            ``config.max_skipped_updates`` updates of a seed.
        PreemptedError: If SIGTERM came, in the main thread, or in the updates Ctrl-C:
            there a checkpoint is written after the update under way, and the evaluation
            if one is due.
    """
    check_config(config)
    parallel = make_parallel(config, choose_devices(config, devices))
    parallel.check_batch(
        "config.batch_size", config.batch_size, config.accumulate_steps
    )
    available = len(devices or jax.devices())
    workdir = workdir_lib.usable_workdir(workdir)
    # Several processes must agree on the step: JAX handles their signals.
    preemption = Preemption(handles=jax.process_count() == 1)
    with preemption.handled(), contextlib.ExitStack() as stack:
        # One process locks for all.
        distributed.from_primary(lambda: stack.enter_context(lock_workdir(workdir)))
        distributed.check_shared(workdir)
        return _run(config, workdir, data, parallel, available, preemption, on_step)


def _run(
    config: ConfigDict,
    workdir: Path,
    data: data_lib.DataSource | None,
    parallel: Parallel,
    available: int,
    preemption: Preemption,
    on_step: Callable[[int], None] | None,
) -> dict[str, Any]:
    saved = distributed.from_primary(lambda: read_saved(workdir, config))
    if data is None:
        data = distributed.primary_first(lambda: data_lib.load_data(config.data))
    if not len(data.eval_splits["validation"]):
        raise ValueError(
            "config.data.num_validation must be at least 1: the best checkpoint is "
            "chosen by validation accuracy"
        )
    if saved:
        checkpoint = workdir / CHECKPOINTS / str(saved["step"])
        check_same_data(data_lib.read_info(saved["data"]), data.info, checkpoint)
    task = Task.build(config, data.info)
    warn_if_too_large(
        parallel.local_shapes(task.abstract_state), parallel.local_devices
    )
    loop = _Loop(task, data, parallel, preemption, workdir, saved)
    loop.announce(available)
    if not loop.finished:
        with preemption.updates(), loop:
            loop.train(on_step)
        distributed.barrier("trained")
    return loop.finish()


class _Loop:
    """A run under way."""

    def __init__(
        self,
        task: Task,
        data: data_lib.DataSource,
        parallel: Parallel,
        preemption: Preemption,
        workdir: Path,
        saved: dict[str, Any] | None,
    ):
        self.task = task
        self.data = data
        self.parallel = parallel
        self.workdir = workdir
        self.preemption = preemption
        self.histories = [History() for _ in task.seeds]
        if saved:
            self.histories = History.list_from_json(saved["history"])
        self.start = saved["step"] if saved else 0
        if saved:
            template = parallel.template(task.abstract_state)
            saved_state = restore(self.checkpoints, self.start, template)
            self.state = parallel.place(saved_state)
        else:
            self.state = parallel.create(task.create_state)
        self.train_step = parallel.train_step(task.make_train_step(parallel))
        redraw = task.make_redraw()
        self.redraw = redraw and parallel.redraw(redraw)
        self.evaluator = Evaluator(
            task.model, task.preprocess, task.info, parallel, len(task.seeds)
        )

    @property
    def checkpoints(self) -> Path:
        return self.workdir / CHECKPOINTS

    @property
    def shows_progress(self) -> bool:
        return self.task.config.progress and distributed.is_primary()

    @property
    def kind(self) -> str:
        return self.task.info.kind

    @property
    def finished(self) -> bool:
        return self.start >= self.task.num_steps or self.stopped_early

    @property
    def stopped_early(self) -> bool:
        return all(history.stopped_early for history in self.histories)

    def __enter__(self) -> _Loop:
        task, devices = self.task, self.parallel.devices
        distributed.barrier("checkpoints read")
        self.log = None
        if distributed.is_primary():
            workdir_lib.write_run_json(self.workdir, task, devices, self.start)
            set_damaged_aside(self.checkpoints, self.start)
            self.log = MetricsLog(self.workdir, self.start)
        distributed.barrier("checkpoints in order")
        self.writer = CheckpointWriter(self.checkpoints, len(task.seeds))
        spent = sum(history.seconds for history in self.histories)
        self.began = time.perf_counter() - spent
        return self

    def __exit__(self, *error: Any) -> None:
        with contextlib.ExitStack() as stack:
            # Called last: a checkpoint that is not there matters more than a row.
            stack.callback(self.writer.close)
            if self.log is not None:
                stack.callback(self.log.close)

    def _say(self, text: str) -> None:
        if self.shows_progress:
            tqdm.write(text)

    def announce(self, available: int) -> None:
        """Says what is about to happen."""
        for line in workdir_lib.announcement(
            self.task,
            self.parallel.devices,
            available,
            self.workdir,
            self.start,
            self.finished,
        ):
            self._say(line)

    def train(self, on_step: Callable[[int], None] | None) -> None:
        """Updates until the last step or early stopping."""
        config, task = self.task.config, self.task
        eval_every = config.eval_every_steps
        eval_every = eval_every or config.eval_every_epochs * task.steps_per_epoch
        key = task.key
        # Of all seeds together.
        batch_size = config.batch_size * len(task.seeds)
        pending: list[Metrics] = []
        # Every checkpoint moves self.start on.
        first_step = self.start
        window_start, untimed = time.perf_counter(), 0
        bar = tqdm(
            total=task.num_steps * batch_size,
            initial=self.start * batch_size,
            unit=" examples",
            unit_scale=True,
            disable=None if self.shows_progress else True,
            dynamic_ncols=True,
        )
        loader = train_loader(
            self.data, config.batch_size, task.seeds, self.start, self.parallel
        )
        with loader as batches, bar:
            for step, batch in batches:
                self.state, metrics = self.train_step(self.state, batch, key)
                done = step + 1
                if self.redraw and done % config.redraw_every == 0:
                    self.state = self.state.replace(random_features=self._drawn(done))
                pending.append(metrics)
                if step == first_step:
                    # Compilation is no part of the throughput.
                    jax.block_until_ready(
                        (metrics, self._drawn(done) if self.redraw else None)
                    )
                    window_start, untimed = time.perf_counter(), 1
                bar.update(batch_size)
                if on_step is not None:
                    on_step(done)
                at_end = done == task.num_steps
                evaluating = at_end or done % eval_every == 0
                every = config.checkpoint_every_steps
                came = self.preemption.came
                if distributed.all_preempted(done):
                    came = "SIGTERM"
                saving = evaluating or came or bool(every and done % every == 0)
                if not saving and done % config.log_every_steps:
                    continue
                window = self._fetch(pending, done)
                seconds = time.perf_counter() - window_start
                examples = (len(pending) - untimed) * config.batch_size
                pending, untimed = [], 0
                for history in self.histories:
                    history.timed_seconds += seconds / len(task.seeds)
                    history.timed_examples += examples
                rate = examples * len(task.seeds) / max(seconds, 1e-9)
                rows = [
                    {**row, **throughput(rate, task, self.parallel.devices)}
                    for row in summaries(window, task, self.histories, done)
                ]
                bar.set_postfix(
                    loss=f"{np.mean([row['train_loss'] for row in rows]):.3f}",
                    accuracy=f"{np.mean([row['train_accuracy'] for row in rows]):.3f}",
                )
                running = [not history.stopped_early for history in self.histories]
                scores = [None] * len(rows)
                if evaluating:
                    scores = self._validate(done, rows)
                if self.log is not None:
                    for row in itertools.compress(rows, running):
                        self.log.write(done, row)
                if saving:
                    self._save(done, scores)
                if came:
                    raise PreemptedError(
                        f"{came} came, so training ended at step {done} of "
                        f"{task.num_steps} with {self.checkpoints / str(done)}; the "
                        "same command goes on from there",
                        done,
                        by_hand=came == "SIGINT",
                    )
                window_start = time.perf_counter()
                if at_end or self.stopped_early:
                    break

    def _drawn(self, done: int) -> Any:
        """The random features after a number of updates."""
        index = done // self.task.config.redraw_every
        return self.redraw(self.state.random_features, self.task.key, index)

    def _fetch(self, pending: list[Metrics], done: int) -> Window:
        """Metrics since the last row; raises if too many are not finite."""
        window = stack(self.parallel.fetch(pending), len(self.task.seeds))
        for update, index in np.argwhere(~is_finite(window)):
            history = self.histories[index]
            if history.stopped_early:
                continue
            if history.skipped_updates < self.task.config.max_skipped_updates:
                history.skipped_updates += 1
                continue
            self.writer.close()
            steps = checkpoint_steps(self.checkpoints)
            last = self.checkpoints / str(steps[-1]) if steps else None
            raise non_finite_error(
                window, int(update), int(index), self.task, done, last
            )
        return window

    def _validate(self, done: int, rows: list[Row]) -> list[float | None]:
        """Evaluates on the validation split; fills the rows and keeps the histories.

        Returns:
            The score of each seed; None for one that early stopping has ended.
        """
        config = self.task.config
        results = self.evaluator(
            self.state.variables,
            self.data.eval_splits["validation"],
            config.eval_batch_size,
        )
        patience = config.early_stopping_epochs * self.task.steps_per_epoch
        scores = []
        for seed, row, result, history in zip(
            self.task.seeds, rows, results, self.histories, strict=True
        ):
            if history.stopped_early:
                scores.append(None)
                continue
            del result["count"]
            scores.append(score(result, self.kind))
            row |= {f"validation_{name}": value for name, value in result.items()}
            history.add(done, result, self.kind)
            if patience and done - history.best_step >= patience:
                history.stopped_early, history.stopped_step = True, done
            of_seed = f"seed {seed}, " if len(rows) > 1 else ""
            self._say(
                f"{of_seed}step {done}/{self.task.num_steps} (epoch "
                f"{row['epoch']:.4g}): loss {row['train_loss']:.4f}, accuracy "
                f"{row['train_accuracy']:.4f}; validation {words(result)}; "
                f"{row['examples_per_second']:,.0f} examples/s"
            )
            if history.stopped_early:
                self._say(
                    f"Stopping {of_seed}early: no gain in validation "
                    f"{BEST_METRICS[self.kind][0]} in {config.early_stopping_epochs} "
                    "epochs."
                )
        return scores

    def _save(self, done: int, scores: list[float | None]) -> None:
        self.start = done
        seconds = time.perf_counter() - self.began
        for history in self.histories:
            history.seconds = seconds / len(self.histories)
        histories = [dataclasses.asdict(history) for history in self.histories]
        meta = {
            "config": to_json(self.task.config),
            "data": dataclasses.asdict(self.task.info),
            "history": histories if len(histories) > 1 else histories[0],
        }
        state = self.parallel.to_save(self.state)
        self.writer.save(done, state, meta, scores)

    def finish(self) -> dict[str, Any]:
        """Evaluates the best checkpoints on the test splits; writes ``result.json``."""
        task, evaluator = self.task, self.evaluator
        if len(task.seeds) > 1:
            evaluator = Evaluator(task.model, task.preprocess, task.info, self.parallel)
        result = final_results(
            task,
            self.histories,
            self.data.eval_splits,
            evaluator,
            self.parallel,
            self.workdir,
            self.start,
            self._say,
        )
        if distributed.is_primary():
            workdir_lib.write_json(self.workdir / "result.json", result)
        return result

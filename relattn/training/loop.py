"""The training loop: `train_and_evaluate`."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict
from tqdm import tqdm

from relattn import data as data_lib
from relattn.data.main_guard import check_main_guard
from relattn.messages import printable
from relattn.training import distributed
from relattn.training import workdir as workdir_lib
from relattn.training.checkpoint import (
    CHECKPOINTS,
    CheckpointWriter,
    checkpoint_steps,
    quarantine,
    restore,
)
from relattn.training.config import (
    check_config,
    complete_model,
    given_keys,
    run_length,
    to_json,
)
from relattn.training.cost import warn_if_too_large
from relattn.training.devices import make_training_parallel
from relattn.training.errors import PreemptedError
from relattn.training.evaluator import Evaluator, final_results
from relattn.training.given_data import (
    check_contents,
    check_description,
    check_given,
    check_options,
    check_source,
    fingerprint,
)
from relattn.training.initialize import explain_init_errors, initial_state, take_model
from relattn.training.loggers import check_installed
from relattn.training.metrics import (
    BEST_METRICS,
    METRICS,
    format_metrics,
    format_value,
    title,
)
from relattn.training.metrics_log import MetricsLog, Row
from relattn.training.metrics_window import (
    MetricsWindow,
    count_skipped,
    summarize,
    throughput,
)
from relattn.training.parallel import Device, Parallel, list_devices
from relattn.training.preemption import Preemption
from relattn.training.profiling import Profiler
from relattn.training.resume import (
    check_random_settings,
    check_same_data,
    random_settings,
    read_saved,
)
from relattn.training.run_metadata import History, score
from relattn.training.seeds import make_task
from relattn.training.step import Batch
from relattn.training.task import Task, data_sizes
from relattn.training.workdir import lock_workdir


def train_and_evaluate(
    config: ConfigDict,
    workdir: str | Path,
    *,
    data: data_lib.DataSource | None = None,
    devices: Sequence[Device] | None = None,
    on_step: Callable[[int], None] | None = None,
    profile: int = 0,
) -> dict[str, Any]:
    """Trains and evaluates a model, or resumes a run that was interrupted.

    Args:
        config: A configuration like `relattn.training.default_config`, with ``model``
            and ``data`` filled in.
        workdir: The run directory: checkpoints, metrics, ``run.json``,
            ``result.json``. A second call resumes from the last intact checkpoint and
            ends with the same parameters as a run that was not interrupted. Later,
            damaged checkpoints are renamed to ``<step>.damaged``.
        data: The data set, instead of ``config.data``; the same at every call. The run
            stores that its data were given: calls that evaluate it need them too.
        devices: Devices to choose from; all by default. Uses the largest number of
            them that divides ``config.batch_size``.
        on_step: Called with the number of updates after each update is dispatched.
        profile: Number of updates to trace by `jax.profiler`, into ``profile`` in the
            run directory, after three that are not traced; 0 for none.

    Returns:
        The metrics in ``result.json``: among them ``test_accuracy``, at the checkpoint
        with the best ``validation_accuracy``, or for text the best
        ``validation_loss``. Every further test set has its own, such as
        ``test_static_accuracy``. With several seeds, the list ``runs`` has the metrics
        of each, as if it had been trained alone.

    Raises:
        ValueError: If the configuration, the data or the device count do not fit.
        WorkdirError: If the directory is not writable, in use by another run, or of
            another configuration.
        CheckpointError: If no checkpoint is intact, or one is of another model or
            cannot be written.
        NonFiniteLossError: If the loss or its gradient is NaN or infinite in more than
            ``config.max_skipped_updates`` updates of a seed.
        PreemptedError: If SIGTERM, SIGHUP or, during updates, Ctrl-C reaches the main
            thread.
            During updates, a checkpoint is written after the current update and the
            evaluation that is due.
    """
    check_config(config)
    check_source(data)
    check_installed(config.loggers)
    config = config.copy_and_resolve_references()
    if config.init_from and "name" not in config.model:
        take_model(config, given_keys(config), workdir)
    # The run keeps today's defaults of the model.
    complete_model(config)
    devices = list_devices(devices)
    parallel = make_training_parallel(config, devices)
    workdir = workdir_lib.usable_workdir(workdir)
    # With several processes, JAX handles signals: they must agree on the last step.
    preemption = Preemption(handles=jax.process_count() == 1)
    with preemption.handled(), _locked(workdir):
        saved = distributed.from_primary(lambda: read_saved(workdir, config))
        given = data is not None
        if saved:
            checkpoint = workdir / CHECKPOINTS / str(saved["step"])
            check_random_settings(saved.get("random", {}), checkpoint)
            check_given(saved, given, checkpoint)
        if data is None:
            data = distributed.primary_first(lambda: data_lib.load_data(config.data))
        check_options(config.data, data)
        contents = _check_data(data, saved, workdir)
        if getattr(data.info, "streamed", False):
            check_main_guard(config.data.get("num_workers", 0))
        with explain_init_errors(config, data_sizes(config, data.info)):
            task = make_task(config, data.info)
        warn_if_too_large(
            parallel.local_shapes(task.abstract_state), parallel.local_devices
        )
        origin = {
            "contents": contents,
            "given": contents if given else "",
            "random": random_settings(),
        }
        profiler = Profiler(workdir / "profile", profile)
        loop = TrainLoop(
            task, data, parallel, preemption, workdir, saved, origin, profiler
        )
        profiler.check(0 if loop.finished else task.num_steps - loop.saved_step)
        loop.announce(available=len(devices))
        loop.quarantine()
        if not loop.finished:
            with preemption.updates(), loop.outputs():
                loop.train(on_step)
            distributed.barrier("trained")
        return loop.finish()


@contextlib.contextmanager
def _locked(workdir: Path) -> Iterator[None]:
    """Locks a run directory for this run; process 0 holds the lock for all."""
    with contextlib.ExitStack() as stack:
        distributed.from_primary(lambda: stack.enter_context(lock_workdir(workdir)))
        distributed.check_shared(workdir)
        yield


def _check_data(
    data: data_lib.DataSource, saved: dict[str, Any] | None, workdir: Path
) -> str:
    """Checks that the data are those of the checkpoint; returns their fingerprint."""
    check_description(data.info)
    if not len(data.eval_splits["validation"]):
        raise ValueError(
            f"{data.info.name} has no validation examples, by which the best "
            "checkpoint is chosen: set config.data.num_validation, or num_validation "
            "of data of your own, to at least 1"
        )
    for name, split in data.eval_splits.items():
        if not len(split):
            raise ValueError(f"the {name} split of {data.info.name} has no examples")
    checkpoint = workdir / CHECKPOINTS / str(saved["step"]) if saved else workdir
    if saved:
        check_same_data(data_lib.read_info(saved["data"]), data.info, checkpoint)
    contents = fingerprint(data)
    if saved:
        check_contents(saved, contents, checkpoint)
    return contents


@dataclasses.dataclass(frozen=True)
class StepActions:
    """The actions that are due after an update.

    Attributes:
        log: Write a row of metrics.
        evaluate: Evaluate on the validation split.
        save: Write a checkpoint.
        preempted: The signal that ends training, or "".
    """

    log: bool
    evaluate: bool
    save: bool
    preempted: str


class TrainLoop:
    """Updates a state; after some updates logs, evaluates, saves or stops.

    Attributes:
        task: The task, of one seed or several.
        state: The state on the devices.
        histories: The history of each seed.
        saved_step: Number of updates in the latest checkpoint.
    """

    def __init__(
        self,
        task: Task,
        data: data_lib.DataSource,
        parallel: Parallel,
        preemption: Preemption,
        workdir: Path,
        saved: dict[str, Any] | None,
        origin: Mapping[str, Any],
        profiler: Profiler,
    ):
        """Creates the state, or restores it from the latest checkpoint."""
        self.task = task
        self.config = task.config
        self.data = data
        self.parallel = parallel
        self.preemption = preemption
        self.workdir = workdir
        self.origin = origin
        self.profiler = profiler
        self.checkpoints = workdir / CHECKPOINTS
        if saved:
            self.saved_step = saved["step"]
            self.lost = saved["lost"]
            # The largest so far: it may change each time that a run resumes.
            before = saved["config"].get("log_every_steps", 0)
            before = saved.get("log_every", before)
            self.log_every = max(self.config.log_every_steps, before)
            self.histories = [History(**values) for values in saved["history"]]
            template = parallel.template(task.abstract_state)
            self.state = parallel.place(
                restore(self.checkpoints, self.saved_step, template)
            )
        else:
            self.saved_step, self.lost = 0, []
            self.log_every = self.config.log_every_steps
            self.histories = task.new_histories()
            if self.config.init_from:
                self.state = parallel.place(initial_state(task, self._print))
            else:
                self.state = parallel.create(task.create_state)
        self.key = parallel.place_key(task.key)
        self.train_step = parallel.compile_train_step(task.train_step)
        self.redraw = task.redraw and parallel.compile_redraw(task.redraw)
        self.evaluator = Evaluator.of_task(task, parallel)
        _, self.eval_every = run_length(self.config, task.steps_per_epoch)

    @property
    def finished(self) -> bool:
        """Whether the last step is saved, or early stopping has ended every seed."""
        return self.saved_step >= self.task.num_steps or all(
            history.stopped_early for history in self.histories
        )

    def train(self, on_step: Callable[[int], None] | None) -> None:
        """Updates the state until the last step or early stopping."""
        first_step = self.saved_step
        loader = self.task.loader(
            self.data, first_step, self.parallel.shard, self.parallel.shard_index
        )
        with loader as batches:
            for index, batch in batches:
                step = index + 1
                with self.profiler.update(step, index - first_step, self.state):
                    self.update(batch, step)
                if index == first_step:
                    self.wait_for_compilation()
                if on_step is not None:
                    on_step(step)
                actions = self.actions(step)
                if not actions.log:
                    continue
                rows = self.summarize(step)
                if actions.evaluate:
                    self.evaluate(step, rows)
                self.log(step, rows)
                if actions.save:
                    self.save(step, rows)
                if actions.preempted:
                    raise self.preempted(step, actions.preempted)
                if self.finished:
                    break
                self.window.restart_timer()

    def update(self, batch: Batch, step: int) -> None:
        """Dispatches one update of the state, without waiting for the devices."""
        self.state, metrics = self.train_step(self.state, batch, self.key)
        if self.redraw and step % self.config.redraw_every == 0:
            self.state = self.state.replace(random_features=self._draw())
        self.window.add(metrics)
        self.bar.update(self.task.examples_per_step)

    def _draw(self) -> Any:
        """Returns the random features that belong to the state's step."""
        assert self.redraw is not None
        return self.redraw(self.state.random_features, self.key, self.state.step)

    def wait_for_compilation(self) -> None:
        """Waits for the first update, so that the throughput excludes compilation."""
        drawn = self._draw() if self.redraw else None
        jax.block_until_ready((self.state, drawn))
        self.window.restart_timer()

    def actions(self, step: int) -> StepActions:
        """Returns the actions that are due after an update."""
        preempted = self.preemption.received
        if distributed.all_preempted(step):
            preempted = "SIGTERM"
        evaluate = step == self.task.num_steps or step % self.eval_every == 0
        save_every = self.config.checkpoint_every_steps
        save = evaluate or bool(preempted or (save_every and step % save_every == 0))
        log = save or step % self.config.log_every_steps == 0
        return StepActions(log, evaluate, save, preempted)

    def summarize(self, step: int) -> list[Row]:
        """Averages the metrics since the last row, to one row for each seed.

        Raises:
            NonFiniteLossError: If the metrics of too many updates are not finite.
        """
        window, seconds, updates = self.window.take(self.parallel.fetch)
        count_skipped(
            window,
            self.histories,
            step,
            self.config.max_skipped_updates,
            self._last_checkpoint,
        )
        examples = updates * self.config.batch_size
        for history in self.histories:
            history.timed_seconds += seconds / len(self.histories)
            history.timed_examples += examples
        rate = examples * len(self.histories) / max(seconds, 1e-9)
        speed = throughput(rate, self.task, self.parallel.devices)
        rows = summarize(window, self.task, self.histories, step)
        return [row | speed for row in rows]

    def _last_checkpoint(self) -> Path | None:
        """Waits for the checkpoint that is being written; returns the last one."""
        self.writer.close()
        steps = checkpoint_steps(self.checkpoints)
        return self.checkpoints / str(steps[-1]) if steps else None

    def evaluate(self, step: int, rows: list[Row]) -> None:
        """Adds the validation metrics to the rows of seeds that still train."""
        results = self.evaluator(
            self.state.variables,
            self.data.eval_splits["validation"],
            self.config.eval_batch_size,
            key=self.task.key,
        )
        kind, epochs = self.task.info.kind, self.config.early_stopping_epochs
        for history, row, result in zip(self.histories, rows, results, strict=True):
            if history.stopped_early:
                continue
            del result["count"]
            row |= {f"validation_{name}": value for name, value in result.items()}
            history.add(step, result, kind)
            self._print(
                f"{history.prefix}step {step}/{self.task.num_steps} (epoch "
                f"{row['epoch']:.4g}): {format_metrics(_training_metrics(row))}; "
                f"validation {format_metrics(result)}; "
                f"{row['examples_per_second']:,.0f} examples/s"
            )
            if (
                epochs
                and history.best_step is not None
                and step - history.best_step >= epochs * self.task.steps_per_epoch
            ):
                history.stopped_early, history.stopped_step = True, step
                self._print(
                    f"{history.prefix}stopping early, no gain in validation "
                    f"{title(BEST_METRICS[kind])} in {epochs} epochs."
                )

    def log(self, step: int, rows: list[Row]) -> None:
        """Writes the rows of the seeds that took part in the last update."""
        measured = [_training_metrics(row) for row in rows]
        means = {
            name: np.mean([each[name] for each in measured]) for name in measured[0]
        }
        self.bar.set_postfix(
            {name: format_value(name, mean) for name, mean in means.items()}
        )
        if self.metrics_log is not None:
            for history, row in zip(self.histories, rows, strict=True):
                if not history.ended_before(step):
                    self.metrics_log.write(step, row)

    def save(self, step: int, rows: list[Row]) -> None:
        """Starts to write a checkpoint."""
        self.saved_step = step
        seconds = time.perf_counter() - self.began
        for history in self.histories:
            history.seconds = seconds / len(self.histories)
        meta = {
            "config": to_json(self.config),
            "data": dataclasses.asdict(self.task.info),
            "history": [dataclasses.asdict(history) for history in self.histories],
            "log_every": self.log_every,
            **self.origin,
        }
        kind = self.task.info.kind
        name = BEST_METRICS[kind]
        values = [row.get(f"validation_{name}") for row in rows]
        scores = [None if v is None else score({name: v}, kind) for v in values]
        self.writer.save(step, self.parallel.to_save(self.state), meta, scores)

    def preempted(self, step: int, signal: str) -> PreemptedError:
        """Returns the error that ends training after a signal, with a checkpoint."""
        return PreemptedError(
            f"Stopped by {signal} at step {step} of {self.task.num_steps}, with "
            f"checkpoint {self.checkpoints / str(step)}: repeat the command to resume",
            step,
            by_hand=signal == "SIGINT",
        )

    def quarantine(self) -> None:
        """Renames damaged checkpoints, which the run does not need."""
        distributed.barrier("checkpoints read")
        if distributed.is_primary():
            quarantine(
                self.checkpoints, self.saved_step, self.lost, len(self.histories)
            )
        distributed.barrier("checkpoints in order")

    @contextlib.contextmanager
    def outputs(self) -> Iterator[None]:
        """Opens the checkpoints, the metrics and the progress bar."""
        self.metrics_log = None
        with contextlib.ExitStack() as stack:
            if distributed.is_primary():
                workdir_lib.write_run_json(
                    self.workdir, self.task, self.parallel.devices, self.saved_step
                )
                ends = {
                    each.seed: each.stopped_step
                    if each.stopped_early
                    else self.saved_step
                    for each in self.histories
                }
                self.metrics_log = MetricsLog(
                    self.workdir,
                    self.saved_step,
                    self.log_every,
                    self.config.loggers,
                    to_json(self.config),
                    ends,
                )
            self.writer = CheckpointWriter(self.checkpoints, len(self.histories))
            # Closed last: its error, a missing checkpoint, matters more than a row's.
            stack.callback(self.writer.close)
            if self.metrics_log is not None:
                stack.callback(self.metrics_log.close)
            self.bar = stack.enter_context(self._progress_bar())
            stack.callback(lambda: self.profiler.stop(self.state))
            self.window = MetricsWindow()
            spent = sum(history.seconds for history in self.histories)
            self.began = time.perf_counter() - spent
            yield

    def _progress_bar(self) -> tqdm:
        return tqdm(
            total=self.task.num_steps * self.task.examples_per_step,
            initial=self.saved_step * self.task.examples_per_step,
            unit=" examples",
            unit_scale=True,
            disable=None if self._shows_progress else True,
            dynamic_ncols=True,
        )

    @property
    def _shows_progress(self) -> bool:
        return self.config.progress and distributed.is_primary()

    def _print(self, text: str) -> None:
        if self._shows_progress:
            # Where the output is closed, the run goes on.
            with contextlib.suppress(OSError):
                # The name of a configuration key keeps its case.
                if not text.startswith("config."):
                    text = text[0].upper() + text[1:]
                tqdm.write(printable(text))

    def announce(self, available: int) -> None:
        """Prints what the run is about to do.

        Args:
            available: Number of devices that the run could use.
        """
        for line in workdir_lib.describe_start(
            self.task,
            self.parallel.devices,
            available,
            self.workdir,
            self.saved_step,
            self.finished,
        ):
            self._print(line)

    def finish(self) -> dict[str, Any]:
        """Evaluates the best checkpoints on the test splits; writes ``result.json``.

        Also writes ``run.json`` if the old one cannot be read.
        """
        task, evaluator = self.task, self.evaluator
        if task is not task.single:
            evaluator = Evaluator.of_task(task.single, self.parallel)
        result = final_results(
            task,
            self.histories,
            self.data.eval_splits,
            evaluator,
            self.parallel,
            self.workdir,
            self.saved_step,
            self._print,
        )
        if distributed.is_primary():
            workdir_lib.write_json(self.workdir / "result.json", result)
            try:
                workdir_lib.read_record(self.workdir)
            except (OSError, ValueError):
                workdir_lib.write_run_json(
                    self.workdir, task, self.parallel.devices, self.saved_step
                )
        return result


def _training_metrics(row: Row) -> Row:
    """Returns the metrics of the updates in a row, by name."""
    columns = {name: f"train_{name}" for name in METRICS}
    return {name: row[key] for name, key in columns.items() if key in row}

"""Runs in their directories: finds the checkpoints of each seed and loads them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from relattn import data as data_lib
from relattn import models
from relattn.data import TextInfo, input_shape, read_info
from relattn.files import expand
from relattn.kernels.checks import check_size
from relattn.manifest import FILE_PREFIX
from relattn.messages import check_choice
from relattn.models import pretrained, variable_names
from relattn.models.hub import is_hub_id
from relattn.training.checkpoint import (
    CHECKPOINTS,
    checkpoint_steps,
    read_latest,
    read_meta,
    restore,
)
from relattn.training.config import check_config, complete
from relattn.training.errors import CheckpointError
from relattn.training.metrics import BEST_METRICS, format_value, title
from relattn.training.metrics_log import read_rows
from relattn.training.resume import replace_lost_best
from relattn.training.run import Run
from relattn.training.run_metadata import History, explain_metadata_errors, score
from relattn.training.seeds import make_task
from relattn.training.task import Task

# Logits of a batch of windows of a saved model of text: 1 GiB.
MAX_LOGITS = 2**28


def load_run(
    workdir: str | Path,
    checkpoint: str = "best",
    *,
    image_size: int | tuple[int, int] | None = None,
    context_length: int | None = None,
    seed: int | None = None,
) -> Run:
    """Loads a run from its directory, without its data.

    With ``image_size``, the model takes images of another size than in training, as
    more or fewer patches of the same size, and with ``context_length`` shorter or
    longer texts; `relattn.models.resize_grid` resizes its parameters.

    Args:
        workdir: The run directory.
        checkpoint: ``"best"``, by validation accuracy or, for text, loss; or
            ``"latest"``. A run that was never evaluated has no best checkpoint; its
            latest is loaded. If the latest is damaged, the one before it is loaded with
            a warning, unless the damaged one is the best.
        image_size: Side, or height and width, of the images that the model will see, in
            pixels; None for the size of training.
        context_length: Number of tokens in a window of text; None for that of training.
        seed: Which of the seeds that were trained together; None for the first.

    Returns:
        The run, with the configuration of this one seed.

    Raises:
        ValueError: If ``checkpoint`` is neither, the model cannot see images or texts
            of another size, or the seed was not trained.
        CheckpointError: If there is no intact checkpoint, the best is damaged, or its
            model cannot be built.
    """
    saved = open_run(workdir, checkpoint, image_size, context_length)
    (run,) = saved.load([saved.seeds[0] if seed is None else seed])
    return run


def is_saved_model(folder: str | Path) -> bool:
    """Returns whether `relattn.load_pretrained` takes a folder, or a name on the hub.

    Args:
        folder: The folder of a saved model, or of a run.
    """
    if is_hub_id(folder):
        return True
    return (expand(folder, "--workdir") / pretrained.CONFIG).is_file()


def load_text_run(
    folder: str | Path,
    checkpoint: str = "best",
    context_length: int | None = None,
    seed: int | None = None,
) -> Run:
    """Loads a run on text, or a saved model of text as one that took no steps.

    Args:
        folder: The run directory, or what `relattn.load_pretrained` takes.
        checkpoint: ``"best"`` or ``"latest"``, of a run.
        context_length: Number of tokens in a window; None for that of training.
        seed: Which of the seeds of a run that were trained together; None for the
            first.

    Returns:
        The run; that of a saved model has no training data, and its tables have only
        the rows of tokens.

    Raises:
        ValueError: If the saved model is not of text, its tokenizer is unknown, a file
            is damaged, the seed was not trained, or a seed of a saved model is asked
            for.
        FileNotFoundError: If the ``tokenizer.json`` of the saved model is missing.
        CheckpointError: If there is no intact checkpoint.
    """
    if not is_hub_id(folder):
        folder = expand(folder, "--workdir")
    if not is_saved_model(folder):
        return load_run(folder, checkpoint, context_length=context_length, seed=seed)
    check_choice("checkpoint", checkpoint, ("best", "latest"))
    pretrained.check_no_seed(folder, seed)
    loaded = pretrained.load_pretrained(folder, context_length=context_length)
    if loaded.model.inputs != "tokens":
        raise ValueError(f"{folder} is a model of {loaded.model.inputs}, not of text")
    tokenizer = loaded.load_tokenizer()
    length, size = loaded.config["context_length"], tokenizer.vocab_size
    model, variables = loaded.model, loaded.variables
    if size < loaded.config["vocab_size"]:
        # The model would draw ids that no text has.
        tensors = variable_names.flatten(model, variables)
        changed = {**loaded.config, "vocab_size": size}
        model = pretrained.build(changed)
        variables = variable_names.unflatten(
            model,
            pretrained.abstract(model, changed),
            variable_names.cut_vocabulary(tensors, size),
            folder,
        )
    # `relattn.data.tokenizers.find_tokenizer` looks for the tokenizer's file here.
    files = str(loaded.folder) if tokenizer.name.startswith(FILE_PREFIX) else ""
    data = {"source": "text", "context_length": length, "bpe_dir": files}
    logits = length * size
    sizes = {"eval_batch_size": max(1, min(256, MAX_LOGITS // logits))}
    # With the seed of its run, evaluation draws the same random features.
    training = loaded.config.get("training", {})
    draws = {key: training[key] for key in ("seed", "eval_draws") if key in training}
    config = complete({"model": loaded.config["model"], "data": data, **sizes, **draws})
    info = TextInfo(
        name=Path(folder).name,
        tokenizer=tokenizer.name,
        vocab_size=size,
        context_length=length,
        num_train=0,
        origin=f"the saved model {folder}",
    )
    return Run(
        config=config,
        model=model,
        variables=variables,
        step=0,
        data=info,
        preprocess=data_lib.make_preprocess(config.data, info),
        workdir=Path(folder),
        checkpoint=checkpoint,
    )


def load_runs(
    workdir: str | Path,
    checkpoint: str = "best",
    *,
    image_size: int | tuple[int, int] | None = None,
) -> list[Run]:
    """Loads every seed of a run; each checkpoint is verified and read once.

    Args:
        workdir: The run directory.
        checkpoint: ``"best"``, by validation accuracy or, for text, loss; or
            ``"latest"``.
        image_size: Side, or height and width, of the images that the model will see, in
            pixels; None for the size of training.

    Returns:
        One run for each seed.
    """
    return open_run(workdir, checkpoint, image_size).load()


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """A run in its directory, before its arrays are read; `open_run` returns it.

    Attributes:
        workdir: The run directory.
        checkpoint: ``"best"`` or ``"latest"``.
        step: The latest intact checkpoint.
        trained: The task of the training run.
        task: The same task for images of the requested size.
        histories: The history of each seed.
        given: Whether the training data were given in memory.
        contents: The hash of the training data; "" if it was not saved.
    """

    workdir: Path
    checkpoint: str
    step: int
    trained: Task
    task: Task
    histories: list[History]
    given: bool = False
    contents: str = ""

    @property
    def seeds(self) -> range:
        """The seeds that were trained together."""
        return self.trained.seeds

    def load(self, seeds: Sequence[int] | None = None) -> list[Run]:
        """Reads the parameters of seeds; each checkpoint is verified and read once.

        Args:
            seeds: Some of `seeds`; None for all.

        Returns:
            One run for each seed, in their order.

        Raises:
            ValueError: If a seed was not trained.
            CheckpointError: If a checkpoint is damaged or of another model.
        """
        seeds = self.seeds if seeds is None else seeds
        steps = {seed: self._step(seed) for seed in seeds}
        folder = self.workdir / CHECKPOINTS
        runs = {}
        for step in dict.fromkeys(steps.values()):
            if step != self.step:
                read_meta(folder, step)
            states = self.trained.unstack(
                restore(folder, step, self.trained.abstract_state)
            )
            for seed, state in zip(self.seeds, states, strict=True):
                if steps.get(seed) == step:
                    runs[seed] = self._run(seed, step, state.variables)
        return [runs[seed] for seed in seeds]

    def _step(self, seed: int) -> int:
        """Returns the step of a seed's checkpoint."""
        if seed not in self.seeds:
            raise ValueError(
                f"{self.workdir} has no seed {seed!r}; available: "
                f"{', '.join(map(str, self.seeds))}"
            )
        history = self.histories[self.seeds.index(seed)]
        if self.checkpoint == "latest":
            return self.step
        _check_best(self.workdir, self.step, history, self.task.info.kind, seed)
        return self.step if history.best_step is None else history.best_step

    def _run(self, seed: int, step: int, variables: dict[str, Any]) -> Run:
        resized = self.task is not self.trained
        if resized:
            variables = _resize(self.trained, self.task, variables)
        config = ConfigDict(self.task.config.to_dict())
        config.update(seed=seed, num_seeds=1)
        return Run(
            config=config,
            model=self.task.model,
            variables=variables,
            step=step,
            data=self.task.info,
            preprocess=self.task.preprocess,
            workdir=self.workdir,
            checkpoint=self.checkpoint,
            given=self.given,
            contents=self.contents,
            resized=resized,
        )


def open_run(
    workdir: str | Path,
    checkpoint: str = "best",
    image_size: int | tuple[int, int] | None = None,
    context_length: int | None = None,
) -> SavedRun:
    """Verifies the latest checkpoint of a run and builds its model.

    Args:
        workdir: The run directory.
        checkpoint: ``"best"``, by validation accuracy or, for text, loss; or
            ``"latest"``.
        image_size: Side, or height and width, of the images that the model will see, in
            pixels; None for the size of training.
        context_length: Number of tokens in a window of text; None for that of training.

    Returns:
        The run, without its arrays.

    Raises:
        ValueError: If ``checkpoint`` is neither, or the model cannot see images or
            texts of another size.
        CheckpointError: If there is no intact checkpoint, or its model cannot be built.
    """
    check_choice("checkpoint", checkpoint, ("best", "latest"))
    workdir = expand(workdir, "--workdir")
    folder = workdir / CHECKPOINTS
    latest = read_latest(folder)
    if latest is None:
        raise CheckpointError(
            f"no complete checkpoint in {folder}: is {workdir} the --workdir of a run, "
            "and did the run reach its first evaluation?"
        )
    step, meta = latest
    config = complete(meta["config"])
    with explain_metadata_errors(folder / str(step)):
        check_config(config)
        trained = make_task(config, read_info(meta["data"]))
    task = trained
    if image_size is not None:
        task = _with_image_size(task, image_size)
    if context_length is not None:
        task = _with_context_length(task, context_length)
    histories = [History(**values) for values in meta["history"]]
    replace_lost_best(workdir, step, histories, trained.info.kind, if_missing=True)
    return SavedRun(
        workdir=workdir,
        checkpoint=checkpoint,
        step=step,
        trained=trained,
        task=task,
        histories=histories,
        given=bool(meta.get("given")),
        contents=meta.get("contents") or meta.get("given") or "",
    )


def _check_best(
    workdir: Path, latest: int, history: History, kind: str, seed: int
) -> None:
    """Checks that no damaged checkpoint after the latest intact one was the best."""
    folder = workdir / CHECKPOINTS
    damaged = [step for step in checkpoint_steps(folder) if step > latest]
    name = BEST_METRICS[kind]
    best = score(history.best, kind) if history.best else -math.inf
    for row in read_rows(workdir / "metrics.jsonl"):
        value = row.get(f"validation_{name}")
        if row["step"] not in damaged or row.get("seed", seed) != seed or value is None:
            continue
        if score({name: value}, kind) > best:
            raise CheckpointError(
                f"{folder / str(row['step'])}, with the best validation {title(name)} "
                f"({format_value(name, value)}), is damaged; nothing was changed: "
                "restore it, resume training to write it again, or load the 'latest'"
            )


def _with_image_size(task: Task, image_size: int | tuple[int, int]) -> Task:
    """Returns the task for images of another size."""
    if task.info.kind != "images":
        raise ValueError(
            f"image_size={image_size} needs a run on images, but this one was trained "
            f"on {task.info.kind}"
        )
    config = ConfigDict(task.config.to_dict())
    config.data = data_lib.with_image_size(config.data, task.info, image_size)
    return make_task(config, task.info)


def _with_context_length(task: Task, context_length: int) -> Task:
    """Returns the task for windows of another number of tokens."""
    info = task.info
    if not isinstance(info, TextInfo):
        raise ValueError(
            f"context_length={context_length} needs a run on text, but this one was "
            f"trained on {info.kind}"
        )
    check_size("context_length", context_length)
    config = ConfigDict(task.config.to_dict())
    config.data.context_length = context_length
    # Longer windows: the tokens of a batch, so its logits, take no more memory.
    share = min(1, info.context_length / context_length)
    config.eval_batch_size = max(1, int(config.eval_batch_size * share))
    return make_task(config, dataclasses.replace(info, context_length=context_length))


def _resize(trained: Task, task: Task, variables: Any) -> Any:
    """Resizes variables to the inputs of another task."""
    grids = [_grid(each) for each in (trained, task)]
    return jax.device_get(models.resize_grid(trained.model, variables, *grids))


def _grid(task: Task) -> tuple[int, ...]:
    """Returns the grid of the tokens of a task's model."""
    if isinstance(task.info, TextInfo):
        return (task.info.context_length,)
    shape = input_shape(task.config.data, task.info)[:-1]
    return models.patch_grid(shape, getattr(task.model, "patch_size", 1))

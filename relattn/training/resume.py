"""Checks that a run resumes, or is evaluated, with what it was trained on."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from relattn.data import DataInfo, PointInfo, read_info
from relattn.training.checkpoint import (
    CHECKPOINTS,
    checkpoint_steps,
    read_latest,
    read_meta,
)
from relattn.training.config import (
    LENGTH_KEYS,
    MAY_CHANGE_ON_RESUME,
    complete,
    differences,
    run_length,
    to_json,
)
from relattn.training.errors import CheckpointError, DamagedError, WorkdirError
from relattn.training.metrics import BEST_METRICS
from relattn.training.metrics_log import read_rows
from relattn.training.run_metadata import History


def check_labels(trained: DataInfo, data: DataInfo, where: Path) -> None:
    """Checks that data have the labels that a model predicts.

    Args:
        trained: The description of the training data.
        data: The description of the data to use.
        where: The model's run or checkpoint, for the message.

    Raises:
        CheckpointError: If the vocabularies or the classes differ.
    """
    if trained.labels != data.labels:
        raise CheckpointError(
            f"{where} predicts {trained.describe_labels()}, but {data.name} has "
            f"{data.describe_labels()}: use the data that it was trained on"
        )


def check_fits(trained: DataInfo, data: DataInfo, where: Path) -> None:
    """Checks that a model can be evaluated on data.

    Args:
        trained: The description of the training data.
        data: The description of the data to use.
        where: The model's run, for the message.

    Raises:
        CheckpointError: If the labels differ, see `check_labels`.
        ValueError: If the data are of another kind, or have another number of channels
            or axes.
    """
    if trained.kind != data.kind:
        raise ValueError(
            f"{where} was trained on {trained.kind}, but {data.name} has {data.kind}: "
            "use data of the same kind"
        )
    check_labels(trained, data, where)
    if trained.kind == "points" and data.kind == "points":
        check_columns(trained, data.point_shape, data.name, where)
    if trained.kind != "images" or data.kind != "images":
        return
    channels, given = trained.image_shape[-1], data.image_shape[-1]
    if channels != given:
        raise ValueError(
            f"{where} was trained on images of {channels} channels, but those of "
            f"{data.name} have {given}: use the data that it was trained on"
        )


def check_columns(
    trained: PointInfo, point_shape: Sequence[int], name: str, where: Path
) -> None:
    """Checks that points have the axes and channels that a model was trained on.

    Args:
        trained: The description of the training data.
        point_shape: Number of points, of axes and of channels of the data to use.
        name: Name of these data, for the message.
        where: The model's run, for the message.

    Raises:
        ValueError: If they have others, even where the sum is the same.
    """
    (_, *needed), (_, *given) = trained.point_shape, point_shape
    if needed != given:
        raise ValueError(
            f"{where} was trained on points of {needed[0]} axes and {needed[1]} "
            f"channels, but those of {name} have {given[0]} and {given[1]}: use the "
            "data that it was trained on"
        )


def check_same_config(
    before: dict[str, Any], config: ConfigDict, workdir: Path
) -> None:
    """Checks that a run can continue with a configuration.

    Args:
        before: The configuration of the run, as `to_json` returns it.
        config: The configuration to train.
        workdir: The run directory, for the message.

    Raises:
        WorkdirError: If a value differs that must not change. The length of the run may
            change, unless the schedule is the cosine.
    """
    has_cosine = config.schedule.name == "cosine"
    free = MAY_CHANGE_ON_RESUME if has_cosine else (*MAY_CHANGE_ON_RESUME, *LENGTH_KEYS)
    differing = differences(before, to_json(config), free)
    if differing:
        hint = "choose another directory or the same values"
        if not differences(
            before, to_json(config), (*MAY_CHANGE_ON_RESUME, *LENGTH_KEYS)
        ):
            hint += ", since the cosine schedule depends on the length of the run"
        raise WorkdirError(
            f"--workdir {workdir} holds a run of another configuration "
            f"({'; '.join(differing)}): {hint}"
        )


def read_saved(workdir: Path, config: ConfigDict) -> dict[str, Any] | None:
    """Reads the metadata of the checkpoint that a run resumes from.

    Args:
        workdir: The run directory.
        config: The configuration to train.

    Returns:
        The metadata of `relattn.training.checkpoint.read_latest`, ``step``, and
        ``lost``, the steps of damaged best checkpoints, which the history replaces by
        the best of the others; None if there is no checkpoint.

    Raises:
        WorkdirError: If the directory holds a run of another configuration, a longer
            run, or one of the same length that was not evaluated at its end. Another
            length is allowed, unless the schedule is the cosine.
        CheckpointError: If no checkpoint is intact, or the run is complete and a best
            checkpoint and its metrics are lost.

    Example:
        >>> read_saved(Path("no/such/folder"), ConfigDict()) is None
        True
    """
    latest = read_latest(workdir / CHECKPOINTS)
    if latest is None:
        return None
    step, meta = latest
    before = to_json(complete(meta["config"]))
    check_same_config(before, config, workdir)
    per_epoch = read_info(meta["data"]).steps_per_epoch(config.batch_size)
    num_steps, eval_every = run_length(config, per_epoch)
    planned, _ = run_length(complete(meta["config"]), per_epoch)
    is_evaluated = step == planned or step % eval_every == 0
    if num_steps < step or (num_steps == step and not is_evaluated):
        last = "," if num_steps < step else ", not evaluated after the last,"
        raise WorkdirError(
            f"--workdir {workdir} holds a run of {step} steps{last} but the "
            f"configuration has {num_steps}: choose another directory or a longer run"
        )
    # The run ends with the evaluation of the best checkpoints.
    histories = [History(**values) for values in meta["history"]]
    kind = read_info(meta["data"]).kind
    lost = replace_lost_best(workdir, step, histories, kind)
    for history in histories:
        if history.best_step is None and (history.stopped_early or step == num_steps):
            raise lost[min(lost)]
    history = [dataclasses.asdict(history) for history in histories]
    return {**meta, "step": step, "history": history, "lost": [*lost]}


def replace_lost_best(
    workdir: Path,
    step: int,
    histories: Sequence[History],
    kind: str,
    *,
    if_missing: bool = False,
) -> dict[int, DamagedError]:
    """Chooses the best of the checkpoints that are left, where the best one is lost.

    It is lost if it is damaged. It is missing if training set it aside, or removed it
    for a better one that is damaged.

    Args:
        workdir: The run directory.
        step: The latest intact checkpoint.
        histories: The history of each seed, changed in place.
        kind: Kind of the data: ``"images"``, ``"tokens"`` or ``"points"``.
        if_missing: Whether to replace only checkpoints that are missing.

    Returns:
        The error about each lost checkpoint, by its step.
    """
    folder = workdir / CHECKPOINTS
    lost: dict[int, DamagedError] = {}
    for best in {history.best_step for history in histories}:
        if best is None or best == step:
            continue
        if if_missing and (folder / str(best)).exists():
            continue
        if error := _damage(folder, best):
            lost[best] = error
    if not lost:
        return {}
    left = [
        other
        for other in checkpoint_steps(folder)
        if other == step or (other < step and not _damage(folder, other))
    ]
    rows = read_rows(workdir / "metrics.jsonl")
    for history in histories:
        if history.best_step not in lost:
            continue
        problem = lost[history.best_step].damage
        history.best, history.best_step = {}, None
        best = f"validation_{BEST_METRICS[kind]}"
        for row in rows:
            metrics = {
                key.removeprefix("validation_"): value
                for key, value in row.items()
                if key.startswith("validation_")
            }
            if best in row and row["step"] in left and row.get("seed") == history.seed:
                history.add(int(row["step"]), metrics, kind)
        instead = "no other has been evaluated"
        if history.best_step is not None:
            instead = f"{folder / str(history.best_step)} is the best that is left"
        warnings.warn(f"{history.prefix}{problem}: {instead}", stacklevel=2)
    return lost


def _damage(folder: Path, step: int) -> DamagedError | None:
    try:
        read_meta(folder, step)
    except DamagedError as error:
        return error
    return None


def check_same_data(trained: DataInfo, data: DataInfo, where: Path) -> None:
    """Checks that a run resumes with the data that it was trained on.

    Args:
        trained: The description of the training data.
        data: The description of the data to resume with.
        where: The run's checkpoint, for the message.

    Raises:
        CheckpointError: If anything differs except the name, which may be that of the
            folder, and ``origin``; statistics of images may differ by rounding.
    """
    check_labels(trained, data, where)
    before, now = dataclasses.asdict(trained), dataclasses.asdict(data)

    def is_same(name: str, old: Any, new: Any) -> bool:
        if name in ("mean", "std") and np.shape(old) == np.shape(new):
            return np.allclose(old, new, rtol=1e-4)
        return old == new

    differing = {
        name: f"{name}: {old} there, {now.get(name, 'none')} now"
        for name, old in before.items()
        if name != "origin" and not is_same(name, old, now.get(name))
    }
    if differing.keys() - {"name"}:
        found = "; ".join(differing.values())
        raise CheckpointError(
            f"{where} was trained on other data ({found}), and nothing "
            "was changed: use the data it was trained on, or another --workdir"
        )


def random_settings() -> dict[str, Any]:
    """Returns JAX's settings that change random numbers.

    Example:
        >>> sorted(random_settings())
        ['jax_default_prng_impl', 'jax_threefry_partitionable']
    """
    names = ("jax_default_prng_impl", "jax_threefry_partitionable")
    return {name: getattr(jax.config, name) for name in names}


def check_random_settings(trained: dict[str, Any], where: Path) -> None:
    """Checks that a run resumes with the random numbers that it began with.

    Args:
        trained: `random_settings` of the training; empty for a run of an earlier
            version.
        where: The run's checkpoint, for the message.

    Raises:
        CheckpointError: If a setting differs.
    """
    for name, now in random_settings().items():
        before = trained.get(name, now)
        if before != now:
            raise CheckpointError(
                f"{where} was trained with {name.upper()}={before}, now it is {now}, "
                "which draws other random numbers: set the environment variable "
                f"{name.upper()}={before}"
            )

"""Checkpoints: written in the background by orbax, verified before they are read.

``checkpoints/<step>/`` holds ``state`` (arrays), ``meta`` (JSON: the configuration, the
data, the history of the run, the arrays' paths and shapes) and ``manifest.json``, the
SHA-256 of every file. A folder without its final name is incomplete and ignored, and so
is ``<step>.damaged``, a checkpoint that training has set aside.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from relattn.training.errors import CheckpointError

MANIFEST = "manifest.json"
_INCOMPLETE = ".orbax-checkpoint-tmp"
_DAMAGED = ".damaged"
_SCORES = "metrics/metrics"


class _DamagedError(CheckpointError):
    """A file of a checkpoint is damaged or missing.

    Attributes:
        damage: What is wrong with which file.
    """

    def __init__(self, damage: str):
        super().__init__(
            f"{damage}; nothing was changed: restore the file, or choose another "
            "checkpoint or --workdir"
        )
        self.damage = damage


# Below any score: a state that was not evaluated.
_NO_SCORE = -1e30


def _rank(metrics: dict[str, Any], seed: int = 0) -> tuple[float, int]:
    """Orders checkpoints by a seed's score, the earlier one first among equals."""
    if "scores" in metrics:
        return metrics["scores"][seed], -metrics["step"]
    # Runs of before there was text have the accuracy, -1 where not evaluated.
    score = metrics["score"] if "score" in metrics else metrics["validation_accuracy"]
    return score, -metrics["step"]


class CheckpointWriter:
    """Saves checkpoints in the background; keeps the latest two and each seed's best.

    Attributes:
        folder: Where the checkpoints lie.
    """

    def __init__(self, folder: Path, num_seeds: int = 1):
        """Prepares to write into the folder, which is made if it is not there."""
        self.folder = folder.absolute()
        self._step = 0
        policy = checkpoint_managers.AnyPreservationPolicy(
            [
                checkpoint_managers.LatestN(2),
                # Without metrics: left by a run that was killed as it removed it.
                *(
                    checkpoint_managers.BestN(
                        get_metric_fn=partial(_rank, seed=seed),
                        n=1,
                        keep_checkpoints_without_metrics=False,
                    )
                    for seed in range(num_seeds)
                ),
            ]
        )
        # Without best_fn the metrics are not written, and forgotten by a restart.
        options = ocp.CheckpointManagerOptions(
            best_fn=_rank,
            preservation_policy=policy,
            async_options=ocp.AsyncOptions(
                post_finalization_callback=self._write_manifest
            ),
        )
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def save(
        self,
        step: int,
        state: Any,
        meta: dict[str, Any],
        scores: Sequence[float | None],
    ) -> None:
        """Starts to write a checkpoint and returns.

        Args:
            step: Number of updates so far.
            state: A pytree of NumPy arrays, not to be changed afterwards.
            meta: JSON values to keep beside it.
            scores: Of each seed; the checkpoint with its largest is kept. None where
                the seed was not evaluated.
        """
        self._manager.wait_until_finished()
        self._step = step
        arrays = array_shapes(state)
        flat = dict(zip(arrays, jax.tree.leaves(state), strict=True))
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(
                    flax.traverse_util.unflatten_dict(flat, sep="/")
                ),
                meta=ocp.args.JsonSave({**meta, "arrays": arrays}),
            ),
            metrics={
                "scores": [_NO_SCORE if score is None else score for score in scores],
                "step": step,
            },
            force=True,
        )

    def _write_manifest(self) -> None:
        # Orbax calls this just before it gives the folder its final name.
        unfinished = sorted(self.folder.glob(f"{self._step}{_INCOMPLETE}*"))
        folder = unfinished[0] if unfinished else self.folder / str(self._step)
        # Orbax still writes the commit's time into the files outside of the items.
        files = sorted(path for path in folder.glob("*/**/*") if path.is_file())
        sums = {path.relative_to(folder).as_posix(): _sha256(path) for path in files}
        (folder / MANIFEST).write_text(json.dumps(sums, indent=1))

    def close(self) -> None:
        """Waits until everything is written."""
        self._manager.close()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps of the complete checkpoints in a folder, in order.

    Args:
        folder: The ``checkpoints`` folder of a run; need not exist.

    Returns:
        Perhaps none.

    Raises:
        CheckpointError: If something else lies in the folder.

    Example:
        >>> checkpoint_steps(Path("no/such/folder"))
        []
    """
    if not folder.exists():
        return []
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file, not a folder of checkpoints")
    steps = []
    for entry in folder.iterdir():
        if entry.name.isdigit() and entry.is_dir():
            steps.append(int(entry.name))
        elif not _is_ignored(entry.name):
            raise CheckpointError(
                f"{entry} is no checkpoint of relattn: choose another --workdir"
            )
    return sorted(steps)


def _is_ignored(name: str) -> bool:
    return _INCOMPLETE in name or _DAMAGED in name or name.startswith(".")


def read_meta(folder: Path, step: int) -> dict[str, Any]:
    """Verifies every file of a checkpoint and returns what was saved beside its arrays.

    Args:
        folder: The ``checkpoints`` folder of a run.
        step: Which checkpoint.

    Returns:
        The ``meta`` given to `CheckpointWriter.save`, and ``arrays``.

    Raises:
        CheckpointError: If a file is missing or damaged; it names the file.
    """
    checkpoint = folder / str(step)
    manifest = checkpoint / MANIFEST
    if not manifest.is_file():
        raise _DamagedError(
            f"{manifest} is missing: {checkpoint} is damaged or no checkpoint of "
            "relattn"
        )
    try:
        sums = dict(json.loads(manifest.read_bytes()))
    except (ValueError, TypeError) as error:
        raise _DamagedError(f"{manifest} is damaged") from error
    for name, expected in sums.items():
        path = checkpoint / name
        if not path.is_file():
            raise _DamagedError(f"{path} is missing from the checkpoint")
        if _sha256(path) != expected:
            raise _DamagedError(
                f"{path} is damaged (its SHA-256 is not the manifest's)"
            )
    return _read(checkpoint, meta=ocp.args.JsonRestore())["meta"]


def read_latest(folder: Path) -> tuple[int, dict[str, Any]] | None:
    """The latest intact checkpoint; warns of every later one, which is damaged.

    Args:
        folder: The ``checkpoints`` folder of a run; need not exist.

    Returns:
        Its step and what `read_meta` returns, or None if there is no checkpoint.

    Raises:
        CheckpointError: If there are checkpoints and none is intact; it names what is
            damaged of the latest.

    Example:
        >>> read_latest(Path("no/such/folder")) is None
        True
    """
    damaged: list[_DamagedError] = []
    for step in reversed(checkpoint_steps(folder)):
        try:
            meta = read_meta(folder, step)
        except _DamagedError as error:
            damaged.append(error)
            continue
        for error in damaged:
            warnings.warn(
                f"{error.damage}: {folder / str(step)} is used instead", stacklevel=2
            )
        return step, meta
    if damaged:
        raise damaged[0]
    return None


def set_damaged_aside(folder: Path, latest: int) -> None:
    """Renames damaged checkpoints to ``<step>.damaged``, so that training can go on.

    Args:
        folder: The ``checkpoints`` folder of a run; need not exist.
        latest: The step of `read_latest`: every later checkpoint is damaged, and an
            earlier one is in the way if its scores are.
    """
    for step in checkpoint_steps(folder):
        checkpoint = folder / str(step)
        if step > latest or _has_damaged_scores(checkpoint):
            aside, number = folder / f"{step}{_DAMAGED}", 1
            while aside.exists():
                number += 1
                aside = folder / f"{step}{_DAMAGED}{number}"
            checkpoint.rename(aside)


def _has_damaged_scores(checkpoint: Path) -> bool:
    path = checkpoint / _SCORES
    if not path.exists():
        # Left by a run that was killed as it removed the checkpoint.
        return False
    try:
        _rank(json.loads(path.read_bytes()))
        sums = json.loads((checkpoint / MANIFEST).read_bytes())
        return sums[_SCORES] != _sha256(path)
    except FileNotFoundError:
        return False
    except (ValueError, LookupError, TypeError):
        return True


def restore(folder: Path, step: int, template: Any) -> Any:
    """Reads the arrays of a checkpoint into the structure of a template.

    Args:
        folder: The ``checkpoints`` folder of a run.
        step: Which checkpoint, verified before by `read_meta`.
        template: A pytree of arrays or of their shapes and dtypes.

    Returns:
        The template's structure, filled with NumPy arrays, bit for bit as saved.

    Raises:
        CheckpointError: If paths, shapes or dtypes differ; it names them.
    """
    checkpoint = folder / str(step)
    stored = _read(checkpoint, meta=ocp.args.JsonRestore())["meta"]["arrays"]
    expected = array_shapes(template)
    pairs = {
        path: (stored.get(path, "absent"), expected.get(path, "absent"))
        for path in sorted({*stored, *expected})
    }
    differing = [
        f"{path}: {there} there, {now} now"
        for path, (there, now) in pairs.items()
        if there != now
    ]
    if differing:
        shown = "; ".join(differing[:5])
        more = f"; and {len(differing) - 5} more" if len(differing) > 5 else ""
        raise CheckpointError(
            f"{checkpoint} is a checkpoint of another model ({shown}{more}); nothing "
            "was changed: use the configuration it was trained with"
        )
    leaves, structure = jax.tree.flatten(template)
    empty = [np.empty(leaf.shape, leaf.dtype) for leaf in leaves]
    target = flax.traverse_util.unflatten_dict(
        dict(zip(expected, empty, strict=True)), sep="/"
    )
    nested = _read(checkpoint, state=ocp.args.StandardRestore(target))["state"]
    flat = flax.traverse_util.flatten_dict(nested, sep="/")
    return structure.unflatten([flat[path] for path in expected])


def _read(checkpoint: Path, **args: Any) -> Any:
    reader = ocp.Checkpointer(ocp.CompositeCheckpointHandler())
    try:
        return reader.restore(checkpoint.absolute(), args=ocp.args.Composite(**args))
    except Exception as error:
        raise _DamagedError(
            f"{checkpoint} cannot be read ({type(error).__name__})"
        ) from error
    finally:
        reader.close()


def array_shapes(tree: Any) -> dict[str, str]:
    """Dtype and shape of every array of a pytree by path, in the order of its leaves.

    Args:
        tree: Arrays, or their shapes and dtypes.

    Returns:
        For example ``{"params/head/bias": "float32[10]"}``.

    Example:
        >>> array_shapes({"w": np.zeros((2, 3), np.float32), "n": np.int32(1)})
        {'n': 'int32[]', 'w': 'float32[2,3]'}
    """
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): (
            f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }

"""Checkpoints: written in the background by orbax, verified before they are read.

``checkpoints/<step>/`` holds

- ``state``: the arrays,
- ``meta``: JSON, the configuration, the data, the history of each seed, and the paths
  and shapes of the arrays,
- ``metrics``: JSON, the scores,
- ``manifest.json``: the SHA-256 of every file in these three folders.

The other files in the folder are orbax's. They are written last and may be missing, so
they are not verified. A folder is incomplete until it gets its final name, and ignored
until then. Training renames a damaged checkpoint to ``<step>.damaged``, which is
ignored too.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import flax.traverse_util
import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from relattn.command import lacks_resources
from relattn.files import replace_file
from relattn.json_files import read_json
from relattn.manifest import MANIFEST, sha256
from relattn.messages import shorten
from relattn.training.errors import CheckpointError, DamagedError
from relattn.training.orbax_errors import quiet_orbax, system_error
from relattn.training.run_metadata import check_meta
from relattn.training.workdir import DAMAGED, free_name, usable_folder

CHECKPOINTS = "checkpoints"

_TIMES = "_CHECKPOINT_METADATA"
_INCOMPLETE = ".orbax-checkpoint-tmp"
_SCORES = "metrics/metrics"
_SCORE_SCHEMA = {"scores": [float], "step": int}

# The score of a state that was not evaluated, below any other.
_NO_SCORE = -1e30


class CheckpointWriter:
    """Saves checkpoints in the background; keeps the latest two and each score's best.

    Attributes:
        folder: The folder of the checkpoints.
    """

    def __init__(self, folder: Path, num_scores: int = 1):
        """Creates the folder if needed; each checkpoint will have that many scores.

        Raises:
            WorkdirError: If the folder is not writable: orbax would wait for minutes.
            CheckpointError: If a checkpoint is a symbolic link, which orbax does not
                remove, or orbax cannot read a file.
        """
        self.folder = usable_folder(folder, "the folder of checkpoints")
        for step in checkpoint_steps(self.folder):
            if (self.folder / str(step)).is_symlink():
                raise CheckpointError(
                    f"{self.folder / str(step)} is a symbolic link: put the checkpoint "
                    "itself in its place"
                )
        self._step = 0
        # Orbax's annotations ask for floats, but it only compares them.
        policy = checkpoint_managers.AnyPreservationPolicy(
            [
                checkpoint_managers.LatestN(2),
                # A checkpoint without metrics was being removed when a run was killed.
                *(
                    checkpoint_managers.BestN(
                        get_metric_fn=cast(Any, partial(rank, index=index)),
                        n=1,
                        keep_checkpoints_without_metrics=False,
                    )
                    for index in range(num_scores)
                ),
            ]
        )
        # Without best_fn, orbax writes no metrics, and a restart would not have them.
        options = ocp.CheckpointManagerOptions(
            best_fn=cast(Any, rank),
            preservation_policy=policy,
            async_options=ocp.AsyncOptions(
                post_finalization_callback=self._write_manifest
            ),
        )
        with self._explain_errors():
            self._manager = self._open(options)
        self._quiet = contextlib.ExitStack()
        self._quiet.enter_context(quiet_orbax())

    def _open(self, options: ocp.CheckpointManagerOptions) -> ocp.CheckpointManager:
        try:
            return ocp.CheckpointManager(self.folder, options=options)
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            # Orbax parses the times of all checkpoints; no policy here uses them.
            raise CheckpointError(
                f"orbax cannot read a {_TIMES} in {self.folder} "
                f"({type(error).__name__}): remove that file, which is not needed"
            ) from error

    def save(
        self,
        step: int,
        state: Any,
        meta: dict[str, Any],
        scores: Sequence[float | None],
    ) -> None:
        """Starts to write a checkpoint in the background.

        Args:
            step: Number of updates so far.
            state: A pytree of NumPy arrays, which must not change afterwards.
            meta: JSON values to store with it.
            scores: For each score, the checkpoint with the largest value is kept. None
                for a score that was not evaluated.

        Raises:
            CheckpointError: If this checkpoint, or the one before it, cannot be
                written.
        """
        with self._explain_errors():
            self._manager.wait_until_finished()
        self._step = step
        arrays = array_shapes(state)
        flat = dict(zip(arrays, jax.tree.leaves(state), strict=True))
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(
                flax.traverse_util.unflatten_dict(flat, sep="/")
            ),
            meta=ocp.args.JsonSave({**meta, "arrays": arrays}),
        )
        metrics = {
            "scores": [_NO_SCORE if score is None else score for score in scores],
            "step": step,
        }
        with self._explain_errors():
            self._manager.save(step, args=items, metrics=metrics, force=True)

    def _write_manifest(self) -> None:
        # Orbax calls this just before it renames the folder to its final name.
        unfinished = sorted(self.folder.glob(f"{self._step}{_INCOMPLETE}*"))
        folder = unfinished[0] if unfinished else self.folder / str(self._step)
        sums = {name: sha256(path) for name, path in _files(folder).items()}
        replace_file(folder / MANIFEST, json.dumps(sums, indent=1))

    def close(self) -> None:
        """Waits until everything is written.

        Raises:
            CheckpointError: If the last checkpoint could not be written.
        """
        try:
            with self._explain_errors():
                self._manager.wait_until_finished()
        finally:
            # A write that failed raises a second time.
            with contextlib.suppress(Exception):
                self._manager.close()
            self._quiet.close()

    @contextlib.contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """Re-raises errors of the system as CheckpointError with the fix."""
        try:
            yield
        except Exception as error:
            reason = system_error(error)
            if not reason:
                raise
            steps = checkpoint_steps(self.folder)
            kept = "no checkpoint was written before"
            if steps:
                kept = f"the last good checkpoint is {self.folder / str(steps[-1])}"
            target = self.folder / str(self._step) if self._step else self.folder
            raise CheckpointError(
                f"{target} cannot be written ({reason}); {kept}: free some space, or "
                "make the directory writable, and repeat the command"
            ) from error


def rank(metrics: dict[str, Any], index: int = 0) -> tuple[float, int]:
    """Returns the key that orders checkpoints by a score, then by age."""
    return metrics["scores"][index], -metrics["step"]


def read_latest(folder: Path) -> tuple[int, dict[str, Any]] | None:
    """Finds the latest intact checkpoint; warns about every later, damaged one.

    Args:
        folder: The ``checkpoints`` folder of a run; need not exist.

    Returns:
        Its step and its metadata, see `read_meta`; None if there is no checkpoint.

    Raises:
        DamagedError: If there are checkpoints and none is intact; it names the latest.
        CheckpointError: If this version of relattn cannot use the metadata of the
            latest intact one.

    Example:
        >>> read_latest(Path("no/such/folder")) is None
        True
    """
    damaged: list[DamagedError] = []
    for step in reversed(checkpoint_steps(folder)):
        try:
            meta = read_meta(folder, step)
        except DamagedError as error:
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


def checkpoint_steps(folder: Path) -> list[int]:
    """Lists the steps of the complete checkpoints in a folder, in order.

    Args:
        folder: The ``checkpoints`` folder of a run; need not exist.

    Returns:
        The steps; the list may be empty.

    Raises:
        CheckpointError: If the folder holds anything else.

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
        if _is_step(entry.name) and entry.is_dir():
            steps.append(int(entry.name))
        elif not _is_ignored(entry.name):
            raise CheckpointError(
                f"{entry} is not a checkpoint of relattn: move it out of {folder}"
            )
    return sorted(steps)


def _is_step(name: str) -> bool:
    # Not "²", which is a digit to Python, nor "007", which is not the name of step 7.
    return name.isascii() and name.isdigit() and name == str(int(name))


def _is_ignored(name: str) -> bool:
    return _INCOMPLETE in name or DAMAGED in name or name.startswith(".")


def read_meta(folder: Path, step: int) -> dict[str, Any]:
    """Verifies every file of a checkpoint and returns its metadata.

    Args:
        folder: The ``checkpoints`` folder of a run.
        step: The checkpoint's step.

    Returns:
        The ``meta`` given to `CheckpointWriter.save`, and ``arrays``.

    Raises:
        DamagedError: If a file is missing, unreadable, damaged or not in the manifest.
        CheckpointError: If this version of relattn cannot use the metadata.
    """
    checkpoint = folder / str(step)
    try:
        _verify(checkpoint)
    except CheckpointError:
        raise
    except OSError as error:
        if lacks_resources(error):
            raise
        if not error.strerror:  # Its message names the file.
            raise DamagedError(str(error)) from error
        file = error.filename or checkpoint
        raise DamagedError(f"{file} cannot be read ({error.strerror})") from error
    return _read_meta(checkpoint)


def _verify(checkpoint: Path) -> None:
    """Checks that the manifest lists exactly the files, with their SHA-256."""
    manifest = checkpoint / MANIFEST
    if not manifest.is_file():
        raise DamagedError(
            f"{manifest} is missing: {checkpoint} is damaged or not a checkpoint of "
            "relattn"
        )
    try:
        sums = read_json(manifest, {"*": str})
    except ValueError as error:
        raise DamagedError(f"{manifest} is damaged") from error
    files = _files(checkpoint)
    for name in sums:
        if name not in files:
            shown = checkpoint / shorten(name).strip("'")
            raise DamagedError(f"{shown} is missing from the checkpoint")
    for name, path in files.items():
        if name not in sums:
            raise DamagedError(f"{path} is missing from {manifest}")
        if sha256(path) != sums[name]:
            raise DamagedError(f"{path} is damaged (its SHA-256 is not the manifest's)")


def _files(checkpoint: Path) -> dict[str, Path]:
    """Returns the files of a checkpoint that its manifest lists, by name."""
    # Files at the top level are left out: orbax still writes the commit's time to them.
    files = sorted(path for path in checkpoint.glob("*/**/*") if path.is_file())
    # Network file systems and file browsers leave hidden files.
    return {
        path.relative_to(checkpoint).as_posix(): path
        for path in files
        if not path.name.startswith(".")
    }


def restore(folder: Path, step: int, template: Any) -> Any:
    """Reads the arrays of a checkpoint into the structure of a template.

    Args:
        folder: The ``checkpoints`` folder of a run.
        step: The checkpoint's step; `read_meta` must have verified it.
        template: A pytree of arrays or of their shapes and dtypes, optionally with
            shardings.

    Returns:
        The arrays, bit for bit as saved, in the template's structure: NumPy arrays, or
        with shardings JAX arrays; each process reads its part of them.

    Raises:
        CheckpointError: If paths, shapes or dtypes differ; the message has them.
        DamagedError: If the files do not match the metadata.
    """
    checkpoint = folder / str(step)
    stored = _read_meta(checkpoint)["arrays"]
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
    empty = [
        leaf if getattr(leaf, "sharding", None) else np.empty(leaf.shape, leaf.dtype)
        for leaf in leaves
    ]
    target = flax.traverse_util.unflatten_dict(
        dict(zip(expected, empty, strict=True)), sep="/"
    )
    reader = ocp.Checkpointer(ocp.CompositeCheckpointHandler())
    nested = _read(reader, checkpoint, state=ocp.args.StandardRestore(target))["state"]
    flat = flax.traverse_util.flatten_dict(nested, sep="/")
    return structure.unflatten([flat[path] for path in expected])


def _read_meta(checkpoint: Path) -> dict[str, Any]:
    # In this process alone: orbax would wait for the others.
    this = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=this, active_processes={this}, barrier_sync_key_prefix=f"{this}"
    )
    reader = ocp.Checkpointer(
        ocp.CompositeCheckpointHandler(), multiprocessing_options=alone
    )
    meta = _read(reader, checkpoint, meta=ocp.args.JsonRestore())["meta"]
    return check_meta(meta, checkpoint)


def _read(reader: ocp.Checkpointer, checkpoint: Path, **args: Any) -> Any:
    try:
        return reader.restore(checkpoint.absolute(), args=ocp.args.Composite(**args))
    except Exception as error:
        if lacks_resources(error):
            raise
        raise DamagedError(
            f"{checkpoint} cannot be read ({type(error).__name__})"
        ) from error
    finally:
        reader.close()


def array_shapes(tree: Any) -> dict[str, str]:
    """Describes every array of a pytree by path, in the order of its leaves.

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


def quarantine(
    folder: Path, latest: int, lost: Collection[int] = (), num_scores: int = 1
) -> None:
    """Renames damaged checkpoints to ``<step>.damaged``, so that training can resume.

    Args:
        folder: The ``checkpoints`` folder of a run; need not exist.
        latest: The step of `read_latest`. Every later checkpoint is damaged; an earlier
            one is renamed only if its scores are damaged, since orbax reads them.
        lost: Steps of other damaged checkpoints.
        num_scores: Number of scores of each checkpoint.
    """
    for step in checkpoint_steps(folder):
        checkpoint = folder / str(step)
        if step > latest or step in lost or _has_damaged_scores(checkpoint, num_scores):
            checkpoint.rename(free_name(checkpoint))


def _has_damaged_scores(checkpoint: Path, num_scores: int) -> bool:
    path = checkpoint / _SCORES
    if not path.exists():
        # The checkpoint was being removed when a run was killed.
        return False
    try:
        scores = read_json(path, _SCORE_SCHEMA, allow_nan=True)["scores"]
        if len(scores) != num_scores:
            return True
        sums = read_json(checkpoint / MANIFEST, {_SCORES: str})
        return sums[_SCORES] != sha256(path)
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        if lacks_resources(error):
            raise
        return True

"""Damaged checkpoints: which one is used instead, and how they get out of the way."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from relattn.data.manifest import MANIFEST, sha256
from relattn.training.aside import name_aside
from relattn.training.checkpoint import checkpoint_steps, rank, read_meta
from relattn.training.errors import DamagedError

_SCORES = "metrics/metrics"


def read_latest(folder: Path) -> tuple[int, dict[str, Any]] | None:
    """The latest intact checkpoint; warns of every later one, which is damaged.

    Args:
        folder: The ``checkpoints`` folder of a run; need not exist.

    Returns:
        Its step and what `read_meta` returns, or None if there is no checkpoint.

    Raises:
        CheckpointError: If there are checkpoints and none is intact; it names what is
            damaged of the latest. If the latest intact one is of a run that this
            version of relattn does not understand.

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
            checkpoint.rename(name_aside(checkpoint))


def _has_damaged_scores(checkpoint: Path) -> bool:
    path = checkpoint / _SCORES
    if not path.exists():
        # Left by a run that was killed as it removed the checkpoint.
        return False
    try:
        value, _ = rank(json.loads(path.read_bytes()))
        if not isinstance(value, int | float):
            return True
        sums = json.loads((checkpoint / MANIFEST).read_bytes())
        return sums[_SCORES] != sha256(path)
    except FileNotFoundError:
        return False
    except (ValueError, LookupError, TypeError, RecursionError):
        return True

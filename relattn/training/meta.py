"""What a checkpoint keeps beside its arrays, checked before anything relies on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relattn import spec
from relattn.data import read_info
from relattn.training.config import complete
from relattn.training.errors import CheckpointError, DamagedError
from relattn.training.history import History, score

_META = "meta/metadata"
_TYPES = {"config": dict, "data": dict, "history": (dict, list), "arrays": dict}
# Characters of what another library says about a wrong value.
_MAX_REASON = 300


def check_meta(meta: Any, checkpoint: Path) -> dict[str, Any]:
    """Raises unless a checkpoint says what it was trained with, on what and how far.

    Whether the model can be built shows only where it is, see `understanding`.

    Args:
        meta: What JSON held.
        checkpoint: Where it lay, for the message.

    Returns:
        The same, with ``config``, ``data``, ``history`` and ``arrays``.

    Raises:
        DamagedError: If one of them is absent or of another type.
        CheckpointError: If this version of relattn does not understand what they say.

    Example:
        >>> check_meta({"config": 5}, Path("checkpoints/7"))
        Traceback (most recent call last):
        relattn.training.errors.DamagedError: checkpoints/7/meta/metadata is damaged \
(config is 5); nothing was changed: restore the file, or choose another checkpoint or \
--workdir
    """
    if not isinstance(meta, dict):
        raise _damaged(checkpoint, f"it is {spec.shorten(meta)}")
    for name, kind in _TYPES.items():
        if name not in meta:
            raise _damaged(checkpoint, f"{name} is missing")
        if not isinstance(meta[name], kind):
            raise _damaged(checkpoint, f"{name} is {spec.shorten(meta[name])}")
    for path, array in meta["arrays"].items():
        if not isinstance(array, str):
            raise _damaged(checkpoint, f"arrays has {spec.shorten({path: array})}")
    history = meta["history"]
    for values in history if isinstance(history, list) else [history]:
        problem = _problem_of(values)
        if problem:
            raise _damaged(checkpoint, problem)
    with understanding(checkpoint):
        kind = read_info(meta["data"]).kind
        histories = History.list_from_json(history)
        num_seeds = complete(meta["config"]).num_seeds
        if len(histories) != num_seeds or not histories:
            raise ValueError(f"{len(histories)} seeds with num_seeds={num_seeds}")
        for seed in histories:
            if seed.best_step is not None:
                score(seed.best, kind)
    return meta


def _damaged(checkpoint: Path, problem: str) -> DamagedError:
    return DamagedError(f"{checkpoint / _META} is damaged ({problem})")


def _problem_of(history: Any) -> str | None:
    """What is wrong with the types in a history."""
    if not isinstance(history, dict):
        return f"history has {spec.shorten(history)}"
    step, best = history.get("best_step"), history.get("best", {})
    # It names a folder, so nothing else may pass.
    if step is not None and not (type(step) is int and 0 <= step <= spec.LARGEST):
        return f"best_step is {spec.shorten(step)}"
    if not isinstance(best, dict):
        return f"best is {spec.shorten(best)}"
    for name, value in {**history, **best, "best": 0, "best_step": 0}.items():
        if not isinstance(value, int | float):
            return f"{spec.shorten(name)} is {spec.shorten(value)}"
    return None


@contextlib.contextmanager
def understanding(checkpoint: Path) -> Iterator[None]:
    """Makes of a failure to use what a checkpoint says a sentence that names it.

    Args:
        checkpoint: Its folder.

    Yields:
        Nothing.

    Raises:
        CheckpointError: If what runs in the context raises.

    Example:
        >>> with understanding(Path("checkpoints/7")):
        ...     raise ValueError("unknown model 'x'")
        Traceback (most recent call last):
        relattn.training.errors.CheckpointError: checkpoints/7 says what this version \
of relattn cannot use (unknown model 'x'): load it with the version that wrote it
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        # Values of any type reach other libraries, which raise what they like.
        reason = " ".join(str(error).split())[:_MAX_REASON]
        if not isinstance(error, ValueError):
            reason = f"{type(error).__name__}: {reason}"
        raise CheckpointError(
            f"{checkpoint} says what this version of relattn cannot use ({reason}): "
            "load it with the version that wrote it"
        ) from error

"""What a checkpoint keeps beside its arrays, checked before anything relies on it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relattn import spec
from relattn.data import read_info
from relattn.training.config import complete
from relattn.training.errors import CheckpointError, DamagedError

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


# By kind of data: the validation metric that chooses the best checkpoint, and its sign.
BEST_METRICS = {"images": ("accuracy", 1.0), "tokens": ("loss", -1.0)}

# Above that of a checkpoint without a score.
_WORST = -1e29


@dataclasses.dataclass
class History:
    """What a run remembers beside its state; kept in every checkpoint.

    Attributes:
        best: The validation metrics of the best checkpoint so far.
        best_step: The step of it; None before the first evaluation.
        stopped_early: Whether early stopping ended the run.
        stopped_step: The step at which it did; 0 where it did not.
        skipped_updates: Number of updates that were not finite and skipped.
        seconds: Time spent, restarts included; of seeds that train together, the
            share of one.
        timed_seconds: Of it in updates, compilation and evaluation apart.
        timed_examples: The examples of those updates.
    """

    best: dict[str, float] = dataclasses.field(default_factory=dict)
    best_step: int | None = None
    stopped_early: bool = False
    stopped_step: int = 0
    skipped_updates: int = 0
    seconds: float = 0.0
    timed_seconds: float = 0.0
    timed_examples: int = 0

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> History:
        """Reads what `dataclasses.asdict` gave.

        Args:
            values: Those of a version without ``best`` have ``best_accuracy`` and
                ``best_loss``.

        Returns:
            The history.

        Example:
            >>> History.from_json({"best_accuracy": 0.5, "best_loss": 2.0}).best
            {'accuracy': 0.5, 'loss': 2.0}
        """
        values = dict(values)
        if "best_accuracy" in values:
            names = ("accuracy", "loss")
            values["best"] = {name: values.pop(f"best_{name}") for name in names}
        return cls(**values)

    @classmethod
    def list_from_json(cls, values: Any) -> list[History]:
        """Reads what a checkpoint keeps: of several seeds, a list."""
        values = values if isinstance(values, list) else [values]
        return [cls.from_json(history) for history in values]

    @property
    def examples_per_second(self) -> float:
        """Training throughput."""
        return self.timed_examples / max(self.timed_seconds, 1e-9)

    def add(self, step: int, metrics: dict[str, float], kind: str) -> None:
        """Keeps the validation metrics of a step if they are the best so far."""
        if self.best_step is None or score(metrics, kind) > score(self.best, kind):
            self.best, self.best_step = metrics, step


def score(metrics: dict[str, float], kind: str) -> float:
    """What orders checkpoints, larger being better.

    Args:
        metrics: Of validation.
        kind: Of the data, ``"images"`` or ``"tokens"``.

    Returns:
        The accuracy, or for text the loss, negative; what is not a number is worse than
        any, but better than no score.

    Example:
        >>> score({"loss": 2.0, "accuracy": 0.5}, "tokens")
        -2.0
    """
    name, sign = BEST_METRICS[kind]
    value = sign * metrics[name]
    return value if value > _WORST else _WORST

"""The metadata of a checkpoint: the history of each seed, and checks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relattn import spec
from relattn.command import lacks_resources
from relattn.data import read_info
from relattn.json_files import check_json
from relattn.messages import shorten
from relattn.models.saved_config import MODEL
from relattn.training.config import complete
from relattn.training.errors import CheckpointError, DamagedError
from relattn.training.metrics import BEST_METRICS, METRICS

_META = "meta/metadata"
# The options of a model that are sizes.
_SIZES = {key: each for key, each in MODEL.items() if key.endswith("?")}
_TYPES = {"config": dict, "data": dict, "history": list, "arrays": dict}
# Characters of another library's message to show.
_MAX_REASON = 300
# Above the score of a checkpoint that was not evaluated.
_WORST = -1e29


@dataclasses.dataclass
class History:
    """The progress of one seed beyond its state; stored in every checkpoint.

    Attributes:
        seed: The seed, if several train together; else None.
        best: The validation metrics of the best checkpoint so far.
        best_step: Step of that checkpoint; None before the first evaluation.
        stopped_early: Whether early stopping ended training.
        stopped_step: The step of early stopping; 0 if training did not stop early.
        skipped_updates: Number of updates that were not finite and skipped.
        seconds: Time spent, restarts included; shared equally by seeds that train
            together.
        timed_seconds: Part of ``seconds`` spent in updates, without compilation and
            evaluation.
        timed_examples: Number of examples in those updates.
    """

    seed: int | None = None
    best: dict[str, float] = dataclasses.field(default_factory=dict)
    best_step: int | None = None
    stopped_early: bool = False
    stopped_step: int = 0
    skipped_updates: int = 0
    seconds: float = 0.0
    timed_seconds: float = 0.0
    timed_examples: int = 0

    @property
    def prefix(self) -> str:
        """The start of a line about this seed, such as "seed 3: "."""
        return "" if self.seed is None else f"seed {self.seed}: "

    @property
    def examples_per_second(self) -> float:
        """Training throughput."""
        return self.timed_examples / max(self.timed_seconds, 1e-9)

    def add(self, step: int, metrics: dict[str, float], kind: str) -> None:
        """Stores the validation metrics of a step if they are the best so far."""
        if self.best_step is None or score(metrics, kind) > score(self.best, kind):
            self.best, self.best_step = metrics, step

    def ended_before(self, step: int) -> bool:
        """Returns whether early stopping ended training before a step."""
        return self.stopped_early and self.stopped_step < step


def score(metrics: dict[str, float], kind: str) -> float:
    """Returns the value that orders checkpoints; larger is better.

    Args:
        metrics: Validation metrics.
        kind: Kind of the data: ``"images"``, ``"tokens"`` or ``"points"``.

    Returns:
        The accuracy, or for text the negative loss. NaN counts as a value below any
        other, but above a checkpoint that was not evaluated.

    Example:
        >>> score({"loss": 2.0, "accuracy": 0.5}, "tokens")
        -2.0
    """
    name = BEST_METRICS[kind]
    value = metrics[name] if METRICS[name].higher_is_better else -metrics[name]
    return value if value > _WORST else _WORST


def check_meta(meta: Any, checkpoint: Path) -> dict[str, Any]:
    """Checks the types and the meaning of a checkpoint's metadata.

    Whether the model can be built is checked where it is built, see
    `explain_metadata_errors`.

    Args:
        meta: The decoded JSON.
        checkpoint: The checkpoint's folder, for the message.

    Returns:
        The metadata, with ``config``, ``data``, ``history`` and ``arrays``.

    Raises:
        DamagedError: If one of them is absent or of another type.
        CheckpointError: If this version of relattn cannot use their values.

    Example:
        >>> check_meta({"config": 5}, Path("checkpoints/7"))
        Traceback (most recent call last):
        relattn.training.errors.DamagedError: checkpoints/7/meta/metadata is damaged \
(config is 5); nothing was changed: restore the file, or choose another checkpoint or \
--workdir
    """
    problem = _type_problem(meta)
    if problem:
        raise DamagedError(f"{checkpoint / _META} is damaged ({problem})")
    with explain_metadata_errors(checkpoint):
        kind = read_info(meta["data"]).kind
        # Before a model of any size is built.
        check_json(meta["config"], {"model?": _SIZES}, "config")
        histories = [History(**values) for values in meta["history"]]
        num_seeds = complete(meta["config"]).num_seeds
        if len(histories) != num_seeds or not histories:
            raise ValueError(f"{len(histories)} histories of {num_seeds} seeds")
        for history in histories:
            if history.best_step is not None:
                score(history.best, kind)
    return meta


def _type_problem(meta: Any) -> str | None:
    """Describes the first value of another type; None if there is none."""
    if not isinstance(meta, dict):
        return f"it is {shorten(meta)}"
    for name, kind in _TYPES.items():
        if name not in meta:
            return f"{name} is missing"
        if not isinstance(meta[name], kind):
            return f"{name} is {shorten(meta[name])}"
    optional = {"contents": str, "given": str, "random": dict, "log_every": int}
    for name, kind in optional.items():
        if not isinstance(meta.get(name, kind()), kind):
            return f"{name} is {shorten(meta[name])}"
    for path, array in meta["arrays"].items():
        if not isinstance(array, str):
            return f"arrays has {shorten({path: array})}"
    problems = map(_history_problem, meta["history"])
    return next((problem for problem in problems if problem), None)


def _history_problem(history: Any) -> str | None:
    if not isinstance(history, dict):
        return f"history has {shorten(history)}"
    step, best = history.get("best_step"), history.get("best", {})
    # The step is used as the name of a folder: anything but a step is refused.
    if step is not None and not (type(step) is int and 0 <= step <= spec.LARGEST):
        return f"best_step is {shorten(step)}"
    if not isinstance(best, dict):
        return f"best is {shorten(best)}"
    numbers = {**history, **best, "best": 0, "best_step": 0}
    numbers["seed"] = numbers.get("seed") or 0
    for name, value in numbers.items():
        if not isinstance(value, int | float):
            return f"{shorten(name)} is {shorten(value)}"
    return None


@contextlib.contextmanager
def explain_metadata_errors(checkpoint: Path) -> Iterator[None]:
    """Re-raises errors as CheckpointError naming the checkpoint.

    Args:
        checkpoint: The checkpoint's folder.

    Yields:
        Nothing.

    Raises:
        CheckpointError: If the body of the context raises an error other than a lack of
            memory or of open files.

    Example:
        >>> with explain_metadata_errors(Path("checkpoints/7")):
        ...     raise ValueError("unknown model 'x'")
        Traceback (most recent call last):
        relattn.training.errors.CheckpointError: checkpoints/7 has metadata that this \
version of relattn cannot use (unknown model 'x'): load it with the version that wrote \
it
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        if lacks_resources(error):
            raise
        # Unchecked values reach other libraries, which raise errors of any type.
        reason = " ".join(str(error).split())[:_MAX_REASON]
        if not isinstance(error, ValueError):
            reason = f"{type(error).__name__}: {reason}"
        hint = "load it with the version that wrote it"
        if reason.startswith(("unknown attention", "unknown position")):
            hint += (
                ", or first import the module that registers it, in programs by "
                "--import=MODULE"
            )
        raise CheckpointError(
            f"{checkpoint} has metadata that this version of relattn cannot use "
            f"({reason}): {hint}"
        ) from error

"""What a run remembers beside its state."""

from __future__ import annotations

import dataclasses
from typing import Any

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

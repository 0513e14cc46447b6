"""What training raises beside ValueError: each message is one sentence with the fix."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from relattn.command import INTERRUPTED

EX_TEMPFAIL = 75


class WorkdirError(OSError):
    """A run directory cannot be used."""


class CheckpointError(OSError):
    """A checkpoint is missing, damaged or of another model, or cannot be written."""


class DamagedError(CheckpointError):
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


class NonFiniteLossError(FloatingPointError):
    """The loss or its gradient became NaN or infinite.

    Attributes:
        step: The update at which it happened, counted from one.
    """

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


class PreemptedError(Exception):
    """A signal ended a run, with a checkpoint or where none was due.

    The same call goes on.

    Attributes:
        step: Number of updates in the checkpoint; 0 where none was written.
        by_hand: Whether it was Ctrl-C, not SIGTERM.
        exit_code: Of the program, 130 after Ctrl-C and 75 (EX_TEMPFAIL) after SIGTERM.
    """

    def __init__(self, message: str, step: int = 0, *, by_hand: bool = False):
        super().__init__(message)
        self.step = step
        self.by_hand = by_hand
        self.exit_code = INTERRUPTED if by_hand else EX_TEMPFAIL


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Makes of a failure to write a file a sentence that names it.

    Args:
        path: The file, in a run directory.

    Yields:
        Nothing.

    Raises:
        WorkdirError: If what runs in the context raises an OSError.

    Example:
        >>> with writing(Path("metrics.csv")):
        ...     raise OSError(28, "No space left on device")
        Traceback (most recent call last):
        relattn.training.errors.WorkdirError: metrics.csv cannot be written (No space \
left on device); what was written before is intact: make room, or the directory \
writable, and give the same command again
    """
    try:
        yield
    except OSError as error:
        raise WorkdirError(
            f"{path} cannot be written ({error.strerror or error}); what was written "
            "before is intact: make room, or the directory writable, and give the same "
            "command again"
        ) from error

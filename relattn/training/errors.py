"""The errors of training; each message is one sentence with the fix."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from relattn.command import INTERRUPTED

EX_TEMPFAIL = 75


class WorkdirError(OSError):
    """A run directory cannot be used."""


class CheckpointError(OSError):
    """A checkpoint is missing, damaged, of another model, or cannot be written."""


class DamagedError(CheckpointError):
    """A file of a checkpoint is damaged or missing.

    Attributes:
        damage: The file and what is wrong with it.
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
        step: The update, counted from one.
    """

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


class PreemptedError(SystemExit):
    """A signal ended a run; the same call resumes it.

    It is a `SystemExit`, not an `Exception`. A signal may arrive while a file is read,
    and the reader would take an `Exception` for a damaged file. Orbax reads in
    callbacks of asyncio, which raises only `SystemExit` and `KeyboardInterrupt` from a
    callback; after any other error it would wait for the callback forever. A program
    that does not catch the error ends with its message.

    Attributes:
        step: Number of updates in the checkpoint; 0 if none was needed.
        by_hand: Whether the signal was Ctrl-C, not SIGTERM or SIGHUP.
        exit_code: The program's exit code: 130 after Ctrl-C, 75 (EX_TEMPFAIL) after
            SIGTERM and SIGHUP.
    """

    def __init__(self, message: str, step: int = 0, *, by_hand: bool = False):
        super().__init__(message)
        self.step = step
        self.by_hand = by_hand
        self.exit_code = INTERRUPTED if by_hand else EX_TEMPFAIL


@contextlib.contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Re-raises OSError as WorkdirError naming the file.

    Args:
        path: The file, or the folder of the files, in a run directory.

    Yields:
        Nothing.

    Raises:
        WorkdirError: If the body of the context raises an OSError.

    Example:
        >>> with explain_write_errors(Path("result.json")):
        ...     raise OSError(28, "No space left on device")
        Traceback (most recent call last):
        relattn.training.errors.WorkdirError: result.json cannot be written (No space \
left on device); earlier files are intact: free some space, or make the directory \
writable, and repeat the command
    """
    try:
        yield
    except OSError as error:
        raise WorkdirError(
            f"{error.filename or path} cannot be written ({error.strerror or error}); "
            "earlier files are intact: free some space, or make the directory "
            "writable, and repeat the command"
        ) from error

"""What training raises beside ValueError: each message is one sentence with the fix."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from pathlib import Path

_PACKAGE = str(Path(__file__).resolve().parents[1])


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
    """SIGTERM came, and a checkpoint was written: the same call goes on from it.

    Attributes:
        step: Number of updates in the checkpoint.
    """

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


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


USER_ERRORS = (ValueError, OSError, NonFiniteLossError)


def is_user_error(error: BaseException) -> bool:
    """True for an error that the package itself raised about its input.

    Such an error says all that a user needs; any other needs its traceback.

    Args:
        error: A caught exception.

    Returns:
        Whether its type is one of `USER_ERRORS` and a line of this package raised it.

    Example:
        >>> is_user_error(ValueError("raised nowhere"))
        False
    """
    trace: types.TracebackType | None = error.__traceback__
    if trace is None or not isinstance(error, USER_ERRORS):
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename.startswith(_PACKAGE)

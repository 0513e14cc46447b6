"""What training raises beside ValueError: each message is one sentence with the fix."""

from __future__ import annotations

import types
from pathlib import Path

_PACKAGE = str(Path(__file__).resolve().parents[1])


class WorkdirError(OSError):
    """A run directory cannot be used."""


class CheckpointError(OSError):
    """A checkpoint is missing, damaged or of another model; nothing was changed."""


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

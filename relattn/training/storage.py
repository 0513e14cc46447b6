"""What the system said when a file could not be written."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import absl.logging

# TensorStore raises ValueError("... Failed to write 9 bytes to file 3: REASON [...").
_TENSORSTORE = re.compile(r"Failed (?:to write|writing)[^[]*: ([A-Z][^:[]*\w)")


def system_error(error: BaseException | None) -> str:
    """The reason of the system that an exception, or one behind it, gives.

    Args:
        error: What was raised.

    Returns:
        For example ``"No space left on device"``; "" if the reason is another.

    Example:
        >>> system_error(OSError(28, "No space left on device"))
        'No space left on device'
        >>> system_error(ValueError("Failed to write 9 bytes to file 3: Disk full [x]"))
        'Disk full'
    """
    while error is not None:
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        found = _TENSORSTORE.search(str(error))
        if found:
            return found[1]
        error = error.__cause__ or error.__context__
    return ""


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Keeps orbax from printing the tracebacks of a failed write, which it raises too.

    Yields:
        Nothing.
    """
    _quiet_tensorstore()
    logger = absl.logging.get_absl_logger()
    logger.addFilter(_is_no_error_of_orbax)
    try:
        yield
    finally:
        logger.removeFilter(_is_no_error_of_orbax)


def _is_no_error_of_orbax(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR or "orbax" not in record.pathname


def _quiet_tensorstore() -> None:
    """The same for the other files of that write, which may fail after orbax closed."""
    if not isinstance(sys.unraisablehook, _UnlessLoopIsClosed):
        sys.unraisablehook = _UnlessLoopIsClosed(sys.unraisablehook)
    logging.getLogger("asyncio").addFilter(_is_no_failed_write)


class _UnlessLoopIsClosed:
    """A hook for all but TensorStore's calls of a loop that the first failure ended."""

    def __init__(self, hook: Callable[[Any], None]):
        self._hook = hook

    def __call__(self, unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            self._hook(unraisable)


def _is_no_failed_write(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not (error and _TENSORSTORE.search(str(error)))

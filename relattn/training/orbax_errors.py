"""Errors of orbax and TensorStore: finds their reasons, and suppresses tracebacks."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import absl.logging

# TensorStore raises ValueError("... Failed to write 9 bytes to file 3: REASON [...").
# If the folder was removed meanwhile: ValueError("NOT_FOUND: Error writing ...").
_TENSORSTORE = re.compile(
    r"Failed (?:to write|writing)[^[]*: ([A-Z][^:[]*\w)|^NOT_FOUND: "
)


def system_error(error: BaseException | None) -> str:
    """Returns the system's reason for an error, or for one of its causes.

    Args:
        error: The error.

    Returns:
        For example ``"No space left on device"``; "" if it is not an error of the
        system.

    Example:
        >>> system_error(OSError(28, "No space left on device"))
        'No space left on device'
        >>> system_error(ValueError("Failed to write 9 bytes to file 3: Disk full [x]"))
        'Disk full'
        >>> system_error(ValueError('NOT_FOUND: Error writing "w/0.0" in database'))
        'No such file or directory'
    """
    while error is not None:
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        found = _TENSORSTORE.search(str(error))
        if found:
            return found[1] or os.strerror(errno.ENOENT)
        error = error.__cause__ or error.__context__
    return ""


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Suppresses the tracebacks that orbax prints for errors that it also raises.

    Yields:
        Nothing.
    """
    _quiet_tensorstore()
    logger = absl.logging.get_absl_logger()
    logger.addFilter(_is_not_orbax_error)
    try:
        yield
    finally:
        logger.removeFilter(_is_not_orbax_error)


def _is_not_orbax_error(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR or "orbax" not in record.pathname


def _quiet_tensorstore() -> None:
    """Suppresses errors of other files of a failed write, after orbax has closed."""
    if not isinstance(sys.unraisablehook, _IgnoreClosedLoop):
        sys.unraisablehook = _IgnoreClosedLoop(sys.unraisablehook)
    logging.getLogger("asyncio").addFilter(_is_not_failed_write)


class _IgnoreClosedLoop:
    """Ignores TensorStore's calls of an event loop that the first failure closed."""

    def __init__(self, hook: Callable[[Any], None]):
        self._hook = hook

    def __call__(self, unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            self._hook(unraisable)


def _is_not_failed_write(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not (error and _TENSORSTORE.search(str(error)))

"""What the system said when a file could not be written."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Iterator
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
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        # TensorStore calls an event loop that ended with the first of several failures.
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = hook
    logger = absl.logging.get_absl_logger()
    logger.addFilter(_is_no_error_of_orbax)
    try:
        yield
    finally:
        logger.removeFilter(_is_no_error_of_orbax)
        sys.unraisablehook = before


def _is_no_error_of_orbax(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR or "orbax" not in record.pathname

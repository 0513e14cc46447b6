"""SIGTERM, handled for as long as something runs."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def on_sigterm(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Handles SIGTERM by a function; afterwards by what handled it before.

    Only in the main thread: signals are its own, and elsewhere nothing changes.

    Args:
        handler: Called with the signal's number and the frame that it interrupted.

    Yields:
        Nothing.

    Example:
        >>> with on_sigterm(lambda number, frame: print(f"signal {number}")):
        ...     signal.raise_signal(signal.SIGTERM)
        signal 15
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        # None stands for a handler that was not installed from Python.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)

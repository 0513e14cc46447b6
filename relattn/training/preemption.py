"""Handles SIGTERM, SIGHUP and Ctrl-C during training."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from relattn.training.errors import PreemptedError

# What ends a process from outside; a terminal that closes sends SIGHUP.
ENDING = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)
)


@contextlib.contextmanager
def on_signals(handler: Callable[[int, Any], None], *numbers: int) -> Iterator[None]:
    """Installs a signal handler in a context, and the previous one afterwards.

    Only the main thread can handle signals; in another thread nothing changes. A signal
    that the process ignores stays ignored, such as SIGHUP under ``nohup``.

    Args:
        handler: Called with the signal's number and the interrupted frame.
        *numbers: The signals' numbers.

    Yields:
        Nothing.

    Example:
        >>> with on_signals(lambda number, _: print(f"got {number}"), signal.SIGTERM):
        ...     signal.raise_signal(signal.SIGTERM)
        got 15
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, handler)
        for number in numbers
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, old in before.items():
            # None is a handler that was not installed from Python.
            signal.signal(number, signal.SIG_DFL if old is None else old)


class Preemption:
    """Ends a run after SIGTERM or SIGHUP, or after Ctrl-C during its updates.

    Inside `updates`, a signal is only recorded, so that the run can end after the
    current update, with a checkpoint; a second Ctrl-C interrupts immediately. Elsewhere
    there is nothing to save, and SIGTERM or SIGHUP ends the run immediately.

    Attributes:
        handles: Whether to handle signals; if not, SIGHUP is passed on as SIGTERM.
        received: The name of the recorded signal, or "".

    Example:
        >>> preemption = Preemption()
        >>> with preemption.handled(), preemption.updates():
        ...     signal.raise_signal(signal.SIGTERM)
        >>> preemption.received
        'SIGTERM'
    """

    def __init__(self, *, handles: bool = True):
        self.handles = handles
        self.received = ""

    def handled(self) -> contextlib.AbstractContextManager[None]:
        """Raises `PreemptedError` in the context on SIGTERM and SIGHUP."""
        if not self.handles:
            return on_signals(_pass_on, *ENDING[1:])
        return self._on(self._raise, *ENDING)

    def updates(self) -> contextlib.AbstractContextManager[None]:
        """Records the name of the first signal received in the context."""
        return self._on(self._record, *ENDING, signal.SIGINT)

    def _on(
        self, handler: Callable[[int, Any], None], *numbers: int
    ) -> contextlib.AbstractContextManager[None]:
        if not self.handles:
            return contextlib.nullcontext()
        return on_signals(handler, *numbers)

    def _raise(self, number: int, frame: Any) -> None:
        # Also record it: an error inside a callback of a library may be lost.
        self.received = signal.Signals(number).name
        raise PreemptedError(
            f"Stopped by {self.received} outside of the updates; nothing is lost: "
            "repeat the command to resume"
        )

    def _record(self, number: int, frame: Any) -> None:
        self.received = self.received or signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)


def _pass_on(number: int, frame: Any) -> None:
    signal.raise_signal(signal.SIGTERM)

"""SIGTERM and Ctrl-C, handled for as long as something runs."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from relattn.training.errors import PreemptedError


@contextlib.contextmanager
def on_signals(handler: Callable[[int, Any], None], *numbers: int) -> Iterator[None]:
    """Handles signals by a function; afterwards by what handled them before.

    Only in the main thread: signals are its own, and elsewhere nothing changes.

    Args:
        handler: Called with the signal's number and the frame that it interrupted.
        *numbers: Of the signals.

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
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            # None stands for a handler that was not installed from Python.
            signal.signal(number, signal.SIG_DFL if old is None else old)


class Preemption:
    """What SIGTERM does to a run, and Ctrl-C in its updates.

    In `updates` both only leave a note, so that the run can end after the update under
    way, with a checkpoint; a second Ctrl-C interrupts at once. Elsewhere there is
    nothing to save, and SIGTERM ends the run where it is.

    Attributes:
        handles: Whether it handles signals at all.
        came: The name of the signal that came in the updates, or "".

    Example:
        >>> preemption = Preemption()
        >>> with preemption.handled(), preemption.updates():
        ...     signal.raise_signal(signal.SIGINT)
        >>> preemption.came
        'SIGINT'
    """

    def __init__(self, *, handles: bool = True):
        self.handles = handles
        self.came = ""

    def handled(self) -> contextlib.AbstractContextManager[None]:
        """Ends what runs in the context by `PreemptedError` when SIGTERM comes."""
        return self._on(self._leave, signal.SIGTERM)

    def updates(self) -> contextlib.AbstractContextManager[None]:
        """Keeps the name of the first signal that comes in the context."""
        return self._on(self._note, signal.SIGTERM, signal.SIGINT)

    def _on(
        self, handler: Callable[[int, Any], None], *numbers: int
    ) -> contextlib.AbstractContextManager[None]:
        if not self.handles:
            return contextlib.nullcontext()
        return on_signals(handler, *numbers)

    def _leave(self, number: int, frame: Any) -> None:
        # JAX swallows errors while it reads its compilation cache: leave a note too.
        self.came = signal.Signals(number).name
        raise PreemptedError(
            f"{self.came} came outside of the updates; nothing is "
            "lost: the same command goes on"
        )

    def _note(self, number: int, frame: Any) -> None:
        self.came = self.came or signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)

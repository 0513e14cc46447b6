"""A trace of a few updates, written by `jax.profiler`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import jax

from relattn.messages import shorten
from relattn.offsets import is_whole
from relattn.training.errors import explain_write_errors

# The first updates compile, and fill the queue of batches.
UNTRACED = 3


class Profiler:
    """Traces updates of a run, from the fourth after its start on.

    Attributes:
        folder: The folder to write to, which TensorBoard and Perfetto can show.
        num_steps: Number of updates to trace; 0 for none.
    """

    def __init__(self, folder: Path, num_steps: int):
        self.folder = folder
        self.num_steps = num_steps
        self._tracing = False

    def check(self, updates: int) -> None:
        """Checks that the updates that are left suffice.

        Raises:
            ValueError: If the number of updates to trace is not a whole number, or is
                negative or too large.
        """
        if not is_whole(self.num_steps) or self.num_steps < 0:
            raise ValueError(
                "profile must be a whole number of at least 0, got "
                f"{shorten(self.num_steps)}"
            )
        if self.num_steps and updates < UNTRACED + self.num_steps:
            raise ValueError(
                f"profile={self.num_steps} needs {UNTRACED + self.num_steps} updates, "
                f"but the run has {updates} left: trace fewer, or train longer"
            )

    def update(
        self, step: int, done: int, state: Any
    ) -> contextlib.AbstractContextManager[Any]:
        """Starts or ends the trace where it is due, before an update.

        Args:
            step: Number of the update, from 1 on.
            done: Number of updates since the run started or resumed.
            state: The state after them, which a trace waits for.

        Returns:
            A context for the update, which names it in the trace.
        """
        if self.num_steps and done == UNTRACED:
            jax.block_until_ready(state)
            jax.profiler.start_trace(self.folder)
            self._tracing = True
        elif done == UNTRACED + self.num_steps:
            self.stop(state)
        if not self._tracing:
            return contextlib.nullcontext()
        return jax.profiler.StepTraceAnnotation("update", step_num=step)

    def stop(self, state: Any) -> None:
        """Ends the trace if it runs, and writes it."""
        if not self._tracing:
            return
        self._tracing = False
        jax.block_until_ready(state)
        with explain_write_errors(self.folder):
            jax.profiler.stop_trace()

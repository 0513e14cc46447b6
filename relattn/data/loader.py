"""Training batches, made ahead of time by a thread."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

from relattn.data.batches import Batch


class Loader:
    """Iterates for ever over (step, batch), from any step on.

    It has no state but the step: a loader started at step s yields what any other
    yields from s on.

    Args:
        make_batch: the batch of a step, a pure function of the step; run in the thread.
        start_step: the first step.
        place: applied to each batch in the thread, for instance to send it to a device.
        ahead: batches prepared in advance.

    Example:
        >>> import numpy as np
        >>> with Loader(lambda step: {"label": np.full(3, step)}, 5) as loader:
        ...     step, batch = next(loader)
        >>> step, batch["label"].tolist()
        (5, [5, 5, 5])
    """

    def __init__(
        self,
        make_batch: Callable[[int], Batch],
        start_step: int = 0,
        *,
        place: Callable[[Batch], Any] | None = None,
        ahead: int = 2,
    ):
        self._make_batch = make_batch
        self._place = place
        self._next_step = start_step
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        self._pending = deque()
        for _ in range(ahead + 1):
            self._submit()

    def _submit(self) -> None:
        step = self._next_step
        self._pending.append((step, self._thread.submit(self._make, step)))
        self._next_step += 1

    def _make(self, step: int) -> Any:
        batch = self._make_batch(step)
        return batch if self._place is None else self._place(batch)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return self

    def __next__(self) -> tuple[int, Any]:
        """Returns the next step and its batch."""
        step, future = self._pending.popleft()
        batch = future.result()
        self._submit()
        return step, batch

    def close(self) -> None:
        """Stops the thread; the loader cannot be used after."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "Loader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

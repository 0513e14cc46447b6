"""Training batches, gathered ahead of time by a thread."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

from relattn.data.batches import Batch, batch_indices, gather, steps_per_epoch
from relattn.data.images import ImageSplit


class Loader:
    """Iterates for ever over (step, batch), from any step on.

    It has no state but the step: a loader started at step s yields what any other of
    the same seed yields from s on.

    Args:
        split: the training images.
        batch_size: examples in a batch; the remainder of an epoch is dropped.
        seed: of the order of the examples.
        start_step: the first step.
        place: applied to each batch in the thread, for instance to send it to a device.
        ahead: batches prepared in advance.

    Raises:
        ValueError: there are fewer examples than a batch needs.

    Example:
        >>> import numpy as np
        >>> images, labels = np.zeros((7, 2, 2, 1), np.uint8), np.arange(7, dtype="i4")
        >>> with Loader(ImageSplit(images, labels), batch_size=3, seed=0) as loader:
        ...     step, batch = next(loader)
        >>> step, batch["image"].shape, batch["label"].dtype
        (0, (3, 2, 2, 1), dtype('int32'))
    """

    def __init__(
        self,
        split: ImageSplit,
        batch_size: int,
        seed: int,
        start_step: int = 0,
        *,
        place: Callable[[Batch], Any] | None = None,
        ahead: int = 2,
    ):
        self.steps_per_epoch = steps_per_epoch(len(split), batch_size)
        self._split = split
        self._batch_size = batch_size
        self._seed = seed
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
        indices = batch_indices(len(self._split), self._batch_size, self._seed, step)
        batch = gather(self._split, indices)
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

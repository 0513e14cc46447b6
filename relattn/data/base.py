"""What training asks of a data set: the protocol that every source implements.

A batch is a dictionary of arrays that share their first axis. Images have ``image``
[batch, h, w, c], uint8 as stored, and ``label`` [batch]; text has ``tokens``
[batch, n], int32, and ``label`` [batch, n], the next tokens. Evaluation adds
``weight``, float32 of the shape of ``label``, which is 0 where a label counts for
nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64


@dataclasses.dataclass(frozen=True)
class ImageInfo:
    """What a model needs to know of the images that it was trained on.

    Attributes:
        name: of the set.
        class_names: in the order of the labels.
        image_shape: height, width and channels as stored in a batch.
        mean: of the training images by channel, of values in [0, 1].
        std: their standard deviation.
        num_train: number of training images.
        origin: a sentence that says where the images came from.
        kind: always "images".
    """

    name: str
    class_names: tuple[str, ...]
    image_shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_train: int
    origin: str
    kind: str = "images"

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.class_names)

    @property
    def labels(self) -> tuple[Any, ...]:
        """What labels mean; data with other ones are another task."""
        return self.class_names

    def describe_labels(self) -> str:
        """Says in a few words what labels mean."""
        names = self.class_names
        return f"{len(names)} classes ({names[0]!r} to {names[-1]!r})"

    def steps_per_epoch(self, batch_size: int) -> int:
        """Updates in an epoch; ValueError if there are too few images for one."""
        return steps_per_epoch(self.num_train, batch_size)


@dataclasses.dataclass(frozen=True)
class TextInfo:
    """What a model needs to know of the text that it was trained on.

    Attributes:
        name: of the text.
        tokenizer: its name, for instance "bytes" or "gpt2".
        vocab_size: number of different tokens.
        context_length: tokens in a window.
        num_train: windows in what counts as an epoch.
        origin: a sentence that says where the text came from.
        kind: always "tokens".
    """

    name: str
    tokenizer: str
    vocab_size: int
    context_length: int
    num_train: int
    origin: str
    kind: str = "tokens"

    @property
    def labels(self) -> tuple[Any, ...]:
        """What labels mean; data with other ones are another task."""
        return (self.tokenizer, self.vocab_size)

    def describe_labels(self) -> str:
        """Says in a few words what labels mean."""
        return f"the {self.vocab_size:,} tokens of {self.tokenizer!r}"

    def steps_per_epoch(self, batch_size: int) -> int:
        """Updates in an epoch; ValueError if it has too few windows for one."""
        return steps_per_epoch(self.num_train, batch_size, "windows")


DataInfo = ImageInfo | TextInfo
INFOS = {"images": ImageInfo, "tokens": TextInfo}


def read_info(values: Mapping[str, Any]) -> DataInfo:
    """Reads what `dataclasses.asdict` gave, after JSON made lists of tuples.

    Args:
        values: of an `ImageInfo`, which may lack its ``kind``, or of a `TextInfo`.

    Returns:
        The description.

    Example:
        >>> info = TextInfo("plays", "bytes", 256, 7, 100, "a file")
        >>> read_info(dataclasses.asdict(info)) == info
        True
    """
    arguments = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return INFOS[arguments.get("kind", "images")](**arguments)


@runtime_checkable
class EvalSplit(Protocol):
    """Examples to evaluate on."""

    def __len__(self) -> int:
        """Number of examples: images, or windows of text; perhaps none."""

    def batches(
        self, batch_size: int, part: tuple[int, int] = (0, 1)
    ) -> Iterator[Batch]:
        """Yields every example once, in batches of one fixed size with ``weight``.

        Examples that only fill the last batch up have weight 0, see `fill_batch`. Of
        several processes each asks for its ``part`` of every batch, see `part_rows`.
        """


@runtime_checkable
class DataSource(Protocol):
    """A data set, ready for training.

    Attributes:
        info: what a model needs to know of it; JSON can hold its fields.
        eval_splits: "validation" and "test", and perhaps more test sets, named
            "test_...".
    """

    @property
    def info(self) -> DataInfo:
        """What a model needs to know of the data."""

    @property
    def eval_splits(self) -> Mapping[str, EvalSplit]:
        """The splits to evaluate on by name."""

    def train_loader(
        self,
        batch_size: int,
        seed: int,
        start_step: int = 0,
        place: Callable[[Batch], Any] | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> AbstractContextManager[Iterator[tuple[int, Any]]]:
        """Iterates for ever over (step, batch), from any step on.

        The batch of a step is a pure function of the arguments, so that a run resumes
        exactly; `Loader` is such an iterator for sources that make a batch from its
        step.

        Args:
            batch_size: examples in a batch.
            seed: of the order of the examples, and of what else is drawn.
            start_step: the first step.
            place: applied to each batch ahead of time, for instance to send it to a
                device; what it returns is yielded.
            part: of each batch to read, see `relattn.data.base.part_rows`.
        """


Batch = dict[str, np.ndarray]
# Some seeds may train together, each in an epoch's order of its own.
CACHED_EPOCHS = 8


def batch_indices(
    num_examples: int, batch_size: int, seed: int, step: int
) -> Int64[np.ndarray, "{batch_size}"]:
    """Returns the examples of the batch of a training step.

    Every epoch, ``num_examples // batch_size`` steps, visits the examples in an order
    of its own; the remainder that does not fill a batch waits for another epoch.

    Args:
        num_examples: size of the training split.
        batch_size: examples in a batch.
        seed: of the orders.
        step: of training, from 0.

    Returns:
        [batch_size], all different.

    Raises:
        ValueError: there are fewer examples than a batch needs.

    Example:
        >>> first = batch_indices(7, 3, seed=0, step=0)
        >>> second = batch_indices(7, 3, seed=0, step=1)
        >>> len({*first.tolist(), *second.tolist()})
        6
    """
    epoch, place = divmod(step, steps_per_epoch(num_examples, batch_size))
    order = _order(num_examples, seed, epoch)
    return order[place * batch_size : (place + 1) * batch_size]


def steps_per_epoch(num_examples: int, batch_size: int, unit: str = "images") -> int:
    """Returns the number of whole batches in an epoch.

    Args:
        num_examples: in an epoch.
        batch_size: examples in a batch.
        unit: what an example is, for the message.

    Raises:
        ValueError: there are fewer examples than a batch needs.
    """
    if not 1 <= batch_size <= num_examples:
        raise ValueError(
            f"batch_size={batch_size} with {num_examples} training {unit}: it must be "
            f"between 1 and {num_examples}."
        )
    return num_examples // batch_size


@functools.lru_cache(maxsize=CACHED_EPOCHS)
def _order(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    order = np.random.default_rng([seed, epoch]).permutation(num_examples)
    order.setflags(write=False)
    return order


def part_rows(batch_size: int, part: tuple[int, int]) -> slice:
    """Returns the rows of a batch that one of several processes reads.

    Args:
        batch_size: examples in the batch of all processes.
        part: its index and the number of parts, equal and one after the other.

    Raises:
        ValueError: the batch does not divide by the number of parts.

    Example:
        >>> part_rows(6, part=(1, 2))
        slice(3, 6, None)
    """
    index, count = part
    if batch_size % count:
        raise ValueError(
            f"batch_size={batch_size} does not divide by the {count} processes that "
            "share it."
        )
    size = batch_size // count
    return slice(index * size, (index + 1) * size)


def fill_batch(batch: Batch, batch_size: int) -> Batch:
    """Fills a batch up with zeros, so that all batches have one size.

    Args:
        batch: arrays of at most `batch_size` rows.
        batch_size: rows of the result.

    Returns:
        The arrays, and "weight", float32 of the shape of "label": 1 where it is not
        there, 0 for filling.

    Example:
        >>> fill_batch({"label": np.array([3, 5])}, 3)["weight"].tolist()
        [1.0, 1.0, 0.0]
    """
    missing = batch_size - len(batch["label"])
    weight = batch.get("weight", np.ones(batch["label"].shape, np.float32))
    return {
        key: np.pad(value, [(0, missing)] + [(0, 0)] * (value.ndim - 1))
        for key, value in {**batch, "weight": weight}.items()
    }


def check_eval_batch(batch_size: int) -> None:
    """Raises ValueError unless a batch of evaluation has an example."""
    if batch_size < 1:
        raise ValueError(f"eval batch_size={batch_size}: it must be at least 1.")


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

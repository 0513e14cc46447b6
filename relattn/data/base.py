"""The data protocol: what a data set offers to training and evaluation.

A batch is a dictionary of arrays that share their first axis. A batch of images has
``image``, uint8 as stored, shape ``[batch, height, width, channels]``, and ``label``,
shape ``[batch]``. Volumes, such as videos, are images with an axis of frames before the
height. A batch of text has ``tokens``, int32, and ``label``, the next tokens, both of
shape ``[batch, n]``. A batch of sets of points has ``points``, float32, positions and
features, shape ``[batch, n, axes + channels]``, NaN for padding, and ``label``, shape
``[batch]``. Evaluation adds ``weight``, float32 in the shape of ``label``: labels of
weight 0 do not count. Training counts all labels, and refuses a ``weight``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64

from relattn.json_files import DATA, check_json
from relattn.messages import check_choice, shorten

Batch = dict[str, np.ndarray]
# Number of epochs whose draws are cached: several seeds may train together.
CACHED_EPOCHS = 8


class ShardIndex(NamedTuple):
    """The shard of every batch that one of several processes reads.

    Attributes:
        index: Index of the shard, from 0.
        count: Number of shards.
    """

    index: int
    count: int


ONE_SHARD = ShardIndex(0, 1)


@runtime_checkable
class DataSource(Protocol):
    """A data set, ready for training.

    Attributes:
        info: Description of the data; its fields can be written as JSON.
        eval_splits: ``"validation"`` and ``"test"``, and optionally more test sets,
            named ``"test_..."``.
    """

    @property
    def info(self) -> DataInfo:
        """Describes the data to the model."""
        ...

    @property
    def eval_splits(self) -> Mapping[str, EvalSplit]:
        """Returns the evaluation splits by name."""
        ...

    def train_loader(
        self,
        batch_size: int,
        seed: int,
        start_step: int = 0,
        place: Callable[[Batch], Any] | None = None,
        shard: ShardIndex = ONE_SHARD,
    ) -> AbstractContextManager[Iterator[tuple[int, Any]]]:
        """Iterates over (step, batch) without end, starting at any step.

        The batch of a step is a pure function of the arguments, so a run resumes
        exactly. `Loader` is such an iterator for sources that compute a batch from its
        step.

        Args:
            batch_size: Number of examples in a batch.
            seed: Seed of the example order and of all other random draws.
            start_step: First step.
            place: Function applied to each batch ahead of time, for example a transfer
                to a device; its result is yielded instead.
            shard: Shard of each batch to read, see `relattn.data.base.shard_rows`.
        """
        ...


@runtime_checkable
class EvalSplit(Protocol):
    """Examples to evaluate on."""

    def __len__(self) -> int:
        """Returns the number of examples: images, or windows of text; may be 0."""
        ...

    def batches(
        self, batch_size: int, shard: ShardIndex = ONE_SHARD
    ) -> Iterator[Batch]:
        """Yields every example once, in batches of one fixed size with ``weight``.

        Padding of the last batch has weight 0, see `fill_batch`. With several
        processes, each reads its ``shard`` of every batch, see `shard_rows`.
        """
        ...


class ClassInfo:
    """Base class of descriptions of data whose labels are classes."""

    # A field of every subclass.
    class_names: tuple[str, ...]

    @property
    def num_classes(self) -> int:
        """Returns the number of classes."""
        return len(self.class_names)

    @property
    def labels(self) -> tuple[Any, ...]:
        """Identifies the meaning of the labels: the class names."""
        return self.class_names

    def describe_labels(self) -> str:
        """Describes the labels in a few words."""
        names = self.class_names
        return f"{len(names)} classes ({names[0]!r} to {names[-1]!r})"


@dataclasses.dataclass(frozen=True)
class ImageInfo(ClassInfo):
    """Description of the images that a model is trained on.

    Attributes:
        name: Name of the data set.
        class_names: Class names in label order.
        image_shape: Height, width and channels as stored in a batch; for volumes
            frames, height, width and channels.
        mean: Mean of the training images per channel, values in [0, 1].
        std: Standard deviation of the training images per channel.
        num_train: Number of training images.
        origin: Where the images came from, in words.
        kind: Always ``"images"``.
        streamed: Whether the images are photographs of any size, cropped to
            ``image_shape`` when they are read.
    """

    name: str
    class_names: tuple[str, ...]
    image_shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_train: int
    origin: str
    kind: Literal["images"] = "images"
    streamed: bool = False

    def steps_per_epoch(self, batch_size: int) -> int:
        """Returns the number of updates in an epoch, see `steps_per_epoch`."""
        return steps_per_epoch(self.num_train, batch_size)


@dataclasses.dataclass(frozen=True)
class TextInfo:
    """Description of the text that a model is trained on.

    Attributes:
        name: Name of the text.
        tokenizer: Name of the tokenizer, for example ``"bytes"`` or ``"gpt2"``.
        vocab_size: Number of different tokens.
        context_length: Number of tokens in a window.
        num_train: Number of windows in an epoch.
        origin: Where the text came from, in words.
        kind: Always ``"tokens"``.
    """

    name: str
    tokenizer: str
    vocab_size: int
    context_length: int
    num_train: int
    origin: str
    kind: Literal["tokens"] = "tokens"

    @property
    def labels(self) -> tuple[Any, ...]:
        """Identifies the meaning of the labels: tokenizer and vocabulary size."""
        return (self.tokenizer, self.vocab_size)

    def describe_labels(self) -> str:
        """Describes the labels in a few words."""
        return f"the {self.vocab_size:,} tokens of {self.tokenizer!r}"

    def steps_per_epoch(self, batch_size: int) -> int:
        """Returns the number of updates in an epoch, see `steps_per_epoch`."""
        return steps_per_epoch(self.num_train, batch_size, "windows")


@dataclasses.dataclass(frozen=True)
class PointInfo(ClassInfo):
    """Description of the sets of points that a model is trained on.

    Attributes:
        name: Name of the data.
        class_names: Class names in label order.
        point_shape: Number of points of a set, of axes of a position, and of channels.
        num_train: Number of training sets.
        origin: Where the points came from, in words.
        kind: Always ``"points"``.
    """

    name: str
    class_names: tuple[str, ...]
    point_shape: tuple[int, ...]
    num_train: int
    origin: str
    kind: Literal["points"] = "points"

    def steps_per_epoch(self, batch_size: int) -> int:
        """Returns the number of updates in an epoch, see `steps_per_epoch`."""
        return steps_per_epoch(self.num_train, batch_size, "sets of points")


DataInfo = ImageInfo | TextInfo | PointInfo
INFOS = {"images": ImageInfo, "tokens": TextInfo, "points": PointInfo}


def read_info(values: Mapping[str, Any]) -> DataInfo:
    """Restores a description from `dataclasses.asdict` after a round trip through JSON.

    Args:
        values: Fields of an `ImageInfo`, optionally without ``kind``, of a `TextInfo`,
            or of a `PointInfo`. Lists are converted to tuples.

    Returns:
        The description.

    Raises:
        ValueError: If the kind of data is unknown, or a field has another type or is
            out of range.
        TypeError: If a field is missing or unknown.

    Example:
        >>> info = TextInfo("plays", "bytes", 256, 7, 100, "a file")
        >>> read_info(dataclasses.asdict(info)) == info
        True
    """
    arguments: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
    }
    kind = arguments.get("kind", "images")
    check_choice("kind of data", kind, INFOS)
    where = "the description of the data"
    # Missing fields are for the class to refuse.
    schema = {f"{name.removesuffix('?')}?": each for name, each in DATA[kind].items()}
    fields = {k: list(v) if isinstance(v, tuple) else v for k, v in arguments.items()}
    check_json(fields, schema, where)
    if fields.get("class_names") == []:
        raise ValueError(f"{where} has no class_names")
    return INFOS[kind](**arguments)


def batch_indices(
    num_examples: int, batch_size: int, seed: int, step: int
) -> Int64[np.ndarray, " {batch_size}"]:
    """Returns the indices of the examples in the batch of a training step.

    An epoch has ``num_examples // batch_size`` steps and visits the examples in a
    random order that differs between epochs. It leaves out the remainder that does not
    fill a batch.

    Args:
        num_examples: Size of the training split.
        batch_size: Number of examples in a batch.
        seed: Seed of the orders.
        step: Training step, from 0.

    Returns:
        Indices, all different, shape ``[batch_size]``.

    Raises:
        ValueError: If there are fewer examples than a batch needs.

    Example:
        >>> first = batch_indices(7, 3, seed=0, step=0)
        >>> second = batch_indices(7, 3, seed=0, step=1)
        >>> len({*first.tolist(), *second.tolist()})
        6
    """
    epoch, position = divmod(step, steps_per_epoch(num_examples, batch_size))
    order = _epoch_order(num_examples, seed, epoch)
    return order[position * batch_size : (position + 1) * batch_size]


def steps_per_epoch(num_examples: int, batch_size: int, unit: str = "images") -> int:
    """Returns the number of whole batches in an epoch.

    Args:
        num_examples: Number of examples in an epoch.
        batch_size: Number of examples in a batch.
        unit: What an example is, for the error message.

    Returns:
        The number of batches; a remainder that does not fill a batch is left out.

    Raises:
        ValueError: If there are fewer examples than a batch needs.

    Example:
        >>> steps_per_epoch(7, 3)
        2
    """
    if not 1 <= batch_size <= num_examples:
        raise ValueError(
            f"batch_size={batch_size} must be from 1 to {num_examples}, the number of "
            f"training {unit}"
        )
    return num_examples // batch_size


@functools.lru_cache(maxsize=CACHED_EPOCHS)
def _epoch_order(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    order = np.random.default_rng([seed, epoch]).permutation(num_examples)
    order.setflags(write=False)
    return order


def shard_rows(batch_size: int, shard: ShardIndex) -> slice:
    """Returns the rows of a batch that one of several processes reads.

    Args:
        batch_size: Number of examples in the batch of all processes.
        shard: The process's shard; shards are equal and contiguous.

    Returns:
        The slice of the rows.

    Raises:
        ValueError: If ``batch_size`` is not divisible by the number of processes.

    Example:
        >>> shard_rows(6, ShardIndex(1, 2))
        slice(3, 6, None)
    """
    index, count = shard
    if batch_size % count:
        raise ValueError(
            f"batch_size={batch_size} is not divisible by {count}, the number of "
            "processes that share it: use a multiple"
        )
    size = batch_size // count
    return slice(index * size, (index + 1) * size)


def fill_batch(batch: Batch, batch_size: int) -> Batch:
    """Pads a batch with zeros, so that all batches have one size.

    Args:
        batch: Arrays of at most ``batch_size`` rows.
        batch_size: Number of rows of the result.

    Returns:
        The padded arrays and ``weight``, float32 in the shape of ``label``: 0 for
        padding, elsewhere the weight of the batch, or 1 if it has none.

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
    """Checks that an evaluation batch has at least one example.

    Args:
        batch_size: Number of examples in a batch.

    Raises:
        ValueError: If it is not an integer of at least 1.
    """
    if not isinstance(batch_size, int | np.integer) or batch_size < 1:
        raise ValueError(
            "the batch_size of an evaluation must be an integer of at least 1, got "
            f"{shorten(batch_size)}"
        )


class Loader:
    """Iterates over (step, batch) without end, preparing batches in a thread.

    The step is its only state: a loader started at step s yields what any other loader
    yields from step s on.

    Args:
        make_batch: Returns the batch of a step, a pure function of the step; called in
            the thread.
        start_step: First step.
        place: Function applied to each batch in the thread, for example a transfer to
            a device; its result is yielded instead.
        ahead: Number of batches prepared, or placed, while the caller uses one.

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
        for _ in range(ahead):
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
        self._submit()
        step, future = self._pending.popleft()
        return step, future.result()

    def close(self) -> None:
        """Stops the thread; the loader cannot be used afterwards."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

"""What training asks of a data set: the protocol that every source implements.

A batch is a dictionary of arrays that share their first axis. Images have ``image``
[batch, h, w, c], uint8 as stored, and ``label`` [batch]; text has ``tokens``
[batch, n], int32, and ``label`` [batch, n], the next tokens. Evaluation adds
``weight``, float32 of the shape of ``label``, which is 0 where a label counts for
nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from relattn.data.batches import Batch, steps_per_epoch


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
            part: of each batch to read, see `relattn.data.batches.part_rows`.
        """

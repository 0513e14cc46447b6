"""Which examples make up a batch: a pure function of the seed and the step."""

import functools
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int64

from relattn.data.images import ImageSplit

Batch = dict[str, np.ndarray]


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


def steps_per_epoch(num_examples: int, batch_size: int) -> int:
    """Returns the number of whole batches in an epoch.

    Raises:
        ValueError: there are fewer examples than a batch needs.
    """
    if not 1 <= batch_size <= num_examples:
        raise ValueError(
            f"batch_size={batch_size} with {num_examples} training images: it must be "
            f"between 1 and {num_examples}."
        )
    return num_examples // batch_size


@functools.lru_cache(maxsize=4)
def _order(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    order = np.random.default_rng([seed, epoch]).permutation(num_examples)
    order.setflags(write=False)
    return order


def gather(split: ImageSplit, indices: Int64[np.ndarray, "batch"]) -> Batch:
    """Returns the batch {"image": uint8 [batch, h, w, c], "label": int32 [batch]}."""
    return {"image": split.images[indices], "label": split.labels[indices]}


def eval_batches(split: ImageSplit, batch_size: int) -> Iterator[Batch]:
    """Yields every example once, in order, in batches of one fixed size.

    Args:
        split: n examples.
        batch_size: the last batch is filled up with black images of weight 0.

    Yields:
        {"image": uint8 [batch_size, h, w, c], "label": int32 [batch_size],
        "weight": float32 [batch_size], 1 for an example and 0 for filling}.

    Raises:
        ValueError: `batch_size` is not positive.

    Example:
        >>> images, labels = np.zeros((5, 2, 2, 1), np.uint8), np.zeros(5, np.int32)
        >>> batches = eval_batches(ImageSplit(images, labels), batch_size=3)
        >>> [batch["weight"].tolist() for batch in batches]
        [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]
    """
    if batch_size < 1:
        raise ValueError(f"eval batch_size={batch_size}: it must be at least 1.")
    for start in range(0, len(split), batch_size):
        batch = {
            "image": split.images[start : start + batch_size],
            "label": split.labels[start : start + batch_size],
        }
        batch["weight"] = np.ones(len(batch["label"]), np.float32)
        missing = batch_size - len(batch["label"])
        yield {
            key: np.pad(value, [(0, missing)] + [(0, 0)] * (value.ndim - 1))
            for key, value in batch.items()
        }

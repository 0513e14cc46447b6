"""Which examples make up a batch: a pure function of the seed and the step."""

import functools

import numpy as np
from jaxtyping import Int64

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

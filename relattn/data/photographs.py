"""Batches of photographs: read, cropped and augmented by worker processes.

The batch of a step is a pure function of the seed and the step, whatever the number of
workers. Files that TFDS prepared are read without TensorFlow.
"""

import contextlib
import dataclasses
import gc
import io
from collections.abc import Iterator, Sequence

import grain
import jax
import numpy as np
from absl import flags
from jaxtyping import Int64
from PIL import Image

from relattn import spec
from relattn.data.augment import random_flip, random_resized_crop, resized_center_crop
from relattn.data.batches import Batch, batch_indices, fill_batch, part_rows
from relattn.data.encoded_images import decode_image, open_image
from relattn.data.prepared import describe
from relattn.data.randaugment import randaugment

AUGMENTATIONS = {"none": lambda image, rng: image, "randaugment": randaugment}
# Steps are counted without end.
ENDLESS = 2**40


@dataclasses.dataclass(frozen=True, eq=False)
class Photographs:
    """Encoded images of any size with labels, read from files one by one.

    Attributes:
        records: TFDS's data source, whose images are bytes.
        indices: [n], the records that belong to it.
        num_classes: labels are below it.
        origin: where they are, for messages.
    """

    records: Sequence
    indices: Int64[np.ndarray, "n"]
    num_classes: int
    origin: str

    def __len__(self) -> int:
        return len(self.indices)

    def read(
        self, positions: Sequence[int] | Int64[np.ndarray, "batch"]
    ) -> Iterator[tuple[Image.Image, int]]:
        """Yields the images, decoded to RGB, with their labels.

        Args:
            positions: 0 .. n - 1.

        Raises:
            ValueError: a record or its image cannot be decoded, or its label is none of
                the classes.
        """
        hint = "prepare the set again"
        keys = self.indices[positions].tolist()
        try:
            records = self.records.__getitems__(keys)
        except Exception as error:
            # TFDS reads them together, and does not say which is damaged.
            raise ValueError(
                f"One of the records {', '.join(map(str, keys))} of {self.origin} "
                f"cannot be read ({describe(error)}): {hint}."
            ) from error
        for key, record in zip(keys, records, strict=True):
            where, label = f"Record {key} of {self.origin}", int(record["label"])
            if not 0 <= label < self.num_classes:
                raise ValueError(
                    f"{where} has the label {label}, expected 0 to "
                    f"{self.num_classes - 1}: {hint}."
                )
            with open_image(io.BytesIO(record["image"]), where, hint) as image:
                yield decode_image(image, "RGB", where, hint), label


@dataclasses.dataclass(frozen=True, eq=False)
class TrainBatches:
    """The training batches by step: a source of random access for grain.

    Attributes:
        photographs: to train on.
        batch_size: images in a batch.
        seed: of the order of the images and of all that is drawn.
        image_size: side of the images of a batch.
        augment: a spec of `AUGMENTATIONS`, applied after crop and flip.
        part: of each batch to make, see `part_rows`.
    """

    photographs: Photographs
    batch_size: int
    seed: int
    image_size: int
    augment: str
    part: tuple[int, int] = (0, 1)

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, step: int) -> Batch:
        augment = spec.resolve(self.augment, AUGMENTATIONS, "data.augment")
        indices = batch_indices(
            len(self.photographs), self.batch_size, self.seed, int(step)
        )
        rows = part_rows(self.batch_size, self.part)
        images, labels = [], []
        photographs = self.photographs.read(indices[rows])
        for place, (image, label) in enumerate(photographs, start=rows.start):
            # NumPy takes [seed, step] for [seed, step, 0, 0]: not the orders' stream.
            rng = np.random.default_rng([self.seed, int(step), place, 1])
            image = random_resized_crop(image, rng, self.image_size)
            image = augment(random_flip(image, rng), rng=rng)
            images.append(np.asarray(image))
            labels.append(label)
        return {"image": np.stack(images), "label": np.array(labels, np.int32)}


@dataclasses.dataclass(frozen=True, eq=False)
class EvalBatches:
    """The batches of an evaluation by number: a source of random access for grain.

    Attributes:
        photographs: to evaluate on.
        batch_size: images in a batch.
        image_size: side of the central crop.
        short_side: of an image before the crop.
        part: of each batch to make, see `part_rows`.
    """

    photographs: Photographs
    batch_size: int
    image_size: int
    short_side: int
    part: tuple[int, int] = (0, 1)

    def __len__(self) -> int:
        return -(-len(self.photographs) // self.batch_size)

    def __getitem__(self, number: int) -> Batch:
        start = int(number) * self.batch_size
        own = part_rows(self.batch_size, self.part)
        stop = min(start + own.stop, len(self.photographs))
        images, labels = [], []
        for image, label in self.photographs.read(range(start + own.start, stop)):
            crop = resized_center_crop(image, self.image_size, self.short_side)
            images.append(np.asarray(crop))
            labels.append(label)
        # A part of the last batch may be empty.
        shape = (-1, self.image_size, self.image_size, 3)
        batch = {
            "image": np.array(images, np.uint8).reshape(shape),
            "label": np.array(labels, np.int32),
        }
        return fill_batch(batch, own.stop - own.start)


@contextlib.contextmanager
def read_batches(
    batches: TrainBatches | EvalBatches, num_workers: int, start: int = 0
) -> Iterator[Iterator[Batch]]:
    """Iterates over batches in order, made ahead of time.

    Args:
        batches: by their number.
        num_workers: processes that make them; 0 for one thread of this process.
        start: the first number.

    Yields:
        The iterator; the workers end with the context.
    """
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
    dataset = grain.MapDataset.source(batches)[start:].to_iter_dataset(options)
    if num_workers:
        if not flags.FLAGS.is_parsed():
            # grain reads flags of its own, which in a notebook nobody parses.
            flags.FLAGS.mark_as_parsed()
        # A worker makes every num_workers-th batch.
        dataset = dataset.mp_prefetch(
            grain.MultiprocessingOptions(num_workers), worker_init_fn=_leave_devices
        )
    iterator = iter(dataset)
    try:
        yield map(_copy, iterator)
    finally:
        iterator.close()
        if num_workers:
            # A worker's last batch hangs in a reference cycle of grain's: its shared
            # memory would stay until the next collection.
            gc.collect()


def _copy(batch: Batch) -> Batch:
    """Frees the workers' shared memory at once."""
    return {key: np.array(value) for key, value in batch.items()}


def _leave_devices(worker: int, num_workers: int) -> None:
    """Keeps a worker process from claiming an accelerator, whatever it imports."""
    del worker, num_workers
    jax.config.update("jax_platforms", "cpu")

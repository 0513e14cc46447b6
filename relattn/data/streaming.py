"""Photographs too many for memory, read from files as training goes on."""

import contextlib
import dataclasses
import gc
import io
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import grain
import jax
import numpy as np
import tensorflow_datasets as tfds
from absl import flags
from jaxtyping import Int64
from ml_collections import ConfigDict
from PIL import Image

from relattn import spec
from relattn.data.base import (
    Batch,
    EvalSplit,
    ImageInfo,
    Loader,
    batch_indices,
    check_eval_batch,
    fill_batch,
    part_rows,
    steps_per_epoch,
)
from relattn.data.image_io import decode_image, open_image
from relattn.data.image_transforms import (
    randaugment,
    random_flip,
    random_resized_crop,
    resized_center_crop,
)
from relattn.data.images import draw_validation
from relattn.data.paths import describe_error
from relattn.data.tfds import open_builder, origin_of, reading_prepared

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
                f"cannot be read ({describe_error(error)}): {hint}."
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


# Of ImageNet's training images: usual for any set of photographs.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclasses.dataclass(frozen=True, eq=False)
class StreamedSplit:
    """Photographs to evaluate on: an `EvalSplit`.

    Attributes:
        photographs: all of them.
        image_size: side of the central crop.
        short_side: of an image before the crop.
        num_workers: processes that read them.
    """

    photographs: Photographs
    image_size: int
    short_side: int
    num_workers: int

    def __len__(self) -> int:
        return len(self.photographs)

    def batches(
        self, batch_size: int, part: tuple[int, int] = (0, 1)
    ) -> Iterator[Batch]:
        """Yields every central crop once, in order, in batches of one fixed size.

        Args:
            batch_size: the last batch is filled up with black images of weight 0.
            part: of each batch to yield, see `part_rows`.

        Yields:
            As `ImageSplit.batches`.

        Raises:
            ValueError: `batch_size` is not positive, or an image cannot be decoded.
        """
        check_eval_batch(batch_size)
        source = EvalBatches(
            self.photographs, batch_size, self.image_size, self.short_side, part
        )
        with read_batches(source, self.num_workers) as batches:
            yield from batches


@dataclasses.dataclass(frozen=True, eq=False)
class StreamedImages:
    """Photographs read as they are needed, ready for training: a `DataSource`.

    Attributes:
        info: what a model needs to know of them.
        train: photographs to train on.
        eval_splits: "validation" and "test".
        augment: a spec of `AUGMENTATIONS`.
        num_workers: processes that read.
    """

    info: ImageInfo
    train: Photographs
    eval_splits: Mapping[str, EvalSplit]
    augment: str
    num_workers: int

    @contextlib.contextmanager
    def train_loader(
        self,
        batch_size: int,
        seed: int,
        start_step: int = 0,
        place: Callable[[Batch], Any] | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> Iterator[Loader]:
        """Iterates over the batches of training, see `DataSource.train_loader`.

        Raises:
            ValueError: there are fewer images than a batch needs.
        """
        steps_per_epoch(len(self.train), batch_size)
        image_size = self.info.image_shape[0]
        source = TrainBatches(
            self.train, batch_size, seed, image_size, self.augment, part
        )
        with (
            read_batches(source, self.num_workers, start_step) as batches,
            # The loader asks for every step once and in order, as they come.
            Loader(lambda step: next(batches), start_step, place=place) as loader,
        ):
            yield loader


def open_streamed(
    config: ConfigDict, folder: pathlib.Path, test_split: str
) -> StreamedImages:
    """Opens a prepared set of photographs.

    Args:
        config: of the data, see `load_data`.
        folder: ``<data_dir>/<name>/<version>``, written with
            ``file_format="array_record"``.
        test_split: the split that serves as test images.

    Returns:
        The set; the first image of each split was decoded.

    Raises:
        ValueError: a key has a value that makes no sense, or the folder is incomplete,
            damaged or in another file format.
    """
    size, short_side, augment, num_workers = _check(config)
    with reading_prepared(folder):
        builder = open_builder(folder)
        class_names = tuple(builder.info.features["label"].names)
        train, test = (
            _open_split(builder, split, folder) for split in ("train", test_split)
        )
    chosen = draw_validation(
        len(train), config.get("num_validation", 0), config.get("split_seed", 0)
    )
    validation = dataclasses.replace(train, indices=train.indices[chosen])
    train = dataclasses.replace(train, indices=np.delete(train.indices, chosen))
    info = ImageInfo(
        name=config.name,
        class_names=class_names,
        image_shape=(size, size, 3),
        mean=MEAN,
        std=STD,
        num_train=len(train),
        origin=origin_of(config.name, folder),
    )
    splits = {
        name: StreamedSplit(photographs, size, short_side, num_workers)
        for name, photographs in (("validation", validation), ("test", test))
    }
    return StreamedImages(info, train, splits, augment, num_workers)


def _check(config: ConfigDict) -> tuple[int, int, str, int]:
    """Returns image_size, short_side, augment and num_workers of a configuration."""
    size, num_workers = config.get("image_size", 224), config.get("num_workers", 0)
    short_side = config.get("short_side", 0) or round(size * 256 / 224)
    if not 1 <= size <= short_side:
        raise ValueError(
            f"data.image_size={size} with data.short_side={short_side}: it must be at "
            "least 1 and at most the short side that images are resized to."
        )
    if num_workers < 0:
        raise ValueError(f"data.num_workers={num_workers}: it must be at least 0.")
    augment = config.get("augment", "none")
    # Here rather than in a worker: a name or an option that does not exist.
    function = spec.resolve(
        augment, AUGMENTATIONS, "data.augment", reserved=("image", "rng")
    )
    function(Image.new("RGB", (1, 1)), rng=np.random.default_rng(0))
    return size, short_side, augment, num_workers


def _open_split(
    builder: tfds.core.DatasetBuilder, split: str, folder: pathlib.Path
) -> Photographs:
    records = builder.as_data_source(
        split, decoders={"image": tfds.decode.SkipDecoding()}
    )
    photographs = Photographs(
        records,
        indices=np.arange(len(records)),
        num_classes=builder.info.features["label"].num_classes,
        origin=f"the {split} images in {folder}",
    )
    list(photographs.read([0]))
    return photographs

"""Image sets that do not fit into memory, read from files during training."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import multiprocessing
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import grain
import jax
import numpy as np
import tensorflow_datasets as tfds
from absl import flags
from jaxtyping import Int64
from ml_collections import ConfigDict
from PIL import Image

from relattn import spec
from relattn.command import lacks_resources
from relattn.data.base import (
    ONE_SHARD,
    Batch,
    EvalSplit,
    ImageInfo,
    Loader,
    ShardIndex,
    batch_indices,
    check_eval_batch,
    fill_batch,
    shard_rows,
    steps_per_epoch,
)
from relattn.data.errors import describe_error
from relattn.data.image_io import decode_image, open_image
from relattn.data.image_list import WITHOUT_TEST, ImageList, ImageRecords
from relattn.data.image_transforms import (
    randaugment,
    random_flip,
    random_resized_crop,
    resized_center_crop,
)
from relattn.data.images import check_no_draw, draw_validation
from relattn.data.main_guard import check_main_guard
from relattn.data.registry import ImageSet
from relattn.data.tfds import (
    describe_origin,
    find_features,
    open_builder,
    reading_prepared,
)
from relattn.data.user_images import interpolation, short_side
from relattn.messages import shorten

AUGMENTATIONS = {"none": lambda image, rng: image, "randaugment": randaugment}
# Statistics of ImageNet's training images, the usual choice for photographs.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Length of the training sequence, which does not end.
NUM_STEPS = 2**40


class _Options(NamedTuple):
    """Checked options of photographs, see `load_data`."""

    image_size: int
    short_side: int
    augment: str
    num_workers: int


def open_streamed(config: ConfigDict, folder: Path, entry: ImageSet) -> StreamedImages:
    """Opens a prepared set of photographs.

    Args:
        config: Options of the data, see `load_data`.
        folder: ``<data_dir>/<name>/<version>``, written with
            ``file_format="array_record"``.
        entry: Properties of the set.

    Returns:
        The set, after decoding the first image of each split.

    Raises:
        ValueError: If an option is invalid, or the folder is incomplete, damaged or in
            another file format.
    """
    options = _read_options(config)
    with reading_prepared(folder):
        builder = open_builder(folder)
        _, label = find_features(builder, folder)
        class_names = tuple(builder.info.features[label].names)
        train, test, validation = (
            _open_split(builder, split, folder, interpolation(config))
            if split
            else None
            for split in ("train", entry.test_split, entry.validation_split)
        )
    assert train is not None
    origin = describe_origin(config.name, folder)
    return _make_streamed(
        config,
        options,
        train=train,
        validation=validation,
        test=test,
        class_names=class_names,
        origin=origin,
    )


def open_list(config: ConfigDict, listed: ImageList) -> StreamedImages:
    """Opens a list of photographs of any size.

    Args:
        config: Options of the data, see `load_data`.
        listed: The images. Without test images, the validation images are the test
            images.

    Returns:
        The photographs.

    Raises:
        ValueError: If an option is invalid.
    """
    options = _read_options(config)
    train, validation, test = (
        Photographs(
            ImageRecords(images, listed.labels(images)),
            indices=np.arange(len(images)),
            num_classes=len(listed.class_names),
            origin=f"the images of {listed.root}",
            hint="replace or delete it",
            background=config.get("background", "white"),
            interpolation=interpolation(config),
        )
        for images in listed.splits
    )
    return _make_streamed(
        config,
        options,
        train=train,
        validation=validation if listed.validation else None,
        test=test if listed.test else None,
        class_names=listed.class_names,
        origin=listed.origin,
    )


def _make_streamed(
    config: ConfigDict,
    options: _Options,
    *,
    train: Photographs,
    validation: Photographs | None,
    test: Photographs | None,
    class_names: tuple[str, ...],
    origin: str,
) -> StreamedImages:
    """Makes the data; holds out training images if there are none for validation."""
    size, side, augment, num_workers = options
    num_validation = config.get("num_validation", 0)
    if validation is None:
        chosen = draw_validation(
            len(train), num_validation, config.get("split_seed", 0)
        )
        validation = dataclasses.replace(train, indices=train.indices[chosen])
        train = dataclasses.replace(train, indices=np.delete(train.indices, chosen))
    else:
        check_no_draw(num_validation)
    info = ImageInfo(
        name=config.name,
        class_names=class_names,
        image_shape=(size, size, 3),
        mean=MEAN,
        std=STD,
        num_train=len(train),
        origin=origin + WITHOUT_TEST * (test is None),
        streamed=True,
    )
    splits = {
        name: StreamedSplit(photographs, size, side, num_workers)
        for name, photographs in (("validation", validation), ("test", test))
        if photographs is not None
    }
    splits.setdefault("test", splits["validation"])
    return StreamedImages(info, train, splits, augment, num_workers)


def _read_options(config: ConfigDict) -> _Options:
    """Reads and checks the options of photographs."""
    size, num_workers = config.get("image_size", 224), config.get("num_workers", 0)
    side = short_side(config)
    if not 1 <= size <= side:
        raise ValueError(
            f"data.image_size={size} must be at least 1 and at most data.short_side="
            f"{side}, the short side of the images that it is cropped from"
        )
    if placement := config.get("placement", ""):
        raise ValueError(
            f"data.placement={placement!r} needs images in memory, but these "
            "photographs are read during training: set data.placement=''"
        )
    if not isinstance(num_workers, int) or num_workers < 0:
        raise ValueError(
            f"data.num_workers={shorten(num_workers)} must be an integer of at least 0"
        )
    augment = config.get("augment", "none")
    # Raises on an unknown name or an invalid option here, not in a worker.
    function = spec.resolve(
        augment, AUGMENTATIONS, "data.augment", reserved=("image", "rng")
    )
    function(Image.new("RGB", (1, 1)), rng=np.random.default_rng(0))
    return _Options(int(size), side, augment, num_workers)


def _open_split(
    builder: Any, split: str, folder: Path, interpolation: str
) -> Photographs:
    image, label = find_features(builder, folder)
    records = builder.as_data_source(
        split, decoders={image: tfds.decode.SkipDecoding()}
    )
    photographs = Photographs(
        records,
        indices=np.arange(len(records)),
        num_classes=builder.info.features[label].num_classes,
        origin=f"the {split} images in {folder}",
        interpolation=interpolation,
        keys=(image, label),
    )
    list(photographs.read([0]))
    return photographs


@dataclasses.dataclass(frozen=True, eq=False)
class StreamedImages:
    """Photographs read from files when needed: a `DataSource`.

    Attributes:
        info: Description of the photographs.
        train: Photographs to train on.
        eval_splits: "validation" and "test".
        augment: A spec of `AUGMENTATIONS`.
        num_workers: Number of processes that read.
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
        shard: ShardIndex = ONE_SHARD,
    ) -> Iterator[Loader]:
        """Iterates over training batches, see `DataSource.train_loader`.

        Raises:
            ValueError: If there are fewer images than a batch needs.
        """
        steps_per_epoch(len(self.train), batch_size)
        image_size = self.info.image_shape[0]
        source = TrainBatches(
            self.train, batch_size, seed, image_size, self.augment, shard
        )
        with (
            read_batches(source, self.num_workers, start_step) as batches,
            # The loader requests every step once and in order.
            Loader(lambda step: next(batches), start_step, place=place) as loader,
        ):
            yield loader


@dataclasses.dataclass(frozen=True, eq=False)
class StreamedSplit:
    """Photographs to evaluate on: an `EvalSplit`.

    Attributes:
        photographs: The photographs of the split.
        image_size: Side of the central crop.
        short_side: Short side of an image before the crop.
        num_workers: Number of processes that read.
        margin: Number of pixels around the crop.
    """

    photographs: Photographs
    image_size: int
    short_side: int
    num_workers: int
    margin: int = 0

    def __len__(self) -> int:
        return len(self.photographs)

    def batches(
        self, batch_size: int, shard: ShardIndex = ONE_SHARD
    ) -> Iterator[Batch]:
        """Yields every central crop once, in order, in batches of one fixed size.

        Args:
            batch_size: Number of images in a batch; the last batch is padded with
                black images of weight 0.
            shard: Shard of each batch to yield, see `shard_rows`.

        Yields:
            The same batches as `ImageSplit.batches`.

        Raises:
            ValueError: If ``batch_size`` is not positive, or an image cannot be
                decoded.
        """
        check_eval_batch(batch_size)
        source = EvalBatches(
            self.photographs,
            batch_size,
            self.image_size,
            self.short_side,
            self.margin,
            shard,
        )
        with read_batches(source, self.num_workers) as batches:
            yield from batches


@dataclasses.dataclass(frozen=True, eq=False)
class Photographs:
    """Encoded images of any size with labels, read from files one by one.

    Attributes:
        records: TFDS's data source, with images as bytes, or `ImageRecords`.
        indices: Indices of the records that belong to the split, shape ``[n]``.
        num_classes: Number of classes; labels are below it.
        origin: Name of the split in error messages.
        hint: Fix at the end of error messages.
        background: Colour behind transparent pixels.
        interpolation: Name of Pillow's filter for the resize.
        keys: Names of the image and the label in a record.
    """

    records: Any
    indices: Int64[np.ndarray, " n"]
    num_classes: int
    origin: str
    hint: str = "prepare the set again"
    background: str = "white"
    interpolation: str = "bilinear"
    keys: tuple[str, str] = ("image", "label")

    def __len__(self) -> int:
        return len(self.indices)

    def read(
        self, positions: Sequence[int] | Int64[np.ndarray, " batch"]
    ) -> Iterator[tuple[Image.Image, int]]:
        """Yields the images, decoded to RGB, with their labels.

        Args:
            positions: Positions in `indices`, 0 .. n - 1.

        Raises:
            ValueError: If a record or its image cannot be decoded, or its label is out
                of range.
        """
        keys = self.indices[positions].tolist()
        try:
            records = self.records.__getitems__(keys)
        except Exception as error:
            if lacks_resources(error):
                raise
            # TFDS reads a batch of records and does not report which one is damaged.
            raise ValueError(
                f"one of the records {', '.join(map(str, keys))} of {self.origin} "
                f"cannot be read ({describe_error(error)}): {self.hint}"
            ) from error
        for key, record in zip(keys, records, strict=True):
            where = record.get("where", f"record {key} of {self.origin}")
            label = int(record[self.keys[1]])
            if not 0 <= label < self.num_classes:
                raise ValueError(
                    f"{where} has the label {label}, expected 0 to "
                    f"{self.num_classes - 1}: {self.hint}"
                )
            encoded = record[self.keys[0]]
            with open_image(io.BytesIO(encoded), where, self.hint) as image:
                image = decode_image(
                    image, where, self.hint, background=self.background
                )
            yield image.convert("RGB"), label


@dataclasses.dataclass(frozen=True, eq=False)
class TrainBatches:
    """Training batches by step: a random-access source for grain.

    Attributes:
        photographs: Photographs to train on.
        batch_size: Number of images in a batch.
        seed: Seed of the image order and of all other random draws.
        image_size: Side of the images in a batch.
        augment: A spec of `AUGMENTATIONS`, applied after crop and flip.
        shard: Shard of each batch to read, see `shard_rows`.
    """

    photographs: Photographs
    batch_size: int
    seed: int
    image_size: int
    augment: str
    shard: ShardIndex = ONE_SHARD

    def __len__(self) -> int:
        return NUM_STEPS

    def __getitem__(self, step: int) -> Batch:
        augment = spec.resolve(self.augment, AUGMENTATIONS, "data.augment")
        indices = batch_indices(
            len(self.photographs), self.batch_size, self.seed, int(step)
        )
        rows = shard_rows(self.batch_size, self.shard)
        images, labels = [], []
        photographs = self.photographs.read(indices[rows])
        for row, (image, label) in enumerate(photographs, start=rows.start):
            # The final 1 separates this stream from the order's: NumPy treats
            # [seed, epoch] like [seed, epoch, 0, 0].
            rng = np.random.default_rng([self.seed, int(step), row, 1])
            image = random_resized_crop(
                image, rng, self.image_size, self.photographs.interpolation
            )
            image = augment(random_flip(image, rng), rng=rng)
            images.append(np.asarray(image))
            labels.append(label)
        return {"image": np.stack(images), "label": np.array(labels, np.int32)}


@dataclasses.dataclass(frozen=True, eq=False)
class EvalBatches:
    """Evaluation batches by number: a random-access source for grain.

    Attributes:
        photographs: Photographs to evaluate on.
        batch_size: Number of images in a batch.
        image_size: Side of the central crop.
        short_side: Short side of an image before the crop.
        margin: Number of pixels around the crop.
        shard: Shard of each batch to read, see `shard_rows`.
    """

    photographs: Photographs
    batch_size: int
    image_size: int
    short_side: int
    margin: int = 0
    shard: ShardIndex = ONE_SHARD

    def __len__(self) -> int:
        return -(-len(self.photographs) // self.batch_size)

    def __getitem__(self, number: int) -> Batch:
        start = int(number) * self.batch_size
        local = shard_rows(self.batch_size, self.shard)
        stop = min(start + local.stop, len(self.photographs))
        images, labels = [], []
        for image, label in self.photographs.read(range(start + local.start, stop)):
            crop = resized_center_crop(
                image,
                self.image_size,
                self.short_side,
                self.margin,
                self.photographs.interpolation,
            )
            images.append(np.asarray(crop))
            labels.append(label)
        # A shard of the last batch may be empty.
        size = self.image_size + 2 * self.margin
        shape = (-1, size, size, 3)
        batch = {
            "image": np.array(images, np.uint8).reshape(shape),
            "label": np.array(labels, np.int32),
        }
        return fill_batch(batch, local.stop - local.start)


@contextlib.contextmanager
def read_batches(
    batches: TrainBatches | EvalBatches, num_workers: int, start: int = 0
) -> Iterator[Iterator[Batch]]:
    """Iterates over batches in order, computed ahead of time.

    Args:
        batches: Batches by number.
        num_workers: Number of processes that compute them; 0 uses one thread of this
            process.
        start: First number.

    Yields:
        The iterator; the workers stop when the context ends.

    Raises:
        ValueError: If a script starts processes and has no main guard.
        ChildProcessError: If one of the processes was killed.
    """
    check_main_guard(num_workers)
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
    dataset = grain.MapDataset.source(cast(Any, batches))[start:].to_iter_dataset(
        options
    )
    if num_workers:
        if not flags.FLAGS.is_parsed():
            # grain reads absl flags, which are not parsed in a notebook.
            flags.FLAGS.mark_as_parsed()
        # Each worker computes every num_workers-th batch.
        dataset = dataset.mp_prefetch(
            grain.MultiprocessingOptions(num_workers), worker_init_fn=_start_worker
        )
    iterator = iter(dataset)
    try:
        yield _copies(iterator)
    finally:
        iterator.close()
        if num_workers:
            # A reference cycle in grain holds each worker's last batch; without a
            # collection its shared memory would stay allocated.
            gc.collect()


def _copies(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Copies batches, so that the workers' shared memory is freed at once."""
    try:
        for batch in batches:
            yield {key: np.array(value) for key, value in batch.items()}
    # Ends at an error: the next batch of a worker that failed never comes.
    except RuntimeError as error:
        if "Worker process was terminated" not in str(error):
            raise
        code = "".join(re.findall(r"exit code (-?\d+)", str(error)))
        raise ChildProcessError(
            f"a process that reads images ended with exit code {code}, perhaps "
            "because memory ran out: lower data.num_workers, or batch_size, and repeat "
            "the command"
        ) from error


def _start_worker(worker: int, num_workers: int) -> None:
    """Keeps a worker process from claiming an accelerator and from staying alone."""
    del worker, num_workers
    jax.config.update("jax_platforms", "cpu")
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends a worker process after its parent, which may have been killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)

"""Photographs too many for memory, read from files as training goes on."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from ml_collections import ConfigDict
from PIL import Image

from relattn import spec
from relattn.data.batches import Batch, check_eval_batch, steps_per_epoch
from relattn.data.full import origin_of
from relattn.data.images import draw_validation
from relattn.data.loader import Loader
from relattn.data.photographs import (
    AUGMENTATIONS,
    EvalBatches,
    Photographs,
    TrainBatches,
    read_batches,
)
from relattn.data.prepared import describe, open_builder
from relattn.data.source import EvalSplit, ImageInfo

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
    try:
        builder = open_builder(folder)
        class_names = tuple(builder.info.features["label"].names)
        train, test = (
            _open_split(builder, split, folder) for split in ("train", test_split)
        )
    except Exception as error:
        raise ValueError(
            f"The image set in {folder} cannot be read ({describe(error)}): prepare it "
            "again, as array_record, after deleting that folder or in another data_dir."
        ) from error
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

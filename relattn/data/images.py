"""Image sets in memory: batches, validation split, channel statistics."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32, Int64, UInt8

from relattn.data.array_hints import images_hint, labels_hint
from relattn.data.augment import NUM_DRAWS, check_augmentation
from relattn.data.base import (
    CACHED_EPOCHS,
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
from relattn.messages import shorten

# Limits the temporary int64 copy of a chunk to about 100 MB.
CHUNK_BYTES = 2**24
# Random stream of the augmentation, distinct from the batch order's [seed, epoch].
AUGMENTATION = 3


@dataclasses.dataclass(frozen=True, eq=False)
class ImageSplit:
    """Images of one size with their labels.

    Attributes:
        images: Images, uint8, shape ``[n, height, width, channels]``; volumes ``[n,
            frames, height, width, channels]``.
        labels: Labels, int32, shape ``[n]``.

    Raises:
        ValueError: If an array has another type or shape, or an image has no pixels.
    """

    images: UInt8[np.ndarray, "n *frames height width channels"]
    labels: Int32[np.ndarray, " n"]

    def __post_init__(self):
        check_arrays(self.images, self.labels, "images")

    def __len__(self) -> int:
        return len(self.labels)

    def gather(self, indices: Int64[np.ndarray, " batch"] | slice) -> Batch:
        """Returns the batch of some images: ``image`` and ``label``, as stored."""
        return {"image": self.images[indices], "label": self.labels[indices]}

    def batches(
        self, batch_size: int, shard: ShardIndex = ONE_SHARD
    ) -> Iterator[Batch]:
        """Yields every example once, in order, in batches of one fixed size.

        Args:
            batch_size: Number of images in a batch; the last batch is padded with
                black images of weight 0.
            shard: Shard of each batch to yield, see `shard_rows`.

        Yields:
            Batches: ``image``, uint8, shape ``[batch_size, height, width, channels]``;
            ``label``, int32, and ``weight``, float32, 1 for an example and 0 for
            padding, both of shape ``[batch_size]``.

        Raises:
            ValueError: If ``batch_size`` is not positive.

        Example:
            >>> images, labels = np.zeros((5, 2, 2, 1), np.uint8), np.zeros(5, np.int32)
            >>> batches = ImageSplit(images, labels).batches(batch_size=3)
            >>> [batch["weight"].tolist() for batch in batches]
            [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]
        """
        check_eval_batch(batch_size)
        local = shard_rows(batch_size, shard)
        for start in range(0, len(self), batch_size):
            rows = slice(start + local.start, start + local.stop)
            yield fill_batch(self.gather(rows), local.stop - local.start)


@dataclasses.dataclass(frozen=True, eq=False)
class ImageData:
    """An image set in memory, ready for training: a `DataSource`.

    Attributes:
        name: Name of the set.
        train: Training images.
        validation: Images held out from the training images; may be empty.
        test: Test images.
        class_names: Class names in label order.
        mean: Mean of the training images per channel, values in [0, 1].
        std: Standard deviation of the training images per channel.
        origin: Where the images came from, in words.
        augment: Augmentation of training images, a spec of
            `relattn.data.augment.AUGMENTATIONS`. Other than "none", it adds ``draws``
            to the training batches.

    Raises:
        ValueError: If a label is out of range.
    """

    name: str
    train: ImageSplit
    validation: ImageSplit
    test: ImageSplit
    class_names: tuple[str, ...]
    mean: Float32[np.ndarray, " channels"]
    std: Float32[np.ndarray, " channels"]
    origin: str
    augment: str = dataclasses.field(default="none", kw_only=True)

    def __post_init__(self):
        for name, split in {"train": self.train, **self.eval_splits}.items():
            check_labels(split.labels, self.num_classes, name)
        if self.augment != "none" and len(self.image_shape) != 3:
            raise ValueError(
                f"data.augment={self.augment!r} changes images of height and width, "
                "not volumes: leave it at 'none'"
            )
        check_augmentation(self.augment)

    @classmethod
    def from_arrays(
        cls,
        name: str,
        images: np.ndarray,
        labels: np.ndarray,
        class_names: Sequence[str],
        *,
        num_validation: int = 0,
        validation_images: np.ndarray | None = None,
        validation_labels: np.ndarray | None = None,
        test_images: np.ndarray | None = None,
        test_labels: np.ndarray | None = None,
        split_seed: int = 0,
        augment: str = "none",
    ) -> ImageData:
        """Makes a data set of arrays of your own.

        Args:
            name: Name of the set.
            images: Images, uint8 from 0 to 255, shape ``[n, height, width, channels]``;
                volumes have an axis of frames before the height.
            labels: Integers from 0 to the number of classes - 1, shape ``[n]``.
            class_names: Class names in label order.
            num_validation: Number of images to hold out for validation.
            validation_images: Validation images, like ``images``, in place of these.
            validation_labels: Labels of the validation images, like ``labels``.
            test_images: Test images, like ``images``; None for those of validation.
            test_labels: Labels of the test images, like ``labels``.
            split_seed: Seed that selects the validation images.
            augment: Augmentation of the training images.

        Returns:
            The data, with copies of the arrays.

        Raises:
            ValueError: If an array has another type, shape or range, a class has no
                name of its own, or the augmentation is unknown.

        Example:
            >>> images = np.zeros((7, 5, 5, 1), np.uint8)
            >>> labels = np.arange(7) % 2
            >>> data = ImageData.from_arrays(
            ...     "stripes", images, labels, ("rows", "columns"), num_validation=2
            ... )
            >>> len(data.train), len(data.test)
            (5, 2)
        """
        names = check_class_names(class_names)
        train = _check_split(images, labels, len(names), "images")
        own = {}
        for split, (x, y) in {
            "validation": (validation_images, validation_labels),
            "test": (test_images, test_labels),
        }.items():
            if (x is None) != (y is None):
                raise ValueError(
                    f"{split}_images and {split}_labels need each other: pass both or "
                    "neither"
                )
            if x is not None:
                own[split] = _check_split(x, y, len(names), f"{split}_images")
                if own[split].images.shape[1:] != train.images.shape[1:]:
                    raise ValueError(
                        f"{split}_images has images of shape "
                        f"{own[split].images.shape[1:]}, but images has "
                        f"{train.images.shape[1:]}: resize one of them"
                    )
        if "validation" in own:
            check_no_draw(num_validation)
            validation = own["validation"]
        else:
            train, validation = split_validation(train, num_validation, split_seed)
        test = own.get("test", validation)
        mean, std = channel_statistics(train.images)
        origin = f"arrays of {len(images)} images"
        return cls(
            name, train, validation, test, names, mean, std, origin, augment=augment
        )

    @property
    def num_classes(self) -> int:
        """Returns the number of classes."""
        return len(self.class_names)

    @property
    def image_shape(self) -> tuple[int, ...]:
        """Returns (height, width, channels) as stored, before any resizing.

        Volumes have a number of frames before them.
        """
        return self.train.images.shape[1:]

    @property
    def info(self) -> ImageInfo:
        """Describes the images to the model."""
        return ImageInfo(
            name=self.name,
            class_names=self.class_names,
            image_shape=self.image_shape,
            mean=tuple(self.mean.tolist()),
            std=tuple(self.std.tolist()),
            num_train=len(self.train),
            origin=self.origin,
        )

    @property
    def eval_splits(self) -> Mapping[str, EvalSplit]:
        """Returns the evaluation splits by name."""
        return {"validation": self.validation, "test": self.test}

    def train_loader(
        self,
        batch_size: int,
        seed: int,
        start_step: int = 0,
        place: Callable[[Batch], Any] | None = None,
        shard: ShardIndex = ONE_SHARD,
    ) -> Loader:
        """Iterates over training batches, see `DataSource.train_loader`.

        Raises:
            ValueError: If there are fewer images than a batch needs.
        """
        n = len(self.train)
        steps, rows = steps_per_epoch(n, batch_size), shard_rows(batch_size, shard)

        def make_batch(step: int) -> Batch:
            indices = batch_indices(n, batch_size, seed, step)[rows]
            epoch = step // steps
            batch = self.training_batch(indices, seed, epoch)
            if self.augment != "none":
                batch["draws"] = _epoch_draws(n, seed, epoch)[indices]
            return batch

        return Loader(make_batch, start_step, place=place)

    def training_batch(
        self, indices: Int64[np.ndarray, " batch"], seed: int, epoch: int
    ) -> Batch:
        """Returns a batch of training images; subclasses may change it in each epoch.

        Args:
            indices: Indices of the images.
            seed: Seed of a subclass's draws; unused here.
            epoch: Epoch of a subclass's draws; unused here.

        Returns:
            The batch, in the form of `ImageSplit.gather`.
        """
        del seed, epoch
        return self.train.gather(indices)


def check_arrays(images: np.ndarray, labels: np.ndarray, name: str) -> None:
    """Raises ValueError unless arrays are images with labels, see `ImageSplit`.

    Args:
        images: uint8 ``[n, height, width, channels]``, or volumes ``[n, frames, height,
            width, channels]``.
        labels: Integers ``[n]``.
        name: The name of the images, for the message.

    Raises:
        ValueError: If a shape or dtype does not fit.
    """
    for what, array in ((name, images), (f"the labels of {name}", labels)):
        if not isinstance(array, np.ndarray):
            raise ValueError(
                f"{what} must be a NumPy array, got {type(array).__name__}: pass "
                "np.asarray of them"
            )
    if images.dtype == object and images.ndim == 1:
        raise ValueError(
            f"{name} are an array of objects: resize the images to one size, and pass "
            "np.stack(images)"
        )
    if images.ndim not in (4, 5):
        raise ValueError(
            f"{name} have shape {images.shape}, expected [n, height, width, channels], "
            "for volumes [n, frames, height, width, channels]: reshape them"
        )
    if images.dtype != np.uint8:
        raise ValueError(
            f"{name} have dtype {images.dtype}, expected uint8 from 0 to 255: "
            f"{images_hint(images)}"
        )
    first, *_, before_last, last = images.shape[1:]
    if images.ndim == 4 and 0 < first <= 4 < min(before_last, last):
        raise ValueError(
            f"{name} have shape {images.shape}, which is [n, channels, height, width]: "
            "pass images.transpose(0, 2, 3, 1), or images[..., None] if they are "
            f"volumes of {first} frames"
        )
    if images.ndim == 4 and last > 4 and last == before_last:
        raise ValueError(
            f"{name} have shape {images.shape}, which is [n, frames, height, width], "
            "volumes without an axis of channels: pass images[..., None]"
        )
    if not all(images.shape[1:]):
        raise ValueError(
            f"{name} have shape {images.shape}, so the images have no pixels: pass "
            "images of at least 1x1"
        )
    integers = np.issubdtype(labels.dtype, np.integer)
    if labels.shape != images.shape[:1] or not integers:
        raise ValueError(
            f"the labels of {name} have shape {labels.shape} and dtype {labels.dtype}, "
            f"expected {len(images)} integers: {labels_hint(labels, len(images))}"
        )


def check_labels(labels: np.ndarray, num_classes: int, name: str) -> None:
    """Raises ValueError unless there are several classes and labels are among them.

    Args:
        labels: Integers ``[n]``.
        num_classes: Number of classes.
        name: The name of the split, for the message.

    Raises:
        ValueError: If there are fewer than two classes, or a label is out of range.
    """
    if num_classes < 2:
        raise ValueError(
            f"{name} has fewer than 2 classes ({num_classes}): add examples of another "
            "class"
        )
    # A device raises no error on a label out of range: the loss is silently wrong.
    if len(labels) and not 0 <= labels.min() <= labels.max() < num_classes:
        first, last = int(labels.min()), int(labels.max())
        fix = ""
        if last - first == num_classes - 1:
            fix = f": pass labels {'-' if first > 0 else '+'} {abs(first)}"
        elif first < 0:
            fix = ": leave out examples without a label"
        raise ValueError(
            f"the labels of {name} are from {first} to {last}, expected 0 to "
            f"{num_classes - 1}{fix}"
        )


def check_class_names(
    names: Iterable[str], where: str = "class_names"
) -> tuple[str, ...]:
    """Returns the names of classes, once checked.

    Args:
        names: The names, in label order.
        where: What holds the names, for the message.

    Returns:
        The names.

    Raises:
        ValueError: If they are not a list of texts, one is empty, or two are equal.

    Example:
        >>> check_class_names(["cat", "dog"])
        ('cat', 'dog')
    """
    # A text would be a class for each letter.
    listed = isinstance(names, Iterable) and not isinstance(names, str)
    found: tuple[Any, ...] = tuple(names) if listed else (names,)
    for name in found:
        if not listed or not isinstance(name, str) or not name:
            raise ValueError(
                f"{where} must be a name for each label, such as ('cat', 'dog'), got "
                f"{shorten(name)}"
            )
        if found.count(name) > 1:
            raise ValueError(
                f"{where} has {shorten(name)} twice: give each class a name of its own"
            )
    return found


def _check_split(
    images: np.ndarray, labels: np.ndarray | None, num_classes: int, name: str
) -> ImageSplit:
    try:
        images, labels = np.array(images), np.asarray(labels)
    except ValueError as error:
        # NumPy makes no array of lists of different lengths.
        raise ValueError(
            f"{name}, or their labels, differ in shape: resize the images to one size, "
            "and give each one label"
        ) from error
    check_arrays(images, labels, name)
    if not len(images):
        raise ValueError(f"{name} has no images: pass at least one")
    check_labels(labels, num_classes, name)
    return ImageSplit(images, labels.astype(np.int32))


@functools.lru_cache(maxsize=CACHED_EPOCHS)
def _epoch_draws(num_images: int, seed: int, epoch: int) -> np.ndarray:
    """Draws the random numbers that augment each image in an epoch."""
    rng = np.random.default_rng([seed, epoch, AUGMENTATION])
    draws = rng.random((num_images, NUM_DRAWS), np.float32)
    draws.setflags(write=False)
    return draws


def split_validation(
    split: ImageSplit, num_validation: int, split_seed: int
) -> tuple[ImageSplit, ImageSplit]:
    """Holds out random images for validation, the same for the same seed.

    The images are not copied: rows are swapped within ``split``, and both results are
    views of its arrays.

    Args:
        split: The images, reordered in place.
        num_validation: Number of images to hold out.
        split_seed: Seed that selects them.

    Returns:
        The remaining training images and the validation images.

    Raises:
        ValueError: If ``num_validation`` is negative or leaves no training image.

    Example:
        >>> labels = np.arange(7, dtype=np.int32)
        >>> images = np.zeros((7, 2, 2, 1), np.uint8)
        >>> train, validation = split_validation(ImageSplit(images, labels), 2, 0)
        >>> len(train), len(validation)
        (5, 2)
    """
    n = len(split)
    chosen = draw_validation(n, num_validation, split_seed)
    num_train = n - num_validation
    leaving = np.sort(chosen[chosen < num_train])
    staying = np.setdiff1d(np.arange(num_train, n), chosen)
    for array in (split.images, split.labels):
        array[leaving], array[staying] = array[staying], array[leaving]
    return (
        ImageSplit(split.images[:num_train], split.labels[:num_train]),
        ImageSplit(split.images[num_train:], split.labels[num_train:]),
    )


def draw_validation(
    num_examples: int, num_validation: int, split_seed: int
) -> Int64[np.ndarray, " {num_validation}"]:
    """Draws the indices of the images that are held out for validation.

    Args:
        num_examples: Number of training images.
        num_validation: Number of images to hold out.
        split_seed: Seed of the draw.

    Returns:
        Indices, all different, in random order, shape ``[num_validation]``.

    Raises:
        ValueError: If ``num_validation`` is negative or leaves no training image, or
            ``split_seed`` is negative.

    Example:
        >>> sorted(draw_validation(3, 2, 0).tolist())
        [0, 2]
    """
    is_integer = isinstance(num_validation, int | np.integer)
    if not is_integer or not 0 <= num_validation < num_examples:
        raise ValueError(
            f"data.num_validation={shorten(num_validation)} must be an integer from 0 "
            f"to {num_examples - 1}, to leave some of the {num_examples} training "
            "examples for training"
        )
    if not isinstance(split_seed, int | np.integer) or split_seed < 0:
        raise ValueError(
            f"data.split_seed={shorten(split_seed)} must be an integer of at least 0"
        )
    order = np.random.default_rng(split_seed).permutation(num_examples)
    return order[:num_validation]


def check_no_draw(num_validation: int) -> None:
    """Checks that no training images are held out of data with validation images.

    Args:
        num_validation: Number of training images to hold out.

    Raises:
        ValueError: If it is not 0.

    Example:
        >>> check_no_draw(500)
        Traceback (most recent call last):
        ValueError: data.num_validation=500 holds out training images, but the data \
have validation images of their own: set data.num_validation=0
    """
    if num_validation != 0:
        raise ValueError(
            f"data.num_validation={shorten(num_validation)} holds out training images, "
            "but the data have validation images of their own: set "
            "data.num_validation=0"
        )


def channel_statistics(
    images: UInt8[np.ndarray, "n *frames height width channels"],
) -> tuple[Float32[np.ndarray, " channels"], Float32[np.ndarray, " channels"]]:
    """Returns the exact mean and standard deviation per channel, values in [0, 1].

    Args:
        images: Images, shape ``[n, height, width, channels]``, or volumes.

    Returns:
        The mean and the standard deviation, both of shape ``[channels]``, from a
        histogram of the 256 values.

    Raises:
        ValueError: If there are no images.

    Example:
        >>> images = np.array([0, 255], np.uint8).reshape(1, 2, 1, 1)
        >>> channel_statistics(images)
        (array([0.5], dtype=float32), array([0.5], dtype=float32))
    """
    channels = images.shape[-1]
    counts = np.zeros((channels, 256), np.int64)
    rows = max(1, CHUNK_BYTES // int(np.prod(images.shape[1:])))
    for start in range(0, len(images), rows):
        for channel in range(channels):
            values = images[start : start + rows, ..., channel]
            counts[channel] += np.bincount(values.ravel(), minlength=256)
    if not len(images):
        raise ValueError("there are no images, so they have no mean: pass at least one")
    frequencies = counts / counts.sum(axis=1, keepdims=True)
    values = np.arange(256) / 255
    mean = frequencies @ values
    variance = (frequencies * (values - mean[:, None]) ** 2).sum(axis=1)
    return mean.astype(np.float32), np.sqrt(variance).astype(np.float32)

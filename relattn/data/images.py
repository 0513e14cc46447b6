"""Images and labels in memory, and how validation images are set apart."""

import dataclasses

import numpy as np
from jaxtyping import Float32, Int32, UInt8

# Keeps the temporary int64 copy of a chunk near 100 MB.
CHUNK_BYTES = 2**24


@dataclasses.dataclass(frozen=True, eq=False)
class ImageSplit:
    """Images of one size with their labels.

    Attributes:
        images: uint8 [n, height, width, channels].
        labels: int32 [n].
    """

    images: UInt8[np.ndarray, "n height width channels"]
    labels: Int32[np.ndarray, "n"]

    def __len__(self) -> int:
        return len(self.labels)


@dataclasses.dataclass(frozen=True, eq=False)
class ImageData:
    """An image set, ready for training.

    Attributes:
        name: of the set.
        train: images to train on.
        validation: images taken from the training images, perhaps none.
        test: images never trained on.
        class_names: in the order of the labels.
        mean: of the training images per channel, values in [0, 1].
        std: likewise.
        origin: a sentence that says where the images came from.
    """

    name: str
    train: ImageSplit
    validation: ImageSplit
    test: ImageSplit
    class_names: tuple[str, ...]
    mean: Float32[np.ndarray, "channels"]
    std: Float32[np.ndarray, "channels"]
    origin: str

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.class_names)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(height, width, channels) as stored, before any resizing."""
        height, width, channels = self.train.images.shape[1:]
        return height, width, channels


def split_validation(
    split: ImageSplit, num_validation: int, split_seed: int
) -> tuple[ImageSplit, ImageSplit]:
    """Sets random images apart for validation, the same for the same seed.

    The images are not copied: rows change places within `split`, whose arrays the two
    results view.

    Args:
        split: n images, reordered in place.
        num_validation: how many to set apart.
        split_seed: decides which.

    Returns:
        The remaining training images and the validation images.

    Raises:
        ValueError: `num_validation` is negative or leaves no training image.

    Example:
        >>> labels = np.arange(7, dtype=np.int32)
        >>> images = np.zeros((7, 2, 2, 1), np.uint8)
        >>> train, validation = split_validation(ImageSplit(images, labels), 2, 0)
        >>> len(train), len(validation)
        (5, 2)
    """
    n = len(split)
    if not 0 <= num_validation < n:
        raise ValueError(
            f"data.num_validation={num_validation} of {n} training images: it must be "
            f"at least 0 and at most {n - 1}, so that images remain to train on."
        )
    num_train = n - num_validation
    chosen = np.random.default_rng(split_seed).permutation(n)[:num_validation]
    leaving = np.sort(chosen[chosen < num_train])
    staying = np.setdiff1d(np.arange(num_train, n), chosen)
    for array in (split.images, split.labels):
        array[leaving], array[staying] = array[staying], array[leaving]
    return (
        ImageSplit(split.images[:num_train], split.labels[:num_train]),
        ImageSplit(split.images[num_train:], split.labels[num_train:]),
    )


def channel_statistics(
    images: UInt8[np.ndarray, "n height width channels"],
) -> tuple[Float32[np.ndarray, "channels"], Float32[np.ndarray, "channels"]]:
    """Returns the mean and standard deviation per channel, exact, values in [0, 1].

    Args:
        images: [n, height, width, channels].

    Returns:
        mean [channels] and std [channels], from a histogram of the 256 values.

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
    frequencies = counts / counts.sum(axis=1, keepdims=True)
    values = np.arange(256) / 255
    mean = frequencies @ values
    variance = (frequencies * (values - mean[:, None]) ** 2).sum(axis=1)
    return mean.astype(np.float32), np.sqrt(variance).astype(np.float32)

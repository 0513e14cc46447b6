"""Reads image sets that TFDS prepared, without TensorFlow."""

import contextlib
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow_datasets as tfds
from absl import logging
from tqdm import tqdm

from relattn.data.images import ImageSplit

CHUNK = 1000


class DatasetNotPreparedError(FileNotFoundError):
    """An image set is not on this machine; the message says how to prepare it."""


def find_prepared(name: str, data_dir: str) -> pathlib.Path | None:
    """Returns the folder of the newest prepared version of a set, or None.

    Args:
        name: as TFDS says it, "mnist" or "imagenet_resized/64x64".
        data_dir: where TFDS keeps its sets; "" for its default folder.

    Returns:
        ``<data_dir>/<name>/<version>``, if a complete one exists.
    """
    root = pathlib.Path(data_dir or tfds.core.constants.DATA_DIR).expanduser()
    folders = [
        file.parent
        for file in (root / name).glob("*/dataset_info.json")
        if tfds.core.Version.is_valid(file.parent.name)
    ]
    newest = max(folders, key=lambda f: tfds.core.Version(f.name), default=None)
    return newest


def read_prepared(
    folder: pathlib.Path, test_split: str = "test"
) -> tuple[ImageSplit, ImageSplit, tuple[str, ...]]:
    """Reads the training and test images of a prepared set into memory.

    Args:
        folder: ``<data_dir>/<name>/<version>``, written with
            ``file_format="array_record"``.
        test_split: the split that serves as test images.

    Returns:
        The training images, the test images and the names of the classes.

    Raises:
        ValueError: the folder is incomplete, damaged or in another file format.
    """
    try:
        builder = tfds.builder_from_directory(folder)
        class_names = tuple(builder.info.features["label"].names)
        train, test = (
            _read_split(builder.as_data_source(split), f"Reading {folder.parent.name}")
            for split in ("train", test_split)
        )
    except Exception as error:
        raise ValueError(
            f"The image set in {folder} cannot be read ({_first_line(error)}): delete "
            "that folder and prepare the set again, as array_record, with `python -m "
            "relattn.data.prepare`."
        ) from error
    return train, test, class_names


def _read_split(source: Sequence, title: str) -> ImageSplit:
    images, labels = None, np.empty(len(source), np.int32)
    with (
        _without_opencv_hint(),
        tqdm(
            total=len(source), desc=title, unit=" images", delay=2, disable=None
        ) as bar,
    ):
        for start in range(0, len(source), CHUNK):
            keys = list(range(start, min(start + CHUNK, len(source))))
            for key, example in zip(keys, source.__getitems__(keys), strict=True):
                if images is None:
                    shape = (len(source), *example["image"].shape)
                    images = np.empty(shape, np.uint8)
                images[key] = example["image"]
                labels[key] = example["label"]
            bar.update(len(keys))
    return ImageSplit(images, labels)


@contextlib.contextmanager
def _without_opencv_hint() -> Iterator[None]:
    """Silences TFDS's advice to install OpenCV: Pillow is fast enough here."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__

"""Reads image sets that TFDS prepared, without TensorFlow, and starts preparation."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import math
import os
import re
import shlex
import subprocess
import sys
import uuid
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import tensorflow_datasets as tfds
from jaxtyping import UInt8
from numpy.lib.format import open_memmap
from tensorflow_datasets.core import constants
from tqdm import tqdm

from relattn.command import lacks_resources
from relattn.data.errors import describe_error
from relattn.data.image_io import decode_image, open_image
from relattn.data.image_list import Images
from relattn.data.images import ImageSplit
from relattn.data.registry import SETS, ImageSet
from relattn.files import expand
from relattn.json_files import read_json
from relattn.manifest import find_damage
from relattn.messages import closest, shorten

CHUNK = 1000
# A larger split is decoded once into a memory-mapped file.
MAPPED_BYTES = 4 * 10**9
# A set and, for some, its configuration.
_NAME = re.compile(r"\w[\w.+-]*(/\w[\w.+-]*)?")


class DatasetNotPreparedError(FileNotFoundError):
    """A data set is not prepared; the message says how to prepare it."""


def read_full(name: str, data_dir: str, manual_dir: str) -> Images:
    """Reads a full image set into memory, preparing it first if necessary.

    Args:
        name: Name of the set, one of `SETS` or a prepared one.
        data_dir: Folder of TFDS's sets; "" for its default folder.
        manual_dir: Folder of archives that are not downloaded; "" for none.

    Returns:
        The images of each split, the class names and the origin.

    Raises:
        DatasetNotPreparedError: If the set is missing and cannot be prepared.
        ValueError: If the set is unknown or damaged, or holds the images of another
            set.
    """
    entry = find_set(name, data_dir)
    folder = find_or_prepare(name, data_dir, manual_dir)
    train, class_names = read_split(folder, "train")
    test, validation = (
        read_split(folder, split)[0] if split else None
        for split in (entry.test_split, entry.validation_split)
    )
    if test is not None:
        check_content(entry, folder, train, test)
    class_names = entry.class_names or class_names
    origin = describe_origin(name, folder)
    return Images(train, test, class_names, origin, validation)


def find_set(name: str, data_dir: str) -> ImageSet:
    """Returns the properties of a set: those of `SETS`, or of any prepared image set.

    A split ``validation`` has the validation images. Without a split ``test``, they are
    the test images. Of these two, a split without labels, which TFDS gives the label
    -1, is left out with a warning.

    Args:
        name: TFDS's name of the set.
        data_dir: Folder of TFDS's sets; "" for its default folder.

    Returns:
        The properties.

    Raises:
        ValueError: If the set is neither in `SETS` nor prepared, or has no images with
            labels.
    """
    if name in SETS:
        return SETS[name]
    folder = find_prepared(name, data_dir)
    if folder is None:
        known = {*SETS, *prepared_sets(data_dir)}
        raise ValueError(
            f"unknown data.name {shorten(name)}: {closest(name, known)}; to add an "
            "image set of TFDS, run `tfds build NAME --file_format=array_record "
            f"--data_dir={data_root(data_dir)}` once"
        )
    with reading_prepared(folder):
        builder = open_builder(folder)
    splits, (image, label) = builder.info.splits, find_features(builder, folder)
    if "train" not in splits:
        raise ValueError(
            f"the image set in {folder} has no split 'train', only "
            f"{', '.join(map(repr, splits))}: choose another data.name"
        )
    found = {}
    for split in ("test", "validation"):
        found[split] = split if split in splits else ""
        if found[split]:
            decoders = {image: tfds.decode.SkipDecoding()}
            with reading_prepared(folder):
                first = builder.as_data_source(split, decoders=decoders)[0]
            if first[label] == -1:
                text = f"{folder}: left out split {split}, which has no labels"
                warnings.warn(text, stacklevel=2)
                found[split] = ""
    return ImageSet(
        title=name,
        test_split=found["test"],
        validation_split=found["validation"],
        streamed=None in builder.info.features[image].shape,
    )


def prepared_sets(data_dir: str) -> list[str]:
    """Returns the names of the sets that are prepared in a folder, sorted.

    Args:
        data_dir: Folder of TFDS's sets; "" for its default folder.
    """
    root = data_root(data_dir)
    folders = {
        file.parent.parent
        for pattern in ("*/*/dataset_info.json", "*/*/*/dataset_info.json")
        for file in root.glob(pattern)
        if tfds.core.Version.is_valid(file.parent.name)
    }
    return sorted(folder.relative_to(root).as_posix() for folder in folders)


def find_features(builder: Any, folder: Path) -> tuple[str, str]:
    """Returns the names of the features of a set that are its images and labels.

    These are its supervised keys or, without any, its only image and its only label.

    Args:
        builder: TFDS's builder of the set.
        folder: The folder of the set, for messages.

    Returns:
        The names.

    Raises:
        ValueError: If the set has no such features, or several of them.
    """
    features = builder.info.features
    kinds = {"image": tfds.features.Image, "class label": tfds.features.ClassLabel}
    given = builder.info.supervised_keys or ()
    names = []
    for kind, feature in kinds.items():
        found = [name for name in features if isinstance(features[name], feature)]
        chosen = [name for name in found if name in given] or found
        if len(chosen) != 1:
            several = (
                f"several features ({', '.join(sorted(chosen))})" if chosen else "none"
            )
            raise ValueError(
                f"the set in {folder} must have one feature that is the {kind} of an "
                f"example, but has {several}: choose another data.name"
            )
        names += chosen
    image = features[names[0]]
    if np.dtype(image.np_dtype) != np.uint8:
        raise ValueError(
            f"the images in {folder} are {np.dtype(image.np_dtype)}, expected uint8: "
            "choose another data.name"
        )
    return names[0], names[1]


def find_or_prepare(name: str, data_dir: str, manual_dir: str) -> Path:
    """Returns the folder of a set, preparing the set first if necessary.

    Preparation runs in a separate process, since it imports TensorFlow.

    Args:
        name: Name of the set, one of `SETS` or a prepared one.
        data_dir: Folder of TFDS's sets; "" for its default folder.
        manual_dir: Folder of archives that are not downloaded; "" for none.

    Returns:
        ``<data_dir>/<name>/<version>``.

    Raises:
        DatasetNotPreparedError: If the set is missing and cannot be prepared.
    """
    folder = find_prepared(name, data_dir)
    if folder is None:
        _prepare_in_subprocess(name, data_dir, manual_dir)
        folder = find_prepared(name, data_dir)
        assert folder is not None
    return folder


def find_prepared(name: str, data_dir: str) -> Path | None:
    """Returns the folder of the newest prepared version of a set, or None.

    Args:
        name: TFDS's name, for example "mnist" or "imagenet_resized/64x64".
        data_dir: Folder of TFDS's sets; "" for its default folder.

    Returns:
        ``<data_dir>/<name>/<version>``, or None if no complete version exists.
    """
    if not _NAME.fullmatch(name):
        return None
    folders = [
        file.parent
        for file in (data_root(data_dir) / name).glob("*/dataset_info.json")
        if tfds.core.Version.is_valid(file.parent.name)
    ]
    return max(folders, key=lambda f: tfds.core.Version(f.name), default=None)


def data_root(data_dir: str) -> Path:
    """Returns the folder of the prepared sets, TFDS's default for ""."""
    return expand(data_dir or constants.DATA_DIR, "data_dir")


def describe_origin(name: str, folder: Path) -> str:
    """Describes where the images of a prepared set came from."""
    return f"{name} {folder.name}, prepared by TFDS in {folder}"


def read_prepared(
    folder: Path, test_split: str = "test"
) -> tuple[ImageSplit, ImageSplit, tuple[str, ...]]:
    """Reads the training and test images of a prepared set, see `read_split`.

    Args:
        folder: ``<data_dir>/<name>/<version>``.
        test_split: Split used as test images.

    Returns:
        The training images, the test images and the class names.

    Raises:
        ValueError: If the folder is incomplete, damaged or in another file format.
    """
    train, class_names = read_split(folder, "train")
    test, _ = read_split(folder, test_split)
    return train, test, class_names


def read_split(folder: Path, split: str) -> tuple[ImageSplit, tuple[str, ...]]:
    """Reads the images of a split of a prepared set.

    A split of more than `MAPPED_BYTES` bytes is decoded once into a file in the folder
    and memory-mapped; a smaller one is read into memory.

    Args:
        folder: ``<data_dir>/<name>/<version>``, written with
            ``file_format="array_record"``.
        split: Name of the split.

    Returns:
        The images and the class names.

    Raises:
        ValueError: If the folder is incomplete, damaged or in another file format.
    """
    with reading_prepared(folder):
        builder = open_builder(folder)
        images = _Images(builder, split, folder)
        class_names = images.class_names
        found = _read_split(images, folder, split)
        _check_labels(found.labels, len(class_names))
    return found, class_names


@contextlib.contextmanager
def reading_prepared(folder: Path) -> Iterator[None]:
    """Re-raises errors as a ValueError that says how to prepare the set again."""
    try:
        yield
    except Exception as error:
        if lacks_resources(error):
            raise
        raise ValueError(
            f"the image set in {folder} cannot be read ({describe_error(error)}): "
            "delete the folder, or choose another data_dir, and prepare the set again "
            "as array_record"
        ) from error


def open_builder(folder: Path) -> Any:
    """Opens a prepared set.

    Args:
        folder: ``<data_dir>/<name>/<version>``.

    Returns:
        TFDS's builder that reads it.

    Raises:
        ValueError: If a file has changed since the preparation, or ``features.json``
            names a class that is not from TFDS.
        OSError: If the folder is incomplete.
    """
    if damage := find_damage(folder):
        raise ValueError(damage)
    # TFDS imports any module that features.json names.
    for name in _class_names(read_json(folder / "features.json")):
        if not (isinstance(name, str) and name.startswith("tensorflow_datasets.")):
            raise ValueError(
                f"features.json names {shorten(name)}, which is not a TFDS class"
            )
    return tfds.builder_from_directory(folder)


def _class_names(values: Any) -> Iterator[Any]:
    """Yields every class name in the JSON of a set's features."""
    if isinstance(values, dict):
        for key, value in values.items():
            if key in ("pythonClassName", "python_class_name", "type"):
                yield value
            yield from _class_names(value)
    elif isinstance(values, list):
        for value in values:
            yield from _class_names(value)


def _check_labels(labels: np.ndarray, num_classes: int) -> None:
    # A device raises no error on a label out of range: the loss is silently wrong.
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if wrong.size:
        raise ValueError(
            f"image {wrong[0]} has the label {labels[wrong[0]]}, expected 0 to "
            f"{num_classes - 1}"
        )


class _Images:
    """The decoded images of a split, with their labels.

    Args:
        builder: TFDS's builder of the set.
        split: Name of the split.
        folder: Folder of the set.
    """

    def __init__(self, builder: Any, split: str, folder: Path):
        self._image, self._label = find_features(builder, folder)
        self._records = builder.as_data_source(
            split, decoders={self._image: tfds.decode.SkipDecoding()}
        )
        features = builder.info.features
        self._mode = "L" if features[self._image].shape[-1] == 1 else "RGB"
        self._where = f"of the {split} images in {folder}"
        self.class_names = tuple(features[self._label].names)

    def __len__(self) -> int:
        return len(self._records)

    def read(
        self, keys: Sequence[int]
    ) -> Iterator[tuple[UInt8[np.ndarray, "height width channels"], int]]:
        """Yields images and labels."""
        records = self._records.__getitems__(list(keys))
        for key, record in zip(keys, records, strict=True):
            where = f"record {key} {self._where}"
            with open_image(io.BytesIO(record[self._image]), where) as image:
                pixels = decode_image(image, where).convert(self._mode)
            yield np.atleast_3d(np.asarray(pixels)), record[self._label]


def _read_split(source: _Images, folder: Path, split: str) -> ImageSplit:
    ((first, _),) = source.read([0])
    shape = (len(source), *first.shape)
    if math.prod(shape) > MAPPED_BYTES:
        return _map_split(source, shape, folder / f"decoded-{split}")
    images, labels = np.empty(shape, np.uint8), np.empty(len(source), np.int32)
    _fill(source, images, labels, f"Reading {split} images")
    return ImageSplit(images, labels)


def _map_split(source: _Images, shape: tuple, stem: Path) -> ImageSplit:
    final = [stem.with_name(f"{stem.name}-{kind}.npy") for kind in ("images", "labels")]
    if not all(path.is_file() for path in final):
        # Files are renamed once complete, so that later runs can trust the final name.
        # Several processes may decode at once, each into its own files.
        suffix = uuid.uuid4().hex[:8]
        partial = [path.with_suffix(f".{suffix}.partial") for path in final]
        try:
            images = open_memmap(partial[0], "w+", np.uint8, shape)
            labels = open_memmap(partial[1], "w+", np.int32, shape[:1])
            _fill(source, images, labels, f"Decoding into {final[0]}")
            for array in (images, labels):
                array.flush()
            for path, target in zip(partial, final, strict=True):
                path.replace(target)
        finally:
            for path in partial:
                path.unlink(missing_ok=True)
    # Copy-on-write: the validation split reorders rows in memory only.
    images, labels = (open_memmap(path, "c") for path in final)
    for path, array, kind, size in (
        (final[0], images, np.uint8, shape),
        (final[1], labels, np.int32, shape[:1]),
    ):
        if (array.dtype, array.shape) != (kind, size):
            raise ValueError(
                f"{path.name} holds {array.dtype}{list(array.shape)}, expected "
                f"{np.dtype(kind)}{list(size)}"
            )
    return ImageSplit(images, labels)


def _fill(source: _Images, images: np.ndarray, labels: np.ndarray, title: str) -> None:
    # The bar appears on a terminal after two seconds.
    with tqdm(
        total=len(source), desc=title, unit=" images", delay=2, disable=None
    ) as bar:
        for start in range(0, len(source), CHUNK):
            keys = range(start, min(start + CHUNK, len(source)))
            for key, (image, label) in zip(keys, source.read(keys), strict=True):
                if image.shape != images.shape[1:]:
                    raise ValueError(
                        f"image {key} has shape {image.shape}, but the first one has "
                        f"{images.shape[1:]}"
                    )
                images[key] = image
                labels[key] = label
            bar.update(len(keys))


def check_content(
    entry: ImageSet, folder: Path, train: ImageSplit, test: ImageSplit
) -> None:
    """Raises ValueError if images or labels are not those of the set.

    Args:
        entry: Registry entry of the set.
        folder: Folder of the set.
        train: Training images of the set.
        test: Test images of the set.

    Raises:
        ValueError: If they differ from the registry's digest.
    """
    if entry.digest and content_digest(train, test) != entry.digest:
        raise ValueError(
            f"the images or labels in {folder} are not those of {entry.title}, perhaps "
            "because two sets whose archives have the same names share a downloads "
            "folder: delete that folder and prepare the set again"
        )


def content_digest(train: ImageSplit, test: ImageSplit) -> str:
    """Returns the SHA-256 of all images and labels, independent of their order.

    Args:
        train: Training images.
        test: Test images.

    Returns:
        The digest of the (image, label) pairs, sorted by their bytes.
    """
    pairs = [
        image.tobytes() + label.tobytes()
        for split in (train, test)
        for image, label in zip(split.images, split.labels, strict=True)
    ]
    return hashlib.sha256(b"".join(sorted(pairs))).hexdigest()


def prepare_command(name: str, data_dir: str, manual_dir: str = "") -> list[str]:
    """Returns the arguments of ``python`` that prepare a set."""
    options = _prepare_options(name, data_dir, manual_dir)
    return ["-m", "relattn.data.prepare", *options]


def _prepare_options(name: str, data_dir: str, manual_dir: str = "") -> list[str]:
    options = {"name": name, "data_dir": data_dir, "manual_dir": manual_dir}
    return [f"--{key}={value}" for key, value in options.items() if value]


def not_prepared(name: str, data_dir: str, cause: str) -> DatasetNotPreparedError:
    """Returns the error that says why a set is not prepared and how to prepare it."""
    command = shlex.join(["relattn", "prepare", *_prepare_options(name, data_dir)])
    archives = " and ".join(SETS[name].manual_archives)
    if archives:
        fix = (
            f"put {archives}, which its owners distribute after registration, into a "
            "folder DIR, `pip install 'relattn[prepare]'`, and run once "
            f"`{command} --manual_dir=DIR`"
        )
    else:
        fix = (
            "`pip install 'relattn[prepare]'` and run once, on a machine with a "
            f"network, `{command}`; if you have the archives, set "
            "--config.data.manual_dir=DIR instead"
        )
    return DatasetNotPreparedError(
        f"{name} is not prepared in {data_root(data_dir)} ({cause}): {fix}"
    )


def _prepare_in_subprocess(name: str, data_dir: str, manual_dir: str) -> None:
    if importlib.util.find_spec("tensorflow") is None:
        raise not_prepared(
            name, data_dir, "TensorFlow, required for preparation only, is missing"
        )
    package_root = str(Path(__file__).parents[2])
    paths = [package_root, os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    process = subprocess.Popen(
        [sys.executable, *prepare_command(name, data_dir, manual_dir)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
    )
    tail = b""
    with process:
        stderr = cast(io.BufferedReader, process.stderr)
        # Forwards the progress bars of a long download.
        while piece := stderr.read1():
            sys.stderr.write(piece.decode(errors="replace"))
            tail = (tail + piece)[-4000:]
    if process.returncode:
        lines = tail.decode(errors="replace").strip().splitlines()
        cause = lines[-1] if lines else f"exit status {process.returncode}"
        cause = cause.rpartition(f"{name} was not prepared: ")[2]
        raise not_prepared(name, data_dir, cause)

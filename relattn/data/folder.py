"""Reads images from folders, one folder per class."""

import dataclasses
import functools
import pathlib
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from relattn.data.image_io import GREY_MODES, decode_image, open_image
from relattn.data.images import ImageSplit

KINDS = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".webp": "WebP"}
LAYOUT = (
    "expected train/<class>/*.jpg, and optionally test/<class>/*.jpg (or .png, .webp)"
)
# Images of one size are read into memory up to this size.
MEMORY_BYTES = 2**30
# Names shown in the warning about what is left out.
MAX_NAMES = 3


@dataclasses.dataclass(frozen=True)
class FolderFiles:
    """The image files of ``train/<class>/`` and ``test/<class>/``.

    Attributes:
        root: The folder that holds ``train`` and, optionally, ``test``.
        train: The training images, sorted by class and file name.
        test: The test images; empty if there is no folder ``test``.
        left_out: What is not read, in words.
    """

    root: pathlib.Path
    train: list[pathlib.Path]
    test: list[pathlib.Path]
    left_out: list[str]

    # Cached: it goes through all training files.
    @functools.cached_property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes, sorted."""
        return tuple(sorted({file.parent.name for file in self.train}))

    @property
    def origin(self) -> str:
        """Where the images come from, in words."""
        kinds = {KINDS[file.suffix.lower()] for file in self.train + self.test}
        origin = f"{' and '.join(sorted(kinds))} files in {self.root}"
        if self.test:
            return origin
        return f"{origin}, without test/: the validation images are the test images"

    def warn(self) -> None:
        """Warns about what is not read."""
        if self.left_out:
            text = f"{self.root}: left out {'; '.join(self.left_out)}"
            warnings.warn(text, stacklevel=2)

    def labels(self, files: Sequence[pathlib.Path]) -> np.ndarray:
        """Returns the label of each file, int32 ``[n]``."""
        label = {name: label for label, name in enumerate(self.class_names)}
        return np.array([label[file.parent.name] for file in files], np.int32)

    def fit_memory(self) -> bool:
        """Returns whether all images have one size and fit into `MEMORY_BYTES`."""
        sizes = set()
        files = self.train + self.test
        for file in tqdm(files, "Reading sizes", unit=" images", delay=2, disable=None):
            with open_image(file, str(file)) as image:
                sizes.add(image.size)
            if len(sizes) > 1:
                return False
        ((width, height),) = sizes
        return 3 * width * height * len(files) <= MEMORY_BYTES


def find_files(root: pathlib.Path) -> FolderFiles:
    """Lists the images of a folder.

    Hidden files and folders are left out. Sub-folders of classes, classes without
    images and other files are left out and named.

    Args:
        root: The folder that holds ``train`` and, optionally, ``test``.

    Returns:
        The files.

    Raises:
        FileNotFoundError: If `root` or its folder ``train`` is missing.
        ValueError: If a folder holds no images, or an image belongs to a class without
            training images.
    """
    left_out: list[str] = []
    train = _list_images(root / "train", left_out)
    test = _list_images(root / "test", left_out) if (root / "test").exists() else []
    files = FolderFiles(root, train, test, left_out)
    for file in test:
        if file.parent.name not in files.class_names:
            raise ValueError(
                f"{file}: the class {file.parent.name!r} has no training images: add "
                "some or delete its test images."
            )
    return files


def read_folder(
    root: pathlib.Path,
) -> tuple[ImageSplit, ImageSplit | None, tuple[str, ...], str]:
    """Reads ``train/<class>/*`` and ``test/<class>/*`` into memory.

    Classes are numbered in the order of their names; images are sorted by class and
    file name. Grey images have one channel, colour images three.

    Args:
        root: The folder that holds ``train`` and, optionally, ``test``.

    Returns:
        The training images, the test images or None, the class names and the origin.

    Raises:
        FileNotFoundError: If `root` or its folder ``train`` is missing.
        ValueError: If a folder holds no images, or an image cannot be read, differs in
            size from the first, or belongs to a class without training images.
    """
    files = find_files(root)
    files.warn()
    train = _read_split(files, files.train)
    test = _read_split(files, files.test) if files.test else None
    return train, test, files.class_names, files.origin


@dataclasses.dataclass(frozen=True, eq=False)
class FileRecords:
    """Encoded images with labels, read when needed: like a TFDS data source.

    Attributes:
        files: The image files.
        labels: int32 ``[n]``.
    """

    files: list[pathlib.Path]
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.files)

    def __getitems__(self, keys: Sequence[int]) -> list[dict[str, Any]]:
        """Returns the records, with the name of each in error messages."""
        return [
            {
                "image": self.files[key].read_bytes(),
                "label": self.labels[key],
                "where": str(self.files[key]),
            }
            for key in keys
        ]


def _list_images(folder: pathlib.Path, left_out: list[str]) -> list[pathlib.Path]:
    """Returns the image files of ``<folder>/<class>/``; adds to what is left out."""
    if not folder.is_dir():
        raise FileNotFoundError(f"The image folder {folder} is missing: {LAYOUT}.")
    found = [
        path
        for path in sorted([*folder.glob("*"), *folder.glob("*/*")])
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    inner = [path for path in found if path.parent != folder]
    # Reading a named pipe would block.
    files = [p for p in inner if p.suffix.lower() in KINDS and p.is_file()]
    if not files:
        raise ValueError(f"The image folder {folder} holds no images: {LAYOUT}.")
    known, classes = set(files), {file.parent for file in files}
    others = {
        "classes without images": [
            path
            for path in found
            if path.parent == folder and path.is_dir() and path not in classes
        ],
        "sub-folders of classes": [path for path in inner if path.is_dir()],
        "other files": [p for p in found if not p.is_dir() and p not in known],
    }
    left_out += [
        f"{what}: {_names(paths, folder.parent)}"
        for what, paths in others.items()
        if paths
    ]
    return files


def _names(paths: Sequence[pathlib.Path], folder: pathlib.Path) -> str:
    names = [str(path.relative_to(folder)) for path in paths[:MAX_NAMES]]
    more = len(paths) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def _read_split(found: FolderFiles, files: list[pathlib.Path]) -> ImageSplit:
    first = found.train[0]
    shape = _read_image(first).shape
    images = np.empty((len(files), *shape), np.uint8)
    title = f"Reading {files[0].parents[1].name} images"
    bar = tqdm(files, desc=title, unit=" images", delay=2, disable=None)
    for index, file in enumerate(bar):
        image = _read_image(file, shape, first)
        if image.shape[2] > shape[2]:
            raise ValueError(f"{file} is in colour, but {first} is grey: convert one.")
        # A grey image among colour images is broadcast to all three channels.
        images[index] = image
    return ImageSplit(images, found.labels(files))


def _read_image(
    file: pathlib.Path, shape: tuple[int, ...] = (), first: pathlib.Path | None = None
) -> np.ndarray:
    with open_image(file, str(file)) as image:
        # Before decoding: an image of another size may be very large.
        if shape and image.size != shape[1::-1]:
            raise ValueError(
                f"{file} has {image.width}x{image.height} pixels, but {first} has "
                f"{shape[1]}x{shape[0]}: resize all images to one size, or read them "
                "by `load_data`, which takes any size."
            )
        grey = image.mode in GREY_MODES
        pixels = np.asarray(decode_image(image, "L" if grey else "RGB", str(file)))
    return pixels[..., None] if grey else pixels

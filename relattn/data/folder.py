"""Reads images from folders, one folder per class."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image
from tqdm import tqdm

from relattn.data.image_io import (
    FORMATS,
    UnreadableImageError,
    check_image,
    decode_image,
    open_image,
    read_image_file,
)
from relattn.data.images import ImageSplit
from relattn.messages import printable

KINDS = {suffix: kind for kind, suffixes in FORMATS.items() for suffix in suffixes}
LAYOUT = (
    "expected train/<class>/*.jpg, and optionally test/<class>/*.jpg (or "
    f"{', '.join(suffix for suffix in KINDS if suffix != '.jpg')})"
)
# Images of one size are read into memory up to this size.
MEMORY_BYTES = 2**30
# Files that a thread decodes at once.
CHUNK = 32
# Names shown of what is left out, and of what has to be replaced.
MAX_NAMES = 3
MAX_UNREADABLE = 10
HINT = "replace or delete it, or set data.skip_unreadable=True"


@dataclasses.dataclass(frozen=True)
class FolderFiles:
    """The image files of ``train/<class>/`` and ``test/<class>/``.

    Attributes:
        root: The folder that holds ``train`` and, optionally, ``test``.
        train: The training images, sorted by class and file name.
        test: The test images; empty if there is no folder ``test``.
        left_out: What is not read, in words.
    """

    root: Path
    train: list[Path]
    test: list[Path]
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

    def labels(self, files: Sequence[Path]) -> np.ndarray:
        """Returns the label of each file, int32, shape ``[n]``."""
        label = {name: label for label, name in enumerate(self.class_names)}
        return np.array([label[file.parent.name] for file in files], np.int32)


def find_files(root: Path) -> FolderFiles:
    """Lists the images of a folder.

    Hidden files and folders are left out. Sub-folders of classes, classes without
    images and other files are left out and named.

    Args:
        root: The folder that holds ``train`` and, optionally, ``test``.

    Returns:
        The files.

    Raises:
        FileNotFoundError: If ``root`` or its folder ``train`` is missing.
        ValueError: If a folder holds no images, or an image belongs to a class without
            training images.
    """
    left_out: list[str] = []
    train = _list_images(root / "train", left_out)
    test = _list_images(root / "test", left_out) if (root / "test").exists() else []
    files = FolderFiles(root, train, test, left_out)
    _check_classes(files)
    return files


def _check_classes(files: FolderFiles) -> None:
    for file in files.test:
        if file.parent.name not in files.class_names:
            raise ValueError(
                f"the class {file.parent.name!r} of {file} has no training images: add "
                "some, or delete its test images"
            )


def read_folder(
    root: Path, *, skip_unreadable: bool = False, background: str = "white"
) -> tuple[ImageSplit, ImageSplit | None, tuple[str, ...], str]:
    """Reads images of one size, ``train/<class>/*`` and ``test/<class>/*``.

    Classes are numbered in the order of their names; images are sorted by class and
    file name. A warning names what is left out.

    Args:
        root: The folder that holds ``train`` and, optionally, ``test``.
        skip_unreadable: Whether to leave out images that cannot be read, instead of
            raising.
        background: Colour behind transparent pixels, a name or ``"#rrggbb"``.

    Returns:
        The training images, the test images or None, the class names and the origin.

    Raises:
        FileNotFoundError: If ``root`` or its folder ``train`` is missing.
        ValueError: If a folder holds no images, images cannot be read and are not left
            out, the images differ in size or mix grey and colour, or an image belongs
            to a class without training images.
    """
    decoded = decode_files(
        find_files(root), skip_unreadable=skip_unreadable, background=background
    )
    if decoded.images is None:
        raise ValueError(
            f"{decoded.problem}: resize all images to one size, or read them with "
            "`load_data`, which takes any size"
        )
    decoded.files.warn()
    return decoded.splits()


@dataclasses.dataclass(frozen=True, eq=False)
class DecodedFiles:
    """Result of `decode_files`.

    Attributes:
        files: The files that could be read.
        images: Images, those of training first, uint8, shape
            ``[n, height, width, channels]``; None if they do not fit into one array.
        problem: Why they do not fit, in words.
    """

    files: FolderFiles
    images: UInt8[np.ndarray, "n height width channels"] | None
    problem: str = ""

    def splits(self) -> tuple[ImageSplit, ImageSplit | None, tuple[str, ...], str]:
        """Returns the training images, the test images or None, classes and origin."""
        assert self.images is not None, self.problem
        files, count = self.files, len(self.files.train)
        train = ImageSplit(self.images[:count], files.labels(files.train))
        test = ImageSplit(self.images[count:], files.labels(files.test))
        return train, test if files.test else None, files.class_names, files.origin


def decode_files(
    files: FolderFiles,
    *,
    memory_bytes: int | float = math.inf,
    skip_unreadable: bool = False,
    background: str = "white",
) -> DecodedFiles:
    """Decodes every image once, in threads, and keeps the images if they fit.

    Grey images have one channel, colour images three.

    Args:
        files: The image files.
        memory_bytes: Largest size of all images together, as colour images.
        skip_unreadable: Whether to leave out images that cannot be read, instead of
            raising.
        background: Colour behind transparent pixels, a name or ``"#rrggbb"``.

    Returns:
        The images, or why they do not fit into one array: they differ in size, or take
        more memory.

    Raises:
        ValueError: If images cannot be read and are not left out, no image is left, or
            an image is in colour and the first, of the same size, is grey.
    """
    paths = files.train + files.test
    decoder = _Decoder(memory_bytes / (3 * len(paths)), background)
    unreadable: dict[Path, UnreadableImageError] = {}
    kept: list[Path] = []
    images: np.ndarray | None = None
    colour: Path | None = None
    problem = ""
    title = printable(f"Reading {files.root.name}")
    bar = tqdm(total=len(paths), desc=title, unit=" images", delay=2, disable=None)
    with bar, _in_threads(decoder, paths) as results:
        for path, found in zip(paths, results, strict=True):
            bar.update()
            if isinstance(found, UnreadableImageError):
                unreadable[path] = found
                continue
            kept.append(path)
            if problem:
                continue
            if found is None:
                problem = f"{path} and the others would take too much memory"
            else:
                if images is None:
                    images = np.empty((len(paths), *found.shape), np.uint8)
                height, width, channels = images.shape[1:]
                if found.shape[:2] != (height, width):
                    problem = (
                        f"{path} has {found.shape[1]}x{found.shape[0]} pixels, but "
                        f"{kept[0]} has {width}x{height}"
                    )
                elif found.shape[2] > channels:
                    colour = colour or path
                else:
                    # A grey image among colour images is broadcast to all channels.
                    images[len(kept) - 1] = found
            if problem:
                decoder.keep, images = False, None
    if unreadable:
        files = _without(files, unreadable, skip_unreadable)
    if images is not None and colour is not None:
        raise ValueError(
            f"{colour} is in colour, but {kept[0]} is grey: convert one of them"
        )
    return DecodedFiles(files, None if images is None else images[: len(kept)], problem)


class _Decoder:
    """Decodes one file after another, in several threads.

    Attributes:
        keep: Whether the pixels are wanted, not only whether they can be decoded.
    """

    def __init__(self, max_pixels: float, background: str):
        self.keep = True
        self._max_pixels = max_pixels
        self._background = background

    def __call__(
        self, path: Path
    ) -> UInt8[np.ndarray, "height width channels"] | UnreadableImageError | None:
        """Returns the pixels, None if they are not wanted or too many, or the error."""
        try:
            with open_image(path, str(path), HINT) as image:
                if not self.keep or image.width * image.height > self._max_pixels:
                    return check_image(image, str(path), HINT)
                image = decode_image(
                    image, str(path), HINT, background=self._background
                )
        except UnreadableImageError as error:
            return error
        return np.atleast_3d(np.asarray(image))


@contextlib.contextmanager
def _in_threads(
    function: Callable[[Any], Any], items: Sequence[Any]
) -> Iterator[Iterator[Any]]:
    """Yields the results of a function, in order; stops it if the context ends."""
    chunks = (items[start : start + CHUNK] for start in range(0, len(items), CHUNK))
    pool = ThreadPoolExecutor()
    # Pillow warns of images that it takes for bombs; `open_image` refuses them.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            results = pool.map(lambda chunk: [function(item) for item in chunk], chunks)
            yield itertools.chain.from_iterable(results)
        finally:
            pool.shutdown(cancel_futures=True)


def _without(
    files: FolderFiles,
    unreadable: Mapping[Path, UnreadableImageError],
    skip_unreadable: bool,
) -> FolderFiles:
    """Returns the files without those that cannot be read, or raises the error."""
    paths = [*unreadable]
    if not skip_unreadable:
        if len(paths) == 1:
            raise unreadable[paths[0]]
        shown = "; ".join(
            f"{path.relative_to(files.root)} ({unreadable[path].problem})"
            for path in paths[:MAX_UNREADABLE]
        )
        more = len(paths) - MAX_UNREADABLE
        raise ValueError(
            f"{len(paths)} of the {len(files.train) + len(files.test)} images of "
            f"{files.root} cannot be read: {shown}"
            f"{f' and {more} more' if more > 0 else ''}: {HINT.replace(' it', ' them')}"
        )
    train, test = (
        [path for path in split if path not in unreadable]
        for split in (files.train, files.test)
    )
    for after, before in ((train, files.train), (test, files.test)):
        if before and not after:
            raise _all_unreadable(before[0].parents[1], unreadable[before[0]])
    tested = {path.parent.name for path in test}
    left_out = [f"unreadable images: {_names(paths, files.root)}"]
    result = FolderFiles(files.root, train, test, files.left_out + left_out)
    if lost := [name for name in files.class_names if name not in result.class_names]:
        for path in files.train:
            if path.parent.name in lost and path.parent.name in tested:
                raise _all_unreadable(path.parent, unreadable[path])
        shown = ", ".join(f"train/{name}" for name in lost)
        result.left_out.append(f"classes without readable images: {shown}")
    return result


def _all_unreadable(folder: Path, first: UnreadableImageError) -> ValueError:
    return ValueError(
        f"none of the images in {folder} can be read; the first is {first}"
    )


@dataclasses.dataclass(frozen=True, eq=False)
class FileRecords:
    """Encoded images with labels, read when needed: like a TFDS data source.

    Attributes:
        files: The image files.
        labels: Labels, int32, shape ``[n]``.
    """

    files: list[Path]
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.files)

    def __getitems__(self, keys: Sequence[int]) -> list[dict[str, Any]]:
        """Returns the records, with the name of each in error messages."""
        return [
            {
                "image": read_image_file(self.files[key], HINT),
                "label": self.labels[key],
                "where": str(self.files[key]),
            }
            for key in keys
        ]


def _visible(folder: Path) -> list[Path]:
    """Lists a folder; unlike `Path.glob`, raises OSError where it must not be read."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _list_images(folder: Path, left_out: list[str]) -> list[Path]:
    """Returns the image files of ``<folder>/<class>/``; adds to what is left out."""
    if not folder.is_dir():
        raise FileNotFoundError(f"the image folder {folder} is missing: {LAYOUT}")
    found = []
    for path in _visible(folder):
        found.append(path)
        if path.is_dir():
            found += _visible(path)
    inner = [path for path in found if path.parent != folder]
    # Reading a named pipe would block.
    files = [p for p in inner if p.suffix.lower() in KINDS and p.is_file()]
    if not files:
        raise ValueError(f"the image folder {folder} holds no images: {LAYOUT}")
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


def _names(paths: Sequence[Path], folder: Path) -> str:
    names = [str(path.relative_to(folder)) for path in paths[:MAX_NAMES]]
    more = len(paths) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")

"""Lists of encoded images with their classes, decoded into memory or read one by one.

`relattn.data.folder`, `relattn.data.csv_images` and `relattn.data.huggingface` make
them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt8
from PIL import Image
from tqdm import tqdm

from relattn.data.image_io import (
    UnreadableImageError,
    check_image,
    decode_image,
    open_image,
    read_image_file,
)
from relattn.data.images import ImageSplit
from relattn.messages import printable

# Images of one size are read into memory up to this size.
MEMORY_BYTES = 2**30
# Files that a thread decodes at once.
CHUNK = 32
WITHOUT_TEST = ", without test images: the validation images are the test images"
# Names shown of what is left out, and of what has to be replaced.
MAX_NAMES = 3
MAX_UNREADABLE = 10
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")
HINT = "replace or delete it, or set data.skip_unreadable=True"


@runtime_checkable
class ImageSource(Protocol):
    """An encoded image with the name of its class; `str` names it in messages."""

    @property
    def class_name(self) -> str:
        """The name of its class."""
        ...

    def open(self) -> Path | io.BytesIO:
        """Returns the file, or its contents."""
        ...

    def read(self) -> bytes:
        """Returns the contents."""
        ...

    def size(self) -> int:
        """Returns the size in bytes; 0 if it is not known without reading."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class ImageFile:
    """An image file with its class: an `ImageSource`.

    Attributes:
        path: The file.
        class_name: The name of its class.
        line: Its line in a table, from 1; 0 if there is no table.
    """

    path: Path
    class_name: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.path} (line {self.line})" if self.line else str(self.path)

    def open(self) -> Path:
        """Returns the path."""
        return self.path

    def read(self) -> bytes:
        """Returns the contents of the file.

        Raises:
            UnreadableImageError: If it is too large.
        """
        return read_image_file(self.path, HINT)

    def size(self) -> int:
        """Returns the size of the file."""
        return self.path.stat().st_size


class Images(NamedTuple):
    """Images in memory, with the names of their classes.

    Attributes:
        train: The training images.
        test: The test images; None for those of validation.
        class_names: Class names in label order.
        origin: Where the images came from, in words.
        validation: The validation images; None to hold out training images.
    """

    train: ImageSplit
    test: ImageSplit | None
    class_names: tuple[str, ...]
    origin: str
    validation: ImageSplit | None = None


@dataclasses.dataclass(frozen=True)
class ImageList:
    """Encoded images with their classes.

    Attributes:
        root: The folder or file that lists them.
        train: The training images.
        test: The test images; empty if there are none.
        class_names: Class names in label order.
        origin: Where the images come from, in words.
        left_out: What is not read, in words.
        validation: The validation images; empty to hold out training images.
    """

    root: Path
    train: Sequence[ImageSource]
    test: Sequence[ImageSource]
    class_names: tuple[str, ...]
    origin: str
    left_out: list[str] = dataclasses.field(default_factory=list)
    validation: Sequence[ImageSource] = ()

    @property
    def splits(self) -> tuple[Sequence[ImageSource], ...]:
        """The images for training, validation and testing."""
        return self.train, self.validation, self.test

    def warn(self) -> None:
        """Warns about what is not read."""
        if self.left_out:
            text = f"{self.root}: left out {'; '.join(self.left_out)}"
            warnings.warn(text, stacklevel=2)

    def labels(self, images: Sequence[ImageSource]) -> np.ndarray:
        """Returns the label of each image, int32, shape ``[n]``."""
        label = {name: label for label, name in enumerate(self.class_names)}
        return np.array([label[image.class_name] for image in images], np.int32)

    def name(self, image: ImageSource) -> str:
        """Returns the name of an image for a list, without the folder of all."""
        return str(image).removeprefix(f"{self.root}/")


def class_order(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the different names of classes in the order of their labels.

    Args:
        names: The name of the class of each image.

    Returns:
        The names, in numerical order if all are numbers, else in alphabetical order.

    Example:
        >>> class_order(["10", "9", "9"]), class_order(["2.0", "-1"])
        (('9', '10'), ('-1', '2.0'))
        >>> class_order(["dog", "cat"])
        ('cat', 'dog')
    """
    different = set(names)
    if all(map(_NUMBER.fullmatch, different)):
        return tuple(sorted(different, key=lambda name: (Decimal(name), name)))
    return tuple(sorted(different))


def check_classes(images: ImageList) -> None:
    """Checks that there are several classes, and that all have training images.

    Args:
        images: The images; their `class_names` is not used.

    Raises:
        ValueError: If there is one class, two names are the same number, or an image of
            another split is of a class that has no training images.
    """
    known = {image.class_name for image in images.train}
    check_several_classes(sorted(known), str(images.root))
    for image in itertools.chain(images.validation, images.test):
        if image.class_name not in known:
            raise ValueError(
                f"the class {image.class_name!r} of {image} has no training images: "
                "add some, or delete its other images"
            )


def check_several_classes(class_names: Sequence[str], where: str) -> None:
    """Checks that there are several classes, and that no two are the same number.

    Args:
        class_names: The names of the classes of the training images.
        where: The source of the images, for the message.

    Raises:
        ValueError: If there is one class, or two names are the same number.
    """
    if len(class_names) == 1:
        raise ValueError(
            f"all training images of {where} are of one class, {class_names[0]!r}: "
            "add images of another class"
        )
    numbers: dict[Decimal, str] = {}
    for name in filter(_NUMBER.fullmatch, class_names):
        other = numbers.setdefault(Decimal(name), name)
        if other != name:
            raise ValueError(
                f"the labels {other!r} and {name!r} of {where} are the same number, "
                "but different classes: use one spelling"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class DecodedImages:
    """Result of `decode_list`.

    Attributes:
        listed: The images that could be read.
        images: Their pixels, those of training first, then of validation, uint8, shape
            ``[n, height, width, channels]``; None if they do not fit into one array.
        problem: Why they do not fit, in words.
    """

    listed: ImageList
    images: UInt8[np.ndarray, "n height width channels"] | None
    problem: str = ""

    def splits(self) -> Images:
        """Returns the images of each split, the class names and the origin."""
        assert self.images is not None, self.problem
        found, start = [], 0
        for split in self.listed.splits:
            stop = start + len(split)
            pixels = self.images[start:stop]
            found.append(ImageSplit(pixels, self.listed.labels(split)))
            start = stop
        train, validation, test = found
        return Images(
            train,
            test if len(test) else None,
            self.listed.class_names,
            self.listed.origin,
            validation if len(validation) else None,
        )


def decode_list(
    listed: ImageList,
    *,
    memory_bytes: int | float = math.inf,
    skip_unreadable: bool = False,
    background: str = "white",
) -> DecodedImages:
    """Decodes every image once, in threads, and keeps the images if they fit.

    Images have three channels if one of them is in colour, otherwise one.

    Args:
        listed: The images.
        memory_bytes: Largest size of all images together, as colour images.
        skip_unreadable: Whether to leave out images that cannot be read, instead of
            raising.
        background: Colour behind transparent pixels, a name or ``"#rrggbb"``.

    Returns:
        The images, or why they do not fit into one array: they differ in size, or take
        more memory.

    Raises:
        ValueError: If images cannot be read and are not left out, or no image is left.
    """
    sources = [*itertools.chain(*listed.splits)]
    decoder = _Decoder(memory_bytes / (3 * len(sources)), background)
    unreadable: dict[ImageSource, UnreadableImageError] = {}
    kept: list[ImageSource] = []
    images: np.ndarray | None = None
    problem = ""
    title = printable(f"Reading {listed.root.name}")
    bar = tqdm(total=len(sources), desc=title, unit=" images", delay=2, disable=None)
    with bar, _in_threads(decoder, sources) as results:
        for source, found in zip(sources, results, strict=True):
            bar.update()
            if isinstance(found, UnreadableImageError):
                unreadable[source] = found
                continue
            kept.append(source)
            if problem:
                continue
            if found is None:
                problem = f"{source} and the others would take too much memory"
            else:
                if images is None:
                    images = np.empty((len(sources), *found.shape), np.uint8)
                height, width, channels = images.shape[1:]
                if found.shape[:2] != (height, width):
                    problem = (
                        f"{source} has {found.shape[1]}x{found.shape[0]} pixels, but "
                        f"{kept[0]} has {width}x{height}"
                    )
                else:
                    if found.shape[2] > channels:
                        # Those before it are grey.
                        images = np.repeat(images, 3, axis=-1)
                    # A grey image among colour images is broadcast to all channels.
                    images[len(kept) - 1] = found
            if problem:
                decoder.keep, images = False, None
    if unreadable:
        listed = _without(listed, unreadable, skip_unreadable)
    return DecodedImages(
        listed, None if images is None else images[: len(kept)], problem
    )


def read_list(
    listed: ImageList, *, skip_unreadable: bool = False, background: str = "white"
) -> Images:
    """Reads images of one size into memory; a warning names what is left out.

    Args:
        listed: The images.
        skip_unreadable: Whether to leave out images that cannot be read, instead of
            raising.
        background: Colour behind transparent pixels, a name or ``"#rrggbb"``.

    Returns:
        The images of each split, the class names and the origin.

    Raises:
        ValueError: If images cannot be read and are not left out, or the images differ
            in size.
    """
    decoded = decode_list(
        listed, skip_unreadable=skip_unreadable, background=background
    )
    if decoded.images is None:
        raise ValueError(
            f"{decoded.problem}: resize all images to one size, or read them with "
            "`load_data`, which takes any size"
        )
    decoded.listed.warn()
    return decoded.splits()


class _Decoder:
    """Decodes one image after another, in several threads.

    Attributes:
        keep: Whether the pixels are wanted, not only whether they can be decoded.
    """

    def __init__(self, max_pixels: float, background: str):
        self.keep = True
        self._max_pixels = max_pixels
        self._background = background

    def __call__(
        self, source: ImageSource
    ) -> UInt8[np.ndarray, "height width channels"] | UnreadableImageError | None:
        """Returns the pixels, None if they are not wanted or too many, or the error."""
        where = str(source)
        try:
            with open_image(source.open(), where, HINT) as image:
                if not self.keep or image.width * image.height > self._max_pixels:
                    return check_image(image, where, HINT)
                image = decode_image(image, where, HINT, background=self._background)
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
    listed: ImageList,
    unreadable: Mapping[ImageSource, UnreadableImageError],
    skip_unreadable: bool,
) -> ImageList:
    """Returns the images without those that cannot be read, or raises the error."""
    sources = [*unreadable]
    if not skip_unreadable:
        if len(sources) == 1:
            raise unreadable[sources[0]]
        problems = {listed.name(source): unreadable[source] for source in sources}
        raise ValueError(
            f"{len(sources)} of the {sum(map(len, listed.splits))} images of "
            f"{listed.root} cannot be read: {_list_problems(problems)}: "
            f"{HINT.replace(' it', ' them')}"
        )
    splits = {}
    for name in ("train", "validation", "test"):
        before = getattr(listed, name)
        splits[name] = [source for source in before if source not in unreadable]
        if before and not splits[name]:
            where = f"the {name} images of {listed.root}"
            raise _all_unreadable(where, unreadable[before[0]])
    had = {source.class_name for source in listed.train}
    have = {source.class_name for source in splits["train"]}
    used = {source.class_name for source in splits["validation"] + splits["test"]}
    names = listed.name
    left_out = [f"unreadable images: {list_names([names(s) for s in sources])}"]
    lost = [name for name in listed.class_names if name in had - have]
    if lost:
        for source in listed.train:
            if source.class_name in lost and source.class_name in used:
                where = f"class {source.class_name!r} of {listed.root}"
                raise _all_unreadable(
                    f"the training images of {where}", unreadable[source]
                )
        left_out.append(f"classes without readable images: {', '.join(lost)}")
    class_names = tuple(name for name in listed.class_names if name not in lost)
    return dataclasses.replace(
        listed,
        **splits,
        class_names=class_names,
        left_out=listed.left_out + left_out,
    )


def check_files(files: Sequence[Path]) -> None:
    """Decodes image files once, in threads, before they are predicted one by one.

    Args:
        files: The files.

    Raises:
        ValueError: If some cannot be read; the message lists them.
    """
    decoder = _Decoder(0.0, "white")
    decoder.keep = False
    title = "Checking the images"
    bar = tqdm(total=len(files), desc=title, unit=" images", delay=2, disable=None)
    problems = {}
    with bar, _in_threads(decoder, [ImageFile(file, "") for file in files]) as results:
        for file, found in zip(files, results, strict=True):
            bar.update()
            if isinstance(found, UnreadableImageError):
                problems[str(file)] = found
    if problems:
        raise ValueError(
            f"{len(problems)} of the {len(files)} images cannot be read: "
            f"{_list_problems(problems)}: replace or delete them"
        )


def _list_problems(errors: Mapping[str, UnreadableImageError]) -> str:
    """Lists the first images that cannot be read, and why; counts the others."""
    shown = [f"{name} ({error.problem})" for name, error in errors.items()]
    more = len(shown) - MAX_UNREADABLE
    return "; ".join(shown[:MAX_UNREADABLE]) + f" and {more} more" * (more > 0)


def _all_unreadable(where: str, first: UnreadableImageError) -> ValueError:
    # They are skipped already.
    first_problem = str(first).replace(HINT, "replace or delete them")
    return ValueError(f"none of {where} can be read; the first is {first_problem}")


def list_names(names: Sequence[str]) -> str:
    """Lists the first of some names, and counts the others.

    Example:
        >>> list_names(["a", "b", "c", "d"])
        'a, b, c and 1 more'
    """
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


@dataclasses.dataclass(frozen=True, eq=False)
class ImageRecords:
    """Encoded images with labels, read when needed: like a TFDS data source.

    Attributes:
        sources: The images.
        labels: Labels, int32, shape ``[n]``.
    """

    sources: Sequence[ImageSource]
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.sources)

    def __getitems__(self, keys: Sequence[int]) -> list[dict[str, Any]]:
        """Returns the records, with the name of each in error messages."""
        return [
            {
                "image": self.sources[key].read(),
                "label": self.labels[key],
                "where": str(self.sources[key]),
            }
            for key in keys
        ]

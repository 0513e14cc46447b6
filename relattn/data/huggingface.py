"""Lists the images of a Hugging Face data set on disk, through `datasets`."""

from __future__ import annotations

import dataclasses
import importlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relattn.command import lacks_resources
from relattn.data.csv_images import SPLITS
from relattn.data.errors import describe_error
from relattn.data.image_io import UnreadableImageError, decode_image, open_image
from relattn.data.image_list import (
    HINT,
    ImageList,
    check_classes,
    class_order,
)
from relattn.messages import shorten

# Preferred to other columns of their kind.
IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "labels")
SAVE = "save it with dataset.save_to_disk"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The images of a split.

    Attributes:
        split: A `datasets.Dataset`, whose images are not decoded.
        column: The name of its column of images.
        where: Its name in messages.
        mode: Pillow's mode that the column asks for, such as "L"; None for any.
    """

    split: Any
    column: str
    where: str
    mode: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class HuggingFaceImage:
    """An image of a data set: a `relattn.data.image_list.ImageSource`.

    Attributes:
        rows: Its split.
        index: Its row, from 0.
        class_name: The name of its class.
    """

    rows: _Rows
    index: int
    class_name: str

    def __str__(self) -> str:
        return f"row {self.index} of {self.rows.where}"

    def open(self) -> io.BytesIO:
        """Returns the encoded image."""
        return io.BytesIO(self.read())

    def read(self) -> bytes:
        """Returns the encoded image.

        Raises:
            UnreadableImageError: If the row cannot be read, or has no image.
        """
        try:
            value = self.rows.split[self.index][self.rows.column]
        except Exception as error:
            if lacks_resources(error):
                raise
            raise UnreadableImageError(
                str(self), describe_error(error), HINT
            ) from error
        content = (value or {}).get("bytes")
        if not content:
            problem = "the row has a path or nothing instead of an image's bytes"
            raise UnreadableImageError(str(self), problem, SAVE)
        return _convert(content, self.rows.mode, str(self))

    def size(self) -> int:
        """Returns 0: the size is not known without reading."""
        return 0


def find_huggingface_images(folder: Path) -> ImageList:
    """Lists the images of a data set that ``save_to_disk`` wrote; uses no network.

    Args:
        folder: The folder, of a `datasets.Dataset` with training images, or of a
            `datasets.DatasetDict` with splits named as in
            `relattn.data.csv_images.SPLITS`.

    Returns:
        The images. The classes are those of the data set's ``ClassLabel``; other labels
        are in numerical order if all are numbers, else in alphabetical order. Splits
        without labels are left out.

    Raises:
        ImportError: If `datasets` is not installed.
        FileNotFoundError: If the folder is missing.
        ValueError: If it holds no such data set, the column of the images or the labels
            is not clear, or there are no training images of at least two classes.
    """
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise ImportError(
            "the data.source 'hf' needs datasets: pip install 'relattn[hf]'"
        ) from error
    if not folder.is_dir():
        raise FileNotFoundError(
            f"the folder data.data_dir={folder} is missing: set it to the folder of a "
            f"Hugging Face data set, or {SAVE}(DIR)"
        )
    try:
        found = datasets.load_from_disk(str(folder))
    except Exception as error:
        if lacks_resources(error):
            raise
        raise ValueError(
            f"{folder} holds no Hugging Face data set ({describe_error(error)}): "
            f"{SAVE}(DIR), and set data.data_dir to this folder"
        ) from error
    given = dict(found) if isinstance(found, datasets.DatasetDict) else {"train": found}
    splits: dict[str, list[HuggingFaceImage]] = {name: [] for name in SPLITS.values()}
    left_out, class_names = [], ()
    for name, split in given.items():
        if name not in SPLITS:
            left_out.append(f"split {name}")
            continue
        where = f"the split {name} in {folder}"
        is_train = SPLITS[name] == "train"
        images, names = _read_split(datasets, split, where, is_train)
        if not images:
            left_out.append(f"split {name}, which has no labels")
        elif splits[SPLITS[name]]:
            raise ValueError(
                f"{where} is a second one of {SPLITS[name]} images: delete one of them"
            )
        else:
            splits[SPLITS[name]] = images
        class_names = names if is_train else class_names
    if not splits["train"]:
        raise ValueError(
            f"the data set in {folder} has no training images, only the splits "
            f"{', '.join(given)}: save a DatasetDict with a split 'train'"
        )
    listed = ImageList(
        folder,
        splits["train"],
        splits["test"],
        class_names or class_order(image.class_name for image in splits["train"]),
        f"the Hugging Face data set in {folder}",
        left_out,
        splits["validation"],
    )
    check_classes(listed)
    return listed


def _read_split(
    datasets: Any, split: Any, where: str, required: bool
) -> tuple[list[HuggingFaceImage], tuple[str, ...]]:
    """Returns the images of a split, if it has labels, and the names of these."""
    features = split.features
    image = _column(
        {name: isinstance(x, datasets.Image) for name, x in features.items()},
        IMAGE_COLUMNS,
        f"{where} has no column of images",
        "cast it to datasets.Image",
    )
    kinds = {
        name: isinstance(x, datasets.ClassLabel)
        or (name in LABEL_COLUMNS and isinstance(x, datasets.Value))
        for name, x in features.items()
    }
    if not required and not any(kinds.values()):
        return [], ()
    label = _column(
        kinds,
        LABEL_COLUMNS,
        f"{where} has no column of labels",
        "cast it to datasets.ClassLabel",
    )
    names = tuple(getattr(features[label], "names", None) or ())
    labels = list(split.select_columns([label]).with_format(None)[:][label])
    if not labels or all(x is None or x == -1 for x in labels):
        return [], names
    undecoded = split.with_format(None).cast_column(image, datasets.Image(decode=False))
    rows = _Rows(undecoded.select_columns([image]), image, where, features[image].mode)
    found = [
        HuggingFaceImage(rows, index, _class_name(value, names, rows, index))
        for index, value in enumerate(labels)
    ]
    return found, names


def _convert(content: bytes, mode: str | None, where: str) -> bytes:
    """Returns an encoded image as grey or RGB if the data set asks for it."""
    if mode not in ("L", "RGB"):
        return content
    with open_image(io.BytesIO(content), where, HINT) as image:
        if image.mode == mode:
            return content
        image = decode_image(image, where, HINT, background=None)
    file = io.BytesIO()
    # Transparent pixels remain: they get the background of the configuration.
    mode += "A" * (image.mode == "RGBA")
    image.convert(mode).save(file, "PNG", compress_level=0, icc_profile=None)
    return file.getvalue()


def _column(kinds: Mapping[str, bool], preferred: Any, problem: str, fix: str) -> str:
    """Returns the only column of a kind, or the one that has a preferred name."""
    found = [name for name, fits in kinds.items() if fits]
    chosen = [name for name in preferred if name in found][:1] or found
    if not chosen:
        raise ValueError(f"{problem}, only {shorten(', '.join(kinds))}: {fix}")
    if len(chosen) > 1:
        raise ValueError(
            f"{problem} named {preferred[0]!r}, but {', '.join(chosen)}: rename one of "
            f"them to {preferred[0]!r} by dataset.rename_column"
        )
    return chosen[0]


def _class_name(value: Any, names: tuple[str, ...], rows: _Rows, index: int) -> str:
    """Returns the name of the class of a label."""
    if names and isinstance(value, int) and 0 <= value < len(names):
        return names[value]
    if not names and isinstance(value, str | int) and value != "":
        return str(value)
    raise ValueError(
        f"row {index} of {rows.where} has the label {shorten(value)}, expected "
        f"{f'0 to {len(names) - 1}' if names else 'a name or an integer'}: correct or "
        "remove the row"
    )

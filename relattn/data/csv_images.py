"""Lists the images of a CSV file with the columns ``path`` and ``label``."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from pathlib import Path

from relattn.data.image_list import (
    ImageFile,
    ImageList,
    check_classes,
    class_order,
    list_names,
)
from relattn.files import naming
from relattn.messages import shorten

COLUMNS = ("path", "label")
SPLIT = "split"
# Names of the splits in tables and in data sets of Hugging Face.
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}


def find_csv_images(file: Path, *, skip_missing: bool = False) -> ImageList:
    r"""Lists the images of a CSV file.

    The first line has the names of the columns: ``path``, relative to the file's
    folder, ``label``, the name or the number of a class, and optionally ``split``, one
    of `SPLITS`, or empty for training. Other columns are not used, but named in a
    warning.

    Args:
        file: The CSV file, in UTF-8.
        skip_missing: Whether to leave out images whose files are missing, instead of
            raising.

    Returns:
        The images in the order of the file. The classes are in numerical order if all
        are numbers, else in alphabetical order.

    Raises:
        FileNotFoundError: If the file, or that of an image, is missing.
        ValueError: If a line cannot be read, lists an image again or has an unknown
            split, there are no training images, all of them are of one class, or a
            class has none of them.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name in ("1.png", "2.png"):
        ...     (folder / name).touch()
        >>> _ = (folder / "all.csv").write_text("path,label\n1.png,dog\n2.png,cat\n")
        >>> find_csv_images(folder / "all.csv").class_names
        ('cat', 'dog')
    """
    if file.is_dir():
        raise ValueError(f"{file} is a folder: set data.data_dir to the CSV file")
    if not file.is_file():
        raise FileNotFoundError(
            f"the CSV file {file} is missing: set data.data_dir to it"
        )
    listed, others = _list_images(file)
    splits: dict[str, list[ImageFile]] = {name: [] for name in SPLITS.values()}
    missing: list[ImageFile] = []
    for split, image in listed:
        (splits[split] if image.path.is_file() else missing).append(image)
    left_out = [f"columns: {list_names(others)}"] if others else []
    if missing:
        shown = list_names([*map(str, missing)])
        if not skip_missing:
            slashes = ", with / in place of \\" * ("\\" in shown)
            raise FileNotFoundError(
                f"{len(missing)} of the {len(listed)} images of {file} are missing: "
                f"{shown}: paths are relative to {file.parent}{slashes}; correct or "
                "delete the lines, or set data.skip_unreadable=True"
            )
        left_out.append(f"missing images: {shown}")
    if not splits["train"]:
        raise ValueError(
            f"{file} lists no training images: add lines, or write train as their "
            f"{SPLIT}"
        )
    names = class_order(image.class_name for image in splits["train"])
    images = ImageList(
        root=file,
        train=splits["train"],
        test=splits["test"],
        class_names=names,
        origin=f"the images of {file}",
        left_out=left_out,
        validation=splits["validation"],
    )
    check_classes(images)
    return images


def _list_images(file: Path) -> tuple[list[tuple[str, ImageFile]], list[str]]:
    """Returns the split and the file of each image, and the names of other columns.

    The files need not exist.
    """
    listed: list[tuple[str, ImageFile]] = []
    lines: dict[Path, int] = {}
    row: dict[str, str] = {}
    for line, row in _rows(file):
        path = Path(os.path.normpath(file.parent / row["path"]))
        if path in lines:
            raise ValueError(
                f"line {line} of {file} lists {shorten(row['path'])} again, after line "
                f"{lines[path]}: delete one of the lines"
            )
        lines[path] = line
        given = row.get(SPLIT) or "train"
        if given not in SPLITS:
            raise ValueError(
                f"line {line} of {file} has the {SPLIT} {shorten(given)}: write one of "
                f"{', '.join(SPLITS)}"
            )
        listed.append((SPLITS[given], ImageFile(path, row["label"], line)))
    # pandas gives the column of the index no name.
    return listed, [name for name in row if name and name not in (*COLUMNS, SPLIT)]


def _rows(file: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yields the number and the fields, by column, of every line with an image."""
    with naming(file), file.open(encoding="utf-8-sig", newline="") as opened:
        # A quote after a space would be a part of the field.
        reader = csv.reader(opened, strict=True, skipinitialspace=True)
        header: list[str] = []
        try:
            for fields in reader:
                fields = [field.strip() for field in fields]
                line = reader.line_num
                if not header:
                    header = _check_header(file, fields)
                elif any(fields):
                    yield line, _check_row(file, line, header, fields)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{file} is not UTF-8 text ({error.reason} after line "
                f"{reader.line_num}): save it as CSV in UTF-8"
            ) from error
        except csv.Error as error:
            raise ValueError(
                f"line {reader.line_num} of {file} cannot be read as CSV ({error}): "
                "correct it"
            ) from error
        if not header:
            raise ValueError(f"{file} is empty: write path,label in its first line")


def _check_header(file: Path, header: list[str]) -> list[str]:
    """Checks the names of the columns, and returns them without capitals if used."""
    # If a column "Split" was not used, test images would train the model.
    used = (*COLUMNS, SPLIT)
    header = [name.lower() if name.lower() in used else name for name in header]
    for name in COLUMNS:
        if name not in header:
            raise ValueError(
                f"the first line of {file} names no column {name!r}, only "
                f"{shorten(','.join(header))}: write path,label there, separated by "
                "commas"
            )
    for name in used:
        if header.count(name) > 1:
            raise ValueError(
                f"the first line of {file} names the column {name!r} more than once: "
                "rename the others"
            )
    return header


def _check_row(
    file: Path, line: int, header: list[str], fields: list[str]
) -> dict[str, str]:
    """Returns the fields of a line by column."""
    if len(fields) != len(header):
        raise ValueError(
            f"line {line} of {file} has {len(fields)} fields, expected {len(header)} "
            f"({shorten(','.join(header))}): correct it, with quotes around a field "
            "that has a comma"
        )
    row = dict(zip(header, fields, strict=True))
    for name in COLUMNS:
        if not row[name]:
            raise ValueError(f"line {line} of {file} has no {name}: add or delete it")
    return row

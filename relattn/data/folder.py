"""Lists images in folders, one folder per class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from relattn.data.image_io import FORMATS
from relattn.data.image_list import (
    ImageFile,
    ImageList,
    check_classes,
    list_names,
)

KINDS = {suffix: kind for kind, suffixes in FORMATS.items() for suffix in suffixes}
# Names of the folder of validation images.
VALIDATION = ("validation", "val", "valid")
LAYOUT = (
    "expected train/<class>/*.jpg, and optionally the same in validation and test (or "
    f"{', '.join(suffix for suffix in KINDS if suffix != '.jpg')})"
)


def find_files(root: Path) -> ImageList:
    """Lists the images of a folder, ``train/<class>/*`` and ``test/<class>/*``.

    Hidden files and folders are left out. Sub-folders of classes, classes without
    images, other files, and other folders, such as ``Test``, are left out and named.

    Args:
        root: The folder that holds ``train`` and, optionally, ``validation`` (or
            ``val``, or ``valid``) and ``test``.

    Returns:
        The images, sorted by class and file name; the classes are in the order of
        their names.

    Raises:
        FileNotFoundError: If ``root`` or its folder ``train`` is missing.
        ValueError: If a folder holds no images, an image belongs to a class without
            training images, all training images are of one class, or there are two
            folders of validation images.
    """
    left_out: list[str] = []
    train = _list_images(root / "train", left_out)
    held_out = [name for name in VALIDATION if (root / name).exists()]
    if len(held_out) > 1:
        raise ValueError(
            f"{root} has two folders of validation images, {held_out[0]} and "
            f"{held_out[1]}: move the images into one"
        )
    validation = _list_images(root / held_out[0], left_out) if held_out else []
    test = _list_images(root / "test", left_out) if (root / "test").exists() else []
    others = [
        path
        for path in _visible(root)
        if path.is_dir() and path.name not in ("train", "test", *VALIDATION)
    ]
    if others:
        left_out.append(f"other folders: {_names(others, root)}")
    kinds = {KINDS[image.path.suffix.lower()] for image in train + validation + test}
    origin = f"{' and '.join(sorted(kinds))} files in {root}"
    names = tuple(sorted({image.class_name for image in train}))
    images = ImageList(root, train, test, names, origin, left_out, validation)
    check_classes(images)
    return images


def _visible(folder: Path) -> list[Path]:
    """Lists a folder; unlike `Path.glob`, raises OSError where it must not be read."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _list_images(folder: Path, left_out: list[str]) -> list[ImageFile]:
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
    return [ImageFile(file, file.parent.name) for file in files]


def _names(paths: Sequence[Path], folder: Path) -> str:
    return list_names([str(path.relative_to(folder)) for path in paths])

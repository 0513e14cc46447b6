"""Reads images from folders, one folder per class."""

import pathlib

import numpy as np
from tqdm import tqdm

from relattn.data.image_io import decode_image, open_image
from relattn.data.images import ImageSplit

SUFFIXES = (".jpg", ".jpeg", ".png")
LAYOUT = "expected train/<class>/*.jpg and test/<class>/*.jpg (or .png)"


def read_folder(
    root: pathlib.Path,
) -> tuple[ImageSplit, ImageSplit, tuple[str, ...], str]:
    """Reads ``train/<class>/*`` and ``test/<class>/*`` into memory.

    Classes are numbered in the order of their names; images are sorted by class and
    file name. Grey images have one channel, colour images three.

    Args:
        root: The folder that holds ``train`` and ``test``.

    Returns:
        The training images, the test images, the class names and the origin.

    Raises:
        FileNotFoundError: If `root` or one of its two folders is missing.
        ValueError: If a folder holds no images, or an image cannot be read, differs in
            size from the first, or belongs to a class without training images.
    """
    train_files = list_images(root / "train")
    test_files = list_images(root / "test")
    class_names = tuple(sorted({file.parent.name for file in train_files}))
    for file in test_files:
        if file.parent.name not in class_names:
            raise ValueError(
                f"{file}: the class {file.parent.name!r} has no training images: add "
                "some or delete its test images."
            )
    train = _read_split(train_files, class_names, train_files[0])
    test = _read_split(test_files, class_names, train_files[0])
    kinds = {file.suffix.lower().lstrip(".") for file in train_files + test_files}
    names = {"jpg": "JPEG", "jpeg": "JPEG", "png": "PNG"}
    kinds = " and ".join(sorted({names[kind] for kind in kinds}))
    return train, test, class_names, f"{kinds} files in {root}"


def list_images(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the image files of ``<folder>/<class>/``, sorted.

    Hidden files, hidden folders and anything that is not a file are left out.

    Raises:
        FileNotFoundError: If the folder is missing.
        ValueError: If it holds no images.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"The image folder {folder} is missing: {LAYOUT}.")
    files = sorted(
        file
        for file in folder.glob("*/*")
        if file.suffix.lower() in SUFFIXES
        and not file.name.startswith(".")
        and not file.parent.name.startswith(".")
        # Reading a named pipe would block.
        and file.is_file()
    )
    if not files:
        raise ValueError(f"The image folder {folder} holds no images: {LAYOUT}.")
    return files


def _read_split(
    files: list[pathlib.Path], class_names: tuple[str, ...], first: pathlib.Path
) -> ImageSplit:
    shape = _read_image(first).shape
    labels = {name: label for label, name in enumerate(class_names)}
    images = np.empty((len(files), *shape), np.uint8)
    title = f"Reading {files[0].parents[1].name} images"
    bar = tqdm(files, desc=title, unit=" images", delay=2, disable=None)
    for index, file in enumerate(bar):
        image = _read_image(file, shape, first)
        if image.shape[2] > shape[2]:
            raise ValueError(f"{file} is in colour, but {first} is grey: convert one.")
        # A grey image among colour images is broadcast to all three channels.
        images[index] = image
    return ImageSplit(
        images, np.array([labels[file.parent.name] for file in files], np.int32)
    )


def _read_image(
    file: pathlib.Path, shape: tuple[int, ...] = (), first: pathlib.Path | None = None
) -> np.ndarray:
    with open_image(file, str(file)) as image:
        # Before decoding: an image of another size may be very large.
        if shape and image.size != shape[1::-1]:
            raise ValueError(
                f"{file} has {image.width}x{image.height} pixels, but {first} has "
                f"{shape[1]}x{shape[0]}: resize all images to one size."
            )
        grey = image.mode in ("1", "L", "LA")
        pixels = np.asarray(decode_image(image, "L" if grey else "RGB", str(file)))
    return pixels[..., None] if grey else pixels

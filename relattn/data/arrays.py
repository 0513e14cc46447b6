"""Reads image sets from a file of arrays, ``.npz``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Set
from pathlib import Path

import numpy as np
from jaxtyping import Int32

from relattn.command import lacks_resources
from relattn.data.array_hints import labels_hint
from relattn.data.errors import describe_error
from relattn.data.image_list import (
    Images,
    check_several_classes,
    class_order,
    list_names,
)
from relattn.data.images import ImageSplit, check_arrays, check_class_names
from relattn.messages import shorten

# Names of the arrays of a split: those of MedMNIST and of Keras.
NAMES = {
    "train": (("train_images", "train_labels"), ("x_train", "y_train")),
    "validation": (
        ("validation_images", "validation_labels"),
        ("val_images", "val_labels"),
        ("valid_images", "valid_labels"),
        ("x_val", "y_val"),
    ),
    "test": (("test_images", "test_labels"), ("x_test", "y_test")),
}
CLASS_NAMES = "class_names"


def read_arrays(file: Path) -> Images:
    """Reads images and labels from a file that `numpy.savez` wrote.

    The arrays are ``train_images``, uint8 of shape ``[n, height, width, channels]``,
    ``[n, height, width]`` or, of volumes, ``[n, frames, height, width, channels]``, and
    ``train_labels``, of shape ``[n]`` or ``[n, 1]``. Optional are the same arrays of
    ``validation`` (or ``val``) and ``test``, and ``class_names``. The names ``x_train``
    and ``y_train``, and so on, are read too.

    Args:
        file: The file.

    Returns:
        The images of each split, the class names and the origin. Without
        ``class_names``, the classes are the different labels of the training images, in
        numerical order if they are numbers, else in alphabetical order.

    Raises:
        FileNotFoundError: If the file is missing.
        ValueError: If it is not such a file, its arrays have another type, shape or
            range, or two classes have the same name.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "mine.npz"
        >>> np.savez(file, train_images=np.zeros((2, 5, 3), np.uint8),
        ...          train_labels=np.array(["no", "yes"]))
        >>> images = read_arrays(file)
        >>> images.train.images.shape, images.class_names
        ((2, 5, 3, 1), ('no', 'yes'))
    """
    known = {name for pairs in NAMES.values() for pair in pairs for name in pair}
    arrays, listed = open_arrays(file, known | {CLASS_NAMES})
    splits = {name: _find_split(arrays, name, file) for name in NAMES}
    if splits["train"] is None:
        raise ValueError(
            f"{file} has no array train_images, only {listed or 'none'}: name the "
            "arrays train_images and train_labels"
        )
    there = {name: split for name, split in splits.items() if split is not None}
    class_names, labels = encode_labels(
        {name: labels for name, (_, labels) in there.items()}, arrays, file
    )
    found, shape = {}, there["train"][0].shape[1:]
    for name, (images, _) in there.items():
        where = f"{name} in {file}"
        check_arrays(images, labels[name], f"the images of {where}")
        if not len(images):
            raise ValueError(f"{where} has no images: add at least one")
        if images.shape[1:] != shape:
            raise ValueError(
                f"the images of {where} have shape {images.shape[1:]}, but those of "
                f"training {shape}: resize one of them"
            )
        found[name] = ImageSplit(images, labels[name])
    origin = f"the arrays of {file}"
    return Images(class_names=class_names, origin=origin, **{"test": None, **found})


def open_arrays(
    file: Path,
    known: Set[str],
    remedy: str = "set data.data_dir to a file of numpy.savez",
) -> tuple[dict[str, np.ndarray], str]:
    """Reads arrays from a file that `numpy.savez` wrote.

    Args:
        file: The file.
        known: Names of the arrays to read; a warning names the others.
        remedy: What to do if the file is missing, for the message.

    Returns:
        The arrays that are there, by name, and the names of all arrays of the file in
        one string, for messages.

    Raises:
        FileNotFoundError: If the file is missing.
        ValueError: If it is not such a file.
    """
    if not file.is_file():
        raise FileNotFoundError(f"the file {file} is missing: {remedy}")
    try:
        with file.open("rb") as opened:
            is_archive = opened.read(2) == b"PK"
        if not is_archive:
            raise ValueError("not a file of numpy.savez")
        # Objects would have to be unpickled.
        with np.load(file, allow_pickle=False) as opened:
            names = opened.files
            arrays = {name: opened[name] for name in names if name in known}
    except Exception as error:
        if lacks_resources(error):
            raise
        raise ValueError(
            f"{file} cannot be read ({describe_error(error)}): write it with "
            "numpy.savez, without arrays of objects: names are labels.astype(str)"
        ) from error
    others = [name for name in names if name not in known]
    if arrays and others:
        text = f"{file}: left out arrays: {list_names(others)}"
        warnings.warn(text, stacklevel=2)
    return arrays, ", ".join(names)


def check_labels_array(
    labels: np.ndarray, examples: np.ndarray, where: str
) -> np.ndarray:
    """Returns labels of shape ``[n]``, given as ``[n]`` or ``[n, 1]``.

    Args:
        labels: The labels.
        examples: The n examples.
        where: Name of the labels, for the message.

    Raises:
        ValueError: Unless they are an integer or a name for each example.
    """
    num_examples = len(examples) if examples.ndim else 0
    labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if labels.shape != (num_examples,) or labels.dtype.kind not in "iuU":
        raise ValueError(
            f"{where} has shape {labels.shape} and dtype {labels.dtype}, expected "
            f"{num_examples} integers or names: {labels_hint(labels, num_examples)}"
        )
    return labels


def encode_labels(
    splits: Mapping[str, np.ndarray], arrays: Mapping[str, np.ndarray], file: Path
) -> tuple[tuple[str, ...], dict[str, Int32[np.ndarray, " n"]]]:
    """Returns the names of the classes, and labels as positions in them.

    Args:
        splits: The labels of each split, numbers or names; those of ``"train"`` too.
        arrays: The arrays of the file, by name. Without ``class_names``, the classes
            are the different labels of training, in numerical order if they are
            numbers, else in alphabetical order.
        file: The file, for the message.

    Raises:
        ValueError: If a label is none of the classes, training has only one class, or
            two classes have the same name.

    Example:
        >>> labels = {"train": np.array([3, 1, 3]), "test": np.array([3])}
        >>> encode_labels(labels, {}, Path("mine.npz"))
        (('1', '3'), {'train': array([1, 0, 1], dtype=int32), 'test': array([1], \
dtype=int32)})
    """
    given = class_order(map(str, splits["train"].tolist()))
    check_several_classes(given, str(file))
    names = np.ravel(arrays.get(CLASS_NAMES, ()))
    if names.dtype.kind == "S":
        raise ValueError(
            f"{CLASS_NAMES} in {file} has dtype {names.dtype}: save "
            "class_names.astype(str)"
        )
    class_names = check_class_names(
        map(str, names.tolist()), f"{CLASS_NAMES} in {file}"
    )
    classes, encoded = "a class of training", {}
    if class_names and splits["train"].dtype.kind in "iu":
        # Numbers are positions in the given names.
        known = {str(label): label for label in range(len(class_names))}
        classes = f"a position in the {len(class_names)} {CLASS_NAMES}"
    else:
        class_names = class_names or given
        known = {name: label for label, name in enumerate(class_names)}
    for name, labels in splits.items():
        values, inverse = np.unique(labels, return_inverse=True)
        for value in values.tolist():
            if str(value) not in known:
                raise ValueError(
                    f"the labels of {name} in {file} have {shorten(value)}, which is "
                    f"not {classes}, only {shorten(', '.join(known))}: correct them"
                )
        numbers = np.array([known[str(value)] for value in values.tolist()], np.int32)
        encoded[name] = numbers[inverse] if len(labels) else np.zeros(0, np.int32)
    return class_names, encoded


def _find_split(
    arrays: Mapping[str, np.ndarray], name: str, file: Path
) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the images and the labels of a split, or None if it has neither."""
    for keys in NAMES[name]:
        there = [key for key in keys if key in arrays]
        if len(there) == 1:
            (absent,) = {*keys} - {*there}
            raise ValueError(f"{file} has {there[0]} but no {absent}: add it")
        if there:
            images, labels = (arrays[key] for key in keys)
            images = images[..., None] if images.ndim == 3 else images
            where = f"{keys[1]} in {file}"
            labels = check_labels_array(labels, images, where)
            return images, labels
    return None

"""What to do about arrays of images or labels of a wrong type, for error messages."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np


def images_hint(images: Any) -> str:
    """Returns how to convert values to those that data sets store.

    Args:
        images: An array that is not uint8, or has other values than 0 to 255.

    Example:
        >>> images_hint(np.array([0.0, 0.5]))
        'for values in [0, 1] pass (255 * images).round().astype(np.uint8)'
        >>> images_hint(np.array([0, 255]))
        'pass images.astype(np.uint8)'
        >>> images_hint(np.array([40000], np.uint16))
        'for values of 16 bits pass (images >> 8).astype(np.uint8)'
    """
    array = np.asarray(images)
    if array.dtype == object:
        return "pass images.astype(float)"
    if array.dtype == bool:
        return "pass (255 * images).astype(np.uint8)"
    # JAX's bfloat16 is a type of NumPy's kind V.
    if array.size and array.dtype.kind not in "SUcmM" and not array.dtype.names:
        lowest, highest = array.min(), array.max()
        if np.issubdtype(array.dtype, np.integer):
            if lowest >= 0 and highest <= 255:
                return "pass images.astype(np.uint8)"
            if array.dtype == np.uint16:
                hint = "for values of 16 bits pass (images >> 8).astype(np.uint8)"
                return hint + ", for 12 bits with >> 4" * bool(highest < 2**12)
        elif not np.isfinite(lowest + highest):
            return "pass np.nan_to_num(images), or leave out images with NaN"
        elif lowest >= 0 and highest <= 1:
            return "for values in [0, 1] pass (255 * images).round().astype(np.uint8)"
        elif lowest >= 0 and highest <= 255:
            return "pass images.round().astype(np.uint8)"
    return "pass images that are not standardised, as np.uint8 from 0 to 255"


def labels_hint(labels: np.ndarray, num_images: int) -> str:
    """Returns how to convert labels to one integer, or name, for each image.

    Args:
        labels: An array that is not of this kind.
        num_images: Number of images.

    Example:
        >>> labels_hint(np.eye(3), 3)
        'for one-hot labels pass labels.argmax(axis=-1)'
        >>> labels_hint(np.array([0.0, 1.0]), 2)
        'pass labels.astype(int)'
        >>> labels_hint(np.array([0.5, 1.0]), 2)
        'pass one whole number for each image'
        >>> labels_hint(np.array(["cat", "dog"]), 2)
        'for names pass [class_names.index(name) for name in labels]'
        >>> labels_hint(np.array([0, 1]), 3)
        'pass one label for each image'
    """
    if labels.ndim == 2 and len(labels) == num_images and labels.shape[1] > 1:
        return "for one-hot labels pass labels.argmax(axis=-1)"
    if labels.shape == (num_images, 1):
        return "pass labels[:, 0]"
    if labels.shape == (num_images,) and labels.dtype.kind in "OSU":
        if labels.dtype.kind == "S":
            return "pass labels.astype(str)"
        if all(isinstance(label, str) for label in labels.tolist()):
            return "for names pass [class_names.index(name) for name in labels]"
        if all(isinstance(label, numbers.Integral) for label in labels.tolist()):
            return "pass labels.astype(int)"
    if labels.shape != (num_images,) or labels.dtype.kind not in "bf":
        return "pass one label for each image"
    with np.errstate(invalid="ignore"):
        is_whole = np.isfinite(labels).all() and (labels == labels.astype(int)).all()
    if is_whole:
        return "pass labels.astype(int)"
    return "pass one whole number for each image"

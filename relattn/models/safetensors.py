"""Reads and writes safetensors files, with NumPy only.

A file is the length of a header (8 bytes, little-endian), the header in JSON, which has
the dtype, the shape and the bytes of every tensor, and the tensors. The format has no
code, so files of others are safe to read. Source: the format's documentation,
https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}


def read_safetensors(path: str | Path) -> dict[str, np.ndarray]:
    """Reads the tensors of a file, lazily, as read-only views of it.

    Args:
        path: The file.

    Returns:
        An array for each name.

    Raises:
        ValueError: If the file is truncated or no safetensors file.
        FileNotFoundError: If there is no such file.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "model.safetensors"
        >>> write_safetensors(path, {"a": np.ones((2, 3), np.float32)})
        >>> read_safetensors(path)["a"].shape
        (2, 3)
    """
    if not os.path.isfile(path):
        raise FileNotFoundError(f"there is no file {path}")
    size = os.path.getsize(path)
    data = np.memmap(path, np.uint8, "r") if size else np.zeros(0, np.uint8)
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    if size < 8 or start > size:
        raise ValueError(
            f"{path} is truncated or no safetensors file: it has {size} bytes"
        )
    try:
        header = json.loads(data[8:start].tobytes())
        header.pop("__metadata__", None)
        tensors, end = {}, start
        for name, entry in sorted(
            header.items(), key=lambda item: item[1]["data_offsets"]
        ):
            dtype = np.dtype(_DTYPES[entry["dtype"]])
            first, last = (start + offset for offset in entry["data_offsets"])
            if first != end or last - first != dtype.itemsize * math.prod(
                entry["shape"]
            ):
                raise ValueError(f"the bytes of {name!r}")
            if last <= size:
                tensors[name] = data[first:last].view(dtype).reshape(entry["shape"])
            end = last
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is no safetensors file: its header is invalid ({error})"
        ) from error
    if end != size:
        raise ValueError(
            f"{path} is truncated or damaged: its header announces {end} bytes, it has "
            f"{size}"
        )
    return tensors


def write_safetensors(path: str | Path, tensors: Mapping[str, Any]) -> None:
    """Writes arrays to a file; a reader never sees a part of it.

    Args:
        path: The file; replaced if there is one.
        tensors: An array for each name.

    Raises:
        ValueError: If the format has no such dtype.
    """
    arrays = {name: np.asarray(array) for name, array in sorted(tensors.items())}
    header, end = {}, 0
    for name, array in arrays.items():
        if array.dtype not in _NAMES:
            raise ValueError(f"safetensors cannot hold {name!r} of {array.dtype}")
        first, end = end, end + array.nbytes
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": array.shape,
            "data_offsets": [first, end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    part = Path(f"{path}.part")
    with open(part, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).tobytes())
    part.replace(path)

"""Reads and writes safetensors files: a format without code, safe to read from others.

The package of the same name does the work; here are its errors in one sentence, and a
file that a reader never sees in part. Source:
https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from relattn.command import one_line


def read_safetensors(path: str | Path) -> dict[str, np.ndarray]:
    """Reads the tensors of a file.

    Args:
        path: The file.

    Returns:
        An array for each name.

    Raises:
        ValueError: If the file is truncated, damaged or no safetensors file, or holds a
            dtype that NumPy does not have.
        FileNotFoundError: If there is no such file.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "model.safetensors"
        >>> write_safetensors(path, {"a": np.ones((2, 3), np.float32)})
        >>> read_safetensors(path)["a"].shape
        (2, 3)
    """
    # Here, so that all but saved models works without the package.
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(
            f"{path} is truncated, damaged or no safetensors file: copy or save it "
            f"again ({one_line(error)})"
        ) from error
    except AttributeError as error:
        # The package looks up its dtypes in NumPy.
        raise ValueError(
            f"{path} holds numbers that NumPy does not have, such as float8: save them "
            f"as float32 ({one_line(error)})"
        ) from error


def write_safetensors(path: str | Path, tensors: Mapping[str, Any]) -> None:
    """Writes arrays to a file; a reader never sees a part of it.

    Args:
        path: The file; replaced if there is one.
        tensors: An array for each name.
    """
    from safetensors.numpy import save

    # `save` copies an array's memory as it lies.
    arrays = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    part = Path(f"{path}.part")
    # Not by `save_file`, whose files only their owner can read.
    part.write_bytes(save(arrays))
    part.replace(path)

"""Reads and writes safetensors files: a format without code, safe to read from others.

The package of the same name does the work. This module turns its errors into one
sentence, and replaces files whole, so that a reader never sees a part of one. Source:
https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from relattn.command import one_line
from relattn.files import replace_file
from relattn.json_files import Range, parse_json

# Far above the headers of models that exist.
MAX_HEADER = 2**25
_COUNT = Range(0, 2**53)
_ENTRY = {"dtype": str, "shape": [_COUNT], "data_offsets": [_COUNT, _COUNT]}
_HEADER = {"__metadata__?": {"*": str}, "*": _ENTRY}


def read_safetensors(path: str | Path) -> dict[str, np.ndarray]:
    """Reads the tensors of a file.

    Args:
        path: The file.

    Returns:
        An array for each name.

    Raises:
        ValueError: If the file is truncated, damaged or not a safetensors file, or
            holds a dtype that NumPy does not have.
        FileNotFoundError: If there is no such file.
        OSError: If the file cannot be read.

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
        _check_header(Path(path))
        return load_file(path)
    except (SafetensorError, ValueError) as error:
        raise ValueError(
            f"{path} is truncated, damaged or not a safetensors file: copy or save it "
            f"again ({one_line(error)})"
        ) from error
    except OSError as error:
        raise OSError(f"{path} cannot be read ({error.strerror or error})") from error
    except (AttributeError, KeyError, TypeError) as error:
        # The package looks up its dtypes in NumPy.
        raise ValueError(
            f"{path} holds numbers that NumPy does not have, such as float8: save them "
            f"as float32 ({one_line(error)})"
        ) from error


def _check_header(path: Path) -> None:
    """Checks the header: of two equal names, the package would keep the last."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, MAX_HEADER):
            raise ValueError(
                f"a header of {length:,} bytes does not fit into {size:,} bytes"
                if length > size - 8
                else f"the header has {length:,} bytes, at most {MAX_HEADER:,} are read"
            )
        parse_json(file.read(length), "the header", _HEADER)


def write_safetensors(path: str | Path, tensors: Mapping[str, Any]) -> None:
    """Writes arrays to a file; a reader never sees a part of it.

    Args:
        path: The file; replaced if there is one.
        tensors: An array for each name.
    """
    from safetensors.numpy import save

    # `save` copies an array's memory as it lies.
    arrays = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    # Not by `save_file`, whose files only their owner can read.
    replace_file(path, save(arrays))

"""The checksums of the files in a folder, ``manifest.json``."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Any

from relattn.files import replace_file
from relattn.json_files import read_json
from relattn.messages import shorten

MANIFEST = "manifest.json"
BLOCK_BYTES = 2**20
# Begins the name of a tokenizer from a file; digits of the file's SHA-256 follow.
FILE_PREFIX = "hf:"
NUM_DIGITS = 16
END_OF_TEXT = "<|endoftext|>"
# The tokens that end a text, in files that do not say which one does.
ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "[SEP]")


def sha256(path: Path, title: str | None = None) -> str:
    """Returns the SHA-256 of a file.

    Args:
        path: Path of the file.
        title: Title of a progress bar, shown on a terminal after two seconds; None
            shows no bar.

    Returns:
        The digest in hexadecimal digits.

    Raises:
        OSError: If the file cannot be read.

    Example:
        >>> sha256(Path("/dev/null"))[:7]
        'e3b0c44'
    """
    digest, block = hashlib.sha256(), memoryview(bytearray(BLOCK_BYTES))
    with (
        path.open("rb") as file,
        _progress_bar(title, path.stat().st_size) as update,
    ):
        try:
            while count := file.readinto(block):
                digest.update(block[:count])
                update(count)
        except OSError as error:
            # Errors of reading, unlike those of opening, do not name the file.
            raise OSError(error.errno, error.strerror, str(path)) from error
    return digest.hexdigest()


@contextlib.contextmanager
def _progress_bar(title: str | None, total: int) -> Iterator[Callable[[int], Any]]:
    """Shows a progress bar, if tqdm is installed; yields the function to update it."""
    if title is None or find_spec("tqdm") is None:
        yield lambda count: None
        return
    from tqdm import tqdm

    with tqdm(
        desc=title, total=total, unit="B", unit_scale=True, delay=2, disable=None
    ) as bar:
        yield bar.update


def write_manifest(folder: Path, names: Iterable[str]) -> None:
    """Writes ``manifest.json``, the checksums of files in a folder.

    Args:
        folder: The folder that holds the files.
        names: Names of the files.
    """
    sums = {name: sha256(folder / name, f"Checksum of {name}") for name in names}
    replace_file(folder / MANIFEST, f"{json.dumps(sums, indent=1)}\n")


def find_damage(folder: Path, required: Iterable[str] = ()) -> str:
    """Compares the files of a folder with the checksums in its ``manifest.json``.

    Args:
        folder: The folder that holds the files.
        required: Names of files whose checksums the manifest must have.

    Returns:
        The problem of the first file that differs; "" if no file differs, or the
        folder has no manifest.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "val.bin").write_bytes(b"abc")
        >>> write_manifest(folder, ["val.bin"])
        >>> find_damage(folder)
        ''
        >>> _ = (folder / "val.bin").write_bytes(b"abd")
        >>> find_damage(folder).removeprefix(str(folder))
        '/val.bin is damaged (its SHA-256 is not that of manifest.json)'
    """
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return ""
    try:
        sums = read_json(manifest, {"*": str})
    except ValueError as error:
        return f"{manifest} is damaged ({error})"
    for name in required:
        if name not in sums:
            return f"{manifest} is damaged (it has no checksum of {name})"
    for name, expected in sums.items():
        path = folder / name
        if name != PurePath(name).name or not path.is_file():
            return f"{folder} has no file {shorten(name)}, which {MANIFEST} lists"
        if sha256(path, f"Verifying {name}") != expected:
            return f"{path} is damaged (its SHA-256 is not that of {MANIFEST})"
    return ""


def tokenizer_name(content: bytes) -> str:
    """Names the tokenizer of a file by the file's checksum.

    Args:
        content: The contents of a ``tokenizer.json``.

    Returns:
        The name for `relattn.data.load_tokenizer`.

    Example:
        >>> tokenizer_name(b"{}")
        'hf:44136fa355b3678a'
    """
    return f"{FILE_PREFIX}{hashlib.sha256(content).hexdigest()[:NUM_DIGITS]}"


def recorded_sha256(path: Path) -> str:
    """Returns the checksum of a file in the ``manifest.json`` of its folder.

    Args:
        path: The file; `find_damage` compares it with the checksum.

    Returns:
        The SHA-256; "" if the file is in no manifest.

    Example:
        >>> recorded_sha256(Path("no/such/folder/train.bin"))
        ''
    """
    try:
        return read_json(path.parent / MANIFEST, {"*": str}).get(path.name, "")
    except (OSError, ValueError):
        return ""

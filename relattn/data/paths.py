"""Data files: their paths, checksums and read errors."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath

from tqdm import tqdm

from relattn.messages import shorten

MANIFEST = "manifest.json"
BLOCK_BYTES = 2**20


def expand(path: str | Path, key: str) -> Path:
    """Expands ``~`` and ``~user`` to a home directory.

    Args:
        path: Path of a file or folder.
        key: Name of the argument or configuration key, for the error message.

    Returns:
        The path.

    Raises:
        ValueError: If there is no such user, or the home directory is unknown.

    Example:
        >>> expand("runs/first", "--workdir").name
        'first'
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(
            f"{key}={path} begins with a home directory that is unknown: write the "
            "full path"
        ) from error


@contextlib.contextmanager
def reading_data() -> Iterator[None]:
    """Re-raises any OSError about a file with a message that names the file.

    Yields:
        Nothing.

    Raises:
        OSError: If a file cannot be read in the context.

    Example:
        >>> with reading_data():
        ...     raise PermissionError(13, "Permission denied", "a/train.bin")
        Traceback (most recent call last):
        OSError: a/train.bin cannot be read (Permission denied): make it readable, \
or set data.data_dir to other data
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        raise OSError(
            f"{error.filename} cannot be read ({error.strerror}): make it readable, or "
            "set data.data_dir to other data"
        ) from error


def describe_error(error: BaseException) -> str:
    r"""Returns the type and the first line of an error, without a final period.

    Args:
        error: A caught exception.

    Returns:
        One line.

    Example:
        >>> describe_error(ValueError("wrong value.\nIt is 7."))
        'ValueError: wrong value'
    """
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    return f"{type(error).__name__}: {lines[0].removesuffix('.')}"


def sha256(path: Path, title: str | None = None) -> str:
    """Returns the SHA-256 of a file.

    Args:
        path: Path of the file.
        title: Title of a progress bar, shown on a terminal after two seconds; None
            shows no bar.

    Returns:
        The digest in hexadecimal digits.

    Example:
        >>> sha256(Path("/dev/null"))[:7]
        'e3b0c44'
    """
    digest, block = hashlib.sha256(), memoryview(bytearray(BLOCK_BYTES))
    with (
        path.open("rb") as file,
        tqdm(
            desc=title,
            total=path.stat().st_size,
            unit="B",
            unit_scale=True,
            delay=2,
            disable=True if title is None else None,
        ) as bar,
    ):
        try:
            while count := file.readinto(block):
                digest.update(block[:count])
                bar.update(count)
        except OSError as error:
            # Errors of reading, unlike those of opening, do not name the file.
            raise OSError(error.errno, error.strerror, str(path)) from error
    return digest.hexdigest()


def write_manifest(folder: Path, names: Iterable[str]) -> None:
    """Writes ``manifest.json``, the checksums of files in a folder.

    Args:
        folder: The folder that holds the files.
        names: Names of the files.
    """
    sums = {name: sha256(folder / name, f"Checksum of {name}") for name in names}
    (folder / MANIFEST).write_text(f"{json.dumps(sums, indent=1)}\n", "utf-8")


def find_damage(folder: Path) -> str:
    """Compares the files of a folder with the checksums in its ``manifest.json``.

    Args:
        folder: The folder that holds the files.

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
        sums = json.loads(manifest.read_text("utf-8"))
    except (ValueError, RecursionError):
        return f"{manifest} is damaged"
    if not isinstance(sums, dict):
        return f"{manifest} is damaged (it is {shorten(sums)})"
    for name, expected in sums.items():
        path = folder / name
        if name != PurePath(name).name or not path.is_file():
            return f"{folder} has no file {shorten(name)}, which {MANIFEST} lists"
        if sha256(path, f"Verifying {name}") != expected:
            return f"{path} is damaged (its SHA-256 is not that of {MANIFEST})"
    return ""


def recorded_sha256(path: Path) -> str:
    """Returns the checksum of a file in the ``manifest.json`` beside it.

    Args:
        path: The file; `find_damage` compares it with the checksum.

    Returns:
        The SHA-256; "" if the file is in no manifest.

    Example:
        >>> recorded_sha256(Path("no/such/folder/train.bin"))
        ''
    """
    try:
        sums = json.loads((path.parent / MANIFEST).read_text("utf-8"))
        return str(sums.get(path.name, ""))
    except (OSError, ValueError, RecursionError, AttributeError):
        return ""

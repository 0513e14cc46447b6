"""Paths as users write them."""

import contextlib
import hashlib
import json
import pathlib
from collections.abc import Iterable, Iterator

from tqdm import tqdm

from relattn import spec


def expand(path: str | pathlib.Path, key: str) -> pathlib.Path:
    """Puts a home directory in the place of ``~`` or ``~name``.

    Args:
        path: of a file or folder.
        key: the name of the argument or configuration key, for the message.

    Returns:
        The path.

    Raises:
        ValueError: there is no such user, or its home directory is not known.

    Example:
        >>> expand("runs/first", "--workdir").name
        'first'
    """
    try:
        return pathlib.Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(
            f"{key}={path} begins with a home directory that is not known here: write "
            "the path in full."
        ) from error


@contextlib.contextmanager
def reading_data() -> Iterator[None]:
    """Makes of what the system says of a file of data a sentence that names it.

    Yields:
        Nothing.

    Raises:
        OSError: what runs in the context raised one of the system.

    Example:
        >>> with reading_data():
        ...     raise PermissionError(13, "Permission denied", "a/train.bin")
        Traceback (most recent call last):
        OSError: a/train.bin cannot be read (Permission denied): make it readable, \
or name other data by data.data_dir.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        raise OSError(
            f"{error.filename} cannot be read ({error.strerror}): make it readable, or "
            "name other data by data.data_dir."
        ) from error


def describe_error(error: BaseException) -> str:
    r"""Returns the type and the first line of an error.

    Args:
        error: A caught exception.

    Returns:
        One line.

    Example:
        >>> describe_error(ValueError("wrong value\nin line 7"))
        'ValueError: wrong value'
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


MANIFEST = "manifest.json"
BLOCK_BYTES = 2**20


def sha256(path: pathlib.Path, title: str | None = None) -> str:
    """Returns the SHA-256 of a file.

    Args:
        path: of the file.
        title: of a progress bar for what takes more than two seconds, on a terminal;
            None for no bar.

    Returns:
        The digest in hexadecimal digits.

    Example:
        >>> sha256(pathlib.Path("/dev/null"))[:7]
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
        while count := file.readinto(block):
            digest.update(block[:count])
            bar.update(count)
    return digest.hexdigest()


def write_manifest(folder: pathlib.Path, names: Iterable[str]) -> None:
    """Writes the checksums of some files of a folder.

    Args:
        folder: that holds the files.
        names: of the files.
    """
    sums = {name: sha256(folder / name, f"Checksum of {name}") for name in names}
    (folder / MANIFEST).write_text(f"{json.dumps(sums, indent=1)}\n", "utf-8")


def find_damage(folder: pathlib.Path) -> str:
    """Compares the files of a folder with their checksums.

    Args:
        folder: that holds the files, and perhaps a manifest.

    Returns:
        What is wrong with the first file that is not as it was; "" if all are as they
        were, or the folder has no manifest.

    Example:
        >>> import tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
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
        return f"{manifest} is damaged (it is {spec.shorten(sums)})"
    for name, expected in sums.items():
        path = folder / name
        if name != pathlib.PurePath(name).name or not path.is_file():
            return f"{folder} has no file {spec.shorten(name)}, which {MANIFEST} lists"
        if sha256(path, f"Verifying {name}") != expected:
            return f"{path} is damaged (its SHA-256 is not that of {MANIFEST})"
    return ""

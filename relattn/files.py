"""Folders to write to, and files that are replaced whole."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from relattn.messages import shorten

# A link in place of a new file is not followed. Windows has no such flag.
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
_NEW |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)

# The folders of an absolute path: after a space or a quote, not in an address.
_ABSOLUTE = re.compile(
    r"(?<![^\s'\"(\[])(?:file:(?://)?|~[\w.-]*|[A-Za-z]:)?[/\\](?:[^\s/\\]+[/\\])*"
)
_BEGIN = re.compile(r"(?:file:(?://)?|~[\w.-]*|[A-Za-z]:)?[/\\]")


def expand(path: str | Path, key: str) -> Path:
    """Expands ``~`` and ``~user`` to a home directory.

    Args:
        path: Path of a file or folder.
        key: Name of the argument or configuration key, for the error message.

    Returns:
        The path.

    Raises:
        ValueError: If it is not a path, there is no such user, the home directory is
            unknown, or the path has a character that no path can have.

    Example:
        >>> expand("runs/first", "--workdir").name
        'first'
    """
    if "\0" in str(path):
        raise ValueError(f"{key} has a null character, which no path can have")
    try:
        return Path(path).expanduser()
    except TypeError as error:
        raise ValueError(f"{key} must be a path, got {shorten(path)}") from error
    except RuntimeError as error:
        raise ValueError(
            f"{key}={path} begins with a home directory that is unknown: write the "
            "full path"
        ) from error


def check_folder(folder: str | Path, flag: str) -> Path:
    """Checks a path to write to, before anything is computed; creates nothing.

    Args:
        folder: The folder, as given on the command line.
        flag: The command-line option, for the message.

    Returns:
        Its absolute path.

    Raises:
        OSError: If it is empty, an address, or a file, or under a file.
        ValueError: If it begins with an unknown home directory.

    Example:
        >>> check_folder("", "--output")
        Traceback (most recent call last):
        OSError: --output is empty (unset shell variable?): name a directory
    """
    path = _local_path(folder, flag, "directory")
    for each in (path, *path.parents):
        try:
            os.lstat(each)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise OSError(
                f"{flag} {folder} cannot be used ({error.strerror}): name another "
                "directory"
            ) from error
        if not each.is_dir():
            kind = "a file" if each.exists() else "a link to a missing folder"
            raise OSError(f"{flag} {folder}: {each} is {kind}: name a directory")
        break
    return path


def _local_path(path: str | Path, flag: str, kind: str) -> Path:
    """Returns the absolute path of a file or folder of this machine."""
    if not str(path):
        raise OSError(f"{flag} is empty (unset shell variable?): name a {kind}")
    if "://" in str(path):
        raise OSError(
            f"{flag} {path} is an address, not a {kind}: mount the bucket (for "
            "example with gcsfuse) and pass the path where it is mounted"
        )
    try:
        return expand(path, flag).absolute()
    except FileNotFoundError as error:
        raise OSError("the current folder was deleted: change to another") from error


def usable_folder(folder: str | Path, flag: str) -> Path:
    """Creates a folder and checks that it is writable, see `check_folder`.

    Args:
        folder: The folder, as given on the command line.
        flag: The command-line option, for the message.

    Returns:
        Its absolute path.

    Raises:
        OSError: If it is not writable.
        ValueError: If it begins with an unknown home directory.
    """
    path = check_folder(folder, flag)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise OSError(
            f"{flag} {folder} is not writable ({error.strerror or error}): choose "
            "another directory"
        ) from error
    return path


def usable_file(file: str | Path, flag: str) -> Path:
    """Creates the folder of a file to write, and checks that it is writable.

    Args:
        file: The file, as given on the command line.
        flag: The command-line option, for the message.

    Returns:
        Its absolute path.

    Raises:
        OSError: If it is empty, an address, a folder, or a device, or its folder is not
            writable.
        ValueError: If it begins with an unknown home directory.

    Example:
        >>> usable_file("/", "--output")
        Traceback (most recent call last):
        OSError: --output / is a folder: name a file in it
    """
    path = _local_path(file, flag, "file")
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG
    except OSError as error:
        raise OSError(
            f"{flag} {file} is not writable ({error.strerror}): choose another file"
        ) from error
    if stat.S_ISDIR(mode):
        raise OSError(f"{flag} {file} is a folder: name a file in it")
    if not stat.S_ISREG(mode):
        # The new file would replace it.
        raise OSError(f"{flag} {file} is a device or a pipe: name a file")
    usable_folder(path.parent, flag)
    return path


def replace_file(path: str | Path, data: str | bytes) -> None:
    r"""Replaces a file atomically, even if power fails.

    The data are written to a new file beside it, which is then renamed: a reader never
    sees a part of them, and a link at ``path`` is replaced, not followed.

    Args:
        path: The file.
        data: Its new contents; a text is written in UTF-8, with surrogates escaped.

    Raises:
        OSError: If it cannot be written; an old file is intact.

    Example:
        >>> path = Path(tempfile.mkdtemp()) / "table.md"
        >>> replace_file(path, "a\n")
        >>> path.read_text(), [file.name for file in path.parent.iterdir()]
        ('a\n', ['table.md'])
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.tmp")
    if isinstance(data, str):
        data = data.encode("utf-8", "backslashreplace")
    try:
        with open_new(temporary) as file:
            file.write(data)
            file.flush()
            # Otherwise the file system may rename a file that is still empty.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        _remove(temporary)
        raise OSError(error.errno, error.strerror, str(path)) from error
    except BaseException:
        _remove(temporary)
        raise


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Adds the name of a file to errors of reading it, which have none.

    Args:
        path: The file.

    Yields:
        Nothing.

    Raises:
        OSError: If the body of the context raises one.

    Example:
        >>> with naming("a.txt"):
        ...     raise OSError(5, "Input/output error")
        Traceback (most recent call last):
        OSError: [Errno 5] Input/output error: 'a.txt'
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def open_new(path: str | Path, mode: str = "wb") -> IO[Any]:
    """Opens a new file; removes an existing one, and does not follow links.

    Args:
        path: The file; a process that was killed may have left one.
        mode: How to open it.

    Returns:
        The file.
    """
    Path(path).unlink(missing_ok=True)
    return open(path, mode, opener=lambda name, _: os.open(name, _NEW, 0o666))


def no_follow(path: str, flags: int) -> int:
    """Opens a file, but not a link: an ``opener`` of `open`, for files that grow."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def hide_folders(text: str, folder: str = "") -> str:
    """Shortens the absolute paths in a text to their last part.

    Args:
        text: A text to hand on, such as the origin of the data.
        folder: A folder that it may name, whose path may have spaces.

    Returns:
        The text, without the folders of this machine; addresses are kept.

    Example:
        >>> hide_folders("the images in /home/me/flowers, from https://a.org/b/c")
        'the images in flowers, from https://a.org/b/c'
    """
    if folder:
        path = Path(os.path.expanduser(folder)).absolute()
        for each in (folder, str(path)):
            text = text.replace(each, path.name)
    return _ABSOLUTE.sub("", text)


def hide_all_folders(values: Any) -> Any:
    """Shortens the absolute paths in a configuration, see `hide_folders`.

    Args:
        values: Nested dictionaries and lists. A text that is a path becomes its last
            part.

    Returns:
        A copy.

    Example:
        >>> hide_all_folders({"data_dir": "/home/me/my flowers/", "seeds": [3]})
        {'data_dir': 'my flowers', 'seeds': [3]}
    """
    if isinstance(values, dict):
        return {key: hide_all_folders(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [hide_all_folders(value) for value in values]
    if not isinstance(values, str):
        return values
    if _BEGIN.match(values):
        return re.split(r"[/\\]", values.rstrip("/\\"))[-1]
    return hide_folders(values)


def _remove(path: Path) -> None:
    """Removes a file if it can be."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)

"""Folders to write to, and files that are replaced whole."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from pathlib import Path

# A link in place of a new file is not followed. Windows has no such flag.
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
_NEW |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)

# The folders of an absolute path: after a space or a quote, not in an address.
_ABSOLUTE = re.compile(
    r"(?<![^\s'\"(\[])(?:~[\w.-]*|[A-Za-z]:)?[/\\](?:[^\s/\\]+[/\\])*"
)


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
    if not str(folder):
        raise OSError(f"{flag} is empty (unset shell variable?): name a directory")
    if "://" in str(folder):
        raise OSError(
            f"{flag} {folder} is an address, not a directory: mount the bucket (for "
            "example with gcsfuse) and give the path where it is mounted"
        )
    path = expand(folder, flag).absolute()
    for each in (path, *path.parents):
        # Not `exists`, which fails below a file.
        if os.path.lexists(each):
            if not each.is_dir():
                raise OSError(f"{flag} {folder}: {each} is a file: name a directory")
            break
    return path


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
        OSError: If it is empty, a folder, or its folder is not writable.
        ValueError: If it begins with an unknown home directory.

    Example:
        >>> usable_file("/", "--output")
        Traceback (most recent call last):
        OSError: --output / is a folder: name a file in it
    """
    if not str(file):
        raise OSError(f"{flag} is empty (unset shell variable?): name a file")
    path = expand(file, flag).absolute()
    if path.is_dir():
        raise OSError(f"{flag} {file} is a folder: name a file in it")
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
        # Left by a process that was killed.
        temporary.unlink(missing_ok=True)
        with open(os.open(temporary, _NEW, 0o666), "wb") as file:
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


def no_follow(path: str, flags: int) -> int:
    """Opens a file, but no link: an ``opener`` of `open`, for files that grow."""
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


def _remove(path: Path) -> None:
    """Removes a file if it can be."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)

"""Paths as users write them."""

import contextlib
import pathlib
from collections.abc import Iterator


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

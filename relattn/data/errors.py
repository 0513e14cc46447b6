"""Errors of reading data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from relattn.command import is_user_error


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

    The message of a user error, see `relattn.command.is_user_error`, has no type.

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
    line = lines[0].removesuffix(".")
    return line if is_user_error(error) else f"{type(error).__name__}: {line}"

"""Paths as users write them."""

import pathlib


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

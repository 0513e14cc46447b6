"""What is damaged is set aside under another name, never deleted."""

from __future__ import annotations

import shutil
from pathlib import Path

from relattn.training.errors import writing

DAMAGED = ".damaged"


def name_aside(path: Path) -> Path:
    """The first free name for what is damaged.

    Args:
        path: A file or folder.

    Returns:
        ``<path>.damaged``, or with a number if it exists.

    Example:
        >>> name_aside(Path("metrics.jsonl")).name
        'metrics.jsonl.damaged'
    """
    aside, number = path.with_name(f"{path.name}{DAMAGED}"), 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}{DAMAGED}{number}")
    return aside


def copy_aside(path: Path) -> Path:
    """Copies a damaged file that is about to be replaced.

    Args:
        path: The file, which stays until it is replaced: a kill loses nothing.

    Returns:
        The copy, see `name_aside`.

    Raises:
        WorkdirError: If the disk is full or read-only.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "run.json"
        >>> _ = path.write_text("{")
        >>> copy_aside(path).read_text()
        '{'
    """
    aside = name_aside(path)
    with writing(aside):
        shutil.copyfile(path, aside)
    return aside

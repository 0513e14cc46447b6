"""The check of a name against the known ones."""

import difflib
from collections.abc import Iterable

from relattn import spec


def check_choice(key: str, value: str, choices: Iterable[str], where: str = "") -> None:
    """Raises unless a value is one of the known ones.

    Args:
        key: the name of the argument or configuration key.
        value: what was given.
        choices: the known values.
        where: they are known, for the message.

    Raises:
        ValueError: the value is unknown; the message lists the known ones.

    Example:
        >>> check_choice("source", "flder", ["folder"])
        Traceback (most recent call last):
        ValueError: Unknown source='flder'. Did you mean 'folder'? Known: 'folder'.
    """
    choices = list(choices)
    if value in choices:
        return
    shown = spec.shorten(value)
    start = value[: spec.MAX_SHOWN]
    close = difflib.get_close_matches(start, choices, n=1, cutoff=0.3)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    listed = ", ".join(repr(choice) for choice in choices)
    raise ValueError(f"Unknown {key}={shown}{where}.{hint} Known: {listed}.")

"""The check of a name against the known ones."""

from collections.abc import Collection

from relattn import spec


def check_choice(
    key: str, value: str, choices: Collection[str], where: str = ""
) -> None:
    """Raises unless a value is one of the known ones.

    Args:
        key: the name of the argument or configuration key.
        value: what was given.
        choices: the known values.
        where: they are known, for the message.

    Raises:
        ValueError: the value is unknown; the message names the closest.

    Example:
        >>> check_choice("data.source", "flder", ["folder"])
        Traceback (most recent call last):
        ValueError: unknown data.source 'flder': did you mean 'folder'? There are: \
folder
    """
    if value not in choices:
        shown, hint = spec.shorten(value), spec.closest(value, choices)
        raise ValueError(f"unknown {key} {shown}{where}: {hint}")

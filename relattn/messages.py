"""Parts of error messages: close names, lists, shortened values, checks of choices."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

# Length limit of a value shown in an error message.
MAX_SHOWN = 80
# Number of names of one kind that a message lists.
MAX_LISTED = 8


def check_choice(
    key: str, value: Any, choices: Collection[str], where: str = ""
) -> None:
    """Raises ValueError unless a value is one of the known values.

    Args:
        key: Name of the argument or configuration key.
        value: The value to check.
        choices: The known values.
        where: Restriction of the known values, appended to the value in the message.

    Raises:
        ValueError: If the value is unknown; the message names the closest known value.

    Example:
        >>> check_choice("data.source", "flder", ["folder"])
        Traceback (most recent call last):
        ValueError: unknown data.source 'flder': did you mean 'folder'? Available: \
folder
    """
    if value not in choices:
        shown, hint = shorten(value), closest(value, choices)
        raise ValueError(f"unknown {key} {shown}{where}: {hint}")


def closest(name: Any, names: Collection[str]) -> str:
    """Suggests the most similar name and lists all names, for an error message.

    Args:
        name: The unknown name.
        names: The valid names.

    Returns:
        ``"did you mean 'x'? Available: ..."``, or ``"available: ..."`` if no name is
        similar.

    Example:
        >>> closest("favour", ["favor", "softmax"])
        "did you mean 'favor'? Available: favor, softmax"
        >>> closest("width", [])
        'available: none'
    """
    listed = "available: " + (", ".join(sorted(names)) or "none")
    similar = difflib.get_close_matches(
        str(name)[:MAX_SHOWN], list(names), n=1, cutoff=0.5
    )
    if not similar:
        return listed
    return f"did you mean {similar[0]!r}? A{listed[1:]}"


def list_problems(problems: Mapping[str, list[str]]) -> str:
    """Lists the first names of each kind of problem, and counts the rest.

    Args:
        problems: Names by kind; kinds without names are left out.

    Example:
        >>> list_problems({"missing": ["a", "b"], "unexpected": []})
        'missing a, b'
    """
    parts = []
    for kind, names in problems.items():
        rest = len(names) - MAX_LISTED
        more = f" and {rest} more" if rest > 0 else ""
        if names:
            parts.append(f"{kind} {', '.join(names[:MAX_LISTED])}{more}")
    return "; ".join(parts)


def printable(text: str) -> str:
    r"""Escapes the characters that a terminal does not print.

    Args:
        text: A text, such as the name of a file.

    Returns:
        The text; control characters, line breaks, marks of direction and surrogates are
        escaped as in Python.

    Example:
        >>> print(printable("größe \x1b[31m\n"))
        größe \x1b[31m\n
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in text
    )


def shorten(value: Any) -> str:
    """Formats a value for an error message.

    Args:
        value: Any value.

    Returns:
        Its `repr` on one line, cut after `MAX_SHOWN` characters.

    Example:
        >>> shorten("a" * 1000000)[-9:], len(shorten("a" * 1000000))
        ('aaaaaa...', 83)
    """
    try:
        shown = " ".join(repr(value).splitlines())
    except ValueError:
        # Python refuses to print integers of more than a few thousand digits.
        shown = f"a huge {type(value).__name__}"
    return shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}..."

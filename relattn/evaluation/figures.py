"""Names in the figures of matplotlib."""

from __future__ import annotations

from relattn.messages import printable


def plain(text: str) -> str:
    r"""Escapes a text, so that matplotlib draws it as it is.

    Dollars would begin mathematics, and legends have no option against it. Fonts have
    no control characters, and no surrogates, which stand for bytes of a file's name.

    Args:
        text: A text, such as the name of a class; it may have several lines.

    Returns:
        The text to draw.

    Example:
        >>> print(plain("cost $5 or $6"))
        cost \$5 or \$6
    """
    lines = (printable(line) for line in text.split("\n"))
    return "\n".join(lines).replace("$", r"\$")

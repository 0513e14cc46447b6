"""Tables and names in Markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from relattn.messages import printable

# What Markdown and the mathematics of GitHub take for markup: anywhere; before what
# makes it one; and at the start of a line.
_MARKUP = re.compile(
    r"[\\`*$|]|~|<(?=[\w/!?])|&(?=[\w#])|\](?=[(\[:])|(?<![^\W_])_|_(?![^\W_])"
)
_START = re.compile(r"^(\d*)([-+=#>.):~])")
_PLAIN = re.compile(r"[A-Za-z][\w.+-]*")
_YAML_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown.

    Args:
        header: Titles of the columns.
        rows: Cells of each row.

    Returns:
        The lines, without a newline at the end.

    Example:
        >>> print(markdown_table(["name", "value"], [["a", "1"]]))
        | name | value |
        | --- | --- |
        | a | 1 |
    """
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    """Escapes what would end a cell."""
    return re.sub(r"(?<!\\)\|", r"\|", " ".join(text.splitlines()))


def escape_markdown(text: str) -> str:
    r"""Escapes a name, so that Markdown shows it as it is.

    Args:
        text: A name, such as that of a class.

    Returns:
        The name on one line; characters that are not printed are escaped as in Python.

    Example:
        >>> print(escape_markdown("cost $5 or *6*"), escape_markdown("fashion_mnist"))
        cost \$5 or \*6\* fashion_mnist
    """
    text = _MARKUP.sub(r"\\\g<0>", printable(text))
    return _START.sub(r"\1\\\2", text)


def quote_yaml(text: str) -> str:
    """Returns a text as YAML has it: quoted, unless it is a plain word.

    Args:
        text: A text, such as the name of a licence.

    Example:
        >>> quote_yaml("cc-by-4.0"), quote_yaml("no"), quote_yaml("a: b")
        ('cc-by-4.0', '"no"', '"a: b"')
    """
    if _PLAIN.fullmatch(text) and text.lower() not in _YAML_WORDS:
        return text
    return json.dumps(text)

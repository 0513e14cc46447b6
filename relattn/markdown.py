"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


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
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

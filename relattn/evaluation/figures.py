"""The figures of matplotlib: names in them, and files."""

from __future__ import annotations

import io
from pathlib import Path

from matplotlib.figure import Figure

from relattn.files import replace_file
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


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a figure; the file is replaced whole.

    Args:
        figure: The figure.
        path: The file; its suffix is the format.

    Raises:
        ValueError: If the suffix is not a format of figures.
        OSError: If it cannot be written; an old file is intact.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "empty.svg"
        >>> save_figure(Figure(), path)
        >>> path.read_text().startswith("<?xml")
        True
    """
    if path.suffix[1:].lower() not in figure.canvas.get_supported_filetypes():
        raise ValueError(
            f"{path}: figures have no format {path.suffix!r}: end the name with .png, "
            ".svg or .pdf"
        )
    file = io.BytesIO()
    figure.savefig(file, format=path.suffix[1:], dpi=150)
    replace_file(path, file.getvalue())

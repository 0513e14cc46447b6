"""The published tables that ship with the package."""

from __future__ import annotations

import csv
import importlib.resources


def read_published(name: str) -> list[dict[str, str]]:
    """Reads a published table.

    Args:
        name: Of the file in ``relattn/evaluation/published``, without ``.csv``.

    Returns:
        Its rows.

    Example:
        >>> read_published("translution_table2_mnist")[0]["method"]
        'self_attention'
    """
    folder = importlib.resources.files("relattn.evaluation") / "published"
    with (folder / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))

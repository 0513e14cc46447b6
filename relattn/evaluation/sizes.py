"""Exact parameter counts of the named models, beside the published ones.

``python -m relattn.evaluation.sizes`` prints a table, ``--json`` a list of objects.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import importlib.resources
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from relattn.models import build_model


@dataclasses.dataclass(frozen=True)
class Size:
    """The parameter count of one model.

    Attributes:
        model: Name of the model.
        size: Name of its size.
        method: Spec of its attention or position encoding.
        image: Height x width x channels of the images.
        params: Our count.
        published: The published count, None where there is none.
        note: Why they differ, where they do.
    """

    model: str
    size: str
    method: str
    image: str
    params: int
    published: int | None
    note: str = ""


def count_parameters(model: nn.Module, image_shape: tuple[int, int, int]) -> int:
    """Counts the parameters of a model without allocating them.

    Args:
        model: A module called on images.
        image_shape: Height, width and channels.

    Returns:
        The number of trainable scalars.

    Example:
        >>> count_parameters(nn.Dense(3), (1, 1, 2))
        9
    """
    variables = jax.eval_shape(
        model.init, jax.random.key(0), jnp.zeros((1, *image_shape))
    )
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(variables["params"]))


# The published "Rel. S1" and so on, in our terms; "{}" is the setting's number.
_PERFORMERS = {
    "No Pos.": ("favor", "none"),
    "Absolute": ("favor", "learnable_sincos"),
    "Rel. S1": ("favor", "constrained_sincos(num_scales={})"),
    "Rel. S2": ("banded(clip={})", "none"),
}
_CLS_NOTE = "published + the 256 of the CLS token, which the published count leaves out"


def _performer_sizes() -> Iterator[Size]:
    folder = importlib.resources.files("relattn.evaluation") / "published"
    with (folder / "performer_param_counts.csv").open() as file:
        rows: list[Mapping[str, Any]] = list(csv.DictReader(file))
    for row in rows:
        number = "".join(filter(str.isdigit, row["settings"]))
        attention, position = (
            text.format(number) for text in _PERFORMERS[row["model"]]
        )
        image_shape = (32, 32, int(row["in_channels"]))
        model = build_model(
            {"name": "performer", "attention": attention, "position": position},
            num_classes=10,
            image_shape=image_shape,
        )
        yield Size(
            model="performer",
            size="6 layers of dim 256",
            method=attention if position == "none" else f"{attention} + {position}",
            image="x".join(map(str, image_shape)),
            params=count_parameters(model, image_shape),
            published=int(row["params"]),
            note=_CLS_NOTE,
        )


def sizes() -> list[Size]:
    """The parameter counts of every named size.

    Returns:
        One entry a model, in the order of the published tables.
    """
    return list(_performer_sizes())


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the counts.

    Args:
        argv: Command-line arguments, by default the process's.
    """
    parser = argparse.ArgumentParser(
        prog="python -m relattn.evaluation.sizes", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    args = parser.parse_args(argv)
    rows = [dataclasses.asdict(size) for size in sizes()]
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    header = ("model", "method", "image", "params", "published", "difference")
    table = [header]
    for row in rows:
        difference = row["params"] - row["published"]
        cells = (f"{row['params']:,}", f"{row['published']:,}", f"{difference:+,}")
        table.append((row["model"], row["method"], row["image"], *cells))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        cells = [
            cell.rjust(width) if index > 2 else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
    for note in sorted({row["note"] for row in rows if row["note"]}):
        print(f"Difference: {note}.")


if __name__ == "__main__":
    main()

"""Exact parameter counts of the named models, beside the published ones.

``python -m relattn.evaluation.sizes`` prints a table, ``--json`` a list of objects.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from relattn import command
from relattn.evaluation.counts import Size, count_parameters
from relattn.evaluation.presets import BASELINES
from relattn.evaluation.publications import read_published
from relattn.evaluation.sizes_translution import (
    COST_NOTE,
    agrees,
    parameters,
    translution_sizes,
)
from relattn.models import build_model
from relattn.models.cnn import PUBLISHED_BASELINES

# The published "Rel. S1" and so on, in our terms; "{}" is the setting's number.
_PERFORMERS = {
    "No Pos.": ("favor", "none"),
    "Absolute": ("favor", "learnable_sincos"),
    "Rel. S1": ("favor", "constrained_sincos(num_scales={})"),
    "Rel. S2": ("banded(clip={})", "none"),
}
_LINFORMER_NOTE = (
    "the published Linformer embeds a patch of 32x32 pixels; the printed 10.2M is its "
    "count for three channels"
)
_CLS_NOTE = (
    "a Performer has the published count and the 256 of the CLS token, which the "
    "published count leaves out"
)


def _performer_sizes() -> Iterator[Size]:
    for row in read_published("performer_param_counts"):
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
            table="Horn et al.",
        )


def _baseline_sizes() -> Iterator[Size]:
    for row in read_published("performer_table1"):
        if row["model"].startswith("Performer"):
            continue
        name = BASELINES[row["model"]]
        forms = {"modern": {"name": name}}
        if name in PUBLISHED_BASELINES:
            forms["published"] = PUBLISHED_BASELINES[name]
        for (form, options), channels in itertools.product(forms.items(), (1, 3)):
            image_shape = (32, 32, channels)
            model = build_model(options, num_classes=10, image_shape=image_shape)
            linformer = form == "published" and name == "linformer"
            yield Size(
                model=name,
                size=form,
                method=getattr(model, "attention", ""),
                image="x".join(map(str, image_shape)),
                params=count_parameters(model, image_shape),
                published=parameters(row["params"]),
                note=_LINFORMER_NOTE if linformer else "",
                table="Horn et al.",
                printed=row["params"],
            )


def sizes() -> list[Size]:
    """The parameter counts of every named size.

    Returns:
        One entry a model, in the order of the published tables.
    """
    return [*_performer_sizes(), *_baseline_sizes(), *translution_sizes()]


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Prints the counts.

    Args:
        argv: Command-line arguments, by default the process's.
    """
    parser = command.Parser("python -m relattn.evaluation.sizes", __doc__)
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    args = parser.parse_args(argv)
    rows = [dataclasses.asdict(size) for size in sizes()]
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    header = ("table", "model", "size", "method", "image")
    numbers = ("params", "published", "difference", "MAC", "FLOPs in paper")
    table = [header + numbers]
    table += [_cells(row, header) for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        cells = [
            cell.rjust(width) if index >= len(header) else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
    for note in sorted({row["note"] for row in rows if row["note"]}):
        print(f"Note: {note}.")
    print(f"Note: {COST_NOTE}.")


def _cells(row: Mapping[str, Any], header: tuple[str, ...]) -> tuple[str, ...]:
    """A line of the table; a count printed in millions differs by its digits only."""
    published, difference = row["printed"] or "-", ""
    if row["published"] is not None and not row["printed"]:
        published = f"{row['published']:,}"
        difference = f"{row['params'] - row['published']:+,}"
    elif row["published"] is not None and not agrees(row["params"], published):
        difference = f"{(row['params'] - row['published']) / 1e6:+.2f}M"
    cost = "" if row["multiply_adds"] is None else f"{row['multiply_adds'] / 1e6:,.1f}M"
    names = tuple(row[name] for name in header)
    return (
        *names,
        f"{row['params']:,}",
        published,
        difference,
        cost,
        row["paper_flops"],
    )


if __name__ == "__main__":
    main()

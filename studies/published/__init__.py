"""The papers' published tables, one CSV file each, and Translution's rows of them."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent

# Model names in Horn et al. -> arguments of configs/baselines.py.
BASELINES = {
    "AlexNet": "alexnet",
    "VGG-16": "vgg16",
    "ResNet-18": "resnet18",
    "Linformer": "linformer",
    "Routing Transformer": "routing",
}

# Rows of Translution's tables 4 and 8 -> methods.
_POSITIONS = {
    "no position": "no_position",
    "absolute": "self_attention",
    "relative key vector": "relative_key",
    "relative value vector": "relative_value",
    "relative bias (Swin)": "relative_bias",
    "gated positional (ConViT)": "gated_positional",
    "rotary (RoFormer)": "rope",
    "lor_translution": "lor_translution",
    "translution": "translution",
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A row of a published table.

    Attributes:
        table: Number of the table, or of two tables that share the row.
        size: Model size, ``"A/12"`` for images or ``"A-160"`` for text.
        method: A method of ``configs/translution_vit.py`` or ``translution_gpt.py``.
        published: The row as printed.
        options: Options of the method, such as ``{"rank": 16}``.
    """

    table: str
    size: str
    method: str
    published: Mapping[str, str]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        """Returns the method and its options, ``["lor_translution", "rank=2"]``."""
        words = [self.method]
        for key, value in self.options.items():
            words.append(key if value is True else f"{key}={value}")
        return words

    @property
    def arguments(self) -> str:
        """Returns the arguments of the configuration: ``"A/12,translution"``."""
        options = (f"{key}={value}" for key, value in self.options.items())
        return ",".join([self.size, self.method, *options])


def read_published(name: str) -> list[dict[str, str]]:
    """Reads a published table.

    Args:
        name: File in ``studies/published``, without ``.csv``.

    Returns:
        The rows, as dicts.

    Example:
        >>> read_published("translution_table2_mnist")[0]["method"]
        'self_attention'
    """
    with (FOLDER / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def translution_entries() -> Iterator[Entry]:
    """Reads the rows of Translution's tables 2 to 8, 10 and 11.

    Yields:
        One entry per row, in the paper's order.

    Example:
        >>> entries = list(translution_entries())
        >>> entries[0].size, entries[0].method
        ('A/12', 'self_attention')
    """
    for table, name in ("2", "table2_mnist"), ("3", "table3_imagenet"):
        for row in read_published(f"translution_{name}"):
            yield Entry(table, row["arch"].removeprefix("ViT-"), row["method"], row)
    for row in read_published("translution_table4_positions"):
        yield Entry("4", "A/56", _POSITIONS[row["method"]], row)
    for row in read_published("translution_table5_absolute"):
        absolute = {"absolute": True} if row["encoding"] == "absolute" else {}
        yield Entry("5", "A/12", row["method"], row, absolute)
    for row in read_published("translution_tables6_11_relenc_dim"):
        rank, base = int(row["relenc_dim"]), row["with_base_qkv"] == "1"
        table = "6, 11" if base else "11"
        options = {"rank": rank} | ({} if base else {"base": False})
        if rank:
            yield Entry(table, "A/56", "lor_translution", row, options)
        else:
            yield Entry(table, "A/56", "no_position", row)
    for row in read_published("translution_table7_openwebtext"):
        yield Entry("7", row["arch"].removeprefix("GPT-"), row["method"], row)
    for row in read_published("translution_table8_gpt_positions"):
        yield Entry("8", "A-160", _POSITIONS[row["method"]], row)
    for row in read_published("translution_table10_input_position"):
        learned = {"position": "learned"} if row["input_position"] == "1" else {}
        yield Entry("10", "A/12", row["method"], row, learned)

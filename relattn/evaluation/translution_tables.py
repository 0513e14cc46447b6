"""The rows of Translution's tables as arguments of ``configs/translution_*.py``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from relattn.evaluation.publications import read_published

# Rows of tables 4 and 8 as methods.
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
        table: The table's number, or those of two tables that share the row.
        size: Of the model, ``"A/12"`` for images and ``"A-160"`` for text.
        method: A key of `relattn.models.variants.METHODS`.
        published: The row as printed.
        options: Of the method, such as ``{"rank": 16}``.
    """

    table: str
    size: str
    method: str
    published: Mapping[str, str]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        """The method and its options, ``["lor_translution", "rank=2"]``."""
        words = [self.method]
        for key, value in self.options.items():
            words.append(key if value is True else f"{key}={value}")
        return words


def translution_entries() -> Iterator[Entry]:
    """The rows of tables 2 to 8, 10 and 11, in the paper's order.

    Yields:
        One entry a row.

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

"""Every row of Translution's tables: our parameter count beside the published one."""

from __future__ import annotations

import decimal
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from relattn.evaluation.counts import Size, count_parameters, multiply_adds
from relattn.evaluation.publications import read_published
from relattn.models import GPT, SIZES, ViT
from relattn.models.methods import method_options

COST_NOTE = (
    "the multiply-adds are true ones, of a forward pass of one image or one sequence "
    "(MAC), beside the paper's figure (FLOPs): Translution projects every pair of "
    "tokens, which the paper's counter misses, so that there it costs as much as "
    "self-attention; of text only the pairs that attend are counted here"
)
_SLIP_NOTE = (
    "the paper prints another count, a slip: the authors' code gives the same as ours"
)
_MEMORY_NOTE = "the paper could not run this one: out of memory"

# Rows of tables 4 and 8 as methods.
_ROWS = {
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
_IMAGENET = ((224, 224, 3), 1000)
_MNIST = ((84, 84, 1), 10)
_GPT2_VOCABULARY = 50257


def translution_sizes() -> Iterator[Size]:
    """The rows of tables 2 to 8, 10 and 11, in the paper's order."""
    for row in read_published("translution_table2_mnist"):
        yield _vit("2", row["arch"][4:], row["method"], *_MNIST, row)
    for row in read_published("translution_table3_imagenet"):
        yield _vit("3", row["arch"][4:], row["method"], *_IMAGENET, row)
    for row in read_published("translution_table4_positions"):
        yield _vit("4", "A/56", _ROWS[row["method"]], *_IMAGENET, row)
    for row in read_published("translution_table5_absolute"):
        absolute = {"absolute": True} if row["encoding"] == "absolute" else {}
        yield _vit("5", "A/12", row["method"], *_MNIST, row, **absolute)
    for row in read_published("translution_tables6_11_relenc_dim"):
        rank, base = int(row["relenc_dim"]), row["with_base_qkv"] == "1"
        table = "6, 11" if base else "11"
        options = {"rank": rank} | ({} if base else {"base": False})
        if rank:
            yield _vit(table, "A/56", "lor_translution", *_IMAGENET, row, **options)
        else:
            yield _vit(table, "A/56", "no_position", *_IMAGENET, row)
    for row in read_published("translution_table7_openwebtext"):
        yield _gpt("7", row["arch"], row["method"], row)
    for row in read_published("translution_table8_gpt_positions"):
        yield _gpt("8", "GPT-A-160", _ROWS[row["method"]], row)
    for row in read_published("translution_table10_input_position"):
        learned = {"position": "learned"} if row["input_position"] == "1" else {}
        yield _vit("10", "A/12", row["method"], *_MNIST, row, **learned)


def _name(method: str, options: Mapping[str, Any]) -> str:
    """A method and its options, ``lor_translution rank=2 base=False``."""
    words = [method]
    for key, value in options.items():
        words.append(key if value is True else f"{key}={value}")
    return " ".join(words)


def _vit(
    table: str,
    size: str,
    method: str,
    image_shape: tuple[int, int, int],
    num_classes: int,
    row: Mapping[str, str],
    **options: Any,
) -> Size:
    attention, position = method_options(method, **options).values()
    letter, patch_size = size.split("/")
    side = int(patch_size)
    sizes = SIZES[letter]
    num_patches = (image_shape[0] // side) * (image_shape[1] // side)
    cost = num_patches * side**2 * image_shape[2] * sizes["dim"]
    cost += sizes["dim"] * num_classes
    cost += multiply_adds(attention, num_tokens=num_patches + 1, **sizes)
    params = _vit_params(letter, side, attention, position, image_shape, num_classes)
    image = "x".join(map(str, image_shape))
    return _size("vit", size, _name(method, options), image, params, table, row, cost)


def _gpt(
    table: str,
    size: str,
    method: str,
    row: Mapping[str, str],
) -> Size:
    attention, position = method_options(method, "tokens").values()
    _, letter, context = size.split("-")
    length = int(context)
    sizes = SIZES[letter]
    cost = length * sizes["dim"] * _GPT2_VOCABULARY
    cost += multiply_adds(attention, num_tokens=length, causal=True, **sizes)
    params = _gpt_params(letter, length, attention, position)
    return _size("gpt", size, method, "", params, table, row, cost, length)


# The tables share many rows.
@functools.cache
def _vit_params(
    letter: str,
    patch_size: int,
    attention: str,
    position: str,
    image_shape: tuple[int, int, int],
    num_classes: int,
) -> int:
    model = ViT(
        num_classes,
        **SIZES[letter],
        patch_size=patch_size,
        attention=attention,
        position=position,
    )
    return count_parameters(model, image_shape)


@functools.cache
def _gpt_params(letter: str, length: int, attention: str, position: str) -> int:
    model = GPT(
        _GPT2_VOCABULARY,
        length,
        **SIZES[letter],
        attention=attention,
        position=position,
    )
    return count_parameters(model, num_tokens=length)


def _size(
    model: str,
    size: str,
    method: str,
    image: str,
    params: int,
    table: str,
    row: Mapping[str, str],
    cost: int,
    num_tokens: int | None = None,
) -> Size:
    printed, note, published = row.get("params", ""), "", None
    if printed == "out of memory":
        note = _MEMORY_NOTE
    elif printed:
        published = parameters(printed)
        note = "" if agrees(params, printed) else _SLIP_NOTE
    return Size(
        model=model,
        size=size,
        method=method,
        image=image,
        params=params,
        published=published,
        note=note,
        table=table,
        printed=printed,
        multiply_adds=cost,
        multiply_adds_per_token=num_tokens and cost // num_tokens,
        paper_flops=row.get("paper_flops") or "",
    )


def parameters(printed: str) -> int:
    """A printed count as a number.

    Args:
        printed: In millions, ``"116.2M"``.

    Returns:
        The count.

    Example:
        >>> parameters("116.2M")
        116200000
    """
    return int(decimal.Decimal(printed.removesuffix("M")) * 10**6)


def agrees(params: int, printed: str) -> bool:
    """Whether a count is the printed one, rounded or cut off to its digits.

    Args:
        params: A count.
        printed: In millions, ``"116.2M"``.

    Returns:
        True where they agree.

    Example:
        >>> agrees(116164138, "116.2M"), agrees(4685032, "4.68M")
        (True, True)
        >>> agrees(4875112, "4.89M")
        False
    """
    number = decimal.Decimal(printed.removesuffix("M"))
    exact = decimal.Decimal(params) / 10**6
    modes = (decimal.ROUND_HALF_UP, decimal.ROUND_DOWN)
    return any(exact.quantize(number, mode) == number for mode in modes)

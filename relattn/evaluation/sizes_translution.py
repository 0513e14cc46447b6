"""Every row of Translution's tables: our parameter count beside the published one."""

from __future__ import annotations

import decimal
import functools
from collections.abc import Iterator

from relattn.evaluation.counts import Size, count_parameters, multiply_adds
from relattn.evaluation.translution_tables import Entry, translution_entries
from relattn.models import GPT, SIZES, ViT
from relattn.models.variants import method_options

COST_NOTE = (
    "the multiply-adds are true ones, of a forward pass of one image or one sequence "
    "(MAC), beside the paper's figure (FLOPs): Translution projects every pair of "
    "tokens, which the paper's counter misses, so that there it costs as much as "
    "self-attention; of text only the pairs that attend are counted here"
)
_SLIP_NOTE = (
    "the paper prints another count, a slip: the authors' code gives the same as ours"
)
_VECTOR_NOTE = (
    "relative_key and relative_value stand beside learned positions of the tokens: the "
    "paper's formulas have none, but without them the counts of table 8 do not come out"
)
_MEMORY_NOTE = "the paper could not run this one: out of memory"

_IMAGENET = ((224, 224, 3), 1000)
_MNIST = ((84, 84, 1), 10)
_GPT2_VOCABULARY = 50257


def translution_sizes() -> Iterator[Size]:
    """The rows of tables 2 to 8, 10 and 11, in the paper's order."""
    for entry in translution_entries():
        if entry.table in ("7", "8"):
            yield _gpt(entry)
        else:
            data = _MNIST if entry.table in ("2", "5", "10") else _IMAGENET
            yield _vit(entry, *data)


def _vit(entry: Entry, image_shape: tuple[int, int, int], num_classes: int) -> Size:
    attention, position = method_options(entry.method, **entry.options).values()
    letter, patch_size = entry.size.split("/")
    side = int(patch_size)
    sizes = SIZES[letter]
    num_patches = (image_shape[0] // side) * (image_shape[1] // side)
    cost = num_patches * side**2 * image_shape[2] * sizes["dim"]
    cost += sizes["dim"] * num_classes
    cost += multiply_adds(attention, num_tokens=num_patches + 1, **sizes)
    params = _vit_params(letter, side, attention, position, image_shape, num_classes)
    image = "x".join(map(str, image_shape))
    return _size(entry, "vit", entry.size, image, params, cost)


def _gpt(entry: Entry) -> Size:
    attention, position = method_options(entry.method, "tokens").values()
    letter, context = entry.size.split("-")
    length = int(context)
    sizes = SIZES[letter]
    cost = length * sizes["dim"] * _GPT2_VOCABULARY
    cost += multiply_adds(attention, num_tokens=length, causal=True, **sizes)
    params = _gpt_params(letter, length, attention, position)
    return _size(entry, "gpt", f"GPT-{entry.size}", "", params, cost, length)


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
    entry: Entry,
    model: str,
    size: str,
    image: str,
    params: int,
    cost: int,
    num_tokens: int | None = None,
) -> Size:
    printed, note, published = entry.published.get("params", ""), "", None
    if printed == "out of memory":
        note = _MEMORY_NOTE
    elif printed:
        published = parameters(printed)
        note = "" if agrees(params, printed) else _SLIP_NOTE
    if entry.method in ("relative_key", "relative_value"):
        note = _VECTOR_NOTE
    return Size(
        model=model,
        size=size,
        method=" ".join(entry.words),
        image=image,
        params=params,
        published=published,
        note=note,
        table=entry.table,
        printed=printed,
        multiply_adds=cost,
        multiply_adds_per_token=num_tokens and cost // num_tokens,
        paper_flops=entry.published.get("paper_flops") or "",
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

"""Counts the parameters of the named models and compares them to the papers.

``python -m studies.sizes`` prints a table; with ``--json``, a JSON list.

A row of a published table is a `studies.published.Entry`; with our count and cost it is
a `ParameterCount` (`parameter_counts`).
"""

from __future__ import annotations

import dataclasses
import decimal
import functools
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array

from relattn import command, spec
from relattn.models import GPT, SIZES, ViT, build_model
from relattn.models.cnn import PUBLISHED_BASELINES
from relattn.training.config_file import read_config
from studies.published import BASELINES, Entry, read_published, translution_entries

# Model names in Horn et al. -> attention and position; "{}" is the setting's number.
_PERFORMERS = {
    "No Pos.": ("favor", "none"),
    "Absolute": ("favor", "learnable_sincos"),
    "Rel. S1": ("favor", "constrained_sincos(num_scales={})"),
    "Rel. S2": ("banded(clip={})", "none"),
}

_IMAGENET = ((224, 224, 3), 1000)
_MNIST = ((84, 84, 1), 10)
_GPT2_VOCABULARY = 50257

_CLS_NOTE = (
    "a Performer has 256 parameters more than published: the published counts omit "
    "the CLS token"
)
_LINFORMER_NOTE = (
    "the published Linformer embeds a patch of 32x32 pixels; the printed 10.2M is its "
    "count for three channels"
)
_SLIP_NOTE = (
    "the paper prints another count by mistake: the authors' code gives our count"
)
_VECTOR_NOTE = (
    "relative_key and relative_value are combined with learned positions: the paper's "
    "formulas have none, but the counts of table 8 include them"
)
_MEMORY_NOTE = "the paper could not run this model: out of memory"
COST_NOTE = (
    "MAC counts the multiply-adds of a forward pass of one image or one sequence; "
    "FLOPs is the paper's figure. Translution projects every pair of tokens; the "
    "paper's counter misses this and gives it the cost of self-attention. For text, "
    "MAC counts only the pairs that attend"
)


@dataclasses.dataclass(frozen=True)
class ParameterCount:
    """The parameter count and the cost of one model.

    Attributes:
        model: Name of the model.
        size: Name of its size.
        method: Its attention and position encoding.
        image: Height x width x channels of the images; empty for text.
        params: Our count.
        published: The published count; None if there is none.
        note: Reason for a difference between the two.
        table: The published table with this row.
        printed: The published count as printed.
        multiply_adds: Multiply-adds of a forward pass of one image or one sequence of
            text; None if not counted.
        multiply_adds_per_token: The same, per token of text.
        paper_flops: The paper's figure for the same pass, as printed.
    """

    model: str
    size: str
    method: str
    image: str
    params: int
    published: int | None
    note: str = ""
    table: str = ""
    printed: str = ""
    multiply_adds: int | None = None
    multiply_adds_per_token: int | None = None
    paper_flops: str = ""


def parameter_counts() -> list[ParameterCount]:
    """Counts the parameters of every named size.

    Returns:
        One `ParameterCount` per model, in the order of the published tables.
    """
    return [*_performer_counts(), *_baseline_counts(), *translution_counts()]


def _performer_counts() -> Iterator[ParameterCount]:
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
        yield ParameterCount(
            model="performer",
            size="6 layers of dim 256",
            method=attention if position == "none" else f"{attention} + {position}",
            image="x".join(map(str, image_shape)),
            params=count_parameters(model, image_shape),
            published=int(row["params"]),
            note=_CLS_NOTE,
            table="Horn et al.",
        )


def _baseline_counts() -> Iterator[ParameterCount]:
    for row in read_published("performer_table1"):
        if row["model"].startswith("Performer"):
            continue
        name = BASELINES[row["model"]]
        forms: dict[str, dict[str, Any]] = {"modern": {"name": name}}
        if name in PUBLISHED_BASELINES:
            forms["published"] = PUBLISHED_BASELINES[name]
        for (form, options), channels in itertools.product(forms.items(), (1, 3)):
            image_shape = (32, 32, channels)
            model = build_model(options, num_classes=10, image_shape=image_shape)
            linformer = form == "published" and name == "linformer"
            yield ParameterCount(
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


def translution_counts() -> Iterator[ParameterCount]:
    """Yields the sizes of Translution's tables 2 to 8, 10 and 11, in this order."""
    for entry in translution_entries():
        if entry.table in ("7", "8"):
            yield _gpt(entry)
        else:
            data = _MNIST if entry.table in ("2", "5", "10") else _IMAGENET
            yield _vit(entry, *data)


def _vit(
    entry: Entry, image_shape: tuple[int, int, int], num_classes: int
) -> ParameterCount:
    model = read_config(f"translution_vit:{entry.arguments}").model
    letter, patch_size = entry.size.split("/")
    side = int(patch_size)
    sizes = SIZES[letter]
    num_patches = (image_shape[0] // side) * (image_shape[1] // side)
    cost = num_patches * side**2 * image_shape[2] * sizes["dim"]
    cost += sizes["dim"] * num_classes
    cost += multiply_adds(model.attention, num_tokens=num_patches + 1, **sizes)
    params = _vit_params(
        letter, side, model.attention, model.position, image_shape, num_classes
    )
    image = "x".join(map(str, image_shape))
    return _count(entry, "vit", entry.size, image, params, cost)


def _gpt(entry: Entry) -> ParameterCount:
    model = read_config(f"translution_gpt:{entry.arguments}").model
    letter, context = entry.size.split("-")
    length = int(context)
    sizes = SIZES[letter]
    cost = length * sizes["dim"] * _GPT2_VOCABULARY
    cost += multiply_adds(model.attention, num_tokens=length, causal=True, **sizes)
    params = _gpt_params(letter, length, model.attention, model.position)
    return _count(entry, "gpt", f"GPT-{entry.size}", "", params, cost, length)


# Cached, since the tables share many rows.
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


def _count(
    entry: Entry,
    model: str,
    size: str,
    image: str,
    params: int,
    cost: int,
    num_tokens: int | None = None,
) -> ParameterCount:
    printed, note, published = entry.published.get("params", ""), "", None
    if printed == "out of memory":
        note = _MEMORY_NOTE
    elif printed:
        published = parameters(printed)
        note = "" if agrees(params, printed) else _SLIP_NOTE
    if entry.method in ("relative_key", "relative_value"):
        note = _VECTOR_NOTE
    return ParameterCount(
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


def count_parameters(
    model: nn.Module,
    image_shape: tuple[int, int, int] | None = None,
    *,
    num_tokens: int = 1,
) -> int:
    """Counts the parameters of a model without allocating them.

    Args:
        model: A module called on images or on token ids.
        image_shape: Height, width and channels; None for a text model.
        num_tokens: Length of the text sequence.

    Returns:
        The number of trainable parameters.

    Example:
        >>> count_parameters(nn.Dense(3), (1, 1, 2))
        9
    """
    example: Array = jnp.zeros((1, num_tokens), jnp.int32)
    if image_shape is not None:
        example = jnp.zeros((1, *image_shape))
    variables = jax.eval_shape(model.init, jax.random.key(0), example)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(variables["params"]))


def multiply_adds(
    attention: str,
    *,
    num_tokens: int,
    dim: int,
    num_layers: int,
    num_heads: int,
    mlp_dim: int,
    causal: bool = False,
) -> int:
    """Counts the multiply-adds of a Transformer's blocks in one forward pass.

    A layer of softmax attention costs 3 n C C' + 2 P C' with C = C' = ``dim`` and P the
    number of pairs of tokens: n^2, or n (n + 1) / 2 where it is causal. Translution
    projects every pair, P (3 C C' + 2 C'). LoR-Translution adds to softmax attention
    3 n C r + P (3 r^2 + 2 r) + n r C' with r = ``rank * heads``; in a subset, the score
    is 2 n C r + P r, the value n C r + P r + n r C', and each table P r^2. The output
    projection and the feed-forward network add n (C'^2 + 2 C ``mlp_dim``). Position
    encodings, which add less than 1% here, are not counted.

    Args:
        attention: Spec of the attention.
        num_tokens: Number of tokens, prefix included.
        dim: Width of the tokens.
        num_layers: Number of layers.
        num_heads: Number of heads.
        mlp_dim: Width of the feed-forward networks' hidden layer.
        causal: If True, tokens attend only to themselves and earlier tokens.

    Returns:
        The number of multiply-adds.

    Example:
        >>> sizes = dict(num_tokens=17, dim=192, num_layers=6, num_heads=3, mlp_dim=768)
        >>> multiply_adds("translution", **sizes)
        226273536

    Source:
        Translution, section 3.3. The paper's figures project per token, not per pair.
    """
    name, options = spec.parse(attention)
    n, square = num_tokens, dim * dim
    pairs = n * (n + 1) // 2 if causal else n * n
    relative = len(options.get("relative", "qkv"))
    if name == "translution":
        layer = (pairs * relative + n * (3 - relative)) * square + 2 * pairs * dim
    else:
        layer = 3 * n * square + 2 * pairs * dim
    if name == "lor_translution":
        rank = options.get("rank", 8) * num_heads
        layer *= options.get("base", True)
        subset = options.get("relative", "qkv")
        scores, values = "q" in subset or "k" in subset, "v" in subset
        layer += (2 * scores + values) * n * dim * rank + values * n * rank * dim
        layer += pairs * (relative * rank**2 + (scores + values) * rank)
    layer += n * (square + 2 * dim * mlp_dim)
    return num_layers * layer


def parameters(printed: str) -> int:
    """Converts a printed count to a number.

    Args:
        printed: A count in millions, ``"116.2M"``.

    Returns:
        The count.

    Example:
        >>> parameters("116.2M")
        116200000
    """
    return int(decimal.Decimal(printed.removesuffix("M")) * 10**6)


def agrees(params: int, printed: str) -> bool:
    """Checks a count against a printed one, rounded or truncated to its digits.

    Args:
        params: A count.
        printed: A count in millions, ``"116.2M"``.

    Returns:
        True if they agree.

    Example:
        >>> agrees(116164138, "116.2M"), agrees(4685032, "4.68M")
        (True, True)
        >>> agrees(4875112, "4.89M")
        False
    """
    number = decimal.Decimal(printed.removesuffix("M"))
    millions = decimal.Decimal(params) / 10**6
    modes = (decimal.ROUND_HALF_UP, decimal.ROUND_DOWN)
    return any(millions.quantize(number, mode) == number for mode in modes)


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Prints the counts as a table or as JSON."""
    parser = command.Parser("python -m studies.sizes", __doc__)
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    args = parser.parse_args(argv)
    rows = [dataclasses.asdict(size) for size in parameter_counts()]
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
    """Formats a row; compares counts printed in millions to their digits."""
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

"""Tables from the tensors of other libraries' checkpoints to relattn's parameters.

A table has for each of our parameters a function, and the names of the tensors that it
takes. ``{}`` stands for the index of a layer.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from relattn.models import pretrained

Tensors = Mapping[str, np.ndarray]
Table = dict[str, tuple]

# Modules that wrap others without changing them: anywhere in a name, or in front.
_INNER_WRAPPERS = {
    "module",
    "_orig_mod",
    "_checkpoint_wrapped_module",
    "_fsdp_wrapped_module",
}
_OUTER_WRAPPERS = {"model", "net", "backbone", "vit", "transformer", "timm_model"}


class Converted(NamedTuple):
    """The contents of ``config.json``, and arrays by the names of `flatten`."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]


def unwrap(tensors: Tensors) -> dict[str, np.ndarray]:
    """Removes from the names of tensors the modules that wrap a model.

    Args:
        tensors: The checkpoint. Wrappers are those of parallel training and
            compilation, anywhere, and ``model.``, ``backbone.`` and the like in front.

    Returns:
        The same tensors.

    Raises:
        ValueError: If two tensors have the same name then.

    Example:
        >>> unwrap({"module.model._orig_mod.norm.bias": np.ones(2)})
        {'norm.bias': array([1., 1.])}
    """
    result, origins = {}, {}
    for name, tensor in tensors.items():
        parts = [part for part in name.split(".") if part not in _INNER_WRAPPERS]
        while len(parts) > 1 and parts[0] in _OUTER_WRAPPERS:
            del parts[0]
        short = ".".join(parts)
        if short == "n_averaged":
            # The count of torch.optim.swa_utils.AveragedModel.
            continue
        if short in result:
            raise ValueError(
                f"{origins[short]} and {name} are {short} of two models: save one model"
            )
        result[short], origins[short] = tensor, name
    return result


def apply_table(
    table: Table, tensors: Tensors, num_layers: int, ignored: str = "$^"
) -> dict[str, np.ndarray]:
    """Computes our parameters from the tensors of a checkpoint.

    Args:
        table: For each of our names a function, and the names of its arguments.
        tensors: The checkpoint.
        num_layers: Number of layers, which ``{}`` counts.
        ignored: Pattern of tensors that are not parameters.

    Returns:
        An array for each of our names, with the prefix ``params.``.

    Raises:
        ValueError: If tensors are missing, unexpected, not floats or of another shape.
    """
    result = {}
    for name, (function, sources) in _entries(
        table, tensors, num_layers, ignored
    ).items():
        arrays = [np.asarray(tensors[source]) for source in sources]
        if len(arrays) > 1:
            # What is computed from several tensors has more digits than each.
            arrays = [x.astype(np.promote_types(x.dtype, np.float32)) for x in arrays]
        try:
            result[f"params.{name}"] = function(*arrays)
        except (ValueError, IndexError) as error:
            shapes = [
                f"{source} {array.shape}"
                for source, array in zip(sources, arrays, strict=True)
            ]
            raise ValueError(f"wrong shape: {', '.join(shapes)}") from error
    return result


def check_names(
    table: Table, tensors: Tensors, num_layers: int, ignored: str = "$^"
) -> None:
    """Checks that a checkpoint has the tensors of a table; see `apply_table`."""
    _entries(table, tensors, num_layers, ignored)


def _entries(table, tensors, num_layers, ignored):
    """The function and the tensors of each of our names."""
    entries = {}
    for name, (function, *sources) in table.items():
        for layer in range(num_layers) if "{}" in name else [0]:
            theirs = [source.format(layer) for source in sources]
            entries[name.format(layer)] = (function, theirs)
    wanted = {source for _, sources in entries.values() for source in sources}
    problems = {
        "missing": sorted(wanted - set(tensors)),
        "unexpected": [
            name
            for name in tensors
            if name not in wanted and not re.fullmatch(ignored, name)
        ],
        # Integers are quantized: their scales are elsewhere.
        "not floats": [
            f"{name} ({tensors[name].dtype})"
            for name in sorted(wanted & set(tensors))
            if not jnp.issubdtype(tensors[name].dtype, jnp.floating)
        ],
    }
    if any(problems.values()):
        raise ValueError(
            "the tensors are not those of this model: "
            f"{pretrained.list_problems(problems)}"
        )
    return entries


def same(x: np.ndarray) -> np.ndarray:
    """Returns the tensor."""
    return x


def linear(ours: str, theirs: str, scale: str = "") -> Table:
    """A linear layer of PyTorch, whose weight is ``[outputs, inputs]``.

    ``scale`` names the tensor that multiplies its outputs.
    """
    if scale:
        return {
            f"{ours}.kernel": (lambda x, y: x.T * y, f"{theirs}.weight", scale),
            f"{ours}.bias": (np.multiply, f"{theirs}.bias", scale),
        }
    return {
        f"{ours}.kernel": (np.transpose, f"{theirs}.weight"),
        f"{ours}.bias": (same, f"{theirs}.bias"),
    }


def norm(ours: str, theirs: str) -> Table:
    """A LayerNorm of PyTorch."""
    return {
        f"{ours}.scale": (same, f"{theirs}.weight"),
        f"{ours}.bias": (same, f"{theirs}.bias"),
    }


def _part(index: int, count: int, axis: int, x: np.ndarray) -> np.ndarray:
    """Takes q, k or v from a matrix or a bias that has them one after another."""
    return np.split(x, count, axis)[index]


def fused(
    weight: str,
    bias: str = "",
    *,
    transposed: bool = True,
    ours: str = "layers.{}.attention",
    of: str = "qkv",
) -> Table:
    """The projections of q, k and v, or of those in ``of``, from one fused layer."""
    table = {}
    for index, name in enumerate(of):
        axis = 0 if transposed else -1
        part = functools.partial(_part, index, len(of), axis)
        transposed_part = functools.partial(_transposed_part, index, len(of))
        kernel = transposed_part if transposed else part
        table[f"{ours}.{name}.kernel"] = (kernel, weight)
        if bias:
            table[f"{ours}.{name}.bias"] = (part, bias)
    return table


def _transposed_part(index: int, count: int, x: np.ndarray) -> np.ndarray:
    return _part(index, count, 0, x).T


def patches(x: np.ndarray) -> np.ndarray:
    """Reshapes a kernel ``[dim, channels, height, width]`` to a matrix of patches."""
    dim, channels, height, width = x.shape
    return x.transpose(2, 3, 1, 0).reshape(height * width * channels, dim)


def count_layers(tensors: Tensors, pattern: str) -> int:
    """Counts layers by the names of tensors; the pattern's group is the index.

    Raises:
        ValueError: If a layer has no tensors, but one after it has.
    """
    matches = (re.match(pattern, name) for name in tensors)
    found = {match[1] for match in matches if match}
    # A file may name a layer of any index.
    for index in map(str, range(len(found))):
        if index not in found:
            other = max(found, key=len)
            raise ValueError(
                f"missing all tensors of layer {index}, but there are some of layer "
                f"{other:.80}"
            )
    return len(found)


def shape_of(tensors: Tensors, name: str, ndim: int) -> tuple[int, ...]:
    """Returns the shape of a tensor, which must have ``ndim`` axes."""
    shape = tensors[name].shape
    if len(shape) != ndim:
        raise ValueError(f"wrong shape: {name} {shape} must have {ndim} axes")
    return shape


def position_grid(
    count: int,
    settings: Mapping[str, Any],
    patch: list[int],
    before: tuple[int, ...] = (0,),
) -> tuple[int, int]:
    """Returns the grid of a table of positions: that of ``image_size``, or a square.

    ``before`` lists how many positions may come before those of the grid.
    """
    if "image_size" not in settings:
        for first in before:
            side = math.isqrt(max(count - first, 0))
            if side > 0 and side**2 == count - first:
                return (side, side)
        raise ValueError(
            f"the table of positions has {count} rows, not a square grid: give "
            "image_size=[height, width] in a config.json beside the checkpoint"
        )
    size = image_size(settings)
    pixels, side = ("x".join(map(str, pair)) for pair in (size, patch))
    if size[0] % patch[0] or size[1] % patch[1]:
        raise ValueError(
            f"config.json has images of {pixels} pixels, which patches of {side} do "
            "not divide"
        )
    grid = (size[0] // patch[0], size[1] // patch[1])
    if count - math.prod(grid) not in before:
        raise ValueError(
            f"config.json has images of {pixels} pixels, which are {math.prod(grid)} "
            f"patches of {side}, but the table of positions has {count} rows"
        )
    return grid


def image_size(settings: Mapping[str, Any]) -> list[int]:
    """Returns the height and width of ``image_size``, which is one side or both."""
    size = settings["image_size"]
    size = list(size) if isinstance(size, list | tuple) else [size, size]
    if [type(side) for side in size] != [int, int] or min(size) < 1:
        raise ValueError(f"image_size={size} must be a side, or a height and a width")
    return size

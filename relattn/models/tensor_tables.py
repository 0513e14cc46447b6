"""Tables from the tensors of other libraries' checkpoints to relattn's parameters.

A table has for each of our parameters a function, and the names of the tensors that it
takes. ``{}`` stands for the index of a layer. `apply_table` reads a checkpoint with it;
if every function is `Reversible`, `invert_table` writes one.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from relattn.messages import list_problems

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


@dataclasses.dataclass(frozen=True)
class Reversible:
    """A function of a table that can be undone, bit for bit.

    Attributes:
        read: Computes our parameter from the tensors of the checkpoint.
        write: Computes these tensors from our parameter, one for each argument of
            ``read``; None for one that follows from another entry of the table.
        part: For one of several parameters in one tensor, their order and their axis:
            ``write`` computes a part of the tensor.
    """

    read: Callable[..., np.ndarray]
    write: Callable[[np.ndarray], tuple[np.ndarray | None, ...]]
    part: tuple[int, int] | None = None

    def __call__(self, *tensors: np.ndarray) -> np.ndarray:
        """Computes our parameter."""
        return self.read(*tensors)


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


def invert_table(
    table: Table, parameters: Tensors, num_layers: int
) -> dict[str, np.ndarray]:
    """Computes the tensors of a checkpoint from our parameters; see `apply_table`.

    Args:
        table: For each of our names a `Reversible`, and the names of its arguments.
        parameters: An array for each of our names, with the prefix ``params.``.
        num_layers: Number of layers, which ``{}`` counts.

    Returns:
        An array for each of the checkpoint's names.

    Raises:
        ValueError: If the other library's model does not have a parameter of ours.

    Example:
        >>> table = linear("head", "classifier")
        >>> tensors = {"classifier.weight": np.ones((3, 2)), "classifier.bias":
        ...            np.ones(3)}
        >>> parameters = apply_table(table, tensors, 0)
        >>> {name: x.shape for name, x in invert_table(table, parameters, 0).items()}
        {'classifier.weight': (3, 2), 'classifier.bias': (3,)}
    """
    entries = _expand(table, num_layers)
    wanted = {f"params.{name}" for name in entries}
    problems = {
        "missing": sorted(wanted - set(parameters)),
        "unexpected": [name for name in parameters if name not in wanted],
    }
    if any(problems.values()):
        raise ValueError(
            "the parameters are not those of the other library's model: "
            f"{list_problems(problems)}"
        )
    tensors, parts = {}, {}
    for name, (function, sources) in entries.items():
        try:
            arrays = function.write(parameters[f"params.{name}"])
        except ValueError as error:
            raise ValueError(f"{name} {error}") from error
        for source, array in zip(sources, arrays, strict=True):
            if array is None:
                continue
            if function.part is None:
                tensors[source] = array
            else:
                parts.setdefault(source, {})[function.part] = array
    for source, found in parts.items():
        axis = next(iter(found))[1]
        arrays = [found[part] for part in sorted(found)]
        tensors[source] = np.concatenate(arrays, axis)
    return tensors


def _expand(table, num_layers):
    """Returns the function and the tensors of each of our names."""
    entries = {}
    for name, (function, *sources) in table.items():
        for layer in range(num_layers) if "{}" in name else [0]:
            theirs = [source.format(layer) for source in sources]
            entries[name.format(layer)] = (function, theirs)
    return entries


def _entries(table, tensors, num_layers, ignored):
    """Returns the entries of a table, whose tensors a checkpoint must have."""
    entries = _expand(table, num_layers)
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
            f"the tensors are not those of this model: {list_problems(problems)}"
        )
    return entries


# The tensor itself, and its transpose.
same = Reversible(lambda x: x, lambda x: (x,))
transposed = Reversible(np.transpose, lambda x: (x.T,))
# The weight and the bias of a linear layer whose outputs a tensor multiplies. The
# factors are a part of our parameters, so those that are written are ones.
_SCALED_WEIGHT = Reversible(lambda x, scale: x.T * scale, lambda x: (x.T, None))
_SCALED_BIAS = Reversible(np.multiply, lambda x: (x, np.ones_like(x)))


def linear(ours: str, theirs: str, scale: str = "") -> Table:
    """Returns the table of a linear layer of PyTorch, of weights [outputs, inputs].

    ``scale`` names the tensor that multiplies its outputs.
    """
    if scale:
        return {
            f"{ours}.kernel": (_SCALED_WEIGHT, f"{theirs}.weight", scale),
            f"{ours}.bias": (_SCALED_BIAS, f"{theirs}.bias", scale),
        }
    return {
        f"{ours}.kernel": (transposed, f"{theirs}.weight"),
        f"{ours}.bias": (same, f"{theirs}.bias"),
    }


def norm(ours: str, theirs: str) -> Table:
    """Returns the table of a LayerNorm of PyTorch."""
    return {
        f"{ours}.scale": (same, f"{theirs}.weight"),
        f"{ours}.bias": (same, f"{theirs}.bias"),
    }


def part(index: int, count: int, *, axis: int = 0, transpose: bool) -> Reversible:
    """Returns one of several parameters that a tensor has one after another.

    Args:
        index: Which of them.
        count: Their number.
        axis: The tensor's axis along which they follow each other.
        transpose: Whether ours is the transpose of the part.
    """

    def read(x: np.ndarray) -> np.ndarray:
        x = np.split(x, count, axis)[index]
        return x.T if transpose else x

    def write(x: np.ndarray) -> tuple[np.ndarray]:
        return (x.T if transpose else x,)

    return Reversible(read, write, (index, axis))


def fused(
    weight: str,
    bias: str = "",
    *,
    transpose: bool = True,
    ours: str = "layers.{}.attention",
    of: str = "qkv",
) -> Table:
    """Returns the table of q, k and v, or of those in ``of``, from one fused layer."""
    table = {}
    for index, name in enumerate(of):
        axis = 0 if transpose else -1
        kernel = part(index, len(of), axis=axis, transpose=transpose)
        table[f"{ours}.{name}.kernel"] = (kernel, weight)
        if bias:
            table[f"{ours}.{name}.bias"] = (
                part(index, len(of), transpose=False),
                bias,
            )
    return table


def patches(patch: tuple[int, int] = (1, 1)) -> Reversible:
    """Returns a matrix of patches, from a kernel ``[dim, channels, height, width]``.

    Args:
        patch: Height and width, which only writing needs.
    """

    def read(x: np.ndarray) -> np.ndarray:
        dim, channels, height, width = x.shape
        return x.transpose(2, 3, 1, 0).reshape(height * width * channels, dim)

    def write(x: np.ndarray) -> tuple[np.ndarray]:
        return (x.reshape(*patch, -1, x.shape[-1]).transpose(3, 2, 0, 1),)

    return Reversible(read, write)


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
        rests = [count - first for first in before if first < count]
        squares = [rest for rest in rests if math.isqrt(rest) ** 2 == rest]
        if len(squares) == 1:
            side = math.isqrt(squares[0])
            return (side, side)
        # With rows of several registers or without, both may be squares.
        kind = "more than one" if squares else "not a"
        raise ValueError(
            f"the table of positions has {count} rows, {kind} square grid: set "
            "image_size=[height, width] in a config.json beside the checkpoint"
        )
    size = image_size(settings)
    pixels, side = ("x".join(map(str, pair)) for pair in (size, patch))
    grid = (size[0] // patch[0], size[1] // patch[1])
    if count - math.prod(grid) not in before:
        raise ValueError(
            f"config.json has images of {pixels} pixels, which are {math.prod(grid)} "
            f"patches of {side}, but the table of positions has {count} rows"
        )
    # A convolution leaves out what remains at the right and at the bottom.
    used = [steps * length for steps, length in zip(grid, patch, strict=True)]
    if size != used:
        raise ValueError(
            f"config.json has images of {pixels} pixels, which patches of {side} do "
            f"not divide: set image_size to {used}, the part of them that the model "
            "sees"
        )
    return grid


def image_size(settings: Mapping[str, Any]) -> list[int]:
    """Returns the height and width of ``image_size``, which is one side or both."""
    size = settings["image_size"]
    size = list(size) if isinstance(size, list | tuple) else [size, size]
    if [type(side) for side in size] != [int, int] or min(size) < 1:
        raise ValueError(f"image_size={size} must be a side, or a height and a width")
    return size

"""Names of a model's variables in files, by layer and position encoding.

A parameter is ``params.layers.3.attention.q.kernel`` or
``params.position.learned.table``, so that the names do not depend on which layers a
model compiles together, or on further encodings. `flatten` gives these names;
`unflatten` checks them and assembles a model's variables from them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from relattn import spec
from relattn.messages import list_problems

_BLOCK = re.compile(r"(blocks?)_(\d+)")

Variables = Mapping[str, Any]


def flatten(model: nn.Module, variables: Variables) -> dict[str, np.ndarray]:
    """Names a model's variables by layer and position encoding.

    Args:
        model: The model.
        variables: Its variables.

    Returns:
        An array for each name, on the host.

    Raises:
        ValueError: If a name has a dot.
    """
    flat = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(variables)[0]:
        names, stacked = leaf_names(model, path, leaf.shape)
        leaf = np.asarray(leaf)
        flat.update(zip(names, leaf if stacked else [leaf], strict=True))
    return flat


def unflatten(
    model: nn.Module,
    like: Variables,
    tensors: Mapping[str, Any],
    where: str | Path,
) -> dict[str, Any]:
    """Assembles a model's variables from named arrays; checks every name and shape.

    Args:
        model: The model.
        like: Shapes and dtypes of its variables.
        tensors: An array for each name of `flatten`.
        where: The source of the arrays, for the message.

    Returns:
        Variables with the structure of ``like``.

    Raises:
        ValueError: If an array is missing, unexpected, of another shape or not floats.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(like)
    places, shapes = [], {}
    for path, leaf in leaves:
        names, stacked = leaf_names(model, path, leaf.shape)
        places.append((names, stacked, leaf.dtype))
        shapes |= dict.fromkeys(names, tuple(leaf.shape[stacked:]))
    check_tensors(shapes, tensors, where)
    result = []
    for names, stacked, dtype in places:
        arrays = [np.asarray(tensors[name]).astype(dtype) for name in names]
        result.append(jnp.asarray(np.stack(arrays) if stacked else arrays[0]))
    return jax.tree.unflatten(treedef, result)


def cut_vocabulary(tensors: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Leaves out the rows of tables that belong to no token.

    Some checkpoints have rows that pad the vocabulary or were never used.

    Args:
        tensors: The arrays of a model of text, by the names of `flatten`.
        size: Number of ids of the tokenizer.

    Returns:
        The arrays, of the first ``size`` ids.

    Example:
        >>> tensors = {"params.head.kernel": np.ones((8, 263))}
        >>> cut_vocabulary(tensors, 256)["params.head.kernel"].shape
        (8, 256)
    """
    cuts = {
        "params.embedding.embedding": (slice(size),),
        "params.head.kernel": (..., slice(size)),
    }
    return {name: x[cuts[name]] if name in cuts else x for name, x in tensors.items()}


def check_tensors(
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, Any],
    where: str | Path,
) -> None:
    """Checks that arrays are floats and have exactly the expected names and shapes.

    Args:
        shapes: The expected shape of each name.
        tensors: The arrays.
        where: Their source, for the message.

    Raises:
        ValueError: If an array is missing, unexpected, of another shape or not floats.

    Example:
        >>> check_tensors({"a": (2,)}, {"b": np.ones(3)}, "model.safetensors")
        Traceback (most recent call last):
        ValueError: model.safetensors does not fit the model: missing a; unexpected b
    """
    problems = {
        "missing": [name for name in shapes if name not in tensors],
        "unexpected": [name for name in tensors if name not in shapes],
        "of another shape": [
            f"{name} {tuple(tensors[name].shape)} instead of {shape}"
            for name, shape in shapes.items()
            if name in tensors and tuple(tensors[name].shape) != shape
        ],
        "not floats": [
            f"{name} ({tensors[name].dtype})"
            for name in shapes
            if name in tensors and not jnp.issubdtype(tensors[name].dtype, jnp.floating)
        ],
    }
    if any(problems.values()):
        raise ValueError(f"{where} does not fit the model: {list_problems(problems)}")


def leaf_names(model: nn.Module, path: Any, shape: Any) -> tuple[list[str], bool]:
    """Names a leaf; returns several names, and True, for a leaf of stacked layers."""
    keys = [getattr(key, "key", None) or getattr(key, "name", "") for key in path]
    if keys[1:2] == ["position"]:
        terms = [spec.parse(term)[0] for term in spec.terms(model.position)]
        term = int(keys.pop(2).removeprefix("terms_")) if len(terms) > 1 else 0
        # Two encodings of the same name are told apart by their order.
        again = f"_{term}" if terms.count(terms[term]) > 1 else ""
        keys.insert(2, terms[term] + again)
    for place, key in enumerate(keys):
        match = _BLOCK.fullmatch(key)
        if match:
            stacked = match[1] == "blocks"
            first, count = int(match[2]), shape[0] if stacked else 1
            before, after = keys[:place], keys[place + 1 :]
            return [
                ".".join([*before, "layers", str(layer), *after])
                for layer in range(first, first + count)
            ], stacked
    return [".".join(keys)], False

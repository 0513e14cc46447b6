"""Which parameters an option of the optimiser concerns, by their names and shapes.

A parameter's name has dots: ``head.kernel``, ``layers.3.attention.q.kernel``. The
layers of a scanned block are stacked in one array, and each has its own name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from relattn.messages import closest, shorten
from relattn.models import variable_names
from relattn.nn.registry import POSITIONS

# As timm does, decay leaves out these, whatever their shape.
_NOT_DECAYED = ("cls", "position.")
_LAYER = re.compile(r"layers\.(\d+)\.")
# Modules after the last layer.
_AFTER_LAYERS = ("pool", "norm", "head_norm", "hidden", "head")


def _map_parameters(
    function: Callable[[list[str], Any, bool], Any], model: nn.Module, params: Any
) -> Any:
    """Calls a function with the names and the array of every parameter.

    Its third argument says whether the array stacks layers along its first axis; if so,
    each layer has a name, else there is one name.

    Example:
        >>> params = {"blocks_2": {"scale": jax.numpy.zeros((2, 5))}}
        >>> _map_parameters(lambda names, *_: names, nn.Dense(3), params)
        {'blocks_2': {'scale': ['layers.2.scale', 'layers.3.scale']}}
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path({"params": params})
    results = []
    for path, leaf in leaves:
        names, stacked = variable_names.leaf_names(model, path, leaf.shape)
        names = [name.removeprefix("params.") for name in names]
        results.append(function(names, leaf, stacked))
    return jax.tree.unflatten(treedef, results)["params"]


def is_matrix(model: nn.Module, params: Any) -> Any:
    """Finds the parameters that ``config.optimizer.decay_mask="matrices"`` decays.

    These have at least two axes, not counting that of stacked layers: kernels,
    embeddings and tables. The CLS token and the position encoding are left out.

    Args:
        model: The model.
        params: Its parameters, or their shapes and dtypes.

    Returns:
        Booleans, in the structure of ``params``: a mask of optax.

    Example:
        >>> model = nn.Dense(3)
        >>> params = {"kernel": jax.numpy.zeros((2, 3)), "bias": jax.numpy.zeros(3)}
        >>> is_matrix(model, params)
        {'bias': False, 'kernel': True}

    Source:
        nanoGPT, ``configure_optimizers``; timm, ``param_groups_weight_decay`` and the
        ``no_weight_decay`` of its Vision Transformers.
    """

    def decayed(names: list[str], leaf: Any, stacked: bool) -> bool:
        return leaf.ndim - stacked >= 2 and not names[0].startswith(_NOT_DECAYED)

    return _map_parameters(decayed, model, params)


def is_frozen(model: nn.Module, params: Any, patterns: str) -> Any:
    """Finds the parameters that ``config.freeze`` keeps as they start.

    Args:
        model: The model.
        params: Its parameters, or their shapes and dtypes.
        patterns: Patterns of names, separated by commas, with ``*`` for any text. A
            pattern also holds for all names that continue after it with a dot. With
            ``!`` before it, it trains parameters that an earlier one froze; the last
            pattern that holds decides.

    Returns:
        In the structure of ``params``, a boolean for each array; for stacked layers, if
        only some are frozen, a boolean for each layer, ``[layers, 1, ...]``.

    Raises:
        ValueError: If a pattern matches no parameter, or all or none of the parameters
            are frozen.

    Example:
        >>> params = {"cls": jnp.zeros(3), "head": {"bias": jnp.ones(2)}}
        >>> is_frozen(nn.Dense(3), params, "*, !head")
        {'cls': True, 'head': {'bias': False}}
    """
    chosen = [part.strip() for part in patterns.split(",") if part.strip()]
    names = _names(model, params)
    for pattern in chosen:
        bare = pattern.removeprefix("!")
        if not any(_matches(name, bare) for name in names):
            parts = {
                ".".join(name.split(".")[: 1 + name.startswith("layers.")])
                for name in names
            }
            raise ValueError(
                f"config.freeze has {shorten(pattern)}, which is the name of no "
                f"parameter: {closest(bare, parts)}"
            )

    def frozen(name: str) -> bool:
        matching = [p for p in chosen if _matches(name, p.removeprefix("!"))]
        return bool(matching) and not matching[-1].startswith("!")

    if not any(map(frozen, names)):
        raise ValueError(
            f"config.freeze={shorten(patterns)} freezes no parameter: name some, as in "
            "'embedding, layers.0'"
        )
    if all(map(frozen, names)):
        raise ValueError(
            f"config.freeze={shorten(patterns)} leaves no parameter to train: exclude "
            "some with !, as in '*, !head'"
        )

    def find(names: list[str], leaf: Any, stacked: bool) -> Any:
        found = np.array([frozen(name) for name in names])
        if found.all() or not found.any():
            return bool(found[0])
        return found.reshape(-1, *[1] * (leaf.ndim - stacked))

    return _map_parameters(find, model, params)


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def hold(params: Any, frozen: Any) -> Any:
    """Returns parameters that have a gradient of zero where they are frozen.

    Args:
        params: The parameters.
        frozen: Booleans, see `is_frozen`.

    Returns:
        The same values. Where a whole array is frozen, the backward pass does not
        compute its gradient.

    Example:
        >>> loss = lambda params: hold(params, {"a": True, "b": False})["a"] ** 2
        >>> float(jax.grad(loss)({"a": 3.0, "b": 1.0})["a"])
        0.0
    """

    def stop(leaf: Any, frozen: Any) -> Any:
        if isinstance(frozen, bool):
            return jax.lax.stop_gradient(leaf) if frozen else leaf
        return jnp.where(frozen, jax.lax.stop_gradient(leaf), leaf)

    return jax.tree.map(stop, params, frozen)


def layer_scales(model: nn.Module, params: Any, decay: float) -> Any:
    """Computes the factor of each parameter's learning rate, smaller near the input.

    factor = decay^(L + 1 - l) for layer l = 1..L; l = 0 for what precedes the layers,
    such as the embedding; l = L + 1 for what follows them, such as the head. A layer
    includes its part of a position encoding that acts in the attentions.

    Args:
        model: The model.
        params: Its parameters, or their shapes and dtypes.
        decay: ``config.optimizer.layer_decay``.

    Returns:
        In the structure of ``params``, a factor for each array; for arrays of several
        layers one for each, ``[layers, 1, ...]``.

    Raises:
        ValueError: If the model has no layers.

    Example:
        >>> params = {"blocks_0": {"bias": jnp.zeros((2, 3))}, "head": jnp.zeros(5)}
        >>> scales = layer_scales(nn.Dense(3), params, 0.5)
        >>> scales["blocks_0"]["bias"].ravel().tolist(), scales["head"]
        ([0.25, 0.5], 1.0)

    Source:
        Bao et al., BEiT, appendix H; He et al., Masked Autoencoders,
        ``util/lr_decay.py``.
    """
    layers = [
        int(found[1]) for name in _names(model, params) if (found := _LAYER.match(name))
    ]
    if not layers:
        raise ValueError(
            f"config.optimizer.layer_decay={decay} needs a model with layers, but "
            f"{type(model).__name__} has none: leave it at 1.0"
        )
    last = max(layers) + 2

    def exponent(name: str) -> int:
        if found := _LAYER.match(name):
            return last - int(found[1]) - 1
        return 0 if name.partition(".")[0] in _AFTER_LAYERS else last

    def scale(names: list[str], leaf: Any, stacked: bool) -> Any:
        if _has_axis_of_layers(names[0], leaf, last - 1):
            stacked, names = True, [f"layers.{layer}." for layer in range(last - 1)]
        factors = [decay ** exponent(name) for name in names]
        if not stacked:
            return factors[0]
        return np.reshape(factors, (-1, *[1] * (leaf.ndim - 1)))

    return _map_parameters(scale, model, params)


def _has_axis_of_layers(name: str, leaf: Any, num_layers: int) -> bool:
    """Returns whether a parameter of a position encoding has a part for each layer."""
    parts = name.split(".")
    if parts[0] != "position":
        return False
    position = POSITIONS.get(re.sub(r"_\d+$", "", parts[1]))
    if position is None or position.site == "tokens":
        return False
    if parts[-1] in position.shared_params:
        return False
    return leaf.shape[:1] == (num_layers,)


def _names(model: nn.Module, params: Any) -> list[str]:
    """Returns the names of all parameters."""
    names = _map_parameters(lambda names, *_: names, model, params)
    return jax.tree.leaves(names)

"""Which parameters an option of the optimiser concerns, by their names and shapes.

A parameter's name has dots: ``head.kernel``, ``layers.3.attention.q.kernel``. The
layers of a scanned block are stacked in one array, and each has its own name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax

from relattn.models import pretrained

# As timm does, decay leaves out these, whatever their shape.
_NOT_DECAYED = ("cls", "position.")


def map_parameters(
    function: Callable[[list[str], Any, bool], Any], model: nn.Module, params: Any
) -> Any:
    """Calls a function with the names and the array of every parameter.

    Args:
        function: Takes a list of names, the array, and whether the array stacks layers
            along its first axis; if so, each layer has a name, else there is one name.
        model: The model.
        params: Its parameters, or their shapes and dtypes.

    Returns:
        The results, in the structure of ``params``.

    Example:
        >>> params = {"blocks_2": {"scale": jax.numpy.zeros((2, 5))}}
        >>> map_parameters(lambda names, *_: names, nn.Dense(3), params)
        {'blocks_2': {'scale': ['layers.2.scale', 'layers.3.scale']}}
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path({"params": params})
    results = []
    for path, leaf in leaves:
        names, stacked = pretrained.leaf_names(model, path, leaf.shape)
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

    return map_parameters(decayed, model, params)

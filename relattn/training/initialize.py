"""Starts training from trained parameters: ``config.init_from``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from absl import logging
from ml_collections import ConfigDict

from relattn import data as data_lib
from relattn.models import pretrained
from relattn.training.run import load_run
from relattn.training.step import TrainState


def initial_state(task: Any) -> TrainState:
    """Creates the state before the first update, with the parameters of a model.

    Takes everything from ``config.init_from`` except what ``config.init_skip`` names,
    and resizes tables of positions to the images of the task. Several seeds start from
    the same parameters. Random features are drawn for the run.

    Args:
        task: The task of one seed or several.

    Returns:
        The state, on the host.

    Raises:
        ValueError: If parameters do not fit and ``config.init_skip`` does not name
            them.
        FileNotFoundError: If the folder holds neither a model nor a run.
    """
    config, single = task.config, task.single
    source = read_source(config.init_from)
    variables = {"params": source.variables["params"]}
    if single.info.kind == "images" and source.model.inputs == "images":
        new = data_lib.input_shape(config.data, single.info)
        old = source.config["image_shape"]
        variables = pretrained.resize_images(source.model, variables, old, new)
    tensors = pretrained.flatten(source.model, variables)
    state = jax.device_get(task.create_state())
    like = {"params": single.abstract_state.params}
    taken = fit(single.model, like, tensors, config)
    params = jax.tree.map(
        lambda start, new: start if new is None else np.broadcast_to(new, start.shape),
        state.params,
        taken["params"],
    )
    return state.replace(params=params)


def read_source(folder: str) -> pretrained.Pretrained:
    """Loads a converted model, or the best checkpoint of a run."""
    if (Path(folder) / pretrained.CONFIG).is_file():
        return pretrained.load_pretrained(folder)
    run = load_run(folder)
    return pretrained.Pretrained(run.model, run.variables, run.pretrained_config())


def fit(
    model: nn.Module,
    like: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    config: ConfigDict,
) -> Any:
    """Chooses the parameters of ``config.init_from`` that a model takes.

    Args:
        model: The model to train.
        like: Shapes of its parameters.
        tensors: The parameters of ``config.init_from``, by the names of
            `relattn.models.pretrained.flatten`.
        config: The run's configuration. ``init_skip`` lists parts of names, separated
            by commas: ``"head, attention.q"``.

    Returns:
        A tree like ``like``: an array for what is taken, None for the rest.

    Raises:
        ValueError: If parameters do not fit and ``init_skip`` does not name them.
    """
    skipped = [part.strip() for part in config.init_skip.split(",") if part.strip()]

    def skip(name: str) -> bool:
        return any(f".{part}." in f".{name}." for part in skipped)

    leaves, treedef = jax.tree_util.tree_flatten_with_path(like)
    result, problems, names_here = [], [], set()
    for path, leaf in leaves:
        names, stacked = pretrained.leaf_names(model, path, leaf.shape)
        names_here |= set(names)
        shape = tuple(leaf.shape[stacked:])
        fresh = [
            name
            for name in names
            if name not in tensors or tensors[name].shape != shape
        ]
        problems += [name for name in fresh if not skip(name)]
        if fresh or any(map(skip, names)):
            result.append(None)
            continue
        arrays = [tensors[name].astype(leaf.dtype) for name in names]
        result.append(np.stack(arrays) if stacked else arrays[0])
    unused = [name for name in tensors if name not in names_here and not skip(name)]
    if problems or unused:
        found = pretrained.list_problems(
            {
                "without a value of this shape there:": problems,
                "without a place in this model:": unused,
            }
        )
        raise ValueError(
            f"config.init_from={config.init_from} does not fit config.model: "
            f"{found}; name what may be initialized or left out in "
            "config.init_skip, such as 'head'"
        )
    count = sum(leaf is not None for leaf in result)
    logging.info(
        "%d of %d arrays of parameters are those of %s",
        count,
        len(result),
        config.init_from,
    )
    return jax.tree.unflatten(treedef, result)

"""Starts training from trained parameters: ``config.init_from``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from ml_collections import ConfigDict

from relattn import models
from relattn.files import expand
from relattn.manifest import FILE_PREFIX
from relattn.messages import closest, list_problems, shorten
from relattn.models import pretrained, variable_names
from relattn.models.patches import adapt_channels
from relattn.training.checkpoint import CHECKPOINTS, read_latest
from relattn.training.config import to_json
from relattn.training.run import saved_config
from relattn.training.saved_run import load_run, open_run
from relattn.training.step import TrainState

EMBEDDING = pretrained.EMBEDDING
# What is taken where it fits; the rest has to.
OPTIONAL = ("batch_stats.", "random_features.")
# Options of the data that are those of a converted model.
_PREPROCESSING = ("standardize", "mean", "std", "interpolation", "crop_pct")


def take_model(
    config: ConfigDict, given: Collection[str], workdir: str | Path = ""
) -> None:
    """Makes ``config.model`` the model of ``config.init_from``, with some changes.

    A run that resumes no longer needs ``config.init_from``: if its folder is gone, the
    model is that of the run.

    The size of the images, or the length of the texts and their tokenizer, are those of
    the model too, and so are mean, standard deviation, interpolation and crop of the
    images, if its folder has them.

    Args:
        config: Changed in place.
        given: Dotted keys that keep their value, such as ``"model.attention"``.
        workdir: The directory of the run that may resume; "" for none.

    Raises:
        ValueError: If the folder's files are damaged.
        FileNotFoundError: If the folder holds neither a model nor a run, and
            ``workdir`` no run that started from it.
    """
    try:
        source = read_source_config(config.init_from)
    except FileNotFoundError:
        source = _resumed_config(config.init_from, workdir)
        if source is None:
            raise
    changes = {
        key: config.model[key] for key in config.model if f"model.{key}" in given
    }
    values = {key: _pair(value) for key, value in source["model"].items()}
    sizes = {}
    if "init_from" in source:
        keys = ("image_size", "context_length", "tokenizer", *_PREPROCESSING)
        data = source["data"]
        sizes = {key: _pair(data[key]) for key in keys if key in data}
    elif "image_shape" in source:
        *_, height, width, _ = source["image_shape"]
        if config.data.get("source") != "text":
            sizes["image_size"] = height if height == width else (height, width)
        prepared = {"preprocessing", "training"} & {*source}
        if prepared and config.data.get("source") != "text":
            sizes |= _data_preprocessing(source)
    elif config.data.get("source") == "text" and "context_length" in source:
        sizes["context_length"] = source["context_length"]
        if tokenizer := _find_tokenizer(config, source):
            sizes["tokenizer"] = tokenizer
    # A size may be one side in the recipe, and two in the model.
    with config.unlocked(), config.ignore_type():
        config.model = ConfigDict(values | changes)
        for key, value in sizes.items():
            if f"data.{key}" not in given:
                config.data[key] = value
        for key in {"mean", "std"} & {*config.data} & {*sizes}:
            if not config.data.get("standardize", False):
                del config.data[key]


def _find_tokenizer(config: ConfigDict, source: Mapping[str, Any]) -> str:
    """Returns the name of a model's tokenizer, or the path of its file."""
    name = pretrained.tokenizer_of(source)
    # A folder of tokens has the file of their tokenizer.
    if name.startswith(FILE_PREFIX) and not config.data.get("data_dir"):
        folder = pretrained.find_model(config.init_from, weights=False)
        path = folder / pretrained.TOKENIZER
        return str(path) if path.is_file() else name
    return name


def _data_preprocessing(source: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of the data that prepare images as for a saved model."""
    values, standardize = source.get("preprocessing"), True
    if values is None:
        data, info, options = pretrained.data_options(source, "config.init_from")
        values = data.library_preprocessing(options, info)
        standardize = options.get("standardize", False)
    *_, height, width, _ = source["image_shape"]
    statistics = {key: tuple(values[key]) for key in ("mean", "std") if standardize}
    return {
        "standardize": standardize,
        **statistics,
        "interpolation": values["interpolation"],
        "crop_pct": min(height, width) / values["resized"],
    }


def _resumed_config(init_from: str, workdir: str | Path) -> dict[str, Any] | None:
    """Returns the configuration of a run that started from a folder, or None."""
    if not str(workdir):
        return None
    latest = read_latest(expand(workdir, "--workdir") / CHECKPOINTS)
    if latest is None or latest[1]["config"].get("init_from") != init_from:
        return None
    return latest[1]["config"]


def initial_state(
    task: Any, log: Callable[[str], None] = lambda text: None
) -> TrainState:
    """Creates the state before the first update, with the parameters of a model.

    Takes everything from ``config.init_from`` except what ``config.init_skip`` names,
    and the head if the number of classes differs. Tables of positions are resized to
    the images of the task, or cut to the length of its texts; tables of tokens are cut
    to the ids of the tokenizer, if it is the model's. A model of three channels takes
    grey images as three equal channels; a model of grey images takes the mean of three
    channels. Several seeds start from the same parameters. Moving statistics are taken
    where they fit, and so are the random features of the same attention, on which the
    model may depend; others are drawn for the run.

    Args:
        task: The task of one seed or several.
        log: Called with a line about what was taken.

    Returns:
        The state, on the host.

    Raises:
        ValueError: If parameters do not fit and ``config.init_skip`` does not name
            them.
        FileNotFoundError: If the folder holds neither a model nor a run.
    """
    config, single = task.config, task.single
    source = read_source(config.init_from)
    carried = ["params", "batch_stats"]
    if pretrained.attention_of(source.model) == pretrained.attention_of(single.model):
        carried.append("random_features")
    variables = {key: source.variables.get(key, {}) for key in carried}
    new, skipped = single.sizes, list(_skipped(config))
    if "image_shape" in new and source.model.inputs == "images":
        old_shape, new_shape = source.config["image_shape"], new["image_shape"]
        grids = [
            models.patch_grid(shape[:-1], getattr(model, "patch_size", 1))
            for shape, model in ((old_shape, source.model), (new_shape, single.model))
        ]
        try:
            variables = models.resize_grid(source.model, variables, *grids)
        except ValueError as error:
            old_size, new_size = (
                "x".join(map(str, shape[:-1])) for shape in (old_shape, new_shape)
            )
            raise ValueError(
                f"config.init_from={config.init_from}, a model of images of {old_size} "
                f"pixels, does not fit images of {new_size}: {error}"
            ) from error
    elif isinstance(source.model, models.GPT) and "context_length" in new:
        lengths = source.config["context_length"], new["context_length"]
        if lengths[1] < lengths[0]:
            grids = [(length,) for length in lengths]
            variables = models.resize_grid(source.model, variables, *grids)
    tensors = variable_names.flatten(source.model, variables)
    if "image_shape" in new and source.model.inputs == "images":
        tensors = _with_channels(tensors, old_shape[-1], new_shape[-1])
    elif source.model.inputs == "tokens" and "vocab_size" in new:
        _check_tokenizer(config, source.config, task.info.tokenizer, skipped)
        if task.info.tokenizer == pretrained.tokenizer_of(source.config):
            tensors = variable_names.cut_vocabulary(tensors, new["vocab_size"])
    if "num_classes" in new and new["num_classes"] != source.config.get("num_classes"):
        skipped.append("head")
    state = jax.device_get(task.create_state())
    like = {key: getattr(single.abstract_state, key) for key in carried}
    described = describe_model(config, new)
    taken = fit(single.model, like, tensors, config, skipped, described)
    arrays = jax.tree.leaves(taken["params"], is_leaf=lambda leaf: leaf is None)
    count = sum(array is not None for array in arrays)
    log(
        f"{count} of {len(arrays)} arrays of parameters are those of "
        f"{config.init_from}; {described}."
    )
    starts = {key: getattr(state, key) for key in carried}
    changed = jax.tree.map(_replace, starts, like, taken)
    if jax.tree.leaves(state.ema):
        changed["ema"] = changed["params"]
    return state.replace(**changed)


def _replace(
    start: np.ndarray, like: Any, taken: Sequence[np.ndarray | None]
) -> np.ndarray:
    """Replaces the layers of an array, or all of it, by what `fit` takes.

    Args:
        start: The array, of one seed or of several along its first axis.
        like: Its shape for one seed.
        taken: The new values of the array, or of each of the layers that it stacks.
    """
    result = np.array(start)
    seeds = (slice(None),) * (start.ndim - like.ndim)
    for layer, values in enumerate(taken):
        if values is not None:
            result[(*seeds, layer) if values.ndim < like.ndim else ...] = values
    return result


def describe_model(config: ConfigDict, sizes: Mapping[str, Any]) -> str:
    """Says how ``config.model`` differs from the model of ``config.init_from``.

    Args:
        config: The run's configuration.
        sizes: The sizes of the data, see `relattn.training.task.Task.sizes`.
    """
    source = read_source_config(config.init_from)
    there = models.complete_options(source["model"]) | source
    changes = [
        f"{key}={value!r} ({there[key]!r} there)"
        for key, value in {**to_json(config)["model"], **sizes}.items()
        if key in there and value not in (there[key], _pair(there[key]))
    ]
    text = f"config.model is that of config.init_from={config.init_from}"
    return f"{text}, except for {', '.join(changes)}" if changes else text


def _pair(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@contextlib.contextmanager
def explain_init_errors(config: ConfigDict, sizes: Mapping[str, Any]) -> Iterator[None]:
    """Adds to errors about ``config.model`` how it differs from ``config.init_from``.

    Args:
        config: The run's configuration.
        sizes: The sizes of the data.

    Yields:
        Nothing.

    Raises:
        ValueError: If the body of the context raises one.
    """
    try:
        yield
    except ValueError as error:
        if not config.init_from:
            raise
        try:
            described = describe_model(config, sizes)
        except FileNotFoundError:
            # A run that resumes needs config.init_from no longer.
            raise error from None
        raise ValueError(f"{error} ({described})") from error


def _with_channels(tensors: dict[str, np.ndarray], old: int, new: int) -> dict:
    """Fits the embedding of patches to another number of channels, if it is linear."""
    kernel = tensors.get(EMBEDDING)
    normed = any(name.startswith("params.patch_norm.") for name in tensors)
    if old == new or kernel is None or normed or not {old, new} & {1, 3}:
        return tensors
    return {**tensors, EMBEDDING: adapt_channels(kernel, old, new)}


def _check_tokenizer(
    config: ConfigDict, source: Mapping[str, Any], found: str, skipped: Sequence[str]
) -> None:
    """Raises ValueError if the ids of the data are those of another tokenizer."""
    known = pretrained.tokenizer_of(source)
    # A tokenizer.json may be GPT-2's; a vocabulary of another size is refused anyway.
    if known in ("", found) or "gpt2" in (known, found) or "embedding" in skipped:
        return
    tables = "embedding" if source["model"].get("tie_head") else "embedding, head"
    raise ValueError(
        f"the tokenizer of config.init_from={config.init_from} is {known!r}, but the "
        f"data have tokens of {found!r}: prepare the text with the model's, such as "
        f"its tokenizer.json, or start new tables by config.init_skip={tables!r}"
    )


def read_source_config(folder: str) -> dict[str, Any]:
    """Reads the model, the sizes and the data of ``config.init_from``."""
    path = pretrained.find_model(folder, weights=False)
    if (path / pretrained.CONFIG).is_file():
        return pretrained.read_config(path)[0]
    if not (path / CHECKPOINTS).is_dir():
        raise FileNotFoundError(
            f"config.init_from={folder} holds neither a converted model "
            f"({pretrained.CONFIG}) nor a run ({CHECKPOINTS}): convert a checkpoint "
            "with relattn convert, or name a --workdir"
        )
    trained = open_run(folder).trained
    config = saved_config(trained.config, trained.info)
    return {**config, "training": to_json(trained.config)}


def read_source(folder: str) -> pretrained.Pretrained:
    """Loads a converted model, or the best checkpoint of a run."""
    path = pretrained.find_model(folder, weights=False)
    if (path / pretrained.CONFIG).is_file():
        return pretrained.load_pretrained(folder)
    run = load_run(folder)
    return pretrained.Pretrained(run.model, run.variables, run.pretrained_config())


def _skipped(config: ConfigDict) -> list[str]:
    return [part.strip() for part in config.init_skip.split(",") if part.strip()]


def fit(
    model: nn.Module,
    like: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    config: ConfigDict,
    skipped: Sequence[str],
    described: str,
) -> Any:
    """Chooses the parameters of ``config.init_from`` that a model takes.

    Args:
        model: The model to train.
        like: Shapes of its parameters and of the collections of `OPTIONAL`.
        tensors: Those of ``config.init_from``, by the names of
            `relattn.models.variable_names.flatten`.
        config: The run's configuration. ``init_skip`` lists parts of names, separated
            by commas: ``"head, attention.q"``.
        skipped: These parts, and others.
        described: What differs from the model of ``config.init_from``, for the message.

    Returns:
        A tree like ``like`` of lists: an array, or for stacked layers one for each,
        for what is taken; None for the rest.

    Raises:
        ValueError: If parameters do not fit and ``init_skip`` does not name them, or it
            names none.
    """

    def skip(name: str) -> bool:
        return any(f".{part}." in f".{name}." for part in skipped)

    def may_differ(name: str) -> bool:
        return name.startswith(OPTIONAL) or skip(name)

    leaves, treedef = jax.tree_util.tree_flatten_with_path(like)
    result, problems, names_here = [], [], set()
    for path, leaf in leaves:
        names, stacked = variable_names.leaf_names(model, path, leaf.shape)
        names_here |= set(names)
        shape = tuple(leaf.shape[stacked:])
        fresh = [
            name
            for name in names
            if name not in tensors or tensors[name].shape != shape
        ]
        problems += [name for name in fresh if not may_differ(name)]
        result.append(
            [
                None
                if name in fresh or skip(name)
                else tensors[name].astype(leaf.dtype)
                for name in names
            ]
        )
    unused = [x for x in tensors if x not in names_here and not may_differ(x)]
    if problems or unused:
        found = list_problems(
            {
                "without a value of this shape there:": problems,
                "without a place in this model:": unused,
            }
        )
        raise ValueError(
            f"config.init_from={config.init_from} does not fit config.model: {found}; "
            f"{described}: change this, or name what may be initialised or left out in "
            "config.init_skip, such as 'head'"
        )
    names = {*names_here, *tensors}
    for part in _skipped(config):
        if not any(f".{part}." in f".{name}." for name in names):
            words = {word for name in names for word in name.split(".")[1:]}
            hint = closest(part, {word for word in words if not word.isdecimal()})
            raise ValueError(
                f"config.init_skip has {shorten(part)}, which is in the name of no "
                f"parameter: {hint}"
            )
    return jax.tree.unflatten(treedef, result)

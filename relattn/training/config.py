"""The configuration of a run: its defaults, checks and differences."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from relattn import spec
from relattn.data import IMAGE_OPTIONS
from relattn.messages import check_choice, closest, shorten
from relattn.models import MODELS, complete_options
from relattn.training.devices import PARALLEL
from relattn.training.loggers import logger_names
from relattn.training.optimizer import DECAY_MASKS, OPTIMIZERS, SCHEDULES

# Keys that may change when a run resumes: they do not affect its results, or only what
# happens after an update that is not finite.
MAY_CHANGE_ON_RESUME = (
    "progress",
    "parallel",
    "model_axis",
    "num_devices",
    "model.remat",
    "eval_batch_size",
    "log_every_steps",
    "loggers",
    "checkpoint_every_steps",
    "max_skipped_updates",
    "data.data_dir",
    "data.manual_dir",
    "data.bpe_dir",
    "data.num_workers",
)

# Keys that may also change when a run is extended: the schedules except the cosine do
# not depend on them.
LENGTH_KEYS = ("num_epochs", "num_steps")

# Devices count and compute in 32 bits.
LARGEST_INT = 2**31 - 1
# JAX's keys have 32 bits of a seed.
LARGEST_SEED = 2**32 - 1

_AT_LEAST = {
    "num_seeds": 1,
    "seed": 0,
    "batch_size": 1,
    "accumulate_steps": 1,
    "eval_batch_size": 1,
    "eval_draws": 1,
    "num_epochs": 0,
    "num_steps": 0,
    "redraw_every": 0,
    "max_skipped_updates": 0,
    "early_stopping_epochs": 0,
    "eval_every_epochs": 1,
    "eval_every_steps": 0,
    "checkpoint_every_steps": 0,
    "log_every_steps": 1,
    "model_axis": 1,
    "num_devices": 0,
    "optimizer.learning_rate": 0.0,
    "optimizer.weight_decay": 0.0,
    "optimizer.layer_decay": 0.0,
    "optimizer.clip_norm": 0.0,
    "schedule.warmup_steps": 0,
    "schedule.decay_rate": 0.0,
}

# Keys that are at least 0 and below 1.
_SHARES = (
    "optimizer.b1",
    "optimizer.b2",
    "optimizer.momentum",
    "label_smoothing",
    "ema_decay",
)

# Keys that are factors: 1 has a meaning of its own.
_FACTORS = (*_SHARES, "optimizer.layer_decay", "schedule.decay_rate")

# Keys that have an effect only with some values of another key.
_NEEDS = {
    "optimizer.b1": ("optimizer.name", ("adam", "adamw")),
    "optimizer.b2": ("optimizer.name", ("adam", "adamw")),
    "optimizer.momentum": ("optimizer.name", ("sgd",)),
    "optimizer.weight_decay": ("optimizer.name", ("adamw",)),
    "schedule.decay_rate": ("schedule.name", ("exponential",)),
    "model_axis": ("parallel", ("mesh",)),
}


def default_config() -> ConfigDict:
    """Returns every key of training with its default value.

    A comment describes each key; the site's reference of configuration keys has them
    too.

    Returns:
        An unlocked configuration; ``model`` and ``data`` are empty, to be filled in.

    Example:
        >>> config = default_config()
        >>> config.model = ConfigDict({"name": "performer"})
        >>> config.optimizer.name, config.batch_size
        ('adam', 64)
    """
    config = ConfigDict()
    # Seed of the parameters, random features, dropout and order of the data.
    config.seed = 0
    # Number of seeds that are trained together, from `seed` on.
    config.num_seeds = 1
    # Run or saved model whose model and parameters training starts from; "" for none.
    config.init_from = ""
    # Parts of names of parameters not to take from `init_from`, separated by commas.
    config.init_skip = ""
    # Patterns of parameters that are not trained, as in "*, !head"; "" for none.
    config.freeze = ""
    # Name of the model, and the options that differ from its defaults.
    config.model = ConfigDict()
    # Source, name and options of the data.
    config.data = ConfigDict()
    # Number of examples in an update, over all devices and hosts.
    config.batch_size = 64
    # Number of equal micro-batches of a batch, processed in turn to save memory.
    config.accumulate_steps = 1
    # Number of examples in a batch of evaluation.
    config.eval_batch_size = 256
    # Number of draws of the random features over which evaluation averages.
    config.eval_draws = 1
    # Length of the run in epochs.
    config.num_epochs = 1
    # Length of the run in updates; 0 to use `num_epochs`.
    config.num_steps = 0
    # Fraction of each label that is spread over all classes, in training.
    config.label_smoothing = 0.0
    # Decay of the moving average of the parameters, such as 0.9999; 0 for none.
    config.ema_decay = 0.0
    config.optimizer = ConfigDict()
    # "adam", "adamw" or "sgd".
    config.optimizer.name = "adam"
    # Largest learning rate of the run.
    config.optimizer.learning_rate = 1e-3
    # Decay rate of the first moment of Adam and AdamW, per update.
    config.optimizer.b1 = 0.9
    # Decay rate of the second moment of Adam and AdamW, per update.
    config.optimizer.b2 = 0.999
    # Momentum of SGD; 0 for none.
    config.optimizer.momentum = 0.0
    # Weight decay of AdamW, which the learning rate multiplies.
    config.optimizer.weight_decay = 0.0
    # What decays: "matrices", without biases, norms, CLS and positions, or "all".
    config.optimizer.decay_mask = "matrices"
    # Factor of the learning rate, once for each layer up to the head; 1 for none.
    config.optimizer.layer_decay = 1.0
    # Gradients of a larger global norm are scaled down to this norm; 0 for no clipping.
    config.optimizer.clip_norm = 0.0
    config.schedule = ConfigDict()
    # "constant", "cosine" (to zero at the end of the run) or "exponential".
    config.schedule.name = "constant"
    # Number of updates in which the learning rate grows linearly; 0 for none.
    config.schedule.warmup_steps = 0
    # Factor of the learning rate for each epoch, with "exponential".
    config.schedule.decay_rate = 1.0
    # Number of updates between redraws of the random features; 0 for never.
    config.redraw_every = 0
    # Largest number of updates to skip because their loss or gradient is not finite.
    config.max_skipped_updates = 0
    # Epochs without gain in validation accuracy (text: loss) before a stop; 0: never.
    config.early_stopping_epochs = 0
    # Number of epochs between evaluations.
    config.eval_every_epochs = 1
    # Number of updates between evaluations; 0 to use `eval_every_epochs`.
    config.eval_every_steps = 0
    # Number of updates between checkpoints, apart from those at evaluations; 0: none.
    config.checkpoint_every_steps = 0
    # Number of updates between rows of the metrics.
    config.log_every_steps = 50
    # Loggers of the metrics: "tensorboard", "wandb", "tensorboard,wandb" or "".
    config.loggers = "tensorboard"
    # "pmap", a copy of the parameters on every device, or "mesh", which can split them.
    config.parallel = PARALLEL[0]
    # Number of devices over which "mesh" splits the parameters.
    config.model_axis = 1
    # Number of devices; 0 for the largest number that divides the batch.
    config.num_devices = 0
    # Whether to print progress.
    config.progress = True
    return config


def complete(values: Mapping[str, Any]) -> ConfigDict:
    """Rebuilds a configuration; missing keys of training get their defaults.

    Weight decay in a configuration from before ``optimizer.decay_mask`` decays all
    parameters.

    Args:
        values: Nested dictionaries, as `to_json` returns them.

    Returns:
        The configuration.

    Example:
        >>> complete({"seed": 3}).accumulate_steps
        1
    """
    config = default_config()
    config.update(values)
    optimizer = values.get("optimizer", {})
    if optimizer.get("weight_decay") and "decay_mask" not in optimizer:
        config.optimizer.decay_mask = "all"
    return config


def check_config(config: ConfigDict) -> None:
    """Checks the names, types and ranges of the keys of training.

    The keys of ``model`` and ``data`` are checked where they are used.

    Args:
        config: A configuration like `default_config`.

    Raises:
        ValueError: If a key is missing, unknown, of another type or out of range.

    Example:
        >>> check_config(default_config())
    """
    if not isinstance(config, ConfigDict):
        raise ValueError(
            "config must be a ConfigDict, such as read_config('performer:smoke'), got "
            f"{shorten(config)}"
        )
    given = flatten(config)
    expected = flatten(default_config())
    for key in ("model", "data"):
        if key not in config:
            raise ValueError(f"config.{key} is missing")
    for key, default in expected.items():
        if key not in given:
            raise ValueError(f"config.{key} is missing; its default is {default!r}")
        _check_type(key, given[key], default)
    for key in given:
        if key not in expected and not key.startswith(("model.", "data.")):
            shown = shorten(key).strip("'")
            raise ValueError(f"unknown config.{shown}: {closest(key, expected)}")
    if not given["optimizer.learning_rate"] > 0:
        raise ValueError(
            "config.optimizer.learning_rate must be positive, got "
            f"{shorten(given['optimizer.learning_rate'])}"
        )
    if not 0 < given["optimizer.layer_decay"] <= 1:
        raise ValueError(
            "config.optimizer.layer_decay must be above 0 and at most 1, got "
            f"{shorten(given['optimizer.layer_decay'])}"
        )
    for key, least in _AT_LEAST.items():
        most = spec.LARGEST_FLOAT if type(least) is float else LARGEST_INT
        if key == "seed":
            most = LARGEST_SEED - given["num_seeds"] + 1
        shown = shorten(given[key])
        if given[key] < least:
            raise ValueError(f"config.{key} must be at least {least}, got {shown}")
        if given[key] > most:
            raise ValueError(f"config.{key} must be at most {most}, got {shown}")
        if type(given[key]) is float:
            _check_float32(key, given[key])
    logger_names(given["loggers"])
    if given["init_skip"] and not given["init_from"]:
        raise ValueError(
            f"config.init_skip={shorten(given['init_skip'])} needs "
            "config.init_from, the model to start from"
        )
    for key in _SHARES:
        if not 0 <= given[key] < 1:
            raise ValueError(
                f"config.{key} must be at least 0 and below 1, got "
                f"{shorten(given[key])}"
            )
        _check_float32(key, given[key])
    if not given["num_epochs"] and not given["num_steps"]:
        raise ValueError("config.num_epochs and config.num_steps are both 0: set one")
    names = {
        "optimizer.name": OPTIMIZERS,
        "optimizer.decay_mask": DECAY_MASKS,
        "schedule.name": SCHEDULES,
        "parallel": PARALLEL,
    }
    for key, table in names.items():
        check_choice(f"config.{key}", given[key], table)
    for key, (other, fitting) in _NEEDS.items():
        if given[key] != expected[key] and given[other] not in fitting:
            names = " or ".join(map(repr, fitting))
            raise ValueError(
                f"config.{key}={shorten(given[key])} needs config.{other}={names},"
                f" got {given[other]!r}: leave config.{key} at {expected[key]!r}"
            )


def _check_float32(key: str, value: float) -> None:
    """Refuses a number that becomes zero, or a factor that becomes 1, in float32."""
    becomes = np.float32(value) if abs(value) >= spec.SMALLEST_FLOAT else np.float32(0)
    if (becomes == 0 != value) or (key in _FACTORS and becomes == 1 != value):
        raise ValueError(
            f"config.{key}={value!r} is {becomes:g} in float32, the type that it is "
            f"used in: choose a number further from {becomes:g}"
        )


def _check_type(key: str, value: Any, default: Any) -> None:
    kind = type(default)
    accepted = (int, float) if kind is float else kind
    is_bool = isinstance(value, bool)
    if not isinstance(value, accepted) or is_bool != (kind is bool):
        raise ValueError(
            f"config.{key} must be of type {kind.__name__}, got "
            f"{shorten(value)} ({type(value).__name__})"
        )
    if kind in (int, float) and not spec.is_finite(value):
        limits = "finite" if type(value) is float else f"within +-{spec.LARGEST}"
        raise ValueError(f"config.{key} must be {limits}, got {shorten(value)}")


def run_length(config: ConfigDict, steps_per_epoch: int) -> tuple[int, int]:
    """Returns the number of updates of a run, and of those between two evaluations.

    Args:
        config: A configuration like `default_config`.
        steps_per_epoch: Number of updates in an epoch.

    Returns:
        Both numbers of updates.

    Example:
        >>> run_length(default_config(), steps_per_epoch=7)
        (7, 7)
    """
    return (
        config.num_steps or config.num_epochs * steps_per_epoch,
        config.eval_every_steps or config.eval_every_epochs * steps_per_epoch,
    )


def to_json(config: ConfigDict) -> dict[str, Any]:
    """Converts a configuration to JSON values: tuples become lists.

    Args:
        config: A configuration of plain values.

    Returns:
        Nested dictionaries.

    Example:
        >>> to_json(ConfigDict({"a": {"b": (1, 2)}}))
        {'a': {'b': [1, 2]}}
    """
    return json.loads(json.dumps(config.to_dict()))


def flatten(config: Mapping[str, Any] | ConfigDict, prefix: str = "") -> dict[str, Any]:
    """Flattens a nested configuration to dotted keys.

    Args:
        config: Nested mappings.
        prefix: Added before every key.

    Returns:
        One entry for each value; an empty mapping has none.

    Example:
        >>> flatten({"a": {"b": 1}, "c": 2})
        {'a.b': 1, 'c': 2}
    """
    result = {}
    for key, value in config.items():
        if isinstance(value, Mapping | ConfigDict):
            result |= flatten(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result


def given_keys(config: ConfigDict) -> set[str]:
    """Returns the dotted keys of a configuration, without data options at defaults.

    Example:
        >>> given_keys(ConfigDict({"data": {"image_size": 8, "standardize": False}}))
        {'data.image_size'}
    """
    defaults = flatten({"data": IMAGE_OPTIONS})
    return {
        key
        for key, value in flatten(config).items()
        if key not in defaults or value != defaults[key]
    }


def differences(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    free: Sequence[str] = MAY_CHANGE_ON_RESUME,
) -> list[str]:
    """Lists the differences of two configurations.

    Args:
        old: A configuration as `to_json` returns it.
        new: Another one.
        free: Keys that may differ.

    Returns:
        A phrase for each key that differs, with both values.

    Example:
        >>> differences({"seed": 0, "progress": True}, {"seed": 1, "progress": False})
        ['seed: 0 there, 1 now']
    """
    missing = object()
    given = [flatten(config) for config in (old, new)]
    # What a configuration leaves out, perhaps since it did not exist, has its default.
    defaults = [
        flatten({"data": IMAGE_OPTIONS, "model": all_model_options(config)})
        for config in (old, new)
    ]
    result = []
    for key in sorted({*given[0], *given[1]} - set(free)):
        before, now = (
            values.get(key, default.get(key, missing))
            for values, default in zip(given, defaults, strict=True)
        )
        # An empty tokenizer is that of the data, whose description has it.
        if before != now and not (key == "data.tokenizer" and "" in (before, now)):
            shown = ["absent" if v is missing else repr(v) for v in (before, now)]
            result.append(f"{key}: {shown[0]} there, {shown[1]} now")
    return result


def complete_model(config: ConfigDict) -> None:
    """Adds the options of the model that a configuration leaves at their defaults.

    Args:
        config: Changed in place, even if it is locked.
    """
    with config.unlocked():
        for option, value in all_model_options(config).items():
            config.model[option] = value


def all_model_options(config: Mapping[str, Any] | ConfigDict) -> dict[str, Any]:
    """Returns all options of ``config.model``; without a name, only the given ones."""
    model = config.get("model")
    if not isinstance(model, Mapping | ConfigDict):
        return {}
    known = model.get("name") in list(MODELS)
    return complete_options(model) if known else dict(model)

"""Overrides of a configuration on the command line: ``--config.key=value``."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from absl import flags
from ml_collections import ConfigDict, FieldReference, config_flags

from relattn import models
from relattn.command import one_line
from relattn.messages import closest, shorten

_OPTION = re.compile(r"--?(?:no)?config\.([^=]*)")
_FLAG_MODULES = {"absl", "ast", "ml_collections"}
# Annotations of the options whose flags have a type of their own.
_TYPED = ("bool", "int", "float", "str", "Any")


def typed_keys(options: Sequence[str]) -> set[str]:
    """Returns the keys that options ``--config.key=value`` override.

    Args:
        options: The options; a value may be a word of its own.

    Returns:
        The dotted keys.

    Raises:
        ValueError: If a key is given twice.

    Example:
        >>> sorted(typed_keys(["--config.seed=3", "--noconfig.progress"]))
        ['progress', 'seed']
    """
    keys = set()
    for match in filter(None, map(_OPTION.match, options)):
        key = match[1]
        if key in keys:
            shown = shorten(key).strip("'")
            raise ValueError(f"--config.{shown} is given twice: give it once")
        keys.add(key)
    return keys


def override(config: ConfigDict, options: Sequence[str]) -> None:
    """Overrides keys of a configuration, and any option of its model.

    Args:
        config: Changed in place.
        options: Overrides such as ``--config.key=value``.

    Raises:
        ValueError: If a key does not exist, is given twice, or a value is of another
            type.

    Example:
        >>> config = ConfigDict({"model": {"name": "vit", "patch_size": (4, 2)}})
        >>> options = ["--config.model.patch_size=4", "--config.model.pool=mean"]
        >>> override(config, options)
        >>> config.model.patch_size, config.model.pool
        (4, 'mean')
    """
    literals = [_prepare(config, key) for key in sorted(typed_keys(options))]
    values, argv = flags.FlagValues(), ["train.py", *options]
    try:
        config_flags.DEFINE_config_dict(
            "config", config, "", values, lock_config=False, sys_argv=argv
        )
        _, *rest = values(argv, known_only=True)
    except Exception as error:
        problem = _explain(error)
        if problem is None:
            raise
        raise ValueError(problem) from error
    if rest:
        raise ValueError(f"{rest[0]!r} is not an option --config.key=value")
    with config.unlocked():
        for parent, name in filter(None, literals):
            value = parent[name]
            del parent[name]
            parent[name] = value


def _prepare(config: ConfigDict, key: str) -> tuple[ConfigDict, str] | None:
    """Makes a key ready for its flag; returns where it is if it takes any literal.

    A flag has the type of the present value, but a patch may be a side or a pair.
    """
    shown = shorten(key).strip("'\"")
    if not re.fullmatch(r"\w+(\.\w+)*", key):
        raise ValueError(
            f"--config.{shown} is not a key: write --config.key=value, with dots "
            "between names, and a pair as a whole"
        )
    *path, name = key.split(".")
    parent: Any = config
    for part in path:
        if part not in parent:
            hint = closest(part, parent)
            raise ValueError(f"there is no --config.{shown}: {hint}")
        parent = parent[part]
        if not isinstance(parent, ConfigDict):
            raise ValueError(
                f"there is no --config.{shown}: {part} is a value and has no keys"
            )
    options = _model_options() if path == ["model"] else {}
    if name not in {*parent, *options}:
        hint = closest(name, {*parent, *options})
        raise ValueError(f"there is no --config.{shown}: {hint}")
    if isinstance(parent.get(name), ConfigDict):
        raise ValueError(
            f"--config.{shown} has no value of its own: set its keys, "
            + ", ".join(f"--config.{shown}.{key}" for key in sorted(parent[name]))
        )
    with config.unlocked():
        if name not in parent:
            default = options[name].default
            parent[name] = jnp.dtype(default).name if name == "dtype" else default
        if not _takes_any_literal(parent[name], options.get(name)):
            return None
        value = parent[name]
        del parent[name]
        parent[name] = FieldReference(value, field_type=object)
        return parent, name


def _takes_any_literal(value: Any, option: inspect.Parameter | None) -> bool:
    if value is None or isinstance(value, tuple | list):
        return True
    if option is None:
        return False
    return inspect.formatannotation(option.annotation).strip("'") not in _TYPED


def _model_options() -> dict[str, inspect.Parameter]:
    """The options of all models; one of another model is refused where it is built."""
    options = {}
    for name in models.MODELS:
        options |= models.model_options(name)
    return options


def _explain(error: Exception) -> str | None:
    """Describes an error in ``--config.key=value``; None for one in other code."""
    if isinstance(error, flags.Error):
        return one_line(error)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = {frame.f_globals["__name__"].partition(".")[0] for frame in frames[1:]}
    if not modules <= _FLAG_MODULES:
        return None
    while error.args and isinstance(error.args[0], Exception):
        error = error.args[0]
    problem = error.args[0] if error.args else type(error).__name__
    return one_line(f"--config.[...] cannot be read: {problem}")

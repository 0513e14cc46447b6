"""Overrides of a configuration on the command line: ``--config.key=value``."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from relattn import models
from relattn.command import one_line, split_overrides
from relattn.messages import closest, shorten


def typed_keys(options: Sequence[str]) -> set[str]:
    """Returns the keys that options ``--config.key=value`` override.

    Args:
        options: The options; a value may be a word of its own.

    Returns:
        The dotted keys.

    Raises:
        ValueError: If a key is given twice, or a word is not such an option.

    Example:
        >>> sorted(typed_keys(["--config.seed=3", "--noconfig.progress"]))
        ['progress', 'seed']
    """
    return set(_read(options))


def override(config: ConfigDict, options: Sequence[str]) -> None:
    """Overrides keys of a configuration, and any option of its model.

    A value has the type of the present one, or that of the model's option. If it is not
    bool, int, float or str, the text is any Python literal, or else a string.

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
    values = {}
    for key, text in _read(options).items():
        kind = _find_type(config, key)
        if isinstance(text, bool) and kind != "bool":
            raise ValueError(f"--config.{key} has no value: write --config.{key}=value")
        try:
            values[key] = _PARSERS.get(kind, _parse_literal)(str(text))
        except ValueError as error:
            problem = f"flag --config.{key}={text}: {error}"
            raise ValueError(one_line(problem)) from error
    with config.unlocked(), config.ignore_type():
        config.update_from_flattened_dict(values)


def _read(options: Sequence[str]) -> dict[str, str | bool]:
    """Returns the text of each key, or the value of ``--[no]config.key``."""
    words, rest = split_overrides(options)
    if rest:
        raise ValueError(f"{shorten(rest[0])} is not an option --config.key=value")
    found = {}
    for word in words:
        option, equals, text = word.partition("=")
        prefix, _, key = option.partition("config.")
        if key in found:
            shown = shorten(key).strip("'")
            raise ValueError(f"--config.{shown} is given twice: pass it once")
        found[key] = text if equals else not prefix.endswith("no")
    return found


def _find_type(config: ConfigDict, key: str) -> str:
    """Returns the name of a key's type."""
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
    options = {}
    if path == ["model"]:
        # An option of another model is refused where the model is built.
        for model in models.MODELS:
            options |= models.model_options(model)
    if name in options:
        return inspect.formatannotation(options[name].annotation).strip("'")
    if name not in parent:
        hint = closest(name, {*parent, *options})
        raise ValueError(f"there is no --config.{shown}: {hint}")
    if isinstance(parent[name], ConfigDict):
        raise ValueError(
            f"--config.{shown} has no value of its own: set its keys, "
            + ", ".join(f"--config.{shown}.{key}" for key in sorted(parent[name]))
        )
    return parent.get_type(name).__name__


def _parse_bool(text: str) -> bool:
    if text.lower() not in ("true", "t", "1", "false", "f", "0"):
        raise ValueError("must be True or False")
    return text.lower() in ("true", "t", "1")


def _parse_literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text


_PARSERS = {"bool": _parse_bool, "int": int, "float": float, "str": str}

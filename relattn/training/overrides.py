"""Overrides of a configuration on the command line: ``--config.key=value``."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Collection, Sequence
from typing import Any

from ml_collections import ConfigDict

from relattn import models
from relattn.command import split_overrides
from relattn.data.load import OTHER_IMAGE_OPTIONS
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
    """Overrides keys of a configuration, and any option of its model or its images.

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
        parse, what = _PARSERS.get(kind, (_parse_literal, ""))
        try:
            values[key] = parse(str(text))
        except ValueError as error:
            problem = f"--config.{key} needs {what}, got {shorten(text)}"
            raise ValueError(problem) from error
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
            "between names, and pass a pair as one value"
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
    # An option of another model is refused where the model is built.
    options = {}
    for model in models.MODELS:
        options |= models.model_options(model)
    if path == ["model"] and name in options:
        return inspect.formatannotation(options[name].annotation).strip("'")
    more = {"model": options, "data": OTHER_IMAGE_OPTIONS}.get(".".join(path), ())
    if path == ["data"] and name in more:
        # The configuration need not have it, and a size may be a side or two.
        return ""
    if name not in parent:
        names = {*parent, *more}
        hint = _find_elsewhere(config, name, options) or closest(name, names)
        raise ValueError(f"there is no --config.{shown}: {hint}")
    if isinstance(parent[name], ConfigDict):
        raise ValueError(
            f"--config.{shown} has no value of its own: set its keys, "
            + ", ".join(f"--config.{shown}.{key}" for key in sorted(parent[name]))
        )
    return parent.get_type(name).__name__


def _find_elsewhere(config: ConfigDict, name: str, options: Collection[str]) -> str:
    """Returns a hint at the keys of this name in other parts; "" without any."""
    found = [name] if name in config else []
    for part, value in config.items():
        if isinstance(value, ConfigDict) and (
            name in value or part == "model" and name in options
        ):
            found.append(f"{part}.{name}")
    keys = " or ".join(f"--config.{key}" for key in found)
    return f"did you mean {keys}?" if found else ""


def _parse_bool(text: str) -> bool:
    if text.lower() not in ("true", "t", "1", "false", "f", "0"):
        raise ValueError(text)
    return text.lower() in ("true", "t", "1")


def _parse_literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text


# How the text of a value is read, and what it has to be.
_PARSERS = {
    "bool": (_parse_bool, "True or False"),
    "int": (int, "an integer"),
    "float": (float, "a number"),
    "str": (str, "a text"),
}

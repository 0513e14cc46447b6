"""Arguments of configuration files: ``configs/x.py:mnist,banded,rank=16``."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Mapping
from typing import Any

from relattn import spec


def read_arguments(
    arguments: str,
    where: str,
    choices: Mapping[str, Collection[str]],
    *,
    patterns: Mapping[str, str] | None = None,
    options: Mapping[str, type] | None = None,
) -> tuple[dict[str, str], dict[str, Any]]:
    """Sorts a configuration's arguments into choices and ``key=value`` options.

    Args:
        arguments: Words and options, separated by commas, in any order.
        where: The configuration's file, for messages.
        choices: The words that there are, by what they choose. No word chooses two
            things; of two words that choose the same the last one counts.
        patterns: Regular expressions of choices whose words are examples.
        options: The types of values, by key.

    Returns:
        The chosen words, and the options' values.

    Raises:
        ValueError: If a word or a key does not exist, naming the closest, or a value
            is not of its type.

    Example:
        >>> read_arguments(
        ...     "A/12,dynamic,rank=16", "configs/x.py",
        ...     {"data": ["static", "dynamic"], "size": ["A/7"]},
        ...     patterns={"size": r"[A-C]/[0-9]+"}, options={"rank": int})
        ({'size': 'A/12', 'data': 'dynamic'}, {'rank': 16})
    """
    patterns, options = patterns or {}, options or {}
    chosen, values = {}, {}
    for argument in filter(None, arguments.split(",")):
        key, equals, value = argument.partition("=")
        if equals:
            if key not in options:
                hint = spec.closest(key, options)
                raise ValueError(f"{where} has no option {spec.shorten(key)}: {hint}")
            values[key] = _read(value, options[key])
            if values[key] is None:
                raise ValueError(
                    f"{where} needs {key}={options[key].__name__}, got "
                    f"{spec.shorten(value)}"
                )
            continue
        for what, words in choices.items():
            known = argument in words
            if known or (what in patterns and re.fullmatch(patterns[what], argument)):
                chosen[what] = argument
                break
        else:
            words = [word for words in choices.values() for word in words]
            hint = spec.closest(argument, words)
            raise ValueError(
                f"{where} has no argument {spec.shorten(argument)}: {hint}"
            )
    return chosen, values


def _read(value: str, kind: type) -> Any:
    """A literal of a type, or None; a string needs no quotes."""
    if kind is str:
        return value
    if len(value) > spec.MAX_LENGTH:
        return None
    try:
        literal = ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    return literal if type(literal) is kind else None

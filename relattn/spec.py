"""Parses spec strings such as ``"favor(num_features=256)"`` and config file arguments.

A spec is a name, or a call of a name with literal keyword values. Configuration files
take a comma-separated string of words and ``key=value`` options. Both are parsed, never
evaluated, and errors name the closest valid name.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from itertools import pairwise
from keyword import iskeyword
from typing import Any

from relattn.messages import check_choice, closest, shorten

# Length limit: deeply nested input can crash ast.parse.
MAX_LENGTH = 500
# The largest 64-bit integer.
LARGEST = 2**63 - 1
# Commas inside of these do not separate.
_OPENING, _CLOSING, _QUOTES = "([{", ")]}", "'\""
# The smallest and the largest normal float32; smaller numbers may become zero.
SMALLEST_FLOAT, LARGEST_FLOAT = 2.0**-126, (2 - 2.0**-23) * 2.0**127
# Types that each name in an option's annotation, such as "int | None", accepts.
_TYPES = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "None": (type(None),),
}


def parse(spec: str, what: str = "") -> tuple[str, dict[str, Any]]:
    """Splits a spec into its name and its keyword options.

    Args:
        spec: For example ``"banded(clip=6)"`` or ``"none"``.
        what: What the spec is of, for the message; "" leaves it out.

    Returns:
        The name, and the options as a dict of literal values.

    Raises:
        ValueError: If ``spec`` is not a name or a call with literal keyword values.

    Example:
        >>> parse("favor(num_features=256, norms='fixed')")
        ('favor', {'num_features': 256, 'norms': 'fixed'})
    """
    shown = f"{what}={shorten(spec)}" if what else shorten(spec)
    problem = ValueError(
        f"{shown} is not a spec: write a name, or a name with literal keyword values "
        "such as 'favor(num_features=256)'"
    )
    tree = _parse_expression(spec)
    if tree is None:
        raise problem
    if isinstance(tree, ast.Name):
        return tree.id, {}
    if not (isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name)):
        raise problem
    keys = [keyword.arg for keyword in tree.keywords]
    if tree.args or None in keys or len(set(keys)) < len(keys):
        raise problem
    try:
        options = {
            str(word.arg): ast.literal_eval(word.value) for word in tree.keywords
        }
    except (ValueError, TypeError, RecursionError, MemoryError):
        raise problem from None
    return tree.func.id, options


def terms(spec: str) -> list[str]:
    """Splits a sum of specs, ``a + b``, into its terms.

    Args:
        spec: One spec, or several joined by ``+``.

    Returns:
        The terms; a single one if ``spec`` is not a sum.

    Example:
        >>> terms("learned + rope2d(base=10)")
        ['learned', 'rope2d(base=10)']
    """
    return _split(spec, ast.Add)


def alternatives(spec: str) -> list[str]:
    """Splits alternatives, ``a | b``, into specs.

    Args:
        spec: One spec, or several joined by ``|``.

    Returns:
        The specs; a single one if there is no ``|``.

    Example:
        >>> alternatives("cutmix | mixup(alpha=0.8)")
        ['cutmix', 'mixup(alpha=0.8)']
    """
    return _split(spec, ast.BitOr)


def with_options(spec: str, **options: Any) -> str:
    """Sets options of a spec.

    Args:
        spec: One spec.
        **options: The options to set; the spec keeps its others.

    Returns:
        The new spec.

    Raises:
        ValueError: If ``spec`` is not a spec.

    Example:
        >>> with_options("lor_translution(rank=8)", rank=16, relative="qk")
        "lor_translution(rank=16, relative='qk')"
        >>> with_options("softmax")
        'softmax'
    """
    name, values = parse(spec)
    listed = ", ".join(f"{key}={value!r}" for key, value in (values | options).items())
    return f"{name}({listed})" if listed else name


def resolve(
    spec: str,
    table: Mapping[str, Callable[..., Any]],
    what: str,
    reserved: Collection[str] = (),
) -> functools.partial:
    """Looks up a spec in a table of constructors and binds its options.

    Args:
        spec: A spec string.
        table: Constructors by name.
        what: The config key, such as ``"attention"``, for error messages.
        reserved: Constructor parameters that a spec must not set.

    Returns:
        The constructor with the spec's options bound.

    Raises:
        ValueError: If the spec is invalid, its name or an option does not exist, or a
            value has the wrong type. The message names the closest valid name.

    Example:
        >>> resolve("point(real=2)", {"point": complex}, "shape")(imag=1)
        (2+1j)
    """
    name, options = parse(spec, what)
    check_choice(what, name, table)
    parameters = inspect.signature(table[name]).parameters
    known = {key: p for key, p in parameters.items() if key not in reserved}
    for option, value in options.items():
        if option not in known:
            hint = closest(option, known) if known else "it takes none"
            raise ValueError(f"{what} {name!r} has no option {shorten(option)}: {hint}")
        options[option] = read_option(f"{what} {name!r}", value, known[option])
    return functools.partial(table[name], **options)


def read_option(where: str, value: Any, parameter: inspect.Parameter) -> Any:
    """Checks a literal value against the annotation of its parameter.

    Args:
        where: What takes the parameter, for error messages.
        value: Any literal.
        parameter: Its annotation may be ``bool``, ``int``, ``float``, ``str``,
            ``None`` or a union of these; other annotations accept any value.

    Returns:
        The value; an integer given for a ``float`` becomes a float.

    Raises:
        ValueError: If the type does not match, or a number is not finite, exceeds 64
            bits or, as a float, is outside of the range of float32.

    Example:
        >>> parameter = inspect.signature(parse).parameters["spec"]
        >>> read_option("parse", 3, parameter)
        Traceback (most recent call last):
        ValueError: parse needs spec of type str, got 3
    """
    kind = inspect.formatannotation(parameter.annotation).strip("'")
    names = kind.split(" | ")
    if not set(names) <= set(_TYPES):
        return value
    fits = any(type(value) in _TYPES[name] for name in names)
    if not fits or isinstance(value, float | int) and not is_finite(value):
        raise ValueError(
            f"{where} needs {parameter.name} of type {kind}, got {shorten(value)}"
        )
    is_nonzero = type(value) is float and value != 0
    if is_nonzero and not SMALLEST_FLOAT <= abs(value) <= LARGEST_FLOAT:
        raise ValueError(
            f"{where} needs {parameter.name} in the range of float32, in which it is "
            f"used, got {shorten(value)}"
        )
    return float(value) if kind == "float" else value


def split_commas(text: str) -> list[str]:
    """Splits a text at its commas outside of brackets and quotes.

    Args:
        text: Parts separated by commas; quotes around a whole part are left out.

    Returns:
        The parts, at least one.

    Example:
        >>> split_commas("favor(eps=0.1, norms='fixed'),softmax")
        ["favor(eps=0.1, norms='fixed')", 'softmax']
        >>> split_commas("'head, cls',head")
        ['head, cls', 'head']
    """
    cuts, depth, quote = [-1], 0, ""
    for index, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in _QUOTES:
            quote = character
        elif character == "," and depth <= 0:
            cuts.append(index)
        else:
            depth += (character in _OPENING) - (character in _CLOSING)
    parts = [text[a + 1 : b].strip() for a, b in pairwise([*cuts, len(text)])]
    return [re.sub(r"^(['\"])(.*)\1$", r"\2", part) for part in parts]


def read_arguments(
    arguments: str,
    where: str,
    choices: Mapping[str, Collection[str]],
    *,
    patterns: Mapping[str, str] | None = None,
    options: Mapping[str, type] | None = None,
) -> tuple[dict[str, str], dict[str, Any]]:
    """Splits a config file's arguments into chosen words and ``key=value`` options.

    Args:
        arguments: Words and options, separated by commas, in any order, as in
            ``--config=configs/x.py:A/12,rank=16``. Commas in brackets or quotes belong
            to a value.
        where: Path of the configuration file, for error messages.
        choices: Valid words of each setting; a word belongs to one setting only.
        patterns: Regular expressions for settings that accept more than their words.
        options: Type of the value of each key.

    Returns:
        The chosen word of each setting, and the value of each key; only those given.

    Raises:
        ValueError: If a word or key does not exist, with the closest valid name; if a
            value has the wrong type; or if two choose the same setting.

    Example:
        >>> read_arguments(
        ...     "A/12,dynamic,rank=16", "configs/x.py",
        ...     {"data": ["static", "dynamic"], "size": ["A/7"]},
        ...     patterns={"size": r"[A-C]/[0-9]+"}, options={"rank": int})
        ({'size': 'A/12', 'data': 'dynamic'}, {'rank': 16})
        >>> read_arguments("p=a(b=1, c=2)", "configs/x.py", {}, options={"p": str})
        ({}, {'p': 'a(b=1, c=2)'})
    """
    patterns, options = patterns or {}, options or {}
    chosen, values = {}, {}
    for argument in filter(None, split_commas(arguments)):
        key, equals, value = argument.partition("=")
        if equals:
            if key not in options:
                hint = closest(key, options)
                raise ValueError(f"{where} has no option {shorten(key)}: {hint}")
            if key in values:
                raise ValueError(f"{where} takes one {key}=..., got two: leave one out")
            values[key] = _parse_literal(value, options[key])
            if values[key] is None:
                raise ValueError(
                    f"{where} needs {key}={options[key].__name__}, got {shorten(value)}"
                )
            continue
        what = _find_setting(argument, choices, patterns)
        if what is None:
            words = [word for words in choices.values() for word in words]
            hint = closest(argument, words)
            raise ValueError(f"{where} has no argument {shorten(argument)}: {hint}")
        if what in chosen:
            raise ValueError(
                f"{where} takes one {what}, got {shorten(chosen[what])} and "
                f"{shorten(argument)}: leave one out"
            )
        chosen[what] = argument
    return chosen, values


def _find_setting(
    word: str, choices: Mapping[str, Collection[str]], patterns: Mapping[str, str]
) -> str | None:
    """Returns the setting that a word chooses a value of, or None."""
    for what, words in choices.items():
        if word in words:
            return what
        if what in patterns and re.fullmatch(patterns[what], word):
            return what
    return None


def check_new_name(name: Any, used: Collection[str]) -> None:
    """Checks a name under which a user registers a part of their own.

    Args:
        name: The name.
        used: Names that relattn uses.

    Raises:
        ValueError: If it is not a Python identifier, or relattn uses it.

    Example:
        >>> check_new_name("my-rope", ["rope1d"])
        Traceback (most recent call last):
        ValueError: 'my-rope' cannot be registered: choose a Python identifier that \
relattn does not use
    """
    # A spec cannot have a Python keyword as its name.
    is_name = isinstance(name, str) and name.isidentifier() and not iskeyword(name)
    if not is_name or name in used:
        raise ValueError(
            f"{shorten(name)} cannot be registered: choose a Python identifier that "
            "relattn does not use"
        )


def is_finite(value: float | int) -> bool:
    """Checks that a number is finite and, if an integer, fits into 64 bits.

    Args:
        value: Any number.

    Returns:
        True if it is finite and fits.

    Example:
        >>> is_finite(1e30), is_finite(10**30), is_finite(float("nan"))
        (True, False, False)
    """
    return math.isfinite(value) if type(value) is float else abs(value) <= LARGEST


def _parse_expression(text: str) -> ast.expr | None:
    """Parses an expression; returns None if it is not a string, invalid or too long."""
    if not isinstance(text, str) or len(text) > MAX_LENGTH:
        return None
    try:
        with warnings.catch_warnings():
            # For example, invalid escapes in strings, a SyntaxError in later Pythons.
            warnings.simplefilter("error")
            return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _split(spec: str, operator: type[ast.operator]) -> list[str]:
    """Splits a chain of one binary operator; other text stays in one piece."""
    tree, found = _parse_expression(spec), []
    while isinstance(tree, ast.BinOp) and isinstance(tree.op, operator):
        found.append(tree.right)
        tree = tree.left
    if tree is None or not found:
        return [spec]
    try:
        return [ast.unparse(term) for term in (tree, *reversed(found))]
    except RecursionError:
        return [spec]


def _parse_literal(value: str, kind: type) -> Any:
    """Parses a literal of a type (a string without quotes); None if it is not one."""
    if kind is str:
        return value
    if len(value) > MAX_LENGTH:
        return None
    try:
        literal = ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    return literal if type(literal) is kind else None

"""Spec strings: ``"favor(num_features=256)"`` names an entry and its options.

A spec is a name, or a call of a name with literal keyword values. It is parsed, never
evaluated.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import math
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

# Longer ones are no specs: a parser of Python may crash on what is nested too deeply.
MAX_LENGTH = 500
# Characters of a wrong value in a message.
MAX_SHOWN = 80
# Of a number in 64 bits.
LARGEST = 2**63 - 1
# Of an option's annotation, such as "int | None".
_TYPES = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "None": (type(None),),
}


def shorten(value: Any) -> str:
    """A value as an error message shows it.

    Args:
        value: Anything that was given in the place of something else.

    Returns:
        Its `repr`, one line, cut where it is long.

    Example:
        >>> shorten("a" * 1000000)[-9:], len(shorten("a" * 1000000))
        ('aaaaaa...', 83)
    """
    try:
        shown = " ".join(repr(value).splitlines())
    except ValueError:
        # Python writes no integer of more than some thousand digits.
        shown = f"a huge {type(value).__name__}"
    return shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}..."


def is_finite(value: float | int) -> bool:
    """Whether a number is neither NaN nor infinite nor an integer beyond 64 bits.

    Args:
        value: Any number.

    Returns:
        The answer.

    Example:
        >>> is_finite(1e30), is_finite(10**30), is_finite(float("nan"))
        (True, False, False)
    """
    return math.isfinite(value) if type(value) is float else abs(value) <= LARGEST


def closest(name: str, names: Collection[str]) -> str:
    """The names that exist, the most similar one first: the end of an error message.

    Args:
        name: What was asked for.
        names: What there is.

    Returns:
        ``"did you mean 'x'? There are: ..."``, without the question where nothing is
        similar.

    Example:
        >>> closest("favour", ["favor", "softmax"])
        "did you mean 'favor'? There are: favor, softmax"
    """
    listed = "there are: " + ", ".join(sorted(names))
    similar = difflib.get_close_matches(name[:MAX_SHOWN], list(names), n=1, cutoff=0.5)
    if not similar:
        return listed
    return f"did you mean {similar[0]!r}? T{listed[1:]}"


def parse(spec: str) -> tuple[str, dict[str, Any]]:
    """Splits a spec into its name and its keyword options.

    Args:
        spec: For example ``"banded(clip=6)"`` or ``"none"``.

    Returns:
        The name, and a dict of literal values.

    Raises:
        ValueError: If it is not a name or a call with literal keyword values.

    Example:
        >>> parse("favor(num_features=256, norms='fixed')")
        ('favor', {'num_features': 256, 'norms': 'fixed'})
    """
    problem = ValueError(
        f"{shorten(spec)} is not a spec: write a name, or a name with literal keyword "
        "values such as 'favor(num_features=256)'"
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
        options = {word.arg: ast.literal_eval(word.value) for word in tree.keywords}
    except (ValueError, TypeError, RecursionError, MemoryError):
        raise problem from None
    return tree.func.id, options


def _parse_expression(text: str) -> ast.expr | None:
    """The syntax tree of a Python expression, or None where the text is none."""
    if len(text) > MAX_LENGTH:
        return None
    try:
        with warnings.catch_warnings():
            # Such as an escape in a string that Python will refuse one day.
            warnings.simplefilter("error")
            return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def terms(spec: str) -> list[str]:
    """Splits a sum of specs.

    Args:
        spec: One spec, or several joined by ``+``.

    Returns:
        The specs; the whole where it is no sum.

    Example:
        >>> terms("learned + rope2d(base=10)")
        ['learned', 'rope2d(base=10)']
    """
    return _split(spec, ast.Add)


def alternatives(spec: str) -> list[str]:
    """Splits alternatives of specs.

    Args:
        spec: One spec, or several joined by ``|``.

    Returns:
        The specs; the whole where there is one only.

    Example:
        >>> alternatives("cutmix | mixup(alpha=0.8)")
        ['cutmix', 'mixup(alpha=0.8)']
    """
    return _split(spec, ast.BitOr)


def _split(spec: str, operator: type[ast.operator]) -> list[str]:
    tree, found = _parse_expression(spec), []
    while isinstance(tree, ast.BinOp) and isinstance(tree.op, operator):
        found.append(tree.right)
        tree = tree.left
    if not found:
        return [spec]
    try:
        return [ast.unparse(term) for term in (tree, *reversed(found))]
    except RecursionError:
        return [spec]


def resolve(
    spec: str,
    table: Mapping[str, Callable[..., Any]],
    what: str,
    reserved: Collection[str] = (),
) -> functools.partial:
    """Looks a spec up in a table of constructors.

    Args:
        spec: A spec string.
        table: Constructors by name.
        what: What the table holds, the config key for messages: ``"attention"``.
        reserved: Parameters of the constructors that a spec may not set.

    Returns:
        The constructor with the spec's options bound.

    Raises:
        ValueError: If the name or one of the options does not exist, naming the
            closest, or a value is not of the option's type.

    Example:
        >>> resolve("point(real=2)", {"point": complex}, "shape")(imag=1)
        (2+1j)
    """
    name, options = parse(spec)
    if name not in table:
        raise ValueError(f"unknown {what} {shorten(name)}: {closest(name, table)}")
    parameters = inspect.signature(table[name]).parameters
    known = {key: p for key, p in parameters.items() if key not in reserved}
    for option, value in options.items():
        if option not in known:
            hint = closest(option, known) if known else "it takes none"
            raise ValueError(f"{what} {name!r} has no option {shorten(option)}: {hint}")
        options[option] = read_option(f"{what} {name!r}", value, known[option])
    return functools.partial(table[name], **options)


def read_option(where: str, value: Any, parameter: inspect.Parameter) -> Any:
    """Checks a value against the annotation of the parameter that takes it.

    Args:
        where: It is given, for the message.
        value: Any literal.
        parameter: Annotated ``bool``, ``int``, ``float``, ``str`` or ``None``, or by
            some of these; any other annotation takes what comes.

    Returns:
        The value; for a ``float`` an integer will do.

    Raises:
        ValueError: If it is of another type, or no finite number.

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
    return float(value) if kind == "float" else value


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
                hint = closest(key, options)
                raise ValueError(f"{where} has no option {shorten(key)}: {hint}")
            values[key] = _read(value, options[key])
            if values[key] is None:
                raise ValueError(
                    f"{where} needs {key}={options[key].__name__}, got {shorten(value)}"
                )
            continue
        for what, words in choices.items():
            known = argument in words
            if known or (what in patterns and re.fullmatch(patterns[what], argument)):
                chosen[what] = argument
                break
        else:
            words = [word for words in choices.values() for word in words]
            hint = closest(argument, words)
            raise ValueError(f"{where} has no argument {shorten(argument)}: {hint}")
    return chosen, values


def _read(value: str, kind: type) -> Any:
    """A literal of a type, or None; a string needs no quotes."""
    if kind is str:
        return value
    if len(value) > MAX_LENGTH:
        return None
    try:
        literal = ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    return literal if type(literal) is kind else None

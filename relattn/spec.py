"""Spec strings: ``"favor(num_features=256)"`` names an entry and its options.

A spec is a name, or a call of a name with literal keyword values. It is parsed, never
evaluated.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

_MAX_LENGTH = 500


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
    similar = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
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
        f"{spec[:80]!r} is not a spec: write a name, or a name with literal keyword "
        "values such as 'favor(num_features=256)'"
    )
    if len(spec) > _MAX_LENGTH:
        raise problem
    try:
        tree = ast.parse(spec.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise problem from None
    if isinstance(tree, ast.Name):
        return tree.id, {}
    if not (isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name)):
        raise problem
    if tree.args or any(keyword.arg is None for keyword in tree.keywords):
        raise problem
    try:
        options = {word.arg: ast.literal_eval(word.value) for word in tree.keywords}
    except (ValueError, TypeError, RecursionError):
        raise problem from None
    return tree.func.id, options


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
    if len(spec) > _MAX_LENGTH:
        return [spec]
    try:
        tree = ast.parse(spec.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [spec]
    found = []
    while isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add):
        found.append(ast.unparse(tree.right))
        tree = tree.left
    return [ast.unparse(tree), *reversed(found)] if found else [spec]


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
        ValueError: If the name or one of the options does not exist; names the closest.

    Example:
        >>> resolve("point(real=2)", {"point": complex}, "shape")(imag=1)
        (2+1j)
    """
    name, options = parse(spec)
    if name not in table:
        raise ValueError(f"unknown {what} {name!r}: {closest(name, table)}")
    known = [p for p in inspect.signature(table[name]).parameters if p not in reserved]
    for option in options:
        if option not in known:
            hint = closest(option, known) if known else "it takes none"
            raise ValueError(f"{what} {name!r} has no option {option!r}: {hint}")
    return functools.partial(table[name], **options)

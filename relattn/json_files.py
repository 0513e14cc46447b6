"""Reads JSON that others wrote, and checks it against a schema."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from relattn.messages import shorten

# Limits of what is read: bytes, characters of an integer, and nested lists or objects.
MAX_BYTES = 2**26
MAX_DIGITS = 20
MAX_DEPTH = 50

_NAMES = {
    object: "any value",
    str: "a string",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    list: "a list",
    dict: "an object",
}


@dataclasses.dataclass(frozen=True)
class Range:
    """A schema of numbers from ``low`` to ``high``.

    Attributes:
        low: The least number.
        high: The largest number.
        kind: ``int`` or ``float``; integers are floats too.
    """

    low: int | float
    high: int | float
    kind: type = int

    def __str__(self) -> str:
        return f"{_NAMES[self.kind]} from {self.low:g} to {self.high:g}"


def to_plain(value: Any) -> Any:
    """Converts what `json.dumps` cannot write in configurations: its ``default``.

    Args:
        value: A mapping that is not a dict, such as a ``ConfigDict``; a number or an
            array of NumPy; or a dtype, such as ``jnp.bfloat16``.

    Returns:
        A dict, a number, a list or a name.

    Example:
        >>> import numpy as np
        >>> json.dumps([np.int64(7), np.array([2, 3])], default=to_plain)
        '[7, [2, 3]]'
    """
    if hasattr(value, "keys"):
        return {key: value[key] for key in value.keys()}  # noqa: SIM118
    if isinstance(value, type | np.dtype):
        return np.dtype(value).name
    return value.tolist()


_SIDE, _SIZE, _COUNT = Range(1, 2**16), Range(1, 2**24), Range(0, 2**53)
# The schemas of the data's description, in runs and in saved models, by its kind.
DATA = {
    "images": {
        "name": str,
        "class_names": [str],
        # Height, width and channels; volumes have frames before them.
        "image_shape": ([_SIDE] * 3, [_SIDE] * 4),
        "mean": [Range(-1e6, 1e6, float)],
        "std": [Range(0, 1e6, float)],
        "num_train": _COUNT,
        "origin": str,
        "streamed?": bool,
    },
    "tokens": {
        "name": str,
        "tokenizer": str,
        "vocab_size": _SIZE,
        "context_length": _SIZE,
        "num_train": _COUNT,
        "origin": str,
    },
    "points": {
        "name": str,
        "class_names": [str],
        # Points, axes and channels.
        "point_shape": [_SIDE] * 3,
        "num_train": _COUNT,
        "origin": str,
    },
}


def read_json(
    path: str | Path,
    schema: Any = object,
    *,
    max_bytes: int = MAX_BYTES,
    allow_nan: bool = False,
) -> Any:
    """Reads a JSON file and checks its values.

    Args:
        path: The file.
        schema: What it must hold, see `check_json`.
        max_bytes: Size of the largest file that is read.
        allow_nan: Whether numbers may be ``NaN`` and ``Infinity``.

    Returns:
        The values.

    Raises:
        FileNotFoundError: If there is no such file.
        OSError: If it cannot be read.
        ValueError: If it is too large, not JSON, or has other values; the message names
            the file and the key.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "config.json"
        >>> _ = path.write_text('{"dim": 8}')
        >>> read_json(path, {"dim": Range(1, 1000)})
        {'dim': 8}
    """
    path = Path(path)
    if not path.is_file():
        # A pipe would wait for a writer.
        problem = "is not a file" if path.exists() else "does not exist"
        raise FileNotFoundError(f"{path} {problem}")
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise OSError(f"{path} cannot be read ({error.strerror})") from error
    if len(data) > max_bytes:
        raise ValueError(f"{path} has more than {max_bytes:,} bytes")
    return parse_json(data, path, schema, allow_nan=allow_nan)


def parse_json(
    data: bytes | str,
    where: str | Path,
    schema: Any = object,
    *,
    allow_nan: bool = False,
) -> Any:
    """Parses JSON and checks its values, see `read_json`.

    Args:
        data: The JSON.
        where: Its source, for messages.
        schema: What it must hold, see `check_json`.
        allow_nan: Whether numbers may be ``NaN`` and ``Infinity``.

    Returns:
        The values.

    Raises:
        ValueError: If it is not JSON, or has other values.

    Example:
        >>> parse_json('{"a": 1, "a": 2}', "config.json")
        Traceback (most recent call last):
        ValueError: config.json is not JSON that relattn reads ('a' is given twice)
    """
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        values = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_int=_parse_int,
            parse_float=None if allow_nan else _parse_float,
            parse_constant=None if allow_nan else _refuse_constant,
        )
        _check_depth(values, MAX_DEPTH)
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is not UTF-8"
        raise ValueError(f"{where} is not JSON ({reason})") from error
    except json.JSONDecodeError as error:
        reason = f"{error.msg}, line {error.lineno}, column {error.colno}"
        raise ValueError(f"{where} is not JSON ({reason})") from error
    except RecursionError as error:
        raise ValueError(
            f"{where} is not JSON that relattn reads (more than {MAX_DEPTH} nested "
            "lists and objects)"
        ) from error
    except ValueError as error:
        raise ValueError(f"{where} is not JSON that relattn reads ({error})") from error
    check_json(values, schema, where)
    return values


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"{shorten(key)} is given twice")
            seen.add(key)
    return values


def _parse_int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"an integer has more than {MAX_DIGITS} characters")
    return int(text)


def _parse_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{shorten(text)} is too large")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a finite number")


def _check_depth(value: Any, left: int) -> None:
    if isinstance(value, dict | list):
        if not left:
            raise RecursionError
        for element in value.values() if isinstance(value, dict) else value:
            _check_depth(element, left - 1)


def check_json(value: Any, schema: Any, where: str | Path, key: str = "") -> None:
    """Checks the types and the sizes of values that were read from JSON.

    Args:
        value: The value.
        schema: A type (``object`` is any value; an ``int`` is also a ``float``, but a
            ``bool`` is neither), a `Range`, ``None``, a tuple of schemas (one
            must fit), ``[schema]`` for the elements of a list, a longer list for those
            of a list of its length, or a dict from keys to schemas. A key with ``?`` at
            its end may be missing; ``"*"`` is any other key, and without it others are
            not checked.
        where: The source of the value, for the message.
        key: The key of the value, for the message.

    Raises:
        ValueError: If the value does not fit.

    Example:
        >>> schema = {"model": {"dim": Range(1, 1000), "name?": str}}
        >>> check_json({"model": {"dim": True}}, schema, "config.json")
        Traceback (most recent call last):
        ValueError: config.json has model.dim=True, which must be an integer from 1 to \
1000
    """
    if not _fits(value, schema):
        found = f"{_shown(key)}={shorten(value)}" if key else shorten(value)
        raise ValueError(f"{where} has {found}, which must be {_describe(schema)}")
    if isinstance(schema, tuple):
        # The value has the type of one of them; its elements may not fit.
        schema = next(each for each in schema if _fits(value, each))
    if isinstance(schema, list):
        for index, element in enumerate(value):
            expected = schema[index] if len(schema) > 1 else schema[0]
            check_json(element, expected, where, f"{key}[{index}]")
    elif isinstance(schema, dict):
        _check_keys(value, schema, where, key)


def _check_keys(value: dict, schema: dict, where: str | Path, key: str) -> None:
    prefix = f"{key}." if key else ""
    named = {name.removesuffix("?"): name for name in schema}
    for short, name in named.items():
        if short not in value and name == short != "*":
            raise ValueError(
                f"{where} has no {_shown(prefix + short)}, which must be "
                f"{_describe(schema[name])}"
            )
    for short, element in value.items():
        name = named.get(short, "*")
        if name in schema:
            check_json(element, schema[name], where, prefix + short)


def _shown(key: str) -> str:
    """Returns a key for a message: as it is if it is short and printable."""
    return key if key.isprintable() and len(key) < 80 else shorten(key)


def _fits(value: Any, schema: Any) -> bool:
    """Returns whether a value has the type of a schema, and is in its range."""
    if schema is None:
        return value is None
    if isinstance(schema, tuple):
        return any(_fits(value, each) for each in schema)
    if isinstance(schema, Range):
        return _fits(value, schema.kind) and schema.low <= value <= schema.high
    if isinstance(schema, list):
        return isinstance(value, list) and len(schema) in (1, len(value))
    if isinstance(schema, dict):
        return isinstance(value, dict)
    if isinstance(value, bool):
        return schema in (bool, object)
    return isinstance(value, (int, float) if schema is float else schema)


def _describe(schema: Any) -> str:
    if schema is None:
        return "null"
    if isinstance(schema, tuple):
        return " or ".join(map(_describe, schema))
    if isinstance(schema, list) and len(schema) > 1:
        return f"a list of {len(schema)}"
    if isinstance(schema, list | dict):
        schema = type(schema)
    return _NAMES[schema] if isinstance(schema, type) else str(schema)

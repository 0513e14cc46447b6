"""What the runs of a test session share: compiled functions, and images that are read.

Each run makes its steps anew, so that JAX traces and compiles them again, for a second
or more. Most runs of the tests differ in nothing that their steps depend on: these get
the compiled functions of the first of them.
"""

import copy
import functools
import types
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from relattn.data import load
from relattn.training.task import Task

# Where functions are shared.
SHARED = ("relattn.training.", "relattn.evaluation.", "relattn.models.")
# Functions of these packages depend only on what they close over, and on the functions
# that they name.
PURE = ("relattn.", "optax.", "jax.", "flax.")


@pytest.fixture(autouse=True, scope="session")
def shared_programs():
    """Compiles functions of `SHARED` that do the same once in a session."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("jit", "pmap"):
            patch.setattr(jax, name, compile_once(getattr(jax, name)))
        yield


@pytest.fixture(autouse=True, scope="session")
def shared_images():
    """Reads each embedded set once in a session: thousands of files."""
    read_embedded = load.READERS["embedded"]
    read = functools.cache(lambda name: read_embedded(ConfigDict({"name": name})))

    def copied(config):
        # The split of validation images reorders the arrays.
        return copy.deepcopy(read(config.name))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(load.READERS, "embedded", copied)
        yield


def compile_once(transform):
    """Returns a transformation, such as `jax.jit`, that remembers its results."""
    programs = {}

    @functools.wraps(transform)
    def transform_once(*args, **options):
        function = args[0] if args else None
        module = getattr(function, "__module__", None) or ""
        if not module.startswith(SHARED) or not is_pure(function):
            return transform(*args, **options)
        key = describe((args, options))
        if key not in programs:
            programs[key] = transform(*args, **options)
        return programs[key]

    return transform_once


class Same:
    """Equals only itself; keeps the object, so that no other gets its address."""

    def __init__(self, value):
        self.value = value

    def __hash__(self):
        return id(self.value)

    def __eq__(self, other):
        return isinstance(other, Same) and self.value is other.value


def is_pure(function):
    """Checks the package of a function: a wrapper has another than what it wraps."""
    function = getattr(function, "__func__", function)
    return isinstance(function, types.FunctionType) and (
        package(unchecked(function)).startswith(PURE)
    )


def package(function):
    """Returns the module where a function is written."""
    return function.__globals__["__name__"]


def unchecked(function):
    """Returns a function without the check of its annotations."""
    return (
        function.__wrapped__ if package(function).startswith("jaxtyping.") else function
    )


def describe(value):
    """Returns something hashable; it is equal for values that make equal programs."""
    kind = type(value)
    if value is None or isinstance(value, bool | int | float | str):
        return kind, repr(value)
    if isinstance(value, list | tuple):
        return kind, tuple(map(describe, value))
    if isinstance(value, dict):
        return kind, tuple((name, describe(value[name])) for name in value)
    if isinstance(value, np.ndarray | np.generic):
        return kind, value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, jax.Device | jax.sharding.Mesh):
        return value
    if isinstance(value, Path):
        return kind
    if isinstance(value, ConfigDict):
        return kind, value.to_json()
    if isinstance(value, functools.partial):
        return kind, describe((value.func, value.args, value.keywords))
    if isinstance(value, types.MethodType):
        return kind, describe((value.__func__, value.__self__))
    if is_pure(value):
        value = unchecked(value)
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return (
            value.__code__,
            describe((cells, value.__defaults__, value.__kwdefaults__)),
            tuple(named(value.__code__, value.__globals__)),
        )
    if isinstance(value, nn.Module) or kind.__module__.startswith("relattn."):
        names = getattr(value, "__dataclass_fields__", vars(value))
        fields = {name: getattr(value, name) for name in names}
        if isinstance(value, Task):
            # Its other fields hold what the rest of the configuration says of a step.
            fields["config"] = value.config.data
        return kind, describe(fields)
    return Same(value)


def named(code, values):
    """Yields the globals that a function names: a test may have replaced one."""
    for name in code.co_names:
        if name in values:
            yield Same(values[name])
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from named(constant, values)

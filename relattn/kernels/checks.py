"""Checks kernel arguments against annotations; helpers for batch axes and sizes.

The annotations themselves are enforced only in tests. These checks run on every call.
They only read shapes and dtypes, so they cost nothing once a function is compiled.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.export import is_symbolic_dim
from jaxtyping import AbstractArray, Array, Bool, Int

from relattn.messages import shorten
from relattn.offsets import is_whole

Function = TypeVar("Function", bound=Callable[..., Any])
# Arguments that hold keys: none of their axes may be empty.
_KEYS = ("k", "v", "key_mask")


def check_arguments(function: Function) -> Function:
    """Checks a kernel's arguments against its annotations on every call.

    Axes with the same name must have the same size. Batch axes ``*#batch`` must
    broadcast. Masks must be boolean and have all batch axes or none. Only batch
    axes and the query axis ``n`` may be empty. Integers and booleans become float32
    where floats are annotated. Members of a tuple are checked like arguments and named
    ``qkv[0]``. Sizes must be whole numbers, and sizes and flags not traced.

    Args:
        function: A kernel with jaxtyping annotations.

    Returns:
        The kernel; it raises ValueError with the shapes if arguments do not fit.

    Example:
        >>> from jaxtyping import Float
        >>> @check_arguments
        ... def dot(q: Float[Array, "n dim"], k: Float[Array, "m dim"]):
        ...     return q @ k.T
        >>> dot(jnp.ones((2, 3)), jnp.ones((5, 4)))
        Traceback (most recent call last):
        ValueError: q [n, dim] and k [m, dim] must have the same dim, got shapes ...
    """
    signature = inspect.signature(function)

    @functools.cache
    def static():
        hints = typing.get_type_hints(function)
        kinds = (int, int | None, bool)
        return {name: hint for name, hint in hints.items() if hint in kinds}

    @functools.cache
    def layouts():
        hints = typing.get_type_hints(function)
        found = {name: _parse_layouts(hints.get(name)) for name in signature.parameters}
        return {name: choices for name, choices in found.items() if any(choices)}

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        arrays, chosen = {}, {}
        for name, hint in static().items():
            value = bound.arguments.get(name, 0)
            if hint is bool:
                _check_flag(name, value)
            elif value is not None or hint is int:
                _check_whole(name, value)

        def read(name, value, choices):
            if value is None:
                return None
            value = _to_array(name, value, choices)
            arrays[name], chosen[name] = value, _choose_layout(name, value, choices)
            return value

        for name, choices in layouts().items():
            value = bound.arguments.get(name)
            if value is None:
                continue
            if signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
                choices = (choices,) * len(value)
            if isinstance(choices[0], _Layout):
                bound.arguments[name] = read(name, value, choices)
                continue
            if len(value) != len(choices):
                raise ValueError(
                    f"{name} must be a tuple of {len(choices)}, got {len(value)}"
                )
            bound.arguments[name] = tuple(
                read(f"{name}[{i}]", x, choices[i]) for i, x in enumerate(value)
            )
        _check_sizes(arrays, chosen, layouts())
        _check_batch(arrays, chosen)
        # Arrays with fewer batch axes broadcast, by intent.
        with jax.numpy_rank_promotion("allow"):
            return function(*bound.args, **bound.kwargs)

    return typing.cast(Function, checked)


def broadcast_batch(*arrays: Array) -> list[Array]:
    """Broadcasts the batch axes of arrays ``[*batch, n, width]`` to one shape."""
    leading = jnp.broadcast_shapes(*(x.shape[:-2] for x in arrays))
    return [jnp.broadcast_to(x, (*leading, *x.shape[-2:])) for x in arrays]


def at_most(size: Any, limit: Any) -> bool:
    """Returns whether a size is at most a limit, for every value of symbolic sizes.

    Kernels choose their form by it: a form for long sequences is right for short ones
    too, and so for a symbolic length of `jax.export`.

    Example:
        >>> n, short = jax.export.symbolic_shape("n, short", constraints=["short <= 4"])
        >>> at_most(3, 4), at_most(n, 4), at_most(short, 4)
        (True, False, True)
    """
    try:
        return size <= limit
    except jax.errors.InconclusiveDimensionOperation:
        return False


def bound_hint(size: Any, bound: str) -> str:
    """Returns the end of an error on a size: the bound a symbolic size needs, or "".

    Example:
        >>> bound_hint(3, "<= 4")
        ''
        >>> (n,) = jax.export.symbolic_shape("n")
        >>> bound_hint(n, "<= 4")
        ': bound the symbolic size by constraints=["n <= 4"]'
    """
    if not is_symbolic_dim(size):
        return ""
    return f': bound the symbolic size by constraints=["{size} {bound}"]'


def check_size(name: str, size: Any) -> None:
    """Raises ValueError unless a size is a whole number of at least 1, or symbolic.

    Example:
        >>> check_size("window", 0)
        Traceback (most recent call last):
        ValueError: window must be at least 1, got 0
    """
    _check_whole(name, size)
    if not is_symbolic_dim(size) and size < 1:
        raise ValueError(f"{name} must be at least 1, got {size}")


def check_static(size: Any, what: str) -> None:
    """Raises ValueError if a number of tokens is symbolic.

    Example:
        >>> (n,) = jax.export.symbolic_shape("n")
        >>> check_static(n, "A grid")
        Traceback (most recent call last):
        ValueError: A grid has a fixed number of tokens, got the symbolic n: export ...
    """
    if is_symbolic_dim(size):
        raise ValueError(
            f"{what} has a fixed number of tokens, got the symbolic {size}: export it "
            "for each number, with a symbolic batch only"
        )


def check_position(index: Any, length: Any) -> None:
    """Raises ValueError if a token's position is known, and not below the length.

    A slice would begin at the last possible place instead.

    Example:
        >>> check_position(6, 7)
    """
    if isinstance(index, Tracer) or is_symbolic_dim(length):
        return
    if not 0 <= int(index) < length:
        raise ValueError(
            f"index={index} must be the position of a token, 0 .. {length - 1}"
        )


class _Layout(NamedTuple):
    """The shape and kind that an array annotation requires.

    Attributes:
        kind: `Float`, `Bool` or `Int`.
        batch: The name of the batch axes, or None if there are none.
        broadcast: Whether the batch axes may broadcast.
        axes: Names of the other axes; a number is a fixed size.
    """

    kind: type
    batch: str | None
    broadcast: bool
    axes: tuple[str, ...]

    def __str__(self) -> str:
        leading = () if self.batch is None else (f"*{self.batch}",)
        return f"[{', '.join((*leading, *self.axes))}]"

    def fits(self, ndim: int) -> bool:
        """Checks that an array with this number of axes can have the layout."""
        own = len(self.axes)
        return ndim == own if self.batch is None else ndim >= own

    def leading(self, x: Array | np.ndarray) -> tuple[int, ...]:
        """Returns the sizes of an array's batch axes."""
        return x.shape[: x.ndim - len(self.axes)]


def _parse_layouts(hint):
    """Parses the layouts that an annotation allows; empty if it is not an array.

    Parses a tuple member by member.
    """
    if typing.get_origin(hint) is tuple:
        return tuple(_parse_layouts(member) for member in typing.get_args(hint))
    layouts = []
    for choice in typing.get_args(hint) or (hint,):
        if not (isinstance(choice, type) and issubclass(choice, AbstractArray)):
            continue
        names = choice.dim_str.split()
        leading = [name for name in names if name.startswith("*") or name == "..."]
        axes = tuple(name for name in names if name not in leading)
        batch = leading[0].lstrip("*#") if leading else None
        broadcast = bool(leading) and ("#" in leading[0] or leading[0] == "...")
        layouts.append(_Layout(choice.dtype, batch, broadcast, axes))
    return tuple(dict.fromkeys(layouts))


def _check_whole(name, size):
    """Checks that a size is a whole number when the kernel is traced."""
    if is_symbolic_dim(size) or is_whole(size):
        return
    hint = _static_hint(name) if isinstance(size, Tracer) else ""
    raise ValueError(f"{name} must be a whole number, got {shorten(size)}{hint}")


def _check_flag(name, flag):
    """Checks that a flag is known when the kernel is traced."""
    if isinstance(flag, Tracer):
        raise ValueError(
            f"{name} must be True or False, got {shorten(flag)}{_static_hint(name)}"
        )


def _static_hint(name):
    return f": add {name!r} to the static_argnames of jax.jit"


def _to_array(name, x, choices):
    """Converts an argument to an array of the annotated kind."""
    kind = choices[0].kind
    if kind is Bool:
        x = jnp.asarray(x)
        if x.dtype != bool:
            raise ValueError(
                f"{name} must be boolean, True where attention is allowed, got "
                f"{x.dtype}: pass {name} == 0 for an additive mask of 0 and -inf, "
                f"{name}.astype(bool) for a mask of ones and zeros"
            )
        return x
    x = x if kind is Int and hasattr(x, "dtype") else jnp.asarray(x)
    if kind is Int:
        if jnp.issubdtype(x.dtype, jnp.inexact):
            raise ValueError(f"{name} must hold whole numbers, got {x.dtype}")
        return x
    if jnp.issubdtype(x.dtype, jnp.floating):
        if jnp.finfo(x.dtype).bits < 16:
            raise ValueError(
                f"{name} must have a dtype of 16 bits or more, got {x.dtype}: convert "
                f"it, as by {name}.astype(jnp.bfloat16)"
            )
        return x
    if not (jnp.issubdtype(x.dtype, jnp.integer) or jnp.issubdtype(x.dtype, jnp.bool)):
        raise ValueError(f"{name} must hold real numbers, got {x.dtype}")
    return jnp.asarray(x, jnp.float32)


def _choose_layout(name, x, choices):
    """Returns the first layout that fits the number of axes."""
    for layout in choices:
        if layout.fits(x.ndim):
            return layout
    expected = " or ".join(map(str, choices))
    raise ValueError(f"{name} must have shape {expected}, got shape {x.shape}")


def _check_sizes(arrays, chosen, layouts):
    """Checks that axes with the same name have the same size and are not empty."""
    key_axes = {
        axis
        for name in _KEYS
        for layout in layouts.get(name, ())
        for axis in layout.axes
    }
    first: dict[str, str] = {}
    for name, x in arrays.items():
        layout = chosen[name]
        sizes = x.shape[x.ndim - len(layout.axes) :]
        for axis, size in zip(layout.axes, sizes, strict=True):
            if axis.isdigit() and size != int(axis):
                raise ValueError(
                    f"{name} must have shape {layout}, got shape {x.shape}"
                )
            if size == 0 and (axis != "n" or axis in key_axes):
                raise ValueError(
                    f"{name} {layout} must not be empty along {axis}, got shape "
                    f"{x.shape}"
                )
            if not axis.isidentifier() or axis == "_":
                continue
            other = first.setdefault(axis, name)
            index = chosen[other].axes.index(axis) - len(chosen[other].axes)
            if arrays[other].shape[index] != size:
                raise ValueError(
                    f"{other} {chosen[other]} and {name} {layout} must have the same "
                    f"{axis}, got shapes {arrays[other].shape} and {x.shape}"
                )


def _check_batch(arrays, chosen):
    """Checks that batch axes broadcast and that masks have all of them or none."""
    batches = {layout.batch for layout in chosen.values()} - {None}
    for batch in batches:
        names = [name for name, layout in chosen.items() if layout.batch == batch]
        masks = [name for name in names if chosen[name].kind is Bool]
        others = [name for name in names if name not in masks]
        leading = {name: chosen[name].leading(arrays[name]) for name in names}
        try:
            shape = jnp.broadcast_shapes(*(leading[name] for name in others))
        except ValueError:
            shape = None
        if shape is None or any(
            leading[name] != shape and not chosen[name].broadcast for name in others
        ):
            shapes = _join_words([f"{name} {arrays[name].shape}" for name in others])
            raise ValueError(
                f"the batch axes *{batch} of {_join_words(others)} must be the same "
                f"or broadcast, got shapes {shapes}"
            )
        for name in masks:
            _check_mask(name, arrays[name], leading[name], shape)


def _check_mask(name, x, leading, batch):
    """Checks that the batch axes of a mask are complete and broadcast."""
    own = x.shape[len(leading) :]
    if not leading:
        return
    if len(leading) == len(batch) and all(
        size in (1, other) for size, other in zip(leading, batch, strict=True)
    ):
        return
    missing = len(batch) - len(leading)
    hint = ""
    if 0 < missing < len(batch):
        index = ", ".join([":"] * len(leading) + ["None"] * missing)
        hint = f"; add the missing heads axis with {name}[{index}]"
    raise ValueError(
        f"{name} of shape {x.shape} does not fit the batch axes {batch} of the other "
        f"arguments: expected {own} or {(*batch, *own)}, with size 1 for batch axes "
        f"that share a mask{hint}"
    )


def _join_words(words: list[str]) -> str:
    """Joins words as in "a, b and c"."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)

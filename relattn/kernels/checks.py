"""Checks of a kernel's arguments against its annotations, before any work is done.

Only the tests enforce annotations themselves. These checks serve every caller: they
look at shapes and dtypes alone, and so cost nothing once a function is compiled.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import AbstractArray, Array, Bool, Float, Int

Function = TypeVar("Function", bound=Callable[..., Any])

# Arguments that hold keys: none of their axes may be empty.
_KEYS = ("k", "v", "low_k", "low_v", "key_mask")


class _Layout(NamedTuple):
    """An annotation of an array.

    Attributes:
        kind: `Float`, `Bool` or `Int`.
        batch: The name of the leading axes, or None where there are none.
        broadcast: Whether the leading axes may broadcast.
        axes: Names of the other axes; a number is a size.
    """

    kind: type
    batch: str | None
    broadcast: bool
    axes: tuple[str, ...]

    def __str__(self) -> str:
        leading = () if self.batch is None else (f"*{self.batch}",)
        return f"[{', '.join((*leading, *self.axes))}]"

    def fits(self, ndim: int) -> bool:
        """Whether an array of so many axes can have the layout."""
        least = len(self.axes)
        return ndim == least if self.batch is None else ndim >= least

    def leading(self, x: Array | np.ndarray) -> tuple[int, ...]:
        """The leading axes of an array."""
        return x.shape[: x.ndim - len(self.axes)]


def check_arguments(function: Function) -> Function:
    """Makes a kernel refuse arguments that do not fit its annotations.

    Axes of one name must have one size, leading axes ``*#batch`` must broadcast, masks
    must be boolean and have all leading axes or none, and no axis may be empty but
    that of the queries, ``n``, and leading axes. Integers and booleans where floats are
    annotated become float32.

    Args:
        function: A kernel with jaxtyping annotations.

    Returns:
        The kernel; it raises ValueError, in a sentence with the shapes.

    Example:
        >>> from jaxtyping import Float
        >>> @check_arguments
        ... def dot(q: Float[Array, "n head_dim"], k: Float[Array, "m head_dim"]):
        ...     return q @ k.T
        >>> dot(jnp.ones((2, 3)), jnp.ones((5, 4)))
        Traceback (most recent call last):
        ValueError: q [n, head_dim] and k [m, head_dim] must have the same head_dim, got
            ...
    """
    signature = inspect.signature(function)

    @functools.cache
    def layouts():
        hints = typing.get_type_hints(function)
        found = {name: _layouts(hints.get(name)) for name in signature.parameters}
        return {name: choices for name, choices in found.items() if choices}

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        arrays, chosen = {}, {}
        for name, choices in layouts().items():
            value = bound.arguments.get(name)
            if value is None:
                continue
            if signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
                value = tuple(
                    _read(f"{name}[{i}]", x, choices) for i, x in enumerate(value)
                )
                members = [(f"{name}[{i}]", x) for i, x in enumerate(value)]
            else:
                value = _read(name, value, choices)
                members = [(name, value)]
            bound.arguments[name] = value
            for label, x in members:
                arrays[label] = x
                chosen[label] = _choose(label, x, choices)
        _check_sizes(arrays, chosen, layouts())
        _check_leading(arrays, chosen)
        return function(*bound.args, **bound.kwargs)

    return checked


def broadcast_leading(*arrays: Array) -> list[Array]:
    """Arrays ``[*batch, n, width]`` with one shape of leading axes."""
    leading = np.broadcast_shapes(*(x.shape[:-2] for x in arrays))
    return [jnp.broadcast_to(x, (*leading, *x.shape[-2:])) for x in arrays]


def _layouts(hint):
    """The layouts that an annotation allows; none where it is of no array."""
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


def _read(name, x, choices):
    """The argument as an array of the annotated kind."""
    kind = choices[0].kind
    dtype = getattr(x, "dtype", None)
    if kind is Bool:
        if dtype is None or not jnp.issubdtype(dtype, jnp.bool):
            found = type(x).__name__ if dtype is None else dtype
            raise ValueError(
                f"{name} must be boolean, True where there is something to attend to, "
                f"got {found}: write {name} == 0 for a mask of 0 and -inf that is "
                f"added to scores, {name}.astype(bool) for a mask of ones and zeros"
            )
        return jnp.asarray(x)
    x = x if kind is Int and dtype is not None else jnp.asarray(x)
    if kind is Int or jnp.issubdtype(x.dtype, jnp.floating):
        return x
    if not (jnp.issubdtype(x.dtype, jnp.integer) or jnp.issubdtype(x.dtype, jnp.bool)):
        raise ValueError(f"{name} must hold real numbers, got {x.dtype}")
    return jnp.asarray(x, jnp.float32)


def _choose(name, x, choices):
    for layout in choices:
        if layout.fits(x.ndim):
            return layout
    expected = " or ".join(map(str, choices))
    raise ValueError(f"{name} must have shape {expected}, got shape {x.shape}")


def _check_sizes(arrays, chosen, layouts):
    """Axes of one name have one size, and those that must not be empty are not."""
    of_keys = {
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
            if size == 0 and (axis != "n" or axis in of_keys):
                raise ValueError(
                    f"{name} {layout} must not be empty along {axis}, got shape "
                    f"{x.shape}"
                )
            if not axis.isidentifier() or axis == "_":
                continue
            other = first.setdefault(axis, name)
            place = chosen[other].axes.index(axis) - len(chosen[other].axes)
            if arrays[other].shape[place] != size:
                raise ValueError(
                    f"{other} {chosen[other]} and {name} {layout} must have the same "
                    f"{axis}, got shapes {arrays[other].shape} and {x.shape}"
                )


def _check_leading(arrays, chosen):
    """Leading axes broadcast; those of a mask are all there, or none."""
    batches = {layout.batch for layout in chosen.values()} - {None}
    for batch in batches:
        names = [name for name, layout in chosen.items() if layout.batch == batch]
        masks = [name for name in names if chosen[name].kind is Bool]
        others = [name for name in names if name not in masks]
        leading = {name: chosen[name].leading(arrays[name]) for name in names}
        try:
            shape = np.broadcast_shapes(*(leading[name] for name in others))
        except ValueError:
            shape = None
        if shape is None or any(
            leading[name] != shape and not chosen[name].broadcast for name in others
        ):
            shapes = _list([f"{name} {arrays[name].shape}" for name in others])
            raise ValueError(
                f"the leading axes *{batch} of {_list(others)} must be the same or "
                f"broadcast, got shapes {shapes}"
            )
        for name in masks:
            _check_mask(name, arrays[name], chosen[name], leading[name], shape)


def _check_mask(name, x, layout, leading, batch):
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
        places = ", ".join([":"] * len(leading) + ["None"] * missing)
        hint = f"; add the missing axis of heads by {name}[{places}]"
    raise ValueError(
        f"{name} of shape {x.shape} does not fit the leading axes {batch} of the other "
        f"arguments: expected {own} or {(*batch, *own)}, 1 in place of a leading axis "
        f"that shares a mask{hint}"
    )


def _list(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


def zero_masked(
    k: Float[Array, "*#batch m head_dim"],
    v: Float[Array, "*#batch m value_dim"],
    key_mask: Bool[Array, "*#batch m"] | None,
) -> tuple[
    Float[Array, "*#batch m head_dim"],
    Float[Array, "*#batch m value_dim"],
    Bool[Array, "*#batch m"] | None,
]:
    """Zeros for masked keys and values: not even a NaN there reaches the result."""
    if key_mask is None:
        return k, v, None
    kept = key_mask[..., None]
    k, v = jnp.where(kept, k, 0), jnp.where(kept, v, 0)
    return k, v, jnp.broadcast_to(key_mask, k.shape[:-1])

"""Random streams of a run, and several draws of its random features."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from relattn.kernels.platform import first_carry
from relattn.kernels.random_projections import redraw
from relattn.messages import shorten


def stream_key(key: Key[Array, ""], name: str) -> Key[Array, ""]:
    """Derives the key of a named random stream.

    Args:
        key: The run's key, ``jax.random.key(seed)``. Random features use it directly.
        name: The stream's name, such as ``"dropout"``.

    Returns:
        A key that does not collide with ``fold_in`` of the index of a layer or step.

    Example:
        >>> key = jax.random.key(0)
        >>> bool(stream_key(key, "params") == stream_key(key, "dropout"))
        False
    """
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def check_draws(
    draws: int | np.integer, random_features: Any, *, key: str = "draws"
) -> None:
    """Checks that a model can be evaluated with some number of draws.

    Args:
        draws: Number of draws of the random features.
        random_features: The model's collection; arrays or their shapes.
        key: Name of ``draws``, for the message.

    Raises:
        ValueError: If it is not a positive integer, or is more than one for a model
            without random features.

    Example:
        >>> check_draws(1, {})
    """
    is_integer = isinstance(draws, int | np.integer) and not isinstance(draws, bool)
    if not is_integer or draws < 1:
        raise ValueError(
            f"{key} must be an integer of at least 1, got {shorten(draws)}"
        )
    if draws > 1 and not jax.tree.leaves(random_features):
        raise ValueError(
            f"{key}={draws} needs random features to draw, but the model has none: "
            f"leave {key} at 1"
        )


def draw_features(random_features: Any, key: Key[Array, ""], draws: int) -> Any:
    """Draws random features several times, a pure function of the key.

    The first draw is the given one. Draw k = 1, 2, ... is `relattn.kernels.redraw` with
    the index k and the key ``stream_key(key, "draws")``, which training does not use.
    So the first four of 16 draws are the same as four draws.

    Args:
        random_features: The collection of random projections.
        key: The run's key.
        draws: Number of draws.

    Returns:
        The collection; every projection has a new leading axis of draws.

    Example:
        >>> from relattn.kernels import draw_random_features
        >>> key = jax.random.key(0)
        >>> first = draw_random_features(key, layer=0, num_features=5, head_dim=3)
        >>> drawn = draw_features({"layer": first}, key, 4)["layer"].projection
        >>> drawn.shape, bool((drawn[0] == first.projection).all())
        ((4, 5, 3), True)
    """
    stream = stream_key(key, "draws")
    others = jax.vmap(lambda index: redraw(random_features, stream, index))(
        jnp.arange(1, draws)
    )
    return jax.tree.map(
        lambda first, rest: jnp.concatenate([first[None], rest]),
        random_features,
        others,
    )


def make_average_fn(
    model: nn.Module, variables: Mapping[str, Any], seed: int, draws: int
) -> Callable[[Any], Float[Array, "*batch classes"]]:
    """Makes a compiled function from inputs to the logits of `average_draws`.

    Args:
        model: A model with random features.
        variables: Its variables.
        seed: The run's seed, for `draw_features`.
        draws: Number of draws.

    Returns:
        The function, for one device.
    """
    draw = jax.jit(functools.partial(draw_features, draws=draws))
    drawn = draw(variables["random_features"], jax.random.key(seed))
    logits = jax.jit(functools.partial(average_draws, model.apply))
    variables = jax.device_put({**variables, "random_features": drawn})
    return functools.partial(logits, variables)


def average_draws(
    apply: Callable[[Any, Any], Any], variables: Any, inputs: Any
) -> Float[Array, "*batch classes"]:
    """Averages the probabilities of a model over draws of its random features.

    logits = log mean_k softmax(apply(variables with draw k, inputs))

    The draws are computed one after the other, in the memory of one.

    Args:
        apply: Maps variables and inputs to logits.
        variables: The model's variables; every random projection has a leading axis of
            draws, as `draw_features` returns it.
        inputs: Inputs of the model.

    Returns:
        Logits whose softmax is the mean, float32.

    Example:
        >>> def apply(variables, inputs):
        ...     return inputs * variables["random_features"]
        >>> draws = {"random_features": jnp.array([-1.0, 1.0])}
        >>> jax.nn.softmax(average_draws(apply, draws, jnp.array([1.0, 0.0])))
        Array([0.5, 0.5], dtype=float32)
    """
    drawn = variables["random_features"]

    def log_probabilities(features: Any) -> Array:
        logits = apply({**variables, "random_features": features}, inputs)
        return jax.nn.log_softmax(logits.astype(jnp.float32))

    def add(total: Array, features: Any) -> tuple[Array, None]:
        return jnp.logaddexp(total, log_probabilities(features)), None

    first = jax.tree.map(lambda x: x[0], drawn)
    shape = jax.eval_shape(log_probabilities, first).shape
    none = first_carry(add, jnp.full(shape, -jnp.inf), drawn)
    total, _ = jax.lax.scan(add, none, drawn)
    return total - math.log(len(jax.tree.leaves(drawn)[0]))

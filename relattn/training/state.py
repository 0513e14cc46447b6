"""The state of a run on the device, and the streams of randomness of its seed."""

from __future__ import annotations

import zlib
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Key

from relattn.kernels.feature_maps import redraw

CARRIED = ("params", "random_features", "batch_stats")


@flax.struct.dataclass
class TrainState:
    """All that an update changes.

    Attributes:
        step: Number of updates so far, int32; the position in the data follows from it.
        params: Parameters.
        opt_state: State of the optimiser.
        random_features: The collection of random projections, perhaps empty.
        batch_stats: The collection of moving statistics, float arrays, perhaps empty.
    """

    step: Any
    params: Any
    opt_state: Any
    random_features: Any
    batch_stats: Any

    @property
    def variables(self) -> dict[str, Any]:
        """What the model is applied with."""
        return {"params": self.params, **self.collections}

    @property
    def collections(self) -> dict[str, Any]:
        """What the model is applied with beside its parameters."""
        return {
            "random_features": self.random_features,
            "batch_stats": self.batch_stats,
        }


def stream_key(key: Key[Array, ""], name: str) -> Key[Array, ""]:
    """The key of a named stream of randomness.

    Args:
        key: The run's key, ``jax.random.key(seed)``. Random features use it directly.
        name: For example ``"dropout"``.

    Returns:
        A key that no layer's or step's number can collide with.

    Example:
        >>> key = jax.random.key(0)
        >>> bool(stream_key(key, "params") == stream_key(key, "dropout"))
        False
    """
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def create_state(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    key: Key[Array, ""],
    input_shape: tuple[int, ...],
    dtype: Any = jnp.float32,
) -> TrainState:
    """The state before the first update, a pure function of the key.

    Args:
        model: Called on inputs ``[batch, *input_shape]``.
        optimizer: Gives the optimiser's state.
        key: The run's key.
        input_shape: Height, width and channels of an image as the model sees it, or
            the length of a text.
        dtype: Of the inputs.

    Returns:
        The state; projections are those of redraw index 0.

    Raises:
        ValueError: If the model keeps a collection that training does not carry.

    Example:
        >>> state = create_state(
        ...     nn.Dense(3), optax.sgd(0.1), jax.random.key(0), (5, 7, 2))
        >>> state.params["kernel"].shape, state.random_features
        ((2, 3), {})
    """
    rngs = {
        "params": stream_key(key, "params"),
        "dropout": stream_key(key, "dropout"),
        "random_features": key,
    }
    variables = model.init(rngs, jnp.zeros((1, *input_shape), dtype))
    for collection in variables:
        if collection not in (*CARRIED, "intermediates"):
            raise ValueError(
                f"the model keeps a collection {collection!r}; training carries "
                f"{', '.join(map(repr, CARRIED))} only"
            )
    params = variables["params"]
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        random_features=redraw(variables.get("random_features", {}), key, 0),
        batch_stats=variables.get("batch_stats", {}),
    )

"""Learning-rate schedules and optimisers of a configuration."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from relattn.training.parameters import is_frozen, is_matrix, layer_scales

SCHEDULES = ("constant", "cosine", "exponential")
OPTIMIZERS = ("adam", "adamw", "sgd")
# Which parameters weight decay shrinks.
DECAY_MASKS = ("matrices", "all")


def make_schedule(
    name: str,
    learning_rate: float,
    *,
    warmup_steps: int,
    num_steps: int,
    decay_rate: float = 1.0,
    steps_per_epoch: int = 1,
) -> optax.Schedule:
    """Makes a learning-rate schedule with a linear warm-up.

    lr(s) = learning_rate min(1, (s + 1) / warmup_steps) f(s), with f = 1 for
    ``"constant"``, f(s) = decay_rate^floor(s / steps_per_epoch) for ``"exponential"``
    and f(s) = (1 + cos(pi (s - warmup_steps) / (num_steps - warmup_steps))) / 2 after
    the warm-up for ``"cosine"``.

    Args:
        name: ``"constant"``, ``"cosine"`` or ``"exponential"``.
        learning_rate: The peak learning rate.
        warmup_steps: Steps of the warm-up; 0 for none.
        num_steps: Steps of the run; the cosine is zero at its end.
        decay_rate: The factor for each epoch, for ``"exponential"``.
        steps_per_epoch: Steps of an epoch, for ``"exponential"``.

    Returns:
        A function of the step, counted from zero.

    Raises:
        ValueError: If the warm-up is as long as the run.

    Example:
        >>> schedule = make_schedule("cosine", 1.0, warmup_steps=2, num_steps=4)
        >>> [round(float(schedule(jnp.asarray(s))), 3) for s in range(4)]
        [0.5, 1.0, 1.0, 0.5]
    """
    if warmup_steps and warmup_steps >= num_steps:
        raise ValueError(
            f"config.schedule.warmup_steps={warmup_steps} must be less than the "
            f"{num_steps} steps of the run"
        )

    def schedule(step: ArrayLike) -> Float[Array, ""]:
        # Of whole numbers: compiled, step / steps_per_epoch may round below an epoch.
        epoch = jnp.asarray(step, jnp.int32) // steps_per_epoch
        step = jnp.asarray(step, jnp.float32)
        rate = jnp.minimum(1.0, (step + 1.0) / max(1, warmup_steps))
        if name == "cosine":
            span = num_steps - warmup_steps
            progress = jnp.clip((step - warmup_steps) / span, 0.0, 1.0)
            rate = rate * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
        elif name == "exponential":
            rate = rate * decay_rate ** epoch.astype(jnp.float32)
        return learning_rate * rate

    return schedule


def make_optimizer(
    config: ConfigDict, schedule: optax.Schedule, model: nn.Module, freeze: str = ""
) -> optax.GradientTransformation:
    """Makes the optimiser of ``config.optimizer``, with clipping by global norm.

    Args:
        config: ``name``, ``b1``, ``b2``, ``momentum``, ``weight_decay``,
            ``decay_mask``, ``layer_decay`` and ``clip_norm``.
        schedule: The learning rate.
        model: The model, which names its parameters.
        freeze: Patterns of parameters that do not change, see
            `relattn.training.parameters.is_frozen`; "" for none. Weight decay leaves
            them out, and no moments of them are stored.

    Returns:
        An optax transformation.

    Example:
        >>> from relattn.training.config import default_config
        >>> config, model = default_config().optimizer, nn.Dense(3)
        >>> optimizer = make_optimizer(config, lambda step: 0.1, model)
        >>> len(optimizer.init({"w": jnp.zeros(3)}))
        2
    """
    if config.name == "sgd":
        optimizer = optax.sgd(schedule, momentum=config.momentum or None)
    elif config.name == "adam":
        optimizer = optax.adam(schedule, b1=config.b1, b2=config.b2)
    else:
        mask = None
        if config.weight_decay and config.decay_mask == "matrices":
            mask = functools.partial(is_matrix, model)
        optimizer = optax.adamw(
            schedule,
            b1=config.b1,
            b2=config.b2,
            weight_decay=config.weight_decay,
            mask=mask,
        )
    if config.clip_norm:
        optimizer = optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer)
    if freeze:
        optimizer = _freeze(
            optimizer, functools.partial(is_frozen, model, patterns=freeze)
        )
    if config.layer_decay != 1:
        scales = functools.partial(layer_scales, model, decay=config.layer_decay)
        optimizer = optax.chain(optimizer, _scale(scales))
    return optimizer


def _scale(scales: Callable[[Any], Any]) -> optax.GradientTransformation:
    """Multiplies updates, weight decay included, by factors of their parameters."""

    def scale(updates: Any, params: Any) -> Any:
        del params
        return jax.tree.map(
            lambda update, factor: update * jnp.asarray(factor, update.dtype),
            updates,
            scales(updates),
        )

    return optax.stateless(scale)


def _freeze(
    optimizer: optax.GradientTransformation, frozen: Callable[[Any], Any]
) -> optax.GradientTransformation:
    """Applies an optimiser to the parameters that are not frozen."""

    def label(params: Any) -> Any:
        return jax.tree.map(
            lambda found: "frozen" if found is True else "trained", frozen(params)
        )

    def keep(updates: Any, params: Any) -> Any:
        del params
        # Weight decay shrinks frozen layers that are stacked with others too.
        return jax.tree.map(
            lambda update, found: (
                update if isinstance(found, bool) else jnp.where(found, 0, update)
            ),
            updates,
            frozen(updates),
        )

    transforms: dict[Hashable, optax.GradientTransformation] = {
        "trained": optimizer,
        "frozen": optax.set_to_zero(),
    }
    return optax.chain(optax.partition(transforms, label), optax.stateless(keep))

"""What a configuration trains: the model, its optimiser and how data reach it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from relattn import data as data_lib
from relattn import models
from relattn.data import DataInfo
from relattn.training.schedule import make_optimizer, make_schedule
from relattn.training.state import TrainState, create_state

INPUT_DTYPES = {"images": jnp.float32, "tokens": jnp.int32}


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, its optimiser and how data reach it.

    Attributes:
        config: The run's configuration.
        info: The data's description.
        model: The Flax module.
        optimizer: The optax transformation.
        schedule: The learning rate by step.
        preprocess: From a batch to what the model sees; jit-able.
        steps_per_epoch: Updates in an epoch.
        num_steps: Updates in the whole run.
    """

    config: ConfigDict
    info: DataInfo
    model: nn.Module
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    preprocess: Callable[[Any], jax.Array]
    steps_per_epoch: int
    num_steps: int

    @classmethod
    def build(cls, config: ConfigDict, info: DataInfo) -> Task:
        """Builds everything from a checked configuration.

        Args:
            config: The run's configuration.
            info: The data's description.

        Returns:
            The task.

        Raises:
            ValueError: If the model, the schedule or the batch size does not fit.
        """
        steps_per_epoch = info.steps_per_epoch(config.batch_size)
        num_steps = config.num_steps or config.num_epochs * steps_per_epoch
        schedule = make_schedule(
            config.schedule.name,
            config.optimizer.learning_rate,
            warmup_steps=config.schedule.warmup_steps,
            num_steps=num_steps,
        )
        model = models.build_model(config.model, **_sizes(config, info))
        return cls(
            config=config,
            info=info,
            model=model,
            optimizer=make_optimizer(config.optimizer, schedule),
            schedule=schedule,
            preprocess=data_lib.make_preprocess(config.data, info),
            steps_per_epoch=steps_per_epoch,
            num_steps=num_steps,
        )

    @property
    def key(self) -> jax.Array:
        """The run's key."""
        return jax.random.key(self.config.seed)

    def create_state(self) -> TrainState:
        """The state before the first update."""
        create = functools.partial(
            create_state,
            self.model,
            self.optimizer,
            input_shape=data_lib.input_shape(self.config.data, self.info),
            dtype=INPUT_DTYPES[self.info.kind],
        )
        return jax.jit(create)(self.key)

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        """The shapes and dtypes of the state, without computing it."""
        return jax.eval_shape(self.create_state)


def _sizes(config: ConfigDict, info: DataInfo) -> dict[str, Any]:
    """What `build_model` needs to know of the data."""
    if info.kind == "tokens":
        return {"vocab_size": info.vocab_size, "context_length": info.context_length}
    shape = data_lib.input_shape(config.data, info)
    return {"num_classes": info.num_classes, "image_shape": shape}

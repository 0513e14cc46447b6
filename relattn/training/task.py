"""What a configuration trains: the data's description, the model and the optimiser."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import optax
from ml_collections import ConfigDict

from relattn import data as data_lib
from relattn import models
from relattn.training.schedule import make_optimizer, make_schedule
from relattn.training.state import TrainState, create_state


@dataclasses.dataclass(frozen=True)
class DataInfo:
    """What a model needs to know of the images that it was trained on.

    Attributes:
        name: Name of the set.
        class_names: In the order of the labels.
        image_shape: Height, width and channels as stored.
        mean: Mean of the training images by channel, of values in [0, 1].
        std: Their standard deviation.
        num_train: Number of training images.
        origin: A sentence that says where the images came from.
    """

    name: str
    class_names: tuple[str, ...]
    image_shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_train: int
    origin: str

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.class_names)

    @classmethod
    def of(cls, data: data_lib.ImageData) -> DataInfo:
        """Describes loaded images."""
        return cls(
            name=data.name,
            class_names=tuple(data.class_names),
            image_shape=data.image_shape,
            mean=tuple(float(value) for value in data.mean),
            std=tuple(float(value) for value in data.std),
            num_train=len(data.train),
            origin=data.origin,
        )

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> DataInfo:
        """Reads what `dataclasses.asdict` gave, after JSON made lists of tuples."""
        return cls(
            **{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        )


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, its optimiser and how images reach it.

    Attributes:
        config: The run's configuration.
        info: The data's description.
        model: The Flax module.
        optimizer: The optax transformation.
        schedule: The learning rate by step.
        preprocess: From the images as stored to what the model sees; jit-able.
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
        steps_per_epoch = data_lib.steps_per_epoch(info.num_train, config.batch_size)
        num_steps = config.num_steps or config.num_epochs * steps_per_epoch
        schedule = make_schedule(
            config.schedule.name,
            config.optimizer.learning_rate,
            warmup_steps=config.schedule.warmup_steps,
            num_steps=num_steps,
        )
        size = config.data.get("image_size", info.image_shape[0])
        statistics = {}
        if config.data.get("standardize", False):
            statistics = {
                name: jax.numpy.asarray(getattr(info, name)) for name in ("mean", "std")
            }
        model = models.build_model(
            config.model,
            num_classes=info.num_classes,
            image_shape=(size, size, info.image_shape[2]),
        )
        return cls(
            config=config,
            info=info,
            model=model,
            optimizer=make_optimizer(config.optimizer, schedule),
            schedule=schedule,
            preprocess=functools.partial(
                data_lib.preprocess, image_size=size, **statistics
            ),
            steps_per_epoch=steps_per_epoch,
            num_steps=num_steps,
        )

    @property
    def key(self) -> jax.Array:
        """The run's key."""
        return jax.random.key(self.config.seed)

    def create_state(self) -> TrainState:
        """The state before the first update."""
        size = self.preprocess.keywords["image_size"]
        create = functools.partial(
            create_state,
            self.model,
            self.optimizer,
            image_shape=(size, size, self.info.image_shape[2]),
        )
        return jax.jit(create)(self.key)

    def abstract_state(self) -> TrainState:
        """The shapes and dtypes of the state, without computing it."""
        return jax.eval_shape(self.create_state)

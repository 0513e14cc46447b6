"""A task: the model, its optimiser, its steps and the loader of its data."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from relattn import data as data_lib
from relattn import models
from relattn.data import DataInfo
from relattn.data.base import ShardIndex
from relattn.kernels.random_projections import redraw
from relattn.training.config import LARGEST_INT, run_length
from relattn.training.cost import training_flops
from relattn.training.draws import check_draws, draw_features
from relattn.training.metrics import metrics_of
from relattn.training.optimizer import make_optimizer, make_schedule
from relattn.training.parameters import is_frozen
from relattn.training.run_metadata import History
from relattn.training.step import (
    Batch,
    Draw,
    EvalStep,
    Redraw,
    TrainState,
    TrainStep,
    create_state,
    make_eval_step,
    make_train_step,
)

INPUT_DTYPES = {"images": jnp.float32, "tokens": jnp.int32, "points": jnp.float32}


@dataclasses.dataclass(frozen=True)
class Task:
    """Everything that a configuration defines for training one seed.

    `relattn.training.seeds.SeedsTask` has the same interface for several seeds.

    Attributes:
        config: The run's configuration.
        info: The data's description.
        model: The Flax module.
        optimizer: The optax transformation.
        schedule: The learning rate by step.
        preprocess: Maps a batch to the model's inputs; jit-able.
        mix: Draws the mask that mixes images of a batch; None for no mixing.
        steps_per_epoch: Updates in an epoch.
        num_steps: Updates in the whole run.
        erase: Draws which pixels of an image are erased; None for no erasing.
        ema_decay: Decay of the moving average of the parameters; 0 for none.
    """

    config: ConfigDict
    info: DataInfo
    model: nn.Module
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    preprocess: Callable[[Any], jax.Array]
    mix: data_lib.Mix | None
    steps_per_epoch: int
    num_steps: int
    erase: data_lib.Erase | None = None
    ema_decay: float = 0.0

    @classmethod
    def build(cls, config: ConfigDict, info: DataInfo) -> Task:
        """Builds the task of a checked configuration.

        Args:
            config: The run's configuration.
            info: The data's description.

        Returns:
            The task.

        Raises:
            ValueError: If the model, the schedule, the batch size or the number of
                draws in evaluation does not fit.
        """
        steps_per_epoch = info.steps_per_epoch(config.batch_size)
        num_steps, _ = run_length(config, steps_per_epoch)
        if num_steps > LARGEST_INT:
            raise ValueError(
                f"config.num_epochs={config.num_epochs}, of {steps_per_epoch} steps "
                f"each, has more than {LARGEST_INT} steps: choose fewer epochs"
            )
        schedule = make_schedule(
            config.schedule.name,
            config.optimizer.learning_rate,
            warmup_steps=config.schedule.warmup_steps,
            num_steps=num_steps,
            decay_rate=config.schedule.decay_rate,
            steps_per_epoch=steps_per_epoch,
        )
        sizes = data_sizes(config, info)
        try:
            model = models.build_model(config.model, **sizes)
        except ValueError as error:
            raise ValueError(f"config.model: {error}") from error
        task = cls(
            config=config,
            info=info,
            model=model,
            optimizer=make_optimizer(config.optimizer, schedule, model, config.freeze),
            schedule=schedule,
            preprocess=data_lib.make_preprocess(config.data, info),
            mix=data_lib.make_mix(config.data.get("mix", "none"), info.kind),
            erase=data_lib.make_erase(config.data.get("erase", "none"), info.kind),
            steps_per_epoch=steps_per_epoch,
            num_steps=num_steps,
            ema_decay=config.ema_decay,
        )
        if config.eval_draws > 1:
            drawn = task.single.abstract_state.random_features
            check_draws(config.eval_draws, drawn, key="config.eval_draws")
        return task

    @property
    def single(self) -> Task:
        """The task of one seed: this one."""
        return self

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes of the data that the model is built for."""
        return data_sizes(self.config, self.info)

    @property
    def seeds(self) -> range:
        """The seeds that train together: one."""
        return range(self.config.seed, self.config.seed + 1)

    @property
    def key(self) -> jax.Array:
        """The run's key."""
        return jax.random.key(self.config.seed)

    @property
    def examples_per_step(self) -> int:
        """Examples in the batch of one update."""
        return self.config.batch_size

    @functools.cached_property
    def num_params(self) -> int:
        """The number of parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract_state.params))

    @functools.cached_property
    def flops_per_example(self) -> int:
        """Operations of training on one example, see `training_flops`."""
        shape = data_lib.input_shape(self.config.data, self.info)
        inputs = jax.ShapeDtypeStruct((1, *shape), INPUT_DTYPES[self.info.kind])
        return training_flops(self.model, inputs)

    def describe_size(self) -> str:
        """Returns the number of parameters in words."""
        size = f"{self.num_params:,} parameters"
        if self.frozen is None:
            return size
        params = self.abstract_state.params
        frozen = jax.tree.map(
            lambda leaf, found: round(np.mean(found) * leaf.size),
            params,
            self.frozen(params),
        )
        trained = self.num_params - sum(jax.tree.leaves(frozen))
        return f"{size}, of which {trained:,} are trained,"

    def new_histories(self) -> list[History]:
        """Returns an empty history."""
        return [History()]

    def init(self, key: Any) -> TrainState:
        """Returns the state before the first update, a pure function of the key."""
        return create_state(
            self.model,
            self.optimizer,
            key,
            input_shape=data_lib.input_shape(self.config.data, self.info),
            dtype=INPUT_DTYPES[self.info.kind],
            ema=self.ema_decay > 0,
        )

    def create_state(self) -> TrainState:
        """Returns the state before the first update."""
        return jax.jit(self.init)(self.key)

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        """The shapes and dtypes of the state, without computing it."""
        return jax.eval_shape(self.create_state)

    @functools.cached_property
    def train_step(self) -> TrainStep:
        """The update, a pure function; see `relattn.training.step.make_train_step`."""
        return make_train_step(
            self.model,
            self.optimizer,
            self.preprocess,
            accumulate_steps=self.config.accumulate_steps,
            skip_non_finite=self.config.max_skipped_updates > 0,
            mix=self.mix,
            erase=self.erase,
            label_smoothing=self.config.label_smoothing,
            frozen=self.frozen,
            ema_decay=self.ema_decay,
            metrics=metrics_of(self.info, in_training=True),
        )

    @property
    def frozen(self) -> Callable[[Any], Any] | None:
        """Maps the parameters to those that are frozen; None if all are trained."""
        if not self.config.freeze:
            return None
        return functools.partial(is_frozen, self.model, patterns=self.config.freeze)

    @functools.cached_property
    def eval_step(self) -> EvalStep:
        """The evaluation of a batch, a pure function; see `make_eval_step`."""
        return make_eval_step(
            self.model,
            self.preprocess,
            metrics=metrics_of(self.info),
            draws=self.config.eval_draws,
        )

    @functools.cached_property
    def draw(self) -> Draw | None:
        """The draws of random features in evaluation; None for those of training.

        A pure function of the features and the run's key; see `draw_features`.
        """
        draws = self.config.eval_draws
        return functools.partial(draw_features, draws=draws) if draws > 1 else None

    @functools.cached_property
    def redraw(self) -> Redraw | None:
        """The redraw of random features, a pure function; None if the run has none."""
        drawn = jax.tree.leaves(self.abstract_state.random_features)
        if not drawn or not 0 < self.config.redraw_every <= self.num_steps:
            return None
        every = self.config.redraw_every
        # The step is on the devices already: an index would be copied there.
        return lambda features, key, step: redraw(features, key, step // every)

    def unstack(self, state: TrainState) -> list[TrainState]:
        """Returns the state of each seed: of this one."""
        return [state]

    def loader(
        self,
        data: data_lib.DataSource,
        start_step: int,
        place: Callable[..., Batch],
        shard: ShardIndex,
    ) -> contextlib.AbstractContextManager[Iterator[tuple[int, Batch]]]:
        """Iterates over (step, batch), with batches placed ahead of time.

        Args:
            data: The data set.
            start_step: The first step.
            place: Starts to copy a batch to the devices, as
                `relattn.training.parallel.Parallel.shard` does.
            shard: The shard of every batch that this process reads.

        Returns:
            A context manager that yields the iterator.
        """
        return data.train_loader(
            self.config.batch_size, self.config.seed, start_step, place, shard
        )


def data_sizes(config: ConfigDict, info: DataInfo) -> dict[str, Any]:
    """Returns the sizes of the data that `build_model` needs.

    Args:
        config: The run's configuration.
        info: The data's description.
    """
    if info.kind == "tokens":
        return {"vocab_size": info.vocab_size, "context_length": info.context_length}
    if info.kind == "points":
        return {"num_classes": info.num_classes, "point_shape": info.point_shape}
    shape = data_lib.input_shape(config.data, info)
    return {"num_classes": info.num_classes, "image_shape": shape}

"""Several seeds of a task, trained together in one program."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from relattn.data import Batch, DataInfo, DataSource, Loader
from relattn.data.base import ShardIndex
from relattn.kernels.platform import current_platform
from relattn.training.run_metadata import History
from relattn.training.step import Draw, EvalStep, Redraw, TrainState, TrainStep
from relattn.training.task import Task

# The seeds share the step, so that a branch on the step stays a branch under vmap.
STATE_AXES = TrainState(
    step=None, params=0, opt_state=0, random_features=0, batch_stats=0, ema=0
)

# Platforms where a batched matrix product is slower than a loop over its matrices.
LOOP_PLATFORMS = ("cpu",)


def make_task(config: ConfigDict, info: DataInfo) -> Task:
    """Builds the task of a configuration.

    Args:
        config: The run's configuration.
        info: The data's description.

    Returns:
        A `SeedsTask` if ``config.num_seeds`` is more than one, else a `Task`.

    Raises:
        ValueError: If the model, the schedule or the batch size does not fit.
    """
    kind = Task if config.num_seeds == 1 else SeedsTask
    return kind.build(config, info)


@dataclasses.dataclass(frozen=True)
class SeedsTask(Task):
    """Several seeds of a task that train together, stacked along a leading axis.

    Every method maps that of `single`, the task of one seed, over the seeds. A seed's
    results are those of a separate run: it has its own parameters, batches and random
    numbers.
    """

    @functools.cached_property
    def single(self) -> Task:
        """The task of one seed."""
        names = [field.name for field in dataclasses.fields(Task)]
        return Task(**{name: getattr(self, name) for name in names})

    @property
    def seeds(self) -> range:
        """The ``config.num_seeds`` seeds from ``config.seed`` on."""
        return range(self.config.seed, self.config.seed + self.config.num_seeds)

    @property
    def num_params(self) -> int:
        """The number of parameters of one seed."""
        return self.single.num_params

    @property
    def key(self) -> jax.Array:
        """The stacked keys of the seeds."""
        return jax.vmap(jax.random.key)(np.array(self.seeds))

    @property
    def examples_per_step(self) -> int:
        """Examples in the batches of one update, of all seeds."""
        return len(self.seeds) * self.single.examples_per_step

    def describe_size(self) -> str:
        """Returns the number of parameters in words."""
        return f"{self.single.describe_size()} for each of {len(self.seeds)} seeds"

    def new_histories(self) -> list[History]:
        """Returns the empty history of each seed."""
        return [History(seed=seed) for seed in self.seeds]

    def create_state(self) -> TrainState:
        """Returns the stacked states before the first update."""
        # Not vmap, in which keys of "rbg" draw other numbers than alone.
        state = jax.jit(lambda keys: jax.lax.map(self.single.init, keys))(self.key)
        return state.replace(step=state.step[0])

    @functools.cached_property
    def train_step(self) -> TrainStep:
        """The update of stacked states, batches and keys."""
        return map_train_step(self.single.train_step)

    @functools.cached_property
    def eval_step(self) -> EvalStep:
        """The evaluation of stacked variables on one batch."""
        return _map_eval_step(self.single.eval_step)

    @functools.cached_property
    def redraw(self) -> Redraw | None:
        """The redraw of stacked random features; the seeds share the step."""
        redraw = self.single.redraw
        if redraw is None:
            return None
        return jax.vmap(redraw, in_axes=(0, 0, None))

    @functools.cached_property
    def draw(self) -> Draw | None:
        """The draws of stacked random features in evaluation."""
        draw = self.single.draw
        if draw is None:
            return None
        return jax.vmap(draw)

    def unstack(self, state: TrainState) -> list[TrainState]:
        """Returns the state of each seed, copied so that the others can be freed."""

        def select(x: Any, index: int) -> Any:
            return x[index] if isinstance(x, jax.Array) else np.array(x[index])

        rest = state.replace(step=())
        return [
            jax.tree.map(functools.partial(select, index=i), rest).replace(
                step=state.step
            )
            for i in range(len(self.seeds))
        ]

    @contextlib.contextmanager
    def loader(
        self,
        data: DataSource,
        start_step: int,
        place: Callable[..., Batch],
        shard: ShardIndex,
    ) -> Iterator[Iterator[tuple[int, Batch]]]:
        """Iterates over (step, stacked batches): each seed has its own order."""
        place = functools.partial(place, axis=1)
        batch_size = self.config.batch_size
        with contextlib.ExitStack() as stack:
            loaders = [
                stack.enter_context(
                    data.train_loader(batch_size, seed, start_step, shard=shard)
                )
                for seed in self.seeds
            ]

            def make_batch(step: int) -> Batch:
                batches = [next(loader)[1] for loader in loaders]
                return {
                    name: np.stack([batch[name] for batch in batches])
                    for name in batches[0]
                }

            # The loader calls make_batch once for every step, in order.
            yield stack.enter_context(Loader(make_batch, start_step, place=place))


def map_train_step(step: TrainStep) -> TrainStep:
    """Maps the update of one seed over stacked states, batches and keys.

    Seeds are mapped by a loop on the platforms of `LOOP_PLATFORMS`, else by vmap.

    Args:
        step: The pure function of `relattn.training.step.make_train_step`.

    Returns:
        The mapped function; its metrics have a leading axis of seeds.
    """

    def mapped(state: TrainState, batch: Any, key: Any) -> tuple[TrainState, Any]:
        def update(rest: TrainState, batch: Any, key: Any) -> tuple[TrainState, Any]:
            new, metrics = step(rest.replace(step=state.step), batch, key)
            return new.replace(step=()), metrics

        if current_platform() not in LOOP_PLATFORMS:
            axes = (STATE_AXES, 0, 0)
            return jax.vmap(step, axes, out_axes=(STATE_AXES, 0))(state, batch, key)
        rest = state.replace(step=())
        rest, metrics = jax.lax.map(lambda args: update(*args), (rest, batch, key))
        return rest.replace(step=state.step + 1), metrics

    return mapped


def _map_eval_step(step: EvalStep) -> EvalStep:
    """Maps the evaluation of one seed over stacked variables, on one batch.

    Its sums have a leading axis of seeds.
    """

    def mapped(stacked: Any, batch: Any) -> Any:
        if current_platform() not in LOOP_PLATFORMS:
            return jax.vmap(step, in_axes=(0, None))(stacked, batch)
        return jax.lax.map(lambda variables: step(variables, batch), stacked)

    return mapped

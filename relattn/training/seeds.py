"""Several seeds of a task, trained together in one program."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from relattn.data import Batch, DataInfo, DataSource, Loader
from relattn.training.devices import Parallel, Redraw
from relattn.training.run_metadata import History
from relattn.training.step import EvalStep, TrainState, TrainStep
from relattn.training.task import Task

# The seeds share the step, so that a branch on the step stays a branch under vmap.
STATE_AXES = TrainState(
    step=None, params=0, opt_state=0, random_features=0, batch_stats=0
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
        return jax.jit(jax.vmap(self.single.init, out_axes=STATE_AXES))(self.key)

    def make_train_step(self, parallel: Parallel) -> TrainStep:
        """Makes the update of stacked states, batches and keys."""
        return map_train_step(self.single.make_train_step(parallel), parallel.platform)

    def make_eval_step(self, parallel: Parallel) -> EvalStep:
        """Makes the evaluation of stacked variables on one batch."""
        return map_eval_step(self.single.make_eval_step(parallel), parallel.platform)

    def make_redraw(self) -> Redraw | None:
        """Makes the redraw of stacked random features; the seeds share the step."""
        redraw = self.single.make_redraw()
        return redraw and jax.vmap(redraw, in_axes=(0, 0, None))

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
        self, data: DataSource, start_step: int, parallel: Parallel
    ) -> Iterator[Iterator[tuple[int, Batch]]]:
        """Iterates over (step, stacked batches): each seed has its own order."""
        place = functools.partial(parallel.shard, axis=1)
        batch_size = self.config.batch_size
        with contextlib.ExitStack() as stack:
            loaders = [
                stack.enter_context(
                    data.train_loader(
                        batch_size, seed, start_step, shard=parallel.shard_index
                    )
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


def map_train_step(step: TrainStep, platform: str) -> TrainStep:
    """Maps the update of one seed over stacked states, batches and keys.

    Args:
        step: The pure function of `relattn.training.step.make_train_step`.
        platform: The devices' platform; seeds are mapped by a loop on those of
            `LOOP_PLATFORMS`, else by vmap.

    Returns:
        The mapped function; its metrics have a leading axis of seeds.
    """
    if platform not in LOOP_PLATFORMS:
        return jax.vmap(step, in_axes=(STATE_AXES, 0, 0), out_axes=(STATE_AXES, 0))

    def one_by_one(state: TrainState, batch: Any, key: Any) -> tuple[TrainState, Any]:
        def update(args: tuple[TrainState, Any, Any]) -> tuple[TrainState, Any]:
            rest, batch, key = args
            new, metrics = step(rest.replace(step=state.step), batch, key)
            return new.replace(step=()), metrics

        rest = state.replace(step=())
        rest, metrics = jax.lax.map(update, (rest, batch, key))
        return rest.replace(step=state.step + 1), metrics

    return one_by_one


def map_eval_step(step: EvalStep, platform: str) -> EvalStep:
    """Maps the evaluation of one seed over stacked variables, on one batch.

    Args:
        step: The pure function of `relattn.training.step.make_eval_step`.
        platform: As in `map_train_step`.

    Returns:
        The mapped function; its sums have a leading axis of seeds.
    """
    if platform not in LOOP_PLATFORMS:
        return jax.vmap(step, in_axes=(0, None))
    return lambda stacked, batch: jax.lax.map(
        lambda variables: step(variables, batch), stacked
    )

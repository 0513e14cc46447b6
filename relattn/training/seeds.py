"""Seeds that train together: stacked along a leading axis, mapped in one program.

One seed has no such axis: nothing here touches it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from relattn.data import Batch, DataSource, Loader
from relattn.training.devices import Parallel, Redraw
from relattn.training.step import TrainState

# The seeds share the step, so that what depends on it alone stays a branch.
STATE_AXES = TrainState(
    step=None, params=0, opt_state=0, random_features=0, batch_stats=0
)

# Where products of stacked matrices are slower than one product after the other.
ONE_BY_ONE = ("cpu",)


def seeds_of(config: ConfigDict) -> range:
    """The seeds that a run trains.

    Args:
        config: The run's configuration.

    Returns:
        ``config.num_seeds`` of them, from ``config.seed`` on.

    Example:
        >>> list(seeds_of(ConfigDict({"seed": 3, "num_seeds": 2})))
        [3, 4]
    """
    return range(config.seed, config.seed + config.num_seeds)


def map_create(
    create: Callable[[Any], TrainState], num_seeds: int
) -> Callable[[Any], TrainState]:
    """From the state of a key to the stacked state of stacked keys.

    Args:
        create: A pure function of a key.
        num_seeds: 1 for the function itself.

    Returns:
        The function.
    """
    if num_seeds == 1:
        return create
    return jax.vmap(create, out_axes=STATE_AXES)


def map_train_step(
    step: Callable[..., Any], num_seeds: int, platform: str
) -> Callable[..., Any]:
    """From the update of one seed to that of stacked states, batches and keys.

    Args:
        step: As `relattn.training.step.make_train_step` makes it.
        num_seeds: 1 for the function itself.
        platform: Of the devices: of `ONE_BY_ONE`, or the seeds are mapped by vmap.

    Returns:
        The function; its metrics have a leading axis of seeds.
    """
    if num_seeds == 1:
        return step
    if platform not in ONE_BY_ONE:
        return jax.vmap(step, in_axes=(STATE_AXES, 0, 0), out_axes=(STATE_AXES, 0))

    def one_by_one(state: TrainState, batch: Any, key: Any) -> tuple[TrainState, Any]:
        def update(of_seed: tuple[TrainState, Any, Any]) -> tuple[TrainState, Any]:
            rest, batch, key = of_seed
            new, metrics = step(rest.replace(step=state.step), batch, key)
            return new.replace(step=()), metrics

        rest = state.replace(step=())
        rest, metrics = jax.lax.map(update, (rest, batch, key))
        return rest.replace(step=state.step + 1), metrics

    return one_by_one


def map_redraw(redraw: Redraw, num_seeds: int) -> Redraw:
    """From the redraw of one seed to that of stacked collections and keys.

    Args:
        redraw: As `relattn.kernels.redraw`.
        num_seeds: 1 for the function itself.

    Returns:
        The function; the seeds share the index.
    """
    return redraw if num_seeds == 1 else jax.vmap(redraw, in_axes=(0, 0, None))


def map_eval_step(
    step: Callable[..., Any], num_seeds: int, platform: str
) -> Callable[..., Any]:
    """From the evaluation of one seed to that of stacked variables on one batch.

    Args:
        step: As `relattn.training.step.make_eval_step` makes it.
        num_seeds: 1 for the function itself.
        platform: As in `map_train_step`.

    Returns:
        The function; its sums have a leading axis of seeds.
    """
    if num_seeds == 1:
        return step
    if platform not in ONE_BY_ONE:
        return jax.vmap(step, in_axes=(0, None))
    return lambda variables, batch: jax.lax.map(
        lambda of_seed: step(of_seed, batch), variables
    )


def select(state: TrainState, index: int, num_seeds: int) -> TrainState:
    """The state of one seed.

    Args:
        state: Perhaps stacked.
        index: Which seed, from 0.
        num_seeds: How many there are.

    Returns:
        As if the seed had been trained alone.

    Example:
        >>> state = TrainState(7, np.array([1.0, 2.0]), (), {}, {})
        >>> float(select(state, 1, 2).params), select(state, 1, 2).step
        (2.0, 7)
    """
    if num_seeds == 1:
        return state
    rest = jax.tree.map(lambda x: x[index], state.replace(step=()))
    return rest.replace(step=state.step)


@contextlib.contextmanager
def train_loader(
    data: DataSource,
    batch_size: int,
    seeds: Sequence[int],
    start_step: int,
    parallel: Parallel,
) -> Iterator[Iterator[tuple[int, Any]]]:
    """Iterates over (step, batch), as `DataSource.train_loader` of one seed.

    Args:
        data: The data set.
        batch_size: Examples in the batch of a seed.
        seeds: Each with the batches that it would have alone.
        start_step: The first step.
        parallel: The devices, to which batches are sent ahead of time.

    Yields:
        The iterator; batches of several seeds are stacked.
    """
    if len(seeds) == 1:
        with data.train_loader(
            batch_size, seeds[0], start_step, parallel.shard, parallel.part
        ) as loader:
            yield loader
        return
    place = functools.partial(parallel.shard, axis=1)
    with contextlib.ExitStack() as stack:
        loaders = [
            stack.enter_context(
                data.train_loader(batch_size, seed, start_step, part=parallel.part)
            )
            for seed in seeds
        ]

        def make_batch(step: int) -> Batch:
            batches = [next(loader)[1] for loader in loaders]
            return {
                name: np.stack([batch[name] for batch in batches])
                for name in batches[0]
            }

        # The loader asks for every step once and in order, as they come.
        yield stack.enter_context(Loader(make_batch, start_step, place=place))

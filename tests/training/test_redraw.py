"""Random features are redrawn between updates, the same on all devices."""

from pathlib import Path

import chex
import jax
import numpy as np
import pytest

from relattn.kernels.random_projections import redraw
from relattn.training.devices import make_parallel
from relattn.training.seeds import make_task
from relattn.training.task import Task
from relattn.training.workdir import describe_start
from tests.training.conftest import make_data

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.mark.parametrize("parallel", ["pmap", "mesh"])
def test_an_update_has_no_branch(config, parallel):
    config.update(parallel=parallel, max_skipped_updates=2)
    task = Task.build(config, make_data().info)
    devices = make_parallel(config)
    step = devices.compile_train_step(task.train_step)
    state = devices.create(task.create_state)
    rows = make_data().train
    batch = {"image": rows.images[:20], "label": rows.labels[:20]}
    text = step.lower(state, devices.shard(batch), task.key).as_text()
    assert "stablehlo.add" in text
    assert "stablehlo.case" not in text and "stablehlo.if" not in text


@pytest.mark.quick("1-pmap", "1-mesh")
@pytest.mark.parametrize("parallel", ["pmap", "mesh"])
@pytest.mark.parametrize("num_seeds", [1, 3])
def test_every_device_draws_what_a_seed_draws_alone(config, parallel, num_seeds):
    config.update(parallel=parallel, num_seeds=num_seeds)
    task = make_task(config, make_data().info)
    devices = make_parallel(config)
    state = devices.create(task.create_state)
    key, step = devices.place_key(task.key), state.step + 5 * config.redraw_every + 1
    after = devices.compile_redraw(task.redraw)(state.random_features, key, step)
    copies = {
        np.asarray(shard.data).tobytes()
        for leaf in jax.tree.leaves(after)
        for shard in leaf.addressable_shards
    }
    assert len(copies) == 1
    found = devices.fetch(after)
    for index, seed in enumerate(task.seeds):
        mine = found
        if num_seeds > 1:
            mine = jax.tree.map(lambda x, index=index: x[index], found)
        expected = redraw(mine, jax.random.key(seed), 5)
        chex.assert_trees_all_close(mine, expected, atol=1e-6)


def test_a_run_without_redraws_compiles_none(config):
    info = make_data().info
    for redraw_every, num_steps in ((0, 15), (16, 15)):
        config.update(redraw_every=redraw_every, num_steps=num_steps)
        task = Task.build(config, info)
        assert task.redraw is None
        said = describe_start(task, jax.devices()[:1], 1, Path("x"), 0, False)
        if redraw_every:
            assert said[-1] == (
                "config.redraw_every=16 has no effect: the run has 15 steps."
            )
        assert len(said) == 1 + bool(redraw_every)


def test_options_of_photographs_have_no_effect_on_images_in_memory(config):
    with config.unlocked():
        config.data.update(interpolation="bicubic", crop_pct=1.0)
    task = Task.build(config, make_data().info)
    _, said = describe_start(task, jax.devices()[:1], 1, Path("x"), 0, False)
    assert said == (
        "config.data.interpolation=bicubic has no effect: the images are in memory."
    )

"""Seeds that train together equal separate runs."""

import functools
import json

import chex
import jax
import numpy as np
import pytest

from relattn import export, training
from relattn.evaluation import predict
from relattn.training import checkpoint as checkpoint_lib
from relattn.training import loop, seeds
from relattn.training import saved_run as saved_run_lib
from relattn.training import task as task_lib
from relattn.training.checkpoint import checkpoint_steps
from relattn.training.metrics_log import read_rows
from tests.helpers.interrupted import train_until, untimed_rows
from tests.helpers.quick import quick_jit
from tests.training.conftest import make_data

pytestmark = pytest.mark.usefixtures("tiny")
# Between two programs of the same run in float32.
RTOL = 1e-4


def close(one, other):
    """Checks that counts are equal and metrics close; timings are left out."""
    assert set(one) == set(other)
    for key, value in one.items():
        if "second" in key:
            assert value > 0
        elif isinstance(value, float):
            np.testing.assert_allclose(value, other[key], rtol=RTOL, err_msg=key)
        else:
            assert value == other[key], key


def count_reads(monkeypatch):
    """Records the steps that are verified and restored."""
    reads = {"_verify": [], "restore": []}
    verify, restore = checkpoint_lib._verify, saved_run_lib.restore

    def verify_counted(checkpoint):
        reads["_verify"].append(int(checkpoint.name))
        return verify(checkpoint)

    def restore_counted(folder, step, template):
        reads["restore"].append(step)
        return restore(folder, step, template)

    monkeypatch.setattr(checkpoint_lib, "_verify", verify_counted)
    monkeypatch.setattr(saved_run_lib, "restore", restore_counted)
    return reads


@pytest.fixture
def seeds_config(config):
    config.seed, config.num_seeds = 5, 3
    return config


@pytest.mark.quick("rbg")
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_each_seed_draws_what_it_draws_alone(seeds_config, impl):
    seeds_config.update(redraw_every=1, eval_draws=2)

    def draw(num_seeds, seed):
        seeds_config.update(num_seeds=num_seeds, seed=seed)
        task = seeds.make_task(seeds_config, make_data().info)

        @quick_jit
        def drawn():
            state = task.create_state()
            features = state.random_features
            redrawn = task.redraw(features, task.key, state.step + 3)
            return state.variables, redrawn, task.draw(features, task.key)

        return drawn()

    with jax.default_prng_impl(impl):
        together, alone = draw(2, 5), draw(1, 6)
    second = jax.tree.map(lambda x: x[1], together)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5), second, alone
    )


@pytest.mark.parametrize(
    "one_by_one, num_devices",
    [pytest.param(True, 2, marks=pytest.mark.slow), (False, 1)],
)
def test_each_seed_equals_a_separate_run(
    seeds_config, tmp_path, monkeypatch, one_by_one, num_devices
):
    if not one_by_one:
        monkeypatch.setattr(seeds, "LOOP_PLATFORMS", ())
    devices = jax.local_devices()[:num_devices]
    together = training.train_and_evaluate(
        seeds_config, tmp_path / "all", devices=devices
    )
    assert json.loads((tmp_path / "all" / "result.json").read_text()) == together
    assert [run["seed"] for run in together["runs"]] == [5, 6, 7]
    assert (together["step"], together["num_steps"]) == (15, 15)
    rows = read_rows(tmp_path / "all" / "metrics.jsonl")
    seeds_config.num_seeds = 1
    # For one of the programs, one seed is enough.
    for run in together["runs"][2 * one_by_one :: 2]:
        seeds_config.seed = seed = run.pop("seed")
        alone = tmp_path / str(seed)
        result = training.train_and_evaluate(seeds_config, alone, devices=devices)
        close(run, result)
        assert together["num_params"] == result["num_params"]
        mine = [{**row} for row in rows if row["seed"] == seed]
        expected = read_rows(alone / "metrics.jsonl")
        assert len(mine) == len(expected) == 9
        for row, other in zip(mine, expected, strict=True):
            assert row.pop("seed") == seed
            close(row, other)
        for checkpoint in ("best", "latest"):
            one = training.load_run(tmp_path / "all", checkpoint, seed=seed)
            other = training.load_run(alone, checkpoint)
            assert one.step == other.step
            assert one.config.to_dict() == other.config.to_dict()
            chex.assert_trees_all_close(one.variables, other.variables, atol=1e-5)
    reads = count_reads(monkeypatch)
    loaded = training.load_runs(tmp_path / "all")
    assert [run.config.seed for run in loaded] == [5, 6, 7]
    best = {run["best_step"] for run in together["runs"]}
    assert sorted(reads["restore"]) == sorted(best)
    assert sorted(reads["_verify"]) == sorted(best | {15})
    test = make_data().test
    scores = training.evaluate(loaded[0], test, 8)
    first = together["runs"][0]
    np.testing.assert_allclose(scores["loss"], first["test_loss"], rtol=RTOL)
    loaded[1].save_pretrained(tmp_path / "saved")
    card = (tmp_path / "saved" / "README.md").read_text()
    assert f"| test_loss | {together['runs'][1]['test_loss']:.4g} |" in card
    with pytest.raises(ValueError, match="no seed 8; available: 5, 6, 7"):
        training.load_run(tmp_path / "all", seed=8)
    # The commands choose a seed too.
    exported = []
    monkeypatch.setitem(
        export.FORMATS, "hf", lambda source: ({}, exported.append(source.variables))
    )
    export.export(tmp_path / "all", tmp_path / "out", format="hf", seed=6)
    chex.assert_trees_all_equal(exported[0], loaded[1].variables)
    np.savez(tmp_path / "x.npz", images=test.images[:3])
    files, table = [str(tmp_path / "x.npz")], tmp_path / "table.csv"
    options = ["--probabilities", "--seed=6", f"--output={table}"]
    predict.main([str(tmp_path / "all"), *files, *options])
    rows = np.genfromtxt(table, delimiter=",", skip_header=1)
    expected = loaded[1].predict(test.images[:3]).probabilities
    np.testing.assert_allclose(rows[:, len(predict.COLUMNS) :], expected, atol=2e-6)


@pytest.mark.slow
def test_seeds_resume_bit_for_bit(seeds_config, tmp_path, one_device):
    whole, parts = tmp_path / "whole", tmp_path / "parts"

    training.train_and_evaluate(seeds_config, whole, devices=one_device)
    train_until(12, seeds_config, parts, devices=one_device)
    training.train_and_evaluate(seeds_config, parts, devices=one_device)
    for seed in (5, 7):
        runs = [
            training.load_run(folder, "latest", seed=seed) for folder in (whole, parts)
        ]
        chex.assert_trees_all_equal(runs[0].variables, runs[1].variables)
    assert untimed_rows(whole) == untimed_rows(parts)


@pytest.mark.slow
def test_seeds_stop_early_separately(seeds_config, tmp_path, one_device, capsys):
    """The last seed gains in the third epoch, the others stop after the second."""
    accuracies = {5: [0.5, 0.4, 0.9, 0.9], 6: [0.5] * 4, 7: [0.5, 0.6, 0.7, 0.6]}

    class Scripted(loop.Evaluator):
        epoch = 0

        def __call__(self, *args, **kwargs):
            results = super().__call__(*args, **kwargs)
            if len(results) > 1:
                for result, values in zip(results, accuracies.values(), strict=True):
                    result["accuracy"] = values[Scripted.epoch]
                Scripted.epoch += 1
            return results

    seeds_config.early_stopping_epochs = 1
    seeds_config.num_epochs = 11
    seeds_config.progress = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "Evaluator", Scripted)
        result = training.train_and_evaluate(seeds_config, tmp_path, devices=one_device)
    assert (result["step"], result["stopped_early"]) == (20, True)
    runs = result["runs"]
    assert [run["step"] for run in runs] == [10, 10, 20]
    assert [run["best_step"] for run in runs] == [5, 5, 15]
    assert [run["validation_accuracy"] for run in runs] == [0.5, 0.5, 0.7]
    rows = read_rows(tmp_path / "metrics.jsonl")
    last = {row["seed"]: row["step"] for row in rows}
    assert last == {5: 10, 6: 10, 7: 20}
    assert checkpoint_steps(tmp_path / "checkpoints") == [5, 15, 20]
    assert "Seed 7: stopping early, no gain" in capsys.readouterr().out


def test_a_non_finite_loss_names_its_seed(
    seeds_config, tmp_path, one_device, monkeypatch
):
    make = task_lib.make_train_step
    second = jax.random.key_data(jax.random.key(6))

    def make_poisoned(*args, **kwargs):
        step = make(*args, **kwargs)

        def poisoned(state, batch, key):
            new, metrics = step(state, batch, key)
            bad = (jax.random.key_data(key) == second).all() & (state.step >= 2)
            loss = jax.numpy.where(bad, jax.numpy.inf, metrics["loss"])
            return new, {**metrics, "loss": loss}

        return poisoned

    monkeypatch.setattr(task_lib, "make_train_step", make_poisoned)
    message = "seed 6: the loss is inf at step 3;"
    with pytest.raises(training.NonFiniteLossError, match=message):
        training.train_and_evaluate(seeds_config, tmp_path, devices=one_device)


def test_the_number_of_seeds_is_at_least_one(config, tmp_path):
    config.num_seeds = 0
    with pytest.raises(ValueError, match="config.num_seeds must be at least 1, got 0"):
        training.train_and_evaluate(config, tmp_path)

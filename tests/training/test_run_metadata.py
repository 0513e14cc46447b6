"""Resuming a run: after damage, and never as another run."""

import dataclasses
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from relattn import data as data_lib
from relattn import training
from relattn.nn import build
from relattn.training import loop
from relattn.training.checkpoint import CHECKPOINTS, checkpoint_steps, read_meta
from relattn.training.evaluator import Evaluator
from relattn.training.resume import check_same_data, replace_lost_best
from relattn.training.run_metadata import History, explain_metadata_errors
from tests.helpers.interrupted import final_state, train_until, untimed, untimed_rows
from tests.training.conftest import make_data

pytestmark = pytest.mark.usefixtures("tiny")


def test_training_resumes_before_a_damaged_checkpoint(
    config, tmp_path, one_device, finished
):
    (whole, expected), parts = finished, tmp_path / "parts"
    train_until(12, config, parts, devices=one_device)
    manifest = parts / CHECKPOINTS / "10" / "manifest.json"
    manifest.unlink()
    with pytest.warns(UserWarning, match=r"10/manifest.json is missing.*5 is used"):
        actual = training.train_and_evaluate(config, parts, devices=one_device)
    assert untimed(actual) == untimed(expected)
    jax.tree.map(np.testing.assert_array_equal, final_state(parts), final_state(whole))
    assert untimed_rows(parts) == untimed_rows(whole)
    steps = [checkpoint_steps(run / CHECKPOINTS) for run in (parts, whole)]
    assert steps[0] == steps[1]
    renamed = parts / CHECKPOINTS / "10.damaged"
    assert (renamed / "meta" / "metadata").exists()


@pytest.mark.slow
def test_training_resumes_with_damaged_records(config, tmp_path, one_device, finished):
    (whole, _), parts = finished, tmp_path / "parts"
    train_until(7, config, parts, devices=one_device)
    (parts / "run.json").write_text("")
    metrics = (parts / "metrics.jsonl").read_text()
    (parts / "metrics.jsonl").write_text(f"{{\n{metrics}")
    with (
        pytest.warns(UserWarning, match=r"run.json is damaged and written again"),
        pytest.warns(UserWarning, match=r"metrics.jsonl is damaged: .* \(line 1\)"),
    ):
        training.train_and_evaluate(config, parts, devices=one_device)
    assert untimed_rows(parts) == untimed_rows(whole)
    assert (parts / "metrics.jsonl.damaged").read_text() == f"{{\n{metrics}"


def test_training_never_restarts_over_damaged_checkpoints(config, tmp_path, one_device):
    train_until(7, config, tmp_path, devices=one_device)
    (tmp_path / CHECKPOINTS / "5" / "manifest.json").unlink()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(training.CheckpointError, match=r"5/manifest.json is missing"):
        training.train_and_evaluate(config, tmp_path, devices=one_device)
    assert sorted(tmp_path.rglob("*")) == before


def test_data_that_changed_are_refused(config, tmp_path, one_device):
    train_until(7, config, tmp_path, devices=one_device)
    data = make_data()
    fewer = dataclasses.replace(
        data, train=data_lib.ImageSplit(data.train.images[1:], data.train.labels[1:])
    )
    brighter = dataclasses.replace(data, mean=data.mean * 1.1)
    before = sorted(tmp_path.rglob("*"))
    for other, what in ((fewer, "num_train: "), (brighter, "mean: ")):
        with pytest.raises(
            training.CheckpointError, match=f"was trained on other data .{what}"
        ):
            training.train_and_evaluate(
                config, tmp_path, data=other, devices=one_device
            )
    assert sorted(tmp_path.rglob("*")) == before
    moved = dataclasses.replace(data, name="moved", origin="another folder")
    training.train_and_evaluate(config, tmp_path, data=moved, devices=one_device)


def test_the_folder_of_a_text_may_have_another_name():
    info = data_lib.TextInfo("mine", "bytes", 256, 7, 100, "a file")
    check_same_data(info, dataclasses.replace(info, name="moved"), Path("x"))
    with pytest.raises(training.CheckpointError, match="num_train: 100 there, 99 now"):
        check_same_data(info, dataclasses.replace(info, num_train=99), Path("x"))


def test_data_of_other_channels_or_another_kind_are_refused():
    info = make_data().info
    grown = {"mean": (*info.mean, 0.5), "std": (*info.std, 0.5)}
    wider = dataclasses.replace(info, image_shape=(*info.image_shape[:2], 7), **grown)
    points = data_lib.PointInfo(info.name, info.class_names, (5, 2, 1), 7, "")
    for other in (wider, points):
        with pytest.raises(training.CheckpointError, match="image_shape: .* there, "):
            check_same_data(info, other, Path("x"))


def test_training_resumes_where_the_latest_checkpoint_is_also_the_best(
    config, tmp_path, one_device, monkeypatch
):
    """The one that was the best before it has been removed."""
    evaluate, accuracies = Evaluator.__call__, [0.9, 0.5, 0.95]

    def evaluated(self, *arguments, **options):
        results = evaluate(self, *arguments, **options)
        if not options.get("timed"):
            results[0]["accuracy"] = accuracies.pop(0)
        return results

    monkeypatch.setattr(Evaluator, "__call__", evaluated)
    expected = training.train_and_evaluate(config, tmp_path, devices=one_device)
    folder = tmp_path / CHECKPOINTS
    assert expected["best_step"] == 15 and checkpoint_steps(folder) == [10, 15]
    next((folder / "15" / "state").rglob("d/*")).write_bytes(b"")
    with (
        pytest.warns(UserWarning, match="15/state.* is damaged .*10 is used instead"),
        pytest.raises(training.CheckpointError, match="15, with the best .* damaged"),
        pytest.warns(UserWarning, match="5/manifest.* missing: .*10 is the best that"),
    ):
        training.load_run(tmp_path)
    accuracies.append(0.95)
    with (
        pytest.warns(UserWarning, match="15/state.* is damaged .*10 is used instead"),
        pytest.warns(UserWarning, match="5/manifest.* missing: .*10 is the best that"),
    ):
        again = training.train_and_evaluate(config, tmp_path, devices=one_device)
    assert untimed(again) == untimed(expected)
    assert (folder / "15.damaged").exists()


def test_a_best_checkpoint_that_is_damaged_is_replaced(config, tmp_path, one_device):
    config.checkpoint_every_steps = 4
    train_until(14, config, tmp_path, devices=one_device)
    folder = tmp_path / CHECKPOINTS
    assert checkpoint_steps(folder) == [10, 12]
    assert read_meta(folder, 12)["history"][0]["best_step"] == 10
    (folder / "10" / "manifest.json").unlink()
    with pytest.raises(training.CheckpointError, match="10/manifest.json is missing"):
        training.load_run(tmp_path)
    with pytest.warns(UserWarning, match="10/manifest.* missing: .*: no other has"):
        result = training.train_and_evaluate(config, tmp_path, devices=one_device)
    # Nothing that had been evaluated was left, but the last step is evaluated.
    assert result["best_step"] == 15
    assert (folder / "10.damaged").exists() and checkpoint_steps(folder) == [12, 15]


def test_a_run_resumes_with_its_random_numbers_only(config, one_device, finished):
    workdir, _ = finished
    with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
        message = "15 was trained with JAX_THREEFRY_PARTITIONABLE=True, now it is False"
        with pytest.raises(training.CheckpointError, match=message):
            training.train_and_evaluate(config, workdir, devices=one_device)


@pytest.mark.slow
def test_a_key_missing_in_a_checkpoint_has_its_default(
    config, tmp_path, one_device, monkeypatch
):
    to_json = loop.to_json

    def old_json(config):
        return {k: v for k, v in to_json(config).items() if k != "accumulate_steps"}

    with monkeypatch.context() as patched:
        patched.setattr(loop, "to_json", old_json)
        train_until(12, config, tmp_path, devices=one_device)
    meta = read_meta(tmp_path / CHECKPOINTS, 10)
    assert "accumulate_steps" not in meta["config"]
    assert training.load_run(tmp_path).config.accumulate_steps == 1
    result = training.train_and_evaluate(config, tmp_path, devices=one_device)
    assert result["step"] == 15


def test_a_workdir_of_another_config_shows_the_difference(config, one_device, finished):
    workdir, _ = finished
    config.seed = 1
    config.optimizer.name = "sgd"
    config.log_every_steps = 7
    before = sorted(workdir.rglob("*"))
    with pytest.raises(
        training.WorkdirError,
        match=r"optimizer.name: 'adam' there, 'sgd' now; seed: 0 there, 1 now\)",
    ):
        training.train_and_evaluate(config, workdir, devices=one_device)
    assert sorted(workdir.rglob("*")) == before


def test_no_rows_are_missing_after_changes_of_their_interval(
    config, tmp_path, one_device
):
    """Nor if the interval was larger at a start before the last one."""
    for steps, stop in (100, 7), (2, 12), (2, 14):
        config.log_every_steps = steps
        train_until(stop, config, tmp_path, devices=one_device)


def test_a_foreign_checkpoint_folder_is_left_alone(config, tmp_path):
    foreign = tmp_path / "checkpoints" / "model.pt"
    foreign.parent.mkdir()
    foreign.write_text("weights")
    with pytest.raises(training.CheckpointError, match=r"model.pt is not a checkpoint"):
        training.train_and_evaluate(config, tmp_path)
    assert [p.name for p in tmp_path.rglob("*")] == ["checkpoints", "model.pt"]


def test_an_attention_registered_elsewhere_is_to_be_imported():
    message = "first import the module that registers it, in programs by --import=MOD"
    with (
        pytest.raises(training.CheckpointError, match=message),
        explain_metadata_errors(Path("7")),
    ):
        build("unregistered", "none", dim=8, num_heads=2, num_layers=1)


def test_rows_without_the_best_metric_are_no_candidates(finished, tmp_path):
    folder, _ = finished
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "validation_other": 1.0}\n')
    history = History(best={"accuracy": 1.0}, best_step=3)
    with pytest.warns(UserWarning, match="is the best that is left"):
        lost = replace_lost_best(tmp_path, 15, [history], "images")
    assert [*lost] == [3]
    assert "accuracy" in history.best

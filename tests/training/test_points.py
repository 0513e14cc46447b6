"""A run on sets of points: it learns, sees no shifts, resumes, and predicts points."""

import csv
import io
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from relattn import data as data_lib
from relattn import training
from relattn.evaluation import predict as predict_command
from relattn.evaluation.report import report
from relattn.evaluation.sample import main as sample
from relattn.evaluation.shift_runs import open_shift_runs
from relattn.models import PointTransformer
from relattn.models.pretrained import load_pretrained
from relattn.training.checkpoint import CHECKPOINTS, checkpoint_steps
from relattn.training.config_file import read_config
from relattn.training.predict import predict
from tests.helpers.export import unchecked_annotations
from tests.helpers.interrupted import (
    Interrupted,
    final_state,
    interrupt_at,
    untimed,
    untimed_rows,
)


def make_data():
    """Returns sets of up to five points in space, whose class is their spread."""
    rng = np.random.default_rng(0)
    labels = np.arange(37) % 3
    positions = rng.normal(size=(37, 5, 3)) * (1 + 2 * labels[:, None, None])
    features = rng.normal(size=(37, 5, 2))
    mask = np.arange(5) < 2 + np.arange(37)[:, None] % 4
    split = data_lib.PointSplit.from_arrays(positions, labels, features, mask)
    return data_lib.PointData.from_splits(
        "spreads", split, tuple("abc"), num_validation=11
    )


def make_config():
    """Returns a tiny form of the recipe, with dropout, of nine steps."""
    config = read_config("points:smoke", ["--config.progress=False"])
    config.unlock()
    config.model.update(dim=8, num_layers=2, num_heads=2, mlp_dim=7, dropout=0.2)
    config.update(batch_size=4, eval_batch_size=8, num_steps=9, log_every_steps=2)
    config.update(eval_every_steps=4, checkpoint_every_steps=3)
    config.schedule.warmup_steps = 2
    return config


def train(folder, **options):
    devices = jax.local_devices()[:1]
    return training.train_and_evaluate(
        make_config(), folder, data=make_data(), devices=devices, **options
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Returns the folder and the metrics of a run without a stop."""
    folder = tmp_path_factory.mktemp("points")
    return folder, train(folder)


@pytest.mark.slow
def test_smoke_configuration_learns_digits_at_any_place(tmp_path):
    config = read_config("points:smoke", ["--config.progress=False"])
    data = data_lib.load_data(config.data)
    metrics = training.train_and_evaluate(config, tmp_path, data=data)
    # One in ten by chance.
    assert metrics["test_accuracy"] > 0.5
    # Rounding may change the class of one test set, where two logits are almost equal.
    accuracies = [metrics["test_accuracy"], metrics["test_shifted_accuracy"]]
    np.testing.assert_allclose(*accuracies, rtol=0, atol=1.5e-3)
    predict = training.make_predict_fn(training.load_run(tmp_path))
    plain, shifted = (
        np.asarray(predict(data.eval_splits[name].points[:50]))
        for name in ("test", "test_shifted")
    )
    np.testing.assert_allclose(shifted, plain, rtol=0, atol=1e-4 * abs(plain).max())


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(finished, tmp_path):
    folder, expected = finished
    with pytest.raises(Interrupted):
        train(tmp_path, on_step=interrupt_at(7))
    assert checkpoint_steps(tmp_path / CHECKPOINTS)[-1] == 6
    actual = train(tmp_path)
    jax.tree.map(
        np.testing.assert_array_equal, final_state(tmp_path), final_state(folder)
    )
    assert untimed(actual) == untimed(expected)
    assert untimed_rows(tmp_path) == untimed_rows(folder)


@pytest.mark.slow
def test_a_run_predicts_points_in_every_form(finished, tmp_path, capsys):
    folder, metrics = finished
    run, test = training.load_run(folder), make_data().test
    found = run.predict(test.points)
    accuracy = (found.labels == test.labels).mean()
    np.testing.assert_allclose(accuracy, metrics["test_accuracy"], rtol=1e-6)

    points, exists = test.points[:7], ~np.isnan(test.points[:7, :, 0])
    logits = np.asarray(training.make_predict_fn(run)(points), np.float64)
    expected = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    # Values of padding do not matter.
    filled = np.nan_to_num(points, nan=5.0)
    arrays = {"positions": filled[..., :3], "features": filled[..., 3:], "mask": exists}
    file = tmp_path / "points.npz"
    np.savez(file, **arrays)
    # As many points as the longest.
    sets = [each[mask] for each, mask in zip(points, exists, strict=True)]
    for given in (arrays, file, points, sets):
        found = run.predict(given, batch_size=3)
        np.testing.assert_allclose(found.probabilities, expected, rtol=1e-4, atol=1e-6)
    assert found.class_names == ("a", "b", "c")
    page = report(run, data=make_data())
    assert f"11 test examples, {100 * accuracy:.2f}% of them" in page
    assert page.count("<h2>") == 5 and run.predict([]).probabilities.shape == (0, 3)
    weights = run.attention_weights(arrays)
    assert weights.shape == (7, 2, 5, 5)
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-4)
    assert not weights[np.broadcast_to(~exists[:, None, None], weights.shape)].any()

    predict_command.main([str(folder), str(file), str(file)])
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["file"] for row in rows[5:9]] == [
        f"{file}[{index}]" for index in (5, 6, 0, 1)
    ]
    labels = [int(row["label"]) for row in rows]
    np.testing.assert_array_equal(labels, [*expected.argmax(axis=-1)] * 2)


def test_predictions_of_sets_of_many_sizes_need_few_programs():
    run = SimpleNamespace(
        model=PointTransformer(2, 2),
        data=data_lib.PointInfo("sets", ("a", "b"), (37, 2, 1), 9, ""),
        preprocess=lambda batch: batch["points"],
    )
    lengths = []

    def logits(points):
        lengths.append(points.shape[1])
        assert (~np.isnan(points).any(axis=-1)).sum() == len(lengths)
        return np.zeros((len(points), 2), np.float32)

    sizes = np.arange(1, 101)
    with unchecked_annotations():
        for size in sizes:
            predict(run, logits, [np.ones((size, 3))], 4, progress=False)
    assert (lengths >= sizes).all() and (lengths <= 1.25 * sizes).all()
    # As in an evaluation on the data of training.
    assert lengths[36] == 37 and len({*lengths}) < 25


@pytest.mark.slow
def test_a_saved_run_is_loaded(finished, tmp_path):
    run, points = training.load_run(finished[0]), make_data().test.points
    run.save_pretrained(tmp_path, license="mit")
    card = (tmp_path / "README.md").read_text()
    assert "pipeline_tag" not in card
    assert "float32 [n, points, 5]: the position of 3 axes, then 2 features" in card
    assert "inputs = pretrained.preprocess(points)" in card
    loaded = load_pretrained(tmp_path)
    np.testing.assert_array_equal(loaded.preprocess(points), points)
    plain = np.asarray(training.make_predict_fn(run)(points))
    found = jax.jit(loaded.model.apply)(loaded.variables, points)
    np.testing.assert_allclose(found, plain, rtol=0, atol=1e-5 * abs(plain).max())


@pytest.mark.slow
def test_what_a_run_on_points_cannot_do_is_said(finished, capsys):
    folder, _ = finished
    run = training.load_run(folder)
    with pytest.raises(ValueError, match="trained on points, not on images"):
        run.features(make_data().test.points)
    with pytest.raises(ValueError, match="trained on points, not on text"):
        run.generate("a")
    images = data_lib.ImageData.from_arrays(
        "images",
        np.zeros((9, 4, 4, 1), np.uint8),
        np.arange(9) % 3,
        class_names=tuple("abc"),
        num_validation=3,
    )
    with pytest.raises(ValueError, match="on points, but images has images"):
        run.evaluate(images)
    with pytest.raises(ValueError, match="the model reads 'points' of a batch, which"):
        run.evaluate(images.test)
    # As many columns as in training.
    split = data_lib.PointSplit.from_arrays(
        np.zeros((3, 5, 4)), np.arange(3), np.zeros((3, 5, 1))
    )
    with pytest.raises(ValueError, match="points of 3 axes and 2 channels, but those"):
        run.evaluate(split)
    with pytest.raises(ValueError, match=r"in memory \('spreads'\), .*\.report\("):
        report(run)
    with pytest.raises(ValueError, match="points: only runs on images can be shifted"):
        open_shift_runs([folder])
    with pytest.raises(ValueError, match="image_size=8 needs a run on images, but"):
        training.load_run(folder, image_size=8)
    with pytest.raises(SystemExit):
        sample([f"--workdir={folder}"])
    assert "trained on points, not on text" in capsys.readouterr().err

import json

import jax
import numpy as np
import pytest

from relattn import training
from relattn.command import is_user_error
from relattn.training.checkpoint import read_meta
from relattn.training.metrics import read_rows
from relattn.training.workdir import write_text
from tests.training.conftest import make_data
from tests.training.test_checkpoint import forge

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture
def workdir(config, tmp_path, one_device):
    config.data.standardize = False
    training.train_and_evaluate(config, tmp_path, devices=one_device)
    return tmp_path


def test_predictions_equal_the_evaluation(workdir, config):
    result = training.train_and_evaluate(
        config, workdir, devices=jax.local_devices()[:1]
    )
    run = training.load_run(workdir)
    assert run.step == result["best_step"]
    assert run.config.to_dict() == config.to_dict()
    assert run.data.class_names == ("left", "middle", "right")
    assert run.data.image_shape == (5, 3, 1)
    test = make_data().test
    scores = training.evaluate(run, test, batch_size=8)
    np.testing.assert_allclose(scores["accuracy"], result["test_accuracy"])
    np.testing.assert_allclose(scores["loss"], result["test_loss"], rtol=1e-5)
    assert scores["count"] == len(test)
    predict = training.make_predict_fn(run)
    images = run.preprocess({"image": test.images})
    assert images.shape == (29, 5, 5, 1)
    logits = predict(images)
    assert np.mean(np.argmax(logits, -1) == test.labels) == scores["accuracy"]
    np.testing.assert_array_equal(predict(images), logits)


def test_latest_is_the_last_step(workdir):
    assert training.load_run(workdir, "latest").step == 15
    with pytest.raises(ValueError, match="must be 'best' or 'latest', got 'last'"):
        training.load_run(workdir, "last")


def test_a_directory_without_checkpoint(tmp_path):
    with pytest.raises(training.CheckpointError, match="no complete checkpoint in"):
        training.load_run(tmp_path)
    with pytest.raises(training.CheckpointError, match="no complete checkpoint in"):
        training.load_run(tmp_path / "missing")


def flip_a_bit(workdir, step):
    (path,) = (workdir / "checkpoints" / str(step) / "state" / "d").iterdir()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    return path.name


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_damaged_best_checkpoint_is_not_replaced_by_a_worse_one(
    config, tmp_path, one_device
):
    config.optimizer.learning_rate = 1e-9
    config.redraw_every = 0
    training.train_and_evaluate(config, tmp_path, devices=one_device)
    name = flip_a_bit(tmp_path, 15)
    before = contents(tmp_path)
    replaced = pytest.warns(UserWarning, match=f"{name} is damaged .*/10 is used")
    with replaced:
        assert training.load_run(tmp_path, "latest").step == 10
    with replaced:
        assert training.load_run(tmp_path).step == 5
    assert contents(tmp_path) == before
    rows = read_rows(tmp_path / "metrics.jsonl")
    rows[-1]["validation_accuracy"] = 1.0
    write_text(tmp_path / "metrics.jsonl", "\n".join(map(json.dumps, rows)))
    best = r"15, with the best validation accuracy \(1.0000\), is damaged"
    with replaced, pytest.raises(training.CheckpointError, match=best):
        training.load_run(tmp_path)
    name = flip_a_bit(tmp_path, 5)
    rows[-1]["validation_accuracy"] = 0.0
    write_text(tmp_path / "metrics.jsonl", "\n".join(map(json.dumps, rows)))
    with replaced, pytest.raises(training.CheckpointError, match=f"{name} is damaged"):
        training.load_run(tmp_path)


def test_a_model_that_cannot_be_built_is_reported(workdir):
    folder = workdir / "checkpoints"
    meta = read_meta(folder, 15)
    changes = {
        "unexpected keyword argument 'a'": {"model": {"a": 5}},
        "config.batch_size must be at least 1, got 0": {"batch_size": 0},
        "unknown config.a:": {"a": 5},
    }
    for problem, change in changes.items():
        forge(folder / "15", {**meta, "config": {**meta["config"], **change}})
        with pytest.raises(
            training.CheckpointError,
            match=rf"15 has metadata that this version .* cannot use \(.*{problem}",
        ) as raised:
            training.load_run(workdir, "latest")
        assert is_user_error(raised.value)
        assert len(str(raised.value).splitlines()) == 1


def test_damaged_metrics_give_a_warning(workdir):
    best = training.load_run(workdir).step
    path = workdir / "metrics.jsonl"
    content = path.read_bytes()
    path.write_bytes(b"\xff\n5\n" + content)
    with pytest.warns(UserWarning, match=r"rows that .* are left out \(line 1, 2\)"):
        assert training.load_run(workdir).step == best
    assert path.read_bytes() == b"\xff\n5\n" + content


def test_an_empty_split(workdir):
    run = training.load_run(workdir)
    with pytest.raises(ValueError, match="the split is empty"):
        training.evaluate(run, make_data(num_test=0).test, batch_size=8)

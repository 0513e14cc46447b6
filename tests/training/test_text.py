"""Training on text: the next token's loss, perplexity, and the best loss."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import data as data_lib
from relattn import training
from relattn.training.checkpoint import CHECKPOINTS, checkpoint_steps
from relattn.training.evaluator import Evaluator
from relattn.training.metrics_log import read_rows
from tests.helpers.interrupted import train_until
from tests.training.conftest import TinyText


def test_a_run_on_text_leaves_its_perplexity(text_config, tmp_path, one_device, capsys):
    text_config.num_epochs = 5
    text_config.progress = True
    result = training.train_and_evaluate(text_config, tmp_path, devices=one_device)
    assert result["validation_loss"] < 0.8 * math.log(13)
    said = capsys.readouterr().out
    for split in ("validation", "test"):
        loss = result[f"{split}_loss"]
        assert result[f"{split}_perplexity"] == pytest.approx(math.exp(loss))
        assert f"{split} loss {loss:.4f}" in said
    # One split has two names.
    assert result["test_loss"] == result["validation_loss"]
    evaluated = [
        row for row in read_rows(tmp_path / "metrics.jsonl") if "validation_loss" in row
    ]
    best = min(evaluated, key=lambda row: row["validation_loss"])
    assert result["best_step"] == best["step"]
    assert best["validation_perplexity"] == result["validation_perplexity"]
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["data"]["kind"] == "tokens"
    assert record["data"]["vocab_size"] == 13


@pytest.mark.usefixtures("text_config")
def test_every_token_counts_once(finished_text):
    run = training.load_run(finished_text)
    source = TinyText()
    split = source.eval_splits["validation"]
    scores = [
        training.evaluate(run, split, size, devices=jax.local_devices()[:count])
        for size, count in ((23, 1), (8, 4), (5, 1))
    ]
    (batch,) = split.batches(23)
    logits = training.make_predict_fn(run)(jnp.asarray(run.preprocess(batch)))
    logits = np.asarray(logits, np.float64)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    losses = -np.take_along_axis(logs, batch["label"][..., None], -1)[..., 0]
    for score in scores:
        assert score["count"] == 22 * 7 + 3
        expected = (losses * batch["weight"]).sum() / score["count"]
        np.testing.assert_allclose(score["loss"], expected, rtol=1e-5)
        np.testing.assert_allclose(score["perplexity"], math.exp(expected), rtol=1e-5)
    assert run.data == source.info


@pytest.mark.usefixtures("text_config")
def test_image_size_of_a_text_is_refused(finished_text):
    with pytest.raises(ValueError, match="image_size=8 needs a run on images, but"):
        training.load_run(finished_text, image_size=8)


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(text_config, tmp_path, one_device):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    training.train_and_evaluate(text_config, whole, devices=one_device)
    train_until(11, text_config, parts, devices=one_device)
    training.train_and_evaluate(text_config, parts, devices=one_device)
    runs = [training.load_run(folder, "latest") for folder in (whole, parts)]
    jax.tree.map(np.testing.assert_array_equal, runs[0].variables, runs[1].variables)


def test_the_checkpoint_with_the_lowest_loss_is_kept(
    text_config, tmp_path, one_device, monkeypatch
):
    losses = iter([3.0, 1.0, 2.0, 4.0, 5.0])

    def scripted(self, variables, split, batch_size, *, key):
        loss = next(losses)
        return [{"loss": loss, "accuracy": loss / 10, "count": 1.0}]

    monkeypatch.setattr(Evaluator, "__call__", scripted)
    text_config.num_epochs = 5
    result = training.train_and_evaluate(text_config, tmp_path, devices=one_device)
    assert result["best_step"] == training.load_run(tmp_path).step == 10
    assert (result["validation_loss"], result["test_accuracy"]) == (1.0, 0.1)
    assert checkpoint_steps(tmp_path / CHECKPOINTS) == [10, 20, 25]


@pytest.mark.parametrize(
    "source, found",
    [
        (TinyText(vocab_size=17), "the 17 tokens of 'doubling'"),
        (TinyText(tokenizer="bytes"), "the 13 tokens of 'bytes'"),
    ],
)
def test_another_vocabulary_is_refused(
    text_config, finished_text, one_device, monkeypatch, source, found
):
    message = (
        rf"predicts the 13 tokens of 'doubling', but doublings has {found}: use the "
        "data that it was trained on"
    )
    run = training.load_run(finished_text)
    split = source.eval_splits["test"]
    with pytest.raises(training.CheckpointError, match=message):
        training.evaluate(run, split, 8, one_device, info=source.info)
    monkeypatch.setattr(data_lib, "load_data", lambda config: source)
    with pytest.raises(training.CheckpointError, match=rf"checkpoints/15 {message}"):
        training.train_and_evaluate(text_config, finished_text, devices=one_device)

"""Text generation with the model of a run."""

import dataclasses
import importlib

import jax
import numpy as np
import pytest

from relattn import training
from relattn.evaluation import sample as sample_lib


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    text = np.frombuffer(b"To be, or not to be, that is the question. " * 3, np.uint8)
    folder = tmp_path_factory.mktemp("text")
    for name in ("train.bin", "val.bin"):
        text.astype(np.uint16).tofile(folder / name)
    get_config = importlib.import_module("configs.translution_gpt").get_config
    config = get_config("smoke,self_attention")
    with config.unlocked():
        config.num_steps = 3
        config.progress = False
        config.model.update(dim=6, num_heads=2, num_layers=1, mlp_dim=7)
        config.data.update(data_dir=str(folder), name="", context_length=13)
        config.eval_batch_size = 16
    folder = tmp_path_factory.mktemp("run")
    training.train_and_evaluate(config, folder, devices=jax.local_devices()[:1])
    return folder


def test_sample_fills_the_context_and_depends_on_the_seed(workdir):
    texts = sample_lib.sample(workdir, "ROMEO:", num_samples=2, top_k=5)
    assert len(texts) == 2 and texts[0] != texts[1]
    assert all(text.startswith("ROMEO:") for text in texts)
    assert texts == sample_lib.sample(workdir, "ROMEO:", num_samples=2, top_k=5)
    assert texts != sample_lib.sample(
        workdir, "ROMEO:", num_samples=2, top_k=5, seed=1, checkpoint="latest"
    )


def test_command_prints_the_text(workdir, capsys):
    arguments = ["--prompt=To be", "--num_tokens=3", "--temperature=0"]
    sample_lib.main([f"--workdir={workdir}", *arguments])
    printed = capsys.readouterr().out
    assert printed.startswith("To be")
    assert printed.rstrip("\n") == sample_lib.sample(
        workdir, "To be", num_tokens=3, temperature=0.0
    )[0].rstrip("\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt=To be, or not"], "longer than config.model.context_length="),
        (["--prompt="], "needs a prompt of at least one token"),
        (["--top_k=-1"], "top_k must be from 0 (all) to 256"),
        (["--top_k=257"], "top_k must be from 0 (all) to 256"),
        (["--temperature=nan"], "temperature must be 0 or a positive number, got nan"),
        (["--temperature=inf"], "temperature must be 0 or a positive number, got inf"),
        (["--checkpoint=last"], "checkpoint must be 'best' or 'latest'"),
    ],
)
def test_invalid_input_fails_with_one_sentence(workdir, capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        sample_lib.main([f"--workdir={workdir}", *arguments])
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error
    assert len(error.splitlines()) == 1


def test_other_vocabulary_or_data_is_rejected(workdir, monkeypatch):
    def load(change):
        run = training.load_run(workdir)
        info = dataclasses.replace(run.data, **change)
        return lambda *_: dataclasses.replace(run, data=info)

    monkeypatch.setattr(sample_lib, "load_run", load({"vocab_size": 300}))
    message = "vocabulary of 300 tokens, but the tokenizer 'bytes' has 256"
    with pytest.raises(ValueError, match=message):
        sample_lib.sample(workdir, "To be")
    monkeypatch.setattr(sample_lib, "load_run", load({"kind": "images"}))
    with pytest.raises(ValueError, match="was trained on images, not on text"):
        sample_lib.sample(workdir, "To be")

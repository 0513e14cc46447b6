"""Text generation with the model of a run."""

import dataclasses
import importlib
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import models, training
from relattn.data import ImageInfo
from relattn.data.tokenizers import FILE_PREFIX, ByteTokenizer
from relattn.evaluation import perplexity
from relattn.evaluation import sample as sample_lib
from relattn.evaluation.report import report
from relattn.manifest import tokenizer_name
from relattn.models.pretrained import abstract, build, save_pretrained
from relattn.training import predict, saved_run
from tests.helpers.export import unchecked_annotations


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
        config.data.update(
            data_dir=str(folder), name="", tokenizer="bytes", context_length=13
        )
        config.eval_batch_size = 16
    folder = tmp_path_factory.mktemp("run")
    training.train_and_evaluate(config, folder, devices=jax.local_devices()[:1])
    return folder


def test_texts_fill_the_context_and_depend_on_the_seed(workdir):
    run = training.load_run(workdir)
    texts = run.generate(["ROMEO:"] * 2, top_k=5)
    assert len(texts) == 2 and texts[0] != texts[1]
    assert all(text.startswith("ROMEO:") for text in texts)
    assert texts == run.generate(["ROMEO:"] * 2, top_k=5)
    assert texts != run.generate(["ROMEO:"] * 2, top_k=5, seed=1)


def test_prompts_of_different_lengths_and_past_the_context(workdir):
    run = training.load_run(workdir)
    prompts = ["To be, or not to be", "To"]
    texts = run.generate(prompts, num_tokens=17, temperature=0.0)
    assert texts[1] == run.generate("To", num_tokens=17, temperature=0.0)
    for text, prompt in zip(texts, prompts, strict=True):
        assert text.startswith(prompt) and len(text) > len(prompt)


def test_a_text_fills_the_context_beside_a_longer_one(workdir):
    run = training.load_run(workdir)
    # One prompt is longer than the context, one is as long.
    for other in ("To be, or not to be", "To be, or not"):
        prompts = [other, "To"]
        texts = run.generate(prompts, temperature=0.0)
        assert texts == [run.generate(prompt, temperature=0.0) for prompt in prompts]


def test_a_stop_text_ends_the_continuation(workdir):
    run = training.load_run(workdir)
    options = {"num_tokens": 37, "top_k": 5}
    texts = run.generate(["To be"] * 2, **options)
    stop = next(character for character in texts[0][7:] if character.isascii())
    cut = run.generate(["To be"] * 2, stop=stop, **options)
    assert cut == ["To be" + text[5:].partition(stop)[0] for text in texts]
    with pytest.raises(ValueError, match="stop='end' is 3 tokens .*: pass a text of"):
        run.generate("To be", stop="end")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (7, "^expected a text, a str, got 7$"),
        ("a\ud83d", r"^the text 'a\\ud83d' has half of a surrogate pair: leave it out"),
    ],
)
def test_what_is_no_text_is_refused(workdir, text, message):
    run = training.load_run(workdir)
    for call in (
        lambda: run.generate(text),
        lambda: run.generate(["To be", text]),
        lambda: run.generate("To be", stop=text),
        lambda: run.attention_weights(text),
    ):
        with unchecked_annotations(), pytest.raises(ValueError, match=message):
            call()


def test_command_prints_the_text(workdir, capsys):
    arguments = ["--prompt=To be", "--num_tokens=19", "--temperature=0"]
    sample_lib.main([f"--workdir={workdir}", *arguments])
    printed = capsys.readouterr().out
    assert printed.startswith("To be")
    run = training.load_run(workdir)
    text = run.generate("To be", num_tokens=19, temperature=0.0)
    assert printed.rstrip("\n") == text.rstrip("\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--top_p=0"], "top_p must be above 0 and at most 1 (all), got 0.0"),
        ([f"--seed={10**30}"], "seed must be from 0 to"),
        (["--prompt="], "needs a prompt of at least one token"),
        (["--top_k=-1"], "top_k must be from 0 (all) to 256"),
        (
            ["--bos"],
            "bos is for a tokenizer.json of Hugging Face, but the tok",
        ),
        (["--top_k=257"], "top_k must be from 0 (all) to 256"),
        (["--temperature=nan"], "--temperature: must be a finite number, got 'nan'"),
        (["--temperature=inf"], "--temperature: must be a finite number, got 'inf'"),
        (["--checkpoint=last"], "unknown checkpoint 'last': did you mean 'latest'"),
    ],
)
def test_invalid_input_fails_with_one_sentence(workdir, capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        sample_lib.main([f"--workdir={workdir}", *arguments])
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error
    assert len(error.splitlines()) == 1


def test_other_vocabulary_or_data_is_rejected(workdir):
    run = training.load_run(workdir)

    def changed(**change):
        info = dataclasses.replace(run.data, **change)
        return dataclasses.replace(run, data=info)

    message = "vocabulary of 300 tokens, but the tokenizer 'bytes' has 256"
    with pytest.raises(ValueError, match=message):
        changed(vocab_size=300).generate("To be")
    images = ImageInfo("mnist", ("a", "b"), (7, 7, 1), (0.5,), (0.3,), 5, "a test")
    with pytest.raises(ValueError, match="was trained on images, not on text"):
        dataclasses.replace(run, data=images).generate("To be")
    with pytest.raises(ValueError, match="was trained on text, not on images"):
        run.predict("image.png")


def test_attention_weights_of_a_text(workdir):
    run = training.load_run(workdir)
    weights = run.attention_weights("To be", layer=0)
    assert weights.shape == (1, 2, 5, 5)
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-5)
    assert not np.triu(weights, 1).any()
    for layer in (1, "0", 0.5):
        message = f"layer={layer!r}: the model has layers 0 to 0, or -1"
        with unchecked_annotations(), pytest.raises(ValueError, match=message):
            run.attention_weights("To be", layer=layer)


def save(workdir, folder, name):
    """Saves the model of the run as a converted one, with a tokenizer's name."""
    run = training.load_run(workdir)
    config = run.pretrained_config()
    config = {key: config[key] for key in ("model", "vocab_size", "context_length")}
    save_pretrained(folder, {**config, **name}, run.variables)
    return run


@pytest.mark.slow
def test_a_saved_model_draws_no_row_that_pads_its_vocabulary(tmp_path):
    model = {"name": "gpt", "dim": 4, "num_heads": 2, "num_layers": 1, "mlp_dim": 4}
    config = {"model": model, "vocab_size": 263, "context_length": 7}
    config["tokenizer"] = "bytes"
    like = abstract(build(config), config)
    variables = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), like)
    # The logits are largest for the rows of no byte.
    variables["params"]["head"]["kernel"][:, :256] = 0
    save_pretrained(tmp_path, config, variables)
    run = saved_run.load_text_run(tmp_path)
    assert run.generate("a", num_tokens=2, temperature=0.0) == "a\0\0"


@pytest.mark.slow
def test_a_saved_model_continues_text(workdir, tmp_path, capsys):
    run = save(workdir, tmp_path, {"tokenizer": "bytes"})
    options = ["--prompt=To be", "--num_tokens=19", "--temperature=0"]
    sample_lib.main([f"--workdir={tmp_path}", *options])
    text = run.generate("To be", num_tokens=19, temperature=0.0)
    assert capsys.readouterr().out.rstrip("\n") == text.rstrip("\n")


def test_a_text_begins_with_the_tokens_that_its_tokenizer_puts_before_it(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE({"<s>": 0, "a": 1, "b": 2}, [], unk_token="<s>")
    )
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    content = (tmp_path / "tokenizer.json").read_bytes()
    model = {"name": "gpt", "dim": 4, "num_heads": 2, "num_layers": 1, "mlp_dim": 4}
    config = {"model": model, "vocab_size": 3, "context_length": 7}
    config["tokenizer"] = tokenizer_name(content)
    module = build(config)
    variables = module.init(jax.random.key(3), jnp.zeros((1, 7), jnp.int32))
    variables = jax.tree.map(lambda x: 9 * np.asarray(x), variables)
    save_pretrained(tmp_path, config, variables, tokenizer=content)
    run = saved_run.load_text_run(tmp_path)
    prompts = ["ab", "b", ""]
    texts = run.generate(prompts, num_tokens=4, temperature=0.0, bos=True, stop="b")
    expected = models.generate(
        module,
        variables,
        [[0, 1, 2], [0, 2], [0]],
        4,
        key=jax.random.key(0),
        temperature=0.0,
        stop_token=2,
    )
    for text, prompt, row in zip(texts, prompts, expected, strict=True):
        drawn = np.asarray(row)[1 + len(prompt) :][:4].tolist()
        drawn = drawn[: drawn.index(2)] if 2 in drawn else drawn
        assert text == prompt + "".join(["<s>", "a"][token] for token in drawn)
    plain = run.generate(prompts[:2], num_tokens=4, temperature=0.0, stop="b")
    assert plain != texts[:2]


def test_few_windows_of_a_large_vocabulary_make_a_batch(workdir, tmp_path, monkeypatch):
    """A batch of GPT-2's 1,024 tokens would have 13 GB of logits for 64 windows."""
    of_run = {"seed": 7, "eval_draws": 3}
    save(workdir, tmp_path, {"tokenizer": "bytes", "training": {"data": {}, **of_run}})
    run = saved_run.load_text_run(tmp_path)
    assert (run.config.seed, run.config.eval_draws) == (7, 3)
    assert run.config.eval_batch_size == 256
    window = run.config.data.context_length * 256
    monkeypatch.setattr(saved_run, "MAX_LOGITS", 3 * window + 1)
    assert saved_run.load_text_run(tmp_path).config.eval_batch_size == 3
    monkeypatch.setattr(saved_run, "MAX_LOGITS", window - 1)
    assert saved_run.load_text_run(tmp_path).config.eval_batch_size == 1


def test_a_saved_model_without_a_tokenizer_is_refused(workdir, tmp_path, capsys):
    save(workdir, tmp_path, {})
    with pytest.raises(SystemExit, match="2"):
        sample_lib.main([f"--workdir={tmp_path}"])
    message = "error: config.json does not name the tokenizer of the model"
    assert capsys.readouterr().err.startswith(message)


def test_a_report_has_a_sample(workdir, monkeypatch):
    run = training.load_run(workdir)
    page = report(run)
    assert "<h2>A sample</h2>" in page and "<h2>Confusion matrix</h2>" not in page
    # The tokenizer of a file is found by its checksum, unless the file is gone.
    info = dataclasses.replace(run.data, tokenizer=f"{FILE_PREFIX}0123")
    run, found = dataclasses.replace(run, data=info), ByteTokenizer()
    monkeypatch.setattr(predict, "find_tokenizer", lambda *_: found)
    assert "None" not in report(run).partition("<h2>A sample</h2>")[2][:20]
    monkeypatch.undo()
    assert "<pre>None: " in report(run)


@pytest.mark.slow
def test_perplexity_of_a_text_file(workdir, tmp_path, capsys):
    run = training.load_run(workdir)
    text = "To be, or nöt to be, that is the question."
    path = tmp_path / "a.txt"
    path.write_text(text, "utf-8-sig")
    found = run.evaluate(path)
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    predict, nats = training.make_predict_fn(run), 0.0
    for start in range(0, len(tokens) - 1, 13):
        window = tokens[start : start + 14]
        logits = predict(jnp.asarray(window[None, :-1]))
        scores = jax.nn.log_softmax(logits)[0]
        nats -= float(scores[np.arange(len(window) - 1), window[1:]].sum())
    assert found["count"] == len(tokens) - 1
    np.testing.assert_allclose(found["loss"], nats / found["count"], rtol=1e-5)
    bits = nats / found["count"] / np.log(2)
    np.testing.assert_allclose(found["bits_per_token"], bits, rtol=1e-5)
    # A token is a byte.
    assert found["bits_per_byte"] == pytest.approx(found["bits_per_token"])
    save(workdir, tmp_path, {"tokenizer": "bytes"})
    for folder in (workdir, tmp_path):
        perplexity.main([f"--workdir={folder}", f"--input={path}"])
        printed = capsys.readouterr().out
        assert f"{bits:.4f} bits per byte, on {len(tokens) - 1} tokens" in printed


@pytest.mark.parametrize("length, window", [(2, 1), (5, 4), (6, 8), (14, 13), (29, 13)])
def test_a_short_text_has_a_short_window(workdir, tmp_path, length, window):
    """Attention to a context of 131,072 tokens would take minutes."""
    path = tmp_path / "a.txt"
    path.write_text("a" * length)
    split, _ = predict.read_text_split(training.load_run(workdir), path)
    assert split.context_length == window
    weights = [batch["weight"].sum() for batch in split.batches(1)]
    assert sum(weights) == length - 1


@pytest.mark.parametrize("length", [7, 29])
def test_another_context_length(workdir, tmp_path, capsys, length):
    path = tmp_path / "a.txt"
    path.write_text("To be, or not to be, that is the question. " * 2)
    run = training.load_run(workdir)
    save(workdir, tmp_path, {"tokenizer": "bytes"})
    for folder in (workdir, tmp_path):
        loaded = saved_run.load_text_run(folder, context_length=length)
        assert loaded.model.context_length == length
        found = loaded.evaluate(path)["bits_per_token"]
        option = f"--context_length={length}"
        perplexity.main([f"--workdir={folder}", f"--input={path}", option])
        printed = capsys.readouterr().out
        assert f"{found:.4f} bits per token" in printed
        assert printed.endswith(f"from those before it in its window of {length}\n")
    if length < 13:
        # The first tokens of a window see the same as before.
        tokens = np.arange(length)[None]
        shorter = training.make_predict_fn(loaded)(tokens)
        expected = training.make_predict_fn(run)(tokens)
        np.testing.assert_allclose(shorter, expected, rtol=1e-5)
    else:
        # As many tokens in a batch of the run.
        assert training.load_run(workdir, context_length=29).config.eval_batch_size == 7
    sample_lib.main([f"--workdir={folder}", "--prompt=To", "--top_k=1", option])
    text = loaded.generate("To", top_k=1)
    assert capsys.readouterr().out.rstrip("\n") == text.rstrip("\n")
    with pytest.raises(ValueError, match="context_length must be at least 1, got 0"):
        saved_run.load_text_run(folder, context_length=0)


def test_a_space_that_a_tokenizer_puts_before_a_text_is_no_byte_of_it(
    workdir, tmp_path, monkeypatch
):
    words = SimpleNamespace(
        name="words",
        vocab_size=256,
        encode=lambda text: np.arange(1 + text.strip().count(" "), dtype=np.uint16),
        decode=lambda tokens: "".join([" to", " be"][i] for i in tokens),
    )
    monkeypatch.setattr(predict, "read_tokenizer", lambda *arguments: words)
    run = training.load_run(workdir)
    for text in ("to be", " to be"):
        (tmp_path / "a.txt").write_text(text)
        assert predict.read_text_split(run, tmp_path / "a.txt")[1] == len(" be")


def test_an_unknown_word_longer_than_the_text(workdir, tmp_path, monkeypatch):
    words = SimpleNamespace(
        name="words",
        vocab_size=256,
        encode=lambda text: np.array([7, 7], np.uint16),
        decode=lambda tokens: "[UNKNOWN]" * len(tokens),
    )
    monkeypatch.setattr(predict, "read_tokenizer", lambda *arguments: words)
    (tmp_path / "a.txt").write_text("a b")
    found = training.load_run(workdir).evaluate(tmp_path / "a.txt")
    assert found["bits_per_byte"] == found["bits_per_token"] > 0


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"a", "has 1 tokens: pass at least 2"), (b"to\xff", "not UTF-8 .* at byte 2")],
)
def test_a_text_file_that_cannot_be_evaluated(workdir, tmp_path, content, message):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    run = training.load_run(workdir)
    with pytest.raises(ValueError, match=message):
        run.evaluate(path)
    with pytest.raises(FileNotFoundError, match="the text file .* is missing"):
        run.evaluate(tmp_path / "b.txt")
    with pytest.raises(IsADirectoryError, match="is a folder: pass its text files$"):
        run.evaluate(tmp_path)
    with pytest.raises(ValueError, match=r"b.JSONL is JSON, .* count as text: write "):
        run.evaluate(path.rename(tmp_path / "b.JSONL"))


@pytest.mark.parametrize("terminal, shown", [(True, "\\x1b[2J\n\tä\n"), (False, "")])
def test_a_terminal_obeys_no_text(monkeypatch, capsys, terminal, shown):
    text = "\x1b[2J\n\tä"
    run = SimpleNamespace(generate=lambda *prompts, **options: [text])
    monkeypatch.setattr(sample_lib, "load_text_run", lambda *arguments: run)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    sample_lib.main(["--workdir=x"])
    assert capsys.readouterr().out == (shown or f"{text}\n")

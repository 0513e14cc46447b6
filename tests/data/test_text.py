"""Text data: random training windows, evaluation windows, token files."""

import itertools
import json
import os

import numpy as np
import pytest
from ml_collections import ConfigDict

from relattn.data import DatasetNotPreparedError, load_data, text
from relattn.data import text as text_lib
from relattn.data.base import DataSource, EvalSplit
from relattn.data.text import (
    TokenMeta,
    TokenSplit,
    check_range,
    embedded_text,
    load_text,
    open_tokens,
    read_meta,
    write_meta,
    write_tokens,
)
from relattn.data.tokenizers import load_tokenizer
from tests.helpers.shards import check_shards_equal_batches

META = TokenMeta("bytes", 256)
LENGTH = 7


def random_tokens(n, vocab_size=256):
    return np.random.default_rng(n).integers(0, vocab_size, n).astype(np.uint16)


def make_split(n, length=LENGTH):
    return TokenSplit(random_tokens(n), length, META, "The text")


def make_config(folder, **keys):
    keys = {"context_length": LENGTH, **keys}
    return ConfigDict({"source": "text", "data_dir": str(folder), **keys})


@pytest.fixture
def folder(tmp_path):
    for name, n in (("train.bin", 101), ("val.bin", 23)):
        write_tokens(tmp_path / name, [random_tokens(n)], 256)
    counts = {"train.bin": 101, "val.bin": 23}
    write_meta(tmp_path, TokenMeta("bytes", 256, counts, "the text of a.txt"))
    return tmp_path


def test_folder_of_token_files_is_loaded(folder):
    data = load_data(make_config(folder))
    assert isinstance(data, DataSource)
    assert all(isinstance(split, EvalSplit) for split in data.eval_splits.values())
    assert list(data.eval_splits) == ["validation", "test"]
    assert data.test is data.validation
    info = data.info
    assert (info.kind, info.tokenizer, info.vocab_size) == ("tokens", "bytes", 256)
    assert (info.name, info.context_length) == (folder.name, LENGTH)
    assert info.num_train == 101 // LENGTH
    assert info.steps_per_epoch(5) == 2
    assert info.origin == f"the text of a.txt in {folder}"
    np.testing.assert_array_equal(data.train.tokens, random_tokens(101))


def test_test_file_is_used(folder):
    write_tokens(folder / "test.bin", [random_tokens(29)], 256)
    data = load_text(make_config(folder, name="numbers", windows_per_epoch=1000))
    np.testing.assert_array_equal(data.test.tokens, random_tokens(29))
    assert (data.info.name, data.info.num_train) == ("numbers", 1000)
    # Not the text that ships with the package.
    data = load_text(make_config(folder, name="tinyshakespeare"))
    assert data.info.name == folder.name


def test_nanogpt_files_are_loaded(folder):
    (folder / "meta.json").unlink()
    data = load_text(make_config(folder, tokenizer="gpt2"))
    assert (data.info.tokenizer, data.info.vocab_size) == ("gpt2", 50257)
    assert data.info.origin == f"the tokens in {folder}"


@pytest.mark.parametrize("n", [LENGTH + 1, LENGTH + 2, 101])
def test_windows_are_drawn_from_all_positions(n):
    split = make_split(n)
    starts = set()
    for step in range(40):
        batch = split.draw(5, seed=3, step=step)
        assert batch["tokens"].dtype == batch["label"].dtype == np.int32
        assert batch["tokens"].shape == batch["label"].shape == (5, LENGTH)
        assert batch["tokens"].flags.c_contiguous
        np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["label"][:, :-1])
        windows = np.lib.stride_tricks.sliding_window_view(split.tokens, LENGTH + 1)
        for row in np.concatenate([batch["tokens"], batch["label"][:, -1:]], axis=1):
            (start,) = np.flatnonzero((windows == row).all(axis=1))
            starts.add(int(start))
    # Nearly all positions: 200 draws from 94 miss about 11.
    assert starts <= set(range(n - LENGTH))
    assert len(starts) >= 0.75 * (n - LENGTH)


def test_windows_are_a_pure_function_of_seed_and_step():
    split = make_split(101)
    forwards = [split.draw(5, 3, step)["label"].tolist() for step in range(6)]
    backwards = [split.draw(5, 3, step)["label"].tolist() for step in range(5, -1, -1)]
    assert forwards == backwards[::-1]
    assert split.draw(5, 4, 0)["label"].tolist() != forwards[0]
    assert len({str(window) for window in forwards}) == 6


def test_draws_are_stable_across_versions():
    split = TokenSplit(np.arange(251, dtype=np.uint16), 7, META, "Numbers")
    assert split.draw(5, 0, 0)["tokens"][:, 0].tolist() == [207, 155, 124, 65, 75]


def test_loader_starts_at_any_step(folder):
    data = load_text(make_config(folder))
    with data.train_loader(5, seed=1, start_step=3) as loader:
        for expected, (step, batch) in enumerate(itertools.islice(loader, 3), 3):
            assert step == expected
            wanted = data.train.draw(5, 1, step)
            np.testing.assert_array_equal(batch["tokens"], wanted["tokens"])
    with data.train_loader(5, 1, place=lambda batch: batch["label"].sum()) as loader:
        assert next(loader) == (0, data.train.draw(5, 1, 0)["label"].sum())


def test_epoch_smaller_than_a_batch_raises(folder):
    data = load_text(make_config(folder, windows_per_epoch=3))
    with pytest.raises(ValueError, match="batch_size=5 must be from 1 to 3,.*windows"):
        data.train_loader(5, seed=0)


@pytest.mark.parametrize("batch_size", [1, 3, 50])
@pytest.mark.parametrize("n", [8, 9, 15, 23, 101])
def test_evaluation_predicts_every_token_once(n, batch_size):
    split = make_split(n)
    batches = list(split.batches(batch_size))
    assert all(a.shape == (batch_size, LENGTH) for b in batches for a in b.values())
    assert len(batches) == -(-len(split) // batch_size)
    inputs, labels = [], []
    for batch in batches:
        assert batch["weight"].dtype == np.float32
        real = batch["weight"] == 1
        for name, found in (("tokens", inputs), ("label", labels)):
            assert batch[name].dtype == np.int32
            assert not batch[name][~real].any()
            found.append(batch[name][real])
    np.testing.assert_array_equal(np.concatenate(inputs), split.tokens[:-1])
    np.testing.assert_array_equal(np.concatenate(labels), split.tokens[1:])


def test_eval_batch_size_of_0_raises():
    with pytest.raises(ValueError, match="integer of at least 1, got 0"):
        next(make_split(23).batches(0))


def test_embedded_text_is_loaded():
    data = load_text(ConfigDict({"context_length": 64}))
    assert data.info.name == "tinyshakespeare"
    assert data.info.origin == (
        "the text tinyshakespeare that ships with relattn (1,115,394 characters)"
    )
    # nanoGPT's split of its character-level text.
    sizes = [len(split.tokens) for split in (data.train, data.validation)]
    assert sizes == [1003854, 111540]
    assert data.info.num_train == 1003854 // 64
    tokens = np.concatenate([data.train.tokens, data.validation.tokens])
    assert load_tokenizer("bytes").decode(tokens) == embedded_text()
    assert "public domain" in (
        (text.EMBEDDED_FOLDER / "README.md").read_text("utf-8").lower()
    )


def test_embedded_text_is_small():
    path = text.EMBEDDED_FOLDER / "tinyshakespeare" / "tinyshakespeare.txt.xz"
    assert os.path.getsize(path) < 400_000


def test_unknown_embedded_text_raises():
    message = (
        "^unknown data.name 'tinyshakspeare' with an empty data.data_dir: did you mean "
        "'tinyshakespeare'. Available: tinyshakespeare$"
    )
    with pytest.raises(ValueError, match=message):
        load_text(make_config("", name="tinyshakspeare"))


def test_openwebtext_without_folder_raises():
    message = (
        "^data.data_dir is empty: set it to the folder .*'relattn.openwebtext.'.*"
        "`relattn prepare-text --openwebtext --output=DIR` write once"
    )
    with pytest.raises(DatasetNotPreparedError, match=message):
        load_text(make_config("", name="openwebtext"))


@pytest.mark.parametrize("length", [None, 0, 64.0, "64"])
def test_missing_context_length_raises(length):
    keys = {} if length is None else {"context_length": length}
    message = f"^data.context_length={length or 0!r} must be an integer of at least 1"
    with pytest.raises(ValueError, match=message):
        load_text(ConfigDict(keys))


def test_negative_windows_per_epoch_raises(folder):
    with pytest.raises(ValueError, match="^data.windows_per_epoch=-1 must be an "):
        load_text(make_config(folder, windows_per_epoch=-1))


def test_text_shorter_than_a_window_raises(folder):
    message = r"val\.bin holds 23 tokens, but a window of data\.context_length=23 and"
    with pytest.raises(ValueError, match=message):
        load_text(make_config(folder, context_length=23))
    message = "^the validation text of tinyshakespeare holds 111540 tokens, but a windo"
    with pytest.raises(ValueError, match=message):
        load_text(make_config("", context_length=200_000))


def test_missing_folder_raises(tmp_path):
    message = r"^the folder data\.data_dir=.*plays is missing: set its path if it"
    with pytest.raises(FileNotFoundError, match=message):
        load_text(make_config(tmp_path / "plays"))


def test_missing_val_file_raises(folder):
    (folder / "val.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"val\.bin is missing: write it with"):
        load_text(make_config(folder))


def test_empty_train_file_raises(folder):
    (folder / "train.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"train\.bin is empty: prepare the text"):
        load_text(make_config(folder))


def test_odd_sized_train_file_raises(folder):
    (folder / "train.bin").write_bytes(bytes(23))
    with pytest.raises(ValueError, match=r"train\.bin has 23 bytes, not a multiple"):
        load_text(make_config(folder))


def test_tokenizer_other_than_meta_raises(folder):
    message = r"^data\.tokenizer='gpt2', but .*meta\.json says 'bytes'"
    with pytest.raises(ValueError, match=message):
        load_text(make_config(folder, tokenizer="gpt2"))


def test_id_out_of_range_in_large_file_raises_when_read(folder, monkeypatch):
    tokens = random_tokens(101)
    tokens[:] = 300
    write_tokens(folder / "train.bin", [tokens], 256)
    message = r"train\.bin holds the token id 300 at position 0, out of range"
    with pytest.raises(ValueError, match=message):
        load_text(make_config(folder))
    monkeypatch.setattr(text_lib, "CHECKED_TOKENS", 23)
    data = load_text(make_config(folder))
    first = np.random.default_rng([0, 0]).integers(101 - LENGTH, size=5)[0]
    message = rf"train\.bin holds the token id 300 at position {first}, out of range"
    with (
        data.train_loader(5, seed=0) as loader,
        pytest.raises(ValueError, match=message),
    ):
        next(loader)


def test_file_truncated_while_read_raises(folder):
    data = load_text(make_config(folder))
    path = folder / "train.bin"
    os.truncate(path, 99 * 2)
    with pytest.raises(ValueError, match=r"train\.bin was truncated from 101 .* to 99"):
        data.train.draw(batch_size=2, seed=0, step=0)
    path.unlink()
    data.train.draw(batch_size=2, seed=0, step=0)
    os.truncate(folder / "val.bin", 0)
    with pytest.raises(ValueError, match=r"val\.bin was truncated"):
        next(data.validation.batches(2))


def test_the_shards_of_processes_equal_the_batch(folder):
    data = load_text(make_config(folder))
    check_shards_equal_batches(data, batch_size=6, num_shards=3)


BYTES = TokenMeta("bytes", 256)
GOOD = {"tokenizer": "bytes", "vocab_size": 256}
TOKENS = np.random.default_rng(0).integers(0, 256, 23).astype(np.uint16)


def test_tokens_written_in_pieces_are_mapped(tmp_path):
    path = tmp_path / "train.bin"
    pieces = [TOKENS[:5], TOKENS[5:5], TOKENS[5:]]
    assert write_tokens(path, pieces, 256) == 23
    # nanoGPT's layout: little-endian 16-bit integers only.
    assert path.read_bytes() == TOKENS.astype("<u2").tobytes()
    tokens = open_tokens(path, BYTES, min_tokens=23)
    assert isinstance(tokens, np.memmap) and not tokens.flags.writeable
    np.testing.assert_array_equal(tokens, TOKENS)


def test_large_vocabularies_take_four_bytes_a_token(tmp_path):
    tokens = np.array([65_536, 7, 128_255], np.uint32)
    path = tmp_path / "train.bin"
    write_tokens(path, [tokens], 128_256)
    assert path.read_bytes() == tokens.astype("<u4").tobytes()
    meta = TokenMeta("hf:7", 128_256)
    np.testing.assert_array_equal(open_tokens(path, meta), tokens)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match="has 10 bytes, not a multiple of 4, so it"):
        open_tokens(path, meta)
    write_tokens(path, [tokens], 128_256)
    with pytest.raises(ValueError, match="prepare the text again as uint32 tokens of"):
        open_tokens(path, TokenMeta("hf:7", 100_000))


def test_meta_round_trips(tmp_path):
    meta = TokenMeta("gpt2", 50257, {"train.bin": 7, "val.bin": 3}, "a file")
    write_meta(tmp_path, meta)
    assert read_meta(tmp_path) == read_meta(tmp_path, "gpt2") == meta


def test_missing_meta_needs_the_tokenizer(tmp_path):
    assert read_meta(tmp_path, "gpt2") == TokenMeta("gpt2", 50257)
    message = r"meta\.json is missing: write .*prepare-text`, or set .*'bytes', 'gpt2'"
    with pytest.raises(ValueError, match=message):
        read_meta(tmp_path)
    with pytest.raises(ValueError, match="^unknown data.tokenizer 'char': available"):
        read_meta(tmp_path, "char")


def test_read_meta_of_another_tokenizer_raises(tmp_path):
    write_meta(tmp_path, BYTES)
    message = r"data\.tokenizer='gpt2', but .*meta\.json says 'bytes': set data"
    with pytest.raises(ValueError, match=message):
        read_meta(tmp_path, "gpt2")


@pytest.mark.parametrize(
    "values, what",
    [
        ([1], r"has \[1\], which must be an object"),
        ({"tokenizer": "bytes"}, "has no vocab_size, which must be an integer"),
        ({"tokenizer": 7, "vocab_size": 65}, "has tokenizer=7, which must be a string"),
        (
            {"tokenizer": "char", "vocab_size": 65},
            "unknown tokenizer 'char' in",
        ),
        ({"tokenizer": "bytes", "vocab_size": 65}, "has vocab_size=65, but .* has 256"),
        (
            {**GOOD, "num_tokens": {"train.bin": "7"}},
            "has num_tokens.train.bin='7', which must be an integer",
        ),
        ({**GOOD, "num_tokens": 7}, "has num_tokens=7, which must be an object"),
    ],
)
def test_damaged_meta_raises(tmp_path, values, what):
    (tmp_path / "meta.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=rf"{what}.*; prepare the text again"):
        read_meta(tmp_path)


@pytest.mark.parametrize(
    "text, what",
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "50 nested lists and objects"),
        (json.dumps({"tokenizer": "a" * 10**6, "vocab_size": 3}), "tokenizer 'aaa"),
        (json.dumps({**GOOD, "vocab_size": "a" * 10**6}), "has vocab_size='aaa"),
        (json.dumps({**GOOD, "num_tokens": {"a" * 10**6: ""}}), "has 'num_tokens.aaa"),
    ],
    ids=["brace", "nested", "tokenizer", "vocab_size", "num_tokens"],
)
def test_invalid_or_huge_meta_raises_a_short_error(tmp_path, text, what):
    (tmp_path / "meta.json").write_text(text)
    with pytest.raises(ValueError, match=what) as raised:
        read_meta(tmp_path)
    assert "meta.json" in str(raised.value)
    assert len(str(raised.value)) < 500


def test_open_missing_file_raises(tmp_path):
    message = r"train\.bin is missing: write it with `relattn prepare-text`"
    with pytest.raises(FileNotFoundError, match=message):
        open_tokens(tmp_path / "train.bin", BYTES)


def test_open_empty_file_raises(tmp_path):
    (tmp_path / "val.bin").touch()
    with pytest.raises(ValueError, match=r"val\.bin is empty: prepare the text again"):
        open_tokens(tmp_path / "val.bin", BYTES)


def test_open_odd_sized_file_raises(tmp_path):
    (tmp_path / "val.bin").write_bytes(b"abc")
    with pytest.raises(ValueError, match=r"val\.bin has 3 bytes, not a multiple of 2"):
        open_tokens(tmp_path / "val.bin", BYTES)


def test_open_file_shorter_than_a_window_raises(tmp_path):
    write_tokens(tmp_path / "val.bin", [TOKENS], 256)
    message = (
        r"val\.bin holds 23 tokens, but a window of data\.context_length=23 and the "
        r"token after it need 24: shorten"
    )
    with pytest.raises(ValueError, match=message):
        open_tokens(tmp_path / "val.bin", BYTES, min_tokens=24)


def test_open_file_with_wrong_token_count_raises(tmp_path):
    write_tokens(tmp_path / "train.bin", [TOKENS], 256)
    meta = TokenMeta("bytes", 256, {"train.bin": 29})
    with pytest.raises(ValueError, match=r"holds 23 tokens, but meta\.json says 29"):
        open_tokens(tmp_path / "train.bin", meta)


def test_id_out_of_range_raises(tmp_path, monkeypatch):
    path = tmp_path / "train.bin"
    write_tokens(path, [TOKENS, np.array([256], np.uint16)], 256)
    message = (
        r"train\.bin holds the token id 256 at position 23, out of range of the 256 to"
    )
    with pytest.raises(ValueError, match=message):
        open_tokens(path, BYTES)
    # A large file is not read completely before training.
    monkeypatch.setattr(text_lib, "CHECKED_TOKENS", 23)
    tokens = open_tokens(path, BYTES)
    message = "window 3 holds the token id 256 at position 3, out of range"
    with pytest.raises(ValueError, match=message):
        check_range(tokens[20:], BYTES, "window 3")
    positions = np.arange(4).reshape(2, 2) + 20
    message = "window 3 holds the token id 256 at position 23, out of range"
    with pytest.raises(ValueError, match=message):
        check_range(tokens[positions], BYTES, "window 3", positions)

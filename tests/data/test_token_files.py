"""Files of tokens are checked before they are trained on."""

import json

import numpy as np
import pytest

from relattn.data import token_files
from relattn.data.token_files import (
    TokenMeta,
    check_range,
    open_tokens,
    read_meta,
    write_meta,
    write_tokens,
)

BYTES = TokenMeta("bytes", 256)
GOOD = {"tokenizer": "bytes", "vocab_size": 256}
TOKENS = np.random.default_rng(0).integers(0, 256, 23).astype(np.uint16)


def test_written_in_pieces_and_mapped(tmp_path):
    path = tmp_path / "train.bin"
    assert write_tokens(path, [TOKENS[:5], TOKENS[5:5], TOKENS[5:]]) == 23
    # nanoGPT's layout: nothing but little-endian 16-bit integers.
    assert path.read_bytes() == TOKENS.astype("<u2").tobytes()
    tokens = open_tokens(path, BYTES, min_tokens=23)
    assert isinstance(tokens, np.memmap) and not tokens.flags.writeable
    np.testing.assert_array_equal(tokens, TOKENS)


def test_meta_round_trip(tmp_path):
    meta = TokenMeta("gpt2", 50257, {"train.bin": 7, "val.bin": 3}, "a file")
    write_meta(tmp_path, meta)
    assert read_meta(tmp_path) == read_meta(tmp_path, "gpt2") == meta


def test_files_of_nanogpt_need_the_tokenizer(tmp_path):
    assert read_meta(tmp_path, "gpt2") == TokenMeta("gpt2", 50257)
    message = r"meta\.json is missing: set data\.tokenizer to the one .*'bytes', 'gpt2'"
    with pytest.raises(ValueError, match=message):
        read_meta(tmp_path)
    with pytest.raises(ValueError, match="^unknown data.tokenizer 'char': there are"):
        read_meta(tmp_path, "char")


def test_another_tokenizer(tmp_path):
    write_meta(tmp_path, BYTES)
    message = r"data\.tokenizer='gpt2', but .*meta\.json says 'bytes': prepare the text"
    with pytest.raises(ValueError, match=message):
        read_meta(tmp_path, "gpt2")


@pytest.mark.parametrize(
    "values, what",
    [
        ([1], "TypeError"),
        ({"tokenizer": "bytes"}, "KeyError: 'vocab_size'"),
        ({"tokenizer": "char", "vocab_size": 65}, "KeyError: 'char'"),
        ({"tokenizer": "bytes", "vocab_size": 65}, "vocab_size is 65, expected 256"),
        (
            {**GOOD, "num_tokens": {"train.bin": "7"}},
            "num_tokens is {'train.bin': '7'}",
        ),
        ({**GOOD, "num_tokens": 7}, "num_tokens is 7"),
    ],
)
def test_damaged_meta(tmp_path, values, what):
    (tmp_path / "meta.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=rf"meta\.json cannot be used \(.*{what}"):
        read_meta(tmp_path)


@pytest.mark.parametrize(
    "text, what",
    [
        ("{", "JSONDecodeError"),
        ("[" * 100_000, "RecursionError"),
        (json.dumps({"tokenizer": "a" * 10**6, "vocab_size": 3}), "KeyError: 'aaa"),
        (json.dumps({**GOOD, "vocab_size": "a" * 10**6}), "ValueError: vocab_size is"),
        (json.dumps({**GOOD, "num_tokens": {"a" * 10**6: ""}}), "num_tokens is {'aaa"),
    ],
    ids=["brace", "nested", "tokenizer", "vocab_size", "num_tokens"],
)
def test_meta_that_is_no_json_or_a_huge_one(tmp_path, text, what):
    (tmp_path / "meta.json").write_text(text)
    message = rf"meta\.json cannot be used \(.*{what}.*prepare the text again"
    with pytest.raises(ValueError, match=message) as raised:
        read_meta(tmp_path)
    assert len(str(raised.value)) < 500


def test_missing_file(tmp_path):
    message = r"train\.bin is missing: write it by `python -m relattn\.data\.prepare_te"
    with pytest.raises(FileNotFoundError, match=message):
        open_tokens(tmp_path / "train.bin", BYTES)


def test_empty_file(tmp_path):
    (tmp_path / "val.bin").touch()
    with pytest.raises(ValueError, match=r"val\.bin is empty: prepare the text again"):
        open_tokens(tmp_path / "val.bin", BYTES)


def test_odd_sized_file(tmp_path):
    (tmp_path / "val.bin").write_bytes(b"abc")
    with pytest.raises(ValueError, match=r"val\.bin has an odd size, 3 bytes: it does"):
        open_tokens(tmp_path / "val.bin", BYTES)


def test_file_shorter_than_a_window(tmp_path):
    write_tokens(tmp_path / "val.bin", [TOKENS])
    message = (
        r"val\.bin holds 23 tokens, but a window of data\.context_length=23 and the "
        r"token after it need 24: shorten"
    )
    with pytest.raises(ValueError, match=message):
        open_tokens(tmp_path / "val.bin", BYTES, min_tokens=24)


def test_file_cut_short(tmp_path):
    write_tokens(tmp_path / "train.bin", [TOKENS])
    meta = TokenMeta("bytes", 256, {"train.bin": 29})
    with pytest.raises(ValueError, match=r"holds 23 tokens, but meta\.json says 29"):
        open_tokens(tmp_path / "train.bin", meta)


def test_id_out_of_range(tmp_path, monkeypatch):
    path = tmp_path / "train.bin"
    write_tokens(path, [TOKENS, np.array([256], np.uint16)])
    message = (
        r"train\.bin holds the token id 256 at position 23, out of range of the 256 to"
    )
    with pytest.raises(ValueError, match=message):
        open_tokens(path, BYTES)
    # A large file is not read from end to end before training begins.
    monkeypatch.setattr(token_files, "CHECKED_TOKENS", 23)
    tokens = open_tokens(path, BYTES)
    message = "window 3 holds the token id 256 at position 3, out of range"
    with pytest.raises(ValueError, match=message):
        check_range(tokens[20:], BYTES, "window 3")
    places = np.arange(4).reshape(2, 2) + 20
    message = "window 3 holds the token id 256 at position 23, out of range"
    with pytest.raises(ValueError, match=message):
        check_range(tokens[places], BYTES, "window 3", places)

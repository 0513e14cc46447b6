"""Byte and GPT-2 tokenizers."""

import hashlib
import json
import pathlib
import sys

import numpy as np
import pytest
from ml_collections import ConfigDict

from relattn.data import tokenizers
from relattn.data.text import load_text
from relattn.data.tokenizers import (
    Gpt2Tokenizer,
    Tokenizer,
    find_tokenizer,
    load_tokenizer,
)
from tests.helpers.export import unchecked_annotations

BPE = pathlib.Path(__file__).parents[3] / "shared" / "data" / "gpt2_bpe"
needs_bpe = pytest.mark.skipif(not BPE.is_dir(), reason="GPT-2's files are not here")
TEXT = (
    "First Citizen:\r\n  You're résolved,\t17 years\n\n\n—so? <|endoftext|> \U0001f600"
)


@pytest.fixture(scope="module")
def gpt2():
    return load_tokenizer("gpt2", str(BPE))


def test_byte_tokenizer_encodes_utf8():
    tokenizer = load_tokenizer("bytes")
    assert isinstance(tokenizer, Tokenizer)
    tokens = tokenizer.encode(TEXT)
    assert tokens.dtype == np.uint16
    assert bytes(tokens.tolist()) == TEXT.encode()
    assert tokenizer.decode(tokens) == TEXT
    assert tokenizer.encode("").shape == (0,)


def test_incomplete_character_is_replaced():
    assert load_tokenizer("bytes").decode([97, 195]) == "a\N{REPLACEMENT CHARACTER}"


@needs_bpe
def test_gpt2_ids_equal_the_published_ones(gpt2):
    # GPT-2 release: "Hello world" is 15496 995.
    assert gpt2.encode("Hello world").tolist() == [15496, 995]
    assert gpt2.encode("\n\n").tolist() == [628]
    assert (gpt2.vocab_size, gpt2.end_of_text) == (50257, 50256)


@needs_bpe
def test_gpt2_round_trips(gpt2):
    tokens = gpt2.encode(TEXT)
    assert tokens.dtype == np.uint16
    assert gpt2.decode(tokens) == TEXT
    # Text that spells the special token is encoded as text.
    assert gpt2.end_of_text not in tokens
    assert gpt2.decode([gpt2.end_of_text]) == "<|endoftext|>"


def write_small_bpe(folder):
    """Writes a vocabulary of 256 bytes and the two merges "a b" and "ab c"."""
    shown = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    hidden = [b for b in range(256) if b not in shown]
    letters = [chr(b) for b in shown] + [chr(256 + i) for i in range(len(hidden))]
    vocabulary = [*letters, "ab", "abc"]
    encoder = {letter: index for index, letter in enumerate(vocabulary)}
    (folder / "encoder.json").write_text(json.dumps(encoder))
    (folder / "vocab.bpe").write_text("#version: 0.2\na b\nab c\n")


def test_merges_are_read_from_the_files(tmp_path, monkeypatch):
    pytest.importorskip("tiktoken")
    write_small_bpe(tmp_path)
    digests = {
        name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
        for name in tokenizers.GPT2_FILES
    }
    monkeypatch.setattr(tokenizers, "GPT2_FILES", digests)
    monkeypatch.setattr(Gpt2Tokenizer, "vocab_size", 259)
    monkeypatch.setattr(Gpt2Tokenizer, "end_of_text", 258)
    tokenizer = load_tokenizer("gpt2", str(tmp_path))
    first = tokenizer.encode("a")[0]
    assert tokenizer.encode("abcab a").tolist() == [257, 256, 220, first]
    assert tokenizer.decode([257, 220, 256]) == "abc ab"


@pytest.mark.parametrize("name", ["gtp2", "Bytes", ""])
def test_unknown_tokenizer_raises(name):
    hint = {"gtp2": "did you mean 'gpt2'. A", "Bytes": "did you mean 'bytes'. A"}
    message = f"^unknown tokenizer '{name}': {hint.get(name, 'a')}vailable: bytes, gpt2"
    with pytest.raises(ValueError, match=f"{message}, the path of a tokenizer.json$"):
        load_tokenizer(name)


@pytest.mark.parametrize("token", [-1, 256])
def test_byte_id_out_of_range_raises(token):
    message = f"^token id {token} is out of range, expected 0 to 255"
    with pytest.raises(ValueError, match=message):
        load_tokenizer("bytes").decode([3, token])


@pytest.mark.parametrize("tokens", [[[3, 5]], [3.0, 5.7]])
def test_only_integers_of_one_text_are_decoded(tokens):
    message = r"tokens must be the ids of one text, integers of shape \[n\], got shape"
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        load_tokenizer("bytes").decode(np.array(tokens))


@needs_bpe
def test_gpt2_id_out_of_range_raises(gpt2):
    with pytest.raises(ValueError, match="id 50257 is out of range, expected 0 to"):
        gpt2.decode(np.array([50257]))


def test_missing_bpe_file_raises(tmp_path):
    pytest.importorskip("tiktoken")
    message = r"encoder\.json is missing: bpe_dir must hold GPT-2's encoder\.json and"
    with pytest.raises(FileNotFoundError, match=message):
        load_tokenizer("gpt2", str(tmp_path))


def test_bpe_file_of_another_vocabulary_raises(tmp_path):
    pytest.importorskip("tiktoken")
    write_small_bpe(tmp_path)
    with pytest.raises(ValueError, match=r"encoder\.json is not GPT-2's \(its SHA-256"):
        load_tokenizer("gpt2", str(tmp_path))


def test_failed_download_raises(monkeypatch):
    tiktoken = pytest.importorskip("tiktoken")

    def refuse(name):
        raise OSError("Name or service not known")

    monkeypatch.setattr(tiktoken, "get_encoding", refuse)
    message = r"could not be downloaded \(OSError\): set bpe_dir to a folder"
    with pytest.raises(ConnectionError, match=message):
        load_tokenizer("gpt2")


def test_missing_tiktoken_raises(monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    message = r"'gpt2' needs tiktoken: `pip install 'relattn\[text\]'`"
    with pytest.raises(ImportError, match=message):
        load_tokenizer("gpt2")


@pytest.mark.parametrize("folder", [False, True])
def test_bytes_take_no_vocabulary(folder, tmp_path):
    config = {"context_length": 3, "tokenizer": "bytes"}
    if folder:
        for name in ("train.bin", "val.bin"):
            (tmp_path / name).write_bytes(b"\1\0" * 7)
        config["data_dir"] = str(tmp_path)
    assert load_text(ConfigDict(config)).info.tokenizer == "bytes"
    with pytest.raises(ValueError, match="bpe_dir='x' .* tokenizer is 'bytes'"):
        load_text(ConfigDict({**config, "bpe_dir": "x"}))


VOCABULARY = {"</s>": 0, "\N{LOWER ONE EIGHTH BLOCK}": 1, "a": 2, "b": 3, "\n": 4}
SPACE = VOCABULARY["\N{LOWER ONE EIGHTH BLOCK}"]


def write_tokenizer(file, vocabulary=VOCABULARY, merges=(), **changes):
    """Writes a tokenizer of sentencepiece's kind: a text begins with a space."""
    metaspace = {
        "type": "Metaspace",
        "replacement": "\N{LOWER ONE EIGHTH BLOCK}",
        "prepend_scheme": "always",
        "split": True,
    }
    special = {"special": True, "normalized": False, "single_word": False}
    added = {**special, "id": 5, "content": "bab", "lstrip": False, "rstrip": False}
    end = {**added, "id": 0, "content": "</s>"}
    single = [{"SpecialToken": {"id": "</s>", "type_id": 0}}]
    single += [{"Sequence": {"id": "A", "type_id": 0}}]
    values = {
        "version": "1.0",
        "truncation": {
            "max_length": 2,
            "strategy": "LongestFirst",
            "stride": 0,
            "direction": "Right",
        },
        "padding": None,
        "added_tokens": [end, added],
        "normalizer": None,
        "pre_tokenizer": metaspace,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"</s>": {"id": "</s>", "ids": [0], "tokens": ["</s>"]}},
        },
        "decoder": metaspace,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": list(merges)},
    }
    file.write_text(json.dumps(values | changes))
    return file


def test_a_sentence_says_that_tokenizers_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    message = r"tokenizer.json needs tokenizers: pip install 'relattn\[hf\]'$"
    with pytest.raises(ImportError, match=message):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


def test_the_name_of_a_file_needs_its_folder():
    with pytest.raises(ValueError, match="'hf:7' is a file of Hugging Face: set bpe_"):
        load_tokenizer("hf:7")


def test_a_file_encodes_whole_texts_without_special_tokens(tmp_path):
    pytest.importorskip("tokenizers")
    file = write_tokenizer(tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(str(file))
    assert isinstance(tokenizer, Tokenizer)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert tokenizer.name == f"hf:{digest[:16]}"
    # An id for "bab", which is not in the model's vocabulary.
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (6, 0)
    # Neither cut after two tokens, nor with </s> before it.
    tokens = tokenizer.encode("ab a\nb")
    assert tokens.tolist() == [SPACE, 2, 3, SPACE, 2, 4, 3]
    assert tokens.dtype == np.uint16
    assert tokenizer.decode(tokens) == "ab a\nb"
    assert tokenizer.decode([2, 0, 5]) == "a</s>bab"
    assert tokenizer.encode("").shape == (0,)
    # Text that spells a special token is not that token.
    assert tokenizer.encode("bab").tolist() == [SPACE, 3, 2, 3]
    with pytest.raises(ValueError, match="token id 6 is out of range, expected 0 to 5"):
        tokenizer.decode([6])
    # The template has </s> before a text; here also after it.
    assert tokenizer.encode_bos().tolist() == [0]
    template = json.loads(file.read_text())["post_processor"]
    for single, expected in (
        ([*template["single"], template["single"][0]], [0]),
        (template["single"][::-1], None),
    ):
        other = tmp_path / "other.json"
        write_tokenizer(other, post_processor={**template, "single": single})
        if expected is None:
            with pytest.raises(ValueError, match="no token before a text: leave out"):
                load_tokenizer(str(other)).encode_bos()
        else:
            assert load_tokenizer(str(other)).encode_bos().tolist() == expected
    again = load_tokenizer(tokenizer.name, str(tmp_path))
    assert again.encode("b").tolist() == [SPACE, 3]


def test_other_and_damaged_files_are_refused(tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    first = load_tokenizer(str(write_tokenizer(tmp_path / "tokenizer.json"))).name
    merged = {**VOCABULARY, "ab": 5}
    write_tokenizer(tmp_path / "tokenizer.json", merged, merges=["a b"])
    with pytest.raises(ValueError, match=rf"is the tokenizer 'hf:\w+', not '{first}'"):
        load_tokenizer(first, str(tmp_path))
    config = ConfigDict({"tokenizer": str(tmp_path / "tokenizer.json")})
    with pytest.raises(ValueError, match="is not the tokenizer of the model any more"):
        find_tokenizer(first, config, "")
    many = {f"t{n}": n for n in range(2**16 + 1)}
    write_tokenizer(tmp_path / "many.json", many, added_tokens=[])
    with monkeypatch.context() as patch:
        patch.setattr(tokenizers, "MAX_VOCABULARY", 2**16)
        with pytest.raises(
            ValueError, match=r"65,537 tokens, but models take 1 to 65,"
        ):
            load_tokenizer(str(tmp_path / "many.json"))
    assert load_tokenizer(str(tmp_path / "many.json")).encode("").dtype == np.uint32
    (tmp_path / "damaged.json").write_text("{}")
    message = r"damaged.json is no tokenizer.json of Hugging Face \(.*\): save it with"
    with pytest.raises(ValueError, match=message):
        load_tokenizer(str(tmp_path / "damaged.json"))
    with pytest.raises(FileNotFoundError, match="no.json is missing: pass the path of"):
        load_tokenizer(str(tmp_path / "no.json"))


def test_text_that_a_file_has_no_token_for_is_refused(tmp_path):
    pytest.importorskip("tokenizers")
    model = {"type": "WordLevel", "vocab": {"to": 0, "be": 1}, "unk_token": "?"}
    spaces = {"type": "WhitespaceSplit"}
    file = tmp_path / "tokenizer.json"
    write_tokenizer(
        file, model=model, pre_tokenizer=spaces, added_tokens=[], post_processor=None
    )
    tokenizer = load_tokenizer(str(file))
    assert tokenizer.encode("to be").tolist() == [0, 1]
    message = r"cannot encode 'to see' \(Exception: WordLevel error: Missing \[UNK\]"
    with pytest.raises(ValueError, match=message):
        tokenizer.encode("to see")


@pytest.mark.parametrize(
    ("model", "pre_tokenizer", "text", "missing"),
    [
        ({}, None, "abé", "'é'"),
        # The letters of a removed separator are no part of a word.
        ({}, {"type": "WhitespaceSplit"}, "ab a", None),
        ({"end_of_word_suffix": "</w>"}, {"type": "WhitespaceSplit"}, "ab a", "'a</w>"),
        ({"unk_token": "a"}, None, "abé", None),
        # Bytes are written as characters: "ä" as "Ã¤".
        ({}, {"type": "ByteLevel", "add_prefix_space": False}, "aä", "'Ã'"),
    ],
)
def test_characters_are_not_left_out(tmp_path, model, pre_tokenizer, text, missing):
    """Byte-pair encoding drops what it has no token for."""
    pytest.importorskip("tokenizers")
    vocabulary = {"a": 0, "b": 1, "ab": 2, "b</w>": 3, "¤": 4}
    model = {"type": "BPE", "vocab": vocabulary, "merges": [("a", "b")], **model}
    if pre_tokenizer and pre_tokenizer["type"] == "ByteLevel":
        pre_tokenizer |= {"trim_offsets": True, "use_regex": True}
    file = tmp_path / "tokenizer.json"
    changes = {"added_tokens": [], "post_processor": None, "decoder": None}
    write_tokenizer(file, model=model, pre_tokenizer=pre_tokenizer, **changes)
    tokenizer = load_tokenizer(str(file))
    if missing is None:
        assert tokenizer.encode(text).size
        return
    with pytest.raises(ValueError, match=f"has no token for {missing}.* leave it out"):
        tokenizer.encode(text)


def test_merges_are_not_dropped(tmp_path):
    pytest.importorskip("tokenizers")
    model = {"type": "BPE", "vocab": VOCABULARY | {"ab": 5}, "merges": [("a", "b")]}
    file = tmp_path / "tokenizer.json"
    write_tokenizer(file, model=model | {"dropout": 1.0}, added_tokens=[])
    tokens = load_tokenizer(str(file)).encode("ab")
    assert tokens.tolist() == [SPACE, 5]


def test_a_run_finds_its_file_again(tmp_path):
    pytest.importorskip("tokenizers")
    name = load_tokenizer(str(write_tokenizer(tmp_path / "tokenizer.json"))).name
    file = str(tmp_path / "tokenizer.json")
    for options, folder in (
        ({"data_dir": str(tmp_path)}, ""),
        ({"data_dir": "no", "tokenizer": file}, ""),
        ({"data_dir": "no", "bpe_dir": str(tmp_path)}, ""),
        ({"data_dir": "no", "bpe_dir": "no", "tokenizer": "no.json"}, str(tmp_path)),
    ):
        assert find_tokenizer(name, ConfigDict(options), folder).name == name
    with pytest.raises(FileNotFoundError, match=r"is missing \(no/.*: set bpe_dir to"):
        find_tokenizer(name, ConfigDict({"data_dir": "no"}), "")


@needs_bpe
def test_a_file_of_gpt2_has_the_ids_of_gpt2(tmp_path, gpt2):
    """The two libraries agree on the ids of the same vocabulary and merges."""
    tokenizers = pytest.importorskip("tokenizers")
    merges = (BPE / "vocab.bpe").read_text("utf-8").splitlines()[1:]
    model = tokenizers.models.BPE(
        json.loads((BPE / "encoder.json").read_text("utf-8")),
        [tuple(line.split(" ")) for line in merges if line],
    )
    written = tokenizers.Tokenizer(model)
    written.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    written.decoder = tokenizers.decoders.ByteLevel()
    written.add_special_tokens(["<|endoftext|>"])
    written.save(str(tmp_path / "gpt2.json"))
    tokenizer = load_tokenizer(str(tmp_path / "gpt2.json"))
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (50257, 50256)
    np.testing.assert_array_equal(tokenizer.encode(TEXT), gpt2.encode(TEXT))
    assert tokenizer.decode(gpt2.encode(TEXT)) == TEXT

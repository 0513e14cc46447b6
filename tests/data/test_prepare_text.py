"""`relattn prepare-text`: files, documents, splitting, errors."""

import codecs
import errno
import importlib.util
import json
import pathlib
import re
import sys
import types

import numpy as np
import pytest
from ml_collections import ConfigDict

from relattn.data import prepare_text
from relattn.data.prepare_text import (
    encode_pieces,
    main,
    prepare_documents,
    prepare_files,
    read_text,
    split_text,
)
from relattn.data.text import load_text, open_tokens, read_meta
from relattn.data.tokenizers import find_tokenizer, load_tokenizer
from relattn.training.config_file import read_config
from tests.data.test_tokenizers import write_tokenizer

SHARED = pathlib.Path(__file__).parents[3] / "shared" / "data"
BPE = SHARED / "gpt2_bpe"
needs_bpe = pytest.mark.skipif(not BPE.is_dir(), reason="GPT-2's files are not here")
BYTES = load_tokenizer("bytes")
TEXT = "To be,\r\n\n or nöt\n\n\nto be — that is\nthe  question:\n" * 7


class Ending:
    """The byte tokenizer with an end-of-text token."""

    name, vocab_size, end_of_text = "bytes", 257, 256
    encode, decode = BYTES.encode, BYTES.decode


def read_parts(folder, meta=None):
    meta = meta or read_meta(folder)
    return [open_tokens(folder / name, meta).tolist() for name in meta.num_tokens]


def write(folder, **texts):
    paths = [folder / f"{name}.txt" for name in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        path.write_bytes(text.encode())
    return paths


def test_file_is_split_and_written_as_bytes(tmp_path):
    meta = prepare_files(write(tmp_path, a=TEXT), tmp_path / "out", BYTES, 0.3)
    assert meta == read_meta(tmp_path / "out")
    assert (meta.tokenizer, meta.vocab_size) == ("bytes", 256)
    assert meta.origin == "the text of a.txt"
    train, validation = read_parts(tmp_path / "out")
    assert meta.num_tokens == {"train.bin": len(train), "val.bin": len(validation)}
    assert bytes(train + validation) == TEXT.encode()
    assert len(train) == int(len(TEXT.encode()) * 0.7)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "manifest.json",
        "meta.json",
        "train.bin",
        "val.bin",
    ]


def test_several_files_end_with_end_of_text(tmp_path):
    inputs = write(tmp_path, a="abc", empty="", b="defg", c="hij")
    meta = prepare_files(inputs, tmp_path / "out", Ending(), 0.5)
    train, validation = read_parts(tmp_path / "out", meta)
    assert train == [*b"abc", 256, *b"de"]
    assert validation == [*b"fg", 256, *b"hij", 256]


def test_a_test_text_of_its_own(tmp_path, capsys):
    (a, b) = write(tmp_path, a=TEXT, b="that is the question: nöt")
    arguments = [f"--input={a}", f"--test={b}", f"--output={tmp_path / 'out'}"]
    main([*arguments, "--tokenizer=bytes"])
    assert f"test.bin ({len(b.read_bytes())} tokens)" in capsys.readouterr().out
    *_, test = read_parts(tmp_path / "out")
    assert bytes(test) == b.read_bytes()
    config = ConfigDict({"data_dir": str(tmp_path / "out"), "context_length": 5})
    data = load_text(config)
    assert data.test.tokens.tolist() == test
    with pytest.raises(FileNotFoundError, match="no.txt is missing"):
        prepare_files([a], tmp_path / "2", BYTES, test_inputs=[tmp_path / "no.txt"])


def test_a_validation_text_of_its_own(tmp_path, capsys):
    train, validation, empty = write(tmp_path, a="abcde", b="fgé", c="")
    arguments = [f"--input={train}", "--tokenizer=bytes", f"--output={tmp_path / '1'}"]
    main([*arguments, f"--validation={validation}"])
    parts = [bytes(part).decode() for part in read_parts(tmp_path / "1")]
    assert parts == ["abcde", "fgé"]
    with pytest.raises(ValueError, match=r"^there is no text in .*c.txt: pass a file"):
        prepare_files([train], tmp_path / "2", BYTES, validation_inputs=[empty])
    for other in ("--val_fraction=0.5", "--openwebtext"):
        words = arguments[other == "--openwebtext" :]
        with pytest.raises(SystemExit) as info:
            main([*words, f"--validation={validation}", other])
        assert info.value.code == 2
    said = capsys.readouterr().err
    assert "--validation and --val_fraction both choose the validation text" in said
    assert "--validation needs plain files as the training text: pass --input" in said


def test_files_are_split_between_characters(tmp_path):
    # The split at 0.55 of these bytes would fall inside a character.
    (path,) = write(tmp_path, a="ab€€éc")
    meta = prepare_files([path], tmp_path / "out", BYTES, 0.45)
    train, validation = (bytes(part).decode() for part in read_parts(tmp_path / "out"))
    assert (train, validation) == ("ab€€", "éc")
    assert meta.num_tokens == {"train.bin": 8, "val.bin": 3}


@pytest.mark.parametrize("block", [1, 3, 17, 2**18])
def test_blocks_contain_all_of_the_text(tmp_path, monkeypatch, block):
    monkeypatch.setattr(prepare_text, "BLOCK_BYTES", block)
    (path,) = write(tmp_path, a=TEXT)
    size = path.stat().st_size
    assert "".join(read_text(path, 0, size)) == TEXT
    assert "".join(split_text(read_text(path, 0, size))) == TEXT


@needs_bpe
@pytest.mark.parametrize("seed", range(5))
def test_gpt2_ids_of_parts_equal_those_of_the_whole(seed):
    tokenizer = load_tokenizer("gpt2", str(BPE))
    rng = np.random.default_rng(seed)
    letters = list("ab'st1 ,.  \n\n\n\r\t\x1c\x85\u3000é—")
    text = "".join(rng.choice(letters, 2000))
    blocks = [text[i : i + 13] for i in range(0, len(text), 13)]
    parts = list(split_text(blocks))
    assert len(parts) > 20
    encoded = encode_pieces([(part, False) for part in parts], tokenizer)
    whole = tokenizer.encode(text)
    np.testing.assert_array_equal(np.concatenate(list(encoded)), whole)


@needs_bpe
def test_tinyshakespeare_has_the_token_counts_of_nanogpt(tmp_path, capsys):
    text = SHARED / "text" / "tinyshakespeare.txt"
    main([f"--input={text}", f"--output={tmp_path / 'out'}", f"--bpe_dir={BPE}"])
    meta = read_meta(tmp_path / "out")
    # The counts in nanoGPT's data/shakespeare/readme.md.
    assert meta.num_tokens == {"train.bin": 301966, "val.bin": 36059}
    assert (
        "train.bin (301,966 tokens), val.bin (36,059 tokens)" in capsys.readouterr().out
    )
    tokens = open_tokens(tmp_path / "out" / "val.bin", meta)
    decoded = load_tokenizer("gpt2", str(BPE)).decode(tokens)
    assert text.read_text("utf-8").endswith(decoded)


class Documents(list):
    """The parts of `datasets.Dataset` that are used."""

    column_names = ["text"]

    def train_test_split(self, test_size, seed, shuffle):
        assert (test_size, seed, shuffle) == (0.4, 2357, True)
        return {"train": Documents(self[2:]), "test": Documents(self[:2])}

    def iter(self, batch_size):
        for start in range(0, len(self), batch_size):
            yield {"text": self[start : start + batch_size]}


@pytest.fixture
def documents(monkeypatch):
    """Replaces `datasets`, which the tests do not require."""
    found = Documents(["a", "bc", "def", "", "ghij"])
    module = types.ModuleType("datasets")
    module.load_dataset = lambda name, split: found
    monkeypatch.setitem(sys.modules, "datasets", module)
    return found


def test_documents_end_with_end_of_text(tmp_path, documents):
    meta = prepare_documents("set", tmp_path / "out", Ending(), 0.4)
    train, validation = read_parts(tmp_path / "out", meta)
    assert train == [*b"def", 256, 256, *b"ghij", 256]
    assert validation == [*b"a", 256, *b"bc", 256]
    assert meta.origin == "the documents of set"


def test_documents_without_text_column_raise(tmp_path, documents):
    documents.column_names = ["id", "story"]
    message = r"^set has no column 'text', only id, story: rename"
    with pytest.raises(ValueError, match=message):
        prepare_documents("set", tmp_path, BYTES)


def test_one_document_raises(tmp_path, documents):
    del documents[1:]
    with pytest.raises(ValueError, match="^set has 1 documents, but training and"):
        prepare_documents("set", tmp_path, BYTES)


def test_missing_datasets_is_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SystemExit):
        main(["--openwebtext", f"--output={tmp_path}", "--tokenizer=bytes"])
    message = "not prepared: OpenWebText needs Hugging Face's datasets: `pip"
    assert message in capsys.readouterr().err


@pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None, reason="datasets is not installed"
)
@pytest.mark.filterwarnings("ignore")
def test_local_copy_with_the_layout_of_openwebtext(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    parquet = importlib.import_module("pyarrow.parquet")
    pyarrow = importlib.import_module("pyarrow")
    texts = [f"Document {i}.\n" * (i % 5) for i in range(401)]
    (tmp_path / "set" / "data").mkdir(parents=True)
    for shard in range(2):
        table = pyarrow.table({"text": texts[shard::2]})
        path = tmp_path / "set" / "data" / f"train-0000{shard}-of-00002.parquet"
        parquet.write_table(table, path)
    meta = prepare_documents(str(tmp_path / "set"), tmp_path / "out", Ending(), 0.01)
    train, validation = read_parts(tmp_path / "out", meta)
    assert (train.count(256), validation.count(256)) == (396, 5)
    written = "".join(chr(token) for token in train + validation).split("\u0100")
    assert sorted(written) == sorted([*texts, ""])


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1])
def test_val_fraction_out_of_range_raises(tmp_path, fraction):
    with pytest.raises(ValueError, match=f"^val_fraction={fraction} must be"):
        prepare_files([], tmp_path, BYTES, fraction)


def test_missing_input_raises(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"^the input .*b\.txt is missing: "):
        prepare_files([tmp_path / "b.txt"], tmp_path, BYTES)


def test_a_folder_as_input_raises(tmp_path):
    with pytest.raises(IsADirectoryError, match=r"is a folder: pass its files, "):
        prepare_files([tmp_path], tmp_path / "out", BYTES)


def test_text_too_short_to_split_raises(tmp_path):
    message = r"^1 bytes of text with val_fraction=0\.1 leave no text for training or"
    with pytest.raises(ValueError, match=message):
        prepare_files(write(tmp_path, a="a"), tmp_path / "out", BYTES)


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_a_split_without_tokens_raises(tmp_path, split):
    """Files of JSON Lines may have no text, or none in their last tenth."""
    names = dict.fromkeys(["train", "validation", "test"], "some text")
    inputs, validation, test = (
        [write_lines(tmp_path, f"{name}.jsonl", text)]
        for name, text in (names | {split: ""}).items()
    )
    if split == "validation":
        inputs = [write_lines(tmp_path, "a.jsonl", "to be", *[""] * 20)]
        validation = []
    message = f"^the {split} text has no tokens: use more text, or pass files that have"
    with pytest.raises(ValueError, match=message):
        prepare_files(
            inputs,
            tmp_path / "out",
            BYTES,
            validation_inputs=validation,
            test_inputs=test,
        )
    assert not list((tmp_path / "out").iterdir())


def test_invalid_utf8_is_an_error(tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 au lait")
    arguments = [f"--input={tmp_path / 'a.txt'}", f"--output={tmp_path / 'out'}"]
    with pytest.raises(SystemExit):
        main([*arguments, "--tokenizer=bytes"])
    error = capsys.readouterr().err
    assert re.search(
        "the text was not prepared: /.*a.txt is not UTF-8 text .invalid con", error
    )
    # Nothing is left behind, so that the command can be repeated.
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
def test_flipped_bit_raises_on_load(tmp_path, name):
    prepare_files(write(tmp_path, a=TEXT), tmp_path, BYTES, 0.3)
    config = ConfigDict({"data_dir": str(tmp_path), "context_length": 7})
    assert load_text(config).info.tokenizer == "bytes"
    content = bytearray((tmp_path / name).read_bytes())
    # Flips a low byte, so that the id stays in range.
    content[20] ^= 1
    (tmp_path / name).write_bytes(content)
    message = (
        rf"{name} is damaged \(its SHA-256 .*json\): copy or prepare the text again"
    )
    with pytest.raises(ValueError, match=message):
        load_text(config)
    (tmp_path / "manifest.json").unlink()
    load_text(config)


@pytest.mark.parametrize(
    "name", ["manifest.json", "meta.json", "train.bin", "val.bin", "test.bin"]
)
def test_existing_files_are_not_overwritten(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(FileExistsError, match=f"{name} exists already: choose"):
        prepare_files(write(tmp_path, a=TEXT), tmp_path, BYTES)


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "meta.json", "manifest.json"])
def test_a_full_disk_names_the_file_and_leaves_none(tmp_path, monkeypatch, name):
    (tmp_path / "a.txt").write_text("to be or not to be " * 9)

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    functions = {"meta.json": "write_meta", "manifest.json": "write_manifest"}
    if name in functions:
        monkeypatch.setattr(prepare_text, functions[name], full)
    else:
        write = prepare_text.write_tokens
        monkeypatch.setattr(
            prepare_text,
            "write_tokens",
            lambda path, *of: full() if name in path.name else write(path, *of),
        )
    output = tmp_path / "out"
    with pytest.raises(OSError, match=f"No space left on device: .*/{name}"):
        prepare_text.prepare_files([tmp_path / "a.txt"], output, BYTES)
    assert not list(output.iterdir())


def test_a_link_in_place_of_an_unfinished_file_is_not_followed(tmp_path):
    (tmp_path / "a.txt").write_text("to be or not to be " * 9)
    (tmp_path / "other").write_text("other")
    output = tmp_path / "out"
    output.mkdir()
    (output / "train.bin.partial").symlink_to(tmp_path / "other")
    prepare_text.prepare_files([tmp_path / "a.txt"], output, BYTES)
    assert (tmp_path / "other").read_text() == "other"
    assert not (output / "train.bin").is_symlink()


def write_lines(folder, name, *texts, field="text"):
    lines = [json.dumps({"id": n, field: text}) for n, text in enumerate(texts)]
    (folder / name).write_text("\n".join([*lines, ""]))
    return folder / name


def test_lines_of_json_are_documents(tmp_path):
    """The cut falls between lines: at, before or after a tenth of their bytes."""
    texts = ["abc", "d\nef ö", "", "ghi", "jk"]
    file = write_lines(tmp_path, "a.jsonl", *texts)
    sizes = np.cumsum([len(line) for line in file.read_bytes().splitlines(True)])
    documents = [[*text.encode(), 256] for text in texts]
    for cut in (sizes[0], sizes[2] - 1, sizes[2], sizes[2] + 1):
        first = int(np.searchsorted(sizes, cut)) + 1
        fraction = 1 - (cut + 0.5) / sizes[-1]
        output = tmp_path / f"out{cut}"
        meta = prepare_files([file], output, Ending(), fraction)
        train, validation = read_parts(output, meta)
        assert train == sum(documents[:first], [])
        assert validation == sum(documents[first:], [])


def test_texts_and_lines_of_json_are_joined_in_order(tmp_path, capsys):
    (text,) = write(tmp_path, a="to be")
    text.write_bytes(codecs.BOM_UTF8 + text.read_bytes())
    lines = write_lines(tmp_path, "b.JSONL", "or not", "that", field="body")
    other = write_lines(tmp_path, "c.ndjson", "is", field="body")
    other.write_bytes(codecs.BOM_UTF8 + other.read_bytes())
    arguments = [f"--output={tmp_path / 'out'}", "--tokenizer=bytes", "--field=body"]
    arguments += ["--input", str(text), str(lines), "--validation", str(other)]
    main([*arguments, f"--test={other}"])
    parts = [bytes(part).decode() for part in read_parts(tmp_path / "out")]
    assert parts == ["to beor notthat", "is", "is"]
    assert "train.bin (15 tokens)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", r"is not JSON \(Expecting.*\): correct the line"),
        ("7", r"has 7, which must be an object: correct the line"),
        ('{"id": 7, "body": "a"}', "has no field 'text', only 'id, body': pass its"),
        ('{"text": ["a"]}', "has no text as its 'text': pass another name by --field"),
        (r'{"text": "\ud800"}', "has half of a surrogate pair, .*: correct the line"),
        ("\ufeff{}", r"is not JSON .*: correct the line"),
    ],
)
@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_wrong_line_is_named_and_nothing_is_left(tmp_path, line, problem, split):
    good = json.dumps({"text": "a" * 30})
    lines = [good, "", good, line] if split == "train" else [good, "", line]
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join([*lines, *[good] * (7 if split == "train" else 0)]))
    output = tmp_path / "out"
    fraction = 0.3 if split == "train" else 0.5
    number = len(lines)
    with pytest.raises(ValueError, match=f"^line {number} of .*a.jsonl {problem}"):
        prepare_files([file], output, BYTES, fraction)
    assert [*output.iterdir()] == []


def test_a_file_of_json_is_not_taken_for_text(tmp_path):
    file = tmp_path / "a.json"
    file.write_text('[{"text": "to be"}]')
    message = (
        r"a.json is JSON: write its texts to a file .jsonl, with an object in each"
    )
    with pytest.raises(ValueError, match=message):
        prepare_files([file], tmp_path / "out", BYTES)
    assert not (tmp_path / "out").exists()


def test_a_field_without_lines_of_json_is_refused(tmp_path, capsys):
    (text,) = write(tmp_path, a="to be")
    with pytest.raises(SystemExit):
        main([f"--input={text}", f"--output={tmp_path / 'out'}", "--field=body"])
    said = capsys.readouterr().err
    assert "--field names the text of .jsonl files, but there are none: leave" in said


def test_a_file_of_a_tokenizer_is_copied_and_used(tmp_path, capsys):
    pytest.importorskip("tokenizers")
    file = write_tokenizer(tmp_path / "mine.json")
    (text,) = write(tmp_path, a="a b\nab")
    lines = write_lines(tmp_path, "b.jsonl", "b", "a a")
    output = tmp_path / "out"
    arguments = [f"--tokenizer={file}", f"--output={output}", "--val_fraction=0.001"]
    main([*arguments, "--input", str(lines), str(text), f"--validation={lines}"][:-1])
    capsys.readouterr()
    tokenizer = load_tokenizer(str(file))
    # Each document begins with a space of its own, also one with a line break.
    train, validation = read_parts(output)
    documents = [tokenizer.encode(x).tolist() for x in ("b", "a a", "a b\na")]
    end = tokenizer.end_of_text
    assert train == [*documents[0], end, *documents[1], end, *documents[2]]
    assert validation == [*tokenizer.encode("b").tolist(), end]
    assert (output / "tokenizer.json").read_bytes() == file.read_bytes()
    config = ConfigDict({"data_dir": str(output), "context_length": 2})
    data = load_text(config)
    assert (data.info.tokenizer, data.info.vocab_size) == (tokenizer.name, 6)
    found = find_tokenizer(data.info.tokenizer, config, "")
    assert found.decode(train[:2]) == "b"
    config.tokenizer = str(file)
    assert load_text(config).info == data.info
    words = [f"--config.data.data_dir={output}", "--config.data.context_length=2"]
    recipe = read_config("translution_gpt:cpu", words).data
    assert load_text(recipe).info.tokenizer == tokenizer.name
    config.tokenizer = "bytes"
    with pytest.raises(ValueError, match="data.tokenizer='bytes', but .* says 'hf:"):
        load_text(config)
    with pytest.raises(SystemExit):
        main([*arguments, f"--input={text}"])
    assert "exists already" in capsys.readouterr().err

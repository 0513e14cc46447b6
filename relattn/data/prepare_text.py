"""Writes text as token files in nanoGPT's layout: ``train.bin`` and ``val.bin``.

    relattn prepare-text --input a.txt b.jsonl --output=DIR
    relattn prepare-text --openwebtext --output=DIR

Options:

- ``--validation a.txt ...``: files for ``val.bin``;
- ``--test a.txt ...``: files for ``test.bin``; without it, a run reports its result on
  the validation text;
- ``--field``: the name of the text in each line of files ``.jsonl`` or ``.ndjson``
  (JSON Lines), by default ``text``; each line is a document;
- ``--tokenizer``: ``gpt2`` (the default), ``bytes``, or the path of a
  ``tokenizer.json`` of Hugging Face, which is copied to the output;
- ``--bpe_dir=DIR``: folder of GPT-2's ``encoder.json`` and ``vocab.bpe``; without it,
  tiktoken downloads them;
- ``--openwebtext=DIR``: reads a local copy; without DIR, OpenWebText needs
  ``pip install relattn[openwebtext]`` and a network;
- ``--val_fraction``: without ``--validation``, the fraction of the text for validation,
  by default the last tenth of the files in order, or 0.0005 of OpenWebText's
  documents.

``manifest.json`` holds the SHA-256 of the files. A run verifies them before training:
12 seconds for the 17 GB of OpenWebText at 1.4 GB per second and core. Files without a
``manifest.json``, such as nanoGPT's, are not verified.
"""

from __future__ import annotations

import codecs
import importlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from relattn import command
from relattn.data.errors import describe_error
from relattn.data.text import FILES, META, TokenMeta, write_meta, write_tokens
from relattn.data.tokenizers import (
    TOKENIZER_FILE,
    TOKENIZERS,
    FileTokenizer,
    TokenIds,
    Tokenizer,
    load_tokenizer,
    token_dtype,
)
from relattn.files import check_folder, naming, replace_file
from relattn.json_files import parse_json
from relattn.manifest import MANIFEST, write_manifest
from relattn.messages import printable, shorten

OPENWEBTEXT = "Skylion007/openwebtext"
FILE_VAL_FRACTION = 0.1
# nanoGPT's split of OpenWebText.
DOCUMENT_VAL_FRACTION = 0.0005
DOCUMENT_SPLIT_SEED = 2357
BLOCK_BYTES = 2**18
# Number of texts encoded in parallel threads: tiktoken releases Python's lock.
NUM_PARALLEL_TEXTS = 64
# Files in addition to those of the tokens.
ADDED = (META, MANIFEST, TOKENIZER_FILE)
# UTF-8 continuation bytes, 10xxxxxx.
CONTINUATION = bytes(range(0x80, 0xC0))

# Files with these suffixes have a JSON object in each line.
LINES_SUFFIXES = (".jsonl", ".ndjson")
FIELD = "text"

# A text, and True if a document ends with it.
Piece = tuple[str, bool]


def prepare_files(
    inputs: list[Path],
    output: Path,
    tokenizer: Tokenizer,
    val_fraction: float = FILE_VAL_FRACTION,
    test_inputs: Sequence[Path] = (),
    validation_inputs: Sequence[Path] = (),
    field: str = FIELD,
) -> TokenMeta:
    """Writes the tokens of text files and of JSON Lines.

    Several files, and each line of JSON, end with the tokenizer's end-of-text token, if
    it has one.

    Args:
        inputs: UTF-8 text files, or files ``.jsonl`` with a JSON object in each line,
            in order.
        output: Folder to write.
        tokenizer: Tokenizer that encodes the text.
        val_fraction: Fraction of the bytes, at the end, for validation; without effect
            if there are ``validation_inputs``. Lines of JSON are not divided.
        test_inputs: Files for the test, like ``inputs``; none for no test text.
        validation_inputs: Files for validation, like ``inputs``.
        field: Name of the text in each line of JSON.

    Returns:
        The description of the written files.

    Raises:
        FileNotFoundError: If an input is missing.
        IsADirectoryError: If an input is a folder.
        FileExistsError: If ``output`` holds token files already.
        ValueError: If ``val_fraction`` is not between 0 and 1, a file is not UTF-8, a
            line is not JSON with the field, or a split would have no text.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.txt").write_text("to be, or not to be: that is")
        >>> meta = prepare_files([folder / "a.txt"], folder, load_tokenizer("bytes"))
        >>> meta.num_tokens
        {'train.bin': 25, 'val.bin': 3}
    """
    _check_arguments(output, val_fraction)
    for path in (*inputs, *validation_inputs, *test_inputs):
        if path.is_dir():
            raise IsADirectoryError(
                f"the input {path} is a folder: pass its files, such as {path}/*.txt"
            )
        if not path.is_file():
            raise FileNotFoundError(
                f"the input {path} is missing: pass the path of a text file"
            )
        if path.suffix.lower() == ".json":
            raise ValueError(
                f"the input {path} is JSON: write its texts to a file .jsonl, with an "
                "object in each line, or rename it to .txt if it is a text"
            )
    if validation_inputs:
        splits = {
            "train": _whole(inputs, tokenizer, field),
            "validation": _whole(validation_inputs, tokenizer, field),
        }
    else:
        sizes = _sizes(inputs)
        total = sum(sizes)
        cut = _next_start(inputs, sizes, int(total * (1 - val_fraction)))
        if not 0 < cut < total:
            raise ValueError(
                f"{total} bytes of text with val_fraction={val_fraction} leave no text "
                "for training or validation: use more text, or files for --validation"
            )
        splits = {
            "train": _pieces(inputs, sizes, 0, cut, tokenizer, field),
            "validation": _pieces(inputs, sizes, cut, total, tokenizer, field),
        }
    if test_inputs:
        splits["test"] = _whole(test_inputs, tokenizer, field)
    names = ", ".join(path.name for path in inputs)
    return _write(output, splits, tokenizer, f"the text of {names}")


def _sizes(inputs: Sequence[Path]) -> list[int]:
    return [path.stat().st_size for path in inputs]


def _whole(inputs: Sequence[Path], tokenizer: Tokenizer, field: str) -> Iterator[Piece]:
    """Returns the text of whole files."""
    sizes = _sizes(inputs)
    if not sum(sizes):
        names = ", ".join(map(str, inputs))
        raise ValueError(f"there is no text in {names}: pass a file that has some")
    return _pieces(inputs, sizes, 0, sum(sizes), tokenizer, field)


def _pieces(
    inputs: Sequence[Path],
    sizes: Sequence[int],
    first: int,
    last: int,
    tokenizer: Tokenizer,
    field: str,
) -> Iterator[Piece]:
    """Yields the text of the bytes [first, last) of the joined files."""
    start = 0
    for path, size in zip(inputs, sizes, strict=True):
        begin, end = max(first - start, 0), min(last - start, size)
        start += size
        if begin < end and path.suffix.lower() in LINES_SUFFIXES:
            for text in _read_lines(path, begin, end, field):
                yield text, True
        elif begin < end:
            blocks = read_text(path, begin, end)
            # Others may take the start of a part for that of a word.
            is_known = tokenizer.name in TOKENIZERS
            for text in split_text(blocks) if is_known else ["".join(blocks)]:
                yield text, False
            if len(inputs) > 1 and end == size:
                yield "", True


def prepare_documents(
    name: str,
    output: Path,
    tokenizer: Tokenizer,
    val_fraction: float = DOCUMENT_VAL_FRACTION,
) -> TokenMeta:
    """Writes the tokens of a document set, read by Hugging Face's `datasets`.

    Each document ends with the tokenizer's end-of-text token, if it has one. The
    validation documents are drawn in the same way as in nanoGPT.

    Args:
        name: Name of the set, or a folder of its Parquet files; the documents are the
            column ``text`` of the split ``train``.
        output: Folder to write.
        tokenizer: Tokenizer that encodes the text.
        val_fraction: Fraction of the documents for validation.

    Returns:
        The description of the written files.

    Raises:
        ImportError: If `datasets` is not installed.
        FileExistsError: If ``output`` holds token files already.
        ValueError: If ``val_fraction`` is not between 0 and 1, there are fewer than two
            documents, or they have no ``text``.
    """
    _check_arguments(output, val_fraction)
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise ImportError(
            "OpenWebText needs Hugging Face's datasets: `pip install "
            "'relattn[openwebtext]'`"
        ) from error
    documents = datasets.load_dataset(name, split="train")
    if "text" not in documents.column_names:
        listed = ", ".join(documents.column_names)
        raise ValueError(
            f"{name} has no column 'text', only {listed}: rename the column of the "
            "documents"
        )
    if len(documents) < 2:
        raise ValueError(
            f"{name} has {len(documents)} documents, but training and validation need "
            "at least 2: use more documents"
        )
    split = documents.train_test_split(
        test_size=val_fraction, seed=DOCUMENT_SPLIT_SEED, shuffle=True
    )
    splits = {"train": _texts(split["train"]), "validation": _texts(split["test"])}
    return _write(output, splits, tokenizer, f"the documents of {name}")


def _texts(documents: Any) -> Iterator[Piece]:
    for batch in documents.iter(batch_size=NUM_PARALLEL_TEXTS):
        for text in batch["text"]:
            yield text, True


def _check_arguments(output: Path, val_fraction: float) -> None:
    if not 0 < val_fraction < 1:
        raise ValueError(f"val_fraction={val_fraction} must be between 0 and 1")
    for name in (*ADDED, *FILES.values()):
        if (output / name).exists():
            raise FileExistsError(
                f"{output / name} exists already: choose another output or delete it"
            )


def _next_start(inputs: list[Path], sizes: list[int], position: int) -> int:
    """Moves a byte position in the joined files forward to the start of a character.

    In JSON Lines, it is moved to the start of a line.
    """
    start = 0
    for path, size in zip(inputs, sizes, strict=True):
        if position < start + size:
            offset = position - start
            with naming(path), path.open("rb") as file:
                if path.suffix.lower() in LINES_SUFFIXES:
                    # The byte before the start of a line is its only one here.
                    file.seek(max(offset - 1, 0))
                    return position + len(file.readline()) - 1 if offset else position
                file.seek(offset)
                following = file.read(4)
            return position + len(following) - len(following.lstrip(CONTINUATION))
        start += size
    return position


def read_text(path: Path, begin: int, end: int) -> Iterator[str]:
    """Reads the bytes [begin, end) of a UTF-8 file, block by block.

    A byte order mark at the start of the file, as Windows writes it, is left out.

    Args:
        path: Path of the file.
        begin: First byte.
        end: End, exclusive.

    Yields:
        The text.

    Raises:
        ValueError: If the file is not UTF-8.
    """
    encoding = "utf-8" if begin else "utf-8-sig"
    decoder = codecs.getincrementaldecoder(encoding)()
    with naming(path), path.open("rb") as file:
        file.seek(begin)
        while begin < end:
            block = file.read(min(BLOCK_BYTES, end - begin))
            begin += len(block)
            try:
                yield decoder.decode(block, final=begin >= end or not block)
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path} is not UTF-8 text ({error.reason} before byte {begin}): "
                    "convert it to UTF-8"
                ) from error


def _read_lines(path: Path, begin: int, end: int, field: str) -> Iterator[str]:
    """Reads the texts of the bytes [begin, end), whole lines, of a file of JSON Lines.

    Empty lines are left out.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.jsonl"
        >>> path.write_text('{"id": 7, "text": "to be"}')
        26
        >>> list(_read_lines(path, 0, 26, "text"))
        ['to be']
    """
    with naming(path), path.open("rb") as file:
        file.seek(begin)
        while begin < end:
            start, line = begin, file.readline()
            begin += len(line)
            if not line:
                return
            # A byte order mark, as Windows writes it.
            line = line.removeprefix(codecs.BOM_UTF8) if start == 0 else line
            if not line.strip():
                continue
            try:
                text = _read_field(line, field)
            except ValueError as error:
                number = 1 + _count_lines(path, start)
                raise ValueError(f"line {number} of {path} {error}") from error
            yield text


def _read_field(line: bytes, field: str) -> str:
    """Returns the text in a line of JSON; the error is the end of a sentence."""
    try:
        values = parse_json(line, "", dict, allow_nan=True)
    except ValueError as error:
        raise ValueError(f"{str(error).strip()}: correct the line") from error
    if field not in values:
        names = shorten(", ".join(values))
        raise ValueError(
            f"has no field {field!r}, only {names}: pass its name by --field"
        )
    text = values[field]
    if not isinstance(text, str):
        raise ValueError(f"has no text as its {field!r}: pass another name by --field")
    if not is_unicode(text):
        raise ValueError("has half of a surrogate pair, \\ud8..: correct the line")
    return text


def is_unicode(text: str) -> bool:
    r"""Returns whether a text has no half of a surrogate pair, which has no UTF-8.

    Args:
        text: A text.

    Returns:
        Whether it has UTF-8.

    Example:
        >>> is_unicode("caf\u00e9"), is_unicode("caf\ud800")
        (True, False)
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _count_lines(path: Path, end: int) -> int:
    """Counts the lines in the first bytes of a file."""
    with naming(path), path.open("rb") as file:
        sizes = (min(BLOCK_BYTES, end - begin) for begin in range(0, end, BLOCK_BYTES))
        return sum(file.read(size).count(b"\n") for size in sizes)


def split_text(blocks: Iterable[str]) -> Iterator[str]:
    r"""Splits text such that GPT-2 encodes the parts and the whole to the same ids.

    Every split is before a line break that is not followed by white space: there,
    GPT-2's word splitting always starts a new word.

    Args:
        blocks: The text, split anywhere.

    Yields:
        The same text; every part but the first begins with such a line break.

    Example:
        >>> list(split_text(["to be,\nor", " not\nto be"]))
        ['to be,', '\nor not', '\nto be']
    """
    rest = ""
    for block in blocks:
        rest += block
        end = len(rest) - 1
        while (cut := rest.rfind("\n", 0, end)) > 0:
            if not rest[cut + 1].isspace():
                yield rest[:cut]
                rest = rest[cut:]
                break
            end = cut
    if rest:
        yield rest


def encode_pieces(pieces: Iterable[Piece], tokenizer: Tokenizer) -> Iterator[TokenIds]:
    """Encodes texts in parallel and appends the end-of-text token to each document.

    Args:
        pieces: Pairs of a text and True if a document ends with it.
        tokenizer: Tokenizer that encodes the text; without an end-of-text token,
            nothing is appended.

    Yields:
        The ids of each text, in order.
    """
    ending = np.array(
        [] if tokenizer.end_of_text is None else [tokenizer.end_of_text],
        token_dtype(tokenizer.vocab_size),
    )
    pieces = iter(pieces)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        while batch := list(itertools.islice(pieces, NUM_PARALLEL_TEXTS)):
            encoded = pool.map(tokenizer.encode, [text for text, _ in batch])
            for tokens, (_, ends) in zip(encoded, batch, strict=True):
                yield np.concatenate([tokens, ending]) if ends else tokens


def _write(
    output: Path,
    splits: dict[str, Iterator[Piece]],
    tokenizer: Tokenizer,
    origin: str,
) -> TokenMeta:
    """Writes the files, renames them when complete, and adds meta and manifest."""
    output.mkdir(parents=True, exist_ok=True)
    final = [output / FILES[name] for name in splits]
    partial = [path.with_name(f"{path.name}.partial") for path in final]
    path = partial[0]
    try:
        counts = {}
        with tqdm(
            desc="Encoding", unit=" tokens", unit_scale=True, disable=None, delay=2
        ) as bar:

            def counted(pieces: Iterator[TokenIds]) -> Iterator[TokenIds]:
                for tokens in pieces:
                    bar.update(len(tokens))
                    yield tokens

            for path, (name, pieces) in zip(partial, splits.items(), strict=True):
                counts[FILES[name]] = write_tokens(
                    path,
                    counted(encode_pieces(pieces, tokenizer)),
                    tokenizer.vocab_size,
                )
                if not counts[FILES[name]]:
                    raise ValueError(
                        f"the {name} text has no tokens: use more text, or pass files "
                        "that have some"
                    )
        for path, complete in zip(partial, final, strict=True):
            path.replace(complete)
        meta = TokenMeta(tokenizer.name, tokenizer.vocab_size, counts, origin)
        path = output / META
        write_meta(output, meta)
        names = [META, *counts]
        if isinstance(tokenizer, FileTokenizer):
            path = output / TOKENIZER_FILE
            replace_file(path, tokenizer.content)
            names.append(TOKENIZER_FILE)
        path = output / MANIFEST
        write_manifest(output, names)
    except BaseException as error:
        # None of them was there before, see `_check_arguments`.
        for each in (*partial, *final, *(output / name for name in ADDED)):
            each.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    return meta


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Prepares the text that the arguments name."""
    parser = command.Parser("python -m relattn.data.prepare_text", __doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    files = {"nargs": "+", "action": "extend", "type": Path, "metavar": "FILE"}
    source.add_argument(
        "--input", **files, help="UTF-8 text files, or .jsonl; repeatable"
    )
    source.add_argument(
        "--openwebtext",
        nargs="?",
        const=OPENWEBTEXT,
        metavar="NAME_OR_DIR",
        help="OpenWebText, by its name on the Hugging Face hub or from a folder",
    )
    add = parser.add_argument
    add("--output", required=True, help="folder to write to")
    validation = "text files for validation; repeatable"
    add("--validation", **files, default=[], help=validation)
    add("--test", **files, default=[], help="text files for testing; repeatable")
    add(
        "--tokenizer",
        default="gpt2",
        help=f"{', '.join(sorted(TOKENIZERS))}, or the path of a tokenizer.json",
    )
    add("--field", help=f"name of the text in lines of .jsonl, by default {FIELD}")
    add("--bpe_dir", default="", help="folder of GPT-2's vocabulary")
    add(
        "--val_fraction",
        type=float,
        help="fraction of the text that is held out for validation, by default "
        f"{FILE_VAL_FRACTION}, of OpenWebText {DOCUMENT_VAL_FRACTION}",
    )
    options = parser.parse_args(argv)
    output = check_folder(options.output, "--output")
    for name in ("test", "validation"):
        if getattr(options, name) and not options.input:
            raise ValueError(
                f"--{name} needs plain files as the training text: pass --input"
            )
    if options.validation and options.val_fraction is not None:
        raise ValueError(
            "--validation and --val_fraction both choose the validation text: leave "
            "one out"
        )
    files = [*(options.input or ()), *options.validation, *options.test]
    if options.field is not None and not any(
        path.suffix.lower() in LINES_SUFFIXES for path in files
    ):
        raise ValueError(
            f"--field names the text of {LINES_SUFFIXES[0]} files, but there are none: "
            "leave it out"
        )
    fraction = {}
    if options.val_fraction is not None:
        fraction = {"val_fraction": options.val_fraction}
    try:
        tokenizer = load_tokenizer(options.tokenizer, options.bpe_dir)
        if options.input:
            meta = prepare_files(
                options.input,
                output,
                tokenizer,
                test_inputs=options.test,
                validation_inputs=options.validation,
                field=FIELD if options.field is None else options.field,
                **fraction,
            )
        else:
            meta = prepare_documents(options.openwebtext, output, tokenizer, **fraction)
    except Exception as error:
        if command.lacks_resources(error):
            raise
        problem = describe_error(error)
        raise ValueError(f"the text was not prepared: {problem}") from error
    counts = (f"{name} ({n:,} tokens)" for name, n in meta.num_tokens.items())
    print(printable(f"Written to {options.output}: {', '.join(counts)}"))


if __name__ == "__main__":
    main()

"""Tokenizers: UTF-8 bytes, GPT-2's byte-pair encoding, and files of Hugging Face."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Integer, UInt16, UInt32
from ml_collections import ConfigDict

from relattn.command import lacks_resources
from relattn.data.errors import describe_error
from relattn.files import expand, naming
from relattn.manifest import END_OF_TEXT, ENDS, FILE_PREFIX, sha256, tokenizer_name
from relattn.messages import check_choice, shorten

TokenIds = UInt16[np.ndarray, "_"] | UInt32[np.ndarray, "_"]
AnyIds = Integer[Array | np.ndarray, "tokens"] | Sequence[int]

# GPT-2 splits text into these words before it merges bytes.
GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT2_FILES = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
TOKENIZER_FILE = "tokenizer.json"
# Models take ids as int32.
MAX_VOCABULARY = 2**31
# It is none of the characters that stand for bytes in the words of `ByteLevel`.
NO_BYTE = "\u4e2d"


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the type of token ids, in memory and in files.

    Args:
        vocab_size: Number of different ids.

    Returns:
        Little-endian uint16, as in nanoGPT's files, or uint32 for more than 65,536 ids.

    Example:
        >>> token_dtype(50_257), token_dtype(128_256)
        (dtype('uint16'), dtype('uint32'))
    """
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


@runtime_checkable
class Tokenizer(Protocol):
    """Encodes text as ids below ``vocab_size``, and decodes them.

    Attributes:
        name: Name for `load_tokenizer`.
        vocab_size: Number of different ids.
        end_of_text: Id that ends a document; None if there is none.
    """

    name: str
    vocab_size: int
    end_of_text: int | None

    def encode(self, text: str) -> TokenIds:
        """Returns the ids of a text, without parsing special tokens in it."""
        ...

    def decode(self, tokens: AnyIds) -> str:
        """Returns the text of ids; invalid UTF-8 becomes U+FFFD."""
        ...


class ByteTokenizer:
    """Encodes text as its UTF-8 bytes, 256 ids.

    Example:
        >>> tokenizer = ByteTokenizer()
        >>> tokenizer.encode("é!")
        array([195, 169,  33], dtype=uint16)
        >>> tokenizer.decode([195, 169, 33])
        'é!'
    """

    name = "bytes"
    vocab_size = 256
    end_of_text: int | None = None

    def encode(self, text: str) -> TokenIds:
        """Returns the bytes of the text."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def decode(self, tokens: AnyIds) -> str:
        """Returns the text of the bytes.

        Raises:
            ValueError: If an id is not a byte.
        """
        return bytes(_check_ids(tokens, self.vocab_size)).decode(errors="replace")


class Gpt2Tokenizer:
    """Encodes text with GPT-2's byte-pair encoding, through tiktoken.

    Args:
        bpe_dir: Folder of ``encoder.json`` and ``vocab.bpe``; "" downloads them once
            into tiktoken's cache.

    Raises:
        ImportError: If tiktoken is not installed.
        FileNotFoundError: If a file is missing in ``bpe_dir``.
        ValueError: If a file differs from GPT-2's.
        ConnectionError: If the vocabulary could not be downloaded.

    Source:
        Radford et al., Language Models are Unsupervised Multitask Learners.
    """

    name = "gpt2"
    vocab_size = 50257
    end_of_text: int | None = 50256

    def __init__(self, bpe_dir: str = ""):
        try:
            tiktoken = importlib.import_module("tiktoken")
            load = importlib.import_module("tiktoken.load")
        except ImportError as error:
            raise ImportError(
                "the tokenizer 'gpt2' needs tiktoken: `pip install 'relattn[text]'` or "
                "use the tokenizer 'bytes'"
            ) from error
        if bpe_dir:
            folder = expand(bpe_dir, "bpe_dir")
            _check_bpe_files(folder)
            ranks = load.data_gym_to_mergeable_bpe_ranks(
                vocab_bpe_file=str(folder / "vocab.bpe"),
                encoder_json_file=str(folder / "encoder.json"),
                # Digests keep tiktoken from using its cache of another folder.
                vocab_bpe_hash=GPT2_FILES["vocab.bpe"],
                encoder_json_hash=GPT2_FILES["encoder.json"],
            )
            self._encoding = tiktoken.Encoding(
                self.name,
                pat_str=GPT2_WORDS,
                mergeable_ranks=ranks,
                special_tokens={END_OF_TEXT: self.end_of_text},
                explicit_n_vocab=self.vocab_size,
            )
            return
        try:
            self._encoding = tiktoken.get_encoding(self.name)
        except (OSError, ValueError) as error:
            raise ConnectionError(
                f"GPT-2's vocabulary could not be downloaded ({type(error).__name__}): "
                "set bpe_dir to a folder that holds encoder.json and vocab.bpe"
            ) from error

    def encode(self, text: str) -> TokenIds:
        """Returns the ids of the text."""
        return np.array(self._encoding.encode_ordinary(text), np.uint16)

    def decode(self, tokens: AnyIds) -> str:
        """Returns the text of the ids.

        Raises:
            ValueError: If an id is outside the vocabulary.
        """
        return self._encoding.decode(_check_ids(tokens, self.vocab_size))


class FileTokenizer:
    """Encodes text as a tokenizer of Hugging Face does, read from ``tokenizer.json``.

    Special tokens are neither added nor parsed. A text ends with the first of `ENDS`
    that the vocabulary has.

    Args:
        path: The file.

    Raises:
        ImportError: If tokenizers is not installed.
        FileNotFoundError: If the file is missing.
        ValueError: If it is damaged, or has more than `MAX_VOCABULARY` tokens.
    """

    def __init__(self, path: str | Path):
        try:
            tokenizers = importlib.import_module("tokenizers")
        except ImportError as error:
            raise ImportError(
                f"the tokenizer {path} needs tokenizers: pip install 'relattn[hf]'"
            ) from error
        path = expand(path, "tokenizer")
        if not path.is_file():
            raise FileNotFoundError(
                f"the tokenizer {path} is missing: pass the path of a "
                f"{TOKENIZER_FILE} of Hugging Face"
            )
        with naming(path):
            self.content = path.read_bytes()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(self.content)
        except Exception as error:
            if lacks_resources(error):
                raise
            raise ValueError(
                f"{path} is no {TOKENIZER_FILE} of Hugging Face "
                f"({describe_error(error)}): save it with tokenizer.save"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if isinstance(self._tokenizer.model, tokenizers.models.BPE):
            # BPE dropout would give a text other ids at each call.
            self._tokenizer.model.dropout = None
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        # Ids may have gaps.
        self.vocab_size = max(ids.values(), default=-1) + 1
        if not 1 <= self.vocab_size <= MAX_VOCABULARY:
            raise ValueError(
                f"{path} has {self.vocab_size:,} tokens, but models take 1 to "
                f"{MAX_VOCABULARY:,}: use another tokenizer"
            )
        self._known = self._known_symbols(tokenizers, ids)
        found = [ids[token] for token in ENDS if token in ids]
        self.end_of_text: int | None = found[0] if found else None
        self.name = tokenizer_name(self.content)

    def encode(self, text: str) -> TokenIds:
        """Returns the ids of the text.

        Raises:
            ValueError: If the tokenizer has no token for a part of the text.
        """
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:
            if lacks_resources(error):
                raise
            raise ValueError(
                f"the tokenizer {self.name!r} cannot encode {shorten(text)} "
                f"({describe_error(error)}): give it an unknown token, or use another"
            ) from error
        if self._known and (missing := self._symbols(text) - self._known):
            raise ValueError(
                f"the tokenizer {self.name!r} has no token for {sorted(missing)[0]!r} "
                "and would leave it out: give it an unknown token, or use another"
            )
        return np.array(ids, token_dtype(self.vocab_size))

    def encode_bos(self) -> TokenIds:
        """Returns the ids that transformers puts before a text, such as that of <s>.

        Raises:
            ValueError: If it puts none.
        """
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder()
        # Of an empty text, no token shows what is before it and what after it.
        words = (id for word, id in vocabulary.items() if word.isalnum())
        word = next((id for id in words if id not in added), None)
        text = "a" if word is None else self.decode([word])
        found = self._tokenizer.encode(text, add_special_tokens=True)
        size = [*found.special_tokens_mask, 0].index(0)
        if not size:
            raise ValueError(
                f"the tokenizer {self.name!r} puts no token before a text: leave out "
                "bos"
            )
        return np.array(found.ids[:size], token_dtype(self.vocab_size))

    def _known_symbols(self, tokenizers: Any, ids: dict[str, int]) -> set[str]:
        """Returns the symbols that have a token; an empty set if no other is lost.

        Byte-pair encoding drops symbols that it has no token for, unless it has an
        unknown token, or takes them for bytes.
        """
        model = self._tokenizer.model
        if (
            not isinstance(model, tokenizers.models.BPE)
            or model.unk_token is not None
            or model.byte_fallback
        ):
            return set()
        alphabet = set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        if alphabet <= ids.keys() and self._symbols(NO_BYTE) <= alphabet:
            return set()
        added = self._tokenizer.get_added_tokens_decoder().values()
        return {*ids, *"".join(token.content for token in added if not token.special)}

    def _symbols(self, text: str) -> set[str]:
        """Returns the symbols that byte-pair encoding merges in a text."""
        model, normalizer = self._tokenizer.model, self._tokenizer.normalizer
        if normalizer is not None:
            text = normalizer.normalize_str(text)
        words = {text}
        if self._tokenizer.pre_tokenizer is not None:
            words = self._tokenizer.pre_tokenizer.pre_tokenize_str(text)
            words = {word for word, _ in words}
        start = model.continuing_subword_prefix or ""
        end = model.end_of_word_suffix or ""
        return {
            start * (n > 0) + symbol + end * (n == len(word) - 1)
            for word in words
            for n, symbol in enumerate(word)
        }

    def decode(self, tokens: AnyIds) -> str:
        """Returns the text of the ids.

        Raises:
            ValueError: If an id is outside the vocabulary.
        """
        ids = _check_ids(tokens, self.vocab_size)
        return self._tokenizer.decode(ids, skip_special_tokens=False)


TOKENIZERS = {"bytes": ByteTokenizer, "gpt2": Gpt2Tokenizer}


def load_tokenizer(name: str, bpe_dir: str = "") -> Tokenizer:
    """Returns a tokenizer by name.

    Args:
        name: ``"bytes"``, ``"gpt2"``, the path of a ``tokenizer.json`` of Hugging Face,
            or the `name` of one.
        bpe_dir: For ``"gpt2"``, the folder of ``encoder.json`` and ``vocab.bpe``, or ""
            to let tiktoken download them once. For the name of a ``tokenizer.json``,
            its folder.

    Returns:
        The tokenizer.

    Raises:
        ValueError: If the name is unknown, the tokenizer has no use for ``bpe_dir``, or
            a file in it differs from GPT-2's, or from the one that ``name`` names.
        ImportError: If tiktoken, or tokenizers, is not installed.
        FileNotFoundError: If a file is missing in ``bpe_dir``.
        ConnectionError: If the vocabulary could not be downloaded.

    Example:
        >>> load_tokenizer("bytes").encode("to be")
        array([116, 111,  32,  98, 101], dtype=uint16)
    """
    if name.startswith(FILE_PREFIX):
        return _load_named(name, bpe_dir)
    if not name.endswith(".json"):
        check_choice(
            "tokenizer", name, [*TOKENIZERS, f"the path of a {TOKENIZER_FILE}"]
        )
    check_bpe_dir(name, bpe_dir)
    if name.endswith(".json"):
        return FileTokenizer(name)
    return Gpt2Tokenizer(bpe_dir) if name == "gpt2" else TOKENIZERS[name]()


def _load_named(name: str, folder: str) -> FileTokenizer:
    """Loads the file of a tokenizer's name from a folder."""
    if not folder:
        raise ValueError(
            f"the tokenizer {name!r} is a file of Hugging Face: set bpe_dir to the "
            f"folder of its {TOKENIZER_FILE}"
        )
    path = expand(folder, "bpe_dir") / TOKENIZER_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"the tokenizer {name!r} is missing ({path}): set bpe_dir to the folder of "
            f"its {TOKENIZER_FILE}"
        )
    tokenizer = FileTokenizer(path)
    if tokenizer.name != name:
        raise ValueError(
            f"{path} is the tokenizer {tokenizer.name!r}, not {name!r}: set bpe_dir to "
            "the folder of the other file"
        )
    return tokenizer


def find_tokenizer(name: str, options: ConfigDict, bpe_dir: str) -> Tokenizer:
    """Returns the tokenizer of a trained model.

    Args:
        name: Its name.
        options: Options of the training data: ``bpe_dir``, ``tokenizer`` and
            ``data_dir`` have the files.
        bpe_dir: Folder of the files, if they have moved; "" for those of training.

    Returns:
        The tokenizer, see `load_tokenizer`.

    Raises:
        ValueError: If the file that the options name is that of another tokenizer now.
    """
    folder = bpe_dir or options.get("bpe_dir", "")
    if folder or not name.startswith(FILE_PREFIX):
        return load_tokenizer(name, folder)
    given = options.get("tokenizer", "")
    if not given.endswith(".json"):
        return load_tokenizer(name, options.get("data_dir", ""))
    found = load_tokenizer(given)
    if found.name != name:
        raise ValueError(
            f"{given} is not the tokenizer of the model any more: set bpe_dir to the "
            f"folder of its {TOKENIZER_FILE}"
        )
    return found


def check_bpe_dir(name: str, bpe_dir: str) -> None:
    """Raises ValueError if a tokenizer has no use for ``bpe_dir``.

    Args:
        name: Name of the tokenizer.
        bpe_dir: The folder; "" for none.

    Raises:
        ValueError: If ``bpe_dir`` is not empty and the tokenizer has no files.
    """
    if bpe_dir and name != "gpt2" and not name.startswith(FILE_PREFIX):
        raise ValueError(
            f"bpe_dir={shorten(bpe_dir)} is the vocabulary of the tokenizer "
            f"'gpt2', but the tokenizer is {name!r}: leave out bpe_dir"
        )


def _check_bpe_files(folder: Path) -> None:
    """Raises an error unless a folder holds GPT-2's vocabulary."""
    for name, digest in GPT2_FILES.items():
        path = folder / name
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing: bpe_dir must hold GPT-2's encoder.json and "
                "vocab.bpe"
            )
        if sha256(path) != digest:
            raise ValueError(
                f"{path} is not GPT-2's (its SHA-256 differs): copy the file again"
            )


def _check_ids(tokens: AnyIds, vocab_size: int) -> list[int]:
    """Checks the range of ids and returns them as a list of Python integers.

    Example:
        >>> _check_ids([3, 256], 256)
        Traceback (most recent call last):
        ValueError: token id 256 is out of range, expected 0 to 255
    """
    found = np.asarray(tokens)
    if found.ndim != 1 or found.size and found.dtype.kind not in "iu":
        raise ValueError(
            "tokens must be the ids of one text, integers of shape [n], got shape "
            f"{found.shape} and dtype {found.dtype}: decode texts one by one"
        )
    ids = found.astype(int).tolist()
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"token id {token} is out of range, expected 0 to {vocab_size - 1}"
            )
    return ids

"""From text to token ids and back: bytes, or GPT-2's byte-pair encoding."""

import importlib
import pathlib
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Integer, UInt16

from relattn.data.paths import expand, sha256
from relattn.data.registry import check_choice

TokenIds = UInt16[np.ndarray, "_"]
AnyIds = Integer[Array | np.ndarray, "tokens"] | Sequence[int]

END_OF_TEXT = "<|endoftext|>"
# How GPT-2 cuts text into words before it merges bytes.
GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT2_FILES = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}


@runtime_checkable
class Tokenizer(Protocol):
    """Encodes text as ids below `vocab_size`, and decodes them.

    Attributes:
        name: as `load_tokenizer` knows it.
        vocab_size: number of different ids.
        end_of_text: the id that ends a document; None if there is none.
    """

    name: str
    vocab_size: int
    end_of_text: int | None

    def encode(self, text: str) -> TokenIds:
        """Returns the ids of a text; nothing in it is taken as a special token."""

    def decode(self, tokens: AnyIds) -> str:
        """Returns the text of ids; bytes that are no UTF-8 become U+FFFD."""


class ByteTokenizer:
    """The 256 bytes of UTF-8.

    Example:
        >>> tokenizer = ByteTokenizer()
        >>> tokenizer.encode("é!")
        array([195, 169,  33], dtype=uint16)
        >>> tokenizer.decode([195, 169, 33])
        'é!'
    """

    name = "bytes"
    vocab_size = 256
    end_of_text = None

    def encode(self, text: str) -> TokenIds:
        """Returns the bytes of the text."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def decode(self, tokens: AnyIds) -> str:
        """Returns the text of the bytes.

        Raises:
            ValueError: an id is no byte.
        """
        return bytes(check_ids(tokens, self.vocab_size)).decode(errors="replace")


class Gpt2Tokenizer:
    """GPT-2's byte-pair encoding, by tiktoken.

    Args:
        bpe_dir: the folder of ``encoder.json`` and ``vocab.bpe``; "" downloads them
            once into tiktoken's own cache.

    Raises:
        ImportError: tiktoken is not installed.
        FileNotFoundError: a file is missing in `bpe_dir`.
        ValueError: a file is not GPT-2's.
        ConnectionError: the vocabulary could not be downloaded.

    Source:
        Radford et al. 2019, Language Models are Unsupervised Multitask Learners.
    """

    name = "gpt2"
    vocab_size = 50257
    end_of_text = 50256

    def __init__(self, bpe_dir: str = ""):
        try:
            tiktoken = importlib.import_module("tiktoken")
            load = importlib.import_module("tiktoken.load")
        except ImportError as error:
            raise ImportError(
                "tokenizer \"gpt2\" needs tiktoken: `pip install 'relattn[text]'`, or "
                'use the tokenizer "bytes".'
            ) from error
        if bpe_dir:
            folder = expand(bpe_dir, "bpe_dir")
            check_bpe_files(folder)
            ranks = load.data_gym_to_mergeable_bpe_ranks(
                vocab_bpe_file=str(folder / "vocab.bpe"),
                encoder_json_file=str(folder / "encoder.json"),
                # With the digests tiktoken never trusts its cache of another folder.
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
                "name a folder that holds encoder.json and vocab.bpe as bpe_dir."
            ) from error

    def encode(self, text: str) -> TokenIds:
        """Returns the ids of the text."""
        return np.array(self._encoding.encode_ordinary(text), np.uint16)

    def decode(self, tokens: AnyIds) -> str:
        """Returns the text of the ids.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        return self._encoding.decode(check_ids(tokens, self.vocab_size))


TOKENIZERS = {"bytes": ByteTokenizer, "gpt2": Gpt2Tokenizer}


def load_tokenizer(name: str, bpe_dir: str = "") -> Tokenizer:
    """Returns a tokenizer by name.

    Args:
        name: "bytes" or "gpt2".
        bpe_dir: of "gpt2", the folder of ``encoder.json`` and ``vocab.bpe``; "" lets
            tiktoken download them once.

    Returns:
        The tokenizer.

    Raises:
        ValueError: the name is unknown, or a file in `bpe_dir` is not GPT-2's.
        ImportError: tiktoken is not installed.
        FileNotFoundError: a file is missing in `bpe_dir`.
        ConnectionError: the vocabulary could not be downloaded.

    Example:
        >>> load_tokenizer("bytes").encode("to be")
        array([116, 111,  32,  98, 101], dtype=uint16)
    """
    check_choice("tokenizer", name, TOKENIZERS)
    return Gpt2Tokenizer(bpe_dir) if name == "gpt2" else TOKENIZERS[name]()


def check_bpe_files(folder: pathlib.Path) -> None:
    """Raises unless a folder holds GPT-2's vocabulary.

    Args:
        folder: of ``encoder.json`` and ``vocab.bpe``.

    Raises:
        FileNotFoundError: one of them is missing.
        ValueError: one of them is not GPT-2's.
    """
    for name, digest in GPT2_FILES.items():
        path = folder / name
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing: bpe_dir must hold GPT-2's encoder.json and "
                "vocab.bpe."
            )
        if sha256(path) != digest:
            raise ValueError(
                f"{path} is not GPT-2's (its SHA-256 differs): copy the file again."
            )


def check_ids(tokens: AnyIds, vocab_size: int) -> list[int]:
    """Returns ids as a list of Python integers.

    Args:
        tokens: the ids.
        vocab_size: number of different ids.

    Returns:
        The same ids.

    Raises:
        ValueError: an id is negative or not below `vocab_size`.

    Example:
        >>> check_ids([3, 256], 256)
        Traceback (most recent call last):
        ValueError: Token id 256 is out of range: expected 0 to 255.
    """
    ids = [int(token) for token in tokens]
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"Token id {token} is out of range: expected 0 to {vocab_size - 1}."
            )
    return ids

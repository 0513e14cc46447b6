"""Files of token ids in nanoGPT's layout: ``train.bin`` and ``val.bin``, uint16.

A ``meta.json`` beside them says which tokenizer made them and how many tokens each
holds. Files without one, made by nanoGPT's own scripts, are read as well.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable

import numpy as np
from jaxtyping import Integer, UInt16

from relattn import spec
from relattn.data.choices import check_choice
from relattn.data.tokenizers import TOKENIZERS, TokenIds

TOKEN_DTYPE = np.dtype("<u2")
FILES = {"train": "train.bin", "validation": "val.bin", "test": "test.bin"}
META = "meta.json"
# Larger files are checked window by window as they are read, see `check_range`.
CHECKED_TOKENS = 2**27


@dataclasses.dataclass(frozen=True)
class TokenMeta:
    """What ``meta.json`` says.

    Attributes:
        tokenizer: that made the files.
        vocab_size: number of different tokens.
        num_tokens: of each file, by its name.
        origin: a sentence that says where the text came from.
    """

    tokenizer: str
    vocab_size: int
    num_tokens: dict[str, int] = dataclasses.field(default_factory=dict)
    origin: str = ""


def write_tokens(path: pathlib.Path, pieces: Iterable[TokenIds]) -> int:
    """Writes token ids, piece by piece.

    Args:
        path: of the file.
        pieces: one after another.

    Returns:
        The number of tokens.
    """
    count = 0
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece.astype(TOKEN_DTYPE).tobytes())
            count += len(piece)
    return count


def write_meta(folder: pathlib.Path, meta: TokenMeta) -> None:
    """Writes ``meta.json``."""
    text = json.dumps(dataclasses.asdict(meta), indent=2)
    (folder / META).write_text(f"{text}\n", "utf-8")


def read_meta(folder: pathlib.Path, tokenizer: str = "") -> TokenMeta:
    """Reads ``meta.json``, or takes `tokenizer` in its stead where there is none.

    Args:
        folder: of the token files.
        tokenizer: that is expected; "" for whatever the file says.

    Returns:
        What is known of the tokens.

    Raises:
        ValueError: the file is damaged or says another tokenizer, or there is neither
            a file nor a `tokenizer`.
    """
    if tokenizer:
        check_choice("data.tokenizer", tokenizer, TOKENIZERS)
    path = folder / META
    if not path.is_file():
        if not tokenizer:
            raise ValueError(
                f"{path} is missing: set data.tokenizer to the one that made the "
                f"files ({', '.join(map(repr, TOKENIZERS))})."
            )
        return TokenMeta(tokenizer, TOKENIZERS[tokenizer].vocab_size)
    meta = _parse_meta(path)
    if tokenizer and meta.tokenizer != tokenizer:
        raise ValueError(
            f"data.tokenizer={tokenizer!r}, but {path} says {meta.tokenizer!r}: "
            "prepare the text again or change data.tokenizer."
        )
    return meta


def _parse_meta(path: pathlib.Path) -> TokenMeta:
    try:
        values = json.loads(path.read_text("utf-8"))
        tokenizer, vocab_size = values["tokenizer"], values["vocab_size"]
        counts, origin = values.get("num_tokens", {}), values.get("origin", "")
        known = TOKENIZERS[tokenizer].vocab_size
        if vocab_size != known:
            shown = spec.shorten(vocab_size)
            raise ValueError(f"vocab_size is {shown}, expected {known}")
        if not isinstance(counts, dict) or any(
            type(n) is not int for n in counts.values()
        ):
            raise ValueError(f"num_tokens is {spec.shorten(counts)}")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"{path} cannot be used ({type(error).__name__}: {str(error)[:200]}): "
            "prepare the text again."
        ) from error
    return TokenMeta(tokenizer, vocab_size, counts, str(origin))


def open_tokens(
    path: pathlib.Path, meta: TokenMeta, min_tokens: int = 1
) -> UInt16[np.ndarray, "tokens"]:
    """Maps a file of token ids into memory and checks it.

    Args:
        path: of the file.
        meta: what is known of it.
        min_tokens: the fewest that serve.

    Returns:
        The ids, read-only. Those of up to `CHECKED_TOKENS` tokens are all below
        ``meta.vocab_size``.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is empty, odd-sized, of another length than `meta` says, too
            short, or an id is outside the vocabulary.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: write it by `python -m relattn.data.prepare_text`."
        )
    size = path.stat().st_size
    if not size:
        raise ValueError(f"{path} is empty: prepare the text again.")
    if size % TOKEN_DTYPE.itemsize:
        raise ValueError(
            f"{path} has an odd size, {size} bytes: it does not hold uint16 tokens, or "
            "was cut short."
        )
    tokens = np.memmap(path, TOKEN_DTYPE, mode="r")
    expected = meta.num_tokens.get(path.name, len(tokens))
    if len(tokens) != expected:
        raise ValueError(
            f"{path} holds {len(tokens)} tokens, but {META} says {expected}: copy or "
            "prepare it again."
        )
    check_length(tokens, min_tokens, str(path))
    if len(tokens) <= CHECKED_TOKENS:
        check_range(tokens, meta, str(path))
    return tokens


def check_whole(tokens: TokenIds) -> None:
    """Raises if the file behind mapped tokens has been cut short since.

    To read what is no longer there ends the process, or gives zeros.

    Args:
        tokens: the ids, of `open_tokens` or in memory.

    Raises:
        ValueError: the file is smaller than it was.
    """
    if not isinstance(tokens, np.memmap):
        return
    try:
        size = os.stat(tokens.filename).st_size
    except FileNotFoundError:
        # What is mapped outlives the file's name.
        return
    if size < tokens.nbytes:
        raise ValueError(
            f"{tokens.filename} was cut short from {len(tokens)} tokens to "
            f"{size // TOKEN_DTYPE.itemsize} while it was read: write it anew, under "
            "another name first, and give the same command again."
        )


def check_length(tokens: TokenIds, min_tokens: int, where: str) -> None:
    """Raises if there are too few tokens for a window.

    Args:
        tokens: the ids.
        min_tokens: of a window and the token after it.
        where: they come from, for the message.

    Raises:
        ValueError: there are fewer.
    """
    if len(tokens) < min_tokens:
        raise ValueError(
            f"{where} holds {len(tokens)} tokens, but a window of data.context_length="
            f"{min_tokens - 1} and the token after it need {min_tokens}: shorten the "
            "context or use more text."
        )


def check_range(
    tokens: UInt16[np.ndarray, "*shape"],
    meta: TokenMeta,
    where: str,
    positions: Integer[np.ndarray, "*shape"] | None = None,
) -> None:
    """Raises if an id is outside the vocabulary.

    An index out of range is no error on a device: it reads some other row.

    Args:
        tokens: the ids.
        meta: what is known of them.
        where: they come from, for the message.
        positions: of the ids there; None where they are all that is there.

    Raises:
        ValueError: an id is not below ``meta.vocab_size``.
    """
    if int(tokens.max(initial=0)) < meta.vocab_size:
        return
    first = np.unravel_index(np.argmax(tokens >= meta.vocab_size), tokens.shape)
    position = first[0] if positions is None else positions[first]
    raise ValueError(
        f"{where} holds the token id {tokens[first]} at position {position}, out of "
        f"range of the {meta.vocab_size} tokens of {meta.tokenizer!r}: it was made by "
        "another tokenizer or is no file of uint16 tokens."
    )

"""Text data: token files and windows of tokens for training and evaluation."""

from __future__ import annotations

import dataclasses
import json
import lzma
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from jaxtyping import Integer
from ml_collections import ConfigDict

from relattn.data.base import (
    ONE_SHARD,
    Batch,
    EvalSplit,
    Loader,
    ShardIndex,
    TextInfo,
    check_eval_batch,
    fill_batch,
    shard_rows,
    steps_per_epoch,
)
from relattn.data.registry import EMBEDDED_FOLDER
from relattn.data.tfds import DatasetNotPreparedError
from relattn.data.tokenizers import (
    FILE_PREFIX,
    MAX_VOCABULARY,
    TOKENIZERS,
    TokenIds,
    check_bpe_dir,
    load_tokenizer,
    token_dtype,
)
from relattn.files import expand, open_new, replace_file
from relattn.json_files import Range, check_json, read_json
from relattn.manifest import find_damage
from relattn.messages import check_choice, shorten

EMBEDDED_TEXTS = ("tinyshakespeare",)
EMBEDDED_VAL_FRACTION = 0.1
FILES = {"train": "train.bin", "validation": "val.bin", "test": "test.bin"}
META = "meta.json"

_META = {
    "tokenizer": str,
    "vocab_size": int,
    "num_tokens?": {"*": Range(0, 2**53)},
    "origin?": str,
}
# Larger files are checked window by window when read, see `check_range`.
CHECKED_TOKENS = 2**27


def load_text(config: ConfigDict) -> TextData:
    """Loads a text.

    Args:
        config: Options of the data:

            - ``context_length``: number of tokens in a window;
            - ``data_dir``: folder of ``train.bin``, ``val.bin`` and optionally
              ``test.bin`` as written by `relattn.data.prepare_text` or nanoGPT; "" for
              the text that ships with the package;
            - ``name``: name of the text, by default "tinyshakespeare" or the name of
              the folder;
            - ``tokenizer``: "bytes", "gpt2", or the path of a ``tokenizer.json`` of
              Hugging Face; "" for that of the files, or bytes;
            - ``bpe_dir``: folder of the files of "gpt2" or of a ``tokenizer.json``, see
              `relattn.data.tokenizers.load_tokenizer`;
            - ``windows_per_epoch``: number of windows in an epoch; 0 for as many as
              cover the text once.

            Only ``context_length`` is required.

    Returns:
        The text, in memory or memory-mapped. Without ``test.bin`` the test text is the
        validation text.

    Raises:
        DatasetNotPreparedError: If OpenWebText has no folder; the message says how to
            prepare it.
        FileNotFoundError: If a file is missing.
        ValueError: If an option or a file is invalid.

    Example:
        >>> data = load_text(ConfigDict({"context_length": 64}))
        >>> data.info.vocab_size, len(data.train.tokens), len(data.validation.tokens)
        (256, 1003854, 111540)
    """
    length = config.get("context_length", 0)
    if not isinstance(length, int | np.integer) or length < 1:
        raise ValueError(
            f"data.context_length={shorten(length)} must be an integer of at least 1"
        )
    windows = config.get("windows_per_epoch", 0)
    if not isinstance(windows, int | np.integer) or windows < 0:
        raise ValueError(
            f"data.windows_per_epoch={shorten(windows)} must be an integer of at least "
            "0; 0 is as many as cover the text once"
        )
    length, windows = int(length), int(windows)
    data_dir = config.get("data_dir", "")
    read = _read_folder if data_dir else _read_embedded
    name, meta, tokens, origin = read(config, length)
    where = {
        split: str(cast(np.memmap, ids).filename)
        if data_dir
        else f"the {split} text of {name}"
        for split, ids in tokens.items()
    }
    splits = {
        split: TokenSplit(ids, length, meta, where[split])
        for split, ids in tokens.items()
    }
    info = TextInfo(
        name=name,
        tokenizer=meta.tokenizer,
        vocab_size=meta.vocab_size,
        context_length=length,
        num_train=windows or len(tokens["train"]) // length,
        origin=origin,
    )
    test = splits.get("test", splits["validation"])
    return TextData(splits["train"], splits["validation"], test, info)


def _read_folder(
    config: ConfigDict, length: int
) -> tuple[str, TokenMeta, dict[str, np.ndarray], str]:
    folder = expand(config.data_dir, "data.data_dir")
    if not folder.is_dir():
        raise FileNotFoundError(
            f"the folder data.data_dir={folder} is missing: set its path if it has "
            "moved, or write it with `relattn prepare-text`"
        )
    if damage := find_damage(folder):
        raise ValueError(f"{damage}: copy or prepare the text again")
    meta = read_meta(folder, config.get("tokenizer", ""))
    check_bpe_dir(meta.tokenizer, config.get("bpe_dir", ""))
    tokens = {
        split: open_tokens(folder / file, meta, length + 1)
        for split, file in FILES.items()
        if split != "test" or (folder / file).exists()
    }
    origin = f"{meta.origin or 'the tokens'} in {folder}"
    name = config.get("name", "")
    # A configuration of a text that ships with the package, with another folder.
    name = folder.name if name in ("", *EMBEDDED_TEXTS) else name
    return name, meta, tokens, origin


def _read_embedded(
    config: ConfigDict, length: int
) -> tuple[str, TokenMeta, dict[str, np.ndarray], str]:
    name = config.get("name", "") or EMBEDDED_TEXTS[0]
    if name == "openwebtext":
        raise DatasetNotPreparedError(
            "data.data_dir is empty: set it to the folder DIR of OpenWebText's tokens, "
            "which `pip install 'relattn[openwebtext]'` and `relattn prepare-text "
            "--openwebtext --output=DIR` write once, on a machine with a network"
        )
    check_choice("data.name", name, EMBEDDED_TEXTS, " with an empty data.data_dir")
    tokenizer = load_tokenizer(
        config.get("tokenizer", "") or "bytes", config.get("bpe_dir", "")
    )
    text = embedded_text(name)
    cut = int(len(text) * (1 - EMBEDDED_VAL_FRACTION))
    tokens = {
        "train": tokenizer.encode(text[:cut]),
        "validation": tokenizer.encode(text[cut:]),
    }
    for split, ids in tokens.items():
        check_length(ids, length + 1, f"the {split} text of {name}")
    origin = f"the text {name} that ships with relattn ({len(text):,} characters)"
    meta = TokenMeta(tokenizer.name, tokenizer.vocab_size)
    return name, meta, tokens, origin


def embedded_text(name: str = EMBEDDED_TEXTS[0]) -> str:
    """Returns a text that ships with the package.

    Args:
        name: Name of the text.

    Returns:
        The whole text.

    Example:
        >>> embedded_text("tinyshakespeare")[:14]
        'First Citizen:'
    """
    path = EMBEDDED_FOLDER / name / f"{name}.txt.xz"
    return lzma.decompress(path.read_bytes()).decode()


@dataclasses.dataclass(frozen=True, eq=False)
class TextData:
    """A text, ready for training: a `DataSource`.

    Attributes:
        train: Text that training windows are drawn from.
        validation: Text for choosing a checkpoint.
        test: Text for the reported result.
        info: Description of the text.
    """

    train: TokenSplit
    validation: TokenSplit
    test: TokenSplit
    info: TextInfo

    @property
    def eval_splits(self) -> Mapping[str, EvalSplit]:
        """Returns the evaluation splits by name."""
        return {"validation": self.validation, "test": self.test}

    def train_loader(
        self,
        batch_size: int,
        seed: int,
        start_step: int = 0,
        place: Callable[[Batch], Any] | None = None,
        shard: ShardIndex = ONE_SHARD,
    ) -> Loader:
        """Iterates over random windows, see `DataSource.train_loader`.

        Raises:
            ValueError: If an epoch has fewer windows than a batch needs.
        """
        steps_per_epoch(self.info.num_train, batch_size, "windows")

        def make_batch(step: int) -> Batch:
            return self.train.draw(batch_size, seed, step, shard)

        return Loader(make_batch, start_step, place=place)


@dataclasses.dataclass(frozen=True, eq=False)
class TokenSplit:
    """Tokens that are read in windows: an `EvalSplit`.

    Attributes:
        tokens: Token ids, uint16 or uint32, in memory or memory-mapped, shape ``[n]``.
        context_length: Number of tokens in a window.
        meta: Description of the tokens.
        where: Name of the tokens in error messages.
    """

    tokens: TokenIds
    context_length: int
    meta: TokenMeta
    where: str

    def __len__(self) -> int:
        """Returns the number of evaluation windows; the last may be incomplete."""
        return -(-(len(self.tokens) - 1) // self.context_length)

    def draw(
        self, batch_size: int, seed: int, step: int, shard: ShardIndex = ONE_SHARD
    ) -> Batch:
        """Draws the windows of a training step, at uniformly random positions.

        Args:
            batch_size: Number of windows in the batch.
            seed: Seed of the draws.
            step: Training step, from 0.
            shard: Shard of the batch to return, see `shard_rows`.

        Returns:
            A batch, a pure function of the arguments: ``tokens`` and ``label``, the
            tokens that follow them, both int32 of shape
            ``[batch_size, context_length]``.

        Raises:
            ValueError: If a token is outside the vocabulary, or the file was truncated.

        Example:
            >>> meta = TokenMeta("bytes", 256)
            >>> split = TokenSplit(np.arange(7, dtype=np.uint16), 3, meta, "numbers")
            >>> batch = split.draw(batch_size=1, seed=0, step=0)
            >>> (batch["label"] - batch["tokens"]).tolist()
            [[1, 1, 1]]
        """
        last = len(self.tokens) - self.context_length
        starts = np.random.default_rng([seed, step]).integers(last, size=batch_size)
        starts = starts[shard_rows(batch_size, shard)]
        return self._gather(starts[:, None] + np.arange(self.context_length + 1))

    def batches(
        self, batch_size: int, shard: ShardIndex = ONE_SHARD
    ) -> Iterator[Batch]:
        """Yields consecutive windows that predict every token but the first once.

        The context of a token is the part of its window before it.

        Args:
            batch_size: Number of windows in a batch.
            shard: Shard of each batch to yield, see `shard_rows`.

        Yields:
            Batches: ``tokens``, ``label``, the tokens that follow them, both int32, and
            ``weight``, float32, 0 past the last token, all of shape
            ``[batch_size, context_length]``.

        Raises:
            ValueError: If ``batch_size`` is not positive, a token is outside the
                vocabulary, or the file was truncated.

        Example:
            >>> meta = TokenMeta("bytes", 256)
            >>> split = TokenSplit(np.arange(6, dtype=np.uint16), 3, meta, "numbers")
            >>> for batch in split.batches(1):
            ...     print(batch["label"], batch["weight"])
            [[1 2 3]] [[1. 1. 1.]]
            [[4 5 0]] [[1. 1. 0.]]
        """
        check_eval_batch(batch_size)
        n, length = len(self.tokens), self.context_length
        local = shard_rows(batch_size, shard)
        for first in range(0, len(self), batch_size):
            rows = np.arange(first + local.start, min(first + local.stop, len(self)))
            positions = rows[:, None] * length + np.arange(length + 1)
            batch = self._gather(np.minimum(positions, n - 1))
            batch["weight"] = (positions[:, 1:] < n).astype(np.float32)
            for name in ("tokens", "label"):
                batch[name] *= batch["weight"].astype(np.int32)
            yield fill_batch(batch, local.stop - local.start)

    def _gather(self, positions: np.ndarray) -> Batch:
        _check_not_truncated(self.tokens)
        windows = self.tokens[positions]
        check_range(windows, self.meta, self.where, positions)
        windows = windows.astype(np.int32)
        return {"tokens": windows[:, :-1].copy(), "label": windows[:, 1:].copy()}


@dataclasses.dataclass(frozen=True)
class TokenMeta:
    """Description of token files, stored in ``meta.json``.

    Attributes:
        tokenizer: Name of the tokenizer that encoded the files.
        vocab_size: Number of different tokens.
        num_tokens: Number of tokens of each file, by file name.
        origin: Where the text came from, in words.
    """

    tokenizer: str
    vocab_size: int
    num_tokens: dict[str, int] = dataclasses.field(default_factory=dict)
    origin: str = ""


def write_meta(folder: Path, meta: TokenMeta) -> None:
    """Writes ``meta.json``."""
    text = json.dumps(dataclasses.asdict(meta), indent=2)
    replace_file(folder / META, f"{text}\n")


def read_meta(folder: Path, tokenizer: str = "") -> TokenMeta:
    """Reads ``meta.json``, or describes the files by ``tokenizer`` if there is none.

    Args:
        folder: Folder of the token files.
        tokenizer: The expected tokenizer; "" accepts that of the file.

    Returns:
        The description of the tokens.

    Raises:
        ValueError: If the file is damaged or names another tokenizer, or there is
            neither a file nor a ``tokenizer``.
    """
    known = {name: each.vocab_size for name, each in TOKENIZERS.items()}
    if tokenizer.endswith(".json"):
        found = load_tokenizer(tokenizer)
        tokenizer = found.name
        known[tokenizer] = found.vocab_size
    path = folder / META
    if tokenizer and not (path.is_file() and tokenizer.startswith(FILE_PREFIX)):
        check_choice("data.tokenizer", tokenizer, known)
    if not path.is_file():
        if not tokenizer:
            raise ValueError(
                f"{path} is missing: write it and the tokens with `relattn "
                "prepare-text`, or set data.tokenizer to the one that encoded the "
                f"files ({', '.join(map(repr, TOKENIZERS))}, or a tokenizer.json)"
            )
        return TokenMeta(tokenizer, known[tokenizer])
    meta = _parse_meta(path)
    if tokenizer and meta.tokenizer != tokenizer:
        raise ValueError(
            f"data.tokenizer={tokenizer!r}, but {path} says {meta.tokenizer!r}: "
            "set data.tokenizer to '' to use that one, or prepare the text again"
        )
    return meta


def _parse_meta(path: Path) -> TokenMeta:
    try:
        values = read_json(path, _META)
        tokenizer, vocab_size = values["tokenizer"], values["vocab_size"]
        known = vocab_size
        if tokenizer.startswith(FILE_PREFIX):
            check_json(vocab_size, Range(1, MAX_VOCABULARY), path, "vocab_size")
        else:
            check_choice("tokenizer", tokenizer, TOKENIZERS, f" in {path}")
            known = TOKENIZERS[tokenizer].vocab_size
        if vocab_size != known:
            raise ValueError(
                f"{path} has vocab_size={vocab_size}, but the tokenizer {tokenizer!r} "
                f"has {known}"
            )
    except ValueError as error:
        raise ValueError(f"{error}; prepare the text again") from error
    counts, origin = values.get("num_tokens", {}), values.get("origin", "")
    return TokenMeta(tokenizer, vocab_size, counts, origin)


def write_tokens(path: Path, pieces: Iterable[TokenIds], vocab_size: int) -> int:
    """Writes token ids, piece by piece, as `token_dtype` of the vocabulary.

    Args:
        path: Path of the file.
        pieces: Token ids in order.
        vocab_size: Number of different ids.

    Returns:
        The number of tokens.
    """
    count = 0
    with open_new(path) as file:
        for piece in pieces:
            file.write(piece.astype(token_dtype(vocab_size)).tobytes())
            count += len(piece)
    return count


def open_tokens(path: Path, meta: TokenMeta, min_tokens: int = 1) -> TokenIds:
    """Memory-maps a file of token ids and checks it.

    Args:
        path: Path of the file.
        meta: Description of the file.
        min_tokens: Minimum number of tokens.

    Returns:
        The ids, read-only. In a file of up to `CHECKED_TOKENS` tokens, all are below
        ``meta.vocab_size``.

    Raises:
        FileNotFoundError: If the file is missing.
        ValueError: If it is empty, its size is not a multiple of a token's, it has
            another length than ``meta`` says or too few tokens, or an id is outside the
            vocabulary.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: write it with `relattn prepare-text`"
        )
    size = path.stat().st_size
    if not size:
        raise ValueError(f"{path} is empty: prepare the text again")
    dtype = token_dtype(meta.vocab_size)
    if size % dtype.itemsize:
        raise ValueError(
            f"{path} has {size} bytes, not a multiple of {dtype.itemsize}, so it does "
            f"not hold {dtype} tokens or was truncated: prepare the text again"
        )
    tokens = np.memmap(path, dtype, mode="r")
    expected = meta.num_tokens.get(path.name, len(tokens))
    if len(tokens) != expected:
        raise ValueError(
            f"{path} holds {len(tokens)} tokens, but {META} says {expected}: copy or "
            "prepare it again"
        )
    check_length(tokens, min_tokens, str(path))
    if len(tokens) <= CHECKED_TOKENS:
        check_range(tokens, meta, str(path))
    return tokens


def _check_not_truncated(tokens: TokenIds) -> None:
    """Raises ValueError if the file of memory-mapped tokens has been truncated.

    Reading past its end kills the process, or returns zeros.
    """
    if not isinstance(tokens, np.memmap) or tokens.filename is None:
        return
    try:
        size = Path(tokens.filename).stat().st_size
    except FileNotFoundError:
        # The mapping of a deleted file remains valid.
        return
    if size < tokens.nbytes:
        raise ValueError(
            f"{tokens.filename} was truncated from {len(tokens)} tokens to "
            f"{size // tokens.itemsize} while it was read: write it again under "
            "another name, rename it, and repeat the command"
        )


def check_length(tokens: TokenIds, min_tokens: int, where: str) -> None:
    """Raises ValueError if there are too few tokens for a window.

    Args:
        tokens: The ids.
        min_tokens: Number of tokens in a window and the token after it.
        where: Name of the tokens in the error message.

    Raises:
        ValueError: If there are fewer tokens.
    """
    if len(tokens) < min_tokens:
        raise ValueError(
            f"{where} holds {len(tokens)} tokens, but a window of data.context_length="
            f"{min_tokens - 1} and the token after it need {min_tokens}: shorten the "
            "context or use more text"
        )


def check_range(
    tokens: Integer[np.ndarray, "*shape"],
    meta: TokenMeta,
    where: str,
    positions: Integer[np.ndarray, "*shape"] | None = None,
) -> None:
    """Raises ValueError if an id is outside the vocabulary.

    A device raises no error on such an id: it reads another row of the embedding.

    Args:
        tokens: The ids.
        meta: Description of the tokens.
        where: Name of the tokens in the error message.
        positions: Positions of the ids in the text; None for 0, 1, ...

    Raises:
        ValueError: If an id is not below ``meta.vocab_size``.
    """
    if int(tokens.max(initial=0)) < meta.vocab_size:
        return
    first = np.unravel_index(np.argmax(tokens >= meta.vocab_size), tokens.shape)
    position = first[0] if positions is None else positions[first]
    raise ValueError(
        f"{where} holds the token id {tokens[first]} at position {position}, out of "
        f"range of the {meta.vocab_size} tokens of {meta.tokenizer!r}: prepare the "
        f"text again as {token_dtype(meta.vocab_size)} tokens of this tokenizer"
    )

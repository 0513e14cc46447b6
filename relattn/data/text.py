"""Text: files of token ids, and windows of them ready for training."""

import dataclasses
import json
import lzma
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from jaxtyping import Integer, UInt16
from ml_collections import ConfigDict

from relattn import spec
from relattn.data.base import (
    Batch,
    EvalSplit,
    Loader,
    TextInfo,
    check_eval_batch,
    fill_batch,
    part_rows,
    steps_per_epoch,
)
from relattn.data.paths import expand, find_damage
from relattn.data.registry import EMBEDDED_FOLDER, check_choice
from relattn.data.tfds import DatasetNotPreparedError
from relattn.data.tokenizers import TOKENIZERS, TokenIds, load_tokenizer

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


EMBEDDED_TEXTS = ("tinyshakespeare",)
EMBEDDED_VAL_FRACTION = 0.1


@dataclasses.dataclass(frozen=True, eq=False)
class TokenSplit:
    """Tokens cut into windows, one after another: an `EvalSplit`.

    Attributes:
        tokens: uint16 [n], in memory or memory-mapped.
        context_length: tokens in a window.
        meta: what is known of the tokens.
        where: they come from, for messages.
    """

    tokens: UInt16[np.ndarray, "n"]
    context_length: int
    meta: TokenMeta
    where: str

    def __len__(self) -> int:
        """Number of windows; the last may be in part empty."""
        return -(-(len(self.tokens) - 1) // self.context_length)

    def draw(
        self, batch_size: int, seed: int, step: int, part: tuple[int, int] = (0, 1)
    ) -> Batch:
        """Returns the windows of a training step, each drawn from anywhere.

        Args:
            batch_size: windows in the batch.
            seed: of the draws.
            step: of training, from 0.
            part: of the batch to return, see `part_rows`.

        Returns:
            {"tokens": int32 [batch_size, context_length], "label": the tokens that
            follow them}: a pure function of the arguments.

        Raises:
            ValueError: a token is outside the vocabulary, or the file was cut short.

        Example:
            >>> meta = TokenMeta("bytes", 256)
            >>> split = TokenSplit(np.arange(7, dtype=np.uint16), 3, meta, "numbers")
            >>> batch = split.draw(batch_size=1, seed=0, step=0)
            >>> (batch["label"] - batch["tokens"]).tolist()
            [[1, 1, 1]]
        """
        last = len(self.tokens) - self.context_length
        starts = np.random.default_rng([seed, step]).integers(last, size=batch_size)
        starts = starts[part_rows(batch_size, part)]
        return self._batch(starts[:, None] + np.arange(self.context_length + 1))

    def batches(
        self, batch_size: int, part: tuple[int, int] = (0, 1)
    ) -> Iterator[Batch]:
        """Yields the windows in order: every token once, each predicted but the first.

        A window's first tokens have only those before them in the window as context.

        Args:
            batch_size: windows in a batch.
            part: of each batch to yield, see `part_rows`.

        Yields:
            {"tokens": int32 [batch_size, context_length], "label": the tokens that
            follow them, "weight": float32, 0 past the last token}.

        Raises:
            ValueError: `batch_size` is not positive, a token is outside the
                vocabulary, or the file was cut short.

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
        own = part_rows(batch_size, part)
        for first in range(0, len(self), batch_size):
            rows = np.arange(first + own.start, min(first + own.stop, len(self)))
            places = rows[:, None] * length + np.arange(length + 1)
            batch = self._batch(np.minimum(places, n - 1))
            batch["weight"] = (places[:, 1:] < n).astype(np.float32)
            for name in ("tokens", "label"):
                batch[name] *= batch["weight"].astype(np.int32)
            yield fill_batch(batch, own.stop - own.start)

    def _batch(self, places: np.ndarray) -> Batch:
        check_whole(self.tokens)
        windows = self.tokens[places]
        check_range(windows, self.meta, self.where, places)
        windows = windows.astype(np.int32)
        return {"tokens": windows[:, :-1].copy(), "label": windows[:, 1:].copy()}


@dataclasses.dataclass(frozen=True, eq=False)
class TextData:
    """A text, ready for training: a `DataSource`.

    Attributes:
        train: the text to draw windows from.
        validation: the text to choose a checkpoint by.
        test: the text to report on.
        info: what a model needs to know of it.
    """

    train: TokenSplit
    validation: TokenSplit
    test: TokenSplit
    info: TextInfo

    @property
    def eval_splits(self) -> Mapping[str, EvalSplit]:
        """The splits to evaluate on by name."""
        return {"validation": self.validation, "test": self.test}

    def train_loader(
        self,
        batch_size: int,
        seed: int,
        start_step: int = 0,
        place: Callable[[Batch], Any] | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> Loader:
        """Iterates over random windows, see `DataSource.train_loader`.

        Raises:
            ValueError: an epoch has fewer windows than a batch needs.
        """
        steps_per_epoch(self.info.num_train, batch_size, "windows")

        def make_batch(step: int) -> Batch:
            return self.train.draw(batch_size, seed, step, part)

        return Loader(make_batch, start_step, place=place)


def load_text(config: ConfigDict) -> TextData:
    """Loads a text as a configuration says.

    Args:
        config: with the keys

            - ``context_length``: tokens in a window;
            - ``data_dir``: the folder of ``train.bin``, ``val.bin`` and perhaps
              ``test.bin`` as `relattn.data.prepare_text` or nanoGPT writes them; "" for
              the text that ships with the package;
            - ``name``: by default "tinyshakespeare", or that of the folder;
            - ``tokenizer``: "bytes" or "gpt2"; "" for that of the files, or bytes;
            - ``bpe_dir``: of "gpt2", see `relattn.data.tokenizers.load_tokenizer`;
            - ``windows_per_epoch``: what counts as an epoch; 0 for as many windows as
              hold the text once.

            All but ``context_length`` may be missing.

    Returns:
        The text, in memory or memory-mapped. Without ``test.bin`` the text to test on
        is that of validation.

    Raises:
        DatasetNotPreparedError: OpenWebText has no folder; the message says how to
            prepare it.
        FileNotFoundError: a file is missing.
        ValueError: a key or a file cannot be used; the message says why.

    Example:
        >>> data = load_text(ConfigDict({"context_length": 64}))
        >>> data.info.vocab_size, len(data.train.tokens), len(data.validation.tokens)
        (256, 1003854, 111540)
    """
    length = config.get("context_length", 0)
    if length < 1:
        raise ValueError(f"data.context_length={length}: it must be at least 1.")
    windows = config.get("windows_per_epoch", 0)
    if windows < 0:
        raise ValueError(
            f"data.windows_per_epoch={windows}: it must be at least 1, or 0 for as "
            "many as hold the text once."
        )
    data_dir = config.get("data_dir", "")
    read = _read_folder if data_dir else _read_embedded
    name, meta, tokens, origin = read(config, length)
    where = {
        part: str(ids.filename) if data_dir else f"The {part} text of {name}"
        for part, ids in tokens.items()
    }
    splits = {
        part: TokenSplit(ids, length, meta, where[part]) for part, ids in tokens.items()
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


Text = tuple[str, TokenMeta, dict[str, np.ndarray], str]


def _read_folder(config: ConfigDict, length: int) -> Text:
    folder = expand(config.data_dir, "data.data_dir")
    if not folder.is_dir():
        raise FileNotFoundError(
            f"The folder data.data_dir={folder} is missing: write it by `python -m "
            "relattn.data.prepare_text`."
        )
    if damage := find_damage(folder):
        raise ValueError(f"{damage}: copy or prepare the text again.")
    meta = read_meta(folder, config.get("tokenizer", ""))
    tokens = {
        part: open_tokens(folder / file, meta, length + 1)
        for part, file in FILES.items()
        if part != "test" or (folder / file).exists()
    }
    origin = f"{meta.origin or 'the tokens'} in {folder}"
    return config.get("name", "") or folder.name, meta, tokens, origin


def _read_embedded(config: ConfigDict, length: int) -> Text:
    name = config.get("name", "") or EMBEDDED_TEXTS[0]
    if name == "openwebtext":
        raise DatasetNotPreparedError(
            "data.data_dir is empty: name the folder DIR of OpenWebText's tokens. "
            "Prepare it once, on a machine with a network: `pip install "
            "'relattn[openwebtext]'`, then `python -m relattn.data.prepare_text "
            "--openwebtext --output=DIR`."
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
    for part, ids in tokens.items():
        check_length(ids, length + 1, f"The {part} text of {name}")
    origin = f"the text {name} that ships with relattn ({len(text):,} characters)"
    meta = TokenMeta(tokenizer.name, tokenizer.vocab_size)
    return name, meta, tokens, origin


def embedded_text(name: str = EMBEDDED_TEXTS[0]) -> str:
    """Returns a text that ships with the package.

    Args:
        name: of the text.

    Returns:
        The whole text.

    Example:
        >>> embedded_text("tinyshakespeare")[:14]
        'First Citizen:'
    """
    path = EMBEDDED_FOLDER / name / f"{name}.txt.xz"
    return lzma.decompress(path.read_bytes()).decode()

"""Text as windows of tokens, ready for training: a `DataSource`."""

import dataclasses
import lzma
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from jaxtyping import UInt16
from ml_collections import ConfigDict

from relattn.data.batches import (
    Batch,
    check_eval_batch,
    fill_batch,
    part_rows,
    steps_per_epoch,
)
from relattn.data.catalogue import EMBEDDED_FOLDER
from relattn.data.choices import check_choice
from relattn.data.full import DatasetNotPreparedError
from relattn.data.loader import Loader
from relattn.data.manifest import find_damage
from relattn.data.paths import expand
from relattn.data.source import EvalSplit, TextInfo
from relattn.data.token_files import (
    FILES,
    TokenMeta,
    check_length,
    check_range,
    check_whole,
    open_tokens,
    read_meta,
)
from relattn.data.tokenizers import load_tokenizer

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

"""Predictions of a trained run: classes of images or points, texts continued."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int
from tqdm import tqdm

from relattn import models
from relattn.command import lacks_resources, one_line
from relattn.data import (
    DataInfo,
    ImageInfo,
    PointInfo,
    TextInfo,
    Tokenizer,
    TokenSplit,
    read_images,
    read_point_sets,
)
from relattn.data.prepare_text import LINES_SUFFIXES, is_unicode
from relattn.data.text import TokenMeta
from relattn.data.tokenizers import (
    FILE_PREFIX,
    TOKENIZER_FILE,
    FileTokenizer,
    find_tokenizer,
)
from relattn.data.user_images import as_sequence
from relattn.files import naming
from relattn.messages import shorten
from relattn.models.image_features import features_fn
from relattn.training.config import LARGEST_SEED

if TYPE_CHECKING:
    from relattn.training.run import Run


@dataclasses.dataclass(frozen=True, eq=False)
class Predictions:
    """Class probabilities of images or of sets of points.

    Attributes:
        probabilities: float32 ``[n, classes]``; rows sum to 1.
        class_names: Class names in label order.

    Example:
        >>> found = Predictions(np.float32([[0.25, 0.75]]), ("cat", "dog"))
        >>> found.classes, found.labels.tolist()
        (['dog'], [1])
    """

    probabilities: Float[np.ndarray, "n classes"]
    class_names: tuple[str, ...]

    @property
    def labels(self) -> Int[np.ndarray, " n"]:
        """The most likely class of each example, as a number."""
        return self.probabilities.argmax(axis=-1)

    @property
    def classes(self) -> list[str]:
        """The most likely class of each example, by name."""
        return [self.class_names[label] for label in self.labels]


def predict(
    run: Run,
    logits: Callable[[Any], jax.Array],
    inputs: Any,
    batch_size: int,
    progress: bool,
) -> Predictions:
    """Predicts the classes of images or of sets of points; see `Run.predict`.

    Args:
        run: A run on images or points.
        logits: Maps inputs of the model to logits.
        inputs: See `Run.predict`.
        batch_size: Number of examples in a batch.
        progress: Whether to show a progress bar on a terminal.

    Returns:
        The class probabilities.

    Warns:
        UserWarning: If some are NaN.
    """
    info = _class_info(run)
    found = [np.zeros((0, info.num_classes), np.float32)]
    for batch, count in _inputs(run, inputs, batch_size, "Predicting", progress):
        out = np.asarray(jax.nn.softmax(logits(batch)))
        found.append(out[:count])
    probabilities = np.concatenate(found)
    warn_of_nan(probabilities)
    return Predictions(probabilities, info.class_names)


def warn_of_nan(probabilities: Float[np.ndarray, "n classes"]) -> None:
    """Warns of probabilities of NaN, whose class would be the first.

    Args:
        probabilities: Class probabilities, ``[n, classes]``.
    """
    undefined = int(np.isnan(probabilities).any(axis=-1).sum())
    if undefined:
        warnings.warn(
            f"the model's logits are NaN for {undefined} of {len(probabilities)} "
            "inputs, so it predicts no class for them: look for NaN in its parameters, "
            "or compute in float32",
            stacklevel=4,
        )


def features(
    run: Run,
    images: Any,
    layers: Sequence[int],
    norm: bool,
    batch_size: int,
    progress: bool,
) -> models.ImageFeatures:
    """Computes features of images; see `Run.features`."""
    require_kind(run, "images")
    function = features_fn(run.model, layers, norm)
    variables = jax.device_put(run.variables)
    found = [
        jax.tree.map(
            lambda x, count=count: np.asarray(x)[:count], function(variables, x)
        )
        for x, count in _inputs(run, images, batch_size, "Reading features", progress)
    ]
    if not found:
        raise ValueError("images is empty: pass at least one image")
    return jax.tree.map(lambda *parts: np.concatenate(parts), *found)


def _inputs(
    run: Run, inputs: Any, batch_size: int, what: str, progress: bool
) -> Iterator[tuple[jax.Array, int]]:
    """Yields padded batches of inputs, and how many inputs are not padding."""
    key, total, batches = _stored(run, inputs, batch_size)
    if isinstance(run.data, PointInfo) and isinstance(
        run.model, models.PointTransformer
    ):
        point_shape = run.data.point_shape
        batches = (pad_points(batch, point_shape) for batch in batches)
    batch_size = max(1, min(batch_size, total))
    with tqdm(
        total=total,
        desc=what,
        unit=f" {key}s" if key == "image" else " sets",
        delay=2,
        disable=None if progress else True,
    ) as bar:
        for batch in batches:
            # A fixed batch size is compiled once.
            padding = [(0, batch_size - len(batch))] + [(0, 0)] * (batch.ndim - 1)
            yield run.preprocess({key: np.pad(batch, padding)}), len(batch)
            bar.update(len(batch))


def pad_points(
    points: Float[Any, "n points columns"], point_shape: Sequence[int]
) -> Float[np.ndarray, "n padded columns"]:
    """Adds up to a quarter of padding to sets of other sizes than in training.

    Predictions of sets of many sizes, one after another, compile few programs.

    Args:
        points: Positions and features; NaN for padding.
        point_shape: Number of points of a set in training, and of axes and channels.

    Returns:
        The sets, ``[n, padded, columns]``.

    Example:
        >>> pad_points(np.zeros((3, 11, 2)), (7, 2, 0)).shape
        (3, 12, 2)
    """
    n = points.shape[1]
    missing = 0 if n == point_shape[0] else -n % 2 ** max(0, n.bit_length() - 3)
    return np.pad(points, [(0, 0), (0, missing), (0, 0)], constant_values=np.nan)


def _stored(
    run: Run, inputs: Any, batch_size: int
) -> tuple[str, int, Iterator[np.ndarray]]:
    """Reads a user's examples as a data set stores them.

    Returns:
        Their key in a batch, their number, and batches of them; the last one may be
        smaller.
    """
    info = _class_info(run)
    if info.kind == "points":
        points = read_point_sets(inputs, info)
        starts = range(0, len(points), batch_size)
        return "points", len(points), (points[i : i + batch_size] for i in starts)
    images = as_sequence(inputs, info.image_shape)
    batches = read_images(images, run.config.data, info, batch_size)
    return "image", len(images), batches


def _class_info(run: Run) -> ImageInfo | PointInfo:
    """Returns the data's description; raises ValueError if it has no classes."""
    return run.data if run.data.kind == "points" else require_kind(run, "images")


def attention_weights(
    run: Run, inputs: Any, layer: int
) -> Float[np.ndarray, "batch heads n n"]:
    """Computes the attention weights of a layer; see `Run.attention_weights`."""
    if run.data.kind == "tokens":
        tokens = _encode(read_tokenizer(run), inputs)[None]
        inputs = jnp.asarray(tokens)
    else:
        key, _, batches = _stored(run, inputs, sys.maxsize)
        batch = next(batches, None)
        if batch is None:
            raise ValueError("inputs is empty: pass at least one example")
        inputs = jnp.asarray(run.preprocess({key: batch}))
    layers = models.attention_weights(run.model, run.variables, inputs)
    if layer not in range(-len(layers), len(layers)):
        raise ValueError(
            f"layer={shorten(layer)}: the model has layers 0 to {len(layers) - 1}, or "
            "-1 for the last"
        )
    return np.asarray(layers[layer])


def generate(
    run: Run,
    prompt: str | Sequence[str],
    *,
    num_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    stop: str,
    bos: bool,
    seed: int,
    bpe_dir: str,
) -> str | list[str]:
    """Continues prompts; see `Run.generate`."""
    tokenizer = read_tokenizer(run, bpe_dir)
    context_length = require_kind(run, "tokens").context_length
    if not 0 <= seed <= LARGEST_SEED:
        raise ValueError(f"seed must be from 0 to {LARGEST_SEED}, got {shorten(seed)}")
    is_list = isinstance(prompt, Iterable) and not isinstance(prompt, str | bytes)
    prompts: list[Any] = list(prompt) if is_list else [prompt]
    first = _encode_bos(tokenizer) if bos else np.zeros(0, np.int32)
    tokens = [np.concatenate([first, _encode(tokenizer, text)]) for text in prompts]
    lengths = [len(row) for row in tokens]
    stop_token = _stop_token(stop, tokenizer)
    out = models.generate(
        run.model,
        run.variables,
        tokens,
        num_tokens or max(context_length - max(lengths, default=0), 1),
        key=jax.random.key(seed),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop_token=stop_token,
    )
    texts = []
    for row, length in zip(np.asarray(out), lengths, strict=True):
        # Each text ends where it would without the other prompts, which may be longer.
        filled = max(context_length, length + 1)
        row = row[: length + num_tokens if num_tokens else filled]
        ends = np.flatnonzero(row[length:] == stop_token)
        row = row[: length + ends[0]] if len(ends) else row
        texts.append(tokenizer.decode(row[len(first) :]))
    return texts[0] if isinstance(prompt, str) else texts


def _encode(tokenizer: Tokenizer, text: str) -> Int[np.ndarray, " n"]:
    """Returns the ids of a text; raises ValueError if it is not a text."""
    if not isinstance(text, str):
        raise ValueError(f"expected a text, a str, got {shorten(text)}")
    if not is_unicode(text):
        raise ValueError(
            f"the text {shorten(text)} has half of a surrogate pair: leave it out, or "
            "pass the text as UTF-8"
        )
    return tokenizer.encode(text).astype(np.int32)


def _encode_bos(tokenizer: Tokenizer) -> Int[np.ndarray, " n"]:
    if not isinstance(tokenizer, FileTokenizer):
        raise ValueError(
            f"bos is for a {TOKENIZER_FILE} of Hugging Face, but the tokenizer is "
            f"{tokenizer.name!r}: leave out bos"
        )
    return tokenizer.encode_bos().astype(np.int32)


def _stop_token(stop: str, tokenizer: Tokenizer) -> int | None:
    if not stop:
        return tokenizer.end_of_text
    tokens = _encode(tokenizer, stop)
    if len(tokens) != 1:
        raise ValueError(
            f"stop={shorten(stop)} is {len(tokens)} tokens of the tokenizer "
            f"{tokenizer.name!r}: pass a text of one token"
        )
    return int(tokens[0])


def read_tokenizer(run: Run, bpe_dir: str = "") -> Tokenizer:
    """Loads the tokenizer of a run on text.

    Args:
        run: The run.
        bpe_dir: Folder of the tokenizer's files; "" for that of training.

    Returns:
        The tokenizer.

    Raises:
        ValueError: If the run is not of text, or its vocabulary is not the tokenizer's.
    """
    info = require_kind(run, "tokens")
    tokenizer = find_tokenizer(info.tokenizer, run.config.data, bpe_dir)
    if tokenizer.vocab_size != info.vocab_size:
        raise ValueError(
            f"the checkpoint has a vocabulary of {info.vocab_size} tokens, but the "
            f"tokenizer {tokenizer.name!r} has {tokenizer.vocab_size}"
        )
    return tokenizer


def read_tokenizer_file(run: Run) -> bytes | None:
    """Reads the ``tokenizer.json`` of a run.

    Args:
        run: The run.

    Returns:
        The contents; None if the run has another tokenizer, or none.

    Warns:
        UserWarning: If the file is missing, or not that of the training any more.
    """
    if isinstance(run.data, TextInfo) and run.data.tokenizer.startswith(FILE_PREFIX):
        try:
            return cast(FileTokenizer, read_tokenizer(run)).content
        except (ImportError, OSError, ValueError) as error:
            if lacks_resources(error):
                raise
            warnings.warn(
                f"the model is written without its {TOKENIZER_FILE} "
                f"({one_line(error)}): copy it into the folder",
                stacklevel=3,
            )
    return None


def read_text_split(
    run: Run, path: str | Path, bpe_dir: str = ""
) -> tuple[TokenSplit, int]:
    """Reads a text file as windows of the model's context.

    A short text has one window, of at most twice its length: the model may read 131,072
    tokens. That is a power of two, so that texts of many lengths compile few programs.

    Args:
        run: A run on text.
        path: A UTF-8 text file.
        bpe_dir: Folder of the tokenizer's files; "" for that of training.

    Returns:
        The windows, and the number of bytes that they predict: those of every token but
        the first.

    Raises:
        FileNotFoundError: If the file is missing.
        IsADirectoryError: If it is a folder.
        ValueError: If it is JSON, not UTF-8, or has fewer than two tokens.
    """
    tokenizer = read_tokenizer(run, bpe_dir)
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: pass its text files")
    if not path.is_file():
        raise FileNotFoundError(f"the text file {path} is missing")
    if path.suffix.lower() in (".json", *LINES_SUFFIXES):
        raise ValueError(
            f"{path} is JSON, whose names and quotes would count as text: write its "
            "texts to a file .txt, or rename it to .txt if it is a text"
        )
    try:
        with naming(path):
            # A byte order mark, as Windows writes it, is not a part of the text.
            text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}): convert "
            "it to UTF-8"
        ) from error
    tokens = tokenizer.encode(text)
    if len(tokens) < 2:
        raise ValueError(f"{path} has {len(tokens)} tokens: pass at least 2")
    first = tokenizer.decode(tokens[:1])
    if not text.startswith(" "):
        # Some tokenizers put a space before a text.
        first = first.removeprefix(" ")
    # A token that ends inside a character decodes to U+FFFD; a byte is one byte.
    skipped = 1 if tokenizer.name == "bytes" else len(first.encode())
    # That of an unknown word may be longer than the text.
    num_bytes = max(len(text.encode()) - skipped, 1)
    meta = TokenMeta(tokenizer.name, tokenizer.vocab_size)
    context_length = require_kind(run, "tokens").context_length
    window = min(context_length, 1 << (len(tokens) - 2).bit_length())
    return TokenSplit(tokens, window, meta, str(path)), num_bytes


@overload
def require_kind(run: Run, kind: Literal["images"]) -> ImageInfo: ...
@overload
def require_kind(run: Run, kind: Literal["tokens"]) -> TextInfo: ...
def require_kind(run: Run, kind: str) -> DataInfo:
    """Returns the data's description; raises ValueError if it is of another kind.

    Args:
        run: The run.
        kind: ``"images"`` or ``"tokens"``.
    """
    names = {"images": "images", "tokens": "text", "points": "points"}
    if run.data.kind != kind:
        raise ValueError(
            f"the run in {run.workdir} was trained on {names[run.data.kind]}, not on "
            f"{names[kind]}"
        )
    return run.data

"""A trained run: predicts with it and evaluates it."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast, overload

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict

from relattn import data as data_lib
from relattn import models
from relattn.data import DataInfo, DataSource, EvalSplit, ImageSplit, PointSplit
from relattn.data.base import check_eval_batch
from relattn.data.images import check_labels
from relattn.files import expand, hide_all_folders, hide_folders
from relattn.messages import check_choice
from relattn.models import pretrained
from relattn.models.hub import is_hub_id
from relattn.models.model_card import model_card
from relattn.training import predict as predict_lib
from relattn.training.config import to_json
from relattn.training.devices import make_parallel
from relattn.training.draws import check_draws, draw_features, make_average_fn
from relattn.training.evaluator import Evaluator
from relattn.training.given_data import require_data
from relattn.training.metrics import metrics_of
from relattn.training.parallel import Device, list_devices
from relattn.training.predict import Predictions
from relattn.training.resume import check_columns, check_fits
from relattn.training.step import Batch, make_eval_step
from relattn.training.task import data_sizes
from relattn.training.workdir import read_result, write_text


@dataclasses.dataclass(frozen=True)
class Run:
    """A trained model and everything needed to use it; `load_run` returns it.

    `predict`, `evaluate` and `generate` are what most users need; `make_predict_fn`
    returns the compiled model.

    Attributes:
        config: The configuration of training, except for ``data.image_size`` or
            ``data.context_length`` if `load_run` changed it.
        model: The Flax module.
        variables: Parameters, random features and moving statistics, on the host.
        step: Number of updates in the checkpoint.
        data: The description of the training data.
        preprocess: Maps a batch, such as ``{"image": uint8 [batch, h, w, channels]}``,
            to the model's inputs, float32 ``[batch, *image_size, channels]``; jit-able.
        workdir: The run directory.
        checkpoint: ``"best"`` or ``"latest"``.
        given: Whether the training data were given in memory: calls that need them
            take them as ``data=``.
        contents: A hash of the training data; "" if it is not known.
        resized: Whether `load_run` changed the size of the images or texts.
    """

    config: ConfigDict
    model: nn.Module
    variables: dict[str, Any]
    step: int
    data: DataInfo
    preprocess: Callable[[Batch], jax.Array]
    workdir: Path
    checkpoint: str
    given: bool = False
    contents: str = ""
    resized: bool = False

    def __repr__(self) -> str:
        """Returns a line, without the arrays of the variables."""
        model = type(self.model).__name__
        return (
            f"Run({str(self.workdir)!r}, {model}, step {self.step}, {self.data.name})"
        )

    @functools.cached_property
    def _logits(self) -> Callable[[jax.Array], jax.Array]:
        """Maps inputs of the model to logits; compiled once for each batch size."""
        model = self.model

        @jax.jit
        def logits(variables: Any, inputs: jax.Array) -> jax.Array:
            return cast(Array, model.apply(variables, inputs)).astype(jnp.float32)

        return functools.partial(logits, jax.device_put(self.variables))

    @functools.cached_property
    def _averages(self) -> dict[int, Callable[[jax.Array], jax.Array]]:
        """The functions of `make_predict_fn` by their number of draws."""
        return {}

    def _num_draws(self, draws: int | np.integer | None) -> int:
        """Returns a checked number of draws; None is that of the configuration."""
        draws = int(self.config.eval_draws) if draws is None else draws
        check_draws(draws, self.variables.get("random_features"))
        return int(draws)

    def _batch_size(self, batch_size: int | None) -> int:
        """Returns a batch size; None is that of the configuration."""
        if batch_size is None:
            return self.config.eval_batch_size
        check_eval_batch(batch_size)
        return batch_size

    def predict(
        self,
        inputs: Any,
        *,
        batch_size: int | None = None,
        draws: int | np.integer | None = None,
        progress: bool = True,
    ) -> Predictions:
        """Predicts the classes of images or of sets of points.

        Args:
            inputs: An image or several: paths of JPEG, PNG, WebP, BMP, GIF or TIFF
                files, Pillow images, or arrays of integers from 0 to 255, ``[n, height,
                width, channels]``; or the path of an ``.npz`` file with such an array
                called ``images``. All are prepared as in evaluation, see
                `relattn.data.prepare_images`: a run on photographs crops the centre of
                every image; for another, an image of the stored size is taken
                unchanged. For a run on points, sets of points, of any number of points:
                ``{"positions": [n, points, axes], "features": [n, points, channels],
                "mask": [n, points]}``, or the path of an ``.npz`` file of these, or
                another form of `relattn.data.read_point_sets`.
            batch_size: Number of examples that the model sees at once; None for
                ``config.eval_batch_size``.
            draws: Number of draws of the random features over which the probabilities
                are averaged; None for ``config.eval_draws``, by default 1, the draw
                that is saved with the model. K draws take K times the time.
            progress: Whether to show a progress bar on a terminal.

        Returns:
            The class probabilities, and the names and numbers of the most likely
            classes.

        Raises:
            ValueError: If the run is on text, an image or a file cannot be read, its
                values, channels or size do not fit, or ``draws`` is more than
                one for a model without random features.
        """
        logits = make_predict_fn(self, draws)
        size = self._batch_size(batch_size)
        return predict_lib.predict(self, logits, inputs, size, progress)

    def features(
        self,
        images: Any,
        *,
        layers: Sequence[int] = (-1,),
        norm: bool = True,
        batch_size: int | None = None,
        progress: bool = True,
    ) -> models.ImageFeatures:
        """Computes features of images: pooled, CLS, mean, and tokens of layers.

        Args:
            images: Images, as for `predict`.
            layers: The layers whose tokens are returned, from 0; -1 is the last.
            norm: Whether the final norm is applied to these tokens.
            batch_size: Number of images that the model sees at once; None for
                ``config.eval_batch_size``.
            progress: Whether to show a progress bar on a terminal.

        Returns:
            NumPy arrays, see `relattn.models.ImageFeatures`.

        Raises:
            ValueError: If the run is not on images, its model has no patches as tokens
                or no such layer, or the images do not fit, as for `predict`.
        """
        size = self._batch_size(batch_size)
        return predict_lib.features(self, images, layers, norm, size, progress)

    def evaluate(
        self,
        data: DataSource | EvalSplit | str | Path | None = None,
        *,
        split: str | None = None,
        batch_size: int | None = None,
        draws: int | np.integer | None = None,
        bpe_dir: str = "",
    ) -> dict[str, float]:
        """Evaluates the run.

        Args:
            data: A data set, whose classes must be those of training; a split of one;
                for a run on text also the path of a text file; None for the data of
                training, unless they were given in memory.
            split: The split of a data set: ``"validation"`` or ``"test"``, the default.
            batch_size: Size of the global batch; None for ``config.eval_batch_size``.
            draws: Number of draws of the random features, as for `predict`.
            bpe_dir: Folder of the tokenizer's files, for a text file.

        Returns:
            Loss, accuracy and count, see `relattn.training.evaluator.Evaluator`; for a
            text file also ``bits_per_token`` and ``bits_per_byte``.

        Raises:
            ValueError: If the data are empty or of another kind, an option does not
                apply to them or the model, or the training data were given in memory
                and ``data`` is None.
            CheckpointError: If the data have other labels than the run predicts.
        """
        is_file = isinstance(data, str | Path)
        if split is not None and (is_file or isinstance(data, EvalSplit)):
            raise ValueError(f"split={split!r} needs a data set, but data is one split")
        if bpe_dir and not is_file:
            raise ValueError(f"bpe_dir={bpe_dir!r} needs data, the path of a text file")
        if is_file:
            text, num_bytes = predict_lib.read_text_split(self, data, bpe_dir)
            result = evaluate(self, text, batch_size, draws=draws)
            bits = result["loss"] / math.log(2)
            bits_per_byte = bits * result["count"] / num_bytes
            return result | {"bits_per_token": bits, "bits_per_byte": bits_per_byte}
        info = None
        if data is None:
            require_data(self.given, self.data, self.workdir, "run.evaluate(data=...)")
            data = data_lib.load_data(self.config.data)
        if isinstance(data, DataSource):
            info, splits = data.info, data.eval_splits
            split = "test" if split is None else split
            check_choice("split", split, splits)
            data = splits[split]
        return evaluate(self, data, batch_size, info=info, draws=draws)

    def attention_weights(
        self, inputs: Any, *, layer: int = -1
    ) -> Float[np.ndarray, "batch heads n n"]:
        """Computes the attention weights of a layer, of any attention.

        Args:
            inputs: A few images or sets of points, as for `predict`, or, for a run on
                text, a text.
            layer: The layer; negative numbers count from the last.

        Returns:
            Queries, then keys, both with prefix tokens such as CLS first; see
            `relattn.models.attention_weights`.

        Raises:
            ValueError: If the model has no attention or no such layer, or the inputs do
                not fit.
        """
        return predict_lib.attention_weights(self, inputs, layer)

    @overload
    def generate(
        self,
        prompt: str,
        *,
        num_tokens: int = 0,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        stop: str = "",
        bos: bool = False,
        seed: int = 0,
        bpe_dir: str = "",
    ) -> str: ...

    @overload
    def generate(
        self, prompt: Sequence[str], *args: Any, **options: Any
    ) -> list[str]: ...

    def generate(
        self,
        prompt: str | Sequence[str],
        *,
        num_tokens: int = 0,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        stop: str = "",
        bos: bool = False,
        seed: int = 0,
        bpe_dir: str = "",
    ) -> str | list[str]:
        """Continues a text, or several, with a run on text.

        Args:
            prompt: A text to continue, or a list of texts: at least one token, or
                ``bos``.
            num_tokens: Number of tokens to draw; 0 fills the model's context. More than
                fit into the context are drawn window by window, see
                `relattn.models.generate`.
            temperature: Divisor of the logits; 0 takes the most likely token.
            top_k: Number of most likely tokens to draw from; 0 for all.
            top_p: Draws from the fewest most likely tokens whose probabilities sum to
                at least ``top_p``; 1 for all.
            stop: A text of one token that ends the continuation, which leaves it out;
                "" for the tokenizer's end of text, if it has one.
            bos: Whether the model reads the tokens that the ``tokenizer.json`` puts
                before a text, such as ``<s>``, as in transformers. They take room in
                the context, and the text leaves them out.
            seed: Seed of the draws.
            bpe_dir: Folder of the tokenizer's files; "" for that of training.

        Returns:
            The text, or a list of texts, including the prompt.

        Raises:
            ValueError: If the run is not on text, or an argument is out of range.
        """
        return predict_lib.generate(
            self,
            prompt,
            num_tokens=num_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            stop=stop,
            bos=bos,
            seed=seed,
            bpe_dir=bpe_dir,
        )

    def pretrained_config(self) -> dict[str, Any]:
        """Returns the contents of ``config.json``, see `save_pretrained`."""
        training = to_json(self.config)
        # The data are in other folders on other machines.
        folder = training["data"].get("data_dir")
        folder = folder if isinstance(folder, str) else ""
        for values, key in (
            *((training["data"], key) for key in ("data_dir", "manual_dir", "bpe_dir")),
            (training, "init_from"),
        ):
            if isinstance(values.get(key), str) and not is_hub_id(values[key]):
                values[key] = Path(values[key]).name
        config = saved_config(self.config, self.data)
        for key in ("name", "origin"):
            config["data"][key] = hide_folders(config["data"][key], folder)
        return {
            **config,
            "step": self.step,
            "checkpoint": self.checkpoint,
            "training": hide_all_folders(training),
        }

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        license: str = "unspecified",
        dtype: DTypeLike | None = None,
    ) -> None:
        """Writes the model for others to load with `relattn.load_pretrained`.

        Writes ``config.json``, ``model.safetensors``, the ``tokenizer.json`` of a run
        on text that has one, their checksums in ``manifest.json`` and a model card
        ``README.md``.

        Args:
            folder: Created if needed; the files are replaced.
            license: Licence of the weights, for the card.
            dtype: Dtype of the floats in the file, such as ``"float16"``; None keeps
                that of the variables.

        Raises:
            ValueError: If ``dtype`` is not one of floats, a number is too large for
                it, or the folder is that of the run.

        Warns:
            UserWarning: If the ``tokenizer.json`` cannot be found any more.
        """
        if os.path.realpath(expand(folder, "folder")) == os.path.realpath(self.workdir):
            raise ValueError(
                f"{folder} is the run directory, where the model would be loaded "
                "instead of the run: choose another folder"
            )
        config = self.pretrained_config()
        # Nothing is written unless everything can be read.
        metrics = read_result(self.workdir, self.config.seed, self.step)
        text = model_card(config, {} if self.resized else metrics, license)
        pretrained.save_pretrained(
            folder,
            config,
            self.variables,
            dtype=dtype,
            tokenizer=predict_lib.read_tokenizer_file(self),
        )
        write_text(expand(folder, "folder") / "README.md", text)


def saved_config(config: ConfigDict, info: DataInfo) -> dict[str, Any]:
    """Returns the model and the sizes of ``config.json``, see `Run.save_pretrained`.

    Args:
        config: The run's configuration.
        info: The description of the training data.
    """
    sizes = data_sizes(config, info)
    for name in {"image_shape", "point_shape"} & {*sizes}:
        sizes[name] = list(sizes[name])
    return {
        "model": to_json(config)["model"],
        **sizes,
        "data": dataclasses.asdict(info),
    }


Inputs = (
    Float[Array, "batch height width channels"]
    | Float[Array, "batch n columns"]
    | Int[Array, "batch n"]
)


def make_predict_fn(
    run: Run, draws: int | np.integer | None = None
) -> Callable[[Inputs], Float[Array, "batch ... classes"]]:
    """Returns a compiled function from preprocessed images, points or tokens to logits.

    Args:
        run: A trained run.
        draws: Number of draws of the random features, as for `Run.predict`; the softmax
            of the logits is the mean of the probabilities.

    Returns:
        The function, for one device, the same at every call. It is compiled for each
        batch size, so pad a last, smaller batch. The logits are float32.

    Raises:
        ValueError: If ``draws`` is more than one for a model without random features.
    """
    draws = run._num_draws(draws)
    if draws == 1:
        return run._logits
    if draws not in run._averages:
        run._averages[draws] = make_average_fn(
            run.model, run.variables, run.config.seed, draws
        )
    return run._averages[draws]


def evaluate(
    run: Run,
    split: EvalSplit,
    batch_size: int | None = None,
    devices: Sequence[Device] | None = None,
    info: DataInfo | None = None,
    draws: int | np.integer | None = None,
) -> dict[str, float]:
    """Evaluates a run on a split of a data set.

    The devices share the work as in training, see ``config.parallel``. If their number
    is not a multiple of ``config.model_axis``, the greatest common divisor replaces it.

    Args:
        run: A trained run.
        split: The examples.
        batch_size: Size of the global batch, rounded up to a multiple of the devices
            that share it; None for ``config.eval_batch_size``.
        devices: Devices to use; all by default.
        info: The description of the split's data set, compared with the run's.
        draws: Number of draws of the random features, as for `Run.predict`.

    Returns:
        Loss and accuracy, see `relattn.training.evaluator.Evaluator`.

    Raises:
        ValueError: If the split is empty or of another kind than the training data, has
            labels that are not classes of the run, or ``draws`` is more than one for a
            model without random features.
        CheckpointError: If the labels of ``info`` are not those that the run predicts.
    """
    if not isinstance(split, EvalSplit):
        raise ValueError(
            "data must be a data set or one of its splits, such as ImageSplit(images, "
            "labels), or for a run on text the path of a file, got "
            f"{type(split).__name__}"
        )
    if info is not None:
        check_fits(run.data, info, run.workdir)
    elif run.data.kind == "points" and isinstance(split, PointSplit):
        check_columns(run.data, split.point_shape, "the split", run.workdir)
    if isinstance(split, ImageSplit | PointSplit) and run.data.kind != "tokens":
        check_labels(split.labels, run.data.num_classes, "the split")
    draws = run._num_draws(draws)
    devices = list_devices(devices)
    model_axis = math.gcd(run.config.model_axis, len(devices))
    parallel = make_parallel(run.config, devices, model_axis=model_axis)
    step = make_eval_step(
        run.model,
        run.preprocess,
        metrics=metrics_of(run.data),
        draws=draws,
    )
    draw = functools.partial(draw_features, draws=draws) if draws > 1 else None
    evaluator = Evaluator(step, parallel, draw)
    key = jax.random.key(run.config.seed)
    # A batch larger than the split would only add padding.
    size = min(run._batch_size(batch_size), max(len(split), 1))
    (result,) = evaluator(parallel.place(run.variables), split, size, key=key)
    return result

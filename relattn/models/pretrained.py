"""Saves and loads models with their weights: ``config.json`` and ``model.safetensors``.

`relattn.models.variable_names` has the names of the parameters in a file.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float32

from relattn import models, spec
from relattn.command import lacks_resources, one_line
from relattn.extras import require_train
from relattn.files import check_folder, expand, replace_file
from relattn.json_files import to_plain
from relattn.kernels.checks import check_size
from relattn.manifest import FILE_PREFIX, MANIFEST, find_damage, write_manifest
from relattn.messages import shorten
from relattn.models import hub, preprocessing
from relattn.models.patches import adapt_channels, patch_sides
from relattn.models.resize import resize_grid
from relattn.models.safetensors import read_safetensors, write_safetensors
from relattn.models.saved_config import read_saved_config
from relattn.models.variable_names import (
    Variables,
    check_tensors,
    flatten,
    unflatten,
)

if TYPE_CHECKING:
    from relattn.data import Tokenizer

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
# Dtypes of parameters in a file; another would round most of them to zero.
FLOATS = ("float16", "bfloat16", "float32", "float64")
EMBEDDING = "params.embedding.kernel"
# Parameters of positions that are frequencies, or sums of them.
FREQUENCIES = ("frequencies", "circulants")


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A model with its weights.

    Attributes:
        model: The Flax module.
        variables: Its variables, for ``model.apply``.
        config: The contents of ``config.json``: ``model`` and the sizes of the data.
        folder: The folder of the files; None if there is none.
    """

    model: nn.Module
    variables: dict[str, Any]
    config: dict[str, Any]
    folder: Path | None = None

    def __repr__(self) -> str:
        """Returns a line, without the arrays of the variables."""
        folder = None if self.folder is None else str(self.folder)
        return f"Pretrained({type(self.model).__name__}, {folder!r})"

    def preprocess(self, inputs: Any) -> Float32[Array, "n ..."]:
        """Converts images or sets of points to the model's inputs, as the run does.

        x -> (resize(crop(x) / 255) - mean) / std, with mean and std if the run
        standardised its images: `relattn.data.prepare_images`, whose inputs
        ``run.predict`` has too. For a converted model, mean, standard deviation,
        interpolation and crop are those of its checkpoint's files. Sets of points are
        read by `relattn.data.read_point_sets`. Needs the extra ``train``.

        Args:
            inputs: As for ``run.predict``: an image or several, as paths, Pillow
                images, or arrays of integers from 0 to 255, ``[n, height, width,
                channels]``; or sets of points.

        Returns:
            float32 ``[n, *config["image_shape"]]``, or ``[n, points, axes +
            channels]``.

        Raises:
            ValueError: If ``config.json`` does not have the preprocessing, a converted
                model sees images that are not square, or an image cannot be read, or
                its values or channels do not fit.
            ImportError: Without the extra ``train``.

        Example:
            >>> info = {"name": "digits", "class_names": ["0", "1"], "origin": "here",
            ...         "image_shape": [5, 5, 1], "mean": [0.1], "std": [0.3],
            ...         "num_train": 7}
            >>> config = {"image_shape": [8, 8, 1], "data": info,
            ...           "training": {"data": {"standardize": False}}}
            >>> images = np.full((1, 5, 5, 1), 255, np.uint8)
            >>> inputs = Pretrained(nn.Dense(2), {}, config).preprocess(images)
            >>> inputs.shape, inputs[0, 0, 0]
            ((1, 8, 8, 1), Array([1.], dtype=float32))
        """
        if "point_shape" in self.config:
            require_train("Pretrained.preprocess")
            from relattn import data

            shape = tuple(self.config["point_shape"])
            info = data.PointInfo("", (), shape, num_train=0, origin="")
            return jnp.asarray(data.read_point_sets(inputs, info))
        known = {"training", "preprocessing"} & set(self.config)
        if not known or "image_shape" not in self.config:
            raise ValueError(
                "config.json does not say how the model's images are prepared: prepare "
                "them as its authors do"
            )
        *_, height, width, _ = self.config["image_shape"]
        if "training" not in self.config:
            if height != width:
                raise ValueError(
                    f"preprocess resizes to squares, but the model sees {width}x"
                    f"{height} pixels: resize the images yourself"
                )
            require_train("Pretrained.preprocess")
            from relattn.data.user_images import prepare_squares

            options, shape = self.config["preprocessing"], self.config["image_shape"]
            return prepare_squares(inputs, image_shape=shape, **options)
        data, info, config = data_options(self.config, "Pretrained.preprocess")
        return data.prepare_images(inputs, config, info)

    def features(
        self,
        inputs: Any,
        *,
        layers: Sequence[int] = (-1,),
        norm: bool = True,
    ) -> models.ImageFeatures:
        """Computes features of images: pooled, CLS, mean, and tokens of layers.

        Args:
            inputs: The model's inputs, as `preprocess` returns them.
            layers: The layers whose tokens are returned, from 0; -1 is the last.
            norm: Whether the final norm is applied to these tokens.

        Returns:
            See `relattn.models.ImageFeatures`.

        Raises:
            ValueError: If the model has no patches as tokens, or no such layer.

        Example:
            >>> model = models.ViT(3, dim=8, num_heads=2, num_layers=2, patch_size=2)
            >>> images = jnp.ones((1, 4, 6, 1))
            >>> variables = model.init(jax.random.key(0), images)
            >>> Pretrained(model, variables, {}).features(images).cls.shape
            (1, 8)
        """
        inputs = jnp.asarray(inputs)
        return models.features(
            self.model, self.variables, inputs, layers=layers, norm=norm
        )

    def load_tokenizer(self, bpe_dir: str = "") -> Tokenizer:
        """Loads the tokenizer with which the model was trained.

        It is ``"bytes"``, ``"gpt2"``, or the ``tokenizer.json`` of Hugging Face that
        ``run.save_pretrained`` wrote beside the weights. Needs the extra ``train``.

        Args:
            bpe_dir: Folder of the files of ``"gpt2"``, see
                `relattn.data.load_tokenizer`, or of the ``tokenizer.json`` if it is not
                in the model's folder.

        Returns:
            The tokenizer, with ``encode`` and ``decode``.

        Raises:
            ValueError: If the model is not of text, ``config.json`` does not name the
                tokenizer, or a file is not the tokenizer's.
            FileNotFoundError: If a file is missing.
            ImportError: If the tokenizer needs a package that is not installed.

        Example:
            >>> config = {"vocab_size": 256, "data": {"tokenizer": "bytes"}}
            >>> tokenizer = Pretrained(nn.Dense(2), {}, config).load_tokenizer()
            >>> tokenizer.encode("to be").tolist()
            [116, 111, 32, 98, 101]
        """
        if "vocab_size" not in self.config:
            raise ValueError(
                f"{type(self.model).__name__} reads no text: use preprocess"
            )
        name = tokenizer_of(self.config)
        if not name:
            raise ValueError(
                "config.json does not name the tokenizer of the model: convert it "
                f"again with {TOKENIZER} beside the checkpoint, or load that of its "
                "authors by relattn.data.load_tokenizer"
            )
        require_train("Pretrained.load_tokenizer")
        from relattn.data import tokenizers

        if name.startswith(FILE_PREFIX) and not bpe_dir:
            if self.folder is None or not (self.folder / TOKENIZER).is_file():
                raise FileNotFoundError(
                    f"{self.folder or 'the model'} has no {TOKENIZER}: copy that of "
                    "the training into it, or set bpe_dir to its folder"
                )
            bpe_dir = str(self.folder)
        tokenizer = tokenizers.load_tokenizer(name, bpe_dir)
        if tokenizer.vocab_size > self.config["vocab_size"]:
            raise ValueError(
                f"the model has a vocabulary of {self.config['vocab_size']} tokens, "
                f"but its tokenizer {name!r} has {tokenizer.vocab_size}: remove those "
                f"that were added to {TOKENIZER}, and convert again"
            )
        return tokenizer


def tokenizer_of(config: Mapping[str, Any]) -> str:
    """Returns the name of a saved model's tokenizer.

    Args:
        config: The contents of ``config.json``.

    Returns:
        The name for `relattn.data.load_tokenizer`; "" if it is unknown.

    Example:
        >>> tokenizer_of({"data": {"tokenizer": "bytes"}})
        'bytes'
    """
    return config.get("tokenizer") or config.get("data", {}).get("tokenizer", "")


def check_no_seed(folder: str | Path, seed: int | None) -> None:
    """Raises ValueError if a seed of a saved model is asked for: it has only one.

    Args:
        folder: What `load_pretrained` takes.
        seed: None for no choice.

    Example:
        >>> check_no_seed("models/vit", 1)
        Traceback (most recent call last):
        ValueError: models/vit is a saved model, of one seed: leave out the seed 1, ...
    """
    if seed is not None:
        raise ValueError(
            f"{folder} is a saved model, of one seed: leave out the seed {seed}, or "
            "name a run"
        )


def class_names_of(config: Mapping[str, Any]) -> list[str]:
    """Returns the names of a saved model's classes, in label order.

    Args:
        config: The contents of ``config.json``.

    Returns:
        The names; [] if they are unknown.

    Example:
        >>> class_names_of({"num_classes": 2, "class_names": ["cat", "dog"]})
        ['cat', 'dog']
    """
    names = config.get("class_names") or config.get("data", {}).get("class_names", [])
    return list(names)


def attention_of(model: nn.Module) -> tuple[str, dict[str, Any]] | None:
    """Returns the name and the options of a model's attention; None if it has none.

    Example:
        >>> attention_of(models.ViT(3, attention="favor(num_features=7)"))
        ('favor', {'num_features': 7})
    """
    attention = getattr(model, "attention", None)
    return spec.parse(attention) if isinstance(attention, str) else None


def data_options(
    config: Mapping[str, Any], feature: str
) -> tuple[ModuleType, Any, Any]:
    """Returns `relattn.data`, and what it needs to prepare images for a saved model.

    Args:
        config: The contents of ``config.json``, of a run's model.
        feature: What needs the extra ``train``, for the message.

    Returns:
        The module, the description of the training data, and their options.

    Raises:
        ImportError: Without the extra ``train``.
    """
    require_train(feature)
    from ml_collections import ConfigDict

    from relattn import data

    info = data.read_info(config["data"])
    options = ConfigDict(config["training"]["data"])
    size = config["image_shape"][-3:-1]
    return data, info, data.with_image_size(options, info, size)


def load_pretrained(
    folder: str | Path,
    *,
    image_size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    context_length: int | None = None,
    model: Mapping[str, Any] | None = None,
) -> Pretrained:
    """Loads a model that `relattn.convert` or ``run.save_pretrained`` wrote.

    Args:
        folder: Has ``config.json`` and ``model.safetensors``, and their checksums in
            ``manifest.json``. Models of text may have a ``tokenizer.json``. Or a model
            on the Hugging Face hub, ``"hf:owner/name"`` or
            ``"hf:owner/name@revision"``, see `relattn.models.hub.download`.
        image_size: Side, or height and width, of the images that the model will see, in
            pixels; None for the size of training. Tables of positions are interpolated
            bicubically, see `relattn.models.resize_grid`; those of a converted model as
            by its library.
        channels: Number of channels of the images that the model will see; None for
            that of training. The embedding's weights are summed for one channel, and
            repeated and scaled for more, see `relattn.models.patches.adapt_channels`.
        context_length: Number of tokens of the longest text that the model will see, as
            long as the cache of `relattn.models.generate`; None for that of training.
            Tables of positions are cut or resized by `relattn.models.resize_grid`.
        model: Values that replace those of the file's model, such as ``{"attention":
            "softmax"}``; the parameters must be the same. Another attention gets new
            random features, drawn from ``jax.random.key(0)``.

    Returns:
        The model, its variables and its configuration.

    Raises:
        FileNotFoundError: If a file is missing, or a model of the hub cannot be
            downloaded.
        ValueError: If a file is damaged, the tensors are not those of the model, or the
            model cannot be resized.
        ImportError: If a model of the hub is named and `huggingface_hub` is not
            installed.

    Warns:
        UserWarning: If the folder has no checksums.

    Example:
        >>> import tempfile, relattn
        >>> config = {"model": {"name": "vit", "dim": 8, "num_heads": 2,
        ...                     "num_layers": 1, "mlp_dim": 16, "patch_size": 2},
        ...           "num_classes": 3, "image_shape": [4, 6, 1]}
        >>> model = build(config)
        >>> variables = model.init(jax.random.key(0), jnp.zeros((1, 4, 6, 1)))
        >>> folder = tempfile.mkdtemp()
        >>> save_pretrained(folder, config, variables)
        >>> loaded = relattn.load_pretrained(folder, model={"attention": "favor"})
        >>> loaded.model.apply(loaded.variables, jnp.zeros((1, 4, 6, 1))).shape
        (1, 3)
    """
    if model is not None and not isinstance(model, Mapping):
        raise ValueError(
            "model must be a dict of options, such as {'attention': 'softmax'}, got "
            f"{shorten(model)}"
        )
    changes = dict(model or {})
    sizes = {size for names in models.DATA_ARGUMENTS.values() for size in names}
    for name in (sizes | {"image_size", "channels"}) & {*changes}:
        raise ValueError(
            f"model= changes options of the model, but {name} belongs to its data: "
            "pass image_size= or channels= for other images, context_length= for "
            "other texts, and fine-tune with config.init_from for other classes or "
            "tokens"
        )
    folder = find_model(folder, changes)
    _verify(folder)
    config, module = read_config(folder, changes)
    tensors = read_safetensors(folder / WEIGHTS)
    if channels is not None:
        tensors, config = _with_channels(module, tensors, config, channels)
    like, drawn = abstract(module, config), {}
    saved = module if "attention" not in changes else read_config(folder)[1]
    if attention_of(module) != attention_of(saved):
        tensors = {
            name: tensor
            for name, tensor in tensors.items()
            if not name.startswith("random_features.")
        }
        if like.pop("random_features", None) is not None:
            # Under jit the initial parameters, which nothing uses, are not computed.
            drawn["random_features"] = jax.jit(
                lambda: _initial(module, config)["random_features"]
            )()
    try:
        variables = unflatten(module, like, tensors, folder / WEIGHTS) | drawn
    except ValueError as error:
        if not changes:
            raise
        raise ValueError(
            f"{error}; leave out of model= what changes the weights ({shorten(model)}),"
            " or train: swap the attention by relattn.training.linearize."
            "swap_attention, or fine-tune with config.init_from"
        ) from error
    if image_size is not None:
        if module.inputs != "images":
            raise ValueError(f"image_size={image_size} needs a model of images")
        pair = patch_sides(image_size, name="image_size")
        *frames, height, width, channels = config["image_shape"]
        size, old = (*frames, *pair), (*frames, height, width)
        variables = resize_images(module, variables, old, size)
        before = min(height, width)
        config = {**config, "image_shape": [*size, channels]}
        if "preprocessing" in config:
            values = config["preprocessing"]
            resized = round(values["resized"] * min(size[-2:]) / before)
            config["preprocessing"] = {**values, "resized": resized}
    if context_length is not None:
        if module.inputs != "tokens":
            raise ValueError(f"context_length={context_length} needs a model of text")
        check_size("context_length", context_length)
        grids = (config["context_length"],), (context_length,)
        variables = resize_grid(module, variables, *grids)
        config = {**config, "context_length": context_length}
        module = build(config)
    return Pretrained(module, variables, config, folder)


def find_model(
    folder: str | Path,
    changes: Mapping[str, Any] | None = None,
    *,
    weights: bool = True,
) -> Path:
    """Returns the folder of a saved model; one on the hub is downloaded first.

    The weights are downloaded last, and only if ``config.json`` describes a model.

    Args:
        folder: The argument of `load_pretrained`.
        changes: Values that replace those of the model.
        weights: Whether the weights of a model on the hub are needed.

    Returns:
        The folder, which may not exist.

    Raises:
        FileNotFoundError: If a model of the hub, or one of its files, cannot be
            downloaded.
        ValueError: If its ``config.json`` describes no model.
    """
    if not hub.is_hub_id(folder):
        return expand(folder, "the folder of a model")
    name, files = str(folder), (CONFIG, MANIFEST, TOKENIZER)
    path = hub.download(name, files)
    try:
        read_config(path, changes)
    except (FileNotFoundError, ValueError) as error:
        # The place in the cache says less than the name.
        kind = ValueError if isinstance(error, ValueError) else FileNotFoundError
        raise kind(str(error).replace(str(path), name)) from error
    if not weights:
        return path
    path = hub.download(name, (*files, WEIGHTS))
    if not (path / WEIGHTS).is_file():
        raise FileNotFoundError(
            f"{name} has no {WEIGHTS}, or the cache of huggingface_hub has only its "
            "other files: connect to a network"
        )
    return path


def _with_channels(module, tensors, config, channels):
    """Fits the embedding, the sizes and the preprocessing to other channels."""
    kernel, old = tensors.get(EMBEDDING), config.get("image_shape", [0])[-1]
    if old == channels:
        return tensors, config
    normed = getattr(module, "embedding_norms", True)
    if kernel is None or normed or not 1 <= channels < 2**16:
        raise ValueError(
            f"channels={channels} needs a model whose embedding of patches is linear "
            f"(embedding_norms=False): pass images with channels={old}"
        )
    config = {**config, "image_shape": [*config["image_shape"][:-1], channels]}
    if "preprocessing" in config:
        values = preprocessing.with_channels(config["preprocessing"], channels)
        config["preprocessing"] = values
    # The preprocessing of a run is for images like those of its data.
    config.pop("training", None)
    return {**tensors, EMBEDDING: adapt_channels(kernel, old, channels)}, config


def _verify(folder: Path) -> None:
    """Compares the files with their checksums."""
    if not (folder / CONFIG).is_file():
        # `read_config` says so.
        return
    if not (folder / MANIFEST).is_file():
        warnings.warn(
            f"{folder} has no {MANIFEST}, so damage to its weights is not noticed: "
            "save or convert the model again",
            stacklevel=3,
        )
    elif damage := find_damage(folder, (CONFIG, WEIGHTS)):
        raise ValueError(
            f"{damage}: copy the folder again; if you changed its files yourself, "
            f"delete {MANIFEST}"
        )


def read_config(
    folder: str | Path, changes: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], nn.Module]:
    """Reads ``config.json`` and builds its model.

    Args:
        folder: The folder of `load_pretrained`.
        changes: Values that replace those of the model.

    Returns:
        The configuration, with the changes, and the model.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it describes no model.
    """
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} holds no model: it has no {CONFIG}; name a folder that "
            "run.save_pretrained or relattn convert wrote"
        )
    config = read_saved_config(path)
    if changes:
        config["model"] |= changes
        return config, build(config)
    try:
        return config, build(config)
    except Exception as error:
        if lacks_resources(error):
            raise
        # Sizes that do not fit each other fail anywhere in the model.
        raise ValueError(
            f"{path} describes no model of relattn ({one_line(error)}): convert other "
            "checkpoints with relattn convert"
        ) from error


def save_pretrained(
    folder: str | Path,
    config: Mapping[str, Any],
    variables: Variables,
    *,
    dtype: DTypeLike | None = None,
    tokenizer: bytes | None = None,
) -> None:
    """Writes ``config.json`` and ``model.safetensors``; `load_pretrained` reads them.

    Their checksums are written to ``manifest.json``.

    Args:
        folder: Created if needed; the files are replaced.
        config: ``model``, as for `relattn.models.build_model`, and the sizes of the
            data: ``num_classes`` and ``image_shape``, or ``vocab_size`` and
            ``context_length``. Other keys are kept.
        variables: The model's variables.
        dtype: Dtype of the floats in the file, such as ``"float16"``; None keeps that
            of the variables. Frequencies of positions are float32 at least: angles of
            far tokens would be wrong by radians. `load_pretrained` returns the model's
            dtype.
        tokenizer: The contents of ``tokenizer.json``, if the data have one.

    Raises:
        ValueError: If the configuration describes no model, or another one than that of
            the variables, ``dtype`` is not one of floats, or a number is too large for
            it.
        OSError: If ``folder`` is empty or a file, or cannot be written.
    """
    module = build(config)
    # As in `build`, the configuration of another model has no sizes.
    if config["model"]["name"] in models.MODELS:
        shapes, given = (
            {
                jax.tree_util.keystr(path, simple=True, separator="."): leaf
                for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
            }
            for tree in (abstract(module, config), variables)
        )
        shapes = {name: leaf.shape for name, leaf in shapes.items()}
        check_tensors(shapes, given, "the tree of variables")
    tensors = flatten(module, variables)
    if dtype is not None:
        dtype = _float_dtype(dtype)
        tensors = {
            name: _narrow(name, x, _dtype_of(name, dtype))
            for name, x in tensors.items()
        }
    text = json.dumps(config, indent=2, default=to_plain)
    folder = check_folder(folder, "folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_safetensors(folder / WEIGHTS, tensors)
        replace_file(folder / CONFIG, text + "\n")
        if tokenizer is not None:
            replace_file(folder / TOKENIZER, tokenizer)
        names = (CONFIG, WEIGHTS, TOKENIZER)
        write_manifest(folder, names if tokenizer is not None else names[:2])
    except OSError as error:
        raise OSError(
            f"{error.filename or folder} cannot be written ({error.strerror}): free "
            "some space, or make the folder writable"
        ) from error


def _float_dtype(dtype):
    """Returns a dtype of floats that a file can hold."""
    try:
        known = jnp.dtype(dtype).name in FLOATS
    except TypeError:
        known = False
    if not known:
        raise ValueError(f"dtype={shorten(dtype)} must be one of {', '.join(FLOATS)}")
    return jnp.dtype(dtype)


def _dtype_of(name, dtype):
    """Returns the dtype of an array in a file whose floats have another dtype."""
    part, _, last = name.rpartition(".")
    # Positions multiply the rounding error of a frequency.
    if part.startswith("params.position.") and last in FREQUENCIES:
        return jnp.promote_types(dtype, jnp.float32)
    return dtype


def _narrow(name, array, dtype):
    """Returns an array of floats in another dtype, others as they are."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    with np.errstate(over="ignore"):
        narrow = array.astype(dtype)
    if (np.isfinite(array) & ~np.isfinite(narrow)).any():
        raise ValueError(f"{name} is too large for {jnp.dtype(dtype)}")
    return narrow


def build(config: Mapping[str, Any]) -> nn.Module:
    """Builds the model of a ``config.json``, without parameters.

    Args:
        config: The contents of the file: ``model``, the name and options of
            `relattn.build_model`, and the sizes of its data, such as ``num_classes``
            and ``image_shape`` for images.

    Returns:
        The Flax module.

    Raises:
        ValueError: If the configuration describes no model.

    Example:
        >>> build({"model": {"name": "gpt"}, "vocab_size": 11, "context_length": 5}).dim
        192
    """
    try:
        name, values = config["model"]["name"], {}
    except (KeyError, TypeError) as error:
        raise ValueError(
            "the configuration has no model: pass {'model': {'name': ..., ...}, ...}, "
            f"got {shorten(config)}"
        ) from error
    # An unknown name has no sizes; build_model refuses it.
    if name in models.MODELS:
        sizes = models.DATA_ARGUMENTS[models.MODELS[name].inputs]
        # build_model says which are missing.
        values = {size: config[size] for size in sizes if size in config}
    for size in {"image_shape", "point_shape"} & {*values}:
        values[size] = tuple(values[size])
    return models.build_model(config["model"], **values)


def abstract(model: nn.Module, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the shapes and dtypes of a model's variables."""
    variables = jax.eval_shape(lambda: _initial(model, config))
    carried = ("params", "random_features", "batch_stats")
    return {name: variables[name] for name in carried if name in variables}


def _initial(model, config):
    """Initialises a model's variables."""
    if model.inputs == "images":
        example = jnp.zeros((1, *config["image_shape"]))
    elif model.inputs == "points":
        num_points, num_axes, channels = config["point_shape"]
        example = jnp.zeros((1, num_points, num_axes + channels))
    else:
        example = jnp.zeros((1, 1), jnp.int32)
    return model.init(jax.random.key(0), example)


def resize_images(
    model: nn.Module, variables: Variables, old: Any, new: Any
) -> dict[str, Any]:
    """Resizes variables from one image size to another, in pixels."""
    patch_size = getattr(model, "patch_size", 1)
    grids = [models.patch_grid(size, patch_size) for size in (old, new)]
    return resize_grid(model, variables, *grids)

"""Models by name, and their construction from a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import flax.linen as nn
import jax
import jax.numpy as jnp

from relattn import spec
from relattn.messages import check_choice, closest, shorten
from relattn.models.cnn import CNN
from relattn.models.cnn import AlexNet as AlexNet
from relattn.models.cnn import ResNet18 as ResNet18
from relattn.models.cnn import Vgg16 as Vgg16
from relattn.models.gpt import GPT as GPT
from relattn.models.image_features import ImageFeatures as ImageFeatures
from relattn.models.image_features import features as features
from relattn.models.patches import patch_grid as patch_grid
from relattn.models.patches import patch_sides
from relattn.models.points import PointTransformer as PointTransformer
from relattn.models.resize import resize_grid as resize_grid
from relattn.models.sampling import generate as generate
from relattn.models.vit import SIZES as SIZES
from relattn.models.vit import Linformer as Linformer
from relattn.models.vit import Performer as Performer
from relattn.models.vit import RoutingTransformer as RoutingTransformer
from relattn.models.vit import ViT as ViT
from relattn.models.weights import attention_weights as attention_weights

MODELS = {
    "performer": Performer,
    "vit": ViT,
    "gpt": GPT,
    "alexnet": AlexNet,
    "vgg16": Vgg16,
    "resnet18": ResNet18,
    "linformer": Linformer,
    "routing": RoutingTransformer,
    "point_transformer": PointTransformer,
}
# The entries above; users register others.
BUILT_IN = frozenset(MODELS)

_SIZES = ("dim", "num_layers", "num_heads", "mlp_dim")
_RATES = ("dropout", "attention_dropout")
_DTYPES = ("float32", "bfloat16", "float16")
_PRECISIONS = ("", "default", "high", "highest")

# Arguments that come from the data, by the model's kind of inputs.
DATA_ARGUMENTS = {
    "images": ("num_classes", "image_shape"),
    "tokens": ("vocab_size", "context_length"),
    "points": ("num_classes", "point_shape"),
}
_RESERVED = ("num_classes", "num_axes", "vocab_size", "context_length", "parent")


@runtime_checkable
class Options(Protocol):
    """A mapping from names to values: a dict or an ml_collections.ConfigDict."""

    def keys(self) -> Iterable[str]:
        """Returns the names."""
        ...

    def __getitem__(self, name: str, /) -> Any: ...


def build_model(
    config: Options,
    *,
    num_classes: int | None = None,
    image_shape: tuple[int, ...] | None = None,
    vocab_size: int | None = None,
    context_length: int | None = None,
    point_shape: tuple[int, ...] | None = None,
) -> nn.Module:
    """Builds the model of ``config.model`` and checks that it fits the data.

    Args:
        config: ``name`` of the model, and the values of its attributes.
        num_classes: For images and points: number of classes.
        image_shape: For images: height, width and channels of the model's inputs; for
            volumes: frames, height, width and channels.
        vocab_size: For text: size of the vocabulary.
        context_length: For text: length of the longest sequence, in tokens.
        point_shape: For sets of points: the number of points, of axes of a position,
            and of channels.

    Returns:
        The module. Its class attribute ``inputs`` is ``"images"`` for inputs ``[batch,
        height, width, channels]``, ``"tokens"`` for token ids ``[batch, n]``, or
        ``"points"`` for positions and features ``[batch, n, axes + channels]``.

    Raises:
        ValueError: If a name, an option or a size is invalid, or the model is not for
            this kind of data.

    Example:
        >>> model = build_model(
        ...     {"name": "performer", "dim": 8, "num_heads": 2},
        ...     num_classes=3, image_shape=(4, 4, 1))
        >>> model.num_heads
        2
        >>> model = build_model({"name": "gpt", "dim": 8, "num_heads": 2},
        ...                     vocab_size=11, context_length=7)
        >>> model.inputs
        'tokens'
    """
    if not hasattr(config, "keys"):
        raise ValueError(
            "the options of a model must be a dictionary, such as {'name': 'vit'}, got "
            f"{shorten(config)}"
        )
    options = dict(config)
    name = options.pop("name", "")
    check_choice("model name", name, MODELS)
    known = model_options(name)
    for option, value in options.items():
        if option not in known:
            raise ValueError(
                f"model {name!r} has no option {shorten(option)}: "
                f"{closest(option, known)}"
            )
        options[option] = spec.read_option(f"model {name!r}", value, known[option])
        _check_value(option, options[option])
    if "dtype" in options:
        options["dtype"] = jnp.dtype(options["dtype"])
    given = {
        "num_classes": num_classes,
        "image_shape": image_shape,
        "vocab_size": vocab_size,
        "context_length": context_length,
        "point_shape": point_shape,
    }
    sizes, example = _read_sizes(name, given)
    model = MODELS[name](**sizes, **options)
    # Tracing is cheap and finds invalid sizes before any work.
    logits, _ = jax.eval_shape(model.init_with_output, jax.random.key(0), example)
    if name not in BUILT_IN:
        _check_logits(model, logits)
    return model


def register_model(name: str, module: type[nn.Module]) -> None:
    """Registers a Flax model of your own under a name, for ``config.model.name``.

    The fields of the class are options of ``config.model``. Training calls the model
    with ``deterministic=False`` and a key for ``dropout``, and carries the collections
    ``params``, ``batch_stats`` and ``random_features``. A run of the model loads only
    where it is registered.

    Args:
        name: A Python identifier that names no model of relattn. A second call with the
            same name replaces the first.
        module: A subclass of `flax.linen.Module`. Its class attribute ``inputs`` is
            ``"images"``, ``"tokens"`` or ``"points"``, see `build_model`. It has the
            fields ``num_classes``, for tokens ``vocab_size`` and ``context_length``,
            and for points ``num_axes`` too. ``module.__call__(inputs, *,
            deterministic=True)`` returns logits, ``[batch, num_classes]``, or for
            tokens ``[batch, n, vocab_size]``.

    Raises:
        TypeError: If ``module`` is not such a subclass.
        ValueError: If relattn uses the name, or it is not a Python identifier, or the
            class lacks ``inputs``, a field or ``deterministic``.

    Example:
        >>> class Linear(nn.Module):
        ...     num_classes: int
        ...     inputs = "images"
        ...     @nn.compact
        ...     def __call__(self, images, *, deterministic=True):
        ...         return nn.Dense(self.num_classes)(images.reshape(len(images), -1))
        >>> register_model("linear", Linear)
        >>> build_model({"name": "linear"}, num_classes=3, image_shape=(5, 7, 1))
        Linear(
            # attributes
            num_classes = 3
        )
    """
    if not isinstance(module, type) or not issubclass(module, nn.Module):
        raise TypeError(
            f"{shorten(name)} needs a subclass of flax.linen.Module, got "
            f"{shorten(module)}"
        )
    spec.check_new_name(name, BUILT_IN)
    inputs = getattr(module, "inputs", None)
    if inputs not in DATA_ARGUMENTS:
        raise ValueError(
            f"{name!r} cannot be registered: {module.__name__} needs the class "
            f"attribute inputs, one of {', '.join(map(repr, DATA_ARGUMENTS))}, got "
            f"{shorten(inputs)}"
        )
    needed = [x for x in DATA_ARGUMENTS[inputs] if not x.endswith("_shape")]
    needed += ["num_axes"] * (inputs == "points")
    absent = [x for x in needed if x not in inspect.signature(module).parameters]
    if absent:
        raise ValueError(
            f"{name!r} cannot be registered: {module.__name__} needs the field "
            f"{absent[0]}, which the data set"
        )
    taken = inspect.signature(module.__call__).parameters.values()
    if not any(p.name == "deterministic" or p.kind == p.VAR_KEYWORD for p in taken):
        raise ValueError(
            f"{name!r} cannot be registered: {module.__name__}.__call__ needs the "
            "argument deterministic, which is False in training"
        )
    MODELS[name] = module


def model_options(name: str) -> dict[str, inspect.Parameter]:
    """Returns the options of a model in ``config.model``, with their defaults.

    Args:
        name: A key of `MODELS`.

    Returns:
        The parameter of each option; those that come from the data are left out.

    Example:
        >>> model_options("vgg16")["dropout"].default
        0.5
    """
    parameters = inspect.signature(MODELS[name]).parameters
    hidden = (*_RESERVED, "image_shape", "name")
    return {key: p for key, p in parameters.items() if key not in hidden}


def complete_options(config: Options) -> dict[str, Any]:
    """Returns every option of ``config.model``: the given ones and the defaults.

    Args:
        config: ``name`` of the model, and the values of some options.

    Returns:
        ``name``, and all options as a configuration has them: a dtype is a name. Given
        options that the model does not have are kept.

    Raises:
        ValueError: If there is no model of this name.

    Example:
        >>> options = complete_options({"name": "gpt", "dim": 8})
        >>> options["dim"], options["num_layers"], options["dtype"]
        (8, 6, 'float32')
    """
    given = dict(config)
    check_choice("model name", given.get("name", ""), MODELS)
    options = model_options(given["name"])
    defaults = {
        key: jnp.dtype(p.default).name if key == "dtype" else p.default
        for key, p in options.items()
        if p.default is not p.empty and (key == "dtype" or _is_literal(p.default))
    }
    return {"name": given["name"], **defaults, **given}


def _read_sizes(
    name: str, given: dict[str, Any]
) -> tuple[dict[str, Any], jax.ShapeDtypeStruct]:
    """Returns a model's arguments that come from the data, and an example input."""
    inputs = MODELS[name].inputs
    sizes = {key: given[key] for key in DATA_ARGUMENTS[inputs]}
    if None in sizes.values():
        raise ValueError(
            f"model {name!r} is for {inputs} and needs {' and '.join(sizes)}: "
            f"the data are not {inputs}"
        )
    if sizes.get("num_classes", 0) < 0:
        raise ValueError(
            f"num_classes must be at least 0 (no head), got {sizes['num_classes']}"
        )
    if inputs == "images":
        shape = sizes.pop("image_shape")
        if len(shape) < 3 or min(shape) < 1:
            raise ValueError(
                "image_shape must be (height, width, channels), or (frames, height, "
                f"width, channels) for volumes, all at least 1, got {tuple(shape)}"
            )
        if len(shape) != 3 and issubclass(MODELS[name], CNN):
            raise ValueError(
                f"model {name!r} takes images of height and width, not volumes: choose "
                "'vit'"
            )
        return sizes, jax.ShapeDtypeStruct((1, *shape), jnp.float32)
    if inputs == "points":
        shape = sizes.pop("point_shape")
        if len(shape) != 3 or min(shape) < 1:
            raise ValueError(
                "point_shape must be (points, axes, channels), all at least 1, got "
                f"{tuple(shape)}"
            )
        num_points, num_axes, channels = shape
        shape = (1, num_points, num_axes + channels)
        sizes["num_axes"] = num_axes
        return sizes, jax.ShapeDtypeStruct(shape, jnp.float32)
    return sizes, jax.ShapeDtypeStruct((1, 1), jnp.int32)


def _check_logits(model: Any, logits: Any) -> None:
    """Raises ValueError unless a registered model returns logits for one example.

    The loss of other shapes might be silently wrong.
    """
    expected = (1, getattr(model, "num_classes", 0))
    if model.inputs == "tokens":
        expected = (1, 1, model.vocab_size)
    got = type(logits).__name__
    if isinstance(logits, jax.ShapeDtypeStruct):
        if logits.shape == expected and jnp.issubdtype(logits.dtype, jnp.floating):
            return
        got = f"{logits.dtype} of shape {logits.shape}"
    raise ValueError(
        f"{type(model).__name__} must return logits, floats of shape {expected} for "
        f"one example, got {got}"
    )


def _is_literal(value: Any) -> bool:
    """Returns whether a configuration can have a value."""
    if isinstance(value, list | tuple):
        return all(map(_is_literal, value))
    return isinstance(value, bool | int | float | str | None)


def _check_value(option: str, value: Any) -> None:
    """Raises ValueError if a value of ``config.model`` is invalid for any model."""
    problem = ""
    if option in _SIZES and value < 1:
        problem = "must be at least 1"
    elif option in (*_RATES, "drop_path") and not 0 <= value < 1:
        problem = "must be from 0 to below 1"
    elif option in _RATES and value and round(256 * value) in (0, 256):
        # `relattn.nn.blocks.Dropout` draws a byte for each element.
        problem = "is rounded to a multiple of 1/256, and must not become 0 or 1"
    elif option == "norm_eps" and not value > 0:
        problem = "must be positive"
    elif option == "patch_size":
        sides = value if isinstance(value, list | tuple) else ()
        patch_sides(value, 3 if len(sides) > 2 else 2)
    elif option == "dtype":
        try:
            known = jnp.dtype(value).name in _DTYPES
        except TypeError:
            known = False
        problem = "" if known else f"must be one of {', '.join(_DTYPES)}"
    elif option == "precision" and value not in _PRECISIONS:
        problem = f"must be one of {', '.join(map(repr, _PRECISIONS))}"
    if problem:
        raise ValueError(f"{option} {problem}, got {shorten(value)}")

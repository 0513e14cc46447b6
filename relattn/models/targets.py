"""Models by the names of timm and transformers: the way back of the conversions.

A `Target` is a model of another library. Its tensors come from the tables by which
`relattn.models.sources` reads them, and are read again before they are returned.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import numpy as np

from relattn import models, spec
from relattn.manifest import ENDS
from relattn.messages import list_problems, shorten
from relattn.models import preprocessing, pretrained, variable_names
from relattn.models.patches import patch_sides
from relattn.models.source_configs import hf_activation
from relattn.models.sources import SOURCES, gpt2_table
from relattn.models.tensor_tables import Tensors, invert_table, unwrap
from relattn.models.vit_tables import (
    HF_NAMES,
    TIMM_NAMES,
    Parts,
    hf_table,
    timm_table,
    write_hf_names,
)

# Options that do not change a trained model's outputs, or only their rounding.
_HARMLESS = (
    "dropout",
    "attention_dropout",
    "drop_path",
    "dtype",
    "precision",
    "remat",
    "scan_layers",
    # Which of the layers have the attention, which is softmax in all of them.
    "num_relative_layers",
)
_SIZES = ("num_classes", "dim", "num_layers", "num_heads", "mlp_dim", "patch_size")
_TEXT_SIZES = ("vocab_size", "context_length", *_SIZES[1:5])
# How tables are resized is not a part of the other libraries' models.
_LEARNED = ("learned(antialias=False)", "learned(antialias=True)")
_GELUS = ("gelu", "gelu_tanh", "quick_gelu")


class Files(NamedTuple):
    """A model in the form of another library.

    Attributes:
        config: The contents of ``config.json``.
        tensors: An array for each of the library's names.
        preprocessor: The contents of ``preprocessor_config.json``, if there is one.
    """

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    preprocessor: dict[str, Any] | None = None


class Model(NamedTuple):
    """A model to write.

    Attributes:
        options: The module's attributes, in one form of several that mean the same.
        config: The contents of relattn's ``config.json``.
        parameters: An array for each name of `relattn.models.variable_names.flatten`.
    """

    options: dict[str, Any]
    config: Mapping[str, Any]
    parameters: Tensors


class Target(NamedTuple):
    """A model of another library.

    Attributes:
        title: Its name, for messages.
        source: The key of `SOURCES` that reads it.
        default: Our model, whose defaults are the values of options that ``has`` does
            not list.
        has: The values of our options that it has.
        free: Options that may have any value.
        write: Makes the files.
    """

    title: str
    source: str
    default: type[nn.Module]
    has: Mapping[str, tuple]
    free: tuple[str, ...]
    write: Callable[[Model], Files]


def to_library(
    library: str,
    model: nn.Module,
    config: Mapping[str, Any],
    variables: pretrained.Variables,
) -> Files:
    """Writes a model as a library's own, whose outputs are the same.

    Args:
        library: A key of `TARGETS`.
        model: The module.
        config: The contents of relattn's ``config.json``.
        variables: The model's variables.

    Returns:
        The files, from which `relattn.convert` reads the same parameters, bit for bit.

    Raises:
        ValueError: If the library has no such model; the message has the options that
            differ.
    """
    if len(config.get("image_shape", ())) > 3:
        raise ValueError(
            f"{library} has no model of volumes: export this model as stablehlo or onnx"
        )
    options = _options(model)
    found = Model(options, config, variable_names.flatten(model, variables))
    known = [t for t in TARGETS[library] if isinstance(model, t.default)]
    if not known:
        names = sorted({target.default.__name__ for target in TARGETS[library]})
        raise ValueError(
            f"{library} has no {type(model).__name__}, only {' and '.join(names)}: "
            "export this model as stablehlo or onnx"
        )
    lists = [_differing(target, options) for target in known]
    # The first of those that differ least.
    best = min(range(len(known)), key=lambda index: len(lists[index]))
    target, differing = known[best], lists[best]
    if differing:
        ours = ", ".join(f"{key}={shorten(options[key])}" for key in differing)
        theirs = ", ".join(
            f"{key}={' or '.join(map(repr, values))}"
            for key, values in differing.items()
        )
        raise ValueError(
            f"{library} has no model with {ours}: {target.title} has {theirs}; export "
            "this model as stablehlo or onnx"
        )
    try:
        files = target.write(found)
    except ValueError as error:
        raise ValueError(f"{target.title} cannot hold this model: {error}") from error
    _check_files(target, files, found)
    return files


def tokenizer_config(content: bytes) -> tuple[dict[str, Any], int | None]:
    """Returns how transformers has to read the tokenizer of a model.

    Args:
        content: The contents of ``tokenizer.json``.

    Returns:
        The contents of ``tokenizer_config.json``, without which transformers adds the
        special tokens of GPT-2; and the id of the end of text, None if there is none.

    Example:
        >>> config, end = tokenizer_config(b'{"model": {"vocab": {"</s>": 3}}}')
        >>> config["eos_token"], end
        ('</s>', 3)
    """
    values = json.loads(content)
    ids = values.get("model", {}).get("vocab", {})
    # Unigram has a list of tokens and scores.
    if isinstance(ids, list):
        ids = {token: index for index, (token, _) in enumerate(ids)}
    ids = ids | {x["content"]: x["id"] for x in values.get("added_tokens", ())}
    end = next((token for token in ENDS if token in ids), None)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    return config, ids.get(end)


def _options(model: nn.Module) -> dict[str, Any]:
    """Returns the attributes of a module, in one form of several that mean the same."""
    options = {
        field.name: getattr(model, field.name)
        for field in dataclasses.fields(model)
        if field.name not in ("parent", "name")
    }
    for name in {"attention", "position"} & set(options):
        if len(spec.terms(options[name])) == 1:
            options[name] = spec.with_options(options[name])
    if options.get("position") in _LEARNED:
        options["position"] = "learned"
    if options.get("head_dim", 0) * options.get("num_heads", 0) == options.get("dim"):
        options["head_dim"] = 0
    if options.get("num_kv_heads") == options.get("num_heads"):
        options["num_kv_heads"] = 0
    if isinstance(model, models.ViT):
        options["class_token"] = model.has_class_token
        options["patch_size"] = patch_sides(model.patch_size)
    return options


def _differing(target: Target, options: Mapping[str, Any]) -> dict[str, tuple]:
    """Returns the options with values that a target lacks, and what it has instead."""
    differing = {}
    for field in dataclasses.fields(target.default):
        name = field.name
        if name in (*_HARMLESS, *target.free, "parent", "name"):
            continue
        values = target.has.get(name, (field.default,))
        if options[name] not in values:
            differing[name] = values
    return differing


def _check_files(target: Target, files: Files, model: Model) -> None:
    """Reads the files as a conversion does; they must be the same model."""
    read = SOURCES[target.source](unwrap(files.tensors), files.config)
    again = _options(pretrained.build(read.config))
    names = [name for name in again if name not in _HARMLESS]
    differing = [name for name in names if again[name] != model.options[name]]
    differing += [
        name
        for name, array in model.parameters.items()
        if name not in read.tensors or not _equal(read.tensors[name], array)
    ]
    if differing:
        raise ValueError(
            f"{target.title} cannot hold this model: what is read again differs in "
            f"{list_problems({'': differing}).strip()}"
        )


def _equal(x: np.ndarray, y: np.ndarray) -> bool:
    """Returns whether two arrays have the same bits."""
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


def _parts(options: Mapping[str, Any], **parts: Any) -> Parts:
    """Returns the parts of our ViT; ``parts`` are those of the library's form."""
    return Parts(
        class_token=options["class_token"],
        registers=options["num_registers"] > 0,
        pre_norm=options["pre_norm"],
        final_norm=options["final_norm"],
        fc_norm=options["fc_norm"],
        pool=options["pool"] == "attention",
        head=options["num_classes"] > 0,
        gated=options["activation"] == "swiglu",
        qkv_bias=options["qkv_bias"],
        patch=options["patch_size"],
        **parts,
    )


def _one_side(sides: Any) -> int | list[int]:
    """Returns a side if both are equal, otherwise height and width."""
    height, width = sides
    return height if height == width else [height, width]


_TIMM_POOLS = {"cls": "token", "mean": "avg", "attention": "map"}
# Architectures of timm whose every size model_args replaces, by what it cannot.
_TIMM_BASES = {
    ("plain", 1e-6): "vit_tiny_patch16_224",
    ("plain", 1e-5): "vit_xsmall_patch16_clip_224",
    ("swiglu", 1e-6): "vit_giant_patch14_dinov2",
}


def _timm(model: Model) -> Files:
    """Writes timm's ``VisionTransformer``, as ``timm.create_model`` loads it."""
    options = model.options
    gated = options["activation"] == "swiglu"
    num_cls, num_registers = int(options["class_token"]), options["num_registers"]
    parts = _parts(
        options,
        embedding_bias=not options["pre_norm"],
        # The base with SwiGLU has LayerScale.
        scaled=gated,
        prefix_rows=0 if num_registers else num_cls,
    )
    table = timm_table(TIMM_NAMES, parts)
    tensors = invert_table(table, model.parameters, options["num_layers"])
    height, width, channels = model.config["image_shape"]
    hidden = options["mlp_dim"] * (2 if gated else 1)
    ratio = hidden / options["dim"]
    if int(options["dim"] * ratio) != hidden:
        # timm rounds the product down.
        ratio = (hidden + 0.5) / options["dim"]
    pool = _TIMM_POOLS[options["pool"]]
    arguments = {
        "img_size": _one_side((height, width)),
        "patch_size": _one_side(options["patch_size"]),
        "in_chans": channels,
        "embed_dim": options["dim"],
        "depth": options["num_layers"],
        "num_heads": options["num_heads"],
        "mlp_ratio": ratio,
        "qkv_bias": options["qkv_bias"],
        "class_token": options["class_token"],
        "reg_tokens": num_registers,
        "no_embed_class": num_registers > 0,
        "pre_norm": options["pre_norm"],
        "final_norm": options["final_norm"],
        "fc_norm": options["fc_norm"],
        "global_pool": pool,
        "pool_include_prefix": options["pool_prefix"],
    }
    if not gated:
        arguments["act_layer"] = options["activation"]
    kind = "swiglu" if gated else "plain"
    pretrained_cfg = {"input_size": [channels, height, width], "fixed_input_size": True}
    values = model.config.get("preprocessing")
    # timm resizes to both sides, but to a short side only squares.
    if values and (height == width or values["squash"]):
        side = min(height, width)
        pretrained_cfg |= preprocessing.write_timm_preprocessing(values, side)
    config = {
        "architecture": _TIMM_BASES[kind, options["norm_eps"]],
        "num_classes": options["num_classes"],
        "num_features": options["dim"],
        "global_pool": pool,
        "model_args": arguments,
        "pretrained_cfg": {**pretrained_cfg, "num_classes": options["num_classes"]},
    }
    if labels := pretrained.class_names_of(model.config):
        config["label_names"] = labels
    return Files(config, tensors)


class _Form(NamedTuple):
    """An image encoder of transformers, as a class on its own or with a head.

    Attributes:
        family: The key of `HF_RENAMED`.
        encoder: The encoder's name in the model.
        config: What ``config.json`` has beside sizes.
        parts: The parts of its form.
        vision: If sizes are in ``vision_config``, its other values.
        head: The name of the head.
        extra: Tensors that are not parameters of ours, by the width of the model.
    """

    family: str
    encoder: str
    config: Mapping[str, Any]
    parts: Mapping[str, Any] = {}
    vision: Mapping[str, Any] | None = None
    head: str = "classifier"
    extra: Callable[[int], Tensors] = lambda dim: {}


def _hf(make_form: Callable[[Mapping[str, Any]], _Form], model: Model) -> Files:
    """Writes an image encoder of transformers, as ``from_pretrained`` loads it."""
    options = model.options
    form = make_form(options)
    names = HF_NAMES._replace(head=form.head)
    parts = _parts(options, prefix_rows=int(options["class_token"]), **form.parts)
    table = hf_table(names, parts)
    tensors = invert_table(table, model.parameters, options["num_layers"])
    tensors = write_hf_names(tensors, form.family, form.encoder)
    height, width, channels = model.config["image_shape"]
    patch = options["patch_size"]
    # The other classes take the square root of the number of patches for both sides.
    if form.family != "vit" and (height != width or patch[0] != patch[1]):
        raise ValueError(
            f"it has images of {height}x{width} pixels and patches of {patch[0]}x"
            f"{patch[1]}, not squares: export it as stablehlo or onnx"
        )
    sizes = {
        "hidden_size": options["dim"],
        "num_hidden_layers": options["num_layers"],
        "num_attention_heads": options["num_heads"],
        "layer_norm_eps": options["norm_eps"],
        "image_size": _one_side((height, width)),
        "patch_size": _one_side(options["patch_size"]),
        "num_channels": channels,
    }
    if "mlp_ratio" not in form.config:
        sizes["intermediate_size"] = options["mlp_dim"]
    if not form.config.get("use_swiglu_ffn"):
        sizes["hidden_act"] = hf_activation(options["activation"])
    config = {**form.config, "dtype": "float32"}
    if form.vision is None:
        config |= sizes
    else:
        config["vision_config"] = {**sizes, **form.vision}
    if options["num_classes"] and form.head == "classifier":
        labels = pretrained.class_names_of(model.config)
        # Their number is that of the classes.
        labels = labels or [f"LABEL_{i}" for i in range(options["num_classes"])]
        config["id2label"] = {str(index): name for index, name in enumerate(labels)}
        config["label2id"] = {name: index for index, name in enumerate(labels)}
    preprocessor = None
    values = model.config.get("preprocessing")
    if values and height == width:
        preprocessor = preprocessing.write_hf_preprocessing(values, height)
    return Files(config, {**tensors, **form.extra(options["dim"])}, preprocessor)


def _hf_vit(options: Mapping[str, Any]) -> _Form:
    """Returns the form of ``ViTForImageClassification``, or of ``ViTModel``."""
    has_head = options["num_classes"] > 0
    config = {
        "architectures": ["ViTForImageClassification" if has_head else "ViTModel"],
        "model_type": "vit",
        "qkv_bias": options["qkv_bias"],
    }
    return _Form("vit", "vit." if has_head else "", config)


def _hf_dinov2(options: Mapping[str, Any]) -> _Form:
    """Returns the form of DINOv2, with and without registers and a head."""
    has_head, gated = options["num_classes"] > 0, options["activation"] == "swiglu"
    prefix, model_type = "Dinov2", "dinov2"
    if options["num_registers"]:
        prefix, model_type = "Dinov2WithRegisters", "dinov2_with_registers"
    end = "ForImageClassification" if has_head else "Model"
    config = {
        "architectures": [prefix + end],
        "model_type": model_type,
        "qkv_bias": options["qkv_bias"],
        "mlp_ratio": _dinov2_ratio(options["dim"], options["mlp_dim"], gated),
        "use_swiglu_ffn": gated,
    }
    if options["num_registers"]:
        config["num_register_tokens"] = options["num_registers"]
    encoder = f"{model_type}." if has_head else ""
    # A parameter of training with masked patches.
    mask = f"{encoder}embeddings.mask_token"
    return _Form(
        "dinov2_swiglu" if gated else "dinov2",
        encoder,
        config,
        {"scaled": True},
        extra=lambda dim: {mask: np.zeros((1, dim), np.float32)},
    )


def _dinov2_ratio(dim: int, mlp_dim: int, gated: bool) -> int:
    """Returns the whole ratio of widths by which DINOv2's MLPs have ``mlp_dim``."""
    for ratio in range(1, 2 * mlp_dim // dim + 2):
        width = dim * ratio
        # Two thirds of it, rounded up to a multiple of eight.
        if (gated and (int(width * 2 / 3) + 7) // 8 * 8 or width) == mlp_dim:
            return ratio
    raise ValueError(
        f"mlp_dim={mlp_dim} does not follow from dim={dim} and a whole mlp_ratio"
    )


def _hf_clip(options: Mapping[str, Any]) -> _Form:
    """Returns the form of ``CLIPVisionModel``, with its projection if it has a head."""
    has_head = options["num_classes"] > 0
    end = "WithProjection" if has_head else ""
    config = {
        "architectures": [f"CLIPVisionModel{end}"],
        "model_type": "clip_vision_model",
    }
    if has_head:
        config["projection_dim"] = options["num_classes"]
    parts = {"embedding_bias": False, "head_bias": False, "is_flat": True}
    return _Form("clip", "vision_model.", config, parts, head="visual_projection")


def _hf_clip_classifier(options: Mapping[str, Any]) -> _Form:
    """Returns the form of ``CLIPForImageClassification``; its last norm is unused."""
    if not options["num_classes"]:
        raise ValueError(
            "num_classes=0, but CLIP has pool='mean' only with a classifier"
        )
    config = {"architectures": ["CLIPForImageClassification"], "model_type": "clip"}
    parts = {"embedding_bias": False, "is_flat": True}
    name = "vision_model.post_layernorm"
    return _Form(
        "clip",
        "vision_model.",
        config,
        parts,
        vision={},
        extra=lambda dim: {
            f"{name}.weight": np.ones(dim, np.float32),
            f"{name}.bias": np.zeros(dim, np.float32),
        },
    )


def _hf_siglip(options: Mapping[str, Any]) -> _Form:
    """Returns the form of SigLIP's image encoder, or of the classifier with it."""
    has_head = options["num_classes"] > 0
    pooling = {"vision_use_head": options["pool"] == "attention"}
    config = {
        "architectures": ["SiglipForImageClassification"],
        "model_type": "siglip",
    }
    if not has_head:
        config = {
            "architectures": ["SiglipVisionModel"],
            "model_type": "siglip_vision_model",
            **pooling,
        }
    parts, vision = {"is_flat": True}, pooling if has_head else None
    return _Form("clip", "vision_model.", config, parts, vision)


def _hf_gpt2(model: Model) -> Files:
    """Writes ``GPT2LMHeadModel``."""
    options = model.options
    table = gpt2_table(qkv_bias=options["qkv_bias"], tie_head=options["tie_head"])
    tensors = invert_table(table, model.parameters, options["num_layers"])
    tensors = {
        name if name.startswith("lm_head.") else f"transformer.{name}": x
        for name, x in tensors.items()
    }
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": hf_activation(options["activation"]),
        "vocab_size": options["vocab_size"],
        "n_positions": options["context_length"],
        "n_embd": options["dim"],
        "n_layer": options["num_layers"],
        "n_head": options["num_heads"],
        "n_inner": options["mlp_dim"],
        "layer_norm_epsilon": options["norm_eps"],
        "tie_word_embeddings": options["tie_head"],
        "dtype": "float32",
    }
    if options["vocab_size"] < 50257:
        # The default is the end of text of GPT-2's tokenizer.
        config |= {"bos_token_id": None, "eos_token_id": None}
    return Files(config, tensors)


# What the ViTs of both libraries have.
_VIT = {
    "attention": ("softmax",),
    "position": ("learned",),
    "embedding_norms": (False,),
    "class_token": (True,),
}
_SIGLIP = {**_VIT, "class_token": (False,), "qkv_bias": (True,)}
_GELU = {"activation": _GELUS}


def _hf_target(
    title: str,
    source: str,
    make_form: Callable[[Mapping[str, Any]], _Form],
    has: Mapping[str, tuple],
    *free: str,
) -> Target:
    """Returns the target for an image encoder of transformers."""
    sizes = (*_SIZES, "image_shape", "norm_eps", *free)
    free = tuple(name for name in sizes if name not in has)
    write = functools.partial(_hf, make_form)
    return Target(title, source, models.ViT, has, free, write)


_TIMM_FREE = (
    *_SIZES,
    "image_shape",
    "class_token",
    "num_registers",
    "qkv_bias",
    "pre_norm",
    "final_norm",
    "fc_norm",
    "pool_prefix",
)
_TIMM = {name: values for name, values in _VIT.items() if name not in _TIMM_FREE}
TARGETS: dict[str, list[Target]] = {
    "timm": [
        Target(
            "timm's VisionTransformer",
            "timm",
            models.ViT,
            {**_TIMM, **has},
            _TIMM_FREE,
            _timm,
        )
        for has in (
            {"pool": tuple(_TIMM_POOLS), "norm_eps": (1e-6, 1e-5), **_GELU},
            # Its pooling by attention has no gate.
            {"pool": ("cls", "mean"), "norm_eps": (1e-6,), "activation": ("swiglu",)},
        )
    ],
    "hf": [
        _hf_target("ViT", "hf_vit", _hf_vit, {**_VIT, **_GELU}, "qkv_bias"),
        *(
            _hf_target(
                "DINOv2",
                "hf_dinov2",
                _hf_dinov2,
                {**_VIT, "activation": (*_GELUS, "swiglu"), **has},
                "qkv_bias",
                "num_registers",
            )
            for has in ({"pool": ("cls_mean",)}, {"num_classes": (0,)})
        ),
        *(
            _hf_target(
                "CLIP",
                "hf_clip",
                make_form,
                {**_VIT, **_GELU, "pre_norm": (True,), "qkv_bias": (True,), **has},
            )
            for make_form, has in (
                (_hf_clip, {}),
                (_hf_clip_classifier, {"pool": ("mean",), "final_norm": (False,)}),
            )
        ),
        *(
            _hf_target("SigLIP", "hf_siglip", _hf_siglip, {**_SIGLIP, **_GELU, **has})
            for has in (
                {"pool": ("attention",), "num_classes": (0,)},
                {"pool": ("mean",)},
            )
        ),
        Target(
            "GPT-2",
            "hf_gpt2",
            models.GPT,
            {
                "attention": ("softmax",),
                "position": ("learned",),
                "qkv_bias": (True,),
                "head_norm": (False,),
                "activation": ("gelu", "gelu_tanh"),
            },
            (*_TEXT_SIZES, "tie_head", "norm_eps"),
            _hf_gpt2,
        ),
    ],
}

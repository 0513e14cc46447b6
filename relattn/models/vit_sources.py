"""Vision Transformers of timm and transformers, with or without a head."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from relattn.models import source_configs, source_keys
from relattn.models.source_configs import check_equal
from relattn.models.tensor_tables import (
    Converted,
    Table,
    Tensors,
    apply_table,
    check_names,
    count_layers,
    position_grid,
    shape_of,
)
from relattn.models.vit_tables import (
    HF_NAMES,
    HF_QUERY_BIAS,
    HF_SCALE,
    TIMM_NAMES,
    Names,
    Parts,
    hf_table,
    read_hf_names,
    timm_table,
)

_DINOV3 = (
    "rotary positions as in DINOv3, which count from the centre of the image in units "
    "of its size"
)
# Parts of ViTs that change the outputs, and that relattn's ViT does not have.
_FOREIGN_PARTS = {
    r"dist(illation)?_token|head_dist|distillation_classifier": "a distillation token",
    r"\.[qk]_norm\.": "norms of queries and keys (qk_norm)",
    r"^blocks\.\d+\.(attn|mlp)\.norm\.": "scale_attn_norm or scale_mlp_norm",
    r"^patch_embed\.backbone\.": "a convolutional network before the layers",
    r"^pre_logits\.": "a layer before the head (representation_size)",
    r"relative_position_bias_table": "relative positions",
    r"(^|\.)rope(_embeddings)?\.|^blocks\.\d+\.gamma_1$": _DINOV3,
}


def _check_parts(tensors: Tensors, names: Names) -> None:
    """Refuses what relattn's ViT does not have."""
    for pattern, part in _FOREIGN_PARTS.items():
        for name in tensors:
            if re.search(pattern, name):
                raise ValueError(f"{name}: relattn's ViT does not have {part}")
    convolution = f"{names.convolution}.weight"
    if convolution not in tensors:
        raise ValueError(
            f"{convolution} is missing: the checkpoint is of another --source"
        )


def _is_gated(tensors: Tensors, names: Names) -> bool:
    """Returns whether the first MLP has its gate and hidden layer in one matrix."""
    hidden, out = (f"{part.format(0)}.weight" for part in (names.hidden, names.out))
    if hidden not in tensors or out not in tensors:
        return False
    rows, width = shape_of(tensors, hidden, 2)[0], shape_of(tensors, out, 2)[1]
    return rows == 2 * width


def _find_parts(
    tensors: Tensors,
    names: Names,
    model: Mapping[str, Any],
    *,
    qkv_bias: str,
    scale: str,
) -> Parts:
    """Returns the parts that a checkpoint has.

    Args:
        tensors: The checkpoint.
        names: The library's names.
        model: Options of our model that tensors do not show.
        qkv_bias: Name of the first bias of queries.
        scale: Name of the first factors of LayerScale.
    """
    has_head = f"{names.head}.weight" in tensors
    return Parts(
        class_token=model["class_token"],
        registers=names.registers in tensors,
        pre_norm=f"{names.pre_norm}.weight" in tensors,
        final_norm=model["final_norm"],
        fc_norm=model["fc_norm"],
        pool=model["pool"] == "attention",
        head=has_head,
        gated=_is_gated(tensors, names),
        qkv_bias=qkv_bias in tensors,
        embedding_bias=f"{names.convolution}.bias" in tensors,
        head_bias=f"{names.head}.bias" in tensors,
        scaled=scale in tensors,
    )


def _vit(
    tensors: Tensors,
    settings: Mapping[str, Any],
    make_table: Callable[[Names, Parts], Table],
    *,
    names: Names,
    parts: Parts,
    sizes: Mapping[str, str],
    heads: str,
    model: Mapping[str, Any],
    prefix_rows: tuple[int, ...],
    ignored: str = "$^",
) -> Converted:
    """Converts a ViT.

    Args:
        tensors: The checkpoint.
        settings: The keys of ``config.json`` that are read.
        make_table: Makes the table of names and parts.
        names: The library's names.
        parts: The parts that the checkpoint has.
        sizes: What keys of the settings mean, by the names of our sizes.
        heads: The key that has the number of heads.
        model: Options of our model that tensors do not show.
        prefix_rows: How many rows of positions prefix tokens may have.
        ignored: Pattern of tensors that are not parameters.
    """
    position, registers = names.position, names.registers
    head, convolution = f"{names.head}.weight", f"{names.convolution}.weight"
    num_layers = count_layers(tensors, rf"{re.escape(names.layers)}(\d+)\.")
    num_registers = shape_of(tensors, registers, 3)[1] if parts.registers else 0
    hidden, out = (f"{part.format(0)}.weight" for part in (names.hidden, names.out))
    if parts.gated != (model["activation"] == "swiglu"):
        raise ValueError(
            f"{hidden} has a gate, which in relattn's ViT is that of SwiGLU: if its "
            "activation is silu, set act_layer='silu' in a config.json beside the "
            "checkpoint"
            if parts.gated
            else f"{hidden} has no gate: relattn's ViT has silu in SwiGLU only"
        )
    check_names(make_table(names, parts), tensors, num_layers, ignored)
    dim, channels, *patch = shape_of(tensors, convolution, 4)
    found = {
        "dim": (convolution, dim),
        "channels": (convolution, channels),
        "patch_size": (convolution, patch),
        "num_layers": ("the checkpoint", num_layers),
        "mlp_dim": (out, shape_of(tensors, out, 2)[1]),
        "num_registers": (registers, num_registers),
    }
    if parts.head:
        found["num_classes"] = (head, shape_of(tensors, head, 2)[0])
    if isinstance(settings.get("patch_size"), int):
        settings = {**settings, "patch_size": [settings["patch_size"]] * 2}
    for key, size in sizes.items():
        if size in found:
            tensor, value = found[size]
            check_equal(f"{tensor} has {value}", value, key, settings)
    biases = "biases" if parts.qkv_bias else "no biases"
    check_equal(f"q, k and v have {biases}", parts.qkv_bias, "qkv_bias", settings)
    count = math.prod(tensors[position].shape[:-1])
    grid = position_grid(count, settings, patch, prefix_rows)
    before = count - math.prod(grid)
    table = make_table(names, parts._replace(prefix_rows=before))
    if max(prefix_rows):
        rows = f"{position} has {count} rows for {math.prod(grid)} patches"
        check_equal(rows, not before, "no_embed_class", settings)
    options = {
        "name": "vit",
        "dim": dim,
        "num_layers": num_layers,
        "num_heads": source_configs.num_heads(settings, heads, dim),
        "mlp_dim": found["mlp_dim"][1],
        "patch_size": patch,
        "attention": "softmax",
        "position": "learned",
        "qkv_bias": parts.qkv_bias,
        "embedding_norms": False,
        **model,
        "num_registers": num_registers,
        "pre_norm": parts.pre_norm,
    }
    config = {
        "model": _without_defaults(options),
        "num_classes": found.get("num_classes", ("", 0))[1],
        "image_shape": [*map(operator.mul, grid, patch), channels],
    }
    return Converted(config, apply_table(table, tensors, num_layers, ignored))


def _without_defaults(options: dict[str, Any]) -> dict[str, Any]:
    """Leaves out options at their defaults that the first files did not have."""
    defaults = {
        "activation": "gelu",
        "num_registers": 0,
        "pre_norm": False,
        "fc_norm": False,
        "final_norm": True,
        "pool_prefix": False,
        "class_token": options["pool"].startswith("cls"),
    }
    return {
        key: value
        for key, value in options.items()
        if key not in defaults or value != defaults[key]
    }


TIMM_SIZES = {
    "embed_dim": "dim",
    "num_features": "dim",
    "depth": "num_layers",
    "in_chans": "channels",
    "patch_size": "patch_size",
    "num_classes": "num_classes",
    "reg_tokens": "num_registers",
}
TIMM_POOLS = {"token": "cls", "avg": "mean", "map": "attention"}


def timm(tensors: Tensors, settings: Mapping[str, Any]) -> Converted:
    """Converts timm's ``VisionTransformer``.

    The factors of LayerScale become a part of the layers before them.
    """
    _check_parts(tensors, TIMM_NAMES)
    settings = source_configs.timm_settings(settings)
    model = _timm_model(tensors, settings)
    parts = _find_parts(
        tensors,
        TIMM_NAMES,
        model,
        qkv_bias="blocks.0.attn.qkv.bias",
        scale="blocks.0.ls1.gamma",
    )
    if not parts.scaled:
        check_equal("blocks.0.ls1.gamma is missing", None, "init_values", settings)
    num_prefix = int(model["class_token"])
    if "reg_token" in tensors:
        num_prefix += shape_of(tensors, "reg_token", 3)[1]
    converted = _vit(
        tensors,
        settings,
        timm_table,
        names=TIMM_NAMES,
        parts=parts,
        sizes=TIMM_SIZES,
        heads="num_heads",
        model=model,
        prefix_rows=(0, num_prefix) if num_prefix else (0,),
    )
    model = converted.config["model"]
    ratio = settings.get("mlp_ratio")
    if ratio is not None:
        gated = model.get("activation") == "swiglu"
        hidden = model["mlp_dim"] * (2 if gated else 1)
        if int(model["dim"] * ratio) != hidden:
            raise ValueError(
                f"mlp_ratio={ratio} does not fit: blocks.0.mlp.fc1.weight has "
                f"{hidden} rows for a width of {model['dim']}"
            )
    return converted


def _timm_model(tensors: Tensors, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options of our model that timm's tensors show in part only."""
    has_cls = "cls_token" in tensors
    kind = "a" if has_cls else "no"
    found = f"the checkpoint has {kind} cls_token"
    check_equal(found, has_cls, "class_token", settings)
    has_pool, has_fc_norm = (
        f"{name}.weight" in tensors for name in ("attn_pool.q", "fc_norm")
    )
    pool = settings.get("global_pool")
    if pool is None and has_pool:
        pool = "map"
    if pool is None and has_cls and not has_fc_norm:
        pool = "token"
    if pool is None:
        raise ValueError(
            "cls_token is missing: if the model has none, set global_pool, such as "
            "'avg', in a config.json beside the checkpoint"
            if not has_cls
            else "fc_norm.weight: set global_pool, such as 'avg', in a config.json "
            "beside the checkpoint"
        )
    if pool not in TIMM_POOLS:
        raise ValueError(
            f"relattn's ViT does not have global_pool={pool!r}: expected "
            f"{' or '.join(map(repr, TIMM_POOLS))}"
        )
    if pool == "token" and not has_cls:
        raise ValueError(f"global_pool='token' does not fit: {found}")
    if (pool == "map") != has_pool:
        part = "has" if has_pool else "has no"
        raise ValueError(
            f"global_pool={pool!r} does not fit: the checkpoint {part} attn_pool.q"
        )
    has_norm = has_fc_norm or "norm.weight" in tensors
    final = settings.get("final_norm", True)
    if not final:
        kind = "a" if has_norm else "no"
        check_equal(f"the checkpoint has {kind} norm", has_norm, "final_norm", settings)
    if has_fc_norm or final:
        kind = "a" if has_fc_norm else "no"
        found = f"the checkpoint has {kind} fc_norm"
        check_equal(found, has_fc_norm, "fc_norm", settings)
    has_pre_norm = "norm_pre.weight" in tensors
    kind = "a" if has_pre_norm else "no"
    found = f"the checkpoint has {kind} norm_pre"
    check_equal(found, has_pre_norm, "pre_norm", settings)
    for part, owner, has_part in (
        ("norm_pre.weight", "CLIP", has_pre_norm),
        ("attn_pool.q.weight", "SigLIP", has_pool),
    ):
        if has_part and not {"layer_norm_eps", "act_layer"} <= set(settings):
            raise ValueError(
                f"{part}: models with it, such as {owner}'s, differ in activation or "
                "epsilon: set the architecture, or act_layer and layer_norm_eps, in a "
                "config.json beside the checkpoint"
            )
    activation = source_configs.activation(settings.get("act_layer", "gelu"))
    return {
        "norm_eps": settings.get("layer_norm_eps", 1e-6),
        "pool": TIMM_POOLS[pool],
        "class_token": has_cls,
        "pool_prefix": bool(settings.get("pool_include_prefix", False))
        and pool != "token",
        "final_norm": final,
        "fc_norm": has_fc_norm,
        "activation": activation,
    }


HF_SIZES = {
    "hidden_size": "dim",
    "num_hidden_layers": "num_layers",
    "num_channels": "channels",
    "patch_size": "patch_size",
    "intermediate_size": "mlp_dim",
    "num_labels": "num_classes",
    "num_register_tokens": "num_registers",
}
# Not a part of the image's encoder, though some files have them.
_HF_IGNORED = (
    r"vit\.(pooler\.dense\.(weight|bias)|embeddings\.(mask_token|position_ids)"
    r"|decoder\..*|text_model\..*|text_projection\.weight|logit_scale|logit_bias)"
)


def _hf(
    tensors: Tensors,
    settings: Mapping[str, Any],
    keys: source_keys.Keys,
    *,
    prefix_rows: tuple[int, ...],
    norm_eps: float,
    pool: str = "cls",
    final_norm: bool = True,
    activation: str = "gelu",
    antialias: bool = False,
) -> Converted:
    """Converts an image encoder of transformers; see `_vit`.

    Its class interpolates positions with ``antialias`` or without.
    """
    settings = source_configs.hf_settings(settings, keys)
    _check_parts(tensors, HF_NAMES)
    names = HF_NAMES
    if "visual_projection.weight" in tensors:
        names = names._replace(head="visual_projection")
        settings.pop("num_labels", None)
    else:
        settings.pop("projection_dim", None)
    activation = source_configs.activation(settings.get("hidden_act", activation))
    ignored = _HF_IGNORED
    if not final_norm:
        ignored = rf"{ignored}|vit\.layernorm\.(weight|bias)"
    if pool != "attention":
        ignored = rf"{ignored}|vit\.head\..*"
    model = {
        "norm_eps": settings.get("layer_norm_eps", norm_eps),
        "position": "learned" if antialias else "learned(antialias=False)",
        "pool": pool,
        "class_token": prefix_rows != (0,),
        "pool_prefix": False,
        "final_norm": final_norm,
        "fc_norm": False,
        # The gate has silu, whatever hidden_act is.
        "activation": "swiglu" if _is_gated(tensors, names) else activation,
    }
    parts = _find_parts(tensors, names, model, qkv_bias=HF_QUERY_BIAS, scale=HF_SCALE)
    return _vit(
        tensors,
        settings,
        hf_table,
        names=names,
        parts=parts,
        sizes={**HF_SIZES, "projection_dim": "num_classes"},
        heads="num_attention_heads",
        model=model,
        prefix_rows=prefix_rows,
        ignored=ignored,
    )


def _is_classifier(tensors: Tensors, settings: Mapping[str, Any]) -> bool:
    """Returns whether a model pools as a classifier, which may lack its last layer."""
    names = str(settings.get("architectures"))
    return "classifier.weight" in tensors or "ForImageClassification" in names


def hf_vit(tensors: Tensors, settings: Mapping[str, Any]) -> Converted:
    """Converts ``ViTForImageClassification``, ``ViTModel`` and the encoder of MAE.

    Without a head, outputs are the CLS token after the LayerNorm. ``ViTModel`` has a
    pooler, which is left out.
    """
    tensors = read_hf_names(tensors)
    return _hf(
        tensors,
        settings,
        source_keys.HF_VIT,
        # Rows of positions other than those of patches: always CLS's.
        prefix_rows=(1,) if HF_NAMES.cls in tensors else (0, 1),
        norm_eps=1e-12,
    )


def hf_dinov2(tensors: Tensors, settings: Mapping[str, Any]) -> Converted:
    """Converts DINOv2, with and without registers; the head reads CLS and mean."""
    if str(settings.get("model_type")).startswith("dinov3"):
        raise ValueError(f"relattn's ViT does not have {_DINOV3}: convert DINOv2")
    tensors = read_hf_names(tensors)
    return _hf(
        tensors,
        settings,
        source_keys.HF_DINOV2,
        prefix_rows=(1,),
        norm_eps=1e-6,
        pool="cls_mean" if _is_classifier(tensors, settings) else "cls",
        # Dinov2WithRegisters interpolates in another way than Dinov2.
        antialias=HF_NAMES.registers in tensors,
    )


def hf_clip(tensors: Tensors, settings: Mapping[str, Any]) -> Converted:
    """Converts the image encoder of CLIP, from its own file or that of both encoders.

    With the projection, outputs are the embeddings that are compared with a text's.
    """
    tensors = read_hf_names(tensors)
    # A whole file has the name of the model, and leaves out defaults.
    if not {"model_type", "vision_config", "hidden_act"} & set(settings):
        raise ValueError(
            "the tensors do not show the activation: set hidden_act, which is "
            "'quick_gelu' for OpenAI's CLIP and 'gelu' for most others, in a "
            "config.json beside the checkpoint"
        )
    is_classifier = _is_classifier(tensors, settings)
    return _hf(
        tensors,
        settings,
        source_keys.HF_CLIP,
        prefix_rows=(1,),
        norm_eps=1e-5,
        # CLIPForImageClassification has no use for the last LayerNorm.
        pool="mean" if is_classifier else "cls",
        final_norm=not is_classifier,
        activation="quick_gelu",
    )


def hf_siglip(tensors: Tensors, settings: Mapping[str, Any]) -> Converted:
    """Converts the image encoder of SigLIP, from its own file or that of both."""
    tensors = read_hf_names(tensors)
    pooled = "vit.head.probe" in tensors and not _is_classifier(tensors, settings)
    return _hf(
        tensors,
        settings,
        source_keys.HF_SIGLIP,
        prefix_rows=(0,),
        norm_eps=1e-6,
        pool="attention" if pooled else "mean",
        activation="gelu_pytorch_tanh",
    )

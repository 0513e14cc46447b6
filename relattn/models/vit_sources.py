"""Vision Transformers of timm and transformers, with or without a head."""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from relattn.models import source_configs
from relattn.models.source_configs import check_equal
from relattn.models.tensor_tables import (
    Converted,
    Table,
    Tensors,
    apply_table,
    check_names,
    count_layers,
    fused,
    linear,
    norm,
    patches,
    position_grid,
    same,
    shape_of,
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


class Names(NamedTuple):
    """What a library calls the parts of a ViT; those that a checkpoint may lack too."""

    layers: str
    cls: str
    registers: str
    position: str
    convolution: str
    hidden: str
    out: str
    pre_norm: str
    head: str


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


def _rows(start: int, stop: int | None, x: np.ndarray) -> np.ndarray:
    """Rows of a table of positions, ``[n, dim]`` or ``[1, n, dim]``."""
    return x.reshape(-1, x.shape[-1])[start:stop]


def _token(x: np.ndarray) -> np.ndarray:
    """A CLS token, ``[dim]`` or ``[1, 1, dim]``."""
    return x.reshape(1, 1, -1)


def _zeros(x: np.ndarray) -> np.ndarray:
    """The bias of a layer that has none."""
    return np.zeros(len(x), np.float32)


def _optional_bias(table: Table, ours: str, theirs: str, tensors: Tensors) -> None:
    """Gives a layer whose file has no bias one of zeros."""
    if f"{theirs}.bias" not in tensors:
        table[f"{ours}.bias"] = (_zeros, f"{theirs}.weight")


def _half(index: int, x: np.ndarray) -> np.ndarray:
    """The gate or the hidden layer of a SwiGLU that has both in one layer."""
    return np.split(x, 2)[index].T


def _is_gated(tensors: Tensors, names: Names) -> bool:
    """Whether the first layer's MLP has a gate and a hidden layer in one matrix."""
    hidden, out = (f"{part.format(0)}.weight" for part in (names.hidden, names.out))
    if hidden not in tensors or out not in tensors:
        return False
    rows, width = shape_of(tensors, hidden, 2)[0], shape_of(tensors, out, 2)[1]
    return rows == 2 * width


def _vit(
    tensors: Tensors,
    settings: Mapping[str, Any],
    table: Table,
    *,
    names: Names,
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
        table: The parameters that `Names` does not name.
        names: The library's names.
        sizes: What keys of the settings mean, by the names of our sizes.
        heads: The key that has the number of heads.
        model: Options of our model that tensors do not show.
        prefix_rows: How many rows of positions prefix tokens may have.
        ignored: Pattern of tensors that are not parameters.
    """
    cls, position, registers = names.cls, names.position, names.registers
    head, convolution = f"{names.head}.weight", f"{names.convolution}.weight"
    num_layers = count_layers(tensors, rf"{re.escape(names.layers)}(\d+)\.")
    has_head = head in tensors
    table = {
        **table,
        "embedding.kernel": (patches, convolution),
        "embedding.bias": (same, f"{names.convolution}.bias"),
        "position.learned.table": (same, position),
    }
    _optional_bias(table, "embedding", names.convolution, tensors)
    if has_head:
        table |= linear("head", names.head)
        _optional_bias(table, "head", names.head, tensors)
    if model["class_token"]:
        table["cls"] = (_token, cls)
    num_registers = 0
    if registers in tensors:
        num_registers = shape_of(tensors, registers, 3)[1]
        table["registers"] = (same, registers)
    has_pre_norm = f"{names.pre_norm}.weight" in tensors
    if has_pre_norm:
        table |= norm("pre_norm", names.pre_norm)
    hidden, out = (f"{part.format(0)}.weight" for part in (names.hidden, names.out))
    gated = _is_gated(tensors, names)
    if gated != (model["activation"] == "swiglu"):
        raise ValueError(
            f"{hidden} has a gate, which in relattn's ViT is that of SwiGLU: if its "
            "activation is silu, give act_layer='silu' in a config.json beside the "
            "checkpoint"
            if gated
            else f"{hidden} has no gate: relattn's ViT has silu in SwiGLU only"
        )
    if gated:
        for index, ours in enumerate(("gate", "hidden")):
            half = functools.partial(_half, index)
            for end, theirs in (("kernel", "weight"), ("bias", "bias")):
                ours_end = f"layers.{{}}.feed_forward.{ours}.{end}"
                table[ours_end] = (half, f"{names.hidden}.{theirs}")
    check_names(table, tensors, num_layers, ignored)
    dim, channels, *patch = shape_of(tensors, convolution, 4)
    found = {
        "dim": (convolution, dim),
        "channels": (convolution, channels),
        "patch_size": (convolution, patch),
        "num_layers": ("the checkpoint", num_layers),
        "mlp_dim": (out, shape_of(tensors, out, 2)[1]),
        "num_registers": (registers, num_registers),
    }
    if has_head:
        found["num_classes"] = (head, shape_of(tensors, head, 2)[0])
    if isinstance(settings.get("patch_size"), int):
        settings = {**settings, "patch_size": [settings["patch_size"]] * 2}
    for key, size in sizes.items():
        if size in found:
            tensor, value = found[size]
            check_equal(f"{tensor} has {value}", value, key, settings)
    has_bias = "layers.{}.attention.q.bias" in table
    biases = "biases" if has_bias else "no biases"
    check_equal(f"q, k and v have {biases}", has_bias, "qkv_bias", settings)
    count = math.prod(tensors[position].shape[:-1])
    grid = position_grid(count, settings, patch, prefix_rows)
    # Positions of prefix tokens are a part of these tokens.
    before = count - math.prod(grid)
    table["position.learned.table"] = (functools.partial(_rows, before, None), position)
    num_cls = int(model["class_token"])
    if before and num_cls:
        table["cls"] = (lambda x, p: _token(x) + _rows(0, 1, p), cls, position)
    if before > num_cls:
        table["registers"] = (
            lambda x, p: x + _rows(num_cls, before, p),
            registers,
            position,
        )
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
        "qkv_bias": has_bias,
        "embedding_norms": False,
        **model,
        "num_registers": num_registers,
        "pre_norm": has_pre_norm,
    }
    # Files of models with a CLS token alone remain as they were.
    defaults = {
        "activation": "gelu",
        "num_registers": 0,
        "pre_norm": False,
        "fc_norm": False,
        "final_norm": True,
        "pool_prefix": False,
        "class_token": options["pool"].startswith("cls"),
    }
    options = {
        key: value
        for key, value in options.items()
        if key not in defaults or value != defaults[key]
    }
    config = {
        "model": options,
        "num_classes": found.get("num_classes", ("", 0))[1],
        "image_shape": [*map(operator.mul, grid, patch), channels],
    }
    return Converted(config, apply_table(table, tensors, num_layers, ignored))


TIMM = {
    **norm("layers.{}.attention_norm", "blocks.{}.norm1"),
    **norm("layers.{}.feed_forward_norm", "blocks.{}.norm2"),
    **linear("layers.{}.feed_forward.hidden", "blocks.{}.mlp.fc1"),
}
TIMM_POOL = {
    "pool.probe": (same, "attn_pool.latent"),
    **linear("pool.attention.q", "attn_pool.q"),
    **fused("attn_pool.kv.weight", "attn_pool.kv.bias", ours="pool.attention", of="kv"),
    **linear("pool.attention.out", "attn_pool.proj"),
    **norm("pool.norm", "attn_pool.norm"),
    **linear("pool.feed_forward.hidden", "attn_pool.mlp.fc1"),
    **linear("pool.feed_forward.out", "attn_pool.mlp.fc2"),
}
TIMM_NAMES = Names(
    layers="blocks.",
    cls="cls_token",
    registers="reg_token",
    position="pos_embed",
    convolution="patch_embed.proj",
    hidden="blocks.{}.mlp.fc1",
    out="blocks.{}.mlp.fc2",
    pre_norm="norm_pre",
    head="head",
)
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
    qkv = "blocks.{}.attn.qkv"
    bias = f"{qkv}.bias" if f"{qkv.format(0)}.bias" in tensors else ""
    table = {**TIMM, **fused(f"{qkv}.weight", bias)}
    if model["final_norm"]:
        table |= norm("norm", "fc_norm" if model["fc_norm"] else "norm")
    if model["pool"] == "attention":
        table |= TIMM_POOL
    is_scaled = "blocks.0.ls1.gamma" in tensors
    if not is_scaled:
        check_equal("blocks.0.ls1.gamma is missing", None, "init_values", settings)
    for ours, theirs, scale in (
        ("attention.out", "attn.proj", "ls1"),
        ("feed_forward.out", "mlp.fc2", "ls2"),
    ):
        scale = f"blocks.{{}}.{scale}.gamma" if is_scaled else ""
        table |= linear(f"layers.{{}}.{ours}", f"blocks.{{}}.{theirs}", scale)
    num_prefix = int(model["class_token"])
    if "reg_token" in tensors:
        num_prefix += shape_of(tensors, "reg_token", 3)[1]
    converted = _vit(
        tensors,
        settings,
        table,
        names=TIMM_NAMES,
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
    """Options of our model that timm's tensors show in part only."""
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
            "cls_token is missing: if the model has none, give global_pool, such as "
            "'avg', in a config.json beside the checkpoint"
            if not has_cls
            else "fc_norm.weight: give global_pool, such as 'avg', in a config.json "
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
    if has_pre_norm and not {"layer_norm_eps", "act_layer"} <= set(settings):
        raise ValueError(
            "norm_pre.weight: models with it, such as CLIP's, differ in activation and "
            "epsilon: give the architecture, or act_layer and layer_norm_eps, in a "
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


_HF_LAYER = "vit.encoder.layer.{}."
HF_VIT = {
    **norm("layers.{}.attention_norm", _HF_LAYER + "layernorm_before"),
    **norm("layers.{}.feed_forward_norm", _HF_LAYER + "layernorm_after"),
    **linear("layers.{}.feed_forward.hidden", _HF_LAYER + "intermediate.dense"),
}
HF_POOL = {
    "pool.probe": (same, "vit.head.probe"),
    **fused(
        "vit.head.attention.in_proj_weight",
        "vit.head.attention.in_proj_bias",
        ours="pool.attention",
    ),
    **linear("pool.attention.out", "vit.head.attention.out_proj"),
    **norm("pool.norm", "vit.head.layernorm"),
    **linear("pool.feed_forward.hidden", "vit.head.mlp.fc1"),
    **linear("pool.feed_forward.out", "vit.head.mlp.fc2"),
}
HF_NAMES = Names(
    layers="vit.encoder.layer.",
    cls="vit.embeddings.cls_token",
    registers="vit.embeddings.register_tokens",
    position="vit.embeddings.position_embeddings",
    convolution="vit.embeddings.patch_embeddings.projection",
    hidden=_HF_LAYER + "intermediate.dense",
    out=_HF_LAYER + "output.dense",
    pre_norm="vit.pre_norm",
    head="classifier",
)
HF_SIZES = {
    "hidden_size": "dim",
    "num_hidden_layers": "num_layers",
    "num_channels": "channels",
    "patch_size": "patch_size",
    "intermediate_size": "mlp_dim",
    "num_labels": "num_classes",
    "num_register_tokens": "num_registers",
}
# The names of transformers' models, on disk and in memory, by those of its first ViT.
_HF_RENAMED = {
    r"^(vit|vision_model|dinov2|dinov2_with_registers)\.": "",
    r"^layers\.": "encoder.layer.",
    r"^encoder\.layers\.": "encoder.layer.",
    r"\.(attention|self_attn)\.q_proj\.": ".attention.attention.query.",
    r"\.(attention|self_attn)\.k_proj\.": ".attention.attention.key.",
    r"\.(attention|self_attn)\.v_proj\.": ".attention.attention.value.",
    r"\.(attention\.o|self_attn\.out)_proj\.": ".attention.output.dense.",
    r"^(encoder\.layer\.\d+)\.mlp\.(fc1|weights_in)\.": r"\1.intermediate.dense.",
    r"^(encoder\.layer\.\d+)\.mlp\.(fc2|weights_out|down_proj)\.": r"\1.output.dense.",
    r"^(encoder\.layer\.\d+)\.(layer_)?norm1\.": r"\1.layernorm_before.",
    r"^(encoder\.layer\.\d+)\.(layer_)?norm2\.": r"\1.layernorm_after.",
    r"^embeddings\.class_embedding$": "embeddings.cls_token",
    r"^embeddings\.patch_embedding\.": "embeddings.patch_embeddings.projection.",
    r"^embeddings\.position_embedding\.weight$": "embeddings.position_embeddings",
    r"^pre_layrnorm\.": "pre_norm.",
    r"^post_layernorm\.": "layernorm.",
}
# Not a part of the image's encoder, though some files have them.
_HF_IGNORED = (
    r"vit\.(pooler\.dense\.(weight|bias)|embeddings\.(mask_token|position_ids)"
    r"|decoder\..*|text_model\..*|text_projection\.weight|logit_scale|logit_bias)"
)


def _hf_names(tensors: Tensors) -> dict[str, np.ndarray]:
    """Gives the tensors of transformers' image encoders the names of its ViT."""
    renamed = {}
    for name, tensor in tensors.items():
        for pattern, written in _HF_RENAMED.items():
            name = re.sub(pattern, written, name)
        if not name.startswith(("classifier.", "visual_projection.")):
            name = f"vit.{name}"
        renamed[name] = tensor
    layer = _HF_LAYER.format(0)
    # A gate and a hidden layer in memory are one layer on disk.
    if f"{layer}mlp.gate_proj.weight" in renamed:
        for name in [name for name in renamed if ".mlp.gate_proj." in name]:
            gate, up = renamed.pop(name), name.replace("gate_proj", "up_proj")
            if up not in renamed:
                raise ValueError(f"missing {up}")
            together = name.replace("mlp.gate_proj", "intermediate.dense")
            renamed[together] = np.concatenate([gate, renamed.pop(up)])
    return renamed


def _hf(
    tensors: Tensors,
    settings: Mapping[str, Any],
    keys: source_configs.Keys,
    *,
    prefix_rows: tuple[int, ...],
    norm_eps: float,
    pool: str = "cls",
    final_norm: bool = True,
    activation: str = "gelu",
    ignored: str = _HF_IGNORED,
) -> Converted:
    """Converts an image encoder of transformers; see `_vit`."""
    settings = source_configs.hf_settings(settings, keys)
    _check_parts(tensors, HF_NAMES)
    names = HF_NAMES
    if "visual_projection.weight" in tensors:
        names = names._replace(head="visual_projection")
        settings.pop("num_labels", None)
    else:
        settings.pop("projection_dim", None)
    activation = source_configs.activation(settings.get("hidden_act", activation))
    table = dict(HF_VIT)
    if final_norm:
        table |= norm("norm", "vit.layernorm")
    else:
        ignored = rf"{ignored}|vit\.layernorm\.(weight|bias)"
    if pool == "attention":
        table |= HF_POOL
    else:
        ignored = rf"{ignored}|vit\.head\..*"
    scales = [f"{_HF_LAYER}layer_scale{index}.lambda1" for index in (1, 2)]
    is_scaled = scales[0].format(0) in tensors
    for ours, theirs, scale in (
        ("attention.out", "attention.output.dense", scales[0]),
        ("feed_forward.out", "output.dense", scales[1]),
    ):
        scale = scale if is_scaled else ""
        table |= linear(f"layers.{{}}.{ours}", _HF_LAYER + theirs, scale)
    for ours, theirs in {"q": "query", "k": "key", "v": "value"}.items():
        theirs = f"{_HF_LAYER}attention.attention.{theirs}"
        table |= linear(f"layers.{{}}.attention.{ours}", theirs)
        if f"{theirs.format(0)}.bias" not in tensors:
            del table[f"layers.{{}}.attention.{ours}.bias"]
    return _vit(
        tensors,
        settings,
        table,
        names=names,
        sizes={**HF_SIZES, "projection_dim": "num_classes"},
        heads="num_attention_heads",
        model={
            "norm_eps": settings.get("layer_norm_eps", norm_eps),
            "pool": pool,
            "class_token": prefix_rows != (0,),
            "pool_prefix": False,
            "final_norm": final_norm,
            "fc_norm": False,
            # The gate has silu, whatever hidden_act is.
            "activation": "swiglu" if _is_gated(tensors, names) else activation,
        },
        prefix_rows=prefix_rows,
        ignored=ignored,
    )


def hf_vit(tensors: Tensors, settings: Mapping[str, Any]) -> Converted:
    """Converts ``ViTForImageClassification``, ``ViTModel`` and the encoder of MAE.

    Without a head, outputs are the CLS token after the LayerNorm. ``ViTModel`` has a
    pooler, which is left out.
    """
    tensors = _hf_names(tensors)
    return _hf(
        tensors,
        settings,
        source_configs.HF_VIT,
        # Rows of positions other than those of patches: always CLS's.
        prefix_rows=(1,) if HF_NAMES.cls in tensors else (0, 1),
        norm_eps=1e-12,
    )


def hf_dinov2(tensors: Tensors, settings: Mapping[str, Any]) -> Converted:
    """Converts DINOv2, with and without registers; the head reads CLS and mean."""
    if str(settings.get("model_type")).startswith("dinov3"):
        raise ValueError(f"relattn's ViT does not have {_DINOV3}: convert DINOv2")
    tensors = _hf_names(tensors)
    has_head = "classifier.weight" in tensors
    return _hf(
        tensors,
        settings,
        source_configs.HF_DINOV2,
        prefix_rows=(1,),
        norm_eps=1e-6,
        pool="cls_mean" if has_head else "cls",
    )


def hf_clip(tensors: Tensors, settings: Mapping[str, Any]) -> Converted:
    """Converts the image encoder of CLIP, from its own file or that of both encoders.

    With the projection, outputs are the embeddings that are compared with a text's.
    """
    tensors = _hf_names(tensors)
    has_head = "classifier.weight" in tensors
    return _hf(
        tensors,
        settings,
        source_configs.HF_CLIP,
        prefix_rows=(1,),
        norm_eps=1e-5,
        # CLIPForImageClassification has no use for the last LayerNorm.
        pool="mean" if has_head else "cls",
        final_norm=not has_head,
        activation="quick_gelu",
    )


def hf_siglip(tensors: Tensors, settings: Mapping[str, Any]) -> Converted:
    """Converts the image encoder of SigLIP, from its own file or that of both."""
    tensors = _hf_names(tensors)
    pooled = "vit.head.probe" in tensors and "classifier.weight" not in tensors
    return _hf(
        tensors,
        settings,
        source_configs.HF_SIGLIP,
        prefix_rows=(0,),
        norm_eps=1e-6,
        pool="attention" if pooled else "mean",
        activation="gelu_pytorch_tanh",
    )

"""Checkpoints of timm and transformers, and all sources that are converted."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from relattn.models import author_sources, source_configs
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

# Parts of ViTs that change the logits, and that relattn's ViT does not have.
_FOREIGN_PARTS = {
    r"dist(illation)?_token|head_dist|distillation_classifier": "a distillation token",
    r"(^|\.)reg(ister)?_tokens?$": "register tokens (reg_tokens)",
    r"^norm_pre\.": "a LayerNorm before the layers (pre_norm)",
    r"^fc_norm\.": "a LayerNorm after pooling (fc_norm), as with global_pool='avg'",
    r"^attn_pool\.": "pooling by attention (global_pool='map')",
    r"\.[qk]_norm\.": "norms of queries and keys (qk_norm)",
    r"^blocks\.\d+\.(attn|mlp)\.norm\.": "scale_attn_norm or scale_mlp_norm",
    r"^patch_embed\.backbone\.": "a convolutional network before the layers",
    r"^pre_logits\.": "a layer before the head (representation_size)",
    r"relative_position_bias_table": "relative positions",
}


def _check_parts(tensors: Tensors, names: Mapping[str, str]) -> None:
    """Refuses what relattn's ViT does not have, and checkpoints without a head."""
    for pattern, part in _FOREIGN_PARTS.items():
        for name in tensors:
            if re.search(pattern, name):
                raise ValueError(f"{name}: relattn's ViT does not have {part}")
    head, convolution = (f"{names[part]}.weight" for part in ("head", "convolution"))
    if convolution not in tensors:
        raise ValueError(
            f"{convolution} is missing: the checkpoint is of another --source"
        )
    if head not in tensors:
        raise ValueError(
            f"{head} is missing: the checkpoint is a backbone without a head, and "
            "relattn's ViT has one; convert a model that classifies"
        )


def _vit(
    tensors: Tensors,
    settings: Mapping[str, Any],
    table: Table,
    *,
    names: Mapping[str, str],
    sizes: Mapping[str, str],
    heads: str,
    norm_eps: float,
    has_cls: bool = True,
    ignored: str = "$^",
) -> Converted:
    """Converts a ViT.

    Args:
        tensors: The checkpoint.
        settings: The keys of ``config.json`` that are read.
        table: The parameters after the embedding.
        names: The names of ``layers``, ``cls``, ``position``, ``convolution``,
            ``hidden`` and ``head``.
        sizes: What keys of the settings mean, by the names of our sizes.
        heads: The key that has the number of heads.
        norm_eps: The LayerNorms' epsilon if no key has it.
        has_cls: Whether the head reads a CLS token, not the mean of the patches.
        ignored: Pattern of tensors that are not parameters.
    """
    cls, position, head = names["cls"], names["position"], f"{names['head']}.weight"
    convolution = f"{names['convolution']}.weight"
    num_layers = count_layers(tensors, rf"{re.escape(names['layers'])}(\d+)\.")
    table = {
        **table,
        "embedding.kernel": (patches, convolution),
        "embedding.bias": (same, f"{names['convolution']}.bias"),
        "position.learned.table": (same, position),
    }
    if has_cls:
        table["cls"] = (same, cls)
    check_names(table, tensors, num_layers, ignored)
    dim, channels, *patch = shape_of(tensors, convolution, 4)
    hidden = f"{names['hidden'].format(0)}.weight"
    found = {
        "dim": (convolution, dim),
        "channels": (convolution, channels),
        "patch_size": (convolution, patch),
        "num_layers": ("the checkpoint", num_layers),
        "mlp_dim": (hidden, shape_of(tensors, hidden, 2)[0]),
        "num_classes": (head, shape_of(tensors, head, 2)[0]),
    }
    if isinstance(settings.get("patch_size"), int):
        settings = {**settings, "patch_size": [settings["patch_size"]] * 2}
    for key, size in sizes.items():
        tensor, value = found[size]
        check_equal(f"{tensor} has {value}", value, key, settings)
    has_bias = "layers.{}.attention.q.bias" in table
    biases = "biases" if has_bias else "no biases"
    check_equal(f"q, k and v have {biases}", has_bias, "qkv_bias", settings)
    count = shape_of(tensors, position, 3)[1]
    grid = position_grid(count, settings, patch, (0, 1) if has_cls else (0,))
    # A position of CLS is a part of our CLS token.
    before = count - math.prod(grid)
    table["position.learned.table"] = (lambda x: x[0, before:], position)
    if before:
        table["cls"] = (lambda x, p: x + p[:, :1], cls, position)
    if has_cls:
        rows = f"{position} has {count} rows for {math.prod(grid)} patches"
        check_equal(rows, not before, "no_embed_class", settings)
    model = {
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
        "norm_eps": settings.get("layer_norm_eps", norm_eps),
        "pool": "cls" if has_cls else "mean",
    }
    config = {
        "model": model,
        "num_classes": found["num_classes"][1],
        "image_shape": [*map(operator.mul, grid, patch), channels],
    }
    return Converted(config, apply_table(table, tensors, num_layers, ignored))


TIMM = {
    **norm("layers.{}.attention_norm", "blocks.{}.norm1"),
    **norm("layers.{}.feed_forward_norm", "blocks.{}.norm2"),
    **linear("layers.{}.feed_forward.hidden", "blocks.{}.mlp.fc1"),
    **norm("norm", "norm"),
    **linear("head", "head"),
}
TIMM_NAMES = {
    "layers": "blocks.",
    "cls": "cls_token",
    "position": "pos_embed",
    "convolution": "patch_embed.proj",
    "hidden": "blocks.{}.mlp.fc1",
    "head": "head",
}
TIMM_SIZES = {
    "embed_dim": "dim",
    "num_features": "dim",
    "depth": "num_layers",
    "in_chans": "channels",
    "patch_size": "patch_size",
    "num_classes": "num_classes",
}


def timm(tensors: Tensors, settings: Mapping[str, Any]) -> Converted:
    """Converts timm's ``VisionTransformer``, with a CLS token or the mean of patches.

    The factors of LayerScale become a part of the layers before them.
    """
    _check_parts(tensors, TIMM_NAMES)
    settings = source_configs.timm_settings(settings)
    has_cls = "cls_token" in tensors
    pool = settings.get("global_pool", "token" if has_cls else None)
    if pool is None:
        raise ValueError(
            "cls_token is missing: if the model has none, give global_pool, such as "
            "'avg', in a config.json beside the checkpoint"
        )
    kind, expected = ("a", "token") if has_cls else ("no", "avg")
    found = f"the checkpoint has {kind} cls_token"
    check_equal(found, has_cls, "class_token", settings)
    if pool != expected:
        raise ValueError(
            f"relattn's ViT does not have global_pool={pool!r}: {found}, so expected "
            f"{expected!r}"
        )
    qkv = "blocks.{}.attn.qkv"
    bias = f"{qkv}.bias" if f"{qkv.format(0)}.bias" in tensors else ""
    table = {**TIMM, **fused(f"{qkv}.weight", bias)}
    is_scaled = "blocks.0.ls1.gamma" in tensors
    if not is_scaled:
        check_equal("blocks.0.ls1.gamma is missing", None, "init_values", settings)
    for ours, theirs, scale in (
        ("attention.out", "attn.proj", "ls1"),
        ("feed_forward.out", "mlp.fc2", "ls2"),
    ):
        scale = f"blocks.{{}}.{scale}.gamma" if is_scaled else ""
        table |= linear(f"layers.{{}}.{ours}", f"blocks.{{}}.{theirs}", scale)
    converted = _vit(
        tensors,
        settings,
        table,
        names=TIMM_NAMES,
        sizes=TIMM_SIZES,
        heads="num_heads",
        norm_eps=1e-6,
        has_cls=has_cls,
    )
    model = converted.config["model"]
    ratio = settings.get("mlp_ratio")
    if ratio is not None and int(model["dim"] * ratio) != model["mlp_dim"]:
        raise ValueError(
            f"mlp_ratio={ratio} does not fit: blocks.0.mlp.fc1.weight has "
            f"{model['mlp_dim']} rows for a width of {model['dim']}"
        )
    return converted


_HF_LAYER = "vit.encoder.layer.{}."
HF_VIT = {
    **norm("layers.{}.attention_norm", _HF_LAYER + "layernorm_before"),
    **linear("layers.{}.attention.out", _HF_LAYER + "attention.output.dense"),
    **norm("layers.{}.feed_forward_norm", _HF_LAYER + "layernorm_after"),
    **linear("layers.{}.feed_forward.hidden", _HF_LAYER + "intermediate.dense"),
    **linear("layers.{}.feed_forward.out", _HF_LAYER + "output.dense"),
    **norm("norm", "vit.layernorm"),
    **linear("head", "classifier"),
}
HF_VIT_NAMES = {
    "layers": "vit.encoder.layer.",
    "cls": "vit.embeddings.cls_token",
    "position": "vit.embeddings.position_embeddings",
    "convolution": "vit.embeddings.patch_embeddings.projection",
    "hidden": _HF_LAYER + "intermediate.dense",
    "head": "classifier",
}
HF_VIT_SIZES = {
    "hidden_size": "dim",
    "num_hidden_layers": "num_layers",
    "num_channels": "channels",
    "patch_size": "patch_size",
    "intermediate_size": "mlp_dim",
    "num_labels": "num_classes",
}
# The names that transformers 5 has in memory, and those that it writes.
_HF_VIT_RENAMED = {
    r"^layers\.": "encoder.layer.",
    r"\.attention\.q_proj\.": ".attention.attention.query.",
    r"\.attention\.k_proj\.": ".attention.attention.key.",
    r"\.attention\.v_proj\.": ".attention.attention.value.",
    r"\.attention\.o_proj\.": ".attention.output.dense.",
    r"\.mlp\.fc1\.": ".intermediate.dense.",
    r"\.mlp\.fc2\.": ".output.dense.",
}


def _hf_vit_name(name: str) -> str:
    for pattern, written in _HF_VIT_RENAMED.items():
        name = re.sub(pattern, written, name)
    return name if name.startswith("classifier.") else f"vit.{name}"


def hf_vit(tensors: Tensors, settings: Mapping[str, Any]) -> Converted:
    """Converts ``ViTForImageClassification`` of transformers."""
    settings = source_configs.read_settings(settings, source_configs.HF_VIT)
    if "id2label" in settings:
        labels = len(settings["id2label"])
        check_equal(f"id2label has {labels}", labels, "num_labels", settings)
        settings["num_labels"] = labels
    tensors = {
        _hf_vit_name(name.removeprefix("vit.")): x for name, x in tensors.items()
    }
    _check_parts(tensors, HF_VIT_NAMES)
    table = dict(HF_VIT)
    for ours, theirs in {"q": "query", "k": "key", "v": "value"}.items():
        theirs = f"{_HF_LAYER}attention.attention.{theirs}"
        table |= linear(f"layers.{{}}.attention.{ours}", theirs)
        if f"{theirs.format(0)}.bias" not in tensors:
            del table[f"layers.{{}}.attention.{ours}.bias"]
    return _vit(
        tensors,
        settings,
        table,
        names=HF_VIT_NAMES,
        sizes=HF_VIT_SIZES,
        heads="num_attention_heads",
        norm_eps=1e-12,
        # Not a part of this model, though some files have them.
        ignored=r"vit\.(pooler\.dense\.(weight|bias)|embeddings\.mask_token)",
    )


def _conv1d(ours: str, theirs: str) -> Table:
    """GPT-2's linear layer: its weight is [inputs, outputs], like ours."""
    return {
        f"{ours}.kernel": (same, f"{theirs}.weight"),
        f"{ours}.bias": (same, f"{theirs}.bias"),
    }


HF_GPT2 = {
    "embedding.embedding": (same, "wte.weight"),
    "position.learned.table": (same, "wpe.weight"),
    **norm("layers.{}.attention_norm", "h.{}.ln_1"),
    **_conv1d("layers.{}.attention.out", "h.{}.attn.c_proj"),
    **norm("layers.{}.feed_forward_norm", "h.{}.ln_2"),
    **_conv1d("layers.{}.feed_forward.hidden", "h.{}.mlp.c_fc"),
    **_conv1d("layers.{}.feed_forward.out", "h.{}.mlp.c_proj"),
    **norm("norm", "ln_f"),
}


def hf_gpt2(tensors: Tensors, settings: Mapping[str, Any]) -> Converted:
    """Converts ``GPT2LMHeadModel`` or ``GPT2Model`` of transformers.

    Scales of the attention other than 1 / sqrt(head_dim) become a part of the queries.
    """
    settings = source_configs.gpt2_settings(settings)
    qkv = "h.{}.attn.c_attn"
    bias = f"{qkv}.bias" if f"{qkv.format(0)}.bias" in tensors else ""
    table = {**HF_GPT2, **fused(f"{qkv}.weight", bias, transposed=False)}
    is_tied = bool(settings.get("tie_word_embeddings", True))
    if not is_tied:
        table["head.kernel"] = (np.transpose, "lm_head.weight")
    num_layers = count_layers(tensors, r"h\.(\d+)\.")
    # Older files hold the causal mask.
    ignored = r"h\.\d+\.attn\.(masked_)?bias" + r"|lm_head\.weight" * is_tied
    check_names(table, tensors, num_layers, ignored)
    head = tensors.get("lm_head.weight")
    if is_tied and head is not None and not np.array_equal(head, tensors["wte.weight"]):
        raise ValueError(
            "lm_head.weight is not wte.weight: if it is the head, give "
            "tie_word_embeddings=false in a config.json beside the checkpoint"
        )
    vocab_size, dim = shape_of(tensors, "wte.weight", 2)
    context_length = shape_of(tensors, "wpe.weight", 2)[0]
    mlp_dim = shape_of(tensors, "h.0.mlp.c_fc.weight", 2)[1]
    for name, key, value in (
        ("wte.weight", "vocab_size", vocab_size),
        ("wte.weight", "n_embd", dim),
        ("wpe.weight", "n_positions", context_length),
        ("the checkpoint", "n_layer", num_layers),
        ("h.0.mlp.c_fc.weight", "n_inner", mlp_dim),
    ):
        check_equal(f"{name} has {value}", value, key, settings)
    heads = source_configs.num_heads(settings, "n_head", dim)
    arrays = apply_table(table, tensors, num_layers, ignored)
    scale = 1.0 if settings.get("scale_attn_weights", True) else (dim // heads) ** 0.5
    inverse = settings.get("scale_attn_by_inverse_layer_idx", False)
    for layer in range(num_layers):
        for name in ("kernel", "bias") if bias else ("kernel",):
            name = f"params.layers.{layer}.attention.q.{name}"
            arrays[name] = arrays[name] * np.float32(scale / (1 + layer * inverse))
    model = {
        "name": "gpt",
        "dim": dim,
        "num_layers": num_layers,
        "num_heads": heads,
        "mlp_dim": mlp_dim,
        "attention": "softmax",
        "position": "learned",
        "qkv_bias": bool(bias),
        "head_norm": False,
        "tie_head": is_tied,
        "approximate_gelu": settings["activation_function"] == "gelu_new",
        "norm_eps": settings.get("layer_norm_epsilon", 1e-5),
    }
    sizes = {"vocab_size": vocab_size, "context_length": context_length}
    return Converted({"model": model, **sizes}, arrays)


SOURCES: dict[str, Callable[[Tensors, Mapping[str, Any]], Converted]] = {
    "timm": timm,
    "hf_vit": hf_vit,
    "hf_gpt2": hf_gpt2,
    "translution": author_sources.translution,
    "performer": author_sources.performer,
}

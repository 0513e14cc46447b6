"""Checkpoints of the papers' authors: Translution, and the Performers of Horn et al."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from relattn.messages import shorten
from relattn.models import source_configs, source_keys
from relattn.models.source_configs import check_equal
from relattn.models.tensor_tables import (
    Converted,
    Table,
    Tensors,
    apply_table,
    count_layers,
    fused,
    image_size,
    linear,
    norm,
    position_grid,
    same,
    transposed,
)


def _offset_table(flip: bool, heads: int, cls: bool, x: np.ndarray) -> np.ndarray:
    """Returns a table ``[rows, inputs, outputs]`` in our order of offsets and CLS rows.

    The authors index queries and keys by the offset of the other sign, causal queries
    from the end, and have the rows of CLS in the order self, in, out.
    """
    rows, prefix = (x[:-3], x[-3:][[1, 0, 2]]) if cls else (x, x[:0])
    x = np.concatenate([rows[::-1] if flip else rows, prefix])
    return x.reshape(*x.shape[:2], heads, -1)


def _translution_layers(tensors: Tensors, heads: int, text: bool) -> tuple[Table, dict]:
    """Returns the attention's part of the table, and the attention's options."""
    first, layer = "translution.layers.0.0.", "translution.layers.{}.0."
    low = f"{first}to_qkv.weight" in tensors
    table: Table = fused(f"{layer}to_qkv.weight") if low else {}
    relative = ""
    for name in "qkv":
        theirs = f"to_{name}2" if low else f"to_{name}"
        if f"{first}{theirs}.unique_params" in tensors:
            relative += name
            flip = name == "q" if text else name in "qk"
            order = functools.partial(_offset_table, flip, heads, not text)
            table[f"layers.{{}}.attention.{name}_table"] = (
                order,
                f"{layer}{theirs}.unique_params",
            )
        if f"{first}to_{name}1.weight" in tensors:
            ours = f"layers.{{}}.attention.low_{name}.kernel"
            table[ours] = (transposed, f"{layer}to_{name}1.weight")
    if f"{first}to_v3.weight" in tensors:
        ours = "layers.{}.attention.low_out.kernel"
        table[ours] = (transposed, f"{layer}to_v3.weight")
    if not low:
        return table, {"attention": "translution"}
    if not relative:
        return table, {"attention": "softmax"}
    inner = tensors[f"{first}to_{relative[-1]}1.weight"].shape[0]
    attention = (
        f"lor_translution(rank={inner // heads}, relative={relative!r}, average=True)"
    )
    return table, {"attention": attention}


TRANSLUTION = {
    **norm("layers.{}.attention_norm", "translution.layers.{}.0.norm"),
    **linear("layers.{}.attention.out", "translution.layers.{}.0.to_out.0"),
    **norm("layers.{}.feed_forward_norm", "translution.layers.{}.1.net.0"),
    **linear("layers.{}.feed_forward.hidden", "translution.layers.{}.1.net.1"),
    **linear("layers.{}.feed_forward.out", "translution.layers.{}.1.net.4"),
    **norm("norm", "translution.norm"),
}
TRANSLUTION_VIT = {
    **norm("patch_norm", "to_patch_embedding.1"),
    **linear("embedding", "to_patch_embedding.2"),
    **norm("embedding_norm", "to_patch_embedding.3"),
    **linear("head", "mlp_head"),
}
TRANSLUTION_GPT = {
    "embedding.embedding": (same, "wte.weight"),
    **norm("head_norm", "norm"),
    "head.kernel": (transposed, "output_head.weight"),
}


def _patch(width: int, settings: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the channels and the side of a square patch of ``width`` values."""
    # Only one of 1 and 3 channels gives a patch with a whole side.
    channels = settings.get("channels", 1 if math.isqrt(width) ** 2 == width else 3)
    side = math.isqrt(width // channels) if channels in range(1, width + 1) else 0
    if side**2 * channels != width:
        raise ValueError(
            f"to_patch_embedding.2.weight takes {width} values, not a square patch of "
            f"{shorten(channels)} channels: set channels in a config.json beside the "
            "checkpoint"
        )
    return channels, side


def translution(tensors: Tensors, settings: Mapping[str, Any]) -> Converted:
    """Converts the ViT and the GPT of Translution's authors, full or LoR."""
    settings = source_configs.read_settings(settings, source_keys.TRANSLUTION)
    text = "wte.weight" in tensors
    dim = tensors["translution.norm.weight"].shape[0]
    heads = source_configs.num_heads(settings, "num_heads", dim)
    num_layers = count_layers(tensors, r"translution\.layers\.(\d+)\.")
    attention, options = _translution_layers(tensors, heads, text)
    model = {
        "name": "gpt" if text else "vit",
        "dim": dim,
        "num_layers": num_layers,
        "num_heads": heads,
        "mlp_dim": tensors["translution.layers.0.1.net.1.weight"].shape[0],
        **options,
    }
    if text:
        ends, others, config = _translution_gpt(tensors)
    else:
        ends, others, config = _translution_vit(tensors, settings)
    table = {**TRANSLUTION, **attention, **ends}
    masks = r"translution\.layers\.\d+\.0\.causal"
    return Converted(
        {"model": {**model, **others}, **config},
        apply_table(table, tensors, num_layers, masks),
    )


def _translution_gpt(tensors: Tensors) -> tuple[Table, dict, dict]:
    """Returns the table of the GPT around its layers, its options and its sizes."""
    table, options = {**TRANSLUTION_GPT}, {}
    if "wpe.weight" in tensors:
        options["position"] = "learned"
        table["position.learned.table"] = (same, "wpe.weight")
    length = tensors["translution.layers.0.0.causal"].shape[-1]
    sizes = {"vocab_size": tensors["wte.weight"].shape[0], "context_length": length}
    return table, options, sizes


def _translution_vit(
    tensors: Tensors, settings: Mapping[str, Any]
) -> tuple[Table, dict, dict]:
    """Returns the table of the ViT around its layers, its options and its sizes."""
    width = tensors["to_patch_embedding.2.weight"].shape[1]
    channels, side = _patch(width, settings)
    table: Table = {**TRANSLUTION_VIT}
    options: dict[str, Any] = {"patch_size": side}
    if "pos_embedding" in tensors:
        options["position"] = "learned"
        table["position.learned.table"] = (lambda x: x[0, 1:], "pos_embedding")
        table["cls"] = (lambda x, p: x + p[:, :1], "cls_token", "pos_embedding")
    else:
        table["cls"] = (same, "cls_token")
    grid = position_grid(
        _count_patches(tensors, settings, side), settings, [side, side]
    )
    sizes = {
        "num_classes": tensors["mlp_head.weight"].shape[0],
        "image_shape": [grid[0] * side, grid[1] * side, channels],
    }
    return table, options, sizes


def _count_patches(tensors: Tensors, settings: Mapping[str, Any], side: int) -> int:
    """Returns the number of patches of an image."""
    if "pos_embedding" in tensors:
        return tensors["pos_embedding"].shape[1] - 1
    if "image_size" in settings:
        return math.prod(image_size(settings)) // side**2
    rows = [len(x) for key, x in tensors.items() if key.endswith("unique_params")]
    # (2 s - 1)^2 offsets of a grid of s x s patches, and three rows for CLS.
    offsets = max(rows[0] - 3, 0) if rows else 0
    if offsets % 2 and math.isqrt(offsets) ** 2 == offsets:
        return ((math.isqrt(offsets) + 1) // 2) ** 2
    raise ValueError(
        "no tensor shows the size of the images: set image_size in a config.json "
        "beside the checkpoint"
    )


_PERFORMER_LAYER = "performer.net.layers.{}."
PERFORMER = {
    "cls": (lambda x: x[None, None], "class_query"),
    **linear("embedding", "content_embedding"),
    **norm("layers.{}.attention_norm", _PERFORMER_LAYER + "0.norm"),
    **linear("layers.{}.attention.v", _PERFORMER_LAYER + "0.fn.to_v"),
    **linear("layers.{}.attention.out", _PERFORMER_LAYER + "0.fn.to_out"),
    **norm("layers.{}.feed_forward_norm", _PERFORMER_LAYER + "1.norm"),
    **linear("layers.{}.feed_forward.hidden", _PERFORMER_LAYER + "1.fn.fn.w1"),
    **linear("layers.{}.feed_forward.out", _PERFORMER_LAYER + "1.fn.fn.w2"),
    **linear("head", "output_layer"),
}
_FREQUENCIES = "positional_embedding.inv_freq"
_PROJECTION = "0.fn.fast_attention.projection_matrix"
# The constant that the authors' code adds to features.
PERFORMER_EPS = 1e-4


def _coefficients(heads: int, *arrays: np.ndarray) -> np.ndarray:
    """Returns (a, b), [layers, heads, pairs, 2], from alpha and beta by layer."""
    stacked = np.stack(arrays).reshape(len(arrays) // 2, 2, heads, -1)
    return np.moveaxis(stacked, 1, -1)


def performer(tensors: Tensors, settings: Mapping[str, Any]) -> Converted:
    """Converts the Performers of Horn et al.: no position, absolute, strategy 1.

    The authors add eps to features after subtracting a maximum over the batch; ours is
    a constant that depends on no token, so outputs are close to theirs, not equal.
    """
    settings = source_configs.read_settings(settings, source_keys.PERFORMER)
    projection = _PERFORMER_LAYER.format(0) + _PROJECTION
    if projection not in tensors:
        raise ValueError("only Performers without position heads are converted")
    num_layers = count_layers(tensors, r"performer\.net\.layers\.(\d+)\.")
    dim, channels = tensors["content_embedding.weight"].shape
    num_features, depth = tensors[projection].shape
    if f"{_PERFORMER_LAYER.format(0)}0.fn.to_q.alpha" in tensors:
        # The sine and cosine of two axes follow the head's content.
        depth -= 4 * len(tensors[_FREQUENCIES])
    heads = dim // max(depth, 1)
    for key in ("num_heads", "heads"):
        check_equal(f"{projection} has {heads}", heads, key, settings)
    model = {
        "name": "performer",
        "dim": dim,
        "num_layers": num_layers,
        "num_heads": heads,
        "mlp_dim": tensors[_PERFORMER_LAYER.format(0) + "1.fn.fn.w1.weight"].shape[0],
        "attention": f"favor(num_features={num_features}, eps={PERFORMER_EPS}, "
        "sign_corrected=False)",
        "position": "none",
    }
    table = dict(PERFORMER)
    content = ""
    if f"{_PERFORMER_LAYER.format(0)}0.fn.to_q.alpha" in tensors:
        content = ".content_linear"
        scales = tensors[_FREQUENCIES].shape[0]
        model["position"] = f"constrained_sincos(num_scales={scales})"
        table["position.constrained_sincos.frequencies"] = (same, _FREQUENCIES)
        table["position.constrained_sincos.coefficients"] = (
            functools.partial(_coefficients, heads),
            *(
                f"{_PERFORMER_LAYER.format(layer)}0.fn.to_q.{name}"
                for layer in range(num_layers)
                for name in ("alpha", "beta")
            ),
        )
    elif _FREQUENCIES in tensors:
        model["position"] = "learnable_sincos"
        table["position.learnable_sincos.frequencies"] = (same, _FREQUENCIES)
    for name in "qk":
        theirs = f"{_PERFORMER_LAYER}0.fn.to_{name}{content}"
        table |= linear(f"layers.{{}}.attention.{name}", theirs)
    projection = "layers.{}.attention.projection.projection"
    table[projection] = (same, _PERFORMER_LAYER + _PROJECTION)
    buffers = r"performer\.calls_since_last_redraw|.*\.offdiag_matrix"
    arrays = apply_table(table, tensors, num_layers, buffers)
    # Projections are not parameters.
    end = ".attention.projection.projection"
    for name in [name for name in arrays if name.endswith(end)]:
        arrays[f"random_features{name.removeprefix('params')}"] = arrays.pop(name)
    config = {
        "model": model,
        "num_classes": tensors["output_layer.weight"].shape[0],
        "image_shape": [*image_size({"image_size": 32, **settings}), channels],
    }
    return Converted(config, arrays)

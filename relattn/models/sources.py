"""The parameters of other libraries' checkpoints, as relattn's: a table per source.

A table has for each of our parameters a function, and the names of the tensors that it
takes. ``{}`` stands for the index of a layer.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from relattn.models import pretrained

HEAD_DIM = 64

Tensors = Mapping[str, np.ndarray]
Table = dict[str, tuple]


class Converted(NamedTuple):
    """The contents of ``config.json``, and arrays by the names of `flatten`."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]


def apply_table(
    table: Table, tensors: Tensors, num_layers: int, ignored: str = "$^"
) -> dict[str, np.ndarray]:
    """Computes our parameters from the tensors of a checkpoint.

    Args:
        table: For each of our names a function, and the names of its arguments.
        tensors: The checkpoint.
        num_layers: Number of layers, which ``{}`` counts.
        ignored: Pattern of tensors that are no parameters.

    Returns:
        An array for each of our names, with the prefix ``params.``.

    Raises:
        ValueError: If tensors are missing, unexpected or of another shape.
    """
    entries = {}
    for name, (function, *sources) in table.items():
        for layer in range(num_layers) if "{}" in name else [0]:
            theirs = [source.format(layer) for source in sources]
            entries[name.format(layer)] = (function, theirs)
    wanted = {source for _, sources in entries.values() for source in sources}
    missing = sorted(wanted - set(tensors))
    extra = [
        name
        for name in tensors
        if name not in wanted and not re.fullmatch(ignored, name)
    ]
    problems = {"missing": missing, "unexpected": extra}
    if missing or extra:
        raise ValueError(
            "the tensors are not those of this model: "
            f"{pretrained.list_problems(problems)}"
        )
    result = {}
    for name, (function, sources) in entries.items():
        arrays = [np.asarray(tensors[source]) for source in sources]
        try:
            result[f"params.{name}"] = function(*arrays)
        except (ValueError, IndexError) as error:
            shapes = [
                f"{source} {array.shape}"
                for source, array in zip(sources, arrays, strict=True)
            ]
            raise ValueError(f"wrong shape: {', '.join(shapes)}") from error
    return result


def _same(x: np.ndarray) -> np.ndarray:
    return x


def _linear(ours: str, theirs: str) -> Table:
    """A linear layer of PyTorch: its weight is [outputs, inputs]."""
    return {
        f"{ours}.kernel": (np.transpose, f"{theirs}.weight"),
        f"{ours}.bias": (_same, f"{theirs}.bias"),
    }


def _norm(ours: str, theirs: str) -> Table:
    return {
        f"{ours}.scale": (_same, f"{theirs}.weight"),
        f"{ours}.bias": (_same, f"{theirs}.bias"),
    }


def _third(index: int, axis: int, x: np.ndarray) -> np.ndarray:
    """Takes q, k or v from a matrix or a bias that has all three, one by one."""
    return np.split(x, 3, axis)[index]


def _fused(weight: str, bias: str = "", *, transposed: bool = True) -> Table:
    """The projections of q, k and v from one fused layer."""
    table = {}
    for index, name in enumerate("qkv"):
        part = functools.partial(_third, index, 0 if transposed else -1)
        kernel = functools.partial(_transposed_third, index) if transposed else part
        table[f"layers.{{}}.attention.{name}.kernel"] = (kernel, weight)
        if bias:
            table[f"layers.{{}}.attention.{name}.bias"] = (part, bias)
    return table


def _transposed_third(index: int, x: np.ndarray) -> np.ndarray:
    return _third(index, 0, x).T


def _patches(x: np.ndarray) -> np.ndarray:
    """A convolution's kernel [dim, channels, height, width] as a matrix of patches."""
    dim, channels, height, width = x.shape
    return x.transpose(2, 3, 1, 0).reshape(height * width * channels, dim)


def _num_layers(tensors: Tensors, pattern: str) -> int:
    """Counts layers by the names of tensors; the pattern has the index as a group."""
    found = [re.match(pattern, name) for name in tensors]
    return 1 + max((int(match[1]) for match in found if match), default=-1)


def _num_heads(settings: Mapping[str, Any], key: str, dim: int) -> int:
    """Returns the number of heads, which tensors do not show."""
    heads = settings.get("num_heads") or settings.get(key) or dim // HEAD_DIM
    if not heads:
        raise ValueError(f"the width of {dim} has no heads of 64: give --num_heads")
    return heads


def _vit_embedding(cls: str, position: str, convolution: str) -> Table:
    """The embedding; a position of CLS is a part of our CLS token."""
    return {
        "embedding.kernel": (_patches, f"{convolution}.weight"),
        "embedding.bias": (_same, f"{convolution}.bias"),
        "position.learned.table": (lambda x: x[0, 1:], position),
        "cls": (lambda x, p: x + p[:, :1], cls, position),
    }


def _vit_config(
    tensors: Tensors,
    settings: Mapping[str, Any],
    *,
    position: str,
    convolution: str,
    hidden: str,
    head: str,
    num_layers: int,
    norm_eps: float,
) -> dict[str, Any]:
    """The configuration of a ViT, from the shapes of its tensors."""
    distilled = [name for name in tensors if re.search(r"dist(illation)?_token", name)]
    if distilled:
        raise ValueError(
            f"{distilled[0]} is a distillation token, which relattn's ViT does not "
            "have: convert a ViT or DeiT trained without distillation"
        )
    dim, channels, *patch = tensors[f"{convolution}.weight"].shape
    grid = _grid(tensors[position].shape[1] - 1, settings, patch)
    model = {
        "name": "vit",
        "dim": dim,
        "num_layers": num_layers,
        "num_heads": _num_heads(settings, "num_attention_heads", dim),
        "mlp_dim": tensors[f"{hidden.format(0)}.weight"].shape[0],
        "patch_size": patch,
        "attention": "softmax",
        "position": "learned",
        "qkv_bias": True,
        "embedding_norms": False,
        "norm_eps": settings.get("layer_norm_eps", norm_eps),
    }
    shape = [rows * side for rows, side in zip(grid, patch, strict=True)]
    return {
        "model": model,
        "num_classes": tensors[f"{head}.weight"].shape[0],
        "image_shape": [*shape, channels],
    }


def _grid(count: int, settings: Mapping[str, Any], patch: list[int]) -> tuple[int, int]:
    """The grid of a number of positions: square, or from ``image_size``."""
    side = math.isqrt(count)
    size = settings.get("image_size")
    if isinstance(size, list):
        grid = (size[0] // patch[0], size[1] // patch[1])
    else:
        grid = (side, side)
    if math.prod(grid) != count:
        raise ValueError(
            f"{count} positions are no square grid: give image_size=[height, width] in "
            "a config.json beside the checkpoint"
        )
    return grid


TIMM = {
    **_vit_embedding("cls_token", "pos_embed", "patch_embed.proj"),
    **_norm("layers.{}.attention_norm", "blocks.{}.norm1"),
    **_fused("blocks.{}.attn.qkv.weight", "blocks.{}.attn.qkv.bias"),
    **_linear("layers.{}.attention.out", "blocks.{}.attn.proj"),
    **_norm("layers.{}.feed_forward_norm", "blocks.{}.norm2"),
    **_linear("layers.{}.feed_forward.hidden", "blocks.{}.mlp.fc1"),
    **_linear("layers.{}.feed_forward.out", "blocks.{}.mlp.fc2"),
    **_norm("norm", "norm"),
    **_linear("head", "head"),
}


def timm(tensors: Tensors, settings: Mapping[str, Any]) -> Converted:
    """Converts timm's ``vit_*_patch*`` with a CLS token."""
    num_layers = _num_layers(tensors, r"blocks\.(\d+)\.")
    config = _vit_config(
        tensors,
        settings,
        position="pos_embed",
        convolution="patch_embed.proj",
        hidden="blocks.{}.mlp.fc1",
        head="head",
        num_layers=num_layers,
        norm_eps=1e-6,
    )
    return Converted(config, apply_table(TIMM, tensors, num_layers))


_HF_LAYER = "vit.encoder.layer.{}."
HF_VIT = {
    **_vit_embedding(
        "vit.embeddings.cls_token",
        "vit.embeddings.position_embeddings",
        "vit.embeddings.patch_embeddings.projection",
    ),
    **_norm("layers.{}.attention_norm", _HF_LAYER + "layernorm_before"),
    **_linear("layers.{}.attention.q", _HF_LAYER + "attention.attention.query"),
    **_linear("layers.{}.attention.k", _HF_LAYER + "attention.attention.key"),
    **_linear("layers.{}.attention.v", _HF_LAYER + "attention.attention.value"),
    **_linear("layers.{}.attention.out", _HF_LAYER + "attention.output.dense"),
    **_norm("layers.{}.feed_forward_norm", _HF_LAYER + "layernorm_after"),
    **_linear("layers.{}.feed_forward.hidden", _HF_LAYER + "intermediate.dense"),
    **_linear("layers.{}.feed_forward.out", _HF_LAYER + "output.dense"),
    **_norm("norm", "vit.layernorm"),
    **_linear("head", "classifier"),
}


def hf_vit(tensors: Tensors, settings: Mapping[str, Any]) -> Converted:
    """Converts ``ViTForImageClassification`` of transformers."""
    activation = settings.get("hidden_act", "gelu")
    if activation != "gelu":
        raise ValueError(f"hidden_act={activation!r} is not relattn's: expected 'gelu'")
    num_layers = _num_layers(tensors, r"vit\.encoder\.layer\.(\d+)\.")
    config = _vit_config(
        tensors,
        settings,
        position="vit.embeddings.position_embeddings",
        convolution="vit.embeddings.patch_embeddings.projection",
        hidden=_HF_LAYER + "intermediate.dense",
        head="classifier",
        num_layers=num_layers,
        norm_eps=1e-12,
    )
    return Converted(config, apply_table(HF_VIT, tensors, num_layers))


def _conv1d(ours: str, theirs: str) -> Table:
    """GPT-2's linear layer: its weight is [inputs, outputs], like ours."""
    return {
        f"{ours}.kernel": (_same, f"{theirs}.weight"),
        f"{ours}.bias": (_same, f"{theirs}.bias"),
    }


HF_GPT2 = {
    "embedding.embedding": (_same, "wte.weight"),
    "position.learned.table": (_same, "wpe.weight"),
    **_norm("layers.{}.attention_norm", "h.{}.ln_1"),
    **_fused("h.{}.attn.c_attn.weight", "h.{}.attn.c_attn.bias", transposed=False),
    **_conv1d("layers.{}.attention.out", "h.{}.attn.c_proj"),
    **_norm("layers.{}.feed_forward_norm", "h.{}.ln_2"),
    **_conv1d("layers.{}.feed_forward.hidden", "h.{}.mlp.c_fc"),
    **_conv1d("layers.{}.feed_forward.out", "h.{}.mlp.c_proj"),
    **_norm("norm", "ln_f"),
}


def hf_gpt2(tensors: Tensors, settings: Mapping[str, Any]) -> Converted:
    """Converts ``GPT2LMHeadModel`` or ``GPT2Model`` of transformers."""
    activation = settings.get("activation_function", "gelu_new")
    if activation != "gelu_new":
        raise ValueError(
            f"activation_function={activation!r} is not relattn's: expected 'gelu_new'"
        )
    tensors = {k.removeprefix("transformer."): x for k, x in tensors.items()}
    vocab_size, dim = tensors["wte.weight"].shape
    head = tensors.pop("lm_head.weight", None)
    if head is not None and not np.array_equal(head, tensors["wte.weight"]):
        raise ValueError("lm_head.weight is not tied to wte.weight, as GPT-2's is")
    num_layers = _num_layers(tensors, r"h\.(\d+)\.")
    model = {
        "name": "gpt",
        "dim": dim,
        "num_layers": num_layers,
        "num_heads": _num_heads(settings, "n_head", dim),
        "mlp_dim": tensors["h.0.mlp.c_fc.weight"].shape[1],
        "attention": "softmax",
        "position": "learned",
        "qkv_bias": True,
        "head_norm": False,
        "tie_head": True,
        "approximate_gelu": True,
        "norm_eps": settings.get("layer_norm_epsilon", 1e-5),
    }
    config = {
        "model": model,
        "vocab_size": vocab_size,
        "context_length": tensors["wpe.weight"].shape[0],
    }
    # Older files hold the causal mask.
    masks = r"h\.\d+\.attn\.(masked_)?bias"
    return Converted(config, apply_table(HF_GPT2, tensors, num_layers, masks))


def _offset_table(flip: bool, heads: int, cls: bool, x: np.ndarray) -> np.ndarray:
    """A table [rows, inputs, outputs] in our order of offsets and of CLS rows.

    The authors index queries and keys by the offset of the other sign, causal queries
    from the end, and have the rows of CLS in the order self, in, out.
    """
    rows, prefix = (x[:-3], x[-3:][[1, 0, 2]]) if cls else (x, x[:0])
    x = np.concatenate([rows[::-1] if flip else rows, prefix])
    return x.reshape(*x.shape[:2], heads, -1)


def _translution_layers(tensors: Tensors, heads: int, text: bool) -> tuple[Table, dict]:
    """The attention's part of the table, and the attention's options."""
    first, layer = "translution.layers.0.0.", "translution.layers.{}.0."
    low = f"{first}to_qkv.weight" in tensors
    table: Table = _fused(f"{layer}to_qkv.weight") if low else {}
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
            table[ours] = (np.transpose, f"{layer}to_{name}1.weight")
    if f"{first}to_v3.weight" in tensors:
        ours = "layers.{}.attention.low_out.kernel"
        table[ours] = (np.transpose, f"{layer}to_v3.weight")
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
    **_norm("layers.{}.attention_norm", "translution.layers.{}.0.norm"),
    **_linear("layers.{}.attention.out", "translution.layers.{}.0.to_out.0"),
    **_norm("layers.{}.feed_forward_norm", "translution.layers.{}.1.net.0"),
    **_linear("layers.{}.feed_forward.hidden", "translution.layers.{}.1.net.1"),
    **_linear("layers.{}.feed_forward.out", "translution.layers.{}.1.net.4"),
    **_norm("norm", "translution.norm"),
}
TRANSLUTION_VIT = {
    **_norm("patch_norm", "to_patch_embedding.1"),
    **_linear("embedding", "to_patch_embedding.2"),
    **_norm("embedding_norm", "to_patch_embedding.3"),
    **_linear("head", "mlp_head"),
}
TRANSLUTION_GPT = {
    "embedding.embedding": (_same, "wte.weight"),
    **_norm("head_norm", "norm"),
    "head.kernel": (np.transpose, "output_head.weight"),
}


def translution(tensors: Tensors, settings: Mapping[str, Any]) -> Converted:
    """Converts the ViT and the GPT of Translution's authors, exact or LoR."""
    text = "wte.weight" in tensors
    dim = tensors["translution.norm.weight"].shape[0]
    heads = _num_heads(settings, "num_heads", dim)
    num_layers = _num_layers(tensors, r"translution\.layers\.(\d+)\.")
    attention, options = _translution_layers(tensors, heads, text)
    table = {**TRANSLUTION, **attention}
    model = {
        "name": "gpt" if text else "vit",
        "dim": dim,
        "num_layers": num_layers,
        "num_heads": heads,
        "mlp_dim": tensors["translution.layers.0.1.net.1.weight"].shape[0],
        **options,
    }
    if text:
        table |= TRANSLUTION_GPT
        length = tensors["translution.layers.0.0.causal"].shape[-1]
        config = {"vocab_size": tensors["wte.weight"].shape[0]}
        config["context_length"] = length
        if "wpe.weight" in tensors:
            model["position"] = "learned"
            table["position.learned.table"] = (_same, "wpe.weight")
    else:
        table |= TRANSLUTION_VIT
        width = tensors["to_patch_embedding.2.weight"].shape[1]
        # The side of the patch is whole for one number of channels only.
        channels = 1 if math.isqrt(width) ** 2 == width else 3
        side = math.isqrt(width // channels)
        model["patch_size"] = side
        rows = {k: len(x) for k, x in tensors.items() if k.endswith("unique_params")}
        if "pos_embedding" in tensors:
            count = tensors["pos_embedding"].shape[1] - 1
        elif rows:
            count = ((math.isqrt(next(iter(rows.values())) - 3) + 1) // 2) ** 2
        else:
            count = (settings.get("image_size", 0) // side) ** 2
        grid = _grid(count, settings, [side, side])
        config = {"num_classes": tensors["mlp_head.weight"].shape[0]}
        config["image_shape"] = [grid[0] * side, grid[1] * side, channels]
        if "pos_embedding" in tensors:
            model["position"] = "learned"
            table["position.learned.table"] = (lambda x: x[0, 1:], "pos_embedding")
            table["cls"] = (lambda x, p: x + p[:, :1], "cls_token", "pos_embedding")
        else:
            table["cls"] = (_same, "cls_token")
    masks = r"translution\.layers\.\d+\.0\.causal"
    return Converted(
        {"model": model, **config}, apply_table(table, tensors, num_layers, masks)
    )


_PERFORMER_LAYER = "performer.net.layers.{}."
PERFORMER = {
    "cls": (lambda x: x[None, None], "class_query"),
    **_linear("embedding", "content_embedding"),
    **_norm("layers.{}.attention_norm", _PERFORMER_LAYER + "0.norm"),
    **_linear("layers.{}.attention.v", _PERFORMER_LAYER + "0.fn.to_v"),
    **_linear("layers.{}.attention.out", _PERFORMER_LAYER + "0.fn.to_out"),
    **_norm("layers.{}.feed_forward_norm", _PERFORMER_LAYER + "1.norm"),
    **_linear("layers.{}.feed_forward.hidden", _PERFORMER_LAYER + "1.fn.fn.w1"),
    **_linear("layers.{}.feed_forward.out", _PERFORMER_LAYER + "1.fn.fn.w2"),
    **_linear("head", "output_layer"),
}
_FREQUENCIES = "positional_embedding.inv_freq"
_PROJECTION = "0.fn.fast_attention.projection_matrix"
# The constant that the authors' code adds to features.
PERFORMER_EPS = 1e-4


def _coefficients(heads: int, *arrays: np.ndarray) -> np.ndarray:
    """(a, b) [layers, heads, pairs, 2], from alpha and beta of each layer."""
    stacked = np.stack(arrays).reshape(len(arrays) // 2, 2, heads, -1)
    return np.moveaxis(stacked, 1, -1)


def performer(tensors: Tensors, settings: Mapping[str, Any]) -> Converted:
    """Converts the Performers of Horn et al.: no position, absolute, strategy 1.

    The authors add eps to features after subtracting a maximum over the batch; ours is
    a constant that depends on no token, so outputs are close to theirs, not equal.
    """
    if _PERFORMER_LAYER.format(0) + _PROJECTION not in tensors:
        raise ValueError("only Performers without position heads are converted")
    num_layers = _num_layers(tensors, r"performer\.net\.layers\.(\d+)\.")
    dim, channels = tensors["content_embedding.weight"].shape
    heads = _num_heads(settings, "heads", dim)
    num_features = tensors[_PERFORMER_LAYER.format(0) + _PROJECTION].shape[0]
    model = {
        "name": "performer",
        "dim": dim,
        "num_layers": num_layers,
        "num_heads": heads,
        "mlp_dim": tensors[_PERFORMER_LAYER.format(0) + "1.fn.fn.w1.weight"].shape[0],
        "attention": f"favor(num_features={num_features}, eps={PERFORMER_EPS}, "
        "haar=False)",
        "position": "none",
    }
    table = dict(PERFORMER)
    content = ""
    if f"{_PERFORMER_LAYER.format(0)}0.fn.to_q.alpha" in tensors:
        content = ".content_linear"
        scales = tensors[_FREQUENCIES].shape[0]
        model["position"] = f"constrained_sincos(num_scales={scales})"
        table["position.constrained_sincos.frequencies"] = (_same, _FREQUENCIES)
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
        table["position.learnable_sincos.frequencies"] = (_same, _FREQUENCIES)
    for name in "qk":
        theirs = f"{_PERFORMER_LAYER}0.fn.to_{name}{content}"
        table |= _linear(f"layers.{{}}.attention.{name}", theirs)
    projection = "layers.{}.attention.projection.projection"
    table[projection] = (_same, _PERFORMER_LAYER + _PROJECTION)
    buffers = r"performer\.calls_since_last_redraw|.*\.offdiag_matrix"
    arrays = apply_table(table, tensors, num_layers, buffers)
    # Projections are no parameters.
    end = ".attention.projection.projection"
    for name in [name for name in arrays if name.endswith(end)]:
        arrays[f"random_features{name.removeprefix('params')}"] = arrays.pop(name)
    side = settings.get("image_size", 32)
    config = {
        "model": model,
        "num_classes": tensors["output_layer.weight"].shape[0],
        "image_shape": [side, side, channels],
    }
    return Converted(config, arrays)


SOURCES: dict[str, Callable[[Tensors, Mapping[str, Any]], Converted]] = {
    "timm": timm,
    "hf_vit": hf_vit,
    "hf_gpt2": hf_gpt2,
    "translution": translution,
    "performer": performer,
}

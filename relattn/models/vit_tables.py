"""What timm and transformers call the parameters of a Vision Transformer.

`relattn.models.vit_sources` reads checkpoints with these tables, and
`relattn.models.targets` writes them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from relattn.models.tensor_tables import (
    Reversible,
    Table,
    Tensors,
    fused,
    linear,
    norm,
    part,
    patches,
    same,
)


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


class Parts(NamedTuple):
    """The parts that some ViTs have and others lack.

    Attributes:
        class_token: A CLS token.
        registers: Register tokens.
        pre_norm: A LayerNorm before the first layer.
        final_norm: A LayerNorm before the head.
        fc_norm: Whether this LayerNorm follows the pooling.
        pool: Pooling by attention.
        head: A head.
        gated: A gate in the feed-forward networks.
        qkv_bias: Biases of queries, keys and values.
        embedding_bias: A bias of the embedding.
        head_bias: A bias of the head.
        scaled: Factors of LayerScale.
        prefix_rows: Number of prefix tokens that the table of positions has rows for.
        is_flat: Whether the CLS token and the table of positions have no axis of the
            batch.
        patch: Height and width of a patch, which only writing needs.
    """

    class_token: bool
    registers: bool
    pre_norm: bool
    final_norm: bool
    fc_norm: bool
    pool: bool
    head: bool
    gated: bool
    qkv_bias: bool
    embedding_bias: bool = True
    head_bias: bool = True
    scaled: bool = False
    prefix_rows: int = 0
    is_flat: bool = False
    patch: tuple[int, int] = (1, 1)


def _refuse_bias(bias: np.ndarray) -> tuple[None]:
    if np.any(bias):
        raise ValueError("is not zero, and the other library's model has no such bias")
    return (None,)


# The bias of a layer that has none there.
_ZEROS = Reversible(lambda weight: np.zeros(len(weight), np.float32), _refuse_bias)


def _rows(x: np.ndarray, start: int, stop: int | None) -> np.ndarray:
    """Returns rows of a table of positions, ``[n, dim]`` or ``[1, n, dim]``."""
    return x.reshape(-1, x.shape[-1])[start:stop]


def _table(names: Names, parts: Parts) -> Table:
    """Returns the entries of a ViT that `Names` names."""
    rows, num_cls = parts.prefix_rows, int(parts.class_token)

    def write_positions(x: np.ndarray) -> tuple[np.ndarray]:
        # Added to -0, every number keeps its bits, 0 and -0 too.
        x = np.concatenate([np.full_like(x, -0.0, shape=(rows, x.shape[-1])), x])
        return (x if parts.is_flat else x[None],)

    def token(x: np.ndarray) -> np.ndarray:
        """Returns a CLS token, ``[dim]`` or ``[1, 1, dim]``."""
        return x.reshape(1, 1, -1)

    def write_token(x: np.ndarray) -> np.ndarray:
        return x.reshape(-1) if parts.is_flat else x

    positions = Reversible(lambda x: _rows(x, rows, None), write_positions)
    convolution = f"{names.convolution}.weight"
    table: Table = {
        "embedding.kernel": (patches(parts.patch), convolution),
        "embedding.bias": (same, f"{names.convolution}.bias"),
        "position.learned.table": (positions, names.position),
    }
    if not parts.embedding_bias:
        table["embedding.bias"] = (_ZEROS, convolution)
    if parts.head:
        table |= linear("head", names.head)
    if parts.head and not parts.head_bias:
        table["head.bias"] = (_ZEROS, f"{names.head}.weight")
    # Positions of prefix tokens are a part of these tokens.
    if parts.class_token and rows:
        table["cls"] = (
            Reversible(
                lambda x, p: token(x) + _rows(p, 0, 1),
                lambda x: (write_token(x), None),
            ),
            names.cls,
            names.position,
        )
    elif parts.class_token:
        cls = Reversible(token, lambda x: (write_token(x),))
        table["cls"] = (cls, names.cls)
    if parts.registers and rows > num_cls:
        table["registers"] = (
            Reversible(lambda x, p: x + _rows(p, num_cls, rows), lambda x: (x, None)),
            names.registers,
            names.position,
        )
    elif parts.registers:
        table["registers"] = (same, names.registers)
    if parts.pre_norm:
        table |= norm("pre_norm", names.pre_norm)
    if parts.gated:
        # A SwiGLU has both in one layer.
        for index, ours in enumerate(("gate", "hidden")):
            half = part(index, 2, transpose=True)
            for end, theirs in (("kernel", "weight"), ("bias", "bias")):
                ours_end = f"layers.{{}}.feed_forward.{ours}.{end}"
                table[ours_end] = (half, f"{names.hidden}.{theirs}")
    return table


_TIMM = {
    **norm("layers.{}.attention_norm", "blocks.{}.norm1"),
    **norm("layers.{}.feed_forward_norm", "blocks.{}.norm2"),
    **linear("layers.{}.feed_forward.hidden", "blocks.{}.mlp.fc1"),
}
_TIMM_POOL = {
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


def timm_table(names: Names, parts: Parts) -> Table:
    """Returns the table of timm's ``VisionTransformer``.

    Args:
        names: `TIMM_NAMES`.
        parts: The parts that the model has.
    """
    qkv = "blocks.{}.attn.qkv"
    bias = f"{qkv}.bias" if parts.qkv_bias else ""
    table = {**_TIMM, **fused(f"{qkv}.weight", bias)}
    if parts.final_norm:
        table |= norm("norm", "fc_norm" if parts.fc_norm else "norm")
    if parts.pool:
        table |= _TIMM_POOL
    for ours, theirs, scale in (
        ("attention.out", "attn.proj", "ls1"),
        ("feed_forward.out", "mlp.fc2", "ls2"),
    ):
        scale = f"blocks.{{}}.{scale}.gamma" if parts.scaled else ""
        table |= linear(f"layers.{{}}.{ours}", f"blocks.{{}}.{theirs}", scale)
    return table | _table(names, parts)


_HF_LAYER = "vit.encoder.layer.{}."
_HF = {
    **norm("layers.{}.attention_norm", _HF_LAYER + "layernorm_before"),
    **norm("layers.{}.feed_forward_norm", _HF_LAYER + "layernorm_after"),
    **linear("layers.{}.feed_forward.hidden", _HF_LAYER + "intermediate.dense"),
}
_HF_POOL = {
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
# The first factors of LayerScale, and the bias of the first queries.
HF_SCALE = _HF_LAYER.format(0) + "layer_scale1.lambda1"
HF_QUERY_BIAS = _HF_LAYER.format(0) + "attention.attention.query.bias"


def hf_table(names: Names, parts: Parts) -> Table:
    """Returns the table of transformers' image encoders, by the names of its first ViT.

    Args:
        names: `HF_NAMES`, possibly with another head.
        parts: The parts that the model has.
    """
    table = dict(_HF)
    if parts.final_norm:
        table |= norm("norm", "vit.layernorm")
    if parts.pool:
        table |= _HF_POOL
    for ours, theirs, scale in (
        ("attention.out", "attention.output.dense", "layer_scale1"),
        ("feed_forward.out", "output.dense", "layer_scale2"),
    ):
        scale = f"{_HF_LAYER}{scale}.lambda1" if parts.scaled else ""
        table |= linear(f"layers.{{}}.{ours}", _HF_LAYER + theirs, scale)
    for ours, theirs in {"q": "query", "k": "key", "v": "value"}.items():
        theirs = f"{_HF_LAYER}attention.attention.{theirs}"
        table |= linear(f"layers.{{}}.attention.{ours}", theirs)
        if not parts.qkv_bias:
            del table[f"layers.{{}}.attention.{ours}.bias"]
    return table | _table(names, parts)


def _in_layers(names: Mapping[str, str]) -> dict[str, str]:
    """Names in every layer."""
    layer = "encoder.layer.{}."
    return {layer + theirs: layer + ours for theirs, ours in names.items()}


# The names of transformers' models, after the name of the encoder, that differ from
# those of its first ViT; and these. They are replaced in this order.
HF_RENAMED: dict[str, dict[str, str]] = {
    # In memory.
    "memory": {
        "layers.{}": "encoder.layer.{}",
        **_in_layers(
            {
                "attention.q_proj": "attention.attention.query",
                "attention.k_proj": "attention.attention.key",
                "attention.v_proj": "attention.attention.value",
                "attention.o_proj": "attention.output.dense",
                "mlp.down_proj": "output.dense",
            }
        ),
    },
    # On disk: CLIP and SigLIP.
    "clip": {
        "encoder.layers.{}": "encoder.layer.{}",
        **_in_layers(
            {
                "self_attn.q_proj": "attention.attention.query",
                "self_attn.k_proj": "attention.attention.key",
                "self_attn.v_proj": "attention.attention.value",
                "self_attn.out_proj": "attention.output.dense",
                "mlp.fc1": "intermediate.dense",
                "mlp.fc2": "output.dense",
                "layer_norm1": "layernorm_before",
                "layer_norm2": "layernorm_after",
            }
        ),
        "embeddings.class_embedding": "embeddings.cls_token",
        "embeddings.patch_embedding": "embeddings.patch_embeddings.projection",
        "embeddings.position_embedding.weight": "embeddings.position_embeddings",
        "pre_layrnorm": "pre_norm",
        "post_layernorm": "layernorm",
    },
    "dinov2": _in_layers(
        {
            "mlp.fc1": "intermediate.dense",
            "mlp.fc2": "output.dense",
            "norm1": "layernorm_before",
            "norm2": "layernorm_after",
        }
    ),
    "dinov2_swiglu": _in_layers(
        {
            "mlp.weights_in": "intermediate.dense",
            "mlp.weights_out": "output.dense",
            "norm1": "layernorm_before",
            "norm2": "layernorm_after",
        }
    ),
    "vit": {},
}
# The names of the encoder.
_HF_ENCODERS = re.compile(r"^(vit|vision_model|dinov2|dinov2_with_registers)\.")
_HF_HEADS = ("classifier.", "visual_projection.")


def _replace(name: str, old: str, new: str) -> str:
    """Replaces the first modules of a name."""
    pattern = re.escape(old).replace(r"\{\}", r"(\d+)")
    return re.sub(rf"^{pattern}(?=\.|$)", new.replace("{}", r"\1"), name)


def read_hf_names(tensors: Tensors) -> dict[str, np.ndarray]:
    """Gives the tensors of transformers' image encoder the names of its first ViT.

    Args:
        tensors: The checkpoint, as on disk or in memory.

    Returns:
        The same tensors; the gate and the hidden layer of a SwiGLU, which are two in
        memory, are one as on disk.

    Raises:
        ValueError: If two tensors have the same name then, or a gate has no hidden
            layer.
    """
    renamed, origins = {}, {}
    for origin, tensor in tensors.items():
        name = _HF_ENCODERS.sub("", origin)
        for names in HF_RENAMED.values():
            for theirs, ours in names.items():
                name = _replace(name, theirs, ours)
        if not name.startswith(_HF_HEADS):
            name = f"vit.{name}"
        if name in renamed:
            raise ValueError(
                f"{origins[name]} and {origin} are of two encoders: save one model"
            )
        renamed[name], origins[name] = tensor, origin
    if f"{_HF_LAYER.format(0)}mlp.gate_proj.weight" in renamed:
        for name in [name for name in renamed if ".mlp.gate_proj." in name]:
            gate, up = renamed.pop(name), name.replace("gate_proj", "up_proj")
            if up not in renamed:
                raise ValueError(f"missing {up}")
            together = name.replace("mlp.gate_proj", "intermediate.dense")
            renamed[together] = np.concatenate([gate, renamed.pop(up)])
    return renamed


def write_hf_names(
    tensors: Tensors, family: str, encoder: str
) -> dict[str, np.ndarray]:
    """Gives tensors the names of a model of transformers; see `read_hf_names`.

    Args:
        tensors: Arrays by the names of transformers' first ViT.
        family: A key of `HF_RENAMED`.
        encoder: The name of the encoder in the model, with a dot at its end, or "".

    Returns:
        The same tensors.

    Example:
        >>> tensors = {"vit.encoder.layer.3.output.dense.bias": np.ones(2)}
        >>> write_hf_names(tensors, "clip", "vision_model.")
        {'vision_model.encoder.layers.3.mlp.fc2.bias': array([1., 1.])}
    """
    renamed = {}
    for name, tensor in tensors.items():
        if not name.startswith(_HF_HEADS):
            name = name.removeprefix("vit.")
            for theirs, ours in reversed(HF_RENAMED[family].items()):
                name = _replace(name, ours, theirs)
            name = encoder + name
        renamed[name] = tensor
    return renamed

"""GPT-2 and Llama of transformers, and all sources that are converted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from relattn.models import author_sources, source_configs, vit_sources
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
    same,
    shape_of,
    transposed,
)


def _conv1d(ours: str, theirs: str) -> Table:
    """Returns the table of a linear layer of GPT-2: [inputs, outputs], like ours."""
    return {
        f"{ours}.kernel": (same, f"{theirs}.weight"),
        f"{ours}.bias": (same, f"{theirs}.bias"),
    }


_HF_GPT2 = {
    "embedding.embedding": (same, "wte.weight"),
    "position.learned.table": (same, "wpe.weight"),
    **norm("layers.{}.attention_norm", "h.{}.ln_1"),
    **_conv1d("layers.{}.attention.out", "h.{}.attn.c_proj"),
    **norm("layers.{}.feed_forward_norm", "h.{}.ln_2"),
    **_conv1d("layers.{}.feed_forward.hidden", "h.{}.mlp.c_fc"),
    **_conv1d("layers.{}.feed_forward.out", "h.{}.mlp.c_proj"),
    **norm("norm", "ln_f"),
}


def gpt2_table(*, qkv_bias: bool, tie_head: bool) -> Table:
    """Returns the table of transformers' GPT-2.

    Args:
        qkv_bias: Whether queries, keys and values have biases.
        tie_head: Whether the head's matrix is the embedding.
    """
    qkv = "h.{}.attn.c_attn"
    bias = f"{qkv}.bias" if qkv_bias else ""
    table = {**_HF_GPT2, **fused(f"{qkv}.weight", bias, transpose=False)}
    if not tie_head:
        table["head.kernel"] = (transposed, "lm_head.weight")
    return table


def hf_gpt2(tensors: Tensors, settings: Mapping[str, Any]) -> Converted:
    """Converts ``GPT2LMHeadModel`` or ``GPT2Model`` of transformers.

    Scales of the attention other than 1 / sqrt(head_dim) become a part of the queries.
    """
    if "score.weight" in tensors:
        raise ValueError(
            "score.weight: relattn's GPT predicts tokens, and has no head that "
            "classifies texts: convert GPT2LMHeadModel or GPT2Model"
        )
    settings = source_configs.gpt2_settings(settings)
    has_bias = "h.0.attn.c_attn.bias" in tensors
    is_tied = bool(settings.get("tie_word_embeddings", True))
    table = gpt2_table(qkv_bias=has_bias, tie_head=is_tied)
    num_layers = count_layers(tensors, r"h\.(\d+)\.")
    # Older files hold the causal mask.
    ignored = r"h\.\d+\.attn\.(masked_)?bias" + r"|lm_head\.weight" * is_tied
    check_names(table, tensors, num_layers, ignored)
    if is_tied:
        _check_tied(tensors, "wte.weight")
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
        for name in ("kernel", "bias") if has_bias else ("kernel",):
            name = f"params.layers.{layer}.attention.q.{name}"
            arrays[name] = arrays[name] * np.float32(scale / (1 + layer * inverse))
    tanh = settings["activation_function"] == "gelu_new"
    model = {
        "name": "gpt",
        "dim": dim,
        "num_layers": num_layers,
        "num_heads": heads,
        "mlp_dim": mlp_dim,
        "attention": "softmax",
        "position": "learned",
        "qkv_bias": has_bias,
        "head_norm": False,
        "tie_head": is_tied,
        "activation": "gelu_tanh" if tanh else "gelu",
        "norm_eps": settings.get("layer_norm_epsilon", 1e-5),
    }
    sizes = {"vocab_size": vocab_size, "context_length": context_length}
    return Converted({"model": model, **sizes}, arrays)


def _check_tied(tensors: Tensors, embedding: str) -> None:
    """Refuses a head that is not the embedding."""
    head = tensors.get("lm_head.weight")
    if head is not None and not np.array_equal(head, tensors[embedding]):
        raise ValueError(
            f"lm_head.weight is not {embedding}: if it is the head, set "
            "tie_word_embeddings=false in a config.json beside the checkpoint"
        )


# The layers whose biases a key names.
_LLAMA_BIASES = {
    "self_attn.q_proj": "attention_bias",
    "self_attn.o_proj": "attention_bias",
    "mlp.gate_proj": "mlp_bias",
}


def _llama_table(tensors: Tensors, *, tie_head: bool) -> Table:
    """Returns transformers' table of Llama, with the biases of a checkpoint."""
    layer, table = "layers.{}", {}
    for ours, theirs in {
        **{f"attention.{name}": f"self_attn.{name}_proj" for name in "qkv"},
        "attention.out": "self_attn.o_proj",
        "feed_forward.gate": "mlp.gate_proj",
        "feed_forward.hidden": "mlp.up_proj",
        "feed_forward.out": "mlp.down_proj",
    }.items():
        entries = linear(f"{layer}.{ours}", f"{layer}.{theirs}")
        if f"layers.0.{theirs}.bias" not in tensors:
            del entries[f"{layer}.{ours}.bias"]
        table |= entries
    for ours, theirs in {
        f"{layer}.attention_norm": f"{layer}.input_layernorm",
        f"{layer}.feed_forward_norm": f"{layer}.post_attention_layernorm",
        "norm": "norm",
    }.items():
        table[f"{ours}.scale"] = (same, f"{theirs}.weight")
    table["embedding.embedding"] = (same, "embed_tokens.weight")
    if not tie_head:
        table["head.kernel"] = (transposed, "lm_head.weight")
    return table


def hf_llama(tensors: Tensors, settings: Mapping[str, Any]) -> Converted:
    """Converts Llama's, Mistral's or Qwen2's ``ForCausalLM`` of transformers."""
    settings = source_configs.llama_settings(settings)
    is_tied = settings.get("tie_word_embeddings", False)
    num_layers = count_layers(tensors, r"layers\.(\d+)\.")
    # Older files hold the frequencies of the rotary positions.
    ignored = r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
    ignored += r"|lm_head\.weight" * is_tied
    table = _llama_table(tensors, tie_head=is_tied)
    check_names(table, tensors, num_layers, ignored)
    if is_tied:
        _check_tied(tensors, "embed_tokens.weight")
    vocab_size, dim = shape_of(tensors, "embed_tokens.weight", 2)
    query, key = (f"layers.0.self_attn.{name}_proj.weight" for name in "qk")
    width, kv_width = (shape_of(tensors, name, 2)[0] for name in (query, key))
    mlp_dim = shape_of(tensors, "layers.0.mlp.gate_proj.weight", 2)[0]
    heads = source_configs.num_heads(settings, "num_attention_heads", width)
    head_dim = width // heads
    if kv_width % head_dim or heads % max(kv_width // head_dim, 1):
        raise ValueError(
            f"{key} has {kv_width} rows, which do not fit {heads} heads of "
            f"{head_dim}: correct num_attention_heads in config.json"
        )
    biases = {name: f"layers.0.{name}.bias" in tensors for name in _LLAMA_BIASES}
    for tensor, name, value in (
        ("embed_tokens.weight", "vocab_size", vocab_size),
        ("embed_tokens.weight", "hidden_size", dim),
        ("the checkpoint", "num_hidden_layers", num_layers),
        ("layers.0.mlp.gate_proj.weight", "intermediate_size", mlp_dim),
        (query, "head_dim", head_dim),
        (key, "num_key_value_heads", kv_width // head_dim),
    ):
        check_equal(f"{tensor} has {value}", value, name, settings)
    for name, setting in _LLAMA_BIASES.items():
        found = f"the checkpoint has {'a' if biases[name] else 'no'} {name}.bias"
        check_equal(found, biases[name], setting, settings)
    window = settings.get("sliding_window", 0)
    model = {
        "name": "gpt",
        "dim": dim,
        "num_layers": num_layers,
        "num_heads": heads,
        "num_kv_heads": kv_width // head_dim,
        "head_dim": head_dim,
        "mlp_dim": mlp_dim,
        "attention": f"softmax(window={window})" if window else "softmax",
        "position": settings["position"],
        "norm_type": "rms_norm",
        "norm_eps": settings["rms_norm_eps"],
        "activation": "swiglu",
        "qkv_bias": biases["self_attn.q_proj"],
        "out_bias": biases["self_attn.o_proj"],
        "mlp_bias": biases["mlp.gate_proj"],
        "head_norm": False,
        "tie_head": is_tied,
    }
    sizes = {"context_length": settings["max_position_embeddings"]}
    config = {"model": model, "vocab_size": vocab_size, **sizes}
    return Converted(config, apply_table(table, tensors, num_layers, ignored))


SOURCES: dict[str, Callable[[Tensors, Mapping[str, Any]], Converted]] = {
    "timm": vit_sources.timm,
    "hf_vit": vit_sources.hf_vit,
    "hf_dinov2": vit_sources.hf_dinov2,
    "hf_clip": vit_sources.hf_clip,
    "hf_siglip": vit_sources.hf_siglip,
    "hf_gpt2": hf_gpt2,
    "hf_llama": hf_llama,
    "translution": author_sources.translution,
    "performer": author_sources.performer,
}

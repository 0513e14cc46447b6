"""Relative and linear attention in JAX and Flax: the public names."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from relattn import offsets
from relattn.kernels import (
    CausalOffsets,
    FeatureMap,
    Features,
    LinearState,
    Offsets,
    Pairs,
    RandomFeatures,
    absolute_frequencies,
    apply_gate,
    banded_attention,
    causal_gated_positional_attention,
    causal_gated_positional_attention_step,
    causal_linear_attention,
    causal_lor_translution_step,
    causal_relative_attention,
    causal_relative_attention_step,
    causal_softmax_attention,
    causal_toeplitz_linear_attention,
    causal_toeplitz_linear_attention_step,
    causal_translution_step,
    cayley_matrix,
    cayley_string,
    circulant_angles,
    circulant_string,
    circulants_of,
    cluster_sums,
    constrained_sinusoids,
    default_num_features,
    draw_gaussian,
    draw_mixed_frequencies,
    draw_orthogonal,
    draw_random_features,
    gated_positional_attention,
    general_translution,
    irpe_exponents,
    length_scale_frequencies,
    linear_attention,
    linformer_attention,
    local_attention,
    lor_translution,
    mixed_rotary_angles,
    offset_buckets,
    positive_features,
    redraw,
    relative_attention,
    relu_features,
    resize_table,
    rotary_angles,
    rotate,
    routing_attention,
    sinusoids,
    softmax_attention,
    string_exponents,
    toeplitz_linear_attention,
    translution,
    trigonometric_features,
    unit_norm,
    update_centroids,
    wave_bias,
)
from relattn.models import (
    GPT,
    AlexNet,
    Linformer,
    Performer,
    ResNet18,
    RoutingTransformer,
    Vgg16,
    ViT,
    build_model,
    generate,
    resize_grid,
)
from relattn.nn.attention import MultiHeadAttention
from relattn.nn.positions.base import Position
from relattn.nn.registry import register_attention, register_position

if TYPE_CHECKING:
    from relattn.training import load_run, train_and_evaluate

__version__ = "0.1.0.dev0"

__all__ = [
    "GPT",
    "AlexNet",
    "CausalOffsets",
    "FeatureMap",
    "Features",
    "LinearState",
    "Linformer",
    "MultiHeadAttention",
    "Offsets",
    "Pairs",
    "Performer",
    "Position",
    "RandomFeatures",
    "ResNet18",
    "RoutingTransformer",
    "Vgg16",
    "ViT",
    "absolute_frequencies",
    "apply_gate",
    "banded_attention",
    "build_model",
    "causal_gated_positional_attention",
    "causal_gated_positional_attention_step",
    "causal_linear_attention",
    "causal_lor_translution_step",
    "causal_relative_attention",
    "causal_relative_attention_step",
    "causal_softmax_attention",
    "causal_toeplitz_linear_attention",
    "causal_toeplitz_linear_attention_step",
    "causal_translution_step",
    "cayley_matrix",
    "cayley_string",
    "circulant_angles",
    "circulant_string",
    "circulants_of",
    "cluster_sums",
    "constrained_sinusoids",
    "default_num_features",
    "draw_gaussian",
    "draw_mixed_frequencies",
    "draw_orthogonal",
    "draw_random_features",
    "gated_positional_attention",
    "general_translution",
    "generate",
    "irpe_exponents",
    "length_scale_frequencies",
    "linear_attention",
    "linformer_attention",
    "load_run",
    "local_attention",
    "lor_translution",
    "mixed_rotary_angles",
    "offset_buckets",
    "offsets",
    "positive_features",
    "redraw",
    "register_attention",
    "register_position",
    "relative_attention",
    "relu_features",
    "resize_grid",
    "resize_table",
    "rotary_angles",
    "rotate",
    "routing_attention",
    "sinusoids",
    "softmax_attention",
    "string_exponents",
    "toeplitz_linear_attention",
    "train_and_evaluate",
    "translution",
    "trigonometric_features",
    "unit_norm",
    "update_centroids",
    "wave_bias",
]


def __getattr__(name: str) -> Any:
    # Orbax, Grain and TFDS take almost as long to import as JAX and Flax.
    if name == "data":
        return importlib.import_module("relattn.data")
    if name == "training":
        return importlib.import_module("relattn.training")
    if name in ("load_run", "train_and_evaluate"):
        return getattr(importlib.import_module("relattn.training"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

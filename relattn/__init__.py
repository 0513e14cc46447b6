"""Relative and linear attention in JAX and Flax: the public names."""

from relattn.kernels import (
    FeatureMap,
    Features,
    LinearState,
    RandomFeatures,
    absolute_frequencies,
    banded_attention,
    causal_linear_attention,
    causal_linear_attention_step,
    causal_softmax_attention,
    constrained_sinusoids,
    default_num_features,
    draw_gaussian,
    draw_orthogonal,
    draw_random_features,
    init_linear_state,
    length_scale_frequencies,
    linear_attention,
    positive_features,
    redraw,
    relu_features,
    softmax_attention,
    trigonometric_features,
)
from relattn.models import Performer, build_model
from relattn.training import load_run, train_and_evaluate

__version__ = "0.1.0.dev0"

__all__ = [
    "FeatureMap",
    "Features",
    "LinearState",
    "Performer",
    "RandomFeatures",
    "absolute_frequencies",
    "banded_attention",
    "build_model",
    "causal_linear_attention",
    "causal_linear_attention_step",
    "causal_softmax_attention",
    "constrained_sinusoids",
    "default_num_features",
    "draw_gaussian",
    "draw_orthogonal",
    "draw_random_features",
    "init_linear_state",
    "length_scale_frequencies",
    "linear_attention",
    "load_run",
    "positive_features",
    "redraw",
    "relu_features",
    "softmax_attention",
    "train_and_evaluate",
    "trigonometric_features",
]

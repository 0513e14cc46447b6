"""Attention kernels: pure functions on arrays."""

from relattn.kernels.random_features import Features as Features
from relattn.kernels.random_features import RandomFeatures as RandomFeatures
from relattn.kernels.random_features import default_num_features as default_num_features
from relattn.kernels.random_features import draw_gaussian as draw_gaussian
from relattn.kernels.random_features import draw_orthogonal as draw_orthogonal
from relattn.kernels.random_features import draw_random_features as draw_random_features
from relattn.kernels.random_features import positive_features as positive_features
from relattn.kernels.random_features import redraw as redraw
from relattn.kernels.random_features import relu_features as relu_features
from relattn.kernels.random_features import (
    trigonometric_features as trigonometric_features,
)
from relattn.kernels.sinusoids import absolute_frequencies as absolute_frequencies
from relattn.kernels.sinusoids import constrained_sinusoids as constrained_sinusoids
from relattn.kernels.sinusoids import (
    length_scale_frequencies as length_scale_frequencies,
)
from relattn.kernels.softmax import causal_softmax_attention as causal_softmax_attention
from relattn.kernels.softmax import softmax_attention as softmax_attention

__all__ = [
    "Features",
    "RandomFeatures",
    "absolute_frequencies",
    "causal_softmax_attention",
    "constrained_sinusoids",
    "default_num_features",
    "draw_gaussian",
    "draw_orthogonal",
    "draw_random_features",
    "length_scale_frequencies",
    "positive_features",
    "redraw",
    "relu_features",
    "softmax_attention",
    "trigonometric_features",
]

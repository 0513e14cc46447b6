"""Attention kernels: pure functions on arrays."""

from relattn.kernels.banded import banded_attention as banded_attention
from relattn.kernels.bias import (
    causal_relative_attention as causal_relative_attention,
)
from relattn.kernels.bias import (
    causal_relative_attention_step as causal_relative_attention_step,
)
from relattn.kernels.bias import relative_attention as relative_attention
from relattn.kernels.causal_linear import (
    causal_linear_attention as causal_linear_attention,
)
from relattn.kernels.causal_linear import (
    causal_linear_attention_step as causal_linear_attention_step,
)
from relattn.kernels.causal_linear import init_linear_state as init_linear_state
from relattn.kernels.causal_toeplitz import (
    causal_toeplitz_linear_attention as causal_toeplitz_linear_attention,
)
from relattn.kernels.causal_toeplitz import (
    causal_toeplitz_linear_attention_step as causal_toeplitz_linear_attention_step,
)
from relattn.kernels.gated_positional import (
    causal_gated_positional_attention as causal_gated_positional_attention,
)
from relattn.kernels.gated_positional import (
    causal_gated_positional_attention_step as causal_gated_positional_attention_step,
)
from relattn.kernels.gated_positional import (
    gated_positional_attention as gated_positional_attention,
)
from relattn.kernels.gates import apply_gate as apply_gate
from relattn.kernels.gates import irpe_exponents as irpe_exponents
from relattn.kernels.gates import string_exponents as string_exponents
from relattn.kernels.general_translution import (
    general_translution as general_translution,
)
from relattn.kernels.linear import FeatureMap as FeatureMap
from relattn.kernels.linear import LinearState as LinearState
from relattn.kernels.linear import linear_attention as linear_attention
from relattn.kernels.linformer import linformer_attention as linformer_attention
from relattn.kernels.local import local_attention as local_attention
from relattn.kernels.low_rank_offset import (
    causal_lor_translution as causal_lor_translution,
)
from relattn.kernels.low_rank_offset import lor_translution as lor_translution
from relattn.kernels.offset_bias import offset_buckets as offset_buckets
from relattn.kernels.offset_bias import wave_bias as wave_bias
from relattn.kernels.offset_projection import causal_translution as causal_translution
from relattn.kernels.offset_projection import translution as translution
from relattn.kernels.pair_projection import pair_lor_translution as pair_lor_translution
from relattn.kernels.pair_projection import pair_translution as pair_translution
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
from relattn.kernels.resize import resize_table as resize_table
from relattn.kernels.rotary import draw_mixed_frequencies as draw_mixed_frequencies
from relattn.kernels.rotary import mixed_rotary_angles as mixed_rotary_angles
from relattn.kernels.rotary import rotary_angles as rotary_angles
from relattn.kernels.rotary import rotate as rotate
from relattn.kernels.routing import cluster_sums as cluster_sums
from relattn.kernels.routing import routing_attention as routing_attention
from relattn.kernels.routing import update_centroids as update_centroids
from relattn.kernels.sinusoidal import absolute_frequencies as absolute_frequencies
from relattn.kernels.sinusoidal import constrained_sinusoids as constrained_sinusoids
from relattn.kernels.sinusoidal import (
    length_scale_frequencies as length_scale_frequencies,
)
from relattn.kernels.sinusoidal import sinusoids as sinusoids
from relattn.kernels.softmax import causal_softmax_attention as causal_softmax_attention
from relattn.kernels.softmax import softmax_attention as softmax_attention
from relattn.kernels.string_encodings import cayley_matrix as cayley_matrix
from relattn.kernels.string_encodings import cayley_string as cayley_string
from relattn.kernels.string_encodings import circulant_angles as circulant_angles
from relattn.kernels.string_encodings import circulant_string as circulant_string
from relattn.kernels.string_encodings import circulants_of as circulants_of
from relattn.kernels.toeplitz import (
    toeplitz_linear_attention as toeplitz_linear_attention,
)
from relattn.kernels.translution_step import (
    causal_lor_translution_step as causal_lor_translution_step,
)
from relattn.kernels.translution_step import (
    causal_translution_step as causal_translution_step,
)
from relattn.kernels.unit_norm import unit_norm as unit_norm

__all__ = [
    "FeatureMap",
    "Features",
    "LinearState",
    "RandomFeatures",
    "absolute_frequencies",
    "apply_gate",
    "banded_attention",
    "causal_gated_positional_attention",
    "causal_gated_positional_attention_step",
    "causal_linear_attention",
    "causal_linear_attention_step",
    "causal_lor_translution",
    "causal_lor_translution_step",
    "causal_relative_attention",
    "causal_relative_attention_step",
    "causal_softmax_attention",
    "causal_toeplitz_linear_attention",
    "causal_toeplitz_linear_attention_step",
    "causal_translution",
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
    "init_linear_state",
    "irpe_exponents",
    "length_scale_frequencies",
    "linear_attention",
    "linformer_attention",
    "local_attention",
    "lor_translution",
    "mixed_rotary_angles",
    "offset_buckets",
    "pair_lor_translution",
    "pair_translution",
    "positive_features",
    "redraw",
    "relative_attention",
    "relu_features",
    "resize_table",
    "rotary_angles",
    "rotate",
    "routing_attention",
    "sinusoids",
    "softmax_attention",
    "string_exponents",
    "toeplitz_linear_attention",
    "translution",
    "trigonometric_features",
    "unit_norm",
    "update_centroids",
    "wave_bias",
]

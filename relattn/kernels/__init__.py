"""Attention kernels: pure functions on arrays."""

from relattn.kernels.banded import banded_attention as banded_attention
from relattn.kernels.feature_maps import FeatureMap as FeatureMap
from relattn.kernels.feature_maps import Features as Features
from relattn.kernels.feature_maps import default_num_features as default_num_features
from relattn.kernels.feature_maps import hedgehog_features as hedgehog_features
from relattn.kernels.feature_maps import positive_features as positive_features
from relattn.kernels.feature_maps import relu_features as relu_features
from relattn.kernels.feature_maps import (
    trigonometric_features as trigonometric_features,
)
from relattn.kernels.feature_maps import unit_norm as unit_norm
from relattn.kernels.gated_positional import (
    causal_gated_positional_attention as causal_gated_positional_attention,
)
from relattn.kernels.gated_positional import (
    causal_gated_positional_attention_step as causal_gated_positional_attention_step,
)
from relattn.kernels.gated_positional import (
    gated_positional_attention as gated_positional_attention,
)
from relattn.kernels.linear import causal_linear_attention as causal_linear_attention
from relattn.kernels.linear import linear_attention as linear_attention
from relattn.kernels.linformer import linformer_attention as linformer_attention
from relattn.kernels.positions.bias import offset_buckets as offset_buckets
from relattn.kernels.positions.bias import wave_bias as wave_bias
from relattn.kernels.positions.fourier import append_waves as append_waves
from relattn.kernels.positions.fourier import combine_values as combine_values
from relattn.kernels.positions.fourier import position_waves as position_waves
from relattn.kernels.positions.fourier import spectrum_table as spectrum_table
from relattn.kernels.positions.fourier import table_spectrum as table_spectrum
from relattn.kernels.positions.fourier import torus_frequencies as torus_frequencies
from relattn.kernels.positions.fourier import widen_keys as widen_keys
from relattn.kernels.positions.fourier import widen_queries as widen_queries
from relattn.kernels.positions.fourier import widen_values as widen_values
from relattn.kernels.positions.gates import apply_gate as apply_gate
from relattn.kernels.positions.gates import irpe_exponents as irpe_exponents
from relattn.kernels.positions.gates import string_exponents as string_exponents
from relattn.kernels.positions.interpolate import resize_table as resize_table
from relattn.kernels.positions.rotary import (
    combine_rotary_values as combine_rotary_values,
)
from relattn.kernels.positions.rotary import (
    draw_mixed_frequencies as draw_mixed_frequencies,
)
from relattn.kernels.positions.rotary import mixed_rotary_angles as mixed_rotary_angles
from relattn.kernels.positions.rotary import rotary_angles as rotary_angles
from relattn.kernels.positions.rotary import rotate as rotate
from relattn.kernels.positions.rotary import widen_rotary_values as widen_rotary_values
from relattn.kernels.positions.sinusoids import (
    absolute_frequencies as absolute_frequencies,
)
from relattn.kernels.positions.sinusoids import (
    constrained_sinusoids as constrained_sinusoids,
)
from relattn.kernels.positions.sinusoids import (
    length_scale_frequencies as length_scale_frequencies,
)
from relattn.kernels.positions.sinusoids import sinusoids as sinusoids
from relattn.kernels.positions.string import cayley_matrix as cayley_matrix
from relattn.kernels.positions.string import cayley_string as cayley_string
from relattn.kernels.positions.string import circulant_angles as circulant_angles
from relattn.kernels.positions.string import circulant_string as circulant_string
from relattn.kernels.positions.string import circulants_of as circulants_of
from relattn.kernels.random_projections import RandomFeatures as RandomFeatures
from relattn.kernels.random_projections import draw_gaussian as draw_gaussian
from relattn.kernels.random_projections import draw_orthogonal as draw_orthogonal
from relattn.kernels.random_projections import (
    draw_random_features as draw_random_features,
)
from relattn.kernels.random_projections import redraw as redraw
from relattn.kernels.relative import (
    causal_relative_attention as causal_relative_attention,
)
from relattn.kernels.relative import (
    causal_relative_attention_step as causal_relative_attention_step,
)
from relattn.kernels.relative import relative_attention as relative_attention
from relattn.kernels.routing import cluster_sums as cluster_sums
from relattn.kernels.routing import local_attention as local_attention
from relattn.kernels.routing import routing_attention as routing_attention
from relattn.kernels.routing import update_centroids as update_centroids
from relattn.kernels.segments import segment_mask as segment_mask
from relattn.kernels.softmax import causal_softmax_attention as causal_softmax_attention
from relattn.kernels.softmax import softmax_attention as softmax_attention
from relattn.kernels.sums import LinearState as LinearState
from relattn.kernels.toeplitz import (
    causal_toeplitz_linear_attention as causal_toeplitz_linear_attention,
)
from relattn.kernels.toeplitz import (
    causal_toeplitz_linear_attention_step as causal_toeplitz_linear_attention_step,
)
from relattn.kernels.toeplitz import (
    toeplitz_linear_attention as toeplitz_linear_attention,
)
from relattn.kernels.translution.attention import (
    causal_lor_translution_step as causal_lor_translution_step,
)
from relattn.kernels.translution.attention import (
    causal_translution_step as causal_translution_step,
)
from relattn.kernels.translution.attention import lor_translution as lor_translution
from relattn.kernels.translution.attention import translution as translution
from relattn.kernels.translution.clipped import (
    expand_clipped_table as expand_clipped_table,
)
from relattn.kernels.translution.general import (
    general_translution as general_translution,
)
from relattn.kernels.translution.offset_index import CausalOffsets as CausalOffsets
from relattn.kernels.translution.offset_index import Offsets as Offsets
from relattn.kernels.translution.pair_weights import Pairs as Pairs

"""The linear layer of all models; its weights start as those of the published ones."""

from __future__ import annotations

import functools

import flax.linen as nn

# Weights start uniform in +-1/sqrt(fan-in), PyTorch's default, with which the
# published models were trained. Flax's own start is sqrt(3) times wider: queries and
# keys are then so long that random features estimate their attention poorly. Biases
# start at zero, Flax's default; PyTorch's start as the weights do.
Linear = functools.partial(
    nn.Dense,
    kernel_init=nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform"),
)

"""Batch statistics that are the same on one device and on several.

Modules store moving averages in the collection ``batch_stats``. Training updates them;
evaluation only reads them.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import canonicalize_dtype
from jaxtyping import Array, Float

from relattn.nn.device_axis import mean_over_devices

# PyTorch's defaults, with which the published models were trained.
MOMENTUM = 0.9
EPSILON = 1e-5


class BatchNorm(nn.Module):
    """Normalises batches over all axes but the last, and over the devices.

    y = scale (x - mean) / sqrt(variance + epsilon) + bias. Training uses the moments of
    the whole batch; evaluation uses their moving averages, with weight `MOMENTUM` on
    the past. Moments are computed in float32; the variance is the biased one.

    Attributes:
        dtype: Dtype of the result; parameters and statistics are float32.

    Example:
        >>> x = jnp.array([[1.0], [3.0]])
        >>> y, _ = BatchNorm().init_with_output(
        ...     jax.random.key(0), x, deterministic=False)
        >>> y.round(4).tolist()
        [[-1.0], [1.0]]

    Source:
        Ioffe and Szegedy, Batch Normalization, algorithm 1.
    """

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, x: Float[Array, "*batch channels"], *, deterministic: bool = True
    ) -> Float[Array, "*batch channels"]:
        """Normalises every channel."""
        channels = x.shape[-1:]
        mean = self.variable("batch_stats", "mean", jnp.zeros, channels, jnp.float32)
        variance = self.variable(
            "batch_stats", "variance", jnp.ones, channels, jnp.float32
        )
        scale = self.param("scale", nn.initializers.ones, channels, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, channels, jnp.float32)
        x = x.astype(jnp.float32)
        now = mean.value, variance.value
        if not deterministic:
            axes = tuple(range(x.ndim - 1))
            batch_mean = mean_over_devices(x.mean(axes))
            deviations = jnp.square(x - batch_mean)
            now = batch_mean, mean_over_devices(deviations.mean(axes))
            if not self.is_initializing():
                for average, moment in zip((mean, variance), now, strict=True):
                    average.value = MOMENTUM * average.value + (1 - MOMENTUM) * moment
        y = (x - now[0]) * jax.lax.rsqrt(now[1] + EPSILON) * scale + bias
        return y.astype(canonicalize_dtype(dtype=self.dtype))

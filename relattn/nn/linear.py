"""The linear layer of all models; it starts as those of the published ones."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Uniform in +-1/sqrt(fan-in), PyTorch's default, with which the published models were
# trained. Flax's own start is sqrt(3) times wider: queries and keys are then so long
# that random features estimate their attention poorly.
KERNEL_INIT = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


def uniform_bias(fan_in: int) -> nn.initializers.Initializer:
    """The start of a bias in PyTorch: uniform in +-1/sqrt(fan_in), as the weights.

    Args:
        fan_in: Number of inputs of each output of the layer.

    Returns:
        An initializer.

    Example:
        >>> bias = uniform_bias(16)(jax.random.key(0), (1000,))
        >>> 0.2 < float(abs(bias).max()) <= 0.25
        True

    Source:
        PyTorch, ``torch.nn.Linear`` and ``torch.nn.Conv2d``.
    """
    bound = fan_in**-0.5

    def init(key, shape, dtype=jnp.float32):
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


class Linear(nn.Module):
    """A linear layer, x W + b.

    W and b start uniform in +-1/sqrt(inputs), PyTorch's default.

    Attributes:
        features: Number of outputs.
        use_bias: Whether there is a b.
        dtype: Compute dtype, by default that of the input; parameters are float32.

    Example:
        >>> layer = Linear(3)
        >>> params = layer.init(jax.random.key(0), jnp.ones((1, 2)))["params"]
        >>> jax.tree.map(jnp.shape, params)
        {'bias': (3,), 'kernel': (2, 3)}
    """

    features: int
    use_bias: bool = True
    dtype: Any = None

    @nn.compact
    def __call__(
        self, x: Float[Array, "*batch inputs"]
    ) -> Float[Array, "*batch features"]:
        """Applies the layer to the last axis."""
        fan_in = x.shape[-1]
        kernel = self.param("kernel", KERNEL_INIT, (fan_in, self.features))
        bias = None
        if self.use_bias:
            bias = self.param("bias", uniform_bias(fan_in), (self.features,))
        x, kernel, bias = nn.dtypes.promote_dtype(x, kernel, bias, dtype=self.dtype)
        y = x @ kernel
        return y if bias is None else y + bias

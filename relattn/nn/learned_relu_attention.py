"""Attention in linear time by a learned feature map."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from relattn.kernels import linear, random_features
from relattn.nn.linear_attention import LinearAttention


class LearnedReluAttention(LinearAttention):
    """Linear attention with learned rectified features.

    out_i = phi(q_i)^T sum_j phi(k_j) v_j^T / phi(q_i)^T sum_j phi(k_j) with
    phi(x) = relu(W x / depth^(1/4) + b) + eps, an attention of its own.

    W and b are a layer's, the same for its heads; they start as those of a `Linear`.

    Attributes:
        num_features: Number of features; 0 is int(depth * ln(depth)), depth with the
            position's width where one is concatenated.
        eps: Added to every feature; keeps the sum of weights above zero.

    Example:
        >>> import jax
        >>> x = jnp.ones((1, 7, 8))
        >>> module = LearnedReluAttention(dim=8, heads=2, num_features=5)
        >>> out, variables = module.init_with_output(jax.random.key(0), x)
        >>> out.shape, variables["params"]["projection"].shape
        ((1, 7, 8), (5, 4))

    Source:
        Guoji, Improving efficient Vision Transformers with RPEs, section 4.3.
    """

    num_features: int = 0
    eps: float = 1e-3

    @classmethod
    def check(
        cls,
        dim: int,
        heads: int,
        *,
        num_features: int = 0,
        eps: float = 1e-3,
        **options: Any,
    ) -> None:
        """Raises ValueError where the sizes of the model or the options do not fit."""
        super().check(dim, heads, **options)
        if num_features < 0:
            raise ValueError(
                "attention 'relu' needs num_features >= 1, or 0 for "
                f"int(depth * ln(depth)), got {num_features}"
            )
        if eps <= 0:
            raise ValueError(
                "attention 'relu' needs eps > 0, without which the weights of a query "
                f"can all be zero, got {eps}"
            )

    def feature_map(self, depth: int) -> linear.FeatureMap:
        """The feature map with the layer's projection; for use in the hooks."""
        width = self.num_features or random_features.default_num_features(depth)
        start = nn.initializers.variance_scaling(
            1 / 3, "fan_in", "uniform", in_axis=-1, out_axis=-2
        )
        return functools.partial(
            random_features.relu_features,
            projection=self.param("projection", start, (width, depth), jnp.float32),
            bias=self.param("bias", nn.initializers.zeros, (width,), jnp.float32),
            eps=self.eps,
        )

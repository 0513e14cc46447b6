"""The Routing Transformer on an image's pixels."""

from __future__ import annotations

from typing import ClassVar

from relattn.models.performer import Performer


class RoutingTransformer(Performer):
    """Classifies images from their pixels, by attention in clusters and neighbourhoods.

    The Routing Transformer that is a baseline of Horn et al., who state only that it
    has 11.4M parameters. The sizes here are our choice: `Performer` in 9 layers of
    width 320 and 10 heads, half of them local, with their heads of 32 and their MLP of
    four times the width; learned positions; 8 clusters, whose window is 129 of the
    1,025 tokens. With 32x32 images and ten classes it has 11,428,490 parameters for one
    channel, 11,429,130 for three; the centroids are none.

    Attributes are those of `Performer`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> model = RoutingTransformer(
        ...     num_classes=3, dim=8, num_layers=1, heads=2, mlp_dim=16,
        ...     attention="routing(clusters=3)")
        >>> images = jnp.zeros((1, 5, 7, 1))
        >>> logits, variables = jax.eval_shape(
        ...     model.init_with_output, jax.random.key(0), images)
        >>> logits.shape, sorted(variables)
        ((1, 3), ['batch_stats', 'params'])

    Source:
        Roy et al., Efficient Content-Based Sparse Attention with Routing Transformers;
        a baseline of Horn et al., table 1.
    """

    dim: int = 320
    num_layers: int = 9
    heads: int = 10
    mlp_dim: int = 1280
    attention: str = "routing(clusters=8)"
    position: str = "learned"
    scan: ClassVar[bool] = True

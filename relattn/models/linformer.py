"""Linformer on an image's pixels."""

from __future__ import annotations

from typing import ClassVar

from relattn.models.performer import Performer


class Linformer(Performer):
    """Classifies images from their pixels, by attention to projected keys and values.

    A baseline of Horn et al. on pixels, as their Performers are. Their own works on one
    patch of 32x32 pixels (`relattn.models.baselines`). The sizes here are our choice,
    with the 10.2M parameters that they state: `Performer` in 5 layers of width 384 and
    12 heads, with their heads of 32, their MLP of four times the width and their
    absolute positions; k = 256 for 1,025 tokens, one matrix for the keys and values of
    a layer, as the authors of Linformer choose for sequences of 1,024. With 32x32
    images and ten classes it has 10,189,418 parameters for one channel, 10,190,186 for
    three.

    Attributes are those of `Performer`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> model = Linformer(
        ...     num_classes=3, dim=8, num_layers=1, heads=2, mlp_dim=16,
        ...     attention="linformer(k=5)")
        >>> images = jnp.zeros((1, 5, 7, 1))
        >>> logits, _ = jax.eval_shape(
        ...     model.init_with_output, jax.random.key(0), images)
        >>> logits.shape
        (1, 3)

    Source:
        Wang et al., Linformer: Self-Attention with Linear Complexity; a baseline of
        Horn et al., table 1.
    """

    dim: int = 384
    num_layers: int = 5
    heads: int = 12
    mlp_dim: int = 1536
    attention: str = "linformer(k=256, sharing='key_value')"
    position: str = "learnable_sincos"
    scan: ClassVar[bool] = True

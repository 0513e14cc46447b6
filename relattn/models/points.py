"""A Transformer on sets of points at any real positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from relattn.nn.blocks import (
    LAYER_NORM_EPSILON,
    Linear,
    at_precision,
    block_of,
    make_norm,
    transformer_blocks,
)
from relattn.nn.registry import layer_attentions


class PointTransformer(nn.Module):
    """Classifies sets of points by their features and the offsets between them.

    A point is a token: its features are embedded by a linear layer, and its position
    acts only in the attentions, by a position encoding for real positions, such as
    ``"fourier_values"``. So the logits do not change if all points move by any real
    vector, nor if they are listed in another order. With ``"fourier_scores"`` and
    ``"fourier_mask"``, the first holds with softmax only: other attentions have these
    scores at most in expectation. The head reads the mean of the normalised tokens.

    Attributes:
        num_classes: Number of classes.
        num_axes: Number of axes of a position; the other columns of the inputs are
            features.
        dim: Width of the tokens.
        num_layers: Number of blocks.
        num_heads: Number of heads.
        head_dim: Width of a head; 0 for dim / num_heads.
        mlp_dim: Width of the feed-forward networks' hidden layer.
        attention: Spec of an attention that needs neither a grid nor an order of the
            tokens.
        position: Spec of a position encoding that is ``continuous``.
        attention_dropout: Dropout rate of the attentions' outputs.
        dropout: Dropout rate of the feed-forward networks.
        drop_path: Stochastic depth: rate at which an example skips a branch of the last
            layer; it grows linearly from zero in the first layer.
        qkv_bias: Whether queries, keys and values have a bias.
        out_bias: Whether the attentions' output projections have a bias.
        mlp_bias: Whether the feed-forward networks have biases.
        norm_type: ``"layer_norm"`` or ``"rms_norm"``, see `relattn.models.ViT`.
        norm_eps: Constant that the norms add to the variance.
        activation: Activation of the feed-forward networks, see `relattn.models.ViT`.
        scan_layers: Whether equal layers are compiled once, by `jax.lax.scan`; their
            parameters are then stacked.
        dtype: Compute dtype; parameters are float32. Waves of the positions are
            computed in float32 or wider.
        precision: Precision of matrix products, see `relattn.models.ViT`.
        remat: Whether the backward pass recomputes each layer from its input.

    Example:
        >>> import jax
        >>> model = PointTransformer(num_classes=3, num_axes=2, dim=8, num_layers=2,
        ...                          num_heads=2, mlp_dim=16)
        >>> points = jnp.zeros((1, 7, 3))
        >>> logits, _ = jax.eval_shape(
        ...     model.init_with_output, jax.random.key(0), points)
        >>> logits.shape
        (1, 3)

    Source:
        Ours; `relattn.nn.positions.fourier.FourierValues` has the source of the
        encoding.
    """

    num_classes: int
    num_axes: int
    dim: int = 48
    num_layers: int = 3
    num_heads: int = 3
    head_dim: int = 0
    mlp_dim: int = 96
    attention: str = "softmax"
    position: str = "fourier_values"
    attention_dropout: float = 0.0
    dropout: float = 0.0
    drop_path: float = 0.0
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    norm_type: str = "layer_norm"
    norm_eps: float = LAYER_NORM_EPSILON
    activation: str = "gelu"
    scan_layers: bool = True
    dtype: Any = jnp.float32
    precision: str = ""
    remat: bool = False
    inputs: ClassVar[str] = "points"
    split_axes: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "embedding/kernel": (-1,),
        "head/kernel": (-1, -2),
    }

    @nn.compact
    @at_precision
    def __call__(
        self,
        points: Float[Array, "batch n columns"],
        *,
        key_mask: Bool[Array, "batch n"] | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "batch classes"]:
        """Computes the class logits of a batch of sets of points.

        Args:
            points: Position and features of each point, shape ``[batch, n, num_axes +
                channels]``, with at least one channel. Waves are computed in float32
                from positions in float32, which is precise enough up to about 1,000:
                subtract a mean or a corner of the set from larger ones first, in
                float64. Waves are at first 6 units long or longer: scale positions such
                that neighbours are about 1 apart.
            key_mask: True for points that exist, shape ``[batch, n]``; by default those
                without a NaN. The others are padding.
            deterministic: Whether dropout is off.

        Returns:
            Logits, float32, shape ``[batch, num_classes]``.

        Raises:
            ValueError: If the points or the mask have another shape, or the attention
                or the position encoding needs a grid.
        """
        self._check_points(points)
        attentions, make_position = layer_attentions(
            self.attention,
            self.position,
            dim=self.dim,
            num_heads=self.num_heads,
            num_layers=self.num_layers,
            head_dim=self.head_dim,
            qkv_bias=self.qkv_bias,
            out_bias=self.out_bias,
        )
        for attention in attentions[:1]:
            self._check_attention(attention(parent=None))
        if key_mask is None:
            key_mask = ~jnp.isnan(points).any(axis=-1)
        if key_mask.shape != points.shape[:2] or key_mask.dtype != bool:
            raise ValueError(
                f"key_mask has shape {key_mask.shape} and dtype {key_mask.dtype}, "
                f"expected {points.shape[:2]} and bool, True for points that exist"
            )
        # Padding could hold NaN, which a product with zero would keep. jax2onnx would
        # make the number 0 a double.
        points = jnp.where(key_mask[..., None], points, jnp.zeros_like(points))
        positions, features = jnp.split(points, [self.num_axes], axis=-1)
        x = Linear(self.dim, dtype=self.dtype, name="embedding")(features)
        # num_layers times: x + attention(norm(x)), then x + MLP(norm(x)). Positions act
        # in the attentions.
        x = transformer_blocks(
            x,
            attentions,
            block_of(self),
            positions=make_position(name="position").per_layer(positions, 0),
            scan=self.scan_layers,
            grid=None,
            num_prefix=0,
            key_mask=key_mask,
            remat=self.remat,
            drop_path=self.drop_path,
            deterministic=deterministic,
        )
        # The head reads the mean of the normalised points that exist, in float32.
        x = make_norm(self.norm_type, self.norm_eps, self.dtype)(name="norm")(x)
        x = jnp.where(key_mask[..., None], x.astype(jnp.float32), 0)
        x = x.sum(axis=1) / jnp.maximum(key_mask.sum(axis=1, keepdims=True), 1)
        return Linear(self.num_classes, name="head")(x)

    @nn.nowrap
    def _check_points(self, points: Array) -> None:
        """Raises ValueError if points have another shape."""
        if points.ndim != 3 or points.shape[1] == 0:
            raise ValueError(
                f"points have shape {points.shape}, expected [batch, n, axes + "
                "channels] and n >= 1: add the axis of the batch, points[None]"
            )
        if points.shape[-1] <= self.num_axes:
            raise ValueError(
                f"points have {points.shape[-1]} columns, expected {self.num_axes} of "
                "the position and at least one of features: append a column of ones"
            )

    @nn.nowrap
    def _check_attention(self, attention: Any) -> None:
        """Raises ValueError if an attention needs a grid, or an order of the tokens."""
        if attention.needs_order:
            depends = "depends on the order or the number of the tokens"
        elif attention.has_grid_tables:
            depends = "has parameters for one grid of tokens"
        else:
            return
        raise ValueError(
            f"attention {self.attention!r} {depends}: choose another attention for "
            "points, such as 'softmax'"
        )

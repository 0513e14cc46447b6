"""Multi-head attention modules: they own the projections, the kernels do the rest.

All are called as ``attention(x, grid=, num_prefix=, position=, key_mask=)``, where
``position`` is what a position encoding of the site ``heads`` returned for the layer.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from relattn import offsets, spec
from relattn.kernels import banded, linear, random_features, softmax
from relattn.nn.linear import Linear

FEATURE_MAPS = {
    "positive": random_features.positive_features,
    "trigonometric": random_features.trigonometric_features,
    "relu": random_features.relu_features,
}


class MultiHeadAttention(nn.Module):
    """What every attention has: its size and its linear projections.

    Attributes:
        dim: Width of the tokens.
        heads: Number of heads; divides ``dim``.
        layer: Index of the layer in the model.
        qkv_bias: Whether queries, keys and values have a bias.
        dtype: Compute dtype; parameters are float32.
    """

    dim: int
    heads: int
    layer: int = 0
    qkv_bias: bool = True
    dtype: Any = jnp.float32
    sites: ClassVar[tuple[str, ...]] = ("none", "tokens")

    @classmethod
    def check(cls, dim: int, heads: int, **options: Any) -> None:
        """Raises ValueError where the sizes of the model or the options do not fit."""
        del options
        if heads < 1 or dim % heads:
            raise ValueError(
                "config.model.heads must divide config.model.dim, got "
                f"dim={dim} and heads={heads}"
            )

    @property
    def depth(self) -> int:
        """Width of a head."""
        return self.dim // self.heads

    def project(
        self, x: Float[Array, "batch n dim"], heads: int, name: str
    ) -> Float[Array, "batch {heads} n depth"]:
        """A linear projection to ``heads`` heads; for use in ``__call__``."""
        width = heads * self.depth
        out = Linear(width, use_bias=self.qkv_bias, dtype=self.dtype, name=name)(x)
        return out.reshape(*out.shape[:-1], heads, self.depth).swapaxes(-2, -3)

    def merge(
        self, out: Float[Array, "batch heads n depth"]
    ) -> Float[Array, "batch n dim"]:
        """Concatenates the heads and projects them; for use in ``__call__``."""
        out = out.swapaxes(-2, -3)
        out = out.reshape(*out.shape[:-2], self.dim)
        return Linear(self.dim, dtype=self.dtype, name="out")(out)


class SoftmaxAttention(MultiHeadAttention):
    """Exact attention: softmax(q.k / sqrt(depth)).

    Example:
        >>> import jax
        >>> x = jnp.ones((1, 7, 8))
        >>> module = SoftmaxAttention(dim=8, heads=2)
        >>> out, _ = module.init_with_output(jax.random.key(0), x)
        >>> out.shape
        (1, 7, 8)

    Source:
        Vaswani et al., Attention Is All You Need, section 3.2.
    """

    sites: ClassVar[tuple[str, ...]] = ("none", "tokens", "heads")

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch n dim"],
        *,
        grid: offsets.Grid | None = None,
        num_prefix: int = 0,
        position: Any = None,
        key_mask: Bool[Array, "batch n"] | None = None,
    ) -> Float[Array, "batch n dim"]:
        """Attends; ``key_mask`` is False for tokens that nobody may attend to."""
        del grid, num_prefix
        q, k, v = (self.project(x, self.heads, name) for name in ("q", "k", "v"))
        if position is not None:
            q, k = position(q, k, x)
        key_mask = None if key_mask is None else key_mask[:, None]
        return self.merge(softmax.softmax_attention(q, k, v, key_mask=key_mask))


class RandomFeatureAttention(MultiHeadAttention):
    """Options and state of the attentions that draw random features.

    Attributes:
        num_features: Number of random features; 0 is int(depth * ln(depth)), depth
            with the position's width where one is concatenated.
        features: ``"positive"`` (FAVOR+), ``"trigonometric"`` (FAVOR) or ``"relu"``.
        orthogonal: Whether the projection's rows are orthogonal.
        norms: ``"chi"`` or ``"fixed"``, as in `draw_orthogonal`.
        haar: As in `draw_orthogonal`.
    """

    num_features: int = 0
    features: str = "positive"
    orthogonal: bool = True
    norms: str = "chi"
    haar: bool = True

    @classmethod
    def check(
        cls,
        dim: int,
        heads: int,
        *,
        num_features: int = 0,
        features: str = "positive",
        norms: str = "chi",
        **options: Any,
    ) -> None:
        """Raises ValueError where the sizes of the model or the options do not fit."""
        super().check(dim, heads, **options)
        if num_features < 0:
            raise ValueError(
                "num_features must be positive, or 0 for int(depth * ln(depth)), got "
                f"{num_features}"
            )
        if features not in FEATURE_MAPS:
            raise ValueError(
                f"unknown features {features!r}: {spec.closest(features, FEATURE_MAPS)}"
            )
        if norms not in random_features.NORMS:
            hint = spec.closest(norms, random_features.NORMS)
            raise ValueError(f"unknown norms {norms!r}: {hint}")

    def feature_map(self, depth: int) -> linear.FeatureMap:
        """The feature map with the layer's projection; for use in ``__call__``."""

        def draw() -> random_features.RandomFeatures:
            return random_features.draw_random_features(
                self.make_rng("random_features"),
                layer=self.layer,
                num_features=self.num_features
                or random_features.default_num_features(depth),
                depth=depth,
                orthogonal=self.orthogonal,
                norms=self.norms,
                haar=self.haar,
            )

        drawn = self.variable("random_features", "projection", draw).value
        return functools.partial(
            FEATURE_MAPS[self.features], projection=drawn.projection
        )

    def attend(
        self,
        q: Float[Array, "batch heads n depth"],
        k: Float[Array, "batch heads n depth"],
        v: Float[Array, "batch heads n depth_v"],
        feature_map: linear.FeatureMap,
        key_mask: Bool[Array, "batch 1 n"] | None,
    ) -> Float[Array, "batch heads n depth_v"]:
        """Linear attention; counts the weights' sums that are not positive."""
        if self.features != "trigonometric":
            return linear.linear_attention(q, k, v, feature_map, key_mask=key_mask)
        out, normalizer = linear.linear_attention(
            q, k, v, feature_map, key_mask=key_mask, return_normalizer=True
        )
        self.sow("intermediates", "nonpositive_normalizer", (normalizer <= 0).mean())
        return out


class FavorAttention(RandomFeatureAttention):
    """Linear attention with random features of the softmax kernel (Performer).

    out_i = phi(q_i)^T sum_j phi(k_j) v_j^T / phi(q_i)^T sum_j phi(k_j)

    The projection is the variable ``projection`` of the collection
    ``random_features``: no parameter, redrawn by `relattn.kernels.redraw`.

    Example:
        >>> import jax
        >>> x = jnp.ones((1, 7, 8))
        >>> module = FavorAttention(dim=8, heads=2, num_features=5)
        >>> out, variables = module.init_with_output(jax.random.key(0), x)
        >>> out.shape, sorted(variables)
        ((1, 7, 8), ['params', 'random_features'])

    Source:
        Choromanski et al., Rethinking Attention with Performers, section 2.
    """

    sites: ClassVar[tuple[str, ...]] = ("none", "tokens", "heads")

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch n dim"],
        *,
        grid: offsets.Grid | None = None,
        num_prefix: int = 0,
        position: Any = None,
        key_mask: Bool[Array, "batch n"] | None = None,
    ) -> Float[Array, "batch n dim"]:
        """Attends; ``key_mask`` is False for tokens that nobody may attend to."""
        del grid, num_prefix
        q, k, v = (self.project(x, self.heads, name) for name in ("q", "k", "v"))
        if position is not None:
            q, k = position(q, k, x)
        key_mask = None if key_mask is None else key_mask[:, None]
        out = self.attend(q, k, v, self.feature_map(q.shape[-1]), key_mask)
        return self.merge(out)


class BandedAttention(RandomFeatureAttention):
    """Strategy 2: content heads beside position heads with a clipped distance.

    Content heads are `FavorAttention`'s. A position head weighs key j for query i by
    phi(q_i).phi(w_d), d the Manhattan distance of i and j clipped at ``clip``; it
    projects no keys. The table w starts at zero and is shared by the position heads.

    Attributes:
        clip: The largest distance told apart, in tokens.
        position_heads: Number of position heads; 0 is half of the heads.

    Example:
        >>> import jax
        >>> x = jnp.ones((1, 7, 8))
        >>> module = BandedAttention(dim=8, heads=2, clip=2)
        >>> out, _ = module.init_with_output(
        ...     jax.random.key(0), x, grid=(2, 3), num_prefix=1)
        >>> out.shape
        (1, 7, 8)

    Source:
        Horn et al., Translational Equivariance in Kernelizable Attention, section 2.3
        (strategy 2).
    """

    clip: int = 6
    position_heads: int = 0

    @classmethod
    def check(
        cls,
        dim: int,
        heads: int,
        *,
        clip: int = 6,
        position_heads: int = 0,
        **options: Any,
    ) -> None:
        """Raises ValueError where the sizes of the model or the options do not fit."""
        super().check(dim, heads, **options)
        if clip < 1:
            raise ValueError(f"attention 'banded' needs clip >= 1, got {clip}")
        if not position_heads and heads % 2:
            raise ValueError(
                "attention 'banded' makes half of the heads position heads: "
                f"config.model.heads must be even, got {heads}; or give position_heads"
            )
        if not 0 <= position_heads <= heads:
            raise ValueError(
                f"attention 'banded' has {heads} heads, got "
                f"position_heads={position_heads}"
            )

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch n dim"],
        *,
        grid: offsets.Grid,
        num_prefix: int = 0,
        position: Any = None,
        key_mask: Bool[Array, "batch n"] | None = None,
    ) -> Float[Array, "batch n dim"]:
        """Attends; ``key_mask`` is False for tokens that nobody may attend to."""
        del position
        position_heads = self.position_heads or self.heads // 2
        content_heads = self.heads - position_heads
        q = self.project(x, self.heads, "q")
        v = self.project(x, self.heads, "v")
        table = self.param(
            "table", nn.initializers.zeros, (self.clip + 1, self.depth), jnp.float32
        )
        feature_map = self.feature_map(self.depth)
        key_mask = None if key_mask is None else key_mask[:, None]
        outs = []
        if content_heads:
            k = self.project(x, content_heads, "k")
            content = (q[:, :content_heads], k, v[:, :content_heads])
            outs.append(self.attend(*content, feature_map, key_mask))
        outs.append(
            banded.banded_attention(
                q[:, content_heads:],
                v[:, content_heads:],
                table,
                feature_map,
                grid=grid,
                num_prefix=num_prefix,
                key_mask=key_mask,
            )
        )
        return self.merge(jnp.concatenate(outs, axis=1))

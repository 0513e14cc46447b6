"""Position encodings as Flax modules, one for the whole model.

An encoding declares its ``site``. At the site ``tokens`` the module adds to the grid's
tokens. At the site ``heads`` it returns, for every layer, a pytree that is called on
that layer's queries and keys; so parameters that layers share live in one place, and
what reaches the layers is plain arrays.
"""

from __future__ import annotations

from typing import ClassVar

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from relattn import offsets
from relattn.kernels import sinusoids

Grid = offsets.Grid


class NoPosition(nn.Module):
    """No position: attention sees a set of tokens.

    Example:
        >>> NoPosition().site
        'none'
    """

    dim: int = 0
    heads: int = 0
    num_layers: int = 0
    site: ClassVar[str] = "none"


class LearnableSincos(nn.Module):
    """Absolute sinusoids with learned frequencies, added to the tokens.

    x + p with p = [sin w_i row, cos w_i row, ..., sin w_i column, cos w_i column, ...],
    dim / 4 frequencies w_i shared by the axes, w_i = max_timescale^(-i / (dim/4)) at
    the start; dim / 2 for text, which has one axis.

    Attributes:
        dim: Width of the tokens, a multiple of 4, or of 2 for text.
        heads: Unused; every encoding takes it.
        num_layers: Unused; every encoding takes it.
        max_timescale: Slowest time scale at the start, in tokens.

    Example:
        >>> import jax
        >>> tokens = jnp.zeros((1, 6, 8))
        >>> module = LearnableSincos(dim=8)
        >>> out, _ = module.init_with_output(jax.random.key(0), tokens, (2, 3))
        >>> out.shape
        (1, 6, 8)

    Source:
        Horn et al., Translational Equivariance in Kernelizable Attention, section 3
        ("Absolute").
    """

    dim: int
    heads: int = 0
    num_layers: int = 0
    max_timescale: float = 32000.0
    site: ClassVar[str] = "tokens"

    @nn.compact
    def __call__(
        self, tokens: Float[Array, "batch n dim"], grid: Grid
    ) -> Float[Array, "batch n dim"]:
        """Adds the encoding to the grid's tokens; prefix tokens are not given."""
        width = 2 * len(grid)
        if self.dim % width:
            raise ValueError(
                "position 'learnable_sincos' needs config.model.dim divisible by "
                f"{width}, got {self.dim}"
            )
        num_frequencies = self.dim // width
        frequencies = self.param(
            "frequencies",
            lambda _: sinusoids.absolute_frequencies(
                num_frequencies, self.max_timescale
            ),
        )
        encoding = sinusoids.sinusoids(offsets.grid_positions(grid), frequencies)
        return tokens + encoding.astype(tokens.dtype)


@flax.struct.dataclass
class ConstrainedSincosHeads:
    """Strategy 1 in one layer: concatenates sinusoids to queries and keys.

    q' = [q, u B], k' = [k, u]; called on ``q``, ``k`` ``[batch heads n depth]`` and
    the layer's input ``x`` ``[batch n dim]``.

    Attributes:
        u: Sinusoids of every token, zeros for prefix tokens.
        coefficients: (a, b) per head, axis and scale.
        kernel: Content-conditioned part of (a, b), or None.
    """

    u: Float[Array, "n width"]
    coefficients: Float[Array, "heads pairs 2"]
    kernel: Float[Array, "dim heads pairs 2"] | None

    def __call__(self, q: Array, k: Array, x: Array) -> tuple[Array, Array]:
        """Widens queries and keys by the position's ``width``."""
        coefficients = self.coefficients
        if self.kernel is not None:
            conditioned = jnp.einsum("bnc,chps->bhnps", x, self.kernel.astype(x.dtype))
            coefficients = coefficients[:, None] + conditioned.astype(jnp.float32)
        queries = sinusoids.constrained_sinusoids(
            self.u, coefficients, per_token=self.kernel is not None
        )

        def concatenate(content, position):
            position = jnp.broadcast_to(
                position, (*content.shape[:-1], position.shape[-1])
            )
            return jnp.concatenate([content, position.astype(content.dtype)], axis=-1)

        return concatenate(q, queries), concatenate(k, self.u)

    def at(self, index: Int[Array, ""] | int) -> ConstrainedSincosHeads:
        """The encoding of one token, for decoding."""
        return self.replace(u=jax.lax.dynamic_slice_in_dim(self.u, index, 1))


class ConstrainedSincos(nn.Module):
    """Strategy 1: sinusoids whose score depends on the offset only.

    u(p) = [sin w_s p, cos w_s p] per axis and scale; q' = [q, u B], k' = [k, u] with
    B = blockdiag([[a, b], [-b, a]]), so that
    q'.k' = q.k + sum a cos w_s (p_i - p_j) + b sin w_s (p_i - p_j).
    The length scales w_s are shared by axes and layers; (a, b) belong to a layer, head,
    axis and scale and start as N(0, 1). Prefix tokens have u = 0.

    Attributes:
        dim: Width of the tokens.
        heads: Number of heads.
        num_layers: Number of layers.
        num_scales: Number of length scales w_s, at the start 64^(-s / num_scales).
        content_conditioned: Adds to (a, b) a linear function of the query token, as
            in the published code; the score then depends on offset and content.

    Example:
        >>> import jax
        >>> module = ConstrainedSincos(dim=8, heads=2, num_layers=3)
        >>> layers, _ = module.init_with_output(jax.random.key(0), (2, 3), 1)
        >>> q, k = jnp.ones((2, 1, 2, 7, 4))
        >>> q, k = layers[0](q, k, jnp.ones((1, 7, 8)))
        >>> len(layers), q.shape
        (3, (1, 2, 7, 20))

    Source:
        Horn et al., Translational Equivariance in Kernelizable Attention, section 2.3
        (strategy 1, lemma 1).
    """

    dim: int
    heads: int
    num_layers: int
    num_scales: int = 4
    content_conditioned: bool = False
    site: ClassVar[str] = "heads"

    @nn.compact
    def __call__(self, grid: Grid, num_prefix: int) -> list[ConstrainedSincosHeads]:
        """The encoding of every layer."""
        if self.num_scales < 1:
            raise ValueError(
                "position 'constrained_sincos' needs num_scales >= 1, got "
                f"{self.num_scales}"
            )
        pairs = len(grid) * self.num_scales
        frequencies = self.param(
            "frequencies",
            lambda _: sinusoids.length_scale_frequencies(self.num_scales),
        )
        coefficients = self.param(
            "coefficients",
            nn.initializers.normal(1.0),
            (self.num_layers, self.heads, pairs, 2),
        )
        kernels = [None] * self.num_layers
        if self.content_conditioned:
            kernels = self.param(
                "kernel",
                nn.initializers.normal(self.dim**-0.5),
                (self.num_layers, self.dim, self.heads, pairs, 2),
            )
        positions = offsets.grid_positions(grid, num_prefix)
        u = sinusoids.sinusoids(positions, frequencies, num_prefix=num_prefix)
        return [
            ConstrainedSincosHeads(u, coefficients[layer], kernels[layer])
            for layer in range(self.num_layers)
        ]

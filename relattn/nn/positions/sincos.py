"""Vectors and sinusoids, added to the tokens or concatenated to queries and keys."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from relattn import offsets
from relattn.kernels.positions import sinusoids
from relattn.kernels.positions.interpolate import resize_table
from relattn.nn.blocks import uniform
from relattn.nn.positions.base import LayerPosition, Params, Position
from relattn.offsets import Grid, Torus


class Learned(Position):
    """Adds a learned vector for each grid position to the tokens.

    Vectors start as N(0, 1), like the CLS token. Prefix tokens get none.

    Attributes:
        antialias: Whether a smaller grid averages over old vectors, as in timm; if not,
            the vectors are interpolated as in transformers' ViTs. See
            `relattn.kernels.resize_table`.

    Example:
        >>> import jax
        >>> tokens = jnp.zeros((1, 6, 8))
        >>> module = Learned(dim=8)
        >>> out, _ = module.init_with_output(jax.random.key(0), tokens, (2, 3))
        >>> out.shape
        (1, 6, 8)

    Source:
        Dosovitskiy et al., An Image is Worth 16x16 Words, section 3.1; initial values:
        Translution, the authors' code.
    """

    antialias: bool = True
    site: ClassVar[str] = "tokens"

    @nn.compact
    def __call__(
        self, tokens: Float[Array, "batch n dim"], grid: Grid
    ) -> Float[Array, "batch n dim"]:
        """Adds the encoding to the grid's tokens, without prefix tokens."""
        shape = (math.prod(grid), self.dim)
        table = self.table(nn.initializers.normal(1.0), shape, grid)
        return tokens + table.astype(tokens.dtype)[None]

    def resize(self, params: Params, old: Grid, new: Grid, num_prefix: int) -> Params:
        """Interpolates the vectors bicubically."""
        table = resize_table(params["table"], old, new, antialias=self.antialias)
        return {"table": table}


class Sincos(Position):
    """Adds fixed sinusoids to the tokens.

    They equal the initial values of `LearnableSincos` with the same ``base``. No
    parameters.

    Attributes:
        base: The slowest frequency is nearly 1 / base.

    Example:
        >>> tokens = jnp.zeros((1, 6, 8))
        >>> Sincos(dim=8).apply({}, tokens, (2, 3)).shape
        (1, 6, 8)

    Source:
        Vaswani et al., Attention Is All You Need, section 3.5, with an equal part of
        the width for each axis.
    """

    base: float = 10000.0
    site: ClassVar[str] = "tokens"

    @nn.compact
    def __call__(
        self, tokens: Float[Array, "batch n dim"], grid: Grid
    ) -> Float[Array, "batch n dim"]:
        """Adds the encoding to the grid's tokens, without prefix tokens."""
        num_frequencies = _num_frequencies("sincos", self.dim, grid)
        frequencies = sinusoids.absolute_frequencies(num_frequencies, self.base)
        encoding = sinusoids.sinusoids(offsets.grid_positions(grid), frequencies)
        return tokens + encoding.astype(tokens.dtype)[None]


class LearnableSincos(Position):
    """Adds absolute sinusoids with learned frequencies to the tokens.

    x + p with p = [sin w_i row, cos w_i row, ..., sin w_i column, cos w_i column, ...].
    The axes share num = dim / (2 axes) frequencies, with initial values
    w_i = base^(-i / num). ``dim`` must be divisible by 2 axes: by 4 for images, by 2
    for text.

    Attributes:
        base: Base of the initial geometric series.

    Example:
        >>> import jax
        >>> tokens = jnp.zeros((1, 6, 8))
        >>> module = LearnableSincos(dim=8)
        >>> out, _ = module.init_with_output(jax.random.key(0), tokens, (2, 3))
        >>> out.shape
        (1, 6, 8)

    Source:
        Horn et al., Translational Equivariance in Kernelizable Attention, section 3
        ("Absolute"); the learned frequencies, their initial values, and no position for
        CLS: the authors' code.
    """

    base: float = 32000.0
    site: ClassVar[str] = "tokens"

    @nn.compact
    def __call__(
        self, tokens: Float[Array, "batch n dim"], grid: Grid
    ) -> Float[Array, "batch n dim"]:
        """Adds the encoding to the grid's tokens, without prefix tokens."""
        num_frequencies = _num_frequencies("learnable_sincos", self.dim, grid)
        frequencies = self.param(
            "frequencies",
            lambda _: sinusoids.absolute_frequencies(num_frequencies, self.base),
        )
        encoding = sinusoids.sinusoids(offsets.grid_positions(grid), frequencies)
        return tokens + encoding.astype(tokens.dtype)[None]


def _num_frequencies(name: str, dim: int, grid: Grid) -> int:
    """Returns the number of frequencies per axis; each has a sine and a cosine."""
    width = 2 * len(grid)
    if dim % width:
        raise ValueError(f"position {name!r} needs dim divisible by {width}, got {dim}")
    return dim // width


@flax.struct.dataclass
class ConstrainedSincosHeads(LayerPosition):
    """Concatenates sinusoids to the queries and keys of a layer (strategy 1).

    q' = [q, u B], k' = [k, u]. A ``kernel`` W adds coefficients x_i W of the query
    token to (a, b). With a ``bias`` too, the coefficients x_i W + bias form a separate
    block instead: q' = [q, u B(x_i), u B], k' = [k, u, u].

    Attributes:
        u: Sinusoids of every token, zeros for prefix tokens.
        coefficients: (a, b) per head, axis and scale.
        kernel: W, from the query token to coefficients, or None.
        bias: Bias of the separate block's coefficients, or None.
    """

    u: Float[Array, "n width"]
    coefficients: Float[Array, "heads pairs 2"]
    kernel: Float[Array, "dim heads pairs 2"] | None
    bias: Float[Array, "heads pairs 2"] | None

    def __call__(self, q: Array, k: Array, x: Array) -> tuple[Array, Array]:
        """Concatenates the blocks of the position to queries and keys."""

        def query_block(coefficients, per_token=False):
            return sinusoids.constrained_sinusoids(
                self.u, coefficients, per_token=per_token
            )

        def concatenate(content, *blocks):
            blocks = [
                jnp.broadcast_to(block, (*content.shape[:-1], block.shape[-1]))
                for block in blocks
            ]
            blocks = [block.astype(content.dtype) for block in blocks]
            return jnp.concatenate([content, *blocks], axis=-1)

        if self.kernel is None:
            q_blocks = [query_block(self.coefficients)]
        else:
            content = jnp.einsum("bnc,chps->bhnps", x, self.kernel.astype(x.dtype))
            content = content.astype(jnp.float32)
            if self.bias is None:
                coefficients = self.coefficients[None, :, None] + content
                q_blocks = [query_block(coefficients, per_token=True)]
            else:
                q_blocks = [
                    query_block(self.bias[None, :, None] + content, per_token=True),
                    query_block(self.coefficients),
                ]
        return concatenate(q, *q_blocks), concatenate(k, *[self.u] * len(q_blocks))

    def slice(
        self, start: Int[Array, ""] | int, num_tokens: int
    ) -> ConstrainedSincosHeads:
        """Returns the encoding of ``num_tokens`` tokens from position ``start`` on."""
        return dataclasses.replace(
            self, u=jax.lax.dynamic_slice_in_dim(self.u, start, num_tokens)
        )


class ConstrainedSincos(Position):
    """Concatenates sinusoids whose score depends only on the offset (strategy 1).

    u(p) = [sin w_s p, cos w_s p] per axis and scale; q' = [q, u B], k' = [k, u] with
    B = blockdiag([[a, b], [-b, a]]), so that
    q'.k' = q.k + sum a cos w_s (p_i - p_j) + b sin w_s (p_i - p_j).
    Axes and layers share the length scales w_s. Each layer, head, axis and scale has
    its (a, b), which start as N(0, 1). Prefix tokens have u = 0. On a torus
    w_s = 2 pi s / size, s = 1 .. num_scales, and is not learned.

    With random features, the error of one draw depends on where the tokens are, and a
    model trained with one draw uses it like an absolute position. Redraw in training
    (``config.redraw_every``) if it has many epochs to adapt to every draw; in short
    training, or to be equivariant for every draw, use `SincosBias`.

    Attributes:
        num_scales: Number of length scales w_s, with initial values
            64^(-s / num_scales).
        content_conditioned: Whether there is a second block of the same width, as in
            the authors' code, whose (a, b) are a linear function of the query token:
            q_i' = [q_i, u_i B(x_i), u_i B], k_j' = [k_j, u_j, u_j]. The score then
            depends on the offset and the query's content.
        content_modulated: Whether a linear function of the query token, without bias,
            is added to (a, b) instead. The score depends on the same quantities,
            without a second block.

    Example:
        >>> import jax
        >>> module = ConstrainedSincos(dim=8, num_heads=2, num_layers=3)
        >>> layers, _ = module.init_with_output(jax.random.key(0), (2, 3), 1)
        >>> q, k = jnp.ones((2, 1, 2, 7, 4))
        >>> q, k = layers[0](q, k, jnp.ones((1, 7, 8)))
        >>> len(layers), q.shape
        (3, (1, 2, 7, 20))

    Source:
        Horn et al., Translational Equivariance in Kernelizable Attention, section 2.3
        (strategy 1, lemma 1) and appendix A.2 (4 scales); what axes, layers and heads
        share, the initial values, and u = 0 of CLS: the authors' code.
    """

    num_scales: int = 4
    content_conditioned: bool = False
    content_modulated: bool = False
    site: ClassVar[str] = "heads"
    periodic: ClassVar[bool] = True
    takes_shared_keys: ClassVar[bool] = True
    shared_params: ClassVar[tuple[str, ...]] = ("frequencies",)

    @nn.compact
    def __call__(self, grid: Grid, num_prefix: int) -> list[ConstrainedSincosHeads]:
        """Returns the encoding of each layer."""
        if self.num_scales < 1:
            raise ValueError(
                "position 'constrained_sincos' needs num_scales >= 1, got "
                f"{self.num_scales}"
            )
        if self.content_conditioned and self.content_modulated:
            raise ValueError(
                "position 'constrained_sincos' takes content_conditioned=True or "
                "content_modulated=True, not both"
            )
        pairs = len(grid) * self.num_scales
        positions = offsets.grid_positions(grid, num_prefix)
        if isinstance(grid, Torus):
            positions = positions * sinusoids.turns(grid)
            frequencies = np.arange(1.0, self.num_scales + 1, dtype=np.float32)
        else:
            frequencies = self.param(
                "frequencies",
                lambda _: sinusoids.length_scale_frequencies(self.num_scales),
            )
        coefficients = self.param(
            "coefficients",
            nn.initializers.normal(1.0),
            (self.num_layers, self.num_heads, pairs, 2),
            jnp.float32,
        )
        kernels = biases = [None] * self.num_layers
        shape = (self.num_layers, self.dim, self.num_heads, pairs, 2)
        if self.content_modulated:
            init = nn.initializers.normal(self.dim**-0.5)
            kernels = self.param("kernel", init, shape, jnp.float32)
        if self.content_conditioned:
            # Initial values of a linear layer.
            init = uniform(self.dim**-0.5)
            kernels = self.param("kernel", init, shape, jnp.float32)
            biases = self.param("bias", init, (shape[0], *shape[2:]), jnp.float32)
        u = sinusoids.sinusoids(positions, frequencies, num_prefix=num_prefix)
        return [
            ConstrainedSincosHeads(
                u, coefficients[layer], kernels[layer], biases[layer]
            )
            for layer in range(self.num_layers)
        ]

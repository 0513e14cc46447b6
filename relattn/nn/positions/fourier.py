"""Projections that are sums of waves of the offset: Translution in any attention.

The matrices of `FourierValues` and `FourierScores` are functions of the offset, not
rows of a table, so their number does not depend on the grid. The attention below them
computes as it does without, with wider values, or with wider queries and keys. So does
that below `FourierMask`, a bias of the offset without matrices.
"""

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
from relattn.kernels.positions import fourier, rotary
from relattn.kernels.random_projections import draw_constant
from relattn.messages import check_choice
from relattn.nn.blocks import uniform
from relattn.nn.positions.base import (
    Grid,
    LayerPosition,
    Params,
    Points,
    Position,
    check_same_waves,
)
from relattn.offsets import Torus


@flax.struct.dataclass
class FourierLayer(LayerPosition):
    """Waves and matrices of a layer; a subclass applies them to values or to scores.

    Attributes:
        waves: Waves of the tokens that are projected.
        others: Waves of the tokens that they meet.
        kernel: A and B of every head and wave, or their first factors.
        basis: Their second factor, or None.
        mask: Which of the projections are kept, or None.
    """

    waves: Float[Array, "*batch n waves 2"]
    others: Float[Array, "*batch n waves 2"]
    kernel: Float[Array, "dim heads waves 2 width"]
    basis: Float[Array, "heads waves rank head_dim"] | None
    mask: Float[Array, "n waves 2"] | None

    def project(
        self, x: Float[Array, "*batch n dim"], like: Array
    ) -> Float[Array, "*batch heads n waves 2 width"]:
        """Returns x A and x B, in the dtype of ``like``."""
        num_tokens, found = self.waves.shape[-3], x.shape[-2]
        if found != num_tokens:
            raise ValueError(
                f"the position has {num_tokens} tokens, with prefix tokens, and the "
                f"attention {found}: pass both the same grid or points, and num_prefix"
            )
        dtype = like.dtype
        kernel = self.kernel.astype(dtype)
        projections = jnp.einsum("...nc,chwtd->...hnwtd", x.astype(dtype), kernel)
        if self.mask is None:
            return projections
        return projections * self.mask[..., None].astype(dtype)

    def basis_like(
        self, like: Array
    ) -> Float[Array, "heads waves rank head_dim"] | None:
        """Returns the basis in the dtype of ``like``."""
        return None if self.basis is None else self.basis.astype(like.dtype)

    def slice(self, start: Int[Array, ""] | int, num_tokens: int) -> FourierLayer:
        """Returns the waves of ``num_tokens`` tokens from position ``start`` on."""
        rows = {"waves": self.waves, "others": self.others, "mask": self.mask}
        rows = {
            name: jax.lax.dynamic_slice_in_dim(x, start, num_tokens, axis=-3)
            for name, x in rows.items()
            if x is not None
        }
        return dataclasses.replace(self, **rows)


@flax.struct.dataclass
class FourierValuesLayer(FourierLayer):
    """Widens values by their products with waves, and combines the outputs."""

    def widen_values(self, v: Array, x: Array) -> Array:
        """Widens values."""
        return fourier.widen_values(v, self.project(x, v), self.waves)

    def combine_values(self, out: Array) -> Array:
        """Combines the outputs of attention to the widened values."""
        return fourier.combine_values(out, self.others, basis=self.basis_like(out))


class _Waves(Position):
    """Base class: the frequencies and waves of each layer.

    Attributes:
        num_frequencies: Number of waves per layer.
        learned: Whether the w_r are learned.
        base: Base of the initial series of frequencies; 0 for 10 on a grid and 10,000
            on a line.
    """

    num_frequencies: int = 8
    learned: bool = True
    base: float = 0.0
    periodic: ClassVar[bool] = True
    continuous: ClassVar[bool] = True

    def waves(
        self, grid: Grid | Points, num_prefix: int
    ) -> Float[Array, "layers *leading tokens waves 2"]:
        """Returns the waves at every position, zeros for prefix tokens.

        Waves of points have an axis for the batch and one of size 1 for the heads.
        """
        frequencies = self.frequencies(grid)
        if isinstance(grid, tuple):
            positions = offsets.grid_positions(grid, num_prefix)
        else:
            positions = jnp.pad(grid, [(0, 0), (num_prefix, 0), (0, 0)])[:, None]
            frequencies = frequencies.reshape(-1, 1, 1, *frequencies.shape[-2:])
        waves = fourier.position_waves(positions, frequencies, num_prefix=num_prefix)
        batch = waves.shape[1:] if waves.ndim > 3 else waves.shape
        return jnp.broadcast_to(waves, (self.num_layers, *batch))

    def frequencies(self, grid: Grid | Points) -> Float[Array, "*layers waves axes"]:
        """Returns w, a parameter if it is learned; on a torus its longest waves."""
        if isinstance(grid, Torus):
            if math.prod(grid) < 2:
                raise ValueError(
                    f"position {type(self).__name__} has no waves on a torus of one "
                    "token: choose smaller patches, periodic=False or position='none'"
                )
            return jnp.asarray(fourier.torus_frequencies(grid, self.num_frequencies))

        def draw(key):
            return rotary.draw_mixed_frequencies(
                key,
                self.num_frequencies,
                len(grid) if isinstance(grid, tuple) else grid.shape[-1],
                leading=(self.num_layers,),
                base=self.base,
            )

        if self.learned:
            return self.param("frequencies", draw)
        # Fixed frequencies are the same in every model.
        return draw_constant(draw)

    def resize(self, params: Params, old: Grid, new: Grid, num_prefix: int) -> Params:
        """Returns the parameters; raises ValueError if a torus has other waves."""
        del num_prefix
        check_same_waves(self, old, new, self.num_frequencies)
        return params


class _Fourier(_Waves):
    """Base class: the parameters of matrices that are a sum of waves.

    Attributes:
        rank: Rank of A_r and B_r of a head; 0 for full matrices.
        prefix_matrices: Whether pairs of a grid token and a prefix token have two more
            matrices, which are added to W_0: one where the grid token is projected, one
            where the prefix token is.
    """

    rank: int = 0
    prefix_matrices: bool = False
    # The name of the position, and the layer's encoding.
    kind: ClassVar[str]
    layer: ClassVar[type[FourierLayer]]
    # The sign of the second wave of the other token, for pairs with a prefix token.
    sign: ClassVar[float]

    def layers(self, grid: Grid | Points, num_prefix: int) -> list[FourierLayer]:
        """Returns the encoding of each layer; for ``__call__``."""
        if self.num_frequencies < 1 or self.rank < 0:
            raise ValueError(
                f"position {self.kind!r} needs num_frequencies >= 1 and rank >= 1, or "
                f"rank=0 for full matrices, got num_frequencies={self.num_frequencies} "
                f"and rank={self.rank}"
            )
        waves = self.waves(grid, num_prefix)
        others, mask = waves, None
        if self.prefix_matrices and num_prefix:
            prefix = (np.arange(waves.shape[-3]) < num_prefix).astype(np.float32)
            widths = [(0, 0), (waves.shape[-2], 0), (0, 0)]
            mask = np.stack([1 - prefix, prefix], axis=-1)[:, None]
            mask = jnp.asarray(np.pad(mask, widths, constant_values=1))
            others = self.append(
                waves, np.stack([prefix, self.sign * (1 - prefix)], axis=-1)
            )
            waves = self.append(waves, np.array([1, 0], np.float32))
        kernel, basis = self.matrices(waves.shape[-2])
        return [
            self.layer(waves[i], others[i], kernel[i], basis[i], mask)
            for i in range(self.num_layers)
        ]

    @nn.nowrap
    def append(self, waves: Array, wave: np.ndarray) -> Array:
        """Appends one wave, ``[n, 2]`` or ``[2]``, to those of each layer."""
        last = jnp.broadcast_to(wave, (*waves.shape[:-2], 2))
        return jnp.concatenate([waves, last[..., None, :]], axis=-2)

    def matrices(self, num_waves: int) -> tuple[Array, Array | list[None]]:
        """Returns A and B of each layer, and their second factor."""
        zeros, width = nn.initializers.zeros, self.rank or self.head_dim
        shape = (self.num_layers, self.dim, self.num_heads, num_waves, 2, width)
        if not self.rank:
            kernel = self.param("kernel", zeros, shape, jnp.float32)
            return kernel, [None] * self.num_layers
        kernel = self.param("kernel", uniform(self.dim**-0.5), shape)
        shape = (self.num_layers, self.num_heads, num_waves, width, self.head_dim)
        return kernel, self.param("basis", zeros, shape, jnp.float32)


class FourierValues(_Fourier):
    """Projects values with a matrix for each offset, which is a sum of waves.

    out_i = sum_j alpha_ij x_j W[d] with
    W[d] = W_0 + sum_r cos(w_r . d) A_r + sin(w_r . d) B_r, d = p_i - p_j. W_0 is the
    attention's projection of values, with its bias. Every layer has frequency vectors
    w_r, every layer and head matrices A_r and B_r. In pairs with a prefix token W is
    W_0. This is Translution's projection of values with a table that is a low-pass
    function of the offset: 2 num_frequencies + 1 matrices for a grid of any size, or
    for points at any real positions, which may differ between examples. On a torus the
    w_r are not learned: they are the longest waves that fit a whole number of times
    along all axes. With all such waves, the table can be any.

    The attention's weights multiply values of width
    (2 num_frequencies + 1) head_dim, or head_dim + 2 num_frequencies rank, and are not
    changed.

    A_r and B_r start at zero, or, with a rank, their second factor does. So the
    attention starts as it is without the encoding: its outputs have the usual size, and
    a trained model can be given the encoding without a change of its outputs. What is
    zero has a gradient and is learned from the first step, the rest from the second.

    Attributes:
        num_frequencies: Number of waves per layer.
        learned: Whether the w_r are learned. They start as those of
            `relattn.kernels.draw_mixed_frequencies`.
        base: Base of the initial series of frequencies; 0 for 10 on a grid and 10,000
            on a line.
        rank: Rank of A_r and B_r of a head, with a common second factor; 0 for full
            matrices.
        prefix_matrices: Whether pairs of a grid token and a prefix token have two more
            matrices, which are added to W_0: one for values of grid tokens, one for
            those of prefix tokens.

    Example:
        >>> import jax
        >>> module = FourierValues(dim=8, num_heads=2, num_layers=3, num_frequencies=5)
        >>> layers, variables = module.init_with_output(jax.random.key(0), (2, 3), 1)
        >>> v = layers[0].widen_values(jnp.ones((1, 2, 7, 4)), jnp.ones((1, 7, 8)))
        >>> v.shape, layers[0].combine_values(v).shape
        ((1, 2, 7, 44), (1, 2, 7, 4))
        >>> variables["params"]["kernel"].shape
        (3, 8, 2, 5, 2, 4)

    Source:
        Translution: Unifying Self-attention and Convolution, section 3.3, for the
        projections; the sum of waves is ours. Nearest are RoVE (Garcia-Castellanos et
        al.), whose matrices are one rotation without parameters, and
        FourierLearner-Transformers (Choromanski et al., Learning a Fourier Transform
        for Linear Relative Positional Encodings in Transformers), whose sum of waves
        multiplies the weights.
    """

    site: ClassVar[str] = "values"
    kind: ClassVar[str] = "fourier_values"
    layer: ClassVar[type[FourierLayer]] = FourierValuesLayer
    sign: ClassVar[float] = 1.0

    @nn.compact
    def __call__(self, grid: Grid | Points, num_prefix: int) -> list[FourierLayer]:
        """Returns the encoding of each layer, on a grid or at points."""
        return self.layers(grid, num_prefix)


@flax.struct.dataclass
class FourierScoresLayer(FourierLayer):
    """Widens queries and keys by their products with waves.

    Attributes:
        relative: ``"q"`` if queries are projected, ``"k"`` if keys are.
    """

    relative: str = flax.struct.field(pytree_node=False, default="q")

    @property
    def keeps_scores(self) -> bool:
        """Returns True: the waves add to the scores."""
        return True

    def __call__(self, q: Array, k: Array, x: Array) -> tuple[Array, Array]:
        """Widens queries and keys."""
        projected, other = (q, k) if self.relative == "q" else (k, q)
        projections, basis = self.project(x, q), self.basis_like(q)
        projected = fourier.widen_queries(projected, projections, self.waves)
        other = fourier.widen_keys(other, self.others, basis=basis)
        return (projected, other) if self.relative == "q" else (other, projected)


class FourierScores(_Fourier):
    """Projects queries or keys with a matrix for each offset, which is a sum of waves.

    The scores are x_i W[d] . k_j / sqrt(head_dim) with
    W[d] = W_0 + sum_r cos(w_r . d) A_r + sin(w_r . d) B_r, d = p_i - p_j, or, of keys,
    q_i . x_j W[-d] / sqrt(head_dim). W_0 is the attention's projection, with its bias.
    Parameters, their initial values, prefix tokens and a torus are as in
    `FourierValues`, which may be added: ``"fourier_scores + fourier_values"``.

    Queries and keys are head_dim + 2 num_frequencies rank wide, or
    (2 num_frequencies + 1) head_dim with full matrices. Softmax has these scores
    exactly, random features in expectation: their number and their error grow with the
    width, and causal positive features need one of at most 224. So matrices have a rank
    by default.

    Attributes:
        num_frequencies: Number of waves per layer.
        learned: Whether the w_r are learned. They start as those of
            `relattn.kernels.draw_mixed_frequencies`.
        base: Base of the initial series of frequencies; 0 for 10 on a grid and 10,000
            on a line.
        rank: Rank of A_r and B_r of a head, with a common second factor; 0 for full
            matrices.
        prefix_matrices: Whether pairs of a grid token and a prefix token have two more
            matrices, which are added to W_0: one where the grid token is projected, one
            where the prefix token is.
        relative: The projection that depends on the offset: ``"q"`` or ``"k"``.

    Example:
        >>> import jax
        >>> module = FourierScores(dim=8, num_heads=2, num_layers=3, rank=2)
        >>> layers, _ = module.init_with_output(jax.random.key(0), (5,), 0)
        >>> q, k = layers[0](*jnp.ones((2, 1, 2, 5, 4)), jnp.ones((1, 5, 8)))
        >>> q.shape
        (1, 2, 5, 36)

    Source:
        Translution: Unifying Self-attention and Convolution, section 3.3, for the
        projections; the sum of waves is ours.
    """

    rank: int = 4
    relative: str = "q"
    site: ClassVar[str] = "heads"
    kind: ClassVar[str] = "fourier_scores"
    layer: ClassVar[type[FourierLayer]] = FourierScoresLayer
    sign: ClassVar[float] = -1.0

    @nn.compact
    def __call__(self, grid: Grid | Points, num_prefix: int) -> list[FourierLayer]:
        """Returns the encoding of each layer, on a grid or at points."""
        where = " of position 'fourier_scores'"
        check_choice("relative", self.relative, ("q", "k"), where)
        return [
            dataclasses.replace(layer, relative=self.relative)
            for layer in self.layers(grid, num_prefix)
        ]


@flax.struct.dataclass
class FourierMaskLayer(LayerPosition):
    """Appends waves to the queries and keys of a layer.

    Attributes:
        waves: Waves of every token, zeros for prefix tokens.
        coefficients: (a, b) of every head and wave.
    """

    waves: Float[Array, "*batch n waves 2"]
    coefficients: Float[Array, "heads waves 2"]

    @property
    def keeps_scores(self) -> bool:
        """Returns True: the waves add to the scores."""
        return True

    def __call__(self, q: Array, k: Array, x: Array) -> tuple[Array, Array]:
        """Appends waves to queries and keys."""
        del x
        return fourier.append_waves(q, k, self.coefficients, self.waves)

    def slice(self, start: Int[Array, ""] | int, num_tokens: int) -> FourierMaskLayer:
        """Returns the waves of ``num_tokens`` tokens from position ``start`` on."""
        waves = jax.lax.dynamic_slice_in_dim(self.waves, start, num_tokens, axis=-3)
        return dataclasses.replace(self, waves=waves)


class FourierMask(_Waves):
    """Multiplies weights by a function of the offset, in linear time (FourierLearner).

    The scores are q_i . k_j / sqrt(head_dim) + b(d) with
    b(d) = sum_r (a_r^2 - b_r^2) cos(w_r . d) - 2 a_r b_r sin(w_r . d), d = p_i - p_j,
    as those of `FourierBias`: the waves of the query's and of the key's position are
    appended to queries and keys. Random features of these are products of features of
    the content and features of the position. So `favor` needs neither all pairs nor an
    FFT, and its decoding a state of constant size, but e^b(d) is exact in expectation
    only. Softmax has these scores exactly.

    Every layer has frequency vectors w_r, every layer and head coefficients (a_r, b_r),
    which start as N(0, 0.1^2), so that b is almost zero. In pairs with a prefix token b
    is zero. On a torus the w_r are not learned: they are the longest waves that fit a
    whole number of times along all axes.

    Attributes:
        num_frequencies: Number of waves per layer.
        learned: Whether the w_r are learned. They start as those of
            `relattn.kernels.draw_mixed_frequencies`.
        base: Base of the initial series of frequencies; 0 for 10 on a grid and 10,000
            on a line.

    Example:
        >>> module = FourierMask(dim=8, num_heads=2, num_layers=3, num_frequencies=5)
        >>> layers, _ = module.init_with_output(jax.random.key(0), (5,), 0)
        >>> q, k = layers[0](*jnp.ones((2, 1, 2, 5, 4)), jnp.ones((1, 5, 8)))
        >>> q.shape
        (1, 2, 5, 14)

    Source:
        Choromanski et al., Learning a Fourier Transform for Linear Relative Positional
        Encodings in Transformers, section 3; the parameters are ours.
    """

    site: ClassVar[str] = "heads"

    @nn.compact
    def __call__(self, grid: Grid | Points, num_prefix: int) -> list[FourierMaskLayer]:
        """Returns the encoding of each layer, on a grid or at points."""
        if self.num_frequencies < 1:
            raise ValueError(
                "position 'fourier_mask' needs num_frequencies >= 1, got "
                f"{self.num_frequencies}"
            )
        waves = self.waves(grid, num_prefix)
        shape = (self.num_layers, self.num_heads, waves.shape[-2], 2)
        init = nn.initializers.normal(0.1)
        coefficients = self.param("coefficients", init, shape, jnp.float32)
        return [
            FourierMaskLayer(*layer) for layer in zip(waves, coefficients, strict=True)
        ]

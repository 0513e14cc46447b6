"""Offset biases for grids of any size: T5 buckets, ALiBi and sums of waves.

Their parameters do not depend on the grid, so a model can be evaluated on grids that it
was not trained on. Pairs with a prefix token have no offset and no bias.
`relattn.nn.positions.relative.RelativeBias` has a table for one grid instead.
"""

from __future__ import annotations

from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from relattn import offsets
from relattn.kernels.positions import sinusoids
from relattn.kernels.positions.bias import offset_buckets, wave_bias
from relattn.kernels.positions.fourier import torus_frequencies
from relattn.kernels.precision import wide_einsum
from relattn.nn.positions.base import Grid, Params, Position, check_same_waves
from relattn.nn.positions.relative import RelativeTables
from relattn.offsets import Torus


class T5Bias(Position):
    """Adds a learned bias for each bucket of offsets; buckets widen with the distance.

    b(d) = sum over the axes of t_axis[bucket(d_axis)], with the buckets of
    `relattn.kernels.offset_buckets`: on a line T5's; on a grid the sum of a table for
    rows and one for columns. Every head has its tables; as in T5 the layers share them.
    They start as N(0, 1 / dim).

    Attributes:
        num_buckets: Number of buckets per axis.
        max_distance: Distances from this one on share the last bucket, in tokens.
        bidirectional: Whether half of the buckets are for later keys; use False for
            causal attention.

    Example:
        >>> import jax
        >>> module = T5Bias(dim=8, num_heads=2, num_layers=3)
        >>> layers, variables = module.init_with_output(jax.random.key(0), (2, 3), 1)
        >>> layers[0].bias.shape, variables["params"]["table"].shape
        ((2, 15), (2, 2, 32))

    Source:
        Raffel et al., Exploring the Limits of Transfer Learning (T5), section 2.1.
    """

    num_buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = True
    site: ClassVar[str] = "offset_bias"
    periodic: ClassVar[bool] = True
    shared_params: ClassVar[tuple[str, ...]] = ("table",)

    @nn.compact
    def __call__(self, grid: Grid, num_prefix: int) -> list[RelativeTables]:
        """Returns the tables of each layer, the same for all."""
        del num_prefix
        buckets = offset_buckets(
            offsets.table_offsets(grid),
            num_buckets=self.num_buckets,
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
        )
        table = self.param(
            "table",
            nn.initializers.normal(self.dim**-0.5),
            (len(grid), self.num_heads, self.num_buckets),
            jnp.float32,
        )
        # A product, not a gather: its derivative would be a scatter, which is slow on
        # accelerators. At full precision it copies exactly.
        chosen = jax.nn.one_hot(buckets, self.num_buckets, dtype=table.dtype)
        einsum = wide_einsum(jax.lax.Precision.HIGHEST)
        bias = einsum("ahb,rab->hr", table, chosen)
        return [RelativeTables(bias=bias)] * self.num_layers


class Alibi(Position):
    """Subtracts the distance times a slope that is fixed for each head.

    b(d) = -m_h ||d||, with m_h = 2^(-8 h / H) for the heads h = 1 .. H, and the
    Euclidean norm. It has no parameters.

    Example:
        >>> module = Alibi(dim=8, num_heads=2, num_layers=3)
        >>> layers = module((3,), 0)
        >>> layers[0].bias.tolist()[0]
        [-0.125, -0.0625, -0.0, -0.0625, -0.125]

    Source:
        Press et al., Train Short, Test Long (ALiBi), section 3; on grids 2D-ALiBi of
        Fuller et al., CROMA.
    """

    site: ClassVar[str] = "offset_bias"
    periodic: ClassVar[bool] = True

    def __call__(self, grid: Grid, num_prefix: int) -> list[RelativeTables]:
        """Returns the tables of each layer, the same for all."""
        del num_prefix
        slopes = 2.0 ** (-8 * np.arange(1, self.num_heads + 1) / self.num_heads)
        distances = np.linalg.norm(offsets.table_offsets(grid), axis=-1)
        bias = jnp.asarray(-slopes[:, None] * distances, jnp.float32)
        return [RelativeTables(bias=bias)] * self.num_layers


class SincosBias(Position):
    """Adds the score of strategy 1 as a bias, without random features.

    b(d) = sum over axes and scales of (a cos w_s d + b sin w_s d) / sqrt(D), where D is
    the width of a head with the sinusoids that `ConstrainedSincos` concatenates. This
    is what its positions add to the scores, with the same length scales, coefficients
    and initial values. Random features then approximate the content alone, and
    attention is translation equivariant for every draw of them.

    Attributes:
        num_scales: Number of length scales w_s, with initial values
            64^(-s / num_scales).

    Example:
        >>> import jax
        >>> module = SincosBias(dim=8, num_heads=2, num_layers=3)
        >>> layers, _ = module.init_with_output(jax.random.key(0), (2, 3), 1)
        >>> len(layers), layers[0].bias.shape
        (3, (2, 15))

    Source:
        Horn et al., Translational Equivariance in Kernelizable Attention, lemma 1, as
        the bias of Luo et al., Stable, Fast and Accurate: Kernelized Attention with
        Relative Positional Encoding.
    """

    num_scales: int = 4
    site: ClassVar[str] = "offset_bias"
    periodic: ClassVar[bool] = True
    shared_params: ClassVar[tuple[str, ...]] = ("frequencies",)

    @nn.compact
    def __call__(self, grid: Grid, num_prefix: int) -> list[RelativeTables]:
        """Returns the tables of each layer."""
        del num_prefix
        if self.num_scales < 1:
            raise ValueError(
                f"position 'sincos_bias' needs num_scales >= 1, got {self.num_scales}"
            )
        pairs = len(grid) * self.num_scales
        if isinstance(grid, Torus):
            scales = jnp.arange(1, self.num_scales + 1, dtype=jnp.float32)
            axes = jnp.diag(sinusoids.turns(grid))
        else:
            scales = self.param(
                "frequencies",
                lambda _: sinusoids.length_scale_frequencies(self.num_scales),
            )
            axes = jnp.eye(len(grid), dtype=jnp.float32)
        coefficients = self.param(
            "coefficients",
            nn.initializers.normal(1.0),
            (self.num_layers, self.num_heads, pairs, 2),
            jnp.float32,
        )
        frequencies = jnp.kron(axes, scales[:, None])
        # A user's NumPy array must stay as it is.
        coefficients = coefficients * (self.head_dim + 2 * pairs) ** -0.5
        return _wave_layers(grid, frequencies, coefficients)


class FourierBias(Position):
    """Adds a bias that is a sum of learned plane waves of the offset.

    b(d) = sum_r a_r cos(w_r . d) + b_r sin(w_r . d). Each layer learns frequency
    vectors w_r, each layer and head coefficients. Unlike in `SincosBias`, a wave may
    have any direction. Initial values are w_r ~ 64^(-r / num_frequencies) N(0, I) and
    coefficients ~ N(0, 0.02^2), so that the bias is almost zero.

    On a torus the w_r are not learned: they are the longest waves that fit a whole
    number of times along all axes.

    Attributes:
        num_frequencies: Number of waves per layer.

    Example:
        >>> import jax
        >>> module = FourierBias(dim=8, num_heads=2, num_layers=3)
        >>> layers, _ = module.init_with_output(jax.random.key(0), (5,), 0)
        >>> len(layers), layers[0].bias.shape
        (3, (2, 9))

    Source:
        Rahimi and Recht, Random Features for Large-Scale Kernel Machines, section 3,
        with learned frequencies.
    """

    num_frequencies: int = 16
    site: ClassVar[str] = "offset_bias"
    periodic: ClassVar[bool] = True

    @nn.compact
    def __call__(self, grid: Grid, num_prefix: int) -> list[RelativeTables]:
        """Returns the tables of each layer."""
        del num_prefix
        if self.num_frequencies < 1:
            raise ValueError(
                "position 'fourier_bias' needs num_frequencies >= 1, got "
                f"{self.num_frequencies}"
            )
        scales = sinusoids.length_scale_frequencies(self.num_frequencies)

        def init(key, shape):
            # [layers, frequencies, axes]
            return scales[None, :, None] * nn.initializers.normal(1.0)(
                key, shape, jnp.float32
            )

        if isinstance(grid, Torus):
            frequencies = jnp.asarray(torus_frequencies(grid, self.num_frequencies))
        else:
            shape = (self.num_layers, self.num_frequencies, len(grid))
            frequencies = self.param("frequencies", init, shape)
        coefficients = self.param(
            "coefficients",
            nn.initializers.normal(0.02),
            (self.num_layers, self.num_heads, frequencies.shape[-2], 2),
            jnp.float32,
        )
        return _wave_layers(grid, frequencies, coefficients)

    def resize(self, params: Params, old: Grid, new: Grid, num_prefix: int) -> Params:
        """Returns the parameters; raises ValueError if a torus has other waves."""
        del num_prefix
        check_same_waves(self, old, new, self.num_frequencies)
        return params


def _wave_layers(grid, frequencies, coefficients):
    """Returns the bias of each layer; frequencies may lack the axis of layers."""
    rows = offsets.table_offsets(grid)
    if frequencies.ndim == 2:
        frequencies = [frequencies] * len(coefficients)
    return [
        RelativeTables(bias=wave_bias(rows, *wave))
        for wave in zip(frequencies, coefficients, strict=True)
    ]

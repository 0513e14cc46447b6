"""Rotary positions (RoPE) and STRING: rotate queries and keys by their positions.

The angles are fixed (`Rope1d`, `Rope2d`) or learned (`Rope2dMixed`, `CayleyString`,
`CirculantString`). Products of rotated queries and keys depend only on the offset
p_i - p_j. Prefix tokens are not rotated: products with them depend on the position.
`RotaryValues` rotates values by the offset.
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
from jaxtyping import Array, Float, Int, Key

from relattn import offsets
from relattn.kernels.positions import rotary, string
from relattn.nn.positions.base import Grid, LayerPosition, Position
from relattn.offsets import Torus


@flax.struct.dataclass
class RotatedHeads(LayerPosition):
    """Rotates the queries and keys of a layer; a subclass defines `rotate`.

    Attributes:
        angles: An angle for each token and pair of components, per head or for all.
    """

    angles: Float[Array, "*heads n pairs"]

    def rotate(self, x: Array) -> Array:
        """Rotates queries or keys."""
        raise NotImplementedError

    def __call__(self, q: Array, k: Array, x: Array) -> tuple[Array, Array]:
        """Rotates queries and keys."""
        del x
        return self.rotate(q), self.rotate(k)

    def slice(self, start: Int[Array, ""] | int, num_tokens: int) -> RotatedHeads:
        """Returns the angles of ``num_tokens`` tokens from position ``start`` on."""
        angles = jax.lax.dynamic_slice_in_dim(self.angles, start, num_tokens, axis=-2)
        return dataclasses.replace(self, angles=angles)


@flax.struct.dataclass
class RotaryHeads(RotatedHeads):
    """Rotates pairs of a head's components.

    Attributes:
        interleaved: Whether pairs are (2 t, 2 t + 1) instead of (t, t + head_dim / 2).
    """

    interleaved: bool = flax.struct.field(pytree_node=False, default=False)

    def rotate(self, x: Array) -> Array:
        """Rotates queries or keys."""
        return rotary.rotate(x, self.angles, interleaved=self.interleaved)


class Rope1d(Position):
    """Rotates queries and keys by position-dependent angles (RoPE), on a line.

    Pair t of a head's components is rotated by the angle w_t p_i with
    w_t = base^(-2 t / head_dim). The tokens of an image count row by row. No
    parameters.

    Attributes:
        base: The slowest frequency is nearly 1 / base.
        interleaved: Whether pairs are (2 t, 2 t + 1) instead of (t, t + head_dim / 2).
        factor: Divisor of the frequencies, for longer texts than those of training.
        original_length: Length of the texts of training: frequencies of at least 4
            turns in as many tokens stay, as in Llama 3.1; 0 to divide all.

    Example:
        >>> layers = Rope1d(dim=8, num_heads=2, num_layers=3).apply({}, (5,), 0)
        >>> q, k = layers[0](*jnp.ones((2, 1, 2, 5, 4)), jnp.ones((1, 5, 8)))
        >>> q.shape
        (1, 2, 5, 4)

    Source:
        Su et al., RoFormer, section 3.2.
    """

    base: float = 10000.0
    interleaved: bool = False
    factor: float = 1.0
    original_length: int = 0
    site: ClassVar[str] = "heads"
    takes_shared_keys: ClassVar[bool] = True

    @nn.compact
    def __call__(self, grid: Grid, num_prefix: int) -> list[RotaryHeads]:
        """Returns the angles of each layer, the same for all."""
        positions = np.arange(math.prod(grid), dtype=np.float32)
        angles = rotary.rotary_angles(
            np.pad(positions, (num_prefix, 0))[:, None],
            self.head_dim,
            base=self.base,
            factor=self.factor,
            original_length=self.original_length,
            num_prefix=num_prefix,
        )
        return [RotaryHeads(angles, self.interleaved)] * self.num_layers


class Rope2d(Position):
    """Rotates queries and keys by position-dependent angles (RoPE), on a grid.

    The row gives the angles of half of the pairs, the column those of the other half,
    with the frequencies w_t = base^(-t / num) for the num = head_dim / 4 pairs of each.
    On a grid of three axes, as of a video, each axis has a third of the pairs. The last
    axes have one more where they do not divide evenly. On a torus the frequencies are
    rounded to multiples of 2 pi / size, the first to at least one. No parameters.

    Attributes:
        base: The slowest frequency is nearly 1 / base.
        interleaved: Whether pairs are (2 t, 2 t + 1) instead of (t, t + head_dim / 2).

    Example:
        >>> layers = Rope2d(dim=8, num_heads=2, num_layers=3).apply({}, (2, 3), 1)
        >>> layers[0].angles.shape
        (7, 2)

    Source:
        Heo et al., Rotary Position Embedding for Vision Transformer, section 3.2; more
        axes: the same, as in Wang et al., Qwen2-VL.
    """

    base: float = 100.0
    interleaved: bool = False
    site: ClassVar[str] = "heads"
    periodic: ClassVar[bool] = True
    needs_plane: ClassVar[bool] = True
    takes_shared_keys: ClassVar[bool] = True

    @nn.compact
    def __call__(self, grid: Grid, num_prefix: int) -> list[RotaryHeads]:
        """Returns the angles of each layer, the same for all."""
        if num_prefix and isinstance(grid, Torus):
            raise ValueError(
                "position 'rope2d' depends on the position in its scores with CLS, so "
                "a torus needs it without: choose pool='mean'"
            )
        angles = rotary.rotary_angles(
            offsets.grid_positions(grid, num_prefix),
            self.head_dim,
            base=self.base,
            num_prefix=num_prefix,
            torus=grid if isinstance(grid, Torus) else None,
        )
        return [RotaryHeads(angles, self.interleaved)] * self.num_layers


class LearnedRotation(Position):
    """Base class of rotations with learned frequencies.

    Every layer and head has frequency vectors, with one component per axis. Their
    initial values are those of `relattn.kernels.draw_mixed_frequencies`.

    Attributes:
        base: Base of the initial series of frequencies; 0 for 10 on a grid and 10,000
            on a line.
    """

    base: float = 0.0
    site: ClassVar[str] = "heads"

    def draw(
        self, key: Key[Array, ""], num_frequencies: int, grid: Grid
    ) -> Float[Array, "layers heads frequencies axes"]:
        """Draws initial frequencies for every layer and head."""
        return rotary.draw_mixed_frequencies(
            key,
            num_frequencies,
            len(grid),
            leading=(self.num_layers, self.num_heads),
            base=self.base,
        )

    def angles(
        self, grid: Grid, num_prefix: int
    ) -> Float[Array, "layers heads n pairs"]:
        """Computes angles from the parameter ``frequencies``; for ``__call__``."""
        if self.head_dim % 2:
            raise ValueError(
                "rotary positions need an even head_dim (dim / num_heads), got "
                f"{self.head_dim}"
            )
        frequencies = self.param("frequencies", self.draw, self.head_dim // 2, grid)
        positions = offsets.grid_positions(grid, num_prefix)
        return rotary.mixed_rotary_angles(positions, frequencies, num_prefix=num_prefix)


class Rope2dMixed(LearnedRotation):
    """Rotates queries and keys by learned frequencies that mix the axes of a grid.

    Pair t of a head's components is rotated by the angle w_t . p_i; every layer and
    head learns its vectors w_t. The grid has two axes or more.

    Attributes:
        interleaved: Whether pairs are (2 t, 2 t + 1) instead of (t, t + head_dim / 2).

    Example:
        >>> import jax
        >>> module = Rope2dMixed(dim=12, num_heads=2, num_layers=3)
        >>> layers, _ = module.init_with_output(jax.random.key(0), (2, 3), 1)
        >>> layers[0].angles.shape
        (2, 7, 3)

    Source:
        Heo et al., Rotary Position Embedding for Vision Transformer, section 3.3.
    """

    interleaved: bool = False
    needs_plane: ClassVar[bool] = True

    @nn.compact
    def __call__(self, grid: Grid, num_prefix: int) -> list[RotaryHeads]:
        """Returns the angles of each layer."""
        angles = self.angles(grid, num_prefix)
        return [RotaryHeads(layer, self.interleaved) for layer in angles]


@flax.struct.dataclass
class CayleyHeads(RotatedHeads):
    """Rotates the queries and keys of a layer in a learned basis (Cayley-STRING).

    Attributes:
        matrix: The learned basis of each head.
    """

    matrix: Float[Array, "heads head_dim head_dim"]

    def rotate(self, x: Array) -> Array:
        """Rotates queries or keys."""
        return string.cayley_string(x, self.angles, self.matrix)


class CayleyString(LearnedRotation):
    """Rotates queries and keys in a learned orthogonal basis, on a grid or a line.

    R(p) = P RoPE(p) P^T = exp(sum_axis p_axis L_axis), P = (I - S) (I + S)^-1. Every
    layer and head learns a skew-symmetric S, which starts at zero, and the frequencies
    of `Rope2dMixed`.

    Example:
        >>> import jax
        >>> module = CayleyString(dim=12, num_heads=2, num_layers=3)
        >>> layers, _ = module.init_with_output(jax.random.key(0), (5,), 0)
        >>> layers[0].angles.shape, layers[0].matrix.shape
        ((2, 5, 3), (2, 6, 6))

    Source:
        Schenck et al., Learning the RoPEs: Better 2D and 3D Position Encodings with
        STRING, section 3 (Cayley-STRING).
    """

    @nn.compact
    def __call__(self, grid: Grid, num_prefix: int) -> list[CayleyHeads]:
        """Returns angles and basis of each layer."""
        angles = self.angles(grid, num_prefix)
        entries = self.head_dim * (self.head_dim - 1) // 2
        shape = (self.num_layers, self.num_heads, entries)
        skew = self.param("skew", nn.initializers.zeros, shape, jnp.float32)
        matrices = string.cayley_matrix(skew)
        return [CayleyHeads(*layer) for layer in zip(angles, matrices, strict=True)]


@flax.struct.dataclass
class CirculantHeads(RotatedHeads):
    """Rotates the queries and keys of a layer by FFT (Circulant-STRING)."""

    def rotate(self, x: Array) -> Array:
        """Rotates queries or keys."""
        return string.circulant_string(x, self.angles)


class CirculantString(LearnedRotation):
    """Rotates queries and keys by learned circulant generators, on a grid or a line.

    R(p) = exp(sum_axis p_axis L_axis), L = C - C^T. Every layer, head and axis learns a
    circulant matrix C. R is applied by FFT in O(head_dim log head_dim). It starts as a
    rotation of Fourier components with the frequencies of `Rope2dMixed`.

    Example:
        >>> import jax
        >>> module = CirculantString(dim=10, num_heads=2, num_layers=3)
        >>> layers, variables = module.init_with_output(jax.random.key(0), (2, 3), 1)
        >>> layers[0].angles.shape, variables["params"]["circulants"].shape
        ((2, 7, 3), (3, 2, 2, 5))

    Source:
        Schenck et al., Learning the RoPEs: Better 2D and 3D Position Encodings with
        STRING, section 3 (Circulant-STRING).
    """

    @nn.compact
    def __call__(self, grid: Grid, num_prefix: int) -> list[CirculantHeads]:
        """Returns the angles of each layer."""

        def init(key: Key[Array, ""]) -> Array:
            if self.head_dim < 3:
                raise ValueError(
                    "position 'circulant_string' needs a head_dim (dim / num_heads) of "
                    f"at least 3, got {self.head_dim}"
                )
            frequencies = self.draw(key, (self.head_dim - 1) // 2, grid)
            return string.circulants_of(frequencies, self.head_dim)

        angles = string.circulant_angles(
            offsets.grid_positions(grid, num_prefix),
            self.param("circulants", init),
            num_prefix=num_prefix,
        )
        return [CirculantHeads(layer) for layer in angles]


@flax.struct.dataclass
class RotatedValues(LayerPosition):
    """Rotates the values of a layer, and its outputs back.

    Attributes:
        angles: An angle for each token and pair of components, per head or for all.
        num_prefix: Number of prefix tokens.
        interleaved: Whether pairs are (2 t, 2 t + 1) instead of (t, t + head_dim / 2).
    """

    angles: Float[Array, "*heads n pairs"]
    num_prefix: int = flax.struct.field(pytree_node=False, default=0)
    interleaved: bool = flax.struct.field(pytree_node=False, default=False)

    def widen_values(self, v: Array, x: Array) -> Array:
        """Rotates values; with prefix tokens, keeps unrotated ones too."""
        del x
        return rotary.widen_rotary_values(v, self.angles, **self._options)

    def combine_values(self, out: Array) -> Array:
        """Rotates outputs back."""
        return rotary.combine_rotary_values(out, self.angles, **self._options)

    def slice(self, start: Int[Array, ""] | int, num_tokens: int) -> RotatedValues:
        """Returns the angles of ``num_tokens`` tokens from position ``start`` on."""
        angles = jax.lax.dynamic_slice_in_dim(self.angles, start, num_tokens, axis=-2)
        return dataclasses.replace(self, angles=angles)

    @property
    def _options(self):
        return {"num_prefix": self.num_prefix, "interleaved": self.interleaved}


class RotaryValues(LearnedRotation):
    """Rotates values by their positions, and outputs back (RoVE).

    out_i = R(-p_i) sum_j alpha_ij R(p_j) v_j: a value is rotated by the offset before
    it is added. With the rotations of queries and keys, ``"rope1d + rotary_values"`` or
    ``"rope2d + rotary_values"``, this is RoVE. On a grid the angles are those of
    `Rope2d`, on a line those of `Rope1d`; there are no parameters. With ``learned``
    they are those of `Rope2dMixed`, with frequencies for every layer and head.

    Prefix tokens have no position: values are not rotated in pairs with one. That takes
    values of three times the width, only where there are prefix tokens.

    Attributes:
        base: Base of the series of frequencies, or of their initial values; 0 for
            10,000 on a line and 100 on a grid, or 10 if ``learned``.
        learned: Whether the frequencies are learned.
        interleaved: Whether pairs are (2 t, 2 t + 1) instead of (t, t + head_dim / 2).

    Example:
        >>> layers = RotaryValues(dim=8, num_heads=2, num_layers=3).apply({}, (5,), 0)
        >>> v = layers[0].widen_values(jnp.ones((1, 2, 5, 4)), jnp.ones((1, 5, 8)))
        >>> v.shape
        (1, 2, 5, 4)

    Source:
        Garcia-Castellanos et al., RoVE, without prefix tokens; the angles of two axes
        are those of Heo et al., Rotary Position Embedding for Vision Transformer.
    """

    learned: bool = False
    interleaved: bool = False
    site: ClassVar[str] = "values"

    @property
    def periodic(self) -> bool:
        """Whether the frequencies are fixed, and so rounded to those of a torus."""
        return not self.learned

    @property
    def takes_shared_keys(self) -> bool:
        """Whether the frequencies are fixed, and so the same for all heads."""
        return not self.learned

    @nn.compact
    def __call__(self, grid: Grid, num_prefix: int) -> list[RotatedValues]:
        """Returns the angles of each layer."""
        if self.learned:
            angles = list(self.angles(grid, num_prefix))
        else:
            fixed = rotary.rotary_angles(
                offsets.grid_positions(grid, num_prefix),
                self.head_dim,
                base=self.base or (10000.0 if len(grid) == 1 else 100.0),
                num_prefix=num_prefix,
                torus=grid if isinstance(grid, Torus) else None,
            )
            angles = [fixed] * self.num_layers
        return [RotatedValues(layer, num_prefix, self.interleaved) for layer in angles]

"""Rotations with learned frequencies: RoPE that mixes the axes, and STRING."""

from __future__ import annotations

from typing import ClassVar

import flax
import flax.linen as nn
from jaxtyping import Array, Float, Key

from relattn import offsets
from relattn.kernels import rotary, string_encodings
from relattn.nn.positions import Grid, Position
from relattn.nn.relative_positions import RotaryHeads, TurnedHeads, check_plane


class LearnedRotation(Position):
    """What rotations with learned frequencies share: how these start.

    Every layer and head has frequencies of its own, vectors of the axes; those of
    `relattn.kernels.draw_mixed_frequencies` at the start.

    Attributes:
        base: Of the series of frequencies; 0 is 10 on a grid and 10,000 on a line.
    """

    base: float = 0.0
    site: ClassVar[str] = "heads"

    @property
    def depth(self) -> int:
        """Width of a head."""
        return self.dim // self.heads

    def draw(
        self, key: Key[Array, ""], num_frequencies: int, grid: Grid
    ) -> Float[Array, "layers heads frequencies axes"]:
        """Frequencies at the start, for every layer and head."""
        return rotary.draw_mixed_frequencies(
            key,
            num_frequencies,
            len(grid),
            leading=(self.num_layers, self.heads),
            base=self.base,
        )

    def angles(
        self, grid: Grid, num_prefix: int
    ) -> Float[Array, "layers heads n pairs"]:
        """Angles of the tokens from the parameter ``frequencies``; in ``__call__``."""
        if self.depth % 2:
            raise ValueError(
                "rotary positions need an even head depth (dim / heads), got "
                f"{self.depth}"
            )
        frequencies = self.param("frequencies", self.draw, self.depth // 2, grid)
        positions = offsets.grid_positions(grid, num_prefix)
        return rotary.mixed_rotary_angles(positions, frequencies, num_prefix=num_prefix)


class Rope2dMixed(LearnedRotation):
    """Rotary positions on a grid with learned frequencies that mix its axes.

    Pair t of a head's numbers turns by w_t . p_i, w_t learned for every layer and head,
    so that products depend on p_i - p_j only. Prefix tokens do not turn.

    Attributes:
        interleaved: Pairs are neighbours (2 t, 2 t + 1), not (t, t + depth / 2).

    Example:
        >>> import jax
        >>> module = Rope2dMixed(dim=12, heads=2, num_layers=3)
        >>> layers, _ = module.init_with_output(jax.random.key(0), (2, 3), 1)
        >>> layers[0].angles.shape
        (2, 7, 3)

    Source:
        Heo et al., Rotary Position Embedding for Vision Transformer, section 3.3.
    """

    interleaved: bool = False

    @nn.compact
    def __call__(self, grid: Grid, num_prefix: int) -> list[RotaryHeads]:
        """The angles of every layer."""
        check_plane("rope2d_mixed", grid)
        angles = self.angles(grid, num_prefix)
        return [RotaryHeads(layer, self.interleaved) for layer in angles]


@flax.struct.dataclass
class CayleyHeads(TurnedHeads):
    """Cayley-STRING in one layer.

    Attributes:
        matrix: The learned basis of each head.
    """

    matrix: Float[Array, "heads depth depth"]

    def turn(self, x: Array) -> Array:
        """Queries or keys, turned."""
        return string_encodings.cayley_string(x, self.angles, self.matrix)


class CayleyString(LearnedRotation):
    """Cayley-STRING: rotary positions in a learned orthogonal basis, on grid or line.

    R(p) = P RoPE(p) P^T = exp(sum_axis p_axis L_axis), P = (I - S) (I + S)^-1 with a
    learned skew-symmetric S for every layer and head, zero at the start; frequencies as
    `Rope2dMixed`. Products depend on p_i - p_j only. Prefix tokens do not turn.

    Example:
        >>> import jax
        >>> module = CayleyString(dim=12, heads=2, num_layers=3)
        >>> layers, _ = module.init_with_output(jax.random.key(0), (5,), 0)
        >>> layers[0].angles.shape, layers[0].matrix.shape
        ((2, 5, 3), (2, 6, 6))

    Source:
        Schenck et al., Learning the RoPEs: Better 2D and 3D Position Encodings with
        STRING, section 3 (Cayley-STRING).
    """

    @nn.compact
    def __call__(self, grid: Grid, num_prefix: int) -> list[CayleyHeads]:
        """Angles and basis of every layer."""
        angles = self.angles(grid, num_prefix)
        entries = self.depth * (self.depth - 1) // 2
        shape = (self.num_layers, self.heads, entries)
        skew = self.param("skew", nn.initializers.zeros, shape)
        matrices = string_encodings.cayley_matrix(skew)
        return [CayleyHeads(*layer) for layer in zip(angles, matrices, strict=True)]


@flax.struct.dataclass
class CirculantHeads(TurnedHeads):
    """Circulant-STRING in one layer."""

    def turn(self, x: Array) -> Array:
        """Queries or keys, turned."""
        return string_encodings.circulant_string(x, self.angles)


class CirculantString(LearnedRotation):
    """Circulant-STRING: learned commuting circulant generators, on grid or line.

    R(p) = exp(sum_axis p_axis L_axis), L = C - C^T with a learned circulant matrix C
    for every layer, head and axis, applied by FFT in O(depth log depth). It starts as
    a rotation of Fourier components with the frequencies of `Rope2dMixed`. Products
    depend on p_i - p_j only. Prefix tokens do not turn.

    Example:
        >>> import jax
        >>> module = CirculantString(dim=10, heads=2, num_layers=3)
        >>> layers, variables = module.init_with_output(jax.random.key(0), (2, 3), 1)
        >>> layers[0].angles.shape, variables["params"]["circulants"].shape
        ((2, 7, 3), (3, 2, 2, 5))

    Source:
        Schenck et al., Learning the RoPEs: Better 2D and 3D Position Encodings with
        STRING, section 3 (Circulant-STRING).
    """

    @nn.compact
    def __call__(self, grid: Grid, num_prefix: int) -> list[CirculantHeads]:
        """The angles of every layer."""

        def init(key: Key[Array, ""]) -> Array:
            if self.depth < 3:
                raise ValueError(
                    "position 'circulant_string' needs a head depth (dim / heads) of "
                    f"at least 3, got {self.depth}"
                )
            frequencies = self.draw(key, (self.depth - 1) // 2, grid)
            return string_encodings.circulants_of(frequencies, self.depth)

        angles = string_encodings.circulant_angles(
            offsets.grid_positions(grid, num_prefix),
            self.param("circulants", init),
            num_prefix=num_prefix,
        )
        return [CirculantHeads(layer) for layer in angles]

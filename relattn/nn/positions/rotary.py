"""Rotations of queries and keys by position-dependent angles: RoPE and STRING."""

from __future__ import annotations

import math
from typing import ClassVar

import flax
import flax.linen as nn
import jax
import numpy as np
from jaxtyping import Array, Float, Int, Key

from relattn import offsets
from relattn.kernels.positions import rotary, string
from relattn.nn.positions.base import Grid, LayerPosition, Position


@flax.struct.dataclass
class RotatedHeads(LayerPosition):
    """Turns the queries and keys of a layer; a subclass defines `turn`.

    Attributes:
        angles: One for each token and pair of a head's numbers, of all heads or each.
    """

    angles: Float[Array, "*heads n pairs"]

    def rotate(self, x: Array) -> Array:
        """Queries or keys, turned."""
        raise NotImplementedError

    def __call__(self, q: Array, k: Array, x: Array) -> tuple[Array, Array]:
        """Turned queries and keys."""
        del x
        return self.rotate(q), self.rotate(k)

    def slice(self, start: Int[Array, ""] | int, num_tokens: int) -> RotatedHeads:
        """Returns the angles of ``num_tokens`` tokens from position ``start`` on."""
        angles = jax.lax.dynamic_slice_in_dim(self.angles, start, num_tokens, axis=-2)
        return self.replace(angles=angles)


@flax.struct.dataclass
class RotaryHeads(RotatedHeads):
    """Turns pairs of a head's numbers.

    Attributes:
        interleaved: As in `relattn.kernels.rotate`.
    """

    interleaved: bool = flax.struct.field(pytree_node=False, default=False)

    def rotate(self, x: Array) -> Array:
        """Queries or keys, turned."""
        return rotary.rotate(x, self.angles, interleaved=self.interleaved)


class Rope1d(Position):
    """Rotary positions along a line; the tokens of an image count row by row.

    Queries and keys turn, pair by pair of a head's numbers, by angles w_t p_i with
    w_t = base^(-2 t / head_dim), so that their products depend on p_i - p_j only.
    Prefix tokens do not turn, so that products with theirs depend on the place. No
    parameters.

    Attributes:
        base: The slowest frequency is nearly 1 / base.
        interleaved: Pairs are neighbours (2 t, 2 t + 1), not (t, t + head_dim / 2).

    Example:
        >>> import jax.numpy as jnp
        >>> layers = Rope1d(dim=8, num_heads=2, num_layers=3).apply({}, (5,), 0)
        >>> q, k = layers[0](*jnp.ones((2, 1, 2, 5, 4)), jnp.ones((1, 5, 8)))
        >>> q.shape
        (1, 2, 5, 4)

    Source:
        Su et al., RoFormer, section 3.2.
    """

    base: float = 10000.0
    interleaved: bool = False
    site: ClassVar[str] = "heads"

    @nn.compact
    def __call__(self, grid: Grid, num_prefix: int) -> list[RotaryHeads]:
        """The angles of every layer, the same for all."""
        places = np.arange(math.prod(grid), dtype=np.float32)
        return _rotary_layers(
            self, np.pad(places, (num_prefix, 0))[:, None], num_prefix
        )


class Rope2d(Position):
    """Rotary positions on a grid: half of the pairs turn by row, half by column.

    As `Rope1d` in each half, with frequencies base^(-t / (head_dim / 4)). Prefix tokens
    do not turn. No parameters.

    Attributes:
        base: The slowest frequency is nearly 1 / base.
        interleaved: Pairs are neighbours (2 t, 2 t + 1), not (t, t + head_dim / 2).

    Example:
        >>> layers = Rope2d(dim=8, num_heads=2, num_layers=3).apply({}, (2, 3), 1)
        >>> layers[0].angles.shape
        (7, 2)

    Source:
        Heo et al., Rotary Position Embedding for Vision Transformer, section 3.2.
    """

    base: float = 100.0
    interleaved: bool = False
    site: ClassVar[str] = "heads"

    @nn.compact
    def __call__(self, grid: Grid, num_prefix: int) -> list[RotaryHeads]:
        """The angles of every layer, the same for all."""
        check_plane("rope2d", grid)
        return _rotary_layers(
            self, offsets.grid_positions(grid, num_prefix), num_prefix
        )


def check_plane(name: str, grid: Grid) -> None:
    """Raises unless tokens lie on a grid of two axes.

    Args:
        name: Of the position, for the message.
        grid: Height and width, in tokens.

    Raises:
        ValueError: If it is a line.

    Example:
        >>> check_plane("rope2d", (2, 3))
    """
    if len(grid) != 2:
        raise ValueError(
            f"position {name!r} needs tokens on a grid of height and width, got a "
            f"line of {grid[0]}; choose 'rope1d'"
        )


def _rotary_layers(
    module: Rope1d | Rope2d, positions: Float[np.ndarray, "n axes"], num_prefix: int
) -> list[RotaryHeads]:
    angles = rotary.rotary_angles(
        positions,
        module.dim // module.num_heads,
        base=module.base,
        num_prefix=num_prefix,
    )
    return [RotaryHeads(angles, module.interleaved)] * module.num_layers


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
    def head_dim(self) -> int:
        """Width of a head."""
        return self.dim // self.num_heads

    def draw(
        self, key: Key[Array, ""], num_frequencies: int, grid: Grid
    ) -> Float[Array, "layers heads frequencies axes"]:
        """Frequencies at the start, for every layer and head."""
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
        """Angles of the tokens from the parameter ``frequencies``; in ``__call__``."""
        if self.head_dim % 2:
            raise ValueError(
                "rotary positions need an even head_dim (dim / num_heads), got "
                f"{self.head_dim}"
            )
        frequencies = self.param("frequencies", self.draw, self.head_dim // 2, grid)
        positions = offsets.grid_positions(grid, num_prefix)
        return rotary.mixed_rotary_angles(positions, frequencies, num_prefix=num_prefix)


class Rope2dMixed(LearnedRotation):
    """Rotary positions on a grid with learned frequencies that mix its axes.

    Pair t of a head's numbers turns by w_t . p_i, w_t learned for every layer and head,
    so that products depend on p_i - p_j only. Prefix tokens do not turn.

    Attributes:
        interleaved: Pairs are neighbours (2 t, 2 t + 1), not (t, t + head_dim / 2).

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

    @nn.compact
    def __call__(self, grid: Grid, num_prefix: int) -> list[RotaryHeads]:
        """The angles of every layer."""
        check_plane("rope2d_mixed", grid)
        angles = self.angles(grid, num_prefix)
        return [RotaryHeads(layer, self.interleaved) for layer in angles]


@flax.struct.dataclass
class CayleyHeads(RotatedHeads):
    """Cayley-STRING in one layer.

    Attributes:
        matrix: The learned basis of each head.
    """

    matrix: Float[Array, "heads head_dim head_dim"]

    def rotate(self, x: Array) -> Array:
        """Queries or keys, turned."""
        return string.cayley_string(x, self.angles, self.matrix)


class CayleyString(LearnedRotation):
    """Cayley-STRING: rotary positions in a learned orthogonal basis, on grid or line.

    R(p) = P RoPE(p) P^T = exp(sum_axis p_axis L_axis), P = (I - S) (I + S)^-1 with a
    learned skew-symmetric S for every layer and head, zero at the start; frequencies as
    `Rope2dMixed`. Products depend on p_i - p_j only. Prefix tokens do not turn.

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
        """Angles and basis of every layer."""
        angles = self.angles(grid, num_prefix)
        entries = self.head_dim * (self.head_dim - 1) // 2
        shape = (self.num_layers, self.num_heads, entries)
        skew = self.param("skew", nn.initializers.zeros, shape)
        matrices = string.cayley_matrix(skew)
        return [CayleyHeads(*layer) for layer in zip(angles, matrices, strict=True)]


@flax.struct.dataclass
class CirculantHeads(RotatedHeads):
    """Circulant-STRING in one layer."""

    def rotate(self, x: Array) -> Array:
        """Queries or keys, turned."""
        return string.circulant_string(x, self.angles)


class CirculantString(LearnedRotation):
    """Circulant-STRING: learned commuting circulant generators, on grid or line.

    R(p) = exp(sum_axis p_axis L_axis), L = C - C^T with a learned circulant matrix C
    for every layer, head and axis, applied by FFT in O(head_dim log head_dim). It
    starts as a rotation of Fourier components with the frequencies of `Rope2dMixed`.
    Products depend on p_i - p_j only. Prefix tokens do not turn.

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
        """The angles of every layer."""

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

"""A row of the table of mechanisms, and the sizes of its inputs."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from relattn.offsets import Torus

BATCH, HEADS, N, M, HEAD_DIM, VALUE_DIM, NUM_FEATURES = 3, 2, 13, 11, 5, 7, 17
GRID, NUM_PREFIX = (3, 4), 1
TORUS = Torus(GRID)
# As many tokens as on `GRID`.
VOLUME = (2, 3, 2)
# Words of errors for a symbolic number of tokens.
GRID_HAS_FIXED_LENGTH = "with a grid, only the batch"
HAS_FIXED_LENGTH = "has a fixed number of tokens"


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """A mechanism, its reference, and the properties that contracts depend on.

    Attributes:
        name: Name of the mechanism, in test ids and tables.
        apply: Maps inputs, each ``[*batch, tokens, width]``, and ``key_mask=`` to
            outputs ``[*batch, n, width]``.
        naive: The reference: maps inputs without batch axes, and the keys that a
            query may attend to, ``[n, m]``, to outputs.
        shapes: Shape of every input, by name, without batch axes.
        shared: Inputs that never have batch axes: parameters.
        key_inputs: Inputs with a row for every key.
        scaled_input: The input in which one row is scaled by 20.
        causal: Whether a token attends only to itself and earlier tokens.
        on_grid: Whether the number of tokens is fixed by a grid.
        before_mask: Parameters that act on keys before the mask does, so that masked
            keys affect their gradients.
        queries_from_keys: Whether a token's query and key come from the same input, so
            that outputs of masked tokens are not compared.
        masks_queries: Whether the mask is one of tokens: NaN in the query of a masked
            token, too, reaches nothing. So it is where ``causal``.
        roundings: About how often outputs and gradients are rounded to the dtype of the
            inputs: more than once if an encoding returns that dtype, or an input has
            several uses, each with a gradient.
        scatters: Whether a scatter remains in the kernel, or its derivative, off CPUs,
            where scatters that add to few rows are slow.
        estimate: Maps a projection to estimates of the unnormalised kernel; None if
            nothing is random.
        expected: Returns the mean that `estimate` must have.
        fixed_length: Words of the error for a symbolic number of tokens; "" if the
            kernel takes one. Encodings have an array of positions instead, which the
            caller makes for one grid.
        length_bounds: Bounds that a symbolic number of tokens needs: of tables, and of
            a cluster's window.
        quick: Whether `make test` tests all contracts of the row: so for one of every
            kernel. The others differ by features, an encoding, a mask or an option; for
            them it compares only values and gradients with the reference.
        used_by: The attentions and position encodings of relattn.nn that compute with
            it, by name; a grid of one axis has no row in the tables, and needs none.
    """

    name: str
    apply: Callable
    naive: Callable
    shapes: dict[str, tuple[int, ...]]
    shared: tuple[str, ...] = ()
    key_inputs: tuple[str, ...] = ("k", "v")
    scaled_input: str = "k"
    causal: bool = False
    on_grid: bool = False
    before_mask: tuple[str, ...] = ()
    queries_from_keys: bool = False
    masks_queries: bool = False
    roundings: tuple[int, int] = (1, 1)
    scatters: bool = False
    estimate: Callable | None = None
    expected: Callable | None = None
    fixed_length: str = ""
    length_bounds: tuple[str, ...] = ()
    quick: bool = False
    used_by: tuple[str, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "masks_queries", self.masks_queries or self.causal)

    def __str__(self):
        return self.name

    def draw_inputs(self, *leading, dtype=np.float32):
        """Draws NumPy arrays: making one of JAX compiles a program for its shape."""
        inputs = {}
        for seed, (name, shape) in enumerate(self.shapes.items()):
            shape = shape if name in self.shared else (*leading, *shape)
            values = 0.5 * np.random.default_rng(seed).standard_normal(shape)
            inputs[name] = np.asarray(values, dtype)
        return inputs

    def kernel_and_inputs(self, key_mask=None):
        """Returns a function of arrays with one leading axis, and the arrays."""
        # vmap gives parameters a leading axis too.
        inputs = dataclasses.replace(self, shared=()).draw_inputs(HEADS)

        def apply(*arrays):
            named = dict(zip(inputs, arrays, strict=True))
            mask = None if key_mask is None else jnp.asarray(key_mask)
            return self.apply(**named, key_mask=mask)

        return jax.vmap(apply) if self.shared else apply, list(inputs.values())

    @property
    def num_keys(self):
        return self.shapes[self.key_inputs[0]][0]

    def key_mask(self):
        return np.arange(self.num_keys) % 4 != 2

    def allowed(self, key_mask):
        allowed = np.broadcast_to(key_mask, (N, self.num_keys))
        return np.tril(allowed) if self.causal else allowed

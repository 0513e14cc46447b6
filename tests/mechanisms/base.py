"""What the contracts of test_contracts.py must know of a mechanism, and their sizes."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

BATCH, HEADS, N, M, HEAD_DIM, VALUE_DIM, NUM_FEATURES = 3, 2, 13, 11, 5, 7, 17
GRID, NUM_PREFIX = (3, 4), 1


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """A mechanism and what a contract has to know of it.

    Attributes:
        name: Of the test.
        apply: From inputs, each ``[*batch, tokens, width]``, and ``key_mask=`` to
            outputs ``[*batch, n, width]``.
        naive: The reference: from inputs without leading axes, and which keys a query
            may attend to, ``[n, m]``.
        shapes: Shape of every input, by name, without leading axes.
        shared: Inputs that never have leading axes: parameters.
        key_inputs: Inputs that hold a row for every key.
        loud: The input in which one row is scaled by 20.
        causal: Whether a token sees only itself and those before it.
        on_grid: Whether the number of tokens is fixed by a grid.
        before_mask: Parameters that change keys before the mask is known, so that what
            masked keys hold reaches their gradients.
        queries_from_keys: Whether a token's query comes from the same input as its key,
            so that outputs of masked tokens are not compared.
        roundings: About how often outputs and gradients are rounded to the dtype of the
            inputs: more than once where an encoding returns that dtype, or an input has
            several uses, each with a gradient.
        estimate: From a projection, estimates of the unnormalised kernel, all of
            `expected`; None where nothing is random.
        expected: What `estimate` must be on average.
    """

    name: str
    apply: Callable
    naive: Callable
    shapes: dict[str, tuple[int, ...]]
    shared: tuple[str, ...] = ()
    key_inputs: tuple[str, ...] = ("k", "v")
    loud: str = "k"
    causal: bool = False
    on_grid: bool = False
    before_mask: tuple[str, ...] = ()
    queries_from_keys: bool = False
    roundings: tuple[int, int] = (1, 1)
    estimate: Callable | None = None
    expected: Callable | None = None

    def __str__(self):
        return self.name

    def draw_inputs(self, *leading, dtype=jnp.float32):
        inputs = {}
        for seed, (name, shape) in enumerate(self.shapes.items()):
            shape = shape if name in self.shared else (*leading, *shape)
            values = 0.5 * np.random.default_rng(seed).standard_normal(shape)
            inputs[name] = jnp.asarray(values.astype(dtype))
        return inputs

    @property
    def num_keys(self):
        return self.shapes[self.key_inputs[0]][0]

    def key_mask(self):
        return np.arange(self.num_keys) % 4 != 2

    def allowed(self, key_mask):
        allowed = np.broadcast_to(key_mask, (N, self.num_keys))
        return np.tril(allowed) if self.causal else allowed

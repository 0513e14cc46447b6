"""Linformer: softmax attention to keys and values projected along the sequence."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ClassVar

import flax.linen as nn
from jaxtyping import Array, Float

from relattn import offsets
from relattn.kernels import linformer
from relattn.messages import check_choice
from relattn.nn.attention import Context, MultiHeadAttention
from relattn.nn.positions.base import grid_table

SHARINGS = ("none", "heads", "key_value", "layers")


def _projection(
    module: nn.Module, name: str, shape: tuple[int, ...], grid: offsets.Grid | None
) -> Float[Array, "*heads k n"]:
    """Returns a parameter uniform in +-1/sqrt(k), as in the package ``linformer``."""
    n = shape[-1]
    heads = tuple(range(len(shape) - 2))
    init = nn.initializers.variance_scaling(
        1 / 3, "fan_in", "uniform", in_axis=-2, out_axis=-1, batch_axis=heads
    )
    return grid_table(module, name, init, shape, grid or (n,), whose="Linformer's")


class SharedProjection(nn.Module):
    """The matrix E = F that all layers share; a module of the model.

    Attributes:
        k: Number of projected keys.

    Example:
        >>> import jax
        >>> SharedProjection(3).init_with_output(jax.random.key(0), 7, (2, 3))[0].shape
        (3, 7)
    """

    k: int

    @nn.compact
    def __call__(self, n: int, grid: offsets.Grid | None) -> Float[Array, "k n"]:
        """Returns the projection for a sequence of n tokens."""
        return _projection(self, "projection", (self.k, n), grid)


class LinformerAttention(MultiHeadAttention):
    """Attends to k projected keys and values.

    softmax(q (E k)^T / sqrt(head_dim)) F v, with learned E and F of shape [k, n].

    E and F belong to one sequence length, prefix tokens included.

    Attributes:
        k: Number of projected keys. It may be larger than n, as in the baseline of Horn
            et al.; that saves nothing.
        sharing: ``"none"``: every head has an E and an F; ``"heads"``: the heads share
            them; ``"key_value"``: E = F; ``"layers"``: all layers share one matrix.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jnp.ones((1, 7, 8))
        >>> module = LinformerAttention(dim=8, num_heads=2, k=3)
        >>> out, variables = module.init_with_output(jax.random.key(0), x)
        >>> out.shape, variables["params"]["key_projection"].shape
        ((1, 7, 8), (2, 3, 7))

    Source:
        Wang et al., Linformer: Self-Attention with Linear Complexity, section 4.
    """

    k: int = 64
    sharing: str = "none"
    sites: ClassVar[tuple[str, ...]] = ("none", "tokens", "values")
    scannable: ClassVar[bool] = True
    has_grid_tables: ClassVar[bool] = True

    @nn.nowrap
    def check(self) -> None:
        """Raises ValueError if the attributes are invalid."""
        super().check()
        if self.k < 1:
            raise ValueError(f"attention 'linformer' needs k >= 1, got {self.k}")
        check_choice("sharing", self.sharing, SHARINGS, " of attention 'linformer'")

    @nn.nowrap
    def make_shared(self) -> Callable[..., nn.Module] | None:
        """Returns the constructor of all layers' projection if ``sharing="layers"``."""
        if self.sharing != "layers":
            return None
        return functools.partial(SharedProjection, self.k)

    def attend(
        self,
        q: Float[Array, "batch heads n head_dim"],
        k: Float[Array, "batch heads n head_dim"],
        v: Float[Array, "batch heads n value_dim"],
        context: Context,
    ) -> Float[Array, "batch heads n value_dim"]:
        """Computes attention to projected keys and values."""
        matrices = self.projections(k.shape[-2], context)
        return linformer.linformer_attention(
            q,
            k,
            v,
            *(matrix.astype(self.dtype) for matrix in matrices),
            key_mask=context.key_mask,
        )

    def projections(self, n: int, context: Context) -> tuple[Array, Array]:
        """Returns E and F, with or without an axis of heads."""
        if self.sharing == "layers":
            if context.shared is None:
                raise ValueError(
                    "attention 'linformer' with sharing='layers' needs the model's "
                    "projection: pass shared="
                )
            return context.shared, context.shared
        if self.sharing == "key_value":
            matrix = _projection(self, "projection", (self.k, n), context.grid)
            return matrix, matrix
        heads = (self.num_heads,) if self.sharing == "none" else ()
        e, f = (
            _projection(self, f"{name}_projection", (*heads, self.k, n), context.grid)
            for name in ("key", "value")
        )
        return e, f

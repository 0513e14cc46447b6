"""What `relattn.evaluation.speed` can measure: kernels and what they compare with.

A kernel is added by one entry of `CASES`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from relattn import kernels, offsets


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of one measurement.

    Attributes:
        length: Number of tokens, a CLS token of the banded kernels aside.
        batch: Examples.
        heads: Heads.
        depth: Width of a head.
        clip: The largest distance told apart by the banded kernels.
        dtype: Of queries, keys and values.
        num_features: Random features, 0 for int(depth * ln(depth)).
    """

    length: int
    batch: int = 2
    heads: int = 8
    depth: int = 32
    clip: int = 6
    dtype: str = "float32"
    num_features: int = 0

    @property
    def grid(self) -> offsets.Grid:
        """The grid of ``length`` tokens that is nearest to a square.

        Example:
            >>> Sizes(length=15).grid
            (3, 5)
        """
        height = math.isqrt(self.length)
        while self.length % height:
            height -= 1
        return height, self.length // height


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing that can be measured.

    Attributes:
        make: From sizes to a function of q, k, v (and more) and its arguments.
        framework: ``"jax"``, or ``"torch"`` where they are PyTorch's.
        score_matrices: How many arrays of one float32 for every pair of tokens are
            alive at once, forward and forward + backward.
        requires: Modules that the case imports, beyond the package's own.
    """

    make: Callable[[Sizes], tuple[Callable[..., Any], Sequence[Any]]]
    framework: str = "jax"
    score_matrices: tuple[int, int] = (0, 0)
    requires: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        """The modules that are not installed."""
        return [name for name in self.requires if not importlib.util.find_spec(name)]

    def score_bytes(self, sizes: Sizes, *, backward: bool) -> int:
        """Estimate of the memory that scores of all pairs of tokens take."""
        pairs = sizes.batch * sizes.heads * sizes.length**2
        return 4 * pairs * self.score_matrices[backward]


def _arrays(sizes: Sizes, num_prefix: int = 0) -> list[np.ndarray]:
    """Queries, keys and values, [batch, heads, num_prefix + length, depth]."""
    generator = np.random.default_rng(0)
    shape = (3, sizes.batch, sizes.heads, num_prefix + sizes.length, sizes.depth)
    return list(generator.standard_normal(shape, np.float32))


def _on_device(sizes: Sizes, num_prefix: int = 0) -> list[jax.Array]:
    return [jnp.asarray(x, sizes.dtype) for x in _arrays(sizes, num_prefix)]


def _feature_map(sizes: Sizes) -> kernels.FeatureMap:
    num = sizes.num_features or kernels.default_num_features(sizes.depth)
    projection = kernels.draw_orthogonal(jax.random.key(0), num, sizes.depth)
    return functools.partial(kernels.positive_features, projection=projection)


def _of_features(attention):
    def make(sizes):
        feature_map = _feature_map(sizes)
        return lambda q, k, v: attention(q, k, v, feature_map), _on_device(sizes)

    return make


def _plain(attention):
    return lambda sizes: (attention, _on_device(sizes))


def _banded(attention):
    def make(sizes):
        q, _, v = _on_device(sizes, num_prefix=1)
        table = np.random.default_rng(1).standard_normal((sizes.clip + 1, sizes.depth))
        function = functools.partial(
            attention, feature_map=_feature_map(sizes), grid=sizes.grid, num_prefix=1
        )
        return function, [q, v, jnp.asarray(table, jnp.float32)]

    return make


def scan_per_token(q, k, v, feature_map):
    """Causal linear attention as it is defined, one token a step of a scan."""
    queries, keys = (feature_map(x).dense() for x in (q, k))

    def step(state, token):
        sums, normalizer = state
        query, key, value = token
        sums = sums + key[..., :, None] * value[..., None, :]
        normalizer = normalizer + key
        weights = jnp.einsum("...f,...fe->...e", query, sums)
        total = jnp.einsum("...f,...f->...", query, normalizer)
        return (sums, normalizer), weights / total[..., None]

    tokens = [jnp.moveaxis(x, -2, 0) for x in (queries, keys, v)]
    sums = jnp.zeros((*queries.shape[:-2], queries.shape[-1], v.shape[-1]))
    _, out = jax.lax.scan(step, (sums, sums[..., 0]), tuple(tokens))
    return jnp.moveaxis(out, 0, -2).astype(v.dtype)


def gather_band(q, v, table, feature_map, *, grid, num_prefix):
    """Banded attention written the obvious way: gathers the band of every query."""
    clip = len(table) - 1
    weights = feature_map(q).dense() @ feature_map(table).dense().T
    far, total = weights[..., clip:], v.sum(axis=-2, keepdims=True)
    reach = np.arange(1 - clip, clip)
    band = np.stack(np.meshgrid(reach, reach, indexing="ij"), axis=-1).reshape(-1, 2)
    band = band[np.abs(band).sum(axis=-1) < clip]
    keys = offsets.grid_positions(grid).astype(int)[:, None] + band
    inside = ((keys >= 0) & (keys < grid)).all(axis=-1)
    indices = np.where(inside, num_prefix + keys @ (grid[1], 1), 0)
    # A prefix query has no band.
    prefix = [(num_prefix, 0), (0, 0)]
    inside, indices = np.pad(inside, prefix), np.pad(indices, prefix)
    near = (weights - far)[..., np.abs(band).sum(axis=-1)] * inside
    numerator = jnp.einsum("...nb,...nbe->...ne", near, v[..., indices, :])
    denominator = near.sum(axis=-1, keepdims=True) + far * v.shape[-2]
    return ((numerator + far * total) / denominator).astype(v.dtype)


def _torch_tensors(sizes):
    import torch

    dtype = getattr(torch, sizes.dtype)
    return [torch.tensor(x, dtype=dtype, requires_grad=True) for x in _arrays(sizes)]


def _softmax_pytorch(causal):
    def make(sizes):
        import torch

        attention = torch.nn.functional.scaled_dot_product_attention
        return functools.partial(attention, is_causal=causal), _torch_tensors(sizes)

    return make


def _performer_pytorch(causal):
    def make(sizes):
        from performer_pytorch import FastAttention

        num = sizes.num_features or kernels.default_num_features(sizes.depth)
        attention = FastAttention(sizes.depth, nb_features=num, causal=causal)
        return attention, _torch_tensors(sizes)

    return make


_TORCH = {"framework": "torch", "requires": ("torch",)}
_PERFORMER = {"framework": "torch", "requires": ("torch", "performer_pytorch")}
# As measured: scores, weights, their gradients and what lies between.
_DENSE = {"score_matrices": (2, 5)}

CASES: dict[str, Case] = {
    "linear": Case(_of_features(kernels.linear_attention)),
    "causal_linear": Case(_of_features(kernels.causal_linear_attention)),
    "scan_per_token": Case(_of_features(scan_per_token)),
    "banded": Case(_banded(kernels.banded_attention)),
    "gather_band": Case(_banded(gather_band)),
    "softmax": Case(_plain(kernels.softmax_attention), **_DENSE),
    "causal_softmax": Case(_plain(kernels.causal_softmax_attention), **_DENSE),
    "softmax_pytorch": Case(_softmax_pytorch(causal=False), **_TORCH),
    "causal_softmax_pytorch": Case(_softmax_pytorch(causal=True), **_TORCH),
    "performer_pytorch": Case(_performer_pytorch(causal=False), **_PERFORMER),
    "causal_performer_pytorch": Case(_performer_pytorch(causal=True), **_PERFORMER),
}

"""Kernels that `benchmarks.speed` can measure, and alternatives to compare with.

To add a kernel, add an entry to `CASES`.
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
from relattn.kernels import flash
from relattn.kernels.platform import use_platform


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of one measurement.

    Attributes:
        length: Number of tokens, without the CLS token of kernels on a grid.
        batch: Batch size.
        num_heads: Number of heads.
        head_dim: Components per head.
        clip: Largest distance of the banded kernels, near offset of the clipped ones.
        rank: Rank per head of LoR-Translution.
        dtype: Dtype of queries, keys and values.
        num_features: Number of random features; 0 for int(head_dim * ln(head_dim)).
        periodic: Whether the grid is a torus.
    """

    length: int
    batch: int = 2
    num_heads: int = 8
    head_dim: int = 32
    clip: int = 6
    rank: int = 8
    dtype: str = "float32"
    num_features: int = 0
    periodic: bool = False

    @property
    def width(self) -> int:
        """Components per token: all heads."""
        return self.num_heads * self.head_dim

    @property
    def grid(self) -> offsets.Grid:
        """The most nearly square grid with ``length`` tokens.

        Example:
            >>> Sizes(length=15).grid
            (3, 5)
        """
        height = math.isqrt(self.length)
        while self.length % height:
            height -= 1
        grid = (height, self.length // height)
        return offsets.Torus(grid) if self.periodic else grid


@dataclasses.dataclass(frozen=True)
class Case:
    """A function to measure.

    Attributes:
        make: Maps sizes to the function and its arguments.
        framework: ``"jax"`` or ``"torch"``.
        needs: Maps sizes to an estimate of the peak bytes of forward and of forward +
            backward, for cases that may not fit into memory.
        requires: Optional modules that the case imports.
    """

    make: Callable[[Sizes], tuple[Callable[..., Any], Sequence[Any]]]
    framework: str = "jax"
    needs: Callable[[Sizes], tuple[float, float]] = lambda sizes: (0, 0)
    requires: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        """Lists the required modules that are not installed."""
        return [name for name in self.requires if not importlib.util.find_spec(name)]


def _arrays(sizes: Sizes, num_prefix: int = 0) -> list[np.ndarray]:
    """Draws q, k and v, [batch, num_heads, num_prefix + length, head_dim]."""
    generator = np.random.default_rng(0)
    shape = (3, sizes.batch, sizes.num_heads, num_prefix + sizes.length, sizes.head_dim)
    return list(generator.standard_normal(shape, np.float32))


def _on_device(sizes: Sizes, num_prefix: int = 0) -> list[jax.Array]:
    return [jnp.asarray(x, sizes.dtype) for x in _arrays(sizes, num_prefix)]


def _feature_map(sizes: Sizes) -> kernels.FeatureMap:
    num = sizes.num_features or kernels.default_num_features(sizes.head_dim)
    projection = kernels.draw_orthogonal(jax.random.key(0), num, sizes.head_dim)
    return functools.partial(kernels.positive_features, projection=projection)


def _with_features(attention):
    def make(sizes):
        feature_map = _feature_map(sizes)
        return lambda q, k, v: attention(q, k, v, feature_map), _on_device(sizes)

    return make


def _plain(attention):
    return lambda sizes: (attention, _on_device(sizes))


def _offset_bias(attention, *, causal=False, features=True, **fixed):
    """Makes a case with a bias for every offset of the grid or, if causal, a line."""

    def make(sizes):
        grid = (sizes.length,) if causal else sizes.grid
        options = {**fixed} if causal else {**fixed, "grid": grid}
        options |= {"feature_map": _feature_map(sizes)} if features else {}
        shape = (sizes.num_heads, offsets.num_offsets(grid))
        inputs = [*_on_device(sizes), jax.random.normal(jax.random.key(1), shape)]
        return lambda q, k, v, b: attention(q, k, v, bias=b, **options), inputs

    return make


def _banded(attention):
    def make(sizes):
        q, _, v = _on_device(sizes, num_prefix=1)
        table = np.random.default_rng(1).standard_normal(
            (sizes.clip + 1, sizes.head_dim)
        )
        function = functools.partial(
            attention, feature_map=_feature_map(sizes), grid=sizes.grid, num_prefix=1
        )
        return function, [q, v, jnp.asarray(table, jnp.float32)]

    return make


def scan_per_token(q, k, v, feature_map):
    """Causal linear attention by definition: a scan with one token per step."""
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


def pairwise_toeplitz(q, k, v, feature_map, bias, *, grid=None):
    """Linear attention with an offset bias by definition: weights of all pairs."""
    line = (q.shape[-2],)
    bias = bias[..., offsets.offset_index(grid or line)]
    bias = bias if grid else jnp.where(np.tri(*line, dtype=bool), bias, -jnp.inf)
    queries, keys = (feature_map(x).dense() for x in (q, k))
    weights = jnp.exp(bias) * (queries @ keys.swapaxes(-2, -1))
    return weights @ v / weights.sum(axis=-1, keepdims=True)


def linear_products(q, k, v, feature_map):
    """The matrix products of linear attention alone: no features, no normaliser."""
    projection = feature_map.keywords["projection"].T
    return (q @ projection) @ ((k @ projection).swapaxes(-2, -1) @ v)


def dense_softmax(q, k, v):
    """Softmax attention by definition: the scores of all pairs at once."""
    scores = q @ k.swapaxes(-2, -1) / q.shape[-1] ** 0.5
    return jax.nn.softmax(scores, axis=-1) @ v


def gather_band(q, v, table, feature_map, *, grid, num_prefix):
    """Banded attention, naive: gathers the band of every query."""
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


def _as_on(platform, case, **changes):
    """Returns the case in the form of a platform, with changes of its defaults."""

    def make(sizes):
        function, inputs = case.make(sizes)

        def attend(*inputs):
            with use_platform(platform, **changes):
                return function(*inputs)

        return attend, inputs

    return dataclasses.replace(case, make=make)


def _on_torus(case):
    """Returns the case on a torus instead of a plain grid."""

    def make(sizes):
        return case.make(dataclasses.replace(sizes, periodic=True))

    return dataclasses.replace(case, make=make)


def _torch_tensors(sizes):
    import torch

    options = {
        "dtype": getattr(torch, sizes.dtype),
        # That of JAX, so that no GPU is compared with a CPU.
        "device": "cuda" if jax.default_backend() == "gpu" else "cpu",
        "requires_grad": True,
    }
    return [torch.tensor(x, **options) for x in _arrays(sizes)]


def _softmax_pytorch(causal):
    def make(sizes):
        import torch

        attention = torch.nn.functional.scaled_dot_product_attention
        return functools.partial(attention, is_causal=causal), _torch_tensors(sizes)

    return make


def _performer_pytorch(causal):
    def make(sizes):
        from performer_pytorch import FastAttention

        num = sizes.num_features or kernels.default_num_features(sizes.head_dim)
        attention = FastAttention(sizes.head_dim, nb_features=num, causal=causal)
        tensors = _torch_tensors(sizes)
        return attention.to(tensors[0].device), tensors

    return make


def _fla_causal_linear(sizes):
    """Makes a case that takes features as inputs and has no normaliser."""
    import torch
    from fla.ops.linear_attn import chunk_linear_attn

    num = sizes.num_features or kernels.default_num_features(sizes.head_dim)
    # flash-linear-attention has the heads after the tokens.
    q, k, v = (x.detach().transpose(1, 2) for x in _torch_tensors(sizes))
    projection = torch.randn(sizes.head_dim, num, dtype=q.dtype, device=q.device)
    q, k = ((x @ projection).relu().requires_grad_() for x in (q, k))

    def attend(q, k, v):
        return chunk_linear_attn(q, k, v, normalize=False)[0]

    return attend, [q, k, v.contiguous().requires_grad_()]


def _cudnn(causal):
    attention = functools.partial(flash.attend_by_cudnn, causal=causal)
    return lambda sizes: (attention, _on_device(sizes))


def _self_attention(attention):
    """Makes a case that includes the projections of the tokens."""

    def make(sizes):
        def attend(x, w_q, w_k, w_v):
            q, k, v = (jnp.einsum("bnc,che->bhne", x, w) for w in (w_q, w_k, w_v))
            return attention(q, k, v)

        weights = _weights(sizes, sizes.width, sizes.num_heads, sizes.head_dim)
        return attend, [_tokens(sizes), *weights]

    return make


def _translution(attention, *, causal=False, clipped=False):
    def make(sizes):
        clip = sizes.clip if clipped else None
        index, rows = _offset_index(sizes, causal, clip)
        weights = _weights(sizes, rows, sizes.width, sizes.num_heads, sizes.head_dim)
        function = functools.partial(attention, index=index)
        return function, [_tokens(sizes, index.num_prefix), *weights]

    return make


def _lor_translution(attention, *, causal=False):
    """Makes a case that includes all projections of a layer except the last."""

    def make(sizes):
        index, rows = _offset_index(sizes, causal)
        inner = sizes.rank * sizes.num_heads

        def attend(x, plain, down, tables, up):
            qkv = tuple(jnp.einsum("bnc,che->bhne", x, w) for w in plain)
            low = tuple(x @ w for w in down)
            out, low_out = attention(qkv, low, tuple(tables), index=index)
            return out + jnp.einsum("bhnr,hrge->bgne", low_out, up)

        return attend, [
            _tokens(sizes, index.num_prefix),
            _weights(sizes, sizes.width, sizes.num_heads, sizes.head_dim),
            _weights(sizes, sizes.width, inner),
            _weights(sizes, rows, inner, sizes.num_heads, sizes.rank),
            _weights(
                sizes, sizes.num_heads, sizes.rank, sizes.num_heads, sizes.head_dim
            )[0],
        ]

    return make


def _offset_index(sizes, causal, clip=None):
    """Returns the index of a kernel's tables and the number of their rows."""
    if causal:
        index = kernels.CausalOffsets(sizes.length, clip)
    else:
        index = kernels.Offsets(sizes.grid, num_prefix=1, clip=clip)
    where = {"causal": causal, "clip": clip}
    return index, offsets.num_table_rows(index.grid, index.num_prefix, **where)


def _tokens(sizes, num_prefix=0):
    shape = (sizes.batch, num_prefix + sizes.length, sizes.width)
    x = np.random.default_rng(0).standard_normal(shape, np.float32)
    return jnp.asarray(x, sizes.dtype)


def _weights(sizes, *shape):
    """Draws three arrays, for queries, keys and values."""
    generator = np.random.default_rng(1)
    weights = generator.standard_normal((3, *shape), np.float32) / sizes.width**0.5
    return [jnp.asarray(w, sizes.dtype) for w in weights]


def gather_translution(x, w_q, w_k, w_v, *, index):
    """Translution, naive: gathers the weights of every pair."""
    rows, value_rows, allowed = _pair_rows(index)
    q = jnp.einsum("bic,ijche->bhije", x, w_q[rows])
    k = jnp.einsum("bjc,ijche->bhije", x, w_k[rows if index.causal else rows.T])
    v = jnp.einsum("bjc,ijche->bhije", x, w_v[value_rows])
    scores = jnp.einsum("bhije,bhije->bhij", q, k) / w_q.shape[-1] ** 0.5
    weights = jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhij,bhije->bhie", weights, v)


def gather_lor_translution(qkv, low, tables, *, index):
    """LoR-Translution, naive: gathers the tables of every pair."""
    (q, k, v), (low_q, low_k, low_v), (t_q, t_k, t_v) = qkv, low, tables
    rows, value_rows, allowed = _pair_rows(index)
    low_q = jnp.einsum("bic,ijche->bhije", low_q, t_q[rows])
    low_k = jnp.einsum("bjc,ijche->bhije", low_k, t_k[rows if index.causal else rows.T])
    low_v = jnp.einsum("bjc,ijche->bhije", low_v, t_v[value_rows])
    scores = jnp.einsum("bhije,bhije->bhij", low_q, low_k)
    scores = (scores + jnp.einsum("bhie,bhje->bhij", q, k)) / q.shape[-1] ** 0.5
    weights = jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf), axis=-1)
    return weights @ v, jnp.einsum("bhij,bhije->bhie", weights, low_v)


def _pair_rows(index):
    """Returns table rows for queries and for values, and the pairs that attend."""
    if index.causal:
        rows = np.arange(index.length)[:, None] - np.arange(index.length)
        return np.maximum(rows, 0), np.maximum(rows, 0), rows >= 0
    rows = offsets.offset_index(index.grid, index.num_prefix)
    prefix = offsets.is_prefix(index.grid, index.num_prefix)
    value_rows = np.where(prefix | prefix[:, None], rows.T, rows)
    return rows, value_rows, np.ones_like(rows, bool)


def _score_matrices(sizes):
    """Estimates the bytes of arrays with one float32 per pair of tokens."""
    size = 4 * sizes.batch * sizes.num_heads * sizes.length**2
    # Measured: scores, weights, their gradients and temporaries.
    return 2 * size, 5 * size


def _gathered(*, low_rank=False):
    """Estimates the bytes of float32 matrices and projections per pair of tokens."""

    def needs(sizes):
        inner = sizes.rank * sizes.num_heads if low_rank else sizes.width
        pair = inner * inner + sizes.batch * inner
        size = 4 * sizes.length**2 * pair
        return 3 * size, 5 * size

    return needs


_TORCH = {"framework": "torch", "requires": ("torch",)}
_PERFORMER = {"framework": "torch", "requires": ("torch", "performer_pytorch")}

CASES: dict[str, Case] = {
    "linear": Case(_with_features(kernels.linear_attention)),
    "linear_products": Case(_with_features(linear_products)),
    "causal_linear": Case(_with_features(kernels.causal_linear_attention)),
    "scan_per_token": Case(_with_features(scan_per_token)),
    "toeplitz": Case(_offset_bias(kernels.toeplitz_linear_attention)),
    "causal_toeplitz": Case(
        _offset_bias(kernels.causal_toeplitz_linear_attention, causal=True)
    ),
    "toeplitz_by_pairs": Case(
        _offset_bias(kernels.toeplitz_linear_attention, dense_size=2**30)
    ),
    "toeplitz_by_fft": Case(
        _offset_bias(kernels.toeplitz_linear_attention, dense_size=0)
    ),
    "causal_toeplitz_by_pairs": Case(
        _offset_bias(
            kernels.causal_toeplitz_linear_attention, causal=True, dense_size=2**30
        )
    ),
    "causal_toeplitz_by_fft": Case(
        _offset_bias(
            kernels.causal_toeplitz_linear_attention, causal=True, dense_size=128
        )
    ),
    "pairwise_toeplitz": Case(_offset_bias(pairwise_toeplitz), needs=_score_matrices),
    "causal_pairwise_toeplitz": Case(
        _offset_bias(pairwise_toeplitz, causal=True), needs=_score_matrices
    ),
    "relative_bias": Case(_offset_bias(kernels.relative_attention, features=False)),
    "causal_relative_bias": Case(
        _offset_bias(kernels.causal_relative_attention, causal=True, features=False)
    ),
    "banded": Case(_banded(kernels.banded_attention)),
    "gather_band": Case(_banded(gather_band)),
    "translution": Case(_translution(kernels.translution)),
    "causal_translution": Case(_translution(kernels.translution, causal=True)),
    "clipped_translution": Case(_translution(kernels.translution, clipped=True)),
    "causal_clipped_translution": Case(
        _translution(kernels.translution, causal=True, clipped=True)
    ),
    "lor_translution": Case(_lor_translution(kernels.lor_translution)),
    "causal_lor_translution": Case(
        _lor_translution(kernels.lor_translution, causal=True)
    ),
    "gather_translution": Case(_translution(gather_translution), needs=_gathered()),
    "gather_causal_translution": Case(
        _translution(gather_translution, causal=True), needs=_gathered()
    ),
    "gather_lor_translution": Case(
        _lor_translution(gather_lor_translution), needs=_gathered(low_rank=True)
    ),
    "gather_causal_lor_translution": Case(
        _lor_translution(gather_lor_translution, causal=True),
        needs=_gathered(low_rank=True),
    ),
    "self_attention": Case(_self_attention(kernels.softmax_attention)),
    "causal_self_attention": Case(_self_attention(kernels.causal_softmax_attention)),
    "softmax": Case(_plain(kernels.softmax_attention)),
    "causal_softmax": Case(_plain(kernels.causal_softmax_attention)),
    "dense_softmax": Case(_plain(dense_softmax), needs=_score_matrices),
    "softmax_pytorch": Case(_softmax_pytorch(causal=False), **_TORCH),
    "causal_softmax_pytorch": Case(_softmax_pytorch(causal=True), **_TORCH),
    "cudnn_softmax": Case(_cudnn(causal=False), requires=("jax_plugins",)),
    "causal_cudnn_softmax": Case(_cudnn(causal=True), requires=("jax_plugins",)),
    "fla_causal_linear": Case(
        _fla_causal_linear, framework="torch", requires=("torch", "fla")
    ),
    "performer_pytorch": Case(_performer_pytorch(causal=False), **_PERFORMER),
    "causal_performer_pytorch": Case(_performer_pytorch(causal=True), **_PERFORMER),
}
# The forms for CPUs and for TPUs.
CASES |= {
    f"{name}_by_{form}": _as_on("gpu", CASES[name], translution=form)
    for form in ("offsets", "rows")
    for name in (
        "translution",
        "lor_translution",
        "causal_translution",
        "causal_lor_translution",
    )
}
CASES |= {
    f"{name}_torus": _on_torus(CASES[name])
    for name in (
        "toeplitz_by_pairs",
        "toeplitz_by_fft",
        "relative_bias",
        "banded",
        "translution",
        "lor_translution",
    )
}
# Kernels for GPUs that are off by default.
CASES |= {
    f"{name}_pallas": _as_on("gpu", CASES[name], **{setting: True})
    for setting, names in {
        "fused_linear": ("linear", "causal_linear"),
        "fused_softmax": (
            *("softmax", "causal_softmax"),
            *("relative_bias", "causal_relative_bias"),
        ),
        "fused_translution": ("lor_translution", "causal_lor_translution"),
    }.items()
    for name in names
}

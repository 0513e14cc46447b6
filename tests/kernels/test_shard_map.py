"""Tests kernels in `jax.shard_map`, which checks what varies between devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from relattn import kernels
from relattn.kernels.platform import use_platform
from tests.helpers.quick import quick_jit

N, DIM, WIDTH = 12, 4, 3


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def linear(kernel, features="positive", **options):
    def attend(q, k, v, w):
        feature_map = getattr(kernels, f"{features}_features")
        feature_map = functools.partial(feature_map, projection=w)
        return kernel(q, k, v, feature_map, **options)

    return attend


def relative(q, k, v, w):
    table = jnp.tile(w, (5, 1))[: 2 * N - 1]
    return kernels.relative_attention(q, k, v, grid=(N,), value_table=table)


def local(q, k, v, w):
    return kernels.local_attention(q, k * w[0], v, window=4)


def banded(q, k, v, w):
    phi = functools.partial(kernels.positive_features, projection=draw(5, 5, DIM))
    return kernels.banded_attention(q + k, v, w[:2], phi, grid=(3, 4))


def translution(q, k, v, w):
    tables = draw(6, 3, 2 * N - 1, 2 * DIM, 1, WIDTH) * w[0, 0]
    x = jnp.concatenate(jnp.broadcast_arrays(q + k, v), axis=-1)
    return kernels.translution(x, *tables, index=kernels.Offsets((N,)))


def by_pairs(index):
    """Translution in the form for GPUs, in several blocks."""

    def attend(q, k, v, w):
        tables = draw(6, 3, 2 * N - 1, 2 * DIM, 1, WIDTH) * w[0, 0]
        x = jnp.concatenate(jnp.broadcast_arrays(q + k, v), axis=-1)
        with use_platform("cpu", translution="pairs", pair_bytes=6000):
            return kernels.translution(x, *tables, index=index)

    return attend


CAUSAL = kernels.causal_linear_attention
# Each one loops, with a carry or derivatives of its own.
KERNELS = {
    "linear": linear(kernels.linear_attention, chunk_size=4),
    "positive": linear(CAUSAL, chunk_size=4),
    "trigonometric": linear(CAUSAL, "trigonometric", chunk_size=4),
    "relu": linear(CAUSAL, "relu", chunk_size=4),
    "segments": linear(
        CAUSAL, chunk_size=4, segment_ids=jax.device_put(np.arange(N) // 5)
    ),
    "fft": linear(
        kernels.toeplitz_linear_attention,
        bias=draw(2, 2 * N - 1),
        grid=(N,),
        dense_size=1,
    ),
    "relative": relative,
    "local": local,
    "banded": banded,
    "translution": translution,
    "translution by pairs": by_pairs(kernels.Offsets((N,))),
    "translution by diagonals": by_pairs(kernels.CausalOffsets(N)),
}


@pytest.mark.quick("positive-queries", "translution by pairs-values")
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="needs simulated devices")
@pytest.mark.parametrize("split", ["all", "queries", "values"])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_are_the_same_in_shard_map(name, split):
    """The batch is split, of all arguments or some; the weights are everywhere."""
    batch = PartitionSpec("d")
    specs = {
        "all": (batch, batch, batch),
        "queries": (batch, PartitionSpec(), PartitionSpec()),
        "values": (PartitionSpec(), PartitionSpec(), batch),
    }[split]
    q, k, v = (
        draw(i, 2 if spec == batch else 1, N, DIM) for i, spec in enumerate(specs)
    )
    arguments, specs = (q, k, v, draw(4, 5, DIM)), (*specs, PartitionSpec())
    mesh = Mesh(jax.devices()[:2], "d")
    attend = KERNELS[name]
    shared = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=batch)
    cotangent = draw(7, *jax.eval_shape(attend, *arguments).shape)

    @quick_jit
    def outs(*arguments):
        results = []
        for function in (attend, shared):
            out, pull_back = jax.vjp(function, *arguments)
            results.append((out, pull_back(cotangent)))
        return results

    expected, found = outs(*arguments)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
        found,
        expected,
    )

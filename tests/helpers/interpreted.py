"""Kernels for GPUs in Pallas' interpreter, on the CPU."""

import functools
import multiprocessing
import os
from concurrent import futures
from unittest import mock

import jax
from jax.experimental import pallas as pl

from relattn.kernels.pallas_gpu import products


def interpret(monkeypatch, module, **sizes):
    """Runs a module's kernels on the CPU, on small blocks.

    Args:
        monkeypatch: The fixture.
        module: A module of `relattn.kernels.pallas_gpu`.
        **sizes: Constants of the module, instead of those for a GPU.
    """
    monkeypatch.setattr(products, "TILE", 4)
    for name, size in sizes.items():
        monkeypatch.setattr(module, name, size)
    # CPUs have no TF32.
    exact = dict.fromkeys(products.ALGORITHMS, jax.lax.Precision.HIGHEST)
    monkeypatch.setattr(products, "ALGORITHMS", exact)
    call = functools.partial(pl.pallas_call, interpret=True)
    monkeypatch.setattr(pl, "pallas_call", call)


def largest_array(function, *inputs):
    """Returns the size of the largest result of an operation, forward and backward."""

    def gradients(*inputs):
        out, pullback = jax.vjp(function, *inputs)
        return pullback(out)

    lines = jax.make_jaxpr(gradients)(*inputs).eqns
    return max(result.aval.size for line in lines for result in line.outvars)


def count_for_h100(function, *shapes, **settings):
    """Counts the kernels of Pallas in a program for a GPU that need not be there.

    Only a process that asks for CPUs has the GPU's compiler without a GPU: see
    `call_alone`.

    Args:
        function: The function.
        *shapes: A shape and a dtype for each argument, or None for None.
        **settings: Fields of `relattn.kernels.platform.PlatformDefaults`.

    Returns:
        The number of calls in the compiled program.
    """
    from benchmarks import compiled
    from relattn.kernels.platform import use_platform

    target = compiled.TARGETS["h100"]
    device = compiled.describe_device(target)
    mesh = jax.sharding.Mesh([device], "d")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    arguments = [
        given and jax.ShapeDtypeStruct(*given, sharding=sharding) for given in shapes
    ]
    with (
        # From JAX 0.12 on, Pallas needs a device that a mesh names.
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
        use_platform("gpu", **settings),
    ):
        lowered = jax.jit(function).lower(*arguments)
        text = lowered.compile(dict(target.options)).as_text()
    return text.count('custom_call_target="__gpu$xla.gpu.triton"')


def call_alone(function, *arguments):
    """Calls a function in a process with one CPU device and all optimisations."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")
    }
    spawn = multiprocessing.get_context("spawn")
    with (
        mock.patch.dict(os.environ, kept | {"JAX_PLATFORMS": "cpu"}, clear=True),
        futures.ProcessPoolExecutor(1, mp_context=spawn) as process,
    ):
        return process.submit(function, *arguments).result()

"""Less work: few programs, compiled with few optimisations.

JAX compiles a program for every operation on arrays of a new shape that is not in a
compiled function, and for `jnp.asarray` too; each takes as long as a small test.
"""

import functools

import jax
import numpy as np

OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_cpu_use_fusion_emitters": False,
    "xla_llvm_disable_expensive_passes": True,
}


def quick_jit(function, **static):
    """Compiles like `jax.jit`, without most of the compiler's optimisations.

    If this version of XLA lacks one of the options, none is passed.

    Args:
        function: The function.
        **static: Arguments of the function that are not arrays.

    Returns:
        The compiled function of the other arguments.
    """
    function = functools.partial(function, **static) if static else function
    return jax.jit(function, compiler_options=_options())


def run(function, *args):
    """Computes ``function(*args)`` in one program; returns arrays of NumPy."""
    return jax.device_get(quick_jit(function)(*args))


def normal(seed, *shape, scale=1.0):
    """Draws normal numbers of NumPy, in float32."""
    values = np.random.default_rng(seed).standard_normal(shape)
    return (scale * values).astype(np.float32)


def normal_like(tree, *, scale=1.0, seed=0):
    """Draws normal numbers in the shapes and dtypes of a tree."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: (scale * rng.normal(size=leaf.shape)).astype(leaf.dtype), tree
    )


@functools.cache
def _options():
    try:
        jax.jit(lambda x: x, compiler_options=OPTIONS)(0.0)
    except jax.errors.JaxRuntimeError:
        return None
    return OPTIONS

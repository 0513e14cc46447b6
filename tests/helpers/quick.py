"""`jax.jit` for small programs, where compiling is most of the work."""

import functools

import jax

OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_cpu_use_fusion_emitters": False,
    "xla_llvm_disable_expensive_passes": True,
}


def quick_jit(function):
    """Compiles like `jax.jit`, without most of the compiler's optimisations.

    If this version of XLA lacks one of the options, none is passed.
    """
    return jax.jit(function, compiler_options=_options())


@functools.cache
def _options():
    try:
        jax.jit(lambda x: x, compiler_options=OPTIONS)(0.0)
    except jax.errors.JaxRuntimeError:
        return None
    return OPTIONS

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
    """`jax.jit` without most of the compiler's optimisations."""
    return jax.jit(function, compiler_options=_known_options())


@functools.cache
def _known_options():
    return dict(filter(_is_known, OPTIONS.items()))


def _is_known(option):
    """Whether this version of XLA has an option."""
    try:
        jax.jit(lambda x: x, compiler_options=dict([option]))(0.0)
    except jax.errors.JaxRuntimeError:
        return False
    return True

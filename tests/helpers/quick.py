"""Less work: `jax.jit` with few optimisations, and marks of slow tests."""

import functools

import jax
import pytest

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
        **static: Arguments of the function that are no arrays.

    Returns:
        The compiled function of the other arguments.
    """
    function = functools.partial(function, **static) if static else function
    return jax.jit(function, compiler_options=_options())


@functools.cache
def _options():
    try:
        jax.jit(lambda x: x, compiler_options=OPTIONS)(0.0)
    except jax.errors.JaxRuntimeError:
        return None
    return OPTIONS


def mark_slow(values, quick):
    """Returns the parameters of a test; all but the ``quick`` ones are marked slow."""
    assert all(value in values for value in quick)
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if value in quick else pytest.mark.slow,
        )
        for value in values
    ]

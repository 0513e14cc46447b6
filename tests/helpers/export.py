"""Exports functions with symbolic sizes."""

import contextlib

import jax
import jaxtyping

from tests.helpers.quick import quick_jit

PLATFORMS = ("cpu", "cuda", "tpu")


@contextlib.contextmanager
def unchecked_annotations():
    """Lets sizes be symbolic where annotations say int, and arrays be NumPy's."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


def export(function, *args):
    """Exports a function for all platforms."""
    with unchecked_annotations():
        make = jax.export.export(quick_jit(function), platforms=PLATFORMS)
        return make(*args)

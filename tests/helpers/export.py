"""Exports functions with symbolic sizes."""

import jax
import jaxtyping

from tests.helpers.quick import quick_jit

PLATFORMS = ("cpu", "cuda", "tpu")


def export(function, *args):
    """Exports a function for all platforms; annotations say int for symbolic sizes."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        make = jax.export.export(quick_jit(function), platforms=PLATFORMS)
        return make(*args)
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)

"""Settings of a process that runs tests: devices, compilation and memory."""

import gc
import os
import tempfile
from pathlib import Path

import chex
import jax

NUM_DEVICES = 4
# Linux allows a process 65,530; the largest file needs 20,000.
MOST_MAPS = 30_000


def simulate_devices():
    """Simulates CPU devices, if JAX has not started yet."""
    # With one thread per device, two collectives of a program can wait for each other.
    os.environ.setdefault("NPROC", str(2 * NUM_DEVICES))
    chex.set_n_cpu_devices(NUM_DEVICES)


def compile_quickly():
    """Leaves out what takes long for small programs, where optimisations are off."""
    # These options of XLA exist only in JAX 0.10.
    if "JAX_DISABLE_MOST_OPTIMIZATIONS" in os.environ and jax.__version__ < "0.11":
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = (
            f"{flags} --xla_cpu_use_fusion_emitters=false"
            " --xla_cpu_parallel_codegen_split_count=1"
        )


def multiply_exactly():
    """Tolerances are for float32; accelerators multiply with fewer bits by default."""
    jax.config.update("jax_default_matmul_precision", "highest")


def keep_programs():
    """Keeps what this process compiles, unless a folder for it is set.

    Many files train the same small models. Other processes do not share the folder,
    since they may be killed as they write.

    Returns:
        A function that deletes the folder.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return lambda: None
    folder = tempfile.TemporaryDirectory()
    jax.config.update("jax_compilation_cache_dir", folder.name)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # They must not fill the user's folder either.
    os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")
    return folder.cleanup


def free_programs():
    """Clears what was compiled once it takes many of a process's memory maps."""
    maps = Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()


def collect_garbage_rarely():
    """Tracing makes many objects, and few cycles."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def repeat_examples():
    """Lets Hypothesis draw the same examples in every run, however fast it is."""
    import hypothesis

    hypothesis.settings.register_profile(
        "relattn", derandomize=True, deadline=None, max_examples=60, database=None
    )
    hypothesis.settings.load_profile("relattn")

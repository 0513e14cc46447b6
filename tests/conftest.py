"""What every test shares: four simulated devices, and how programs are compiled."""

import dataclasses
import gc
import os
import resource
import tempfile
from pathlib import Path

import chex
import hypothesis
import jax
import pytest

from relattn.kernels import platform

NUM_DEVICES = 4
STARTED = pytest.StashKey[float]()
# Folders whose examples build modules and models.
SLOW_EXAMPLES = ("relattn/nn/", "relattn/models/")
# Processor seconds of a test that is not marked slow, with what it sets up.
MOST_SECONDS = 15
# Linux allows a process 65,530; the largest file needs 20,000.
MOST_MAPS = 30_000
# The same examples in every run, whatever the machine's speed.
hypothesis.settings.register_profile(
    "relattn", derandomize=True, deadline=None, max_examples=60, database=None
)
hypothesis.settings.load_profile("relattn")


def pytest_configure(config):
    """Simulates four CPU devices; keeps what this process compiles until it ends.

    Many files train the same small models. Other processes do not share the folder,
    since they may be killed as they write.
    """
    # These options of XLA exist only in JAX 0.10.
    if "JAX_DISABLE_MOST_OPTIMIZATIONS" in os.environ and jax.__version__ < "0.11":
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = (
            f"{flags} --xla_cpu_use_fusion_emitters=false"
            " --xla_cpu_parallel_codegen_split_count=1"
        )
    # With one thread per device, two collectives of a program can wait for each other.
    os.environ.setdefault("NPROC", str(2 * NUM_DEVICES))
    chex.set_n_cpu_devices(NUM_DEVICES)
    # Tolerances are for float32; accelerators multiply with fewer bits by default.
    jax.config.update("jax_default_matmul_precision", "highest")
    if jax.config.jax_compilation_cache_dir is None:
        folder = tempfile.TemporaryDirectory()
        config.add_cleanup(folder.cleanup)
        jax.config.update("jax_compilation_cache_dir", folder.name)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        # Nor shall they fill the user's folder.
        os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks cases as slow; puts the longest files first, so that no process waits."""
    missing = {}
    for item in items:
        if quick := item.get_closest_marker("quick"):
            family, case = item.nodeid.split("[", 1)[0], item.callspec.id
            missing.setdefault(family, set(quick.args)).discard(case)
            if case not in quick.args:
                item.add_marker(pytest.mark.slow)
        elif item.nodeid.startswith(SLOW_EXAMPLES):
            item.add_marker(pytest.mark.slow)
    if any(missing.values()) and not any("::" in arg for arg in config.args):
        missing = {family: ids for family, ids in missing.items() if ids}
        raise pytest.UsageError(f"the mark `quick` names no case: {missing}")
    longest = ["test_contracts.py", "test_pairs.py"]
    items.sort(key=lambda item: tuple(item.path.name != name for name in longest))


def processor_seconds():
    """Returns the time that this process and its children have used processors."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    item.stash[STARTED] = processor_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Fails a test that is slow and not marked so."""
    yield
    seconds = processor_seconds() - item.stash[STARTED]
    if seconds > MOST_SECONDS and not item.get_closest_marker("slow"):
        pytest.fail(f"{seconds:.0f} s of processor time: mark it slow")


def pytest_collection_finish():
    """Makes garbage collections rare: tracing makes many objects, and few cycles."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.fixture(params=["dense", "blocks"])
def form(request, monkeypatch):
    """Computes softmax attention at once, or in blocks of few queries."""
    if request.param == "blocks":
        few = dataclasses.replace(platform.PLATFORM_DEFAULTS["cpu"], block_scores=29)
        monkeypatch.setitem(platform.PLATFORM_DEFAULTS, "cpu", few)
    return request.param


@pytest.fixture(autouse=True, scope="module")
def _free_programs():
    """Clears what was compiled once it takes many of a process's memory maps."""
    yield
    maps = Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()

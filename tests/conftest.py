"""What every test shares: four simulated devices, and programs freed after a file."""

import chex
import jax
import pytest

NUM_DEVICES = 4


def pytest_configure(config):
    """Simulates four CPU devices for the tests of data parallelism."""
    chex.set_n_cpu_devices(NUM_DEVICES)


@pytest.fixture(autouse=True, scope="module")
def _free_programs():
    """Forgets what a file has compiled: memory maps of a process are limited."""
    yield
    jax.clear_caches()

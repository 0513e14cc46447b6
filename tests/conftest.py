"""What every test shares: four simulated devices, set before JAX starts."""

import chex

NUM_DEVICES = 4


def pytest_configure(config):
    """Simulates four CPU devices for the tests of data parallelism."""
    chex.set_n_cpu_devices(NUM_DEVICES)

"""The table of mechanisms that tests/test_contracts.py tests."""

from tests import reference
from tests.mechanisms import attention, efficient, fourier, positions, translution
from tests.mechanisms.base import N

MECHANISMS = [
    *attention.MECHANISMS,
    *positions.MECHANISMS,
    *translution.MECHANISMS,
    *efficient.MECHANISMS,
    *fourier.MECHANISMS,
]

# Kernels that take a grid, on a grid of one axis.
LINES = [*attention.LINES, *translution.on_line(reference.offset_rows((N,)))]
# The same kernels on a torus.
TORI = [*attention.TORI, *translution.on_torus(), *fourier.TORI]
# And on a grid of three axes.
VOLUMES = [*attention.VOLUMES, *translution.in_volume(), *fourier.VOLUMES]

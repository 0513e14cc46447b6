"""Flax modules with the parameters of the kernels."""

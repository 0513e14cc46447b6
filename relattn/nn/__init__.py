"""Flax modules that own the parameters of the kernels."""

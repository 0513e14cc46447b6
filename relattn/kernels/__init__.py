"""Attention kernels: pure functions on arrays."""

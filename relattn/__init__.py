"""Relative and linear attention in JAX and Flax."""

"""Naive float64 references of every kernel, written to be read.

Each function takes and returns arrays without leading axes, spells its equation out
pair by pair, and is never compiled. Run them under ``jax.enable_x64(True)``.
"""

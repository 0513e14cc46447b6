"""Benchmarks: speed, memory, the input pipeline, and hours of training."""

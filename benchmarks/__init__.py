"""Benchmarks: speed, memory, input pipeline and hours of training."""

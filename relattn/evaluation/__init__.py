"""Evaluation: shift robustness, sizes and speed."""

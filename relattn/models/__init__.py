"""Models built from the attention modules."""

"""Position encodings as Flax modules."""

"""Position encodings as functions on arrays."""

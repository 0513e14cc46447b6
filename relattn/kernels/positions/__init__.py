"""Position encodings as pure functions on arrays."""

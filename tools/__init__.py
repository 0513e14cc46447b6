"""Tools that make what the repository holds."""

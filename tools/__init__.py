"""Tools that write the data files in this repository."""

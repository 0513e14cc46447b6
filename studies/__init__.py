"""The studies: the published tables, trained and compared."""

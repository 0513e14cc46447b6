"""Translution: attention whose projections depend on the offset of the pair."""

"""Traces in: the schema, the store, one adapter a source, splits, and a generator with a known law."""

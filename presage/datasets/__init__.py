"""Traces: schema, store, readers of trace formats, ingestion, splits, and synthetic processes."""

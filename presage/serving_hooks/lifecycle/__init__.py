"""Lifecycle events: what happens to running workflows, for whoever prepares and releases what they need."""

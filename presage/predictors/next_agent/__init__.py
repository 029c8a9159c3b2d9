"""The next agents of a workflow."""

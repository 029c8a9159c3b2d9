"""Spans of OpenTelemetry, OpenInference and MLflow, in files or a live store."""

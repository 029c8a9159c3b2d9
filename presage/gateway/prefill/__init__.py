"""Prefill ahead: the known beginning of a workflow's next prompt is read by the server while the tool runs."""

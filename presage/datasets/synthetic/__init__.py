"""Traces, lengths and outcomes drawn from known processes, with the best forecast anyone could make."""

"""Synthetic traces, lengths and outcomes with known optimal forecasts."""

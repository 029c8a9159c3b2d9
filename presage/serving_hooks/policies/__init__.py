"""Scheduling and cache policies that use forecasts. Pure Python: no vLLM, no torch, no clock, no randomness."""
